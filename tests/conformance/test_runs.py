"""The contract of every runs adapter, sentence by sentence of the port."""

from __future__ import annotations

import pytest

from conveyor.domain.errors import ErrorCode
from conveyor.domain.model import (
    JobStatus,
    RunFailure,
    RunStatus,
    Spend,
    TaskFailure,
    TaskStatus,
)
from conveyor.ports.binding import Jobs, Runs, Tasks
from conveyor.ports.records import Idempotency, IdempotencyScope, Rerun, RerunRequest
from conveyor.ports.tasks import NotClaimable
from tests.conformance.world import CALLER, CLAIM_LENGTH, F, P, R, S, World, refused


async def test_runs_are_read_by_id_and_the_latest_without(world: World, runs: Runs) -> None:
    job_id, first = await world.submit(1)
    await world.succeed(first, 0)
    second, _ = await world.rerun(job_id)
    assert (await world.run(job_id)).run_id == second
    assert (await world.run(job_id, first)).status is RunStatus.COMPLETED
    await runs.delete_run(CALLER, job_id, second, now=world.now)
    assert (await world.run(job_id)).run_id == first
    assert (await world.run(job_id, second)).status is RunStatus.DELETED
    assert await runs.get_run(CALLER, job_id, world.clock.new_id()) is None
    other_job, _ = await world.submit(1)
    assert await runs.get_run(CALLER, other_job, first) is None


async def test_runs_are_listed_newest_first_below_a_mark(world: World, runs: Runs) -> None:
    job_id, run_id = await world.submit(1)
    made = [run_id]
    for _ in range(4):
        await runs.stop_run(CALLER, job_id, now=world.now)
        made.append((await world.rerun(job_id))[0])
    await runs.delete_run(CALLER, job_id, made[3], now=world.now)
    listed = await runs.list_runs(CALLER, job_id, before=None, limit=2)
    assert [run.run_id for run in listed] == [made[4], made[2]]
    assert [run.run_sequence for run in listed] == [5, 3]
    rest = await runs.list_runs(CALLER, job_id, before=3, limit=5)
    assert [run.run_id for run in rest] == [made[1], made[0]]


async def test_the_moment_of_a_change_does_not_go_back_with_the_clock(
    world: World, jobs: Jobs, runs: Runs
) -> None:
    job_id, run_id = await world.submit(3, closed=False)
    made_at = world.now
    world.clock.shift(-7_200)
    for change in (
        lambda: world.succeed(run_id, 0),
        lambda: runs.pause_run(CALLER, job_id, paused=True, now=world.now),
        lambda: jobs.close_job(CALLER, job_id, now=world.now),
        lambda: runs.stop_run(CALLER, job_id, now=world.now),
        lambda: jobs.delete_job(CALLER, job_id, now=world.now),
    ):
        await change()
        view, run = await world.view(job_id), await world.run(job_id, run_id)
        assert (view.job.updated_at, run.updated_at) == (made_at, made_at)


@pytest.mark.guarantee("G9")
async def test_once_stopped_no_task_can_be_claimed(world: World, runs: Runs) -> None:
    job_id, run_id = await world.submit(2)
    await world.clock.advance(1)
    run = await runs.stop_run(CALLER, job_id, now=world.now)
    assert (run.status, run.version, run.updated_at) == (RunStatus.STOPPED, 2, world.now)
    assert await world.claim(run_id, 0) == NotClaimable()
    assert await runs.stop_run(CALLER, job_id, now=world.now + 1) == run


async def test_a_run_that_ended_cannot_be_stopped(world: World, runs: Runs) -> None:
    completed, run_id = await world.submit(1)
    await world.succeed(run_id, 0)
    failed, failed_run = await world.submit(1)
    await runs.fail_run(
        failed_run, reason=RunFailure.INSUFFICIENT_CREDITS, detail="no", now=world.now
    )
    for job_id in (completed, failed):
        await refused(ErrorCode.RUN_NOT_STOPPABLE, runs.stop_run(CALLER, job_id, now=world.now))


