"""Each port call that may change a run's status or pause is reported as a change, and no other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import NamedTuple

import pytest

from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import RunFailure, TaskFailure, TaskStatus
from conveyor.domain.task_rules import Failed, Released
from conveyor.domain.webhooks import Webhook
from conveyor.ports.binding import Jobs, Runs, Tasks
from conveyor.ports.records import StoredResponse
from conveyor.ports.schedules import ScheduleChange, Schedules
from conveyor.ports.tasks import NotClaimable
from tests.conformance.scheduled_jobs import fire, moved, read_job, schedule_job
from tests.conformance.test_dispatchable import named
from tests.conformance.world import CALLER, CLAIM_LENGTH, MAX_INTERRUPTIONS, PROBLEM, World

HOST = "shop.example:443"

Steps = Callable[[World], AsyncIterator[set[str]]]


class Case(NamedTuple):
    """A call of a port's method. `steps` yields once, before the call: the runs it is to change."""

    method: str
    steps: Steps


CASES: list[Case] = []
PORTS = (Jobs, Runs, Tasks, Schedules)
READS = {
    *("get_job", "find_job", "list_jobs", "get_run", "run_exists", "list_runs", "deleted_runs"),
    *("dispatchable_runs", "dispatchable_run", "dispatch_changes"),
    *(
        "changed_runs",
        "page_tasks",
        "get_task",
        "get_kept_task",
        "task_history",
        "unfinished_after",
    ),
    *("failure_groups", "task_hosts"),
    *("due_schedules", "list_schedules", "list_fires"),
}


def case(method: str) -> Callable[[Steps], Steps]:
    def collect(steps: Steps) -> Steps:
        CASES.append(Case(method, steps))
        return steps

    return collect


@case("create_job")
async def submit(world: World) -> AsyncIterator[set[str]]:
    made: set[str] = set()
    yield made
    made.add((await world.submit(1))[1])


@case("create_job")
async def submit_an_open_job_without_tasks(world: World) -> AsyncIterator[set[str]]:
    made: set[str] = set()
    yield made
    made.add((await world.submit(0, closed=False))[1])


@case("create_job")
async def submit_twice(world: World) -> AsyncIterator[set[str]]:
    job, run, rows = world.draft(1)
    create = world.store.jobs.create_job
    await create(job, run, rows, answer=StoredResponse(201, b""), once=None)
    yield set()
    await create(job, run, rows, answer=StoredResponse(201, b""), once=None)


@case("append_tasks")
async def add_the_first_tasks(world: World) -> AsyncIterator[set[str]]:
    job_id, run_id = await world.submit(0, closed=False)
    yield {run_id}
    await world.append(job_id, 1)


@case("append_tasks")
async def add_to_a_drained_run(world: World) -> AsyncIterator[set[str]]:
    job_id, run_id = await world.submit(1, closed=False)
    await world.succeed(run_id, 0)
    yield {run_id}
    await world.append(job_id, 1)


@case("append_tasks")
async def add_to_a_running_run(world: World) -> AsyncIterator[set[str]]:
    job_id, _ = await world.submit(1, closed=False)
    yield set()
    await world.append(job_id, 1)


@case("append_tasks")
async def add_an_empty_last_batch_to_a_drained_run(world: World) -> AsyncIterator[set[str]]:
    job_id, run_id = await world.submit(1, closed=False)
    await world.succeed(run_id, 0)
    yield {run_id}
    await world.append(job_id, 0, last_batch=True)


@case("close_job")
async def close_a_drained_job(world: World) -> AsyncIterator[set[str]]:
    job_id, run_id = await world.submit(1, closed=False)
    await world.fail(run_id, 0)
    yield {run_id}
    await world.store.jobs.close_job(CALLER, job_id, now=world.now)


@case("close_job")
async def close_a_job_with_work_left(world: World) -> AsyncIterator[set[str]]:
    job_id, _ = await world.submit(1, closed=False)
    yield set()
    await world.store.jobs.close_job(CALLER, job_id, now=world.now)


@case("delete_job")
async def delete_a_job_with_two_runs(world: World) -> AsyncIterator[set[str]]:
    job_id, first = await world.submit(1)
    await world.succeed(first, 0)
    second, _ = await world.rerun(job_id)
    yield {first, second}
    await world.store.jobs.delete_job(CALLER, job_id, now=world.now)


@case("delete_job")
async def delete_a_job_again(world: World) -> AsyncIterator[set[str]]:
    job_id, _ = await world.submit(1)
    await world.store.jobs.delete_job(CALLER, job_id, now=world.now)
    yield set()
    await world.store.jobs.delete_job(CALLER, job_id, now=world.now)


@case("purge_job")
async def purge_a_job(world: World) -> AsyncIterator[set[str]]:
    job_id, run_id = await world.submit(0, closed=False)
    await world.store.jobs.delete_job(CALLER, job_id, now=world.now)
    await world.store.runs.purge_run(run_id)
    yield set()
    await world.store.jobs.purge_job(job_id)


