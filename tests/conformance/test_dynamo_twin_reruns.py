"""Two calls that make one rerun at once, under one run id: the slower writes rows when the other
has counted them already, or has taken them back."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from conveyor.domain.errors import ErrorCode
from conveyor.domain.model import TaskStatus
from conveyor.ports.records import RerunRequest, StoredResponse
from conveyor.prod.dynamodb.schema import intent_key, place_key
from conveyor.testing.clock import FakeClock
from tests.conformance.dynamo_ingests import DB, INSERT, Ingests, open_ingests
from tests.conformance.world import CALLER, refused

pytestmark = pytest.mark.extended

F, R = TaskStatus.FAILED, TaskStatus.PROCESSING


@pytest.fixture
async def bench(clock: FakeClock) -> AsyncIterator[Ingests]:
    """An empty table."""
    async with open_ingests(clock) as opened:
        yield opened


async def test_a_row_that_only_the_slower_call_wrote_is_counted(bench: Ingests) -> None:
    """It has read a task whose claim has lapsed; then the worker gives the task back, and the other
    call leaves it out."""
    job_id, source = await bench.other.ended("rsr", shards=1)
    left = await bench.other.row(source, 2)
    run_id = bench.one.world.clock.new_id()

    async def overtake() -> None:
        await bench.other.world.settle(left, bench.other.world.retry(left))
        _, told = await bench.other.world.rerun(job_id, R, run_id=run_id)
        assert told == f"1 1 {source}"

    bench.faults.before(DB, INSERT, overtake)
    assert (await bench.one.world.rerun(job_id, R, run_id=run_id))[0] == run_id
    assert bench.faults.fired == 1
    await bench.exact(job_id, run_id, "psp")
    assert (await bench.item(job_id, 2))["unsettled"] is True


@pytest.mark.parametrize("is_another_at_it", [False, True])
async def test_rows_of_the_slower_call_do_not_outlive_a_run_that_was_not_made(
    bench: Ingests, is_another_at_it: bool
) -> None:
    job_id, _ = await bench.other.ended("sff")
    rows = await bench.rows_left(job_id)
    run_id = bench.one.world.clock.new_id()

    def broken(_made: object) -> StoredResponse:
        raise RuntimeError("rendering failed")

    async def fail_meanwhile() -> None:
        with pytest.raises(RuntimeError, match="rendering"):
            await bench.other.world.store.runs.rerun(
                RerunRequest(
                    caller=CALLER,
                    job_id=job_id,
                    run_id=run_id,
                    statuses=frozenset({F}),
                    window_start=0,
                    large_from=100,
                    now=bench.one.world.now,
                ),
                answer=broken,
                once=None,
            )
        assert (await bench.rows_left(job_id), await bench.intents()) == (rows, 0)

    async def come_third() -> None:
        assert (await bench.other.world.rerun(job_id, F, run_id=run_id))[0] == run_id

    bench.faults.before(DB, INSERT, fail_meanwhile)
    if is_another_at_it:
        # Its run is made before the slower one looks after its rows: they are that run's own.
        bench.faults.before(DB, "put_item", come_third, where=is_late_intent)
    await refused(ErrorCode.UNAVAILABLE, bench.one.world.rerun(job_id, F, run_id=run_id))
    assert bench.faults.fired == 1 + is_another_at_it
    if is_another_at_it:
        await bench.exact(job_id, run_id, "spp")
    else:
        assert await bench.rows_left(job_id) == rows
        assert await bench.table.get(place_key(run_id)) is None
    assert await bench.table.get(intent_key(job_id, run_id)) is None


def is_late_intent(parameters: object) -> bool:
    """Return whether a put is that of an intent which is given up from the start."""
    assert isinstance(parameters, dict)
    return "abandoned" in parameters["Item"]