async def test_a_job_whose_runs_are_deleted_has_none(world: World, jobs: Jobs, runs: Runs) -> None:
    job_id, run_id = await world.submit(1)
    await runs.delete_run(CALLER, job_id, run_id, now=world.now)
    deleted, _ = await world.submit(1)
    await jobs.delete_job(CALLER, deleted, now=world.now)
    for one in (job_id, deleted):
        await refused(ErrorCode.NO_PRIOR_RUN, runs.stop_run(CALLER, one, now=world.now))
        await refused(
            ErrorCode.NO_PRIOR_RUN, runs.pause_run(CALLER, one, paused=True, now=world.now)
        )
        await refused(ErrorCode.NO_PRIOR_RUN, world.rerun(one))
    unknown = world.clock.new_id()
    await refused(ErrorCode.NOT_FOUND, runs.stop_run(CALLER, unknown, now=world.now))


async def test_a_pause_is_beside_the_status(world: World, runs: Runs) -> None:
    job_id, run_id = await world.submit(1)
    paused = await runs.pause_run(CALLER, job_id, paused=True, now=world.now)
    assert (paused.paused, paused.status, paused.version) == (True, RunStatus.RUNNING, 2)
    again = await runs.pause_run(CALLER, job_id, paused=True, now=world.now + 1)
    assert again == paused
    await world.claimed(run_id, 0)
    resumed = await runs.pause_run(CALLER, job_id, paused=False, now=world.now)
    assert (resumed.paused, resumed.version) == (False, 3)
    await runs.stop_run(CALLER, job_id, now=world.now)
    await refused(ErrorCode.CONFLICT, runs.pause_run(CALLER, job_id, paused=True, now=world.now))


async def test_an_account_failure_ends_a_live_run_once(world: World, runs: Runs) -> None:
    job_id, run_id = await world.submit(1)
    reason, now = RunFailure.API_KEY_CAP_REACHED, world.now
    assert await runs.fail_run(run_id, reason=reason, detail="cap", now=now)
    run = await world.run(job_id)
    assert (run.status, run.failure_reason, run.failure_detail) == (
        RunStatus.FAILED,
        reason,
        "cap",
    )
    other = RunFailure.INSUFFICIENT_CREDITS
    assert not await runs.fail_run(run_id, reason=other, detail="", now=now)
    assert await world.run(job_id) == run
    assert not await runs.fail_run(world.clock.new_id(), reason=other, detail="", now=now)


async def test_a_full_rerun_starts_every_task_afresh(world: World, tasks: Tasks) -> None:
    job_id, first = await world.submit(3)
    await world.succeed(first, 0)
    await world.fail(first, 1)
    await world.succeed(first, 2)
    before = await world.rows(first)
    await world.clock.advance(1)
    second, answer = await world.rerun(job_id)
    assert answer == f"3 0 {first}"
    run = await world.run(job_id)
    assert (run.run_id, run.run_sequence, run.rerun_of) == (second, 2, first)
    assert (run.status, run.next_index, run.created_at) == (RunStatus.RUNNING, 3, world.now)
    assert run.last_batch_received
    assert (run.stats.total, run.stats.completed, run.stats.spend) == (3, 0, Spend())
    job = (await world.view(job_id)).job
    assert (job.run_count, job.latest_run_id) == (2, second)
    fresh = await world.rows(second)
    assert [(row.task_id, row.index, row.spec) for row in fresh] == [
        (row.task_id, row.index, row.spec) for row in before
    ]
    assert {row.status for row in fresh} == {P}
    assert {(row.attempts, row.source_run_id, row.result) for row in fresh} == {(0, None, None)}
    assert {row.created_at for row in fresh} == {world.now}
    assert await tasks.task_history(second, fresh[0].task_id) == []
    assert await world.rows(first) == before


async def test_a_partial_rerun_inherits_what_it_does_not_repeat(world: World, tasks: Tasks) -> None:
    job_id, first = await world.submit(5)
    await world.succeed(first, 0)
    await world.fail(first, 1, TaskFailure.BLOCKED)
    await world.succeed(first, 2)
    await world.fail(first, 3)
    await world.succeed(first, 4)
    second, answer = await world.rerun(job_id, F)
    assert answer == f"2 3 {first}"
    run = await world.run(job_id)
    assert (run.stats.total, run.stats.successful, run.stats.failed) == (5, 3, 0)
    assert run.stats.failure_reasons == {}
    assert run.status is RunStatus.RUNNING
    old, new = await world.rows(first), await world.rows(second)
    assert [row.status for row in new] == [S, P, S, P, S]
    assert [row.source_run_id for row in new] == [first, None, first, None, first]
    assert [row.task_id for row in new] == [row.task_id for row in old]
    assert new[0].result == old[0].result
    assert new[0].attempts == old[0].attempts
    assert await tasks.task_history(second, new[0].task_id) == []
    for index in (1, 3):
        task = await world.claimed(second, index, task_id=old[index].task_id)
        settled = await world.settle(task, world.success(task))
    assert settled.run_status is RunStatus.COMPLETED
    assert (await world.run(job_id)).stats.successful == 5


