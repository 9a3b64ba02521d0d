"""Compares two operations that write the same rows: BatchExecuteStatement, which Conveyor uses and
which refuses an existing row, and BatchWriteItem, which would overwrite rows that have moved on."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import anyio

from bench.aws_fleet import services
from bench.harness import Options, Row, median
from conveyor.clock import SystemClock
from conveyor.domain.ids import task_ids
from conveyor.domain.model import TaskSpec
from conveyor.domain.shards import ONE_SHARD
from conveyor.prod.aws.calls import AwsOptions
from conveyor.prod.aws.client import AwsClient
from conveyor.prod.aws.opening import open_aws
from conveyor.prod.dynamodb.client import Item, Table, tag_all
from conveyor.prod.dynamodb.run_rows import RunPlace
from conveyor.prod.dynamodb.schema import PARTITION_KEY, SORT_KEY, Key, table_parameters
from conveyor.prod.dynamodb.task_rows import (
    CONCURRENT_CALLS,
    STATEMENTS_PER_CALL,
    insert_items,
    new_task_item,
)

ROWS = 5_000
TURNS = 3
NAMES = ("BatchExecuteStatement", "BatchWriteItem")


def measure(_options: Options) -> list[Row]:
    """Measure both, in turns: calls, units, and the median of the CPU for a row."""
    measured: dict[str, list[tuple[float, float, float]]] = {name: [] for name in NAMES}
    for _ in range(TURNS):
        for name in NAMES:
            measured[name].append(anyio.run(_written, name))
    return [
        Row(
            f"{ROWS:,} rows by {name}",
            {
                "calls a row": round(turns[0][0], 3),
                "units a row": round(turns[0][1], 2),
                "ms CPU a row": round(median([cpu for _, _, cpu in turns]), 3),
            },
        )
        for name, turns in measured.items()
    ]


async def _written(name: str) -> tuple[float, float, float]:
    """Return calls, units and milliseconds of CPU for a row."""
    aws = await open_aws(
        AwsOptions(dynamodb_endpoint=services().dynamodb), SystemClock(), "dynamodb"
    )
    table = Table(aws, f"bench-{secrets.token_hex(6)}", SystemClock())
    await aws.call("dynamodb", "create_table", table_parameters(table.name))
    place = RunPlace("01ARZ3NDEKTSV4RRFFQ69G5FAV", "01ARZ3NDEKTSV4RRFFQ69G5FAW", 1, ONE_SHARD)
    items = [
        (
            place.task_key(task_id),
            new_task_item(task_id, TaskSpec(url=f"https://shop.example.com/item/{number}"), now=1),
        )
        for number, task_id in enumerate(task_ids(place.run_id, 0, ROWS))
    ]
    before = time.process_time()
    if name == "BatchWriteItem":
        await _put(aws, table, items)
    else:
        assert len(await insert_items(table, items)) == ROWS
    cpu = time.process_time() - before
    calls = sum(count for (_, _, outcome), count in aws.stats.calls.items() if outcome == "ok") - 1
    units = sum(aws.stats.capacity.values())
    await aws.call("dynamodb", "delete_table", {"TableName": table.name})
    await aws.aclose()
    return calls / ROWS, units / ROWS, 1_000 * cpu / ROWS


async def _put(aws: AwsClient, table: Table, items: Sequence[tuple[Key, Item]]) -> None:
    limiter = anyio.Semaphore(CONCURRENT_CALLS)

    async def put(some: Sequence[tuple[Key, Item]]) -> None:
        async with limiter:
            requests = [
                {"PutRequest": {"Item": tag_all({PARTITION_KEY: key.pk, SORT_KEY: key.sk, **item})}}
                for key, item in some
            ]
            answer = await aws.call(
                "dynamodb", "batch_write_item", {"RequestItems": {table.name: requests}}
            )
        assert not answer.get("UnprocessedItems")

    async with anyio.create_task_group() as group:
        for start in range(0, len(items), STATEMENTS_PER_CALL):
            group.start_soon(put, items[start : start + STATEMENTS_PER_CALL])
