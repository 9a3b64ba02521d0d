"""The contract of every jobs adapter, sentence by sentence of the port."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from conveyor.domain import ids
from conveyor.domain.errors import ErrorCode
from conveyor.domain.hosts import Politeness
from conveyor.domain.model import Format, JobStatus, RunStatus
from conveyor.ports.binding import Jobs, Runs
from conveyor.ports.records import (
    Appended,
    AppendRequest,
    ClaimedKey,
    Idempotency,
    IdempotencyScope,
    RerunRequest,
    StoredResponse,
)
from tests.conformance.world import CALLER, World, refused, spec

STRANGER = "another caller"


async def claim_key(world: World, idempotency: Idempotency, scope: str) -> object:
    return await idempotency.claim_idempotency_key(
        scope,
        fingerprint=b"body",
        created_id="ID",
        now=world.now,
        lapses_at=world.now + 60_000,
        expires_at=world.now + 86_400_000,
    )


async def test_what_is_created_is_read_back_whole(world: World, jobs: Jobs) -> None:
    job, run, tasks = world.draft(
        3,
        name="name",
        external_id="external",
        metadata={"a": "b"},
        params={"js_render": "true"},
        format=Format.MARKDOWN,
        max_inflight=7,
        priority=9,
        politeness=Politeness(per_host=2, per_host_rate=0.25),
        max_attempts=2,
        result_ttl_days=3,
        task_shard_count=1,
        sealed_key=b"\x00sealed\xff",
    )
    await jobs.create_job(job, run, tasks, answer=StoredResponse(201, b""), once=None)
    view = await jobs.get_job(CALLER, job.job_id)
    assert view is not None
    assert view.job == job
    assert view.latest_run == run
    assert await jobs.find_job(job.job_id) == job
    rows = await world.rows(run.run_id)
    assert [(row.index, row.task_id, row.spec) for row in rows] == [
        (task.index, task.task_id, task.spec) for task in tasks
    ]


async def test_a_job_id_is_written_once(world: World, jobs: Jobs) -> None:
    job, run, tasks = world.draft(2)
    await jobs.create_job(job, run, tasks, answer=StoredResponse(201, b""), once=None)
    _, other_run, _ = world.draft(0)
    await refused(
        ErrorCode.CONFLICT,
        jobs.create_job(job, other_run, [], answer=StoredResponse(201, b""), once=None),
    )
    assert (await world.view(job.job_id)).latest_run == run
    assert len(await world.rows(run.run_id)) == 2
    assert await world.rows(other_run.run_id) == []


@pytest.mark.guarantee("G1")
async def test_a_create_that_fails_leaves_nothing(world: World, jobs: Jobs) -> None:
    taken_job, taken_run = await world.submit(1)
    job, run, tasks = world.draft(200)
    clashing = structs.replace(run, run_id=taken_run)
    await refused(
        ErrorCode.CONFLICT,
        jobs.create_job(job, clashing, tasks, answer=StoredResponse(201, b""), once=None),
    )
    assert await jobs.get_job(CALLER, job.job_id) is None
    assert await jobs.find_job(job.job_id) is None
    assert len(await world.rows(taken_run)) == 1
    assert (await world.view(taken_job)).job.latest_run_id == taken_run


async def test_the_answer_is_stored_with_the_job(
    world: World, jobs: Jobs, idempotency: Idempotency
) -> None:
    assert isinstance(await claim_key(world, idempotency, "scope"), ClaimedKey)
    job, run, tasks = world.draft(1)
    answer = StoredResponse(201, b'{"bytes": "\xff"}')
    await jobs.create_job(job, run, tasks, answer=answer, once=IdempotencyScope("scope"))
    assert await claim_key(world, idempotency, "scope") == answer


async def test_an_answered_key_makes_no_second_job(
    world: World, jobs: Jobs, idempotency: Idempotency
) -> None:
    await claim_key(world, idempotency, "scope")
    await world.submit(1, once=IdempotencyScope("scope"))
    job, run, tasks = world.draft(1)
    await refused(
        ErrorCode.CONFLICT,
        jobs.create_job(
            job, run, tasks, answer=StoredResponse(201, b""), once=IdempotencyScope("scope")
        ),
    )
    assert await jobs.get_job(CALLER, job.job_id) is None


@pytest.mark.guarantee("G15")
async def test_another_callers_job_is_absent(world: World, jobs: Jobs, runs: Runs) -> None:
    job_id, run_id = await world.submit(1, closed=False)
    assert await jobs.get_job(STRANGER, job_id) is None
    assert await jobs.list_jobs(STRANGER, status=None, before=None, limit=10) == []
    assert await runs.get_run(STRANGER, job_id, run_id) is None
    assert await runs.list_runs(STRANGER, job_id, before=None, limit=10) == []
    now = world.now
    for attempt in (
        jobs.close_job(STRANGER, job_id, now=now),
        jobs.delete_job(STRANGER, job_id, now=now),
        runs.stop_run(STRANGER, job_id, now=now),
        runs.pause_run(STRANGER, job_id, paused=True, now=now),
        runs.delete_run(STRANGER, job_id, run_id, now=now),
        jobs.append_tasks(
            AppendRequest(
                caller=STRANGER,
                job_id=job_id,
                specs=[spec(0)],
                last_batch=False,
                max_tasks=10,
                now=now,
            ),
            answer=lambda made: StoredResponse(200, b""),
            once=None,
        ),
        runs.rerun(
            RerunRequest(
                caller=STRANGER,
                job_id=job_id,
                run_id=world.clock.new_id(),
                statuses=None,
                window_start=0,
                large_from=10_000,
                now=now,
            ),
            answer=lambda made: StoredResponse(200, b""),
            once=None,
        ),
    ):
        await refused(ErrorCode.NOT_FOUND, attempt)
    assert (await world.view(job_id)).job.version == 1


async def test_jobs_are_listed_newest_first_below_a_mark(world: World, jobs: Jobs) -> None:
    made = [(await world.submit(1))[0] for _ in range(5)]
    await world.submit(1, caller=STRANGER)
    listed = await jobs.list_jobs(CALLER, status=None, before=None, limit=3)
    assert [view.job.job_id for view in listed] == made[:1:-1]
    assert all(view.latest_run is not None for view in listed)
    rest = await jobs.list_jobs(CALLER, status=None, before=made[2], limit=3)
    assert [view.job.job_id for view in rest] == [made[1], made[0]]


async def test_a_status_lists_only_its_jobs(world: World, jobs: Jobs) -> None:
    closed, _ = await world.submit(1)
    opened, _ = await world.submit(1, closed=False)
    deleted, _ = await world.submit(1)
    await jobs.delete_job(CALLER, deleted, now=world.now)

    async def listed(status: JobStatus | None) -> list[str]:
        views = await jobs.list_jobs(CALLER, status=status, before=None, limit=10)
        return [view.job.job_id for view in views]

    assert await listed(JobStatus.CLOSED) == [closed]
    assert await listed(JobStatus.OPEN) == [opened]
    assert await listed(JobStatus.DELETED) == [deleted]
    assert await listed(None) == [opened, closed]


async def test_added_tasks_continue_the_order(world: World) -> None:
    job_id, run_id = await world.submit(2, closed=False)
    await world.clock.advance(1)
    assert (await world.append(job_id, 3)).body == b"3 2"
    run = await world.run(job_id)
    assert (run.stats.total, run.next_index, run.status) == (5, 5, RunStatus.RUNNING)
    assert run.updated_at == world.now
    rows = await world.rows(run_id)
    assert [row.task_id for row in rows] == [ids.task_id(run_id, index) for index in range(5)]
    assert rows[4].created_at == world.now


async def test_adding_wakes_a_run_that_waits_for_tasks(world: World) -> None:
    job_id, run_id = await world.submit(0, closed=False)
    assert (await world.run(job_id)).status is RunStatus.PENDING
    await world.append(job_id, 1)
    run = await world.run(job_id)
    assert (run.status, run.version) == (RunStatus.RUNNING, 2)
    assert (await world.succeed(run_id, 0)).run_status is RunStatus.PENDING
    await world.append(job_id, 0)
    assert (await world.run(job_id)).status is RunStatus.PENDING


@pytest.mark.guarantee("G2")
async def test_parallel_adds_share_no_index_and_lose_none(world: World) -> None:
    job_id, run_id = await world.submit(0, closed=False)
    answers = await asyncio.gather(*(world.append(job_id, size) for size in range(1, 21)))
    given = [tuple(map(int, answer.body.split())) for answer in answers]
    indexes = sorted(index for size, first in given for index in range(first, first + size))
    assert indexes == list(range(210))
    assert [row.index for row in await world.rows(run_id)] == indexes
    assert (await world.run(job_id)).stats.total == 210


async def test_the_last_batch_closes_the_job(world: World) -> None:
    job_id, run_id = await world.submit(1, closed=False)
    await world.succeed(run_id, 0)
    assert (await world.append(job_id, 1, last_batch=True)).body == b"1 1"
    view = await world.view(job_id)
    assert view.job.status is JobStatus.CLOSED
    assert view.latest_run is not None
    assert view.latest_run.last_batch_received
    assert view.latest_run.status is RunStatus.RUNNING
    assert (await world.succeed(run_id, 1)).run_status is RunStatus.COMPLETED
    await refused(ErrorCode.JOB_NOT_OPEN, world.append(job_id, 1))


async def test_an_empty_last_batch_is_a_close(world: World) -> None:
    job_id, run_id = await world.submit(1, closed=False)
    await world.succeed(run_id, 0)
    await world.append(job_id, 0, last_batch=True)
    view = await world.view(job_id)
    assert view.job.status is JobStatus.CLOSED
    assert view.latest_run is not None
    assert view.latest_run.status is RunStatus.COMPLETED


async def test_adding_beyond_the_quota_adds_nothing(world: World) -> None:
    job_id, run_id = await world.submit(3, closed=False)
    await refused(ErrorCode.QUOTA_EXCEEDED, world.append(job_id, 2, max_tasks=4, last_batch=True))
    assert len(await world.rows(run_id)) == 3
    assert (await world.view(job_id)).job.status is JobStatus.OPEN
    await world.append(job_id, 1, max_tasks=4)


async def test_a_last_batch_received_takes_no_more(world: World, jobs: Jobs) -> None:
    job, run, tasks = world.draft(1, closed=False)
    latched = structs.replace(run, last_batch_received=True)
    await jobs.create_job(job, latched, tasks, answer=StoredResponse(201, b""), once=None)
    await refused(ErrorCode.LAST_BATCH_RECEIVED, world.append(job.job_id, 1))


@pytest.mark.parametrize("end", ["closed", "stopped", "deleted", "run deleted"])
async def test_only_an_open_live_job_takes_tasks(
    world: World, jobs: Jobs, runs: Runs, end: str
) -> None:
    job_id, run_id = await world.submit(1, closed=end == "closed")
    if end == "stopped":
        await runs.stop_run(CALLER, job_id, now=world.now)
    elif end == "deleted":
        await jobs.delete_job(CALLER, job_id, now=world.now)
    elif end == "run deleted":
        await runs.delete_run(CALLER, job_id, run_id, now=world.now)
    await refused(ErrorCode.JOB_NOT_OPEN, world.append(job_id, 1))
    assert len(await world.rows(run_id)) == 1


async def test_a_rerun_closes_the_job_to_more_tasks(world: World, runs: Runs) -> None:
    job_id, _ = await world.submit(1, closed=False)
    await runs.stop_run(CALLER, job_id, now=world.now)
    await world.rerun(job_id)
    assert (await world.view(job_id)).job.status is JobStatus.CLOSED
    await refused(ErrorCode.JOB_NOT_OPEN, world.append(job_id, 1))


async def test_an_add_under_a_key_happens_once(world: World, idempotency: Idempotency) -> None:
    job_id, run_id = await world.submit(0, closed=False)
    await claim_key(world, idempotency, "add")
    first = await world.append(job_id, 2, once=IdempotencyScope("add"))
    assert await claim_key(world, idempotency, "add") == first
    assert await world.append(job_id, 2, once=IdempotencyScope("add")) == first
    assert len(await world.rows(run_id)) == 2


async def test_an_answer_that_cannot_be_rendered_undoes_the_add(world: World, jobs: Jobs) -> None:
    job_id, run_id = await world.submit(0, closed=False)

    def broken(made: Appended) -> StoredResponse:
        raise RuntimeError("rendering failed")

    with pytest.raises(RuntimeError, match="rendering"):
        await jobs.append_tasks(
            AppendRequest(
                caller=CALLER,
                job_id=job_id,
                specs=[spec(0)],
                last_batch=True,
                max_tasks=10,
                now=world.now,
            ),
            answer=broken,
            once=None,
        )
    view = await world.view(job_id)
    assert view.job.status is JobStatus.OPEN
    assert view.latest_run is not None
    assert view.latest_run.stats.total == 0
    assert await world.rows(run_id) == []


async def test_closing_completes_a_drained_run(world: World, jobs: Jobs) -> None:
    job_id, run_id = await world.submit(1, closed=False)
    await world.succeed(run_id, 0)
    await world.clock.advance(1)
    view = await jobs.close_job(CALLER, job_id, now=world.now)
    assert view.job.status is JobStatus.CLOSED
    assert (view.job.version, view.job.updated_at) == (2, world.now)
    assert view.latest_run is not None
    assert view.latest_run.status is RunStatus.COMPLETED
    assert view.latest_run.last_batch_received
    assert await jobs.close_job(CALLER, job_id, now=world.now + 1) == view


async def test_closing_leaves_a_busy_run_running(world: World, jobs: Jobs) -> None:
    job_id, run_id = await world.submit(1, closed=False)
    view = await jobs.close_job(CALLER, job_id, now=world.now)
    assert view.latest_run is not None
    assert view.latest_run.status is RunStatus.RUNNING
    assert (await world.succeed(run_id, 0)).run_status is RunStatus.COMPLETED


async def test_closing_does_not_revive_a_stopped_run(world: World, jobs: Jobs, runs: Runs) -> None:
    job_id, _ = await world.submit(0, closed=False)
    await runs.stop_run(CALLER, job_id, now=world.now)
    view = await jobs.close_job(CALLER, job_id, now=world.now)
    assert view.latest_run is not None
    assert view.latest_run.status is RunStatus.STOPPED


async def test_what_is_gone_or_deleted_cannot_be_closed(world: World, jobs: Jobs) -> None:
    await refused(ErrorCode.NOT_FOUND, jobs.close_job(CALLER, world.clock.new_id(), now=1))
    job_id, _ = await world.submit(1, closed=False)
    await jobs.delete_job(CALLER, job_id, now=world.now)
    await refused(ErrorCode.NOT_FOUND, jobs.close_job(CALLER, job_id, now=world.now))


async def test_deleting_leaves_a_tombstone_until_the_purge(
    world: World, jobs: Jobs, runs: Runs
) -> None:
    job_id, first = await world.submit(1)
    await runs.stop_run(CALLER, job_id, now=world.now)
    second, _ = await world.rerun(job_id)
    assert await jobs.delete_job(CALLER, job_id, now=world.now) == [first, second]
    view = await world.view(job_id)
    assert view.job.status is JobStatus.DELETED
    assert view.latest_run == await world.run(job_id, second)
    assert view.latest_run.status is RunStatus.DELETED
    assert await jobs.list_jobs(CALLER, status=JobStatus.DELETED, before=None, limit=9) == [view]
    await refused(ErrorCode.NO_PRIOR_RUN, runs.stop_run(CALLER, job_id, now=world.now))
    await refused(ErrorCode.NO_PRIOR_RUN, world.rerun(job_id))
    assert (await world.run(job_id, first)).status is RunStatus.DELETED
    assert await jobs.delete_job(CALLER, job_id, now=world.now + 1) == [first, second]
    assert await world.view(job_id) == view
    assert sorted(await runs.deleted_runs()) == sorted([(job_id, first), (job_id, second)])

    await jobs.purge_job(job_id)
    assert (await world.view(job_id)).job.status is JobStatus.DELETED
    for run_id, left in ((second, first), (first, None)):
        await runs.purge_run(run_id)
        latest = (await world.view(job_id)).latest_run
        assert (None if latest is None else latest.run_id) == left
    await jobs.purge_job(job_id)
    assert await jobs.get_job(CALLER, job_id) is None
    assert await jobs.find_job(job_id) is None
    assert await runs.deleted_runs() == []
    await refused(ErrorCode.NOT_FOUND, jobs.delete_job(CALLER, job_id, now=world.now))
    await jobs.purge_job(job_id)


async def test_a_purge_spares_what_is_not_deleted(world: World, jobs: Jobs, runs: Runs) -> None:
    job_id, run_id = await world.submit(1)
    await runs.purge_run(run_id)
    await jobs.purge_job(job_id)
    assert (await world.view(job_id)).latest_run is not None
