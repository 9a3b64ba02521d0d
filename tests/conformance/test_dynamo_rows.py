"""The calls that writing, reading and working rows on DynamoDB take, and the safety of repeated
inserts."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from msgspec import structs

from conveyor.domain import ids
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import TaskStatus
from conveyor.prod.aws.calls import Answer, Aws, AwsRefused, Parameters
from conveyor.prod.dynamodb.client import Item, Table
from conveyor.prod.dynamodb.schema import Key
from conveyor.prod.dynamodb.task_rows import (
    inherited_item,
    insert_items,
    new_task_item,
    read_events,
    read_task,
    remove_untouched,
)
from conveyor.testing.clock import FakeClock
from tests.conformance.dynamo_runs import TableBench, additions, settles
from tests.conformance.world import World, spec

pytestmark = pytest.mark.extended


@pytest.fixture
def world(one: World) -> World:
    return one


def some_rows(count: int) -> list[tuple[Key, Item]]:
    task_ids = ids.task_ids("run", 0, count)
    return [
        (Key("Job#job", f"Task#run#{task_id}"), new_task_item(task_id, spec(index), now=7))
        for index, task_id in enumerate(task_ids)
    ]


class RefusesStatements:
    """Answers as a table that is short of capacity does: some statements refused, others done, a
    single one refused.

    No emulator does that by itself.
    """

    def __init__(self, aws: Aws, code: str, *, rounds: int) -> None:
        self._aws = aws
        self._code = code
        self._left = rounds
        self.batches: list[int] = []

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        statements = parameters["Statements"]
        self.batches.append(len(statements))
        if self._left <= 0:
            return await self._aws.call(service, operation, parameters)
        self._left -= 1
        refused: dict[str, Any] = {"Error": {"Code": self._code, "Message": "not now"}}
        if len(statements) == 1:
            return {"Responses": [refused]}
        answer = await self._aws.call(
            service, operation, {**parameters, "Statements": statements[::2]}
        )
        responses = list(answer["Responses"])
        return {
            "Responses": [
                refused if number % 2 else responses.pop(0) for number in range(len(statements))
            ]
        }

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        return self._aws.presign(operation, parameters, seconds=seconds)


def refusing(bench: TableBench, code: str, *, rounds: int) -> tuple[Table, RefusesStatements]:
    seam = RefusesStatements(bench.seam, code, rounds=rounds)
    return Table(seam, bench.table.name, bench.clock), seam


async def advancing(clock: FakeClock, work: asyncio.Task[list[Key]]) -> list[Key]:
    """Let virtual time pass until something is done."""
    while not work.done():
        await clock.advance(0.1)
    return await work


async def test_rows_are_inserted_once_25_a_call(bench: TableBench) -> None:
    rows = some_rows(60)
    assert await insert_items(bench.table, rows) == [key for key, _ in rows]
    assert await insert_items(bench.table, rows) == []
    assert Counter(operation for operation, _ in bench.seam.calls) == {"batch_execute_statement": 6}
    assert await insert_items(bench.table, []) == []
    item = await bench.table.get(rows[59][0])
    assert item is not None
    task = read_task("run", item)
    assert (task.spec, task.index, task.status) == (spec(59), 59, TaskStatus.PENDING)
    assert (task.created_at, task.claim_number, read_events(item)) == (7, 0, [])


async def test_an_insert_leaves_a_row_that_has_moved_as_it_is(bench: TableBench) -> None:
    rows = some_rows(3)
    moved = {**rows[1][1], "status": "successful", "claim_number": 1}
    await bench.table.put(rows[1][0], moved)
    assert await insert_items(bench.table, rows) == [rows[0][0], rows[2][0]]
    item = await bench.table.get(rows[1][0])
    assert item is not None
    assert item["status"] == "successful"


async def test_statements_that_are_refused_for_now_are_made_again(bench: TableBench) -> None:
    rows = some_rows(25)
    table, seam = refusing(bench, "ThrottlingError", rounds=3)
    inserting = asyncio.create_task(insert_items(table, rows))
    assert await advancing(bench.clock, inserting) == [key for key, _ in rows]
    assert seam.batches == [25, 12, 6, 3]


async def test_a_table_that_stays_short_of_capacity_is_unavailable(bench: TableBench) -> None:
    table, _ = refusing(bench, "ProvisionedThroughputExceeded", rounds=1_000)
    inserting = asyncio.create_task(insert_items(table, some_rows(8)))
    with pytest.raises(ConveyorError) as refused:
        await advancing(bench.clock, inserting)
    assert refused.value.code is ErrorCode.UNAVAILABLE


async def test_a_row_that_is_not_fit_to_be_written_is_an_error(bench: TableBench) -> None:
    table, _ = refusing(bench, "ValidationError", rounds=1)
    with pytest.raises(AwsRefused, match="ValidationError: not now"):
        await insert_items(table, some_rows(2))


async def test_rows_that_were_claimed_are_not_taken_back(bench: TableBench, world: World) -> None:
    _, run_id = await world.submit(4)
    await world.claimed(run_id, 1)
    place = (await bench.row(run_id)).place
    keys = [place.task_key(ids.task_id(run_id, index)) for index in range(6)]
    await remove_untouched(bench.table, keys)
    assert [row.index for row in await world.rows(run_id)] == [1]


async def test_an_inherited_row_keeps_the_end_and_not_the_history(
    bench: TableBench, world: World
) -> None:
    _, run_id = await world.submit(2)
    await world.succeed(run_id, 0)
    await world.fail(run_id, 1)
    place = (await bench.row(run_id)).place
    for index, source in enumerate(await world.rows(run_id)):
        item = await bench.table.get(place.task_key(source.task_id))
        assert item is not None
        kept = inherited_item(item, run_id, now=9, time_to_live=None)
        task = read_task("new", kept)
        assert task == structs.replace(
            source,
            run_id="new",
            source_run_id=run_id,
            created_at=9,
            updated_at=9,
            claim_number=0,
        )
        assert task.index == index
        assert read_events(kept) == []
        assert inherited_item(kept, "new", now=9, time_to_live=None)["source_run_id"] == run_id


async def test_a_task_costs_two_writes_and_its_part_of_a_read_and_an_addition(
    bench: TableBench, world: World
) -> None:
    _, run_id = await world.submit(60)
    await world.rows(run_id)
    bench.seam.calls.clear()
    await asyncio.gather(*(world.succeed(run_id, index) for index in range(60)))
    calls = Counter(operation for operation, _ in bench.seam.calls)
    added = sum(additions(*call) for call in bench.seam.calls)
    # The first of them is a transaction, and one change comes besides: the run is complete.
    assert calls["update_item"] == 120 + (added - 1) + 1
    assert calls["transact_write_items"] == 1
    assert calls.keys() == {"update_item", "transact_write_items", "get_item", "query"}
    assert sum(settles(*call) for call in bench.seam.calls) == 60
    assert added <= 30
    assert calls["get_item"] + calls["query"] <= 40


async def test_additions_to_one_run_keep_their_distance(bench: TableBench) -> None:
    world = bench.world(worker="one", flush_interval=5.0)
    _, run_id = await world.submit(9)
    began = bench.clock.monotonic()
    assert (await world.succeed(run_id, 0)).applied
    settling = [asyncio.create_task(world.succeed(run_id, index)) for index in range(1, 9)]
    settled = asyncio.create_task(bench.seam.until_answered(settles, 9))
    while not settled.done():
        # Claims read the run apart in time as well.
        await bench.clock.advance(0.01)
        await asyncio.sleep(0.01)
    await bench.clock.advance(4.9 - (bench.clock.monotonic() - began))
    assert sum(additions(*call) for call in bench.seam.calls) == 1
    await bench.clock.advance(0.1)
    await asyncio.gather(*settling)
    assert sum(additions(*call) for call in bench.seam.calls) == 2


@pytest.mark.parametrize("shards", [1, 4])
async def test_a_page_is_one_query_and_the_run_is_read_near_its_end_alone(
    bench: TableBench, world: World, shards: int
) -> None:
    _, run_id = await world.submit(40, task_shard_count=shards)
    await world.rows(run_id, shards)
    bench.seam.calls.clear()
    tasks = world.store.tasks
    for shard in range(shards):
        after, pages = None, 0
        while pages == 0 or after is not None:
            page = await tasks.page_tasks(
                run_id, shard=shard, statuses=None, after=after, limit=40 // shards // 5
            )
            assert page.rows_read == len(page.tasks)
            after, pages = page.next_index, pages + 1
        assert pages == 5
    calls = Counter(operation for operation, _ in bench.seam.calls)
    assert calls == {"query": 5 * shards, "get_item": 1 + shards}


async def test_a_rare_status_is_found_in_few_queries_within_the_bound(
    bench: TableBench, world: World
) -> None:
    _, run_id = await world.submit(200)
    await world.succeed(run_id, 150)
    await world.rows(run_id)
    bench.seam.calls.clear()
    wanted = frozenset({TaskStatus.SUCCESSFUL})
    tasks = world.store.tasks
    page = await tasks.page_tasks(run_id, statuses=wanted, after=None, limit=1, most_read=100)
    assert (page.tasks, page.next_index, page.rows_read) == ([], 99, 100)
    page = await tasks.page_tasks(run_id, statuses=wanted, after=99, limit=1, most_read=100)
    assert ([task.index for task in page.tasks], page.next_index) == ([150], 150)
    assert page.rows_read <= 100
    page = await tasks.page_tasks(run_id, statuses=wanted, after=150, limit=1, most_read=100)
    assert (page.tasks, page.next_index, page.rows_read) == ([], None, 49)
    assert sum(operation == "query" for operation, _ in bench.seam.calls) <= 3 * 7


@pytest.mark.parametrize("scheme", ["stripe", "fnv32a"])
async def test_unfinished_rows_of_many_shards_come_in_order(
    bench: TableBench, world: World, scheme: str
) -> None:
    _, run_id = await world.submit(90, task_shard_count=4, shard_scheme=scheme)
    for index in (*range(0, 60, 3), 89):
        await world.succeed(run_id, index)
    expected = [index for index in range(89) if index % 3 or index >= 60]
    tasks = world.store.tasks
    for limit in (1, 7, 100):
        found: list[int] = []
        after = -1
        while references := await tasks.unfinished_after(run_id, after, limit):
            assert len(references) <= limit
            found += [index for index, _ in references]
            after = found[-1]
        assert found == expected
