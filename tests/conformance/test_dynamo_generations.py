"""The number of a run's queue on its row: one mover, also where answers are lost, of live runs."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest

from conveyor.prod.dynamodb.runs import DynamoGenerations, DynamoRuns
from conveyor.prod.sqs.registry import Generation
from conveyor.testing.clock import FakeClock
from tests.conformance.dynamo_runs import TableBench, open_bench, writes

pytestmark = pytest.mark.extended


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def bench() -> AsyncIterator[TableBench]:
    opened = await open_bench(FakeClock())
    yield opened
    await opened.aclose()


async def test_of_those_that_move_it_at_once_one_has_moved_it(bench: TableBench) -> None:
    _, run_id = await bench.observer().submit(1)
    answers: list[Generation] = []

    async def follow() -> None:
        answers.append(await DynamoGenerations(bench.records).follow(run_id, 0))

    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(follow)
    assert {(answer.number, answer.live) for answer in answers} == {(1, True)}
    assert [answer.moved for answer in answers].count(True) == 1
    assert await DynamoGenerations(bench.outside).current(run_id) == Generation(1, live=True)


async def test_who_moved_it_knows_though_the_answer_was_lost(bench: TableBench) -> None:
    _, run_id = await bench.observer().submit(1)
    generations = DynamoGenerations(bench.records)
    bench.seam.lose_answers(writes)
    assert await generations.follow(run_id, 0) == Generation(1, live=True, moved=True)
    assert await generations.follow(run_id, 0) == Generation(1, live=True)
    assert await generations.follow(run_id, 1) == Generation(2, live=True, moved=True)


async def test_each_queue_of_a_host_has_a_number_of_its_own(bench: TableBench) -> None:
    _, run_id = await bench.observer().submit(1)
    generations = DynamoGenerations(bench.records)
    # Nobody makes a queue for a host that the run does not have.
    assert await generations.follow(run_id, 0, 0) == Generation(0, live=True)
    await DynamoRuns(bench.records).add_hosts(run_id, ["a:80", "b:80"], now=0)
    before = await bench.row(run_id)
    assert await generations.current(run_id, 1) == Generation(0, live=True)
    moved = Generation(1, live=True, moved=True, hosts={1: 1})
    bench.seam.lose_answers(writes)
    assert await generations.follow(run_id, 0, 1) == moved
    assert await generations.follow(run_id, 0, 1) == Generation(1, live=True, hosts={1: 1})
    assert await generations.follow(run_id, 1, 1) == moved._replace(number=2, hosts={1: 2})
    assert await generations.follow(run_id, 0) == moved._replace(hosts={1: 2})
    assert await generations.current(run_id, 0) == Generation(0, live=True, hosts={1: 2})
    assert (await bench.row(run_id)).run == before.run
    await DynamoRuns(bench.records).add_hosts(run_id, ["c:80"], now=0)
    assert await DynamoRuns(bench.outside).hosts_of(run_id) == ("a:80", "b:80", "c:80")
    assert await generations.current(run_id) == Generation(1, live=True, hosts={1: 2})


async def test_it_does_not_move_once_the_run_has_ended(bench: TableBench) -> None:
    world = bench.observer()
    _, run_id = await world.submit(1)
    generations = DynamoGenerations(bench.records)
    before = await bench.row(run_id)
    await generations.follow(run_id, 0)
    # Nothing is decided by the number, so it leaves the run's version alone.
    assert (await bench.row(run_id)).run == before.run
    await world.succeed(run_id, 0)
    assert await generations.follow(run_id, 1) == Generation(1, live=False)
    assert await generations.current(run_id) == Generation(1, live=False)


async def test_a_run_that_is_not_there_has_none(bench: TableBench) -> None:
    generations = DynamoGenerations(bench.records)
    gone = Generation(0, live=False)
    assert (await generations.current("NO"), await generations.follow("NO", 0)) == (gone, gone)
    _, run_id = await bench.observer().submit(1)
    place = await bench.records.places.find(run_id)
    assert place is not None
    await bench.outside.table.delete(place.key)
    assert (await generations.current(run_id), await generations.follow(run_id, 0)) == (gone, gone)
