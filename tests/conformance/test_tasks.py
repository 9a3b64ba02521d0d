"""The contract of every tasks adapter, sentence by sentence of the port."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
import pytest

from conveyor.domain import ids
from conveyor.domain.model import (
    EventKind,
    RunFailure,
    RunStatus,
    Spend,
    TaskFailure,
    WaitReason,
)
from conveyor.domain.task_rules import LEAST_HOLD, Deferred, Failed, Released, Settlement
from conveyor.ports.binding import Jobs, Runs, Tasks
from conveyor.ports.tasks import Claimed, ClaimedElsewhere, NotClaimable, Settled
from tests.conformance.world import (
    CALLER,
    CLAIM_LENGTH,
    MAX_INTERRUPTIONS,
    PROBLEM,
    F,
    P,
    R,
    S,
    World,
    spec,
)


async def lapse(world: World) -> None:
    await world.clock.advance(CLAIM_LENGTH / 1_000)


async def test_a_pending_task_is_claimed(world: World, tasks: Tasks) -> None:
    _, run_id = await world.submit(2)
    await world.clock.advance(1)
    task = await world.claimed(run_id, 1)
    assert (task.run_id, task.index, task.task_id) == (run_id, 1, ids.task_id(run_id, 1))
    assert task.spec == spec(1)
    assert (task.status, task.claim_number) == (R, 1)
    assert (task.claimed_until, task.updated_at) == (world.now + CLAIM_LENGTH, world.now)
    assert await tasks.get_task(run_id, task.task_id) == task
    assert [row.status for row in await world.rows(run_id)] == [P, R]


async def test_a_live_claim_holds_others_off(world: World) -> None:
    _, run_id = await world.submit(1)
    task = await world.claimed(run_id, 0)
    await world.clock.advance(CLAIM_LENGTH / 1_000 - 0.001)
    assert await world.claim(run_id, 0) == ClaimedElsewhere(task.claimed_until)


async def test_a_kept_task_comes_with_how_long_its_job_keeps_results(
    world: World, tasks: Tasks
) -> None:
    job_id, run_id = await world.submit(2, result_ttl_days=5)
    other_job, other_run = await world.submit(1)
    await world.succeed(run_id, 0)
    task_id = ids.task_id(run_id, 0)
    kept = await tasks.get_kept_task(job_id, run_id, task_id)
    assert kept is not None
    assert kept.task == await tasks.get_task(run_id, task_id)
    assert kept.result_ttl_days == 5
    unknown = world.clock.new_id()
    for place in (
        (job_id, run_id, ids.task_id(run_id, 7)),
        (job_id, run_id, "nonsense"),
        (other_job, run_id, task_id),
        (job_id, other_run, task_id),
        (unknown, run_id, task_id),
        (job_id, unknown, task_id),
    ):
        assert await tasks.get_kept_task(*place) is None


@pytest.mark.parametrize("whole_job", [False, True])
async def test_a_task_of_what_is_being_deleted_is_not_kept(
    world: World, tasks: Tasks, whole_job: bool
) -> None:
    job_id, run_id = await world.submit(1)
    await world.succeed(run_id, 0)
    task_id = ids.task_id(run_id, 0)
    assert await tasks.get_kept_task(job_id, run_id, task_id) is not None
    if whole_job:
        await world.store.jobs.delete_job(CALLER, job_id, now=world.now)
    else:
        await world.store.runs.delete_run(CALLER, job_id, run_id, now=world.now)
    assert await tasks.get_kept_task(job_id, run_id, task_id) is None


@pytest.mark.guarantee("G2")
async def test_of_many_claims_at_once_one_wins(world: World) -> None:
    _, run_id = await world.submit(3)
    claims = await asyncio.gather(*(world.claim(run_id, 0) for _ in range(20)))
    assert Counter(type(one) for one in claims) == {Claimed: 1, ClaimedElsewhere: 19}


async def test_a_retry_is_held_until_it_is_due(world: World) -> None:
    _, run_id = await world.submit(1)
    task = await world.claimed(run_id, 0)
    await world.settle(task, world.retry(task, after=5_000))
    assert await world.claim(run_id, 0) == ClaimedElsewhere(world.now + 5_000, True)
    await world.clock.advance(5)
    again = await world.claimed(run_id, 0)
    assert (again.attempts, again.claim_number) == (1, 2)


@pytest.mark.parametrize("waiting", WaitReason)
async def test_a_retry_says_why_it_waits(world: World, tasks: Tasks, waiting: WaitReason) -> None:
    _, run_id = await world.submit(2)
    task = await world.claimed(run_id, 0)
    assert task.waiting is None
    retry = msgspec.structs.replace(world.retry(task, after=5_000), waiting=waiting)
    await world.settle(task, retry)
    for row in (await tasks.get_task(run_id, task.task_id), (await world.rows(run_id))[0]):
        assert row is not None
        assert (row.waiting, row.not_before) == (waiting, world.now + 5_000)
        assert (row.wait_at(world.now + 4_999), row.wait_at(world.now + 5_000)) == (waiting, None)
    assert (await world.rows(run_id))[1].waiting is None
    await world.clock.advance(5)
    await world.succeed(run_id, 0)
    assert (await world.rows(run_id))[0].wait_at(world.now) is None


async def test_a_deferred_claim_leaves_no_trace_but_its_wait(world: World, tasks: Tasks) -> None:
    job_id, run_id = await world.submit(1)
    before = await world.run(job_id)
    task = await world.claimed(run_id, 0)
    until = world.now + 20_000
    settled = await world.settle(task, Deferred(until, WaitReason.HOST_RETRY_AFTER))
    assert settled == Settled(applied=True, run_status=RunStatus.RUNNING)
    (row,) = await world.rows(run_id)
    assert (row.status, row.attempts, row.interruptions) == (P, 0, 0)
    assert (row.not_before, row.waiting) == (until, WaitReason.HOST_RETRY_AFTER)
    assert await tasks.task_history(run_id, task.task_id) == []
    assert await world.run(job_id) == before
    assert await world.claim(run_id, 0) == ClaimedElsewhere(until, True)
    assert not (await world.settle(task, Deferred(until, WaitReason.OUTAGE))).applied
    await world.clock.advance(20)
    again = await world.claimed(run_id, 0)
    assert (again.attempts, again.claim_number) == (0, 2)


async def test_a_claim_knows_since_when_its_task_waits(world: World, tasks: Tasks) -> None:
    _, run_id = await world.submit(1)
    task = await world.claimed(run_id, 0)
    assert task.waiting_since == 0
    began = world.now
    await world.settle(task, Deferred(began, WaitReason.HOST_RETRY_AFTER, began))
    task = await world.claimed(run_id, 0)
    assert task.waiting_since == began
    refused = world.retry(task, after=0, burns_attempt=False)
    await world.settle(task, msgspec.structs.replace(refused, since=began))
    assert (await world.rows(run_id))[0].waiting_since == began
    task = await world.claimed(run_id, 0)
    await world.settle(task, Released())
    task = await world.claimed(run_id, 0)
    assert task.waiting_since == began
    await world.settle(task, world.retry(task, after=0))  # an attempt that was answered
    assert (await world.claimed(run_id, 0)).waiting_since == 0
    row = await tasks.get_task(run_id, task.task_id)
    assert row is not None
    assert row.waiting_since == 0


async def test_a_clock_set_back_holds_a_row_no_longer_than_its_wait(world: World) -> None:
    _, run_id = await world.submit(3)
    retried, deferred, _ = [await world.claimed(run_id, index) for index in range(3)]
    await world.settle(retried, world.retry(retried, after=30_000))
    await world.settle(deferred, Deferred(world.now + 1, WaitReason.OUTAGE))
    began = world.now
    world.clock.shift(-7_200)
    for index, wait, held, waits in (
        (0, 30_000, 30_000, True),
        (1, 1, LEAST_HOLD, True),
        (2, CLAIM_LENGTH, CLAIM_LENGTH, False),
    ):
        found = await world.claim(run_id, index)
        assert found == ClaimedElsewhere(world.now + held, waits, began + wait)
    world.clock.shift(7_200)
    await world.clock.advance(30)
    await world.claimed(run_id, 0)
    await world.claimed(run_id, 1)


@pytest.mark.parametrize(
    "task_id", ["", "x" * 26, "0000000" + "Z" * 19, "0000000", "-000001" + "0" * 19]
)
async def test_a_task_that_does_not_exist_is_finished(
    world: World, tasks: Tasks, task_id: str
) -> None:
    _, run_id = await world.submit(1)
    assert await world.claim(run_id, 0, task_id=task_id or "gone") == NotClaimable()
    assert await tasks.get_task(run_id, task_id) is None
    assert await tasks.task_history(run_id, task_id) is None
    unknown = world.clock.new_id()
    assert await world.claim(unknown, 0) == NotClaimable()
    assert await tasks.get_task(unknown, ids.task_id(unknown, 0)) is None
    assert await tasks.task_history(unknown, ids.task_id(unknown, 0)) is None


async def test_terminal_tasks_are_finished(world: World) -> None:
    job_id, run_id = await world.submit(3)
    await world.succeed(run_id, 0)
    await world.fail(run_id, 1)
    await lapse(world)
    assert await world.claim(run_id, 0) == NotClaimable()
    assert await world.claim(run_id, 1) == NotClaimable()


async def test_no_task_of_an_ended_run_can_be_claimed(world: World, jobs: Jobs, runs: Runs) -> None:
    stopped, first = await world.submit(1)
    await runs.stop_run(CALLER, stopped, now=world.now)
    _, second = await world.submit(1)
    await runs.fail_run(second, reason=RunFailure.INSUFFICIENT_CREDITS, detail="", now=world.now)
    deleted, third = await world.submit(1)
    await jobs.delete_job(CALLER, deleted, now=world.now)
    for run_id in (first, second, third):
        assert await world.claim(run_id, 0) == NotClaimable()


@pytest.mark.guarantee("G7")
async def test_a_lapsed_claim_is_an_interruption(world: World, tasks: Tasks) -> None:
    _, run_id = await world.submit(1)
    first = await world.claimed(run_id, 0)
    await lapse(world)
    again = await world.claimed(run_id, 0)
    assert (again.interruptions, again.attempts) == (1, 0)
    assert again.claim_number > first.claim_number
    history = await tasks.task_history(run_id, again.task_id)
    assert history is not None
    (event,) = history
    assert (event.kind, event.attempt) == (EventKind.INTERRUPTION, 1)
    assert (event.started_at, event.ended_at) == (first.updated_at, world.now)
    assert event.error is not None
    assert event.error.code == "interrupted"
    assert not (await world.settle(first, world.success(first))).applied
    assert (await world.settle(again, world.success(again))).applied


@pytest.mark.guarantee("G8")
async def test_one_interruption_too_many_fails_the_task(world: World, tasks: Tasks) -> None:
    job_id, run_id = await world.submit(2)
    await world.succeed(run_id, 1)
    for _ in range(MAX_INTERRUPTIONS + 1):
        last = await world.claimed(run_id, 0)
        await lapse(world)
    assert await world.claim(run_id, 0) == NotClaimable(RunStatus.COMPLETED)
    assert await world.claim(run_id, 0) == NotClaimable()
    run = await world.run(job_id)
    assert run.status is RunStatus.COMPLETED
    assert (run.stats.successful, run.stats.failed) == (1, 1)
    assert run.stats.failure_reasons == {"other": 1}
    row = await tasks.get_task(run_id, last.task_id)
    assert row is not None
    assert (row.status, row.failure, row.attempts) == (F, TaskFailure.OTHER, 0)
    assert row.interruptions == MAX_INTERRUPTIONS + 1
    assert row.error is not None
    assert row.error.code == "interrupted"
    history = await tasks.task_history(run_id, last.task_id)
    assert history is not None
    assert len(history) == MAX_INTERRUPTIONS + 1
    assert not (await world.settle(last, world.success(last))).applied


async def test_a_pause_does_not_hinder_a_claim(world: World, runs: Runs) -> None:
    job_id, run_id = await world.submit(1)
    await runs.pause_run(CALLER, job_id, paused=True, now=world.now)
    assert isinstance(await world.claim(run_id, 0), Claimed)


async def test_renewed_claims_hold_longer(world: World, tasks: Tasks) -> None:
    _, run_id = await world.submit(3)
    held = [await world.claimed(run_id, index) for index in range(3)]
    await world.settle(held[2], world.success(held[2]))
    until = world.now + 2 * CLAIM_LENGTH
    lost = (held[1].run_id, held[1].task_id, held[1].claim_number - 1)
    claims = [(task.run_id, task.task_id, task.claim_number) for task in (held[0], held[2])]
    await tasks.renew_claims(
        [*claims, lost, ("no run", held[0].task_id, 1), (run_id, "no task", 1)],
        claimed_until=until,
    )
    await lapse(world)
    assert await world.claim(run_id, 0) == ClaimedElsewhere(until)
    assert isinstance(await world.claim(run_id, 1), Claimed)
    assert await world.claim(run_id, 2) == NotClaimable()


async def test_a_renewal_never_shortens_a_claim(world: World, tasks: Tasks) -> None:
    _, run_id = await world.submit(1)
    task = await world.claimed(run_id, 0)
    claim = (run_id, task.task_id, task.claim_number)
    await tasks.renew_claims([claim], claimed_until=world.now)
    assert await world.claim(run_id, 0) == ClaimedElsewhere(task.claimed_until)
    await tasks.renew_claims([], claimed_until=world.now)


async def test_many_claims_are_renewed_at_once(world: World, tasks: Tasks) -> None:
    _, run_id = await world.submit(200)
    held = await asyncio.gather(*(world.claimed(run_id, index) for index in range(200)))
    until = world.now + 3 * CLAIM_LENGTH
    await tasks.renew_claims(
        [(run_id, task.task_id, task.claim_number) for task in held], claimed_until=until
    )
    assert {row.claimed_until for row in await world.rows(run_id)} == {until}


async def test_a_success_ends_the_task(world: World, tasks: Tasks) -> None:
    job_id, run_id = await world.submit(2)
    task = await world.claimed(run_id, 0)
    await world.clock.advance(1)
    success = world.success(task)
    assert await world.settle(task, success) == Settled(True, RunStatus.RUNNING)
    row = await tasks.get_task(run_id, task.task_id)
    assert row is not None
    assert (row.status, row.result, row.error, row.failure) == (S, success.result, None, None)
    assert (row.attempts, row.claimed_until, row.updated_at) == (1, 0, world.now)
    assert await tasks.task_history(run_id, task.task_id) == [success.event]
    run = await world.run(job_id)
    assert (run.stats.successful, run.stats.failed, run.stats.total) == (1, 0, 2)
    assert (run.version, run.updated_at) == (1, world.now)


async def test_a_failure_ends_the_task_and_is_counted_by_reason(world: World, tasks: Tasks) -> None:
    job_id, run_id = await world.submit(3)
    await world.fail(run_id, 0, TaskFailure.BLOCKED)
    await world.fail(run_id, 1, TaskFailure.BLOCKED)
    assert (await world.fail(run_id, 2)).run_status is RunStatus.COMPLETED
    run = await world.run(job_id)
    assert (run.stats.failed, run.stats.failure_reasons) == (3, {"blocked": 2, "timeout": 1})
    row = await tasks.get_task(run_id, ids.task_id(run_id, 0))
    assert row is not None
    assert (row.status, row.error, row.failure) == (F, PROBLEM, TaskFailure.BLOCKED)
    assert (row.result, row.attempts) == (None, 1)


@pytest.mark.guarantee("G4")
async def test_the_last_task_alone_completes_the_run(world: World) -> None:
    job_id, run_id = await world.submit(130)
    settled = await asyncio.gather(*(world.succeed(run_id, index) for index in range(130)))
    assert [one.run_status for one in settled].count(RunStatus.COMPLETED) == 1
    run = await world.run(job_id)
    assert (run.status, run.stats.successful, run.version) == (RunStatus.COMPLETED, 130, 2)
    assert run.stats.spend == Spend(130, 32.5)


async def test_an_open_job_waits_for_more_when_drained(world: World) -> None:
    job_id, run_id = await world.submit(1, closed=False)
    assert (await world.succeed(run_id, 0)).run_status is RunStatus.PENDING
    assert (await world.run(job_id)).status is RunStatus.PENDING


async def test_every_attempt_is_paid_for(world: World, tasks: Tasks) -> None:
    job_id, run_id = await world.submit(1)
    for _ in range(3):
        task = await world.claimed(run_id, 0)
        await world.settle(task, world.retry(task))
    await world.succeed(run_id, 0)
    assert (await world.run(job_id)).stats.spend == Spend(4, 1.0)
    history = await tasks.task_history(run_id, task.task_id)
    assert history is not None
    assert [event.attempt for event in history] == [1, 2, 3, 4]
    assert [event.error for event in history] == [PROBLEM] * 3 + [None]


@pytest.mark.parametrize("recorded", [True, False])
async def test_a_retry_goes_back_to_pending(world: World, tasks: Tasks, recorded: bool) -> None:
    job_id, run_id = await world.submit(1)
    task = await world.claimed(run_id, 0)
    retry = world.retry(task, after=7, burns_attempt=False)
    retry = msgspec.structs.replace(retry, recorded=recorded)
    assert await world.settle(task, retry) == Settled(True, RunStatus.RUNNING)
    row = await tasks.get_task(run_id, task.task_id)
    assert row is not None
    assert (row.status, row.attempts, row.not_before) == (P, 0, world.now + 7)
    assert (row.error, row.claimed_until) == (None, 0)
    history = await tasks.task_history(run_id, task.task_id)
    assert history == ([retry.event] if recorded else [])
    assert (await world.run(job_id)).stats.completed == 0


async def test_an_undone_claim_leaves_no_trace(world: World, tasks: Tasks) -> None:
    job_id, run_id = await world.submit(1)
    task = await world.claimed(run_id, 0)
    assert (await world.settle(task, Released())).applied
    row = await tasks.get_task(run_id, task.task_id)
    assert row is not None
    assert (row.status, row.attempts, row.interruptions) == (P, 0, 0)
    assert await tasks.task_history(run_id, task.task_id) == []
    assert (await world.run(job_id)).stats.spend == Spend()
    again = await world.claimed(run_id, 0)
    assert again.claim_number > task.claim_number
    assert not (await world.settle(task, world.success(task))).applied


async def settlements(world: World, run_id: str) -> list[Settlement]:
    task = await world.claimed(run_id, 0)
    await world.settle(task, Released())
    return [
        world.success(task),
        Failed(world.attempt(task), PROBLEM, TaskFailure.OTHER),
        world.retry(task),
        Released(),
    ]


@pytest.mark.guarantee("G3")
async def test_a_lost_claim_settles_nothing(world: World) -> None:
    job_id, run_id = await world.submit(1)
    every = await settlements(world, run_id)
    lost = await world.claimed(run_id, 0)
    await lapse(world)
    current = await world.claimed(run_id, 0)
    before = (await world.run(job_id), await world.rows(run_id))
    for settlement in every:
        assert await world.settle(lost, settlement) == Settled(False, RunStatus.RUNNING)
    assert (await world.run(job_id), await world.rows(run_id)) == before
    await world.settle(current, Released())
    for settlement in every:
        assert await world.settle(current, settlement) == Settled(False, RunStatus.RUNNING)


@pytest.mark.guarantee("G3")
async def test_settling_twice_counts_once(world: World, tasks: Tasks) -> None:
    job_id, run_id = await world.submit(2)
    task = await world.claimed(run_id, 0)
    results = await asyncio.gather(*(world.settle(task, world.success(task)) for _ in range(5)))
    assert Counter(result.applied for result in results) == {True: 1, False: 4}
    assert (await world.run(job_id)).stats.successful == 1
    history = await tasks.task_history(run_id, task.task_id)
    assert history is not None
    assert len(history) == 1


@pytest.mark.guarantee("G9")
async def test_a_late_result_of_a_stopped_run_is_kept(world: World, runs: Runs) -> None:
    job_id, run_id = await world.submit(3)
    held = [await world.claimed(run_id, index) for index in range(3)]
    stopped = await runs.stop_run(CALLER, job_id, now=world.now)
    assert await world.settle(held[0], world.success(held[0])) == Settled(True, RunStatus.STOPPED)
    failed = Failed(world.attempt(held[1]), PROBLEM, TaskFailure.OTHER)
    assert (await world.settle(held[1], failed)).applied
    assert (await world.settle(held[2], world.retry(held[2]))).applied
    run = await world.run(job_id)
    assert (run.status, run.version) == (RunStatus.STOPPED, stopped.version)
    assert (run.stats.successful, run.stats.failed) == (1, 1)
    assert [row.status for row in await world.rows(run_id)] == [S, F, P]
    assert await world.claim(run_id, 2) == NotClaimable()


@pytest.mark.guarantee("G10")
async def test_a_late_result_of_a_deleted_run_changes_nothing(
    world: World, jobs: Jobs, runs: Runs, tasks: Tasks
) -> None:
    job_id, run_id = await world.submit(1)
    task = await world.claimed(run_id, 0)
    await jobs.delete_job(CALLER, job_id, now=world.now)
    assert await world.settle(task, world.success(task)) == Settled(False, None)
    assert (await world.run(job_id, run_id)).stats.successful == 0
    assert await tasks.scrub_tasks(run_id, 10) == 1
    await runs.purge_run(run_id)
    assert await world.settle(task, world.success(task)) == Settled(False, None)
    assert await world.rows(run_id) == []


@pytest.mark.guarantee("G4")
async def test_a_read_after_the_end_says_completed(world: World) -> None:
    job_id, run_id = await world.submit(100)
    seen: list[int] = []

    async def watch() -> None:
        while True:
            run = await world.run(job_id)
            assert seen == [] or run.stats.completed >= seen[-1]
            assert run.stats.completed <= run.stats.total
            seen.append(run.stats.completed)
            if run.status is RunStatus.COMPLETED:
                return
            assert run.stats.completed < run.stats.total

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(world.succeed(run_id, index) for index in range(100)))
    await watching
    assert seen[-1] == 100


async def test_a_claim_whose_answer_was_lost_is_released_by_its_worker_alone(
    world: World, tasks: Tasks
) -> None:
    _, run_id = await world.submit(1)
    task = await world.claimed(run_id, 0)
    await tasks.release_claim(run_id, task.task_id, worker="somebody else")
    assert [row.status for row in await world.rows(run_id)] == [R]
    await tasks.release_claim(run_id, task.task_id, worker="worker")
    [row] = await world.rows(run_id)
    assert (row.status, row.interruptions, row.attempts) == (P, 0, 0)
    assert await tasks.task_history(run_id, task.task_id) == []
    again = await world.claimed(run_id, 0)
    assert await world.settle(again, world.success(again)) == Settled(True, RunStatus.COMPLETED)


async def test_releasing_a_claim_that_is_not_there_changes_nothing(
    world: World, tasks: Tasks
) -> None:
    _, run_id = await world.submit(1)
    await tasks.release_claim(run_id, ids.task_id(run_id, 0), worker="worker")
    await tasks.release_claim(run_id, "no task id", worker="worker")
    await tasks.release_claim("no run", ids.task_id(run_id, 0), worker="worker")
    assert [row.status for row in await world.rows(run_id)] == [P]
