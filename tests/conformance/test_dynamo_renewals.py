"""Renewing many claims at once: a failure of one does not affect the others."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from conveyor.domain.errors import ConveyorError
from conveyor.domain.ids import task_id
from conveyor.domain.model import Task
from conveyor.prod.aws.calls import Parameters
from conveyor.prod.dynamodb.client import NewerRow
from conveyor.prod.dynamodb.schema import KNOWN_SHAPE, Key, place_key
from conveyor.testing.clock import FakeClock
from tests.conformance.dynamo_runs import TableBench, open_bench, writes
from tests.conformance.world import CLAIM_LENGTH, World

pytestmark = pytest.mark.extended

COUNT = 40
"""Claims, more than calls of a process go at a time."""


@pytest.fixture
async def bench(clock: FakeClock) -> AsyncIterator[TableBench]:
    opened = await open_bench(clock)
    yield opened
    await opened.aclose()


@pytest.fixture
def world(bench: TableBench) -> World:
    return bench.world(worker="one")


def renewals(operation: str, parameters: Parameters) -> bool:
    """Updates that extend a claim."""
    return writes(operation, parameters) and parameters["UpdateExpression"] == (
        "SET claimed_until = :until"
    )


async def renew(world: World, tasks: list[Task]) -> int:
    """Try to renew claims; until when they are to be held."""
    until = world.now + 2 * CLAIM_LENGTH
    claims = [(task.run_id, task.task_id, task.claim_number) for task in tasks]
    await world.store.tasks.renew_claims(claims, claimed_until=until)
    return until


async def ends_of_claims(bench: TableBench, tasks: list[Task]) -> list[int]:
    """Until when each of them is held, as its row says."""
    found: list[int] = []
    for task in tasks:
        item = await bench.outside.table.get(await row_key(bench, task))
        assert item is not None
        found.append(item["claimed_until"] - bench.clock.now())
    return found


async def row_key(bench: TableBench, task: Task) -> Key:
    place = await bench.outside.places.find(task.run_id)
    assert place is not None
    return place.task_key(task.task_id)


async def test_the_table_fails_for_some_and_all_others_are_renewed(
    bench: TableBench, world: World
) -> None:
    _, run_id = await world.submit(COUNT)
    tasks = [await world.claimed(run_id, index) for index in range(COUNT)]
    bench.seam.be_away(renewals, carried_out=False, count=3)
    with pytest.raises(ConveyorError, match="away"):
        await renew(world, tasks)
    ends = await ends_of_claims(bench, tasks)
    assert (ends.count(CLAIM_LENGTH), ends.count(2 * CLAIM_LENGTH)) == (3, COUNT - 3)


async def test_a_row_of_a_newer_shape_keeps_no_other_claim_from_being_renewed(
    bench: TableBench, world: World
) -> None:
    _, run_id = await world.submit(COUNT)
    tasks = [await world.claimed(run_id, index) for index in range(COUNT)]
    await bench.outside.table.update(
        await row_key(bench, tasks[0]),
        "SET shape = :newer",
        condition="attribute_exists(pk)",
        newer=KNOWN_SHAPE + 1,
    )
    with pytest.raises(NewerRow):
        await renew(world, tasks)
    assert await ends_of_claims(bench, tasks[1:]) == [2 * CLAIM_LENGTH] * (COUNT - 1)


async def test_a_run_whose_place_cannot_be_read_costs_the_claims_of_no_other(
    bench: TableBench, world: World
) -> None:
    _, first = await world.submit(1)
    _, second = await world.submit(1)
    tasks = [await world.claimed(run_id, 0) for run_id in (first, second)]
    # A process that has yet to learn where the runs lie.
    other = bench.world(worker="two")
    await bench.outside.table.update(
        place_key(first),
        "SET shape = :newer",
        condition="attribute_exists(pk)",
        newer=KNOWN_SHAPE + 1,
    )
    with pytest.raises(NewerRow):
        await renew(other, tasks)
    assert await ends_of_claims(bench, tasks[1:]) == [2 * CLAIM_LENGTH]


async def test_what_is_no_task_is_passed_over(bench: TableBench, world: World) -> None:
    _, run_id = await world.submit(1)
    task = await world.claimed(run_id, 0)
    claims = [("gone", task_id("gone", 0), 1), (run_id, "none", 1), (run_id, task.task_id, 1)]
    until = world.now + 2 * CLAIM_LENGTH
    await world.store.tasks.renew_claims(claims, claimed_until=until)
    assert await ends_of_claims(bench, [task]) == [2 * CLAIM_LENGTH]