async def test_inherited_failures_are_counted_by_reason(world: World) -> None:
    job_id, first = await world.submit(4)
    await world.fail(first, 0, TaskFailure.BLOCKED)
    await world.fail(first, 1, TaskFailure.TIMEOUT)
    await world.fail(first, 2, TaskFailure.BLOCKED)
    await world.succeed(first, 3)
    second, answer = await world.rerun(job_id, S)
    assert answer == f"1 3 {first}"
    stats = (await world.run(job_id)).stats
    assert (stats.total, stats.successful, stats.failed) == (4, 0, 3)
    assert stats.failure_reasons == {"blocked": 2, "timeout": 1}
    old, new = await world.rows(first), await world.rows(second)
    assert [row.error for row in new] == [old[0].error, old[1].error, old[2].error, None]
    assert [row.failure for row in new] == [row.failure for row in old]


async def test_a_partial_rerun_leaves_unfinished_rows_out(world: World, runs: Runs) -> None:
    job_id, first = await world.submit(5)
    await world.succeed(first, 0)
    await world.fail(first, 1)
    abandoned = await world.claimed(first, 2)
    await runs.stop_run(CALLER, job_id, now=world.now)
    await world.clock.advance(CLAIM_LENGTH / 1_000)
    second, answer = await world.rerun(job_id, F)
    assert answer == f"1 1 {first}"
    run = await world.run(job_id)
    assert (run.stats.total, run.next_index) == (2, 2)
    assert [row.index for row in await world.rows(second)] == [0, 1]
    assert (await world.settle(abandoned, world.success(abandoned))).applied
    assert len(await world.rows(second)) == 2
    await runs.stop_run(CALLER, job_id, now=world.now)
    third, answer = await world.rerun(job_id, P)
    assert answer == f"1 1 {second}"
    assert [row.status for row in await world.rows(third)] == [S, P]


@pytest.mark.parametrize(("status", "index"), [(P, 3), (R, 2)])
async def test_pending_and_processing_are_told_apart(
    world: World, runs: Runs, status: TaskStatus, index: int
) -> None:
    job_id, first = await world.submit(4)
    await world.succeed(first, 0)
    await world.fail(first, 1)
    await world.claimed(first, 2)
    await runs.stop_run(CALLER, job_id, now=world.now)
    await world.clock.advance(CLAIM_LENGTH / 1_000)
    second, answer = await world.rerun(job_id, status)
    assert answer == f"1 2 {first}"
    assert [row.index for row in await world.rows(second)] == [0, 1, index]
    assert (await world.run(job_id)).next_index == index + 1


async def test_sources_chase_back_to_the_owner_of_the_body(world: World, runs: Runs) -> None:
    job_id, first = await world.submit(3)
    ids_of = [row.task_id for row in await world.rows(first)]
    await world.succeed(first, 0)
    await world.fail(first, 1)
    await world.fail(first, 2)
    second, _ = await world.rerun(job_id, F)
    task = await world.claimed(second, 1, task_id=ids_of[1])
    await world.settle(task, world.success(task))
    await runs.stop_run(CALLER, job_id, now=world.now)
    third, _ = await world.rerun(job_id, P)
    sources = [row.source_run_id for row in await world.rows(third)]
    assert sources == [first, second, None]


async def test_a_source_stays_while_a_run_draws_from_it(world: World, runs: Runs) -> None:
    job_id, first = await world.submit(2)
    await world.succeed(first, 0)
    await world.fail(first, 1)
    second, _ = await world.rerun(job_id, F)
    await refused(
        ErrorCode.RUN_HAS_DESCENDANTS, runs.delete_run(CALLER, job_id, first, now=world.now)
    )
    await runs.delete_run(CALLER, job_id, second, now=world.now)
    await runs.delete_run(CALLER, job_id, first, now=world.now)
    assert await runs.get_run(CALLER, job_id, None) is None