@case("set_webhook")
async def set_a_webhook(world: World) -> AsyncIterator[set[str]]:
    job_id, _ = await world.submit(1)
    yield set()
    webhook = Webhook("https://example.com/")
    await world.store.jobs.set_webhook(CALLER, job_id, webhook, now=world.now)


@case("change_schedule")
async def fire_a_schedule(world: World) -> AsyncIterator[set[str]]:
    job = await schedule_job(world)
    made: set[str] = set()
    yield made
    made.add((await fire(world, job.job_id)).run_id)


@case("change_schedule")
async def pause_a_schedule(world: World) -> AsyncIterator[set[str]]:
    job = await schedule_job(world)
    await fire(world, job.job_id)
    known = await read_job(world, job.job_id)
    yield set()
    change = ScheduleChange(before=known, after=moved(world, known, paused=True))
    assert await world.store.schedules.change_schedule(change)


@case("drop_old_fires")
async def drop_old_fires(world: World) -> AsyncIterator[set[str]]:
    job = await schedule_job(world)
    await fire(world, job.job_id)
    yield set()
    await world.store.schedules.drop_old_fires(before=world.now + 1, limit=10)


@case("stop_run")
async def stop(world: World) -> AsyncIterator[set[str]]:
    job_id, run_id = await world.submit(1)
    yield {run_id}
    await world.store.runs.stop_run(CALLER, job_id, now=world.now)


@case("stop_run")
async def stop_again(world: World) -> AsyncIterator[set[str]]:
    job_id, _ = await world.submit(1)
    await world.store.runs.stop_run(CALLER, job_id, now=world.now)
    yield set()
    await world.store.runs.stop_run(CALLER, job_id, now=world.now)


@case("pause_run")
async def pause(world: World) -> AsyncIterator[set[str]]:
    job_id, run_id = await world.submit(1)
    yield {run_id}
    await world.store.runs.pause_run(CALLER, job_id, paused=True, now=world.now)


@case("pause_run")
async def pause_again(world: World) -> AsyncIterator[set[str]]:
    job_id, _ = await world.submit(1)
    await world.store.runs.pause_run(CALLER, job_id, paused=True, now=world.now)
    yield set()
    await world.store.runs.pause_run(CALLER, job_id, paused=True, now=world.now)


@case("pause_run")
async def resume(world: World) -> AsyncIterator[set[str]]:
    job_id, run_id = await world.submit(1)
    await world.store.runs.pause_run(CALLER, job_id, paused=True, now=world.now)
    yield {run_id}
    await world.store.runs.pause_run(CALLER, job_id, paused=False, now=world.now)


@case("add_hosts")
async def name_a_host(world: World) -> AsyncIterator[set[str]]:
    _, run_id = await world.submit(1)
    yield {run_id}
    await world.store.runs.add_hosts(run_id, [HOST], now=world.now)


@case("add_hosts")
async def name_a_host_again(world: World) -> AsyncIterator[set[str]]:
    _, run_id = await world.submit(1)
    await world.store.runs.add_hosts(run_id, [HOST], now=world.now)
    yield set()
    await world.store.runs.add_hosts(run_id, [HOST], now=world.now)


@case("fail_run")
async def fail(world: World) -> AsyncIterator[set[str]]:
    _, run_id = await world.submit(1)
    yield {run_id}
    reason = RunFailure.INSUFFICIENT_CREDITS
    assert await world.store.runs.fail_run(run_id, reason=reason, detail="", now=world.now)


@case("fail_run")
async def fail_a_run_that_ended(world: World) -> AsyncIterator[set[str]]:
    _, run_id = await world.submit(1)
    await world.succeed(run_id, 0)
    yield set()
    reason = RunFailure.INSUFFICIENT_CREDITS
    assert not await world.store.runs.fail_run(run_id, reason=reason, detail="", now=world.now)


@case("rerun")
async def rerun(world: World) -> AsyncIterator[set[str]]:
    job_id, first = await world.submit(1)
    await world.succeed(first, 0)
    run_id = world.clock.new_id()
    yield {run_id}
    await world.rerun(job_id, run_id=run_id)


@case("rerun")
async def rerun_an_open_job_in_part(world: World) -> AsyncIterator[set[str]]:
    job_id, first = await world.submit(2, closed=False)
    await world.fail(first, 0)
    await world.store.runs.stop_run(CALLER, job_id, now=world.now)
    run_id = world.clock.new_id()
    yield {run_id}
    await world.rerun(job_id, TaskStatus.FAILED, run_id=run_id)


@case("rerun")
async def rerun_under_the_same_id(world: World) -> AsyncIterator[set[str]]:
    job_id, first = await world.submit(1)
    await world.succeed(first, 0)
    run_id, _ = await world.rerun(job_id)
    yield set()
    await world.rerun(job_id, run_id=run_id)


