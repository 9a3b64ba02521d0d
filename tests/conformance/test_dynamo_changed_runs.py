"""The list of runs by their last change on DynamoDB: its calls, and its bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator

import pytest

from conveyor.ports.records import RunPosition
from conveyor.prod.aws.calls import Parameters
from conveyor.prod.dynamodb import runs
from conveyor.prod.dynamodb.schema import KNOWN_SHAPE, by_time, run_key
from conveyor.testing.clock import FakeClock
from tests.conformance.dynamo_ingests import DB, Ingests, open_ingests
from tests.conformance.world import CALLER

pytestmark = pytest.mark.extended

STRANGER = "stranger"
PARTITIONS = 8


@pytest.fixture
async def bench(clock: FakeClock) -> AsyncIterator[Ingests]:
    """An empty table."""
    async with open_ingests(clock) as opened:
        yield opened


async def submit(bench: Ingests, count: int, caller: str = CALLER) -> list[tuple[str, str]]:
    """Jobs with a run each, a second apart; (job_id, run_id), the latest first."""
    made = []
    for _ in range(count):
        made.append(await bench.other.world.submit(1, caller=caller))
        await bench.one.world.clock.advance(1)
    return made[::-1]


async def page(
    bench: Ingests,
    caller: str | None = CALLER,
    *,
    before: RunPosition | None = None,
    limit: int = 4,
    live: bool | None = None,
) -> list[str]:
    """The ids of one page, read behind the transport that counts."""
    found = await bench.one.world.store.runs.changed_runs(
        caller, before=before, limit=limit, live=live
    )
    return [one.run.run_id for one in found]


@pytest.mark.parametrize("caller", [CALLER, None])
@pytest.mark.parametrize("live", [None, True])
async def test_a_page_is_a_constant_number_of_calls(
    bench: Ingests, caller: str | None, live: bool | None
) -> None:
    counts = []
    for more in (5, 25):
        made = [run_id for _, run_id in await submit(bench, more)]
        bench.faults.calls.clear()
        assert await page(bench, caller, live=live) == made[:4]
        counts.append(bench.faults.calls.copy())
    assert Counter(counts[0]) == Counter(counts[1])
    # One query for each run of the page adds up its counters.
    assert Counter(counts[0]) == {(DB, "query"): PARTITIONS + 4, (DB, "batch_get_item"): 2}


async def test_the_rows_of_other_callers_are_not_read(bench: Ingests) -> None:
    [(job_id, run_id)] = await submit(bench, 1)
    await submit(bench, 9, STRANGER)
    asked: list[str] = []

    def note(parameters: Parameters) -> bool:
        for request in parameters["RequestItems"].values():
            asked.extend(key["pk"]["S"] for key in request["Keys"])
        return False

    bench.faults.throttle(DB, "batch_get_item", where=note)
    assert await page(bench) == [run_id]
    assert asked == [f"Job#{job_id}"] * 2


async def test_an_entry_of_the_version_before_names_no_caller_and_is_found(bench: Ingests) -> None:
    [(job_id, run_id)] = await submit(bench, 1)
    item = await bench.item(job_id, 1)
    await bench.table.update(
        run_key(job_id, 1),
        "SET gsi2sk = :place",
        condition="",
        place=by_time(item["dispatch_changed_at"], run_id),
    )
    position = RunPosition(item["dispatch_changed_at"], run_id)
    for caller, found in ((CALLER, [run_id]), (None, [run_id]), (STRANGER, [])):
        assert await page(bench, caller) == found
        assert await page(bench, caller, before=position) == []
        later = RunPosition(position.changed_at + 1, "")
        assert await page(bench, caller, before=later) == found


async def test_a_rare_caller_is_looked_for_no_deeper_than_the_bound(
    bench: Ingests, monkeypatch: pytest.MonkeyPatch
) -> None:
    await submit(bench, 1)
    strange = [run_id for _, run_id in await submit(bench, 20, STRANGER)]
    monkeypatch.setattr(runs, "MOST_LOOKED_AT", PARTITIONS)
    bench.faults.calls.clear()
    assert await page(bench) == []
    assert PARTITIONS < len(bench.faults.calls) <= 3 * PARTITIONS
    # The order of a page holds whichever partition was cut off.
    found = await page(bench, STRANGER, limit=20)
    assert 0 < len(found) < 20
    assert found == strange[: len(found)]


async def test_runs_of_a_later_shape_are_left_out(bench: Ingests) -> None:
    [(newer, _), (_, run_id)] = await submit(bench, 2)
    await bench.table.update(
        run_key(newer, 1), "SET #shape = :shape", condition="", shape=KNOWN_SHAPE + 1
    )
    assert await page(bench, None) == [run_id]
