"""Settling the event of a run: which runs owe one, what it holds, and that there is never a second
one."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec import structs
from zenrows.batch.models import WebhookEvent

from conveyor.domain.deliveries import DeliveryStatus, event_id
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.webhooks import EventType, Webhook
from conveyor.handlers.notify import LEASE
from tests.unit.delivery_world import ORIGIN, SWEEP, DeliveryWorld, delivery_world

URL = "https://hooks.test/"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def world(tmp_path: Path, anyio_backend: str) -> AsyncIterator[DeliveryWorld]:
    async with delivery_world(tmp_path) as world:
        yield world


async def due(world: DeliveryWorld) -> int:
    """The number of due entries."""
    now = world.api.clock.now()
    return len(await world.api.binding.outbox.due_entries(now=now, limit=1_000))


async def test_a_completed_run_owes_its_event(world: DeliveryWorld) -> None:
    job = await world.submit(URL, external_id="nightly", metadata={"team": "a"})
    await world.api.clock.advance(10)
    await world.api.drain(job)
    ended_at = world.api.clock.now()
    await world.api.clock.advance(3_600)
    await world.notifier().deliver()

    delivery, run_id = await world.delivery(), job["latest_run"]["run_id"]
    told = json.loads(delivery.body)
    assert delivery.delivery_id == event_id(run_id, "run.completed", ended_at=ended_at)
    assert told["event_id"] == delivery.delivery_id
    assert (delivery.event_type, told["event_type"]) == ("run.completed", "run.completed")
    assert (told["job_id"], told["run_id"]) == (job["job_id"], run_id)
    assert (told["external_id"], told["metadata"]) == ("nightly", {"team": "a"})
    assert told["occurred_at"] == "2026-01-01T00:00:10.000Z"
    address = f"{ORIGIN}/v1/jobs/{job['job_id']}/runs/{run_id}"
    assert told["links"] == {"run": address, "failed_results": f"{address}/results?status=failed"}
    assert WebhookEvent.model_validate_json(delivery.body).run_sequence == 1
    assert delivery.due_at == delivery.created_at == world.api.clock.now()
    assert await due(world) == 0


async def test_the_links_of_an_event_are_those_of_the_api(world: DeliveryWorld) -> None:
    await world.owe(URL)
    told = json.loads((await world.delivery()).body)

    for link in told["links"].values():
        answer = await world.api.client.get(link.removeprefix(ORIGIN))
        assert answer.status_code == 200, link


async def test_an_event_has_no_links_where_the_origin_is_not_known(world: DeliveryWorld) -> None:
    world.origin = ""
    await world.owe(URL)

    assert "links" not in json.loads((await world.delivery()).body)


async def test_a_failed_run_owes_an_event_with_its_reason(world: DeliveryWorld) -> None:
    await world.owe(URL)

    told = json.loads((await world.delivery()).body)
    assert told["event_type"] == "run.failed"
    assert (told["failure_reason"], told["failure_detail"]) == (
        "insufficient_credits",
        "nothing left",
    )


async def test_metadata_of_any_size_stays_in_the_event(world: DeliveryWorld) -> None:
    """A callback leaves it out if a state machine could not take it."""
    metadata = {f"{number:02}": "\x01" * 1_024 for number in range(20)}
    await world.owe(URL, metadata=metadata)

    told = (await world.delivery()).body
    assert len(told) > 100_000
    assert json.loads(told)["metadata"] == metadata


async def test_a_live_run_is_looked_at_once_in_a_sweep(world: DeliveryWorld) -> None:
    await world.submit(URL)
    await world.notifier().deliver()
    assert await due(world) == 0
    await world.api.clock.advance(SWEEP - 1)
    assert await due(world) == 0
    await world.api.clock.advance(1)
    assert await due(world) == 1
    assert await world.deliveries() == []


@pytest.mark.parametrize("asked", [False, True])
async def test_a_stopped_run_owes_an_event_only_if_asked_for(
    world: DeliveryWorld, asked: bool
) -> None:
    events = tuple(EventType) if asked else (EventType.COMPLETED, EventType.FAILED)
    job = await world.submit(URL, events=events)
    await world.api.client.post(f"/v1/jobs/{job['job_id']}/stop")
    await world.notifier().deliver()

    assert [one.event_type for one in await world.deliveries()] == ["run.stopped"] * asked
    assert await due(world) == 0


async def remove_webhook(world: DeliveryWorld, job: dict[str, Any]) -> None:
    await world.set_webhook(job, None)


async def replace_webhook(world: DeliveryWorld, job: dict[str, Any]) -> None:
    for webhook in (None, Webhook(URL)):
        await world.set_webhook(job, webhook)


async def change_events(world: DeliveryWorld, job: dict[str, Any]) -> None:
    await world.set_webhook(job, Webhook(URL, False, (EventType.COMPLETED,)))


async def delete_job(world: DeliveryWorld, job: dict[str, Any]) -> None:
    await world.api.client.delete(f"/v1/jobs/{job['job_id']}")


async def delete_run(world: DeliveryWorld, job: dict[str, Any]) -> None:
    path = f"/v1/jobs/{job['job_id']}/runs/{job['latest_run']['run_id']}"
    assert (await world.api.client.delete(path)).status_code == 202


async def purge_run(world: DeliveryWorld, job: dict[str, Any]) -> None:
    await delete_run(world, job)
    await world.api.binding.runs.purge_run(job["latest_run"]["run_id"])


async def purge_job(world: DeliveryWorld, job: dict[str, Any]) -> None:
    await delete_job(world, job)
    await world.api.binding.runs.purge_run(job["latest_run"]["run_id"])
    await world.api.binding.jobs.purge_job(job["job_id"])


@pytest.mark.parametrize(
    "change",
    [remove_webhook, replace_webhook, change_events, delete_job, delete_run, purge_run, purge_job],
)
async def test_what_nobody_wants_any_more_is_not_owed(world: DeliveryWorld, change: Any) -> None:
    job = await world.submit(URL)
    await world.fail(job)
    await change(world, job)
    await world.notifier().deliver()

    assert await world.deliveries() == []
    assert await due(world) == 0


async def test_a_webhook_gets_no_event_of_a_run_that_ended_under_an_earlier_one(
    world: DeliveryWorld,
) -> None:
    """Though no worker was up meanwhile. A run that goes on owes its event to the last one."""
    job = await world.submit(URL)
    runs = [job["latest_run"]["run_id"]]
    for _ in range(3):
        await world.fail(job)
        job = (await world.api.client.post(f"/v1/jobs/{job['job_id']}/rerun")).json()
        runs.append(job["latest_run"]["run_id"])
    for webhook in (None, Webhook(URL), None, Webhook(URL), Webhook("https://other.test/")):
        await world.set_webhook(job, webhook)
    await world.fail(job)
    await world.notifier().deliver()

    assert [one.run_id for one in await world.deliveries()] == runs[-1:]
    assert await due(world) == 0


async def test_a_delivery_goes_to_no_webhook_that_is_set_after_its_own_was_removed(
    world: DeliveryWorld,
) -> None:
    """As one that DELETE has not dropped at once. A replay sends it to the present one."""
    job = await world.owe(URL)
    await replace_webhook(world, job)
    await world.look()
    dropped = await world.delivery()
    assert (dropped.status, dropped.attempt_count) == (DeliveryStatus.DROPPED, 0)
    path = f"/v1/webhook/deliveries/{dropped.delivery_id}/replay"
    assert (await world.api.client.post(path)).status_code == 202
    await world.look()

    assert (await world.delivery()).attempt_count == 1
    assert (await world.delivery()).webhook_number == 2


async def test_another_url_gets_the_event_of_a_run_that_ended_before(world: DeliveryWorld) -> None:
    job = await world.submit(URL)
    await world.fail(job)
    await world.set_webhook(job, Webhook("https://other.test/"))
    await world.notifier().deliver()

    assert len(await world.deliveries()) == 1


async def test_each_rerun_owes_an_event_of_its_own(world: DeliveryWorld) -> None:
    job = await world.owe(URL)
    answer = await world.api.client.post(f"/v1/jobs/{job['job_id']}/rerun")
    run = answer.json()["latest_run"]["run_id"]
    await world.api.drain(answer.json())
    await world.notifier().deliver()

    assert [one.run_id for one in await world.deliveries()] == [run, job["latest_run"]["run_id"]]


STEPS = (
    ("outbox", "lease_entry"),
    ("jobs", "find_job"),
    ("deliveries", "create_delivery"),
    ("outbox", "drop_entry"),
)


@pytest.mark.guarantee("G20")
@pytest.mark.parametrize("is_done", [False, True], ids=["lost", "done"])
@pytest.mark.parametrize(("port", "step"), STEPS)
async def test_a_worker_lost_at_any_step_loses_no_event_and_makes_no_second_one(
    world: DeliveryWorld, monkeypatch: pytest.MonkeyPatch, port: str, step: str, is_done: bool
) -> None:
    """Each step is cut off before it took place, and after it did, before its answer came."""
    job = await world.submit(URL)
    await world.fail(job)
    owner = getattr(world.api.binding, port)
    work = getattr(owner, step)
    cut_off = 0

    async def cut(*arguments: Any, **named: Any) -> None:
        nonlocal cut_off
        cut_off += 1
        if is_done:
            await work(*arguments, **named)
        raise ConveyorError(ErrorCode.UNAVAILABLE, "the worker is gone")

    with monkeypatch.context() as broken:
        broken.setattr(owner, step, cut)
        await world.notifier().deliver()
    assert cut_off >= 1
    before = await world.deliveries()
    for _ in range(3):
        await world.api.clock.advance(LEASE)
        await world.notifier().deliver()

    [after] = await world.deliveries()
    assert await due(world) == 0
    # The bytes that were settled first stand.
    assert [one.body for one in before] in ([], [after.body])
    assert after.status is DeliveryStatus.PENDING


async def test_an_end_that_was_not_noted_is_found_by_the_run(
    world: DeliveryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a store that cannot write the run's end and its entry in one step."""
    job = await world.submit(URL)
    await world.fail(job)
    outbox = world.api.binding.outbox
    lease = outbox.lease_entry

    async def unnoted(*arguments: Any, **named: Any) -> Any:
        entry = await lease(*arguments, **named)
        return None if entry is None else structs.replace(entry, ended_as=None, ended_at=0)

    noted_at = world.api.clock.now()
    await world.api.clock.advance(100)
    monkeypatch.setattr(outbox, "lease_entry", unnoted)
    await world.notifier().deliver()

    run_id = job["latest_run"]["run_id"]
    expected = event_id(run_id, "run.failed", ended_at=noted_at)
    assert (await world.delivery()).delivery_id == expected


