"""Delivering events: what is sent, what is kept of it, and when it is sent again.

Time is virtual; most sockets are real."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec import structs

from conveyor.domain.deliveries import (
    LADDER,
    LONGEST,
    SHORTENED,
    DeliveryStatus,
    EventDelivery,
    begin_attempt,
    replayed,
)
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.signatures import verify
from conveyor.domain.webhooks import Webhook
from conveyor.handlers.deliver import LEASE
from conveyor.ports.webhooks import WebhookAnswer
from conveyor.records.signed_events import KEY_UNREADABLE
from tests.unit.delivery_world import DeliveryWorld, delivery_world, receiving
from tests.unit.wired_handlers import deliverer

NEVER = "https://hooks.test/"
WEEK = 7 * 86_400


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def world(tmp_path: Path, anyio_backend: str) -> AsyncIterator[DeliveryWorld]:
    async with delivery_world(tmp_path) as world:
        yield world


class Receivers:
    """Receivers that answer in no time, with the next of `answers`, the last one for ever.

    `meanwhile` is called once, while a request is under way.
    """

    def __init__(self, *answers: WebhookAnswer) -> None:
        self.answers = list(answers)
        self.sent: list[tuple[str, Mapping[str, str], bytes]] = []
        self.meanwhile: Any = None

    async def check_url(self, url: str) -> None:
        raise AssertionError(url)

    async def post_event(
        self, url: str, *, headers: Mapping[str, str], body: bytes
    ) -> WebhookAnswer:
        self.sent.append((url, headers, body))
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            await meanwhile()
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    async def aclose(self) -> None:
        """Nothing is under way."""


GOOD = WebhookAnswer(status=200, host="hooks.test")
BAD = WebhookAnswer(status=500, error="http_5xx:500", host="hooks.test")


def answering(world: DeliveryWorld, *answers: WebhookAnswer) -> Receivers:
    """Let the deliverer of a world have such receivers."""
    receivers = Receivers(*answers)
    clock, telemetry = world.api.clock, world.telemetry
    world.deliverer = deliverer(world.api.binding, clock, receivers, observer=telemetry)
    return receivers


# -- what is sent, and what is kept --


async def test_an_event_is_delivered_once(world: DeliveryWorld) -> None:
    async with receiving("200 OK") as receiver:
        await world.owe(receiver.url)
        await world.look()
        await world.look(after=WEEK)

    delivery = await world.delivery()
    [request] = receiver.requests
    assert (request.path, request.body) == ("/hook?token=hush", delivery.body)
    assert request.headers["X-ZenRows-Event-Id"] == delivery.delivery_id
    assert request.headers["X-Conveyor-Attempt"] == "1"
    assert request.headers["Content-Type"] == "application/json"
    assert "X-Conveyor-Replay" not in request.headers
    assert "X-Signature" not in request.headers
    assert (delivery.status, delivery.due_at) == (DeliveryStatus.DELIVERED, 0)
    [attempt] = delivery.attempts
    assert (attempt.number, attempt.outcome, attempt.status) == (1, "delivered", 200)
    assert (attempt.host, attempt.length, attempt.next_at) == ("127.0.0.1", 0, 0)
    assert world.telemetry.webhook_attempts == {"delivered": 1}


async def test_a_signed_event_verifies_and_its_log_has_no_whole_signature(
    world: DeliveryWorld,
) -> None:
    made = [(await world.api.client.post("/v1/hmac/keys/rotate")).json() for _ in range(2)]
    async with receiving("200 OK") as receiver:
        await world.owe(receiver.url, signed=True)
        await world.look()

    [request] = receiver.requests
    now = world.api.clock.now() // 1_000
    for key in made:
        assert verify(request.body, request.headers, key["secret"], now=now)
    [attempt] = (await world.delivery()).attempts
    shown = attempt.headers
    assert f"kid={made[0]['kid']}" in shown["X-Signature"]
    digest = request.headers["X-Signature"].partition("v1=")[2].partition(",")[0]
    assert digest[:8] in shown["X-Signature"]
    assert digest[:9] not in shown["X-Signature"]
    first, second = request.headers["webhook-signature"].split(" ")
    assert shown["webhook-signature"] == f"{first[:11]}… {second[:11]}…"


async def test_an_event_whose_key_is_unreadable_is_not_sent_and_climbs_the_ladder(
    world: DeliveryWorld, caplog: pytest.LogCaptureFixture
) -> None:
    async with receiving("200 OK") as receiver:
        await world.owe(receiver.url, signed=True)
        with caplog.at_level(logging.INFO):
            await world.look()
        delivery = await world.delivery()
        assert receiver.connections == 0
        assert delivery.status is DeliveryStatus.PENDING
        assert [one.outcome for one in delivery.attempts] == [KEY_UNREADABLE]
        assert world.telemetry.webhook_attempts == {"transport_error": 1}
        assert "hush" not in caplog.text
        await world.api.client.post("/v1/hmac/keys/rotate")
        await world.look(after=LADDER[0])

    assert (await world.delivery()).status is DeliveryStatus.DELIVERED
    assert [one.headers["X-Conveyor-Attempt"] for one in receiver.requests] == ["2"]


@pytest.mark.guarantee("G20")
async def test_a_failed_event_is_sent_again_with_the_same_bytes_and_a_fresh_signature(
    world: DeliveryWorld, caplog: pytest.LogCaptureFixture
) -> None:
    secret = (await world.api.client.post("/v1/hmac/keys/rotate")).json()["secret"]
    async with receiving("500 x", "404 x", "302 x\r\nLocation: /other", "200 OK") as receiver:
        await world.owe(receiver.url, signed=True)
        with caplog.at_level(logging.INFO):
            for wait in (0, *LADDER[:3]):
                await world.look(after=wait)
                now = world.api.clock.now() // 1_000
                last = receiver.requests[-1]
                assert verify(last.body, last.headers, secret, now=now)

    delivery = await world.delivery()
    assert delivery.status is DeliveryStatus.DELIVERED
    outcomes = ["http_5xx:500", "http_4xx:404", "http_3xx:302", "delivered"]
    assert [one.outcome for one in delivery.attempts] == outcomes
    assert {one.body for one in receiver.requests} == {delivery.body}
    numbers = [one.headers["X-Conveyor-Attempt"] for one in receiver.requests]
    assert numbers == ["1", "2", "3", "4"]
    assert len({one.headers["webhook-timestamp"] for one in receiver.requests}) == 4
    assert "hush" not in caplog.text


async def test_a_receiver_that_is_not_there_is_a_failure(world: DeliveryWorld) -> None:
    async with receiving() as receiver:
        url = receiver.url
    await world.owe(url)
    await world.look()

    [attempt] = (await world.delivery()).attempts
    assert attempt.outcome == "transport_error:unreachable"
    assert attempt.host == "127.0.0.1"


# -- the ladder --


@pytest.mark.guarantee("G20")
async def test_a_receiver_that_always_fails_gets_ten_attempts(world: DeliveryWorld) -> None:
    async with receiving("500 x") as receiver:
        await world.owe(receiver.url)
        began = world.api.clock.now()
        while (delivery := await world.delivery()).status is DeliveryStatus.PENDING:
            await world.look(after=(delivery.due_at - world.api.clock.now()) / 1_000)
        await world.look(after=WEEK)

    assert delivery.status is DeliveryStatus.FAILED
    starts = [one.started_at for one in delivery.attempts]
    waits = [(after - before) / 1_000 for before, after in zip(starts, starts[1:], strict=False)]
    assert len(receiver.requests) == len(starts) == 10
    assert starts[0] == began
    assert all(
        rung * (1 - SHORTENED) <= wait <= rung for wait, rung in zip(waits, LADDER, strict=True)
    )
    assert starts[-1] - starts[0] <= LONGEST * 1_000
    # Each attempt tells when the next one will be.
    assert [one.next_at for one in delivery.attempts] == [*starts[1:], 0]


@pytest.mark.guarantee("G20")
async def test_an_event_that_was_owed_for_a_week_is_sent_all_the_same(
    world: DeliveryWorld,
) -> None:
    async with receiving("503 x", "200 OK") as receiver:
        await world.owe(receiver.url)
        await world.look(after=WEEK)
        assert len(receiver.requests) == 1
        await world.look(after=LADDER[0])

    assert (await world.delivery()).status is DeliveryStatus.DELIVERED


async def test_an_answer_moves_the_next_attempt(world: DeliveryWorld) -> None:
    async with receiving("503 x\r\nRetry-After: 120", "410 Gone") as receiver:
        await world.owe(receiver.url)
        await world.look()
        began = world.api.clock.now()
        assert (await world.delivery()).due_at == began + 120_000
        await world.look(after=120)
        assert (await world.delivery()).due_at == began + (120 + 3_600) * 1_000
        await world.look(after=3_600)

    assert (await world.delivery()).status is DeliveryStatus.FAILED
    assert len(receiver.requests) == 3


# -- what is no longer owed --


async def remove_webhook(world: DeliveryWorld, job: dict[str, Any]) -> None:
    await world.set_webhook(job, None)


async def delete_job(world: DeliveryWorld, job: dict[str, Any]) -> None:
    await world.api.client.delete(f"/v1/jobs/{job['job_id']}")


async def delete_run(world: DeliveryWorld, job: dict[str, Any]) -> None:
    path = f"/v1/jobs/{job['job_id']}/runs/{job['latest_run']['run_id']}"
    assert (await world.api.client.delete(path)).status_code == 202


async def purge_run(world: DeliveryWorld, job: dict[str, Any]) -> None:
    await delete_run(world, job)
    await world.api.binding.runs.purge_run(job["latest_run"]["run_id"])


@pytest.mark.parametrize("change", [remove_webhook, delete_job, delete_run, purge_run])
async def test_what_is_owed_is_dropped(world: DeliveryWorld, change: Any) -> None:
    async with receiving("500 x") as receiver:
        job = await world.owe(receiver.url)
        await world.look()
        await change(world, job)
        await world.look(after=LADDER[0])

    assert len(receiver.requests) == 1
    assert (await world.delivery()).status is DeliveryStatus.DROPPED


async def test_a_changed_webhook_counts_for_the_next_attempt(world: DeliveryWorld) -> None:
    async with receiving("500 x") as old, receiving("200 OK") as new:
        job = await world.owe(old.url)
        await world.look()
        await world.set_webhook(job, Webhook(new.url))
        await world.look(after=LADDER[0])

    assert (len(old.requests), len(new.requests)) == (1, 1)


# -- workers that are lost, and changes meanwhile --


async def test_two_workers_make_an_attempt_once(world: DeliveryWorld) -> None:
    async with receiving("200 OK") as receiver:
        for _ in range(5):
            await world.owe(receiver.url)
        other = world.another_deliverer()
        async with anyio.create_task_group() as group:
            await other.look(group)
            await world.deliverer.look(group)

    assert len(receiver.requests) == 5
    assert {one.attempt_count for one in await world.deliveries()} == {1}


async def test_an_attempt_whose_worker_died_is_followed_by_another(world: DeliveryWorld) -> None:
    async with receiving("200 OK") as receiver:
        await world.owe(receiver.url)
        delivery, now = await world.delivery(), world.api.clock.now()
        begun = begin_attempt(delivery, now=now, lapses_at=now + round(LEASE * 1_000))
        assert await world.api.binding.deliveries.change_delivery(delivery, begun)
        await world.look(after=LEASE - 1)
        assert receiver.connections == 0
        await world.look(after=2)

    ended = await world.delivery()
    assert [one.outcome for one in ended.attempts] == ["", "delivered"]
    assert [one.headers["X-Conveyor-Attempt"] for one in receiver.requests] == ["2"]
    assert ended.failures == 0


async def test_a_replay_meanwhile_begins_a_ladder_of_its_own(world: DeliveryWorld) -> None:
    receivers = answering(world, BAD, GOOD)
    await world.owe(NEVER)

    async def replay() -> None:
        now = await world.delivery()
        after = replayed(now, now=world.api.clock.now())
        assert await world.api.binding.deliveries.change_delivery(now, after)

    receivers.meanwhile = replay
    await world.look()
    between = await world.delivery()
    assert (between.status, between.ladder, between.failures) == (DeliveryStatus.PENDING, 2, 0)
    assert (between.due_at, between.leased_until) == (world.api.clock.now(), 0)
    await world.look()

    ended = await world.delivery()
    assert ended.status is DeliveryStatus.DELIVERED
    assert [one.outcome for one in ended.attempts] == ["http_5xx:500", "delivered"]
    assert [one.is_replay for one in ended.attempts] == [False, True]
    assert [headers.get("X-Conveyor-Replay") for _, headers, _ in receivers.sent] == [None, "true"]


async def test_a_delivery_that_is_dropped_meanwhile_stays_dropped(world: DeliveryWorld) -> None:
    receivers = answering(world, BAD)
    job = await world.owe(NEVER)

    async def remove() -> None:
        path = f"/v1/jobs/{job['job_id']}/webhook"
        assert (await world.api.client.delete(path)).status_code == 204

    receivers.meanwhile = remove
    await world.look()

    ended = await world.delivery()
    assert (ended.status, ended.due_at) == (DeliveryStatus.DROPPED, 0)
    assert [one.outcome for one in ended.attempts] == ["http_5xx:500"]


async def test_a_delivery_that_goes_with_its_job_meanwhile_is_left_alone(
    world: DeliveryWorld,
) -> None:
    receivers = answering(world, GOOD)
    job = await world.owe(NEVER)

    async def purge() -> None:
        await delete_job(world, job)
        await world.api.binding.runs.purge_run(job["latest_run"]["run_id"])
        await world.api.binding.jobs.purge_job(job["job_id"])

    receivers.meanwhile = purge
    await world.look()

    assert await world.deliveries() == []
    assert world.telemetry.webhook_attempts == {"delivered": 1}


async def test_one_bad_delivery_holds_up_no_other(
    world: DeliveryWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    receivers = answering(world, GOOD)
    bad = await world.owe(NEVER)
    await world.owe(NEVER)
    find_job = world.api.binding.jobs.find_job

    async def broken(job_id: str) -> Any:
        if job_id == bad["job_id"]:
            raise ConveyorError(ErrorCode.UNAVAILABLE, "the store is away")
        return await find_job(job_id)

    with monkeypatch.context() as away:
        away.setattr(world.api.binding.jobs, "find_job", broken)
        await world.look()
    assert len(receivers.sent) == 1
    assert "the store is away" in caplog.text
    await world.look(after=10)

    assert {one.status for one in await world.deliveries()} == {DeliveryStatus.DELIVERED}


async def test_a_look_ends_though_nothing_can_be_read(
    world: DeliveryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conveyor.handlers.deliver.PAGE", 2)
    for _ in range(3):
        await world.owe(NEVER)
    asked = 0

    async def away(job_id: str) -> Any:
        nonlocal asked
        asked += 1
        raise ConveyorError(ErrorCode.UNAVAILABLE, "the store is away")

    monkeypatch.setattr(world.api.binding.jobs, "find_job", away)
    await world.look()

    assert asked == 3


async def test_the_end_of_an_attempt_that_a_later_one_overtook_changes_little(
    world: DeliveryWorld,
) -> None:
    """Its lease had lapsed, as on a machine that slept."""
    receivers = answering(world, BAD)
    await world.owe(NEVER)
    later: list[EventDelivery] = []

    async def overtake() -> None:
        now = world.api.clock.now() + round(LEASE * 1_000)
        delivery = await world.delivery()
        later.append(begin_attempt(delivery, now=now, lapses_at=now + 60_000))
        assert await world.api.binding.deliveries.change_delivery(delivery, later[0])

    receivers.meanwhile = overtake
    await world.look()

    ended = await world.delivery()
    assert [one.outcome for one in ended.attempts] == ["http_5xx:500", ""]
    assert structs.replace(ended, attempts=(), version=0, updated_at=0) == structs.replace(
        later[0], attempts=(), version=0, updated_at=0
    )


async def test_an_attempt_that_is_cut_off_gives_its_lease_back(world: DeliveryWorld) -> None:
    receivers = answering(world, GOOD)
    await world.owe(NEVER)
    begun = anyio.Event()

    async def hang() -> None:
        begun.set()
        await anyio.sleep_forever()

    receivers.meanwhile = hang
    async with anyio.create_task_group() as group:
        await world.deliverer.look(group)
        await begun.wait()
        group.cancel_scope.cancel()
    cut = await world.delivery()
    assert (cut.status, cut.leased_until) == (DeliveryStatus.PENDING, 0)
    assert [one.outcome for one in cut.attempts] == [""]
    await world.look()

    ended = await world.delivery()
    assert [one.outcome for one in ended.attempts] == ["", "delivered"]
    assert json.loads(ended.body)["event_id"] == ended.delivery_id


async def test_the_age_of_the_oldest_due_delivery_is_known(world: DeliveryWorld) -> None:
    answering(world, GOOD)
    await world.owe(NEVER)
    await world.look(after=42)
    assert world.deliverer.oldest == 42
    await world.look()
    assert world.deliverer.oldest == 0