@case("rerun")
async def rerun_nothing(world: World) -> AsyncIterator[set[str]]:
    job_id, first = await world.submit(1, closed=False)
    await world.succeed(first, 0)
    await world.store.runs.stop_run(CALLER, job_id, now=world.now)
    yield set()
    await world.rerun(job_id, TaskStatus.FAILED)


@case("delete_run")
async def delete_one_run_of_two(world: World) -> AsyncIterator[set[str]]:
    job_id, first = await world.submit(1)
    await world.succeed(first, 0)
    second, _ = await world.rerun(job_id)
    yield {second}
    await world.store.runs.delete_run(CALLER, job_id, second, now=world.now)


@case("purge_run")
async def purge_a_run(world: World) -> AsyncIterator[set[str]]:
    job_id, run_id = await world.submit(0, closed=False)
    await world.store.runs.delete_run(CALLER, job_id, run_id, now=world.now)
    yield set()
    await world.store.runs.purge_run(run_id)


@case("claim_task")
async def claim(world: World) -> AsyncIterator[set[str]]:
    _, run_id = await world.submit(2)
    yield set()
    await world.claimed(run_id, 0)


@case("claim_task")
async def claim_what_was_interrupted_too_often(world: World) -> AsyncIterator[set[str]]:
    _, run_id = await world.submit(1)
    for _ in range(MAX_INTERRUPTIONS + 1):
        await world.claimed(run_id, 0)
        await world.clock.advance(CLAIM_LENGTH / 1_000)
    yield {run_id}
    assert isinstance(await world.claim(run_id, 0), NotClaimable)


@case("release_claim")
async def release(world: World) -> AsyncIterator[set[str]]:
    _, run_id = await world.submit(1)
    task = await world.claimed(run_id, 0)
    yield set()
    await world.store.tasks.release_claim(run_id, task.task_id, worker="worker")


@case("renew_claims")
async def renew(world: World) -> AsyncIterator[set[str]]:
    _, run_id = await world.submit(1)
    task = await world.claimed(run_id, 0)
    yield set()
    until = world.now + CLAIM_LENGTH
    claims = [(run_id, task.task_id, task.claim_number)]
    await world.store.tasks.renew_claims(claims, claimed_until=until)


@case("settle_task")
async def settle_the_last_task(world: World) -> AsyncIterator[set[str]]:
    _, run_id = await world.submit(2)
    await world.fail(run_id, 1)
    task = await world.claimed(run_id, 0)
    yield {run_id}
    assert (await world.settle(task, world.success(task))).applied


@case("settle_task")
async def settle_the_last_task_so_far(world: World) -> AsyncIterator[set[str]]:
    _, run_id = await world.submit(1, closed=False)
    task = await world.claimed(run_id, 0)
    yield {run_id}
    failed = Failed(world.attempt(task, PROBLEM), PROBLEM, TaskFailure.TIMEOUT)
    assert (await world.settle(task, failed)).applied


@case("settle_task")
async def settle_in_the_middle(world: World) -> AsyncIterator[set[str]]:
    job_id, run_id = await world.submit(5)
    yield set()
    await world.succeed(run_id, 0)
    await world.fail(run_id, 1)
    for settlement in (world.retry, lambda task: Released()):
        task = await world.claimed(run_id, 2)
        assert (await world.settle(task, settlement(task))).applied
    assert (await world.run(job_id)).stats.completed == 2


@case("settle_task")
async def settle_after_a_stop(world: World) -> AsyncIterator[set[str]]:
    job_id, run_id = await world.submit(1)
    task = await world.claimed(run_id, 0)
    await world.store.runs.stop_run(CALLER, job_id, now=world.now)
    yield set()
    assert (await world.settle(task, world.success(task))).applied


@case("scrub_tasks")
async def scrub(world: World) -> AsyncIterator[set[str]]:
    job_id, run_id = await world.submit(2)
    await world.store.runs.delete_run(CALLER, job_id, run_id, now=world.now)
    yield set()
    assert await world.store.tasks.scrub_tasks(run_id, 10) == 2


@case("touch_tombstone")
async def touch(world: World) -> AsyncIterator[set[str]]:
    job_id, run_id = await world.submit(1)
    await world.store.runs.delete_run(CALLER, job_id, run_id, now=world.now)
    yield set()
    await world.store.runs.touch_tombstone(run_id, now=world.now)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.steps.__name__)
async def test_a_call_is_told_of_where_it_changes_status_or_pause(world: World, case: Case) -> None:
    _, bystander = await world.submit(1)
    steps = case.steps(world)
    changed = await anext(steps)
    await world.clock.advance(0.001)
    since = world.now
    assert await named(world, since) == set()
    with suppress(StopAsyncIteration, ConveyorError):
        await anext(steps)
    assert await named(world, since) == changed
    assert bystander in await named(world, 0)


def test_there_is_a_case_of_every_method_that_writes() -> None:
    methods = {name for port in PORTS for name in dir(port) if name[0] != "_"}
    assert methods > READS
    assert {case.method for case in CASES} == methods - READS