async def test_a_full_rerun_pins_nothing(world: World, runs: Runs) -> None:
    job_id, first = await world.submit(1)
    await world.succeed(first, 0)
    second, _ = await world.rerun(job_id)
    await runs.delete_run(CALLER, job_id, first, now=world.now)
    assert (await world.view(job_id)).job.latest_run_id == second


async def test_a_live_run_cannot_be_rerun(world: World, runs: Runs) -> None:
    job_id, first = await world.submit(1, closed=False)
    await refused(ErrorCode.RUN_NOT_TERMINAL, world.rerun(job_id))
    assert (await world.view(job_id)).job.status is JobStatus.OPEN
    task = await world.claimed(first, 0)
    await runs.stop_run(CALLER, job_id, now=world.now)
    await refused(ErrorCode.RUN_NOT_TERMINAL, world.rerun(job_id))
    await world.settle(task, world.retry(task))
    await world.rerun(job_id)


async def test_a_rerun_needs_something_to_repeat(world: World, jobs: Jobs) -> None:
    job_id, first = await world.submit(1)
    await world.succeed(first, 0)
    before = await world.view(job_id)
    await refused(ErrorCode.NO_MATCHING_TASKS, world.rerun(job_id, F, P))
    assert await world.view(job_id) == before
    empty, _ = await world.submit(0, closed=False)
    await jobs.close_job(CALLER, empty, now=world.now)
    await refused(ErrorCode.NO_MATCHING_TASKS, world.rerun(empty))


async def test_the_window_holds_for_partial_reruns_alone(world: World) -> None:
    job_id, first = await world.submit(1)
    made_at = (await world.run(job_id)).created_at
    await world.clock.advance(1)
    await world.fail(first, 0)
    await refused(
        ErrorCode.PARTIAL_RERUN_WINDOW_EXPIRED,
        world.rerun(job_id, F, window_start=made_at + 1),
    )
    second, _ = await world.rerun(job_id, window_start=made_at + 1)
    assert (await world.run(job_id)).run_id == second


async def test_a_window_that_begins_with_the_run_is_open(world: World) -> None:
    job_id, first = await world.submit(1)
    await world.fail(first, 0)
    made_at = (await world.run(job_id)).created_at
    await world.rerun(job_id, F, window_start=made_at)


async def test_a_run_id_is_made_once(world: World) -> None:
    job_id, first = await world.submit(2)
    await world.succeed(first, 0)
    await world.fail(first, 1)
    run_id, answer = await world.rerun(job_id, F)
    assert await world.rerun(job_id, F, run_id=run_id) == (run_id, answer)
    assert (await world.view(job_id)).job.run_count == 2
    assert len(await world.rows(run_id)) == 2


async def test_a_rerun_under_a_key_happens_once(world: World, idempotency: Idempotency) -> None:
    job_id, first = await world.submit(1)
    await world.succeed(first, 0)
    await idempotency.claim_idempotency_key(
        "rerun",
        fingerprint=b"",
        created_id="ID",
        now=world.now,
        lapses_at=world.now + 1,
        expires_at=world.now + 2,
    )
    _, answer = await world.rerun(job_id, once=IdempotencyScope("rerun"))
    _, again = await world.rerun(job_id, once=IdempotencyScope("rerun"))
    assert again == answer
    assert (await world.view(job_id)).job.run_count == 2


async def test_an_answer_that_cannot_be_rendered_undoes_the_rerun(world: World, runs: Runs) -> None:
    job_id, first = await world.submit(1)
    await world.succeed(first, 0)
    before = await world.view(job_id)

    def broken(made: Rerun) -> None:
        raise RuntimeError("rendering failed")

    with pytest.raises(RuntimeError, match="rendering"):
        await runs.rerun(
            RerunRequest(
                caller=CALLER,
                job_id=job_id,
                run_id=world.clock.new_id(),
                statuses=None,
                window_start=0,
                large_from=10_000,
                now=world.now,
            ),
            answer=broken,  # type: ignore[arg-type]
            once=None,
        )
    assert await world.view(job_id) == before
