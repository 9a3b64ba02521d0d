"""Deletions that take long: they rest, stand back for each other, and may be done twice."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from conveyor.aio.concurrency import REST, Throttle
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import JobStatus, RunStatus
from conveyor.engine.planner import CONTROL_SLOTS
from conveyor.handlers.delete import MOST_LONG, PAUSE, ROWS_A_STEP, DeleteHandler
from conveyor.ports.binding import Binding
from conveyor.ports.handler import ACKNOWLEDGE
from conveyor.ports.queues import CONTROL_QUEUE, DeleteMessage, Delivery, run_queue
from conveyor.records.blob_keys import export_prefix, run_prefix, staged_prefix
from conveyor.testing.clock import FakeClock
from tests.unit.http_api import Api, open_api
from tests.unit.wired_handlers import delete_handler

VISIBILITY = 60.0
STEP_SECONDS = 0.5


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Api]:
    async with open_api(tmp_path) as api:
        yield api


class ManyRows:
    """The tasks port, as far as a deletion knows it: so many rows a run, removed in steps that
    take virtual time."""

    def __init__(self, clock: FakeClock, **rows: int) -> None:
        self.rows = rows
        self.at_once = self.most_at_once = 0
        self._clock = clock

    async def scrub_tasks(self, run_id: str, limit: int) -> int:
        """Remove some."""
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await self._clock.sleep(STEP_SECONDS)
        self.at_once -= 1
        went = min(limit, self.rows.get(run_id, 0))
        self.rows[run_id] = self.rows.get(run_id, 0) - went
        return went


class Tombstones:
    """The jobs and runs ports, as far as a deletion knows them: every run is a tombstone. `touched`
    holds when each was, in seconds."""

    def __init__(self, clock: FakeClock) -> None:
        self.touched: dict[str, list[float]] = {}
        self._clock = clock

    async def find_job(self, job_id: str) -> SimpleNamespace:
        """Any job."""
        return SimpleNamespace(caller="CALLER", status=JobStatus.DELETED, scheduling=None)

    async def get_run(self, caller: str, job_id: str, run_id: str) -> SimpleNamespace:
        """Any run."""
        return SimpleNamespace(run_id=run_id, status=RunStatus.DELETED)

    async def touch_tombstone(self, run_id: str, *, now: int) -> None:
        """Keep when."""
        assert now == self._clock.now()
        self.touched.setdefault(run_id, []).append(self._clock.monotonic())


def delivery(run_id: str, job_id: str = "JOB", *, final: bool = False) -> Delivery:
    message = DeleteMessage(job_id, run_id, final=final)
    return Delivery(CONTROL_QUEUE, message, "receipt", 1)


def calm() -> None:
    """Nothing is refused for load here."""
    raise AssertionError("throttled")


def over(api: Api, rows: ManyRows, tombstones: Tombstones | None = None) -> Binding:
    tombstones = tombstones or Tombstones(api.clock)
    ports = {"tasks": rows, "jobs": tombstones, "runs": tombstones}
    return dataclasses.replace(api.binding, **cast(Any, ports))


async def handle(handler: DeleteHandler, *deliveries: Delivery) -> None:
    for one in deliveries:
        assert await handler.handle(one, calm) == ACKNOWLEDGE


async def waiting(api: Api) -> list[DeleteMessage]:
    """The delete messages that are visible now."""
    found = await api.binding.queues.receive(CONTROL_QUEUE, limit=10, visibility=1_000.0)
    messages = [one.message for one in found]
    assert all(isinstance(message, DeleteMessage) for message in messages)
    return cast(list[DeleteMessage], messages)


async def test_a_full_step_is_followed_by_a_rest_of_a_multiple_of_it() -> None:
    clock = FakeClock()
    pace = Throttle(clock)
    left = [10, 10, 3]

    async def remove(size: int) -> int:
        assert size == 10
        await clock.sleep(2.0)
        return left.pop(0)

    more: list[bool] = []

    async def work() -> None:
        while left:
            more.append(await pace.step(remove, 10))

    async with anyio.create_task_group() as group:
        group.start_soon(work)
        await clock.advance(2 * (2.0 + REST * 2.0) + 2.0)
    assert more == [True, True, False]
    assert clock.pending == 0


async def test_a_long_deletion_is_at_work_a_tenth_of_the_time(api: Api) -> None:
    rows = ManyRows(api.clock, RUN=10 * ROWS_A_STEP)
    handler = delete_handler(over(api, rows), api.clock, visibility=VISIBILITY)
    async with anyio.create_task_group() as group:
        group.start_soon(handle, handler, delivery("RUN"))
        await api.clock.advance(9 * STEP_SECONDS * (1 + REST))
        assert rows.rows["RUN"] == ROWS_A_STEP
        await api.clock.advance(2 * STEP_SECONDS * (1 + REST))
    assert rows.rows["RUN"] == 0


async def test_long_deletions_leave_control_slots_for_others_and_all_end(api: Api) -> None:
    assert MOST_LONG < CONTROL_SLOTS
    names = ["A", "B", "C", "D", "E"]
    rows = ManyRows(api.clock, **dict.fromkeys(names, 4 * ROWS_A_STEP), SHORT=3)
    handler = delete_handler(over(api, rows), api.clock, visibility=VISIBILITY)
    ended: list[str] = []

    async def delete(run_id: str) -> None:
        await handle(handler, delivery(run_id))
        ended.append(run_id)

    async with anyio.create_task_group() as group:
        for name in names:
            group.start_soon(delete, name)
        await api.clock.advance(STEP_SECONDS * (1 + REST))
        assert sorted(ended) == ["C", "D", "E"]  # they stood back after a step
        async with anyio.create_task_group() as short:
            short.start_soon(delete, "SHORT")
            await api.clock.advance(STEP_SECONDS)
        assert not {"A", "B"} & set(ended)
        await api.clock.advance(10 * STEP_SECONDS * (1 + REST))
    again = await waiting(api)
    assert sorted(message.run_id for message in again if not message.final) == ["C", "D", "E"]
    for message in again:
        # One after the other: bodies are looked for in a real thread, for which no time passes.
        async with anyio.create_task_group() as group:
            group.start_soon(delete, message.run_id)
            await api.clock.advance(10 * STEP_SECONDS * (1 + REST))
    assert set(rows.rows.values()) == {0}


async def test_a_second_message_for_a_run_that_is_being_scrubbed_goes(api: Api) -> None:
    rows = ManyRows(api.clock, RUN=3 * ROWS_A_STEP)
    handler = delete_handler(over(api, rows), api.clock, visibility=VISIBILITY)
    async with anyio.create_task_group() as group:
        group.start_soon(handle, handler, delivery("RUN"))
        await api.clock.advance(STEP_SECONDS / 2)
        await handle(handler, delivery("RUN"), delivery("RUN", final=True))
        await api.clock.advance(2 * PAUSE)
        assert await waiting(api) == []
        await api.clock.advance(4 * STEP_SECONDS * (1 + REST))
    assert rows.most_at_once == 1
    await api.clock.advance(VISIBILITY)
    assert await waiting(api) == [DeleteMessage("JOB", "RUN", final=True)]


async def test_a_heartbeat_touches_the_tombstones_of_what_is_being_scrubbed(api: Api) -> None:
    rows = ManyRows(api.clock, RUN=3 * ROWS_A_STEP)
    tombstones = Tombstones(api.clock)
    handler = delete_handler(over(api, rows, tombstones), api.clock, visibility=VISIBILITY)
    began = api.clock.monotonic()
    async with anyio.create_task_group() as group:
        group.start_soon(handle, handler, delivery("RUN"))
        await api.clock.advance(2 * STEP_SECONDS)
        await handler.renew()
        await api.clock.advance(STEP_SECONDS)
        await handler.renew()
        await api.clock.advance(4 * STEP_SECONDS * (1 + REST))
    await handler.renew()
    # When it began, and with each heartbeat until it had ended.
    assert tombstones.touched["RUN"] == [began + STEP_SECONDS * at for at in (0, 2, 3)]


async def test_a_heartbeat_that_fails_for_one_deletion_touches_the_others(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    class Away(Tombstones):
        async def touch_tombstone(self, run_id: str, *, now: int) -> None:
            if run_id == "A" and self._clock.monotonic() > began:
                raise ConveyorError(ErrorCode.UNAVAILABLE, "away")
            await super().touch_tombstone(run_id, now=now)

    rows = ManyRows(api.clock, A=3 * ROWS_A_STEP, B=3 * ROWS_A_STEP)
    began = api.clock.monotonic()
    tombstones = Away(api.clock)
    handler = delete_handler(over(api, rows, tombstones), api.clock, visibility=VISIBILITY)
    async with anyio.create_task_group() as group:
        for name in ("A", "B"):
            group.start_soon(handle, handler, delivery(name))
        await api.clock.advance(STEP_SECONDS)
        await handler.renew()
        group.cancel_scope.cancel()
    assert {name: len(times) for name, times in tombstones.touched.items()} == {"A": 1, "B": 2}
    assert [record.getMessage() for record in caplog.records] == [
        "touching a deletion failed: unavailable: away"
    ]


async def test_a_cancelled_deletion_gives_its_place_back(api: Api) -> None:
    rows = ManyRows(api.clock, **{str(number): 4 * ROWS_A_STEP for number in range(5)})
    handler = delete_handler(over(api, rows), api.clock, visibility=VISIBILITY)
    for number in range(MOST_LONG + 1):
        async with anyio.create_task_group() as group:
            group.start_soon(handle, handler, delivery(str(number)))
            await api.clock.advance(1.5 * STEP_SECONDS * (1 + REST))
            group.cancel_scope.cancel()
    async with anyio.create_task_group() as group:
        group.start_soon(handle, handler, delivery("4"))
        await api.clock.advance(10 * STEP_SECONDS * (1 + REST))
    assert rows.rows["4"] == 0


@pytest.mark.guarantee("G10")
async def test_everything_of_a_run_goes_and_the_tombstone_with_the_second_pass(api: Api) -> None:
    job = await api.submit(3)
    job_id, run_id = job["job_id"], job["latest_run"]["run_id"]
    await api.drain(job)
    keys = [
        f"{prefix}something"
        for prefix in (
            staged_prefix(job_id, run_id),
            export_prefix(job_id, run_id),
            run_prefix(job_id, run_id, 400),
        )
    ]
    for key in keys:
        await api.binding.blobs.put(key, b"x")
    assert (await api.client.delete(f"/v1/jobs/{job_id}")).status_code == 202
    [message] = await waiting(api)
    handler = delete_handler(api.binding, api.clock, visibility=VISIBILITY)
    await handle(handler, delivery(run_id, job_id), delivery(run_id, job_id))
    assert await api.tasks_of(run_id) == []
    for key in keys:
        assert await api.binding.blobs.open(key) is None
    assert await api.binding.runs.deleted_runs() == [(job_id, run_id)]
    assert await waiting(api) == []
    await api.clock.advance(VISIBILITY)
    finals = await waiting(api)
    assert finals == [DeleteMessage(job_id, run_id, final=True)] * 2
    await api.binding.blobs.put(keys[2], b"left by a late worker")
    for final in [*finals, message]:
        await handle(handler, Delivery(CONTROL_QUEUE, final, "receipt", 1))
    assert await api.binding.runs.deleted_runs() == []
    assert await api.binding.blobs.open(keys[2]) is None
    assert (await api.client.get(f"/v1/jobs/{job_id}")).status_code == 404


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("of", ["its job", "another job", "no job"])
async def test_a_run_that_stands_loses_nothing_by_a_message_alone(
    api: Api, caplog: pytest.LogCaptureFixture, of: str, final: bool
) -> None:
    job, other = await api.submit(3), await api.submit(1)
    run_id = job["latest_run"]["run_id"]
    job_ids = {"its job": job["job_id"], "another job": other["job_id"], "no job": "NONE"}
    key = f"{run_prefix(job_ids[of], run_id, 400)}something"
    await api.binding.blobs.put(key, b"x")
    handler = delete_handler(api.binding, api.clock, visibility=VISIBILITY)
    await handle(handler, delivery(run_id, job_ids[of], final=final))
    assert await api.binding.blobs.open(key) is not None
    assert len(await api.tasks_of(run_id)) == 3
    assert await waiting(api) == []
    assert ("that is not deleted" in caplog.text) is (of == "its job")
    queue = run_queue(run_id)
    assert len(await api.binding.queues.receive(queue, limit=10, visibility=60.0)) == 3
