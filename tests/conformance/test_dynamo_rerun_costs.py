"""The reads, writes and pins of reruns on DynamoDB."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from conveyor.domain.errors import ErrorCode
from conveyor.domain.model import TaskStatus
from conveyor.domain.shards import Shards
from conveyor.prod.dynamodb import rerun
from conveyor.prod.dynamodb.copying import LONGEST_CALL
from conveyor.prod.dynamodb.schema import pin_key, task_key
from conveyor.testing.clock import FakeClock
from tests.conformance.dynamo_ingests import (
    DB,
    INSERT,
    TRANSACT,
    Ingests,
    open_ingests,
)
from tests.conformance.world import CALLER, CLAIM_LENGTH, F, P, R, refused

pytestmark = pytest.mark.extended

SUM = 1
"""The query that adds up the counters of a run which was cut short."""


@pytest.fixture
async def bench(clock: FakeClock) -> AsyncIterator[Ingests]:
    """An empty table."""
    async with open_ingests(clock) as opened:
        yield opened


async def test_a_plan_reads_no_row_of_a_source_that_was_worked_to_its_end(bench: Ingests) -> None:
    job_id, _ = await bench.other.ended("sffs")
    await bench.one.world.rerun(job_id, large_from=1)
    assert bench.faults.calls.count((DB, "query")) == 0
    assert bench.faults.calls.count((DB, TRANSACT)) == 1
    assert bench.faults.calls.count((DB, INSERT)) == 0


async def test_claims_are_looked_for_only_while_a_call_may_be_under_way(bench: Ingests) -> None:
    """And then by one look at each shard, before those of the copying."""
    for wait, looks in ((LONGEST_CALL / 1_000, 2), (LONGEST_CALL / 1_000 + 0.001, 0)):
        job_id, run_id = await bench.other.world.submit(3, task_shard_count=2)
        await bench.other.world.claimed(run_id, 2)
        await bench.other.world.store.runs.stop_run(CALLER, job_id, now=bench.one.world.now)
        await refused(ErrorCode.RUN_NOT_TERMINAL, bench.one.world.rerun(job_id))
        await bench.one.world.clock.advance(wait)
        before = bench.faults.calls.count((DB, "query"))
        await bench.one.world.rerun(job_id)
        assert bench.faults.calls.count((DB, "query")) - before == SUM + looks + 2


async def test_a_claim_taken_after_the_look_for_claims_is_met_by_the_copy(bench: Ingests) -> None:
    job_id, run_id = await bench.other.world.submit(3, task_shard_count=2)
    await bench.other.world.store.runs.stop_run(CALLER, job_id, now=bench.one.world.now)
    task = await bench.other.row(run_id, 1)

    async def claim() -> None:
        """Make the write of a worker that has not yet seen that the run was stopped."""
        await bench.table.update(
            task_key(job_id, run_id, task.task_id, Shards(2)),
            "SET #status = :status, claimed_until = :until",
            condition="",
            status=str(R),
            until=bench.one.world.now + CLAIM_LENGTH,
        )

    bench.faults.before(DB, "put_item", claim)
    await refused(ErrorCode.RUN_NOT_TERMINAL, bench.one.world.rerun(job_id))
    assert bench.faults.fired == 1
    assert await bench.rows_left(job_id) == 3
    assert await bench.intents() == 0
    await bench.one.world.clock.advance(CLAIM_LENGTH / 1_000)
    await bench.one.world.rerun(job_id)


@pytest.mark.parametrize("statuses", [(), (P,), (R,), (F, P), (P, R)])
async def test_a_plan_reads_no_row_of_a_source_that_was_stopped(
    bench: Ingests, statuses: tuple[TaskStatus, ...]
) -> None:
    """However large it is, however many of its tasks are being worked, whatever is asked for."""
    job_id, run_id = await bench.other.world.submit(5, task_shard_count=2)
    await bench.other.world.fail(run_id, 0)
    await bench.other.world.claimed(run_id, 2)
    await bench.other.world.store.runs.stop_run(CALLER, job_id, now=bench.one.world.now)
    await bench.one.world.rerun(job_id, *statuses, large_from=5)
    # One query of a partial rerun is for what the source draws from; another one, where failed
    # tasks are inherited, for their groups.
    looks = bool(statuses) + (bool(statuses) and F not in statuses)
    assert bench.faults.calls.count((DB, "query")) == SUM + looks


async def test_every_owner_of_a_body_is_pinned(
    bench: Ingests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that the transaction has no room for."""
    monkeypatch.setattr(rerun, "MOST_PINS", 1)
    job_id, latest = await bench.other.ended("sffff")
    owners = [latest]
    for index in (1, 2, 3):
        latest, _ = await bench.one.world.rerun(job_id, F, P)
        await bench.other.succeed(latest, await bench.other.row(latest, index))
        await bench.other.world.store.runs.stop_run(CALLER, job_id, now=bench.one.world.now)
        owners.append(latest)
    for large_from in (100, 1):
        run_id, told = await bench.one.world.rerun(job_id, P, large_from=large_from)
        assert told == f"1 4 {latest}"
        for owner in owners:
            assert await bench.table.get(pin_key(job_id, owner, run_id)) is not None
        await bench.other.world.store.runs.stop_run(CALLER, job_id, now=bench.one.world.now)
        await bench.one.world.clock.advance(CLAIM_LENGTH / 1_000)
        latest = run_id