async def test_the_age_of_what_was_not_told_is_known(world: DeliveryWorld) -> None:
    job = await world.submit(URL)
    notifier = world.notifier()
    await notifier.deliver()
    assert notifier.oldest == 0
    await world.fail(job)
    await world.api.clock.advance(90)
    await notifier.deliver()
    assert notifier.oldest == 90
    await notifier.deliver()
    assert notifier.oldest == 0


@pytest.mark.slow
@pytest.mark.guarantee("G20")
async def test_three_notifiers_make_one_delivery_a_run(world: DeliveryWorld) -> None:
    runs = set()
    for _ in range(500):
        job = await world.submit(URL)
        runs.add(job["latest_run"]["run_id"])
        await world.fail(job)
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(world.notifier().deliver)

    made = await world.deliveries()
    assert len(made) == 500
    assert {one.run_id for one in made} == runs
    assert await due(world) == 0


@pytest.mark.slow
@pytest.mark.guarantee("G20")
async def test_three_notifiers_whose_answers_are_lost_make_one_delivery_a_run(
    world: DeliveryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third of the answers to each step is lost, after the write; by chance, since a fixed turn
    may always meet the same call of a round."""
    lost = random.Random(20)
    runs = set()
    for _ in range(500):
        job = await world.submit(URL)
        runs.add(job["latest_run"]["run_id"])
        await world.fail(job)

    def losing(work: Any) -> Any:
        async def call(*arguments: Any, **named: Any) -> Any:
            answer = await work(*arguments, **named)
            if lost.random() < 1 / 3:
                raise ConveyorError(ErrorCode.UNAVAILABLE, "the answer was lost")
            return answer

        return call

    for port, step in STEPS:
        owner = getattr(world.api.binding, port)
        monkeypatch.setattr(owner, step, losing(getattr(owner, step)))
    rounds = 0
    while await due(world) or rounds < 2:
        rounds += 1
        assert rounds < 200
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(world.notifier().deliver)
        await world.api.clock.advance(LEASE)

    made = await world.deliveries()
    assert len(made) == 500
    assert {one.run_id for one in made} == runs
