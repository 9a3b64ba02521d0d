"""The findings and corrections of one sweep, over the development store in virtual time."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import Ingest, IngestStatus, Job, JobStatus, Run, RunStats, RunStatus
from conveyor.handlers import sweep as sweep_quiet
from conveyor.handlers import sweep as sweep_retention
from conveyor.handlers.sweep import DELETE_PATIENCE
from conveyor.ports.maintenance import StuckIngest
from conveyor.ports.queues import DeleteMessage, IngestMessage, Message, run_queue
from conveyor.ports.records import StoredResponse
from tests.conformance.world import all_ended
from tests.unit.http_api import Api, open_api
from tests.unit.sweep_world import DAY, INTERVAL, QUIET, run_id_of, slot_of, sweep_over


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Api]:
    async with open_api(tmp_path) as api:
        yield api


async def test_references_that_may_be_lost_are_sent_again_once_a_run_is_quiet(api: Api) -> None:
    job = await api.submit(6)
    run_id = run_id_of(job)
    tasks = await api.tasks_of(run_id)
    await api.succeed(job["job_id"], run_id, tasks[1].task_id)
    await api.claim(run_id, tasks[4].task_id, seconds=3_600)
    sweep = sweep_over(api)
    await sweep.look(after=QUIET - 1)
    assert sweep.outbox.references == []
    await sweep.look()
    assert sweep.outbox.references == [(run_id, [0, 2, 3, 5])]


async def test_what_was_sent_again_is_sent_once_more_only_after_another_quiet_period(
    api: Api,
) -> None:
    job = await api.submit(2)
    sweep = sweep_over(api)
    await sweep.look(after=QUIET + 1)
    for _ in range(int(QUIET / INTERVAL) - 1):
        await sweep.look()
    assert len(sweep.outbox.references) == 1
    await sweep.look()
    assert sweep.outbox.references == [(run_id_of(job), [0, 1])] * 2
    [task, _] = await api.tasks_of(run_id_of(job))
    await sweep.look(after=QUIET - 1)
    await api.succeed(job["job_id"], run_id_of(job), task.task_id)
    await sweep.look()
    assert len(sweep.outbox.references) == 2


async def test_nothing_is_doubled_while_the_queue_holds_as_many_messages(api: Api) -> None:
    run_id = run_id_of(await api.submit(3))
    sweep = sweep_over(api)
    sweep.outbox.depths[run_queue(run_id)] = 3
    await sweep.look(after=QUIET + 1)
    assert sweep.outbox.references == []
    sweep.outbox.depths[run_queue(run_id)] = 2
    await sweep.look(after=QUIET)
    assert sweep.outbox.references == [(run_id, [0, 1, 2])]


async def test_a_large_run_is_sent_again_piece_by_piece_over_several_sweeps(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_quiet, "PIECE", 2)
    monkeypatch.setattr(sweep_quiet, "PIECES", 2)
    run_id = run_id_of(await api.submit(9))
    sweep = sweep_over(api)
    await sweep.look(after=QUIET + 1)
    assert sweep.outbox.references == [(run_id, [0, 1]), (run_id, [2, 3])]
    await sweep.look()
    assert sweep.outbox.references[2:] == [(run_id, [4, 5]), (run_id, [6, 7])]
    await sweep.look()
    assert sweep.outbox.references[4:] == [(run_id, [8])]
    await sweep.look()
    assert len(sweep.outbox.references) == 5


async def test_paused_runs_are_left_alone(api: Api) -> None:
    job = await api.submit(2)
    await api.client.post(f"/v1/jobs/{job['job_id']}/pause")
    sweep = sweep_over(api)
    await sweep.look(after=QUIET + 1)
    assert sweep.outbox.references == []


@pytest.mark.guarantee("G19")
async def test_wrong_counters_are_set_right_and_a_hanging_run_ends(api: Api) -> None:
    hanging, lagging = await api.submit(3), await api.submit(3)
    await api.drain(hanging, failing=1)
    tasks = await api.tasks_of(run_id_of(lagging))
    await api.fail(run_id_of(lagging), tasks[0].task_id)
    with closing(sqlite3.connect(api.directory / "conveyor.db", isolation_level=None)) as database:
        database.execute(
            "UPDATE runs SET status = 'running', total = 9, successful = 1, failed = 0, "
            "failure_reasons = '{\"timeout\":5}'"
        )
    sweep = sweep_over(api)
    await sweep.look(after=QUIET + 1)
    ended, live = [await api.run_of(job["job_id"]) for job in (hanging, lagging)]
    assert ended is not None
    assert live is not None
    assert ended.status is RunStatus.COMPLETED
    assert (ended.stats.total, ended.stats.successful, ended.stats.failed) == (3, 2, 1)
    assert ended.stats.failure_reasons == {"blocked": 1}
    assert live.status is RunStatus.RUNNING
    assert (live.stats.total, live.stats.successful, live.stats.failed) == (3, 0, 1)
    assert sweep.outbox.dropped == [run_id_of(hanging)]
    assert sweep.outbox.references == [(run_id_of(lagging), [1, 2])]


async def test_looking_for_due_references_reads_about_as_many_rows_as_it_returns(
    api: Api,
) -> None:
    job = await api.submit(2_000, status="open")
    store = cast(Any, api.binding.sweeping)._database
    stored = await api.binding.jobs.find_job(job["job_id"])
    assert stored is not None
    assert stored.task_shard_count > 1
    before = store.rows_read
    found = await api.binding.sweeping.due_references(
        run_id_of(job), after=-1, limit=1_000, now=api.clock.now()
    )
    assert [index for index, _ in found] == list(range(1_000))
    assert store.rows_read - before <= 1_000 + stored.task_shard_count


async def test_a_stuck_ingestion_is_sent_again_once_a_quiet_period(api: Api) -> None:
    now = api.clock.now()
    job_id, run_id = api.clock.new_id(), api.clock.new_id()
    job = Job(
        job_id=job_id,
        caller="caller",
        status=JobStatus.CLOSED,
        created_at=now,
        updated_at=now,
        latest_run_id=run_id,
        run_count=1,
    )
    run = Run(
        run_id=run_id,
        job_id=job_id,
        run_sequence=1,
        status=RunStatus.RUNNING,
        created_at=now,
        updated_at=now,
        next_index=5,
        stats=RunStats(total=5),
        ingest=Ingest(status=IngestStatus.PENDING, end=5, chunks=(0,)),
    )
    await api.binding.jobs.create_job(job, run, [], answer=StoredResponse(202, b"{}"), once=None)
    sweep = sweep_over(api)
    await sweep.look(after=QUIET - 1)
    assert sweep.outbox.sent == []
    await sweep.look()
    await sweep.look()
    assert sweep.outbox.sent == [IngestMessage(job_id, run_id)]
    await sweep.look(after=QUIET)
    assert sweep.outbox.sent == [IngestMessage(job_id, run_id)] * 2
    assert sweep.outbox.references == []


async def test_a_tombstone_that_nobody_touches_is_sent_to_its_scrub_again(api: Api) -> None:
    job = await api.submit(1)
    await api.client.delete(f"/v1/jobs/{job['job_id']}")
    workers = [sweep_over(api) for _ in range(3)]

    def sent() -> list[Message]:
        return [message for worker in workers for message in worker.outbox.sent]

    await workers[0].look(after=DELETE_PATIENCE * QUIET)
    assert sent() == []
    for worker in workers * 2:
        await worker.look()
    # One sends it for all of them.
    assert sent() == [DeleteMessage(job["job_id"], run_id_of(job))]
    await workers[1].look(after=DELETE_PATIENCE * QUIET)
    assert len(sent()) == 2


async def test_no_deletion_under_way_is_sent_again_however_long_it_takes(api: Api) -> None:
    job = await api.submit(1)
    run_id = run_id_of(job)
    await api.client.delete(f"/v1/jobs/{job['job_id']}")
    sweep = sweep_over(api)
    for _ in range(3 * DELETE_PATIENCE):
        await api.binding.runs.touch_tombstone(run_id, now=api.clock.now())
        await sweep.look(after=QUIET)
    assert sweep.outbox.sent == []


async def test_a_long_look_stands_back_and_the_next_sweep_goes_on(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [await api.submit(1, result_ttl_days=1) for _ in range(3)]
    for job in jobs:
        await api.drain(job)
    monkeypatch.setattr(sweep_retention, "BUDGET", 1e-9)
    monkeypatch.setattr(sweep_retention, "PAGE", 1)
    sweep = sweep_over(api)

    async def swept() -> list[bool]:
        ended = await all_ended(api.binding, api.clock.now())
        return [run.swept for run in ended]

    mark_swept = api.binding.sweeping.mark_swept

    async def mark_slowly(run_id: str) -> None:
        await mark_swept(run_id)
        await api.clock.advance(1)

    monkeypatch.setattr(sweep.binding.sweeping, "mark_swept", mark_slowly)
    seen: list[list[bool]] = []
    for _ in range(3):
        await sweep.look(after=2 * DAY if not seen else INTERVAL)
        seen.append(await swept())
    assert seen == [[True, False, False], [True, True, False], [True, True, True]]


async def test_one_part_that_fails_stops_no_other_and_is_told(
    api: Api, caplog: pytest.LogCaptureFixture, unforeseen: list[logging.LogRecord]
) -> None:
    class Broken:
        async def stuck_ingests(self, *, before: int) -> list[StuckIngest]:
            raise ConveyorError(ErrorCode.UNAVAILABLE, f"nothing before {before > 0}")

    class Worse:
        def __getattr__(self, name: str) -> Any:
            raise TypeError(name)

    input_id = await slot_of(api, lives=1)
    sweep = sweep_over(api, ingestion=Broken(), exports=Worse())
    with caplog.at_level(logging.WARNING, "conveyor"):
        await sweep.look()
    assert await api.binding.inputs.get_input(input_id) is None
    assert [record.getMessage() for record in caplog.records] == [
        "sweeping stuck ingestions failed: unavailable: nothing before True",
        "sweeping unfinished exports failed: TypeError('unfinished_exports')",
        "sweeping expired exports failed: TypeError('expired_exports')",
    ]
    # What none may raise is a fault of the program: told with a traceback, and to the tests.
    assert [bool(record.exc_info) for record in caplog.records] == [False, True, True]
    assert unforeseen == caplog.records[1:]
    unforeseen.clear()


async def test_one_worker_of_a_fleet_sweeps_at_a_time(api: Api) -> None:
    await api.submit(1)
    first, second = sweep_over(api), sweep_over(api)
    await api.clock.advance(QUIET + 1)
    await first.sweeper.sweep()
    await second.sweeper.sweep()
    assert (len(first.outbox.references), len(second.outbox.references)) == (1, 0)
    await second.look()
    assert len(second.outbox.references) == 1


async def test_the_store_tidies_up_at_each_sweep_and_what_it_did_is_told(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    at: list[int] = []
    removed = [0, 2]

    async def tidy(*, now: int) -> int:
        at.append(now)
        return removed.pop(0)

    sweep = sweep_over(api)
    monkeypatch.setattr(sweep.binding.sweeping, "tidy", tidy)
    with caplog.at_level(logging.WARNING, "conveyor"):
        await sweep.look()
        assert caplog.records == []
        await sweep.look()
    assert at == [api.clock.now() - round(INTERVAL * 1_000), api.clock.now()]
    assert [record.getMessage() for record in caplog.records] == [
        "removed 2 leftovers of interrupted writes"
    ]
