"""A task whose history would outgrow what an item of the table may have."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from conveyor.domain.model import RunStatus, TaskFailure, TaskStatus
from conveyor.domain.task_rules import Failed, Retry, Settlement
from conveyor.testing.clock import FakeClock
from tests.conformance.dynamo_records import Bench, open_bench
from tests.conformance.world import PROBLEM

pytestmark = pytest.mark.extended

LONG = msgspec.structs.replace(PROBLEM, detail="x" * 90_000)


@pytest.fixture
async def bench(clock: FakeClock) -> AsyncIterator[Bench]:
    async with open_bench(clock) as opened:
        yield opened


async def test_a_row_that_would_outgrow_its_item_begins_its_history_anew(bench: Bench) -> None:
    world = bench.world
    job_id, run_id = await world.submit(1)
    kept = []
    for attempt in range(6):
        task = await world.claimed(run_id, 0)
        event = world.attempt(task, LONG)
        last: Settlement = Failed(event, PROBLEM, TaskFailure.RATE_LIMITED)
        settled = await world.settle(task, last if attempt == 5 else Retry(event, world.now))
        assert settled.applied
        history = await world.store.tasks.task_history(run_id, task.task_id)
        assert history is not None
        kept.append(len(history))

    assert kept == [1, 2, 3, 4, 1, 2]
    assert settled.run_status is RunStatus.COMPLETED
    [row] = await world.rows(run_id)
    assert (row.status, row.attempts, row.error) == (TaskStatus.FAILED, 6, PROBLEM)
    assert (await world.run(job_id)).stats.failed == 1
