"""A run worked by two processes while DynamoDB throttles, loses answers and does batches in part,
at random and all at once: every task ends once, and the counters are those of the rows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress

import anyio
import pytest

from conveyor.clock import SystemClock
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import (
    EventKind,
    RunStatus,
    Spend,
    Task,
    TaskFailure,
    TaskStatus,
)
from conveyor.domain.task_rules import TERMINAL_TASK_STATES, Failed, Settlement
from conveyor.ports.tasks import Claimed
from conveyor.prod.aws.calls import Parameters
from conveyor.prod.dynamodb.store import open_store
from conveyor.testing.aws_faults import FaultyAws
from conveyor.testing.clock import FakeClock
from tests.conformance.dynamo_records import DB, INSERT, Bench, open_bench
from tests.conformance.world import CLAIM_LENGTH, PROBLEM, World

pytestmark = pytest.mark.extended

TASKS = 30
OPERATIONS = ("update_item", "get_item", "query", "transact_write_items", INSERT)
WITHOUT_END = 1_000_000
ROUNDS = 50
Weather = Callable[[FaultyAws, random.Random], None]


@pytest.fixture
async def bench(clock: FakeClock) -> AsyncIterator[Bench]:
    """An empty table with a process behind faults and one beside them."""
    async with open_bench(clock) as opened:
        yield opened


def now_and_then(draw: random.Random, share: float) -> Callable[[Parameters], bool]:
    """For this share of calls."""
    return lambda _parameters: draw.random() < share


def throttling(faults: FaultyAws, draw: random.Random) -> None:
    """Calls of every operation are refused to the last try."""
    for operation in OPERATIONS:
        faults.throttle(DB, operation, times=WITHOUT_END, where=now_and_then(draw, 0.25))


def lost_answers(faults: FaultyAws, _draw: random.Random) -> None:
    """Each call is made twice, as if its first answer had been lost."""
    for operation in OPERATIONS:
        faults.lose_answer(DB, operation, times=WITHOUT_END)


def no_answers(faults: FaultyAws, draw: random.Random) -> None:
    """Calls are carried out, and nobody ever hears of it."""
    for operation in OPERATIONS:
        faults.vanish(DB, operation, times=WITHOUT_END, where=now_and_then(draw, 0.25))


def everything(faults: FaultyAws, draw: random.Random) -> None:
    """All of that at once, and batches that are done in part."""
    faults.split(DB, INSERT, times=WITHOUT_END, where=now_and_then(draw, 0.5))
    for operation in OPERATIONS:
        faults.throttle(DB, operation, times=WITHOUT_END, where=now_and_then(draw, 0.1))
        faults.vanish(DB, operation, times=WITHOUT_END, where=now_and_then(draw, 0.1))
        faults.lose_answer(DB, operation, times=WITHOUT_END, where=now_and_then(draw, 0.3))


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("weather", [throttling, lost_answers, no_answers, everything])
async def test_a_run_worked_in_bad_weather_ends_exact(
    bench: Bench, weather: Weather, seed: int
) -> None:
    weather(bench.faults, random.Random(seed))
    second = await open_store(
        bench.faults,
        table=bench.table.name,
        clock=SystemClock(),
        worker=f"second-{seed}",
        flush_interval=0,
    )
    crew = (bench.world, World(second, bench.world.clock))
    job_id, run_id = await submitted(bench)

    for _ in range(ROUNDS):
        left = [row.index for row in await bench.other.rows(run_id) if not has_ended(row)]
        if not left:
            break
        async with anyio.create_task_group() as group:
            for index in left:
                # Both want each task, as when its message was delivered twice.
                for world in crew:
                    group.start_soon(work, world, run_id, index)
                    await never_too_many(bench, job_id)
        await bench.world.clock.advance(CLAIM_LENGTH / 1_000)
    await second.aclose()

    assert bench.faults.fired > TASKS
    now = bench.world.now
    assert await bench.other.store.sweeping.reconcile_run(run_id, now=now) is RunStatus.COMPLETED
    await assert_counters_of_rows(bench, job_id, run_id)


async def submitted(bench: Bench) -> tuple[str, str]:
    """A job of the process in bad weather, tried until one is heard of to be there."""
    for _ in range(ROUNDS):
        with suppress(ConveyorError):
            job_id, run_id = await bench.world.submit(TASKS)
            assert len(await bench.other.rows(run_id)) == TASKS
            return job_id, run_id
    raise AssertionError("no job could be made")


async def work(world: World, run_id: str, index: int) -> None:
    """Try to bring one task to its end, each third to failure. What cannot be done for now is left
    to the next round."""
    with unavailable_at_worst():
        claim = await world.claim(run_id, index)
        if not isinstance(claim, Claimed):
            return
        task = claim.task
        settlement: Settlement = world.success(task)
        if index % 3 == 0:
            settlement = Failed(world.attempt(task, PROBLEM), PROBLEM, TaskFailure.TIMEOUT)
        await world.settle(task, settlement)


@contextmanager
def unavailable_at_worst() -> Iterator[None]:
    """Faults of the table come out as nothing else."""
    try:
        yield
    except ConveyorError as error:
        if error.code is not ErrorCode.UNAVAILABLE:
            raise


def has_ended(row: Task) -> bool:
    """Return whether the task has ended."""
    return row.status in TERMINAL_TASK_STATES


async def never_too_many(bench: Bench, job_id: str) -> None:
    """At no moment has more been completed than there is."""
    stats = (await bench.other.run(job_id)).stats
    assert stats.completed <= stats.total == TASKS


async def assert_counters_of_rows(bench: Bench, job_id: str, run_id: str) -> None:
    """Check that every task has ended, by at most one attempt, and that the run's counters
    match."""
    rows = await bench.other.rows(run_id)
    assert [row.index for row in rows] == list(range(TASKS))
    statuses = Counter(row.status for row in rows)
    stats = (await bench.other.run(job_id)).stats
    assert (stats.successful, stats.failed) == (
        statuses[TaskStatus.SUCCESSFUL],
        statuses[TaskStatus.FAILED],
    )
    assert stats.completed == stats.total == TASKS
    assert stats.failure_reasons == Counter(row.failure for row in rows if row.failure)
    spend = Spend()
    for row in rows:
        events = await bench.other.store.tasks.task_history(run_id, row.task_id) or []
        attempts = [event for event in events if event.kind is EventKind.ATTEMPT]
        assert len(attempts) == row.attempts <= 1
        spend = sum((event.spend for event in attempts), spend)
    assert stats.spend == spend
