"""Telling who waits how a run ended, over the development store in virtual time."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from zenrows.batch.models import WebhookEvent

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import RunFailure
from conveyor.handlers import callbacks, notify
from conveyor.handlers.callbacks import RETRIES
from conveyor.handlers.notify import LEASE
from conveyor.ports.binding import Binding
from conveyor.ports.outbox import EntryKey, Subscriber
from conveyor.testing.faults import ScriptedCallbacks
from tests.unit.http_api import Api, open_api
from tests.unit.wired_handlers import notifier

HEARTBEAT = 30.0
LOOK = 5.0
TOKEN = "token-of-a-step"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Waiting:
    """A waiting state machine. `look` is one tick of a worker."""

    api: Api
    callbacks: ScriptedCallbacks = field(default_factory=ScriptedCallbacks)
    outcomes: list[str] = field(default_factory=list)

    @property
    def binding(self) -> Binding:
        return dataclasses.replace(self.api.binding, callbacks=self.callbacks)

    def callback_made(self, outcome: str) -> None:
        self.outcomes.append(outcome)

    def gateway_called(self, outcome: str) -> None:
        raise AssertionError(outcome)

    def gateway_took(self, seconds: float, outcome: str, *, traceparent: str) -> None:
        raise AssertionError(outcome)

    def task_began(self, waited: float) -> None:
        raise AssertionError

    def task_settled(self, seconds: float) -> None:
        raise AssertionError

    def task_ended(self, state: str) -> None:
        raise AssertionError(state)

    def claim_undone(self) -> None:
        raise AssertionError

    def bodies_written(self, bodies: int, size: int) -> None:
        raise AssertionError((bodies, size))

    async def look(self, *, after: float = LOOK) -> list[tuple[str, ...]]:
        """Return the callbacks of one look, `after` seconds later."""
        await self.api.clock.advance(after)
        before = len(self.callbacks.received)
        teller = notifier(self.binding, self.api.clock, observer=self, heartbeat=HEARTBEAT)
        await teller.deliver()
        return self.callbacks.received[before:]

    async def submit(self, urls: int = 2, **fields: Any) -> dict[str, Any]:
        return await self.api.submit(urls, callback={"task_token": TOKEN}, **fields)


@pytest.fixture
async def waiting(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Waiting]:
    async with open_api(tmp_path) as api:
        yield Waiting(api)


async def test_a_run_that_goes_on_is_said_to_be_alive_now_and_then(waiting: Waiting) -> None:
    await waiting.submit()
    alive = ("heartbeat", TOKEN)
    assert await waiting.look() == [alive]
    for _ in range(int(HEARTBEAT / LOOK) - 1):
        assert await waiting.look() == []
    assert await waiting.look() == [alive]
    assert waiting.outcomes == ["heartbeat"] * 2


async def test_a_completed_run_is_a_success_told_once(waiting: Waiting) -> None:
    job = await waiting.submit(3, external_id="nightly", metadata={"team": "a"})
    assert await waiting.look() == [("heartbeat", TOKEN)]
    await waiting.api.drain(job, failing=1)
    [(kind, token, output)] = await waiting.look()
    event = json.loads(output)
    assert (kind, token) == ("success", TOKEN)
    assert event["stats"] == {
        "total": 3,
        "completed": 3,
        "successful": 2,
        "failed": 1,
        "failure_reasons": {"blocked": 1},
        "spend": event["stats"]["spend"],
    }
    told = WebhookEvent.model_validate_json(output)
    assert told.event_type.value == "run.completed"
    assert (told.job_id, told.run_id) == (job["job_id"], job["latest_run"]["run_id"])
    assert (told.external_id, told.metadata, told.run_sequence) == ("nightly", {"team": "a"}, 1)
    assert await waiting.look(after=HEARTBEAT * 3) == []
    assert waiting.outcomes == ["heartbeat", "success"]


async def test_an_end_between_the_heartbeats_is_told_by_the_next_look(waiting: Waiting) -> None:
    job = await waiting.submit()
    await waiting.look()
    await waiting.api.drain(job)
    assert [told[0] for told in await waiting.look(after=0.001)] == ["success"]


async def test_a_stopped_run_is_a_failure(waiting: Waiting) -> None:
    job = await waiting.submit()
    await waiting.api.client.post(f"/v1/jobs/{job['job_id']}/stop")
    [(kind, token, error, cause)] = await waiting.look()
    assert (kind, token, error) == ("failure", TOKEN, "Conveyor.RunStopped")
    assert json.loads(cause)["event_type"] == "run.stopped"


async def test_a_failed_run_is_a_failure_with_its_reason(waiting: Waiting) -> None:
    job = await waiting.submit()
    await waiting.api.binding.runs.fail_run(
        job["latest_run"]["run_id"],
        reason=RunFailure.INSUFFICIENT_CREDITS,
        detail="nothing left",
        now=waiting.api.clock.now(),
    )
    [(_, _, error, cause)] = await waiting.look()
    assert error == "Conveyor.RunFailed"
    told = json.loads(cause)
    assert (told["failure_reason"], told["failure_detail"]) == (
        "insufficient_credits",
        "nothing left",
    )


async def test_a_job_that_is_deleted_and_gone_is_a_failure_all_the_same(waiting: Waiting) -> None:
    job = await waiting.submit()
    job_id, run_id = job["job_id"], job["latest_run"]["run_id"]
    await waiting.api.client.delete(f"/v1/jobs/{job_id}")
    await waiting.api.binding.runs.purge_run(run_id)
    await waiting.api.binding.jobs.purge_job(job_id)
    assert await waiting.api.binding.jobs.find_job(job_id) is None
    [(_, token, error, cause)] = await waiting.look()
    assert (token, error) == (TOKEN, "Conveyor.RunDeleted")
    assert (json.loads(cause)["job_id"], json.loads(cause)["run_id"]) == (job_id, run_id)


async def test_a_job_that_is_deleted_after_its_end_was_completed_all_the_same(
    waiting: Waiting,
) -> None:
    job = await waiting.submit()
    await waiting.api.drain(job)
    await waiting.api.client.delete(f"/v1/jobs/{job['job_id']}")
    [(kind, _, output)] = await waiting.look()
    assert kind == "success"
    assert json.loads(output)["event_type"] == "run.completed"


async def test_a_look_ends_though_nothing_can_be_leased(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "PAGE", 2)
    for _ in range(3):
        await waiting.submit()
    asked: list[str] = []

    async def full(run_id: str, **_: object) -> None:
        asked.append(run_id)
        raise ConveyorError(ErrorCode.UNAVAILABLE, "the disk is full")

    class Full:
        due_entries = waiting.api.binding.outbox.due_entries
        lease_entry = staticmethod(full)

    binding = dataclasses.replace(waiting.binding, outbox=cast(Any, Full()))
    await notifier(binding, waiting.api.clock, observer=waiting, heartbeat=HEARTBEAT).deliver()
    assert len(asked) == 4


async def test_an_open_job_ends_when_it_is_closed(waiting: Waiting) -> None:
    job = await waiting.submit(1, status="open")
    await waiting.api.drain(job)
    assert [told[0] for told in await waiting.look()] == ["heartbeat"]
    await waiting.api.client.post(f"/v1/jobs/{job['job_id']}/close")
    assert [told[0] for told in await waiting.look()] == ["success"]


async def test_a_delivery_that_fails_is_made_again_with_the_very_same_event(
    waiting: Waiting,
) -> None:
    job = await waiting.submit()
    await waiting.api.drain(job)
    waiting.callbacks.away = 3
    assert await waiting.look() == []
    # Whatever becomes of the run: what was settled is told.
    await waiting.api.client.delete(f"/v1/jobs/{job['job_id']}")
    told: list[tuple[str, ...]] = []
    for _ in range(20):
        told += await waiting.look()
    [(kind, _, output)] = told
    assert kind == "success"
    assert json.loads(output)["event_type"] == "run.completed"
    assert waiting.outcomes == [*["failed"] * 3, "success"]


async def test_pauses_between_attempts_grow_and_end_some_time(
    waiting: Waiting, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    until = 6 * 3_600
    assert callbacks.GIVE_UP_AFTER == 3 * 86_400
    monkeypatch.setattr(callbacks, "GIVE_UP_AFTER", until)
    job = await waiting.submit()
    await waiting.api.drain(job)
    waiting.callbacks.away = 1_000_000
    attempts: list[int] = []
    with caplog.at_level(logging.WARNING, "conveyor.handlers"):
        while "gave up the callback" not in caplog.text:
            await waiting.look(after=RETRIES.cap / 4)
            attempts.append(len(waiting.outcomes))
            assert len(attempts) < 600
    assert until / (RETRIES.cap * 1.5) < attempts[-1] < until / (RETRIES.cap * 0.5) + 12
    waiting.callbacks.away = 0
    assert await waiting.look(after=until) == []
    assert TOKEN not in caplog.text


async def test_a_heartbeat_that_fails_is_followed_by_the_next(waiting: Waiting) -> None:
    await waiting.submit()
    waiting.callbacks.away = 1
    assert await waiting.look() == []
    assert await waiting.look(after=HEARTBEAT) == [("heartbeat", TOKEN)]
    assert waiting.outcomes == ["failed", "heartbeat"]


async def test_where_nobody_waits_the_run_goes_on_and_nothing_is_told(
    waiting: Waiting, caplog: pytest.LogCaptureFixture
) -> None:
    job = await waiting.submit()
    waiting.callbacks.unknown.add(TOKEN)
    with caplog.at_level(logging.WARNING, "conveyor.handlers"):
        assert await waiting.look() == []
    assert "nobody waits" in caplog.text
    assert TOKEN not in caplog.text
    await waiting.api.drain(job)
    assert await waiting.look(after=HEARTBEAT) == []
    assert waiting.outcomes == ["unwanted"]
    run = await waiting.api.run_of(job["job_id"])
    assert run is not None
    assert run.status == "completed"


async def test_a_worker_lost_in_the_middle_is_followed_by_another(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await waiting.submit()
    await waiting.api.drain(job)

    async def die(*_: object, **__: object) -> None:
        raise ConveyorError(ErrorCode.UNAVAILABLE, "the store is away")

    with monkeypatch.context() as away:
        away.setattr(waiting.api.binding.outbox, "fix_payload", die, raising=False)
        assert await waiting.look() == []
    assert await waiting.look(after=LEASE - 1) == []
    assert [told[0] for told in await waiting.look(after=2)] == ["success"]


async def test_two_workers_tell_one_end_once(waiting: Waiting) -> None:
    job = await waiting.submit()
    await waiting.api.drain(job)
    outbox, now = waiting.api.binding.outbox, waiting.api.clock.now()
    run_id = job["latest_run"]["run_id"]
    key = EntryKey(run_id, Subscriber.CALLBACK)
    held = await outbox.lease_entry(key, now=now, lapses_at=now + 60_000)
    assert held is not None
    assert await waiting.look() == []
    await outbox.reschedule_entry(held, due_at=now, attempts=0)
    assert len(await waiting.look()) == 1


async def test_one_bad_notice_holds_up_no_other(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "PAGE", 3)
    monkeypatch.setattr(notify, "SIDE_BY_SIDE", 2)
    for number in range(7):
        await waiting.api.submit(1, callback={"task_token": f"token-{number}"})
    waiting.callbacks.unknown.add("token-0")
    assert {told[1] for told in await waiting.look()} == {f"token-{n}" for n in range(1, 7)}


async def test_jobs_without_a_callback_leave_no_notice(waiting: Waiting) -> None:
    job = await waiting.api.submit(1)
    await waiting.api.drain(job)
    assert await waiting.look() == []
    assert waiting.outcomes == []


async def test_a_rerun_calls_nobody_back(waiting: Waiting) -> None:
    job = await waiting.submit()
    await waiting.api.drain(job)
    assert len(await waiting.look()) == 1
    waiting.callbacks.unknown.clear()
    answer = await waiting.api.client.post(f"/v1/jobs/{job['job_id']}/rerun")
    assert answer.status_code == 201
    assert await waiting.look(after=HEARTBEAT) == []


async def test_the_owner_alone_sees_the_token(waiting: Waiting) -> None:
    job = await waiting.submit()
    path = f"/v1/jobs/{job['job_id']}"
    assert (await waiting.api.client.get(path)).json()["callback"] == {"task_token": TOKEN}
    assert (await waiting.api.foreign.get(path)).status_code == 404
