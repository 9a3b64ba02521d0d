"""References of a run's rows that may be rare among all others, of all shards in one order."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec

from conveyor.domain import ids
from conveyor.prod.dynamodb.items import Item, Page, Table
from conveyor.prod.dynamodb.keys import END, task_partition, task_sort_key
from conveyor.prod.dynamodb.places import Place
from conveyor.prod.dynamodb.table import SORT_KEY
from conveyor.prod.dynamodb.values import untag_all
from conveyor.records.sharded_reads import ShardRead, ShardRows, stream

MOST_TOUCHED = 1_000
"""Rows that one query for rare ones touches, at most."""


class Reference(msgspec.Struct, frozen=True):
    """A row by its index and its task's id."""

    index: int
    task_id: str


async def references(
    table: Table,
    place: Place,
    wanted: Mapping[str, Any],
    *,
    after: int,
    piece: int,
    count: Callable[[int, int], None] = lambda read, returned: None,
) -> AsyncIterator[Reference]:
    """Rows with an index above `after` that a filter lets pass, which `wanted` gives as arguments
    of `Table.page`.

    About `piece` are held at a time. Where few pass, each query of a shard touches twice as many
    rows as the one before. `count` is told of each how many it touched, and how many passed.
    """
    sizes = [0] * place.shards.count

    async def read(asked: ShardRead) -> ShardRows[Reference]:
        at = max(asked.after, after)
        size = max(asked.limit, sizes[asked.shard])
        page = await rows_after(table, place, asked.shard, at, limit=size, keys_only=True, **wanted)
        rows = [_reference(item) for item in page.items]
        if 2 * len(rows) < page.read:
            sizes[asked.shard] = min(2 * size, MOST_TOUCHED)
        count(page.read, len(rows))
        goes_on = page.last is not None
        return ShardRows(rows, last_touched(page, at) if goes_on else None, page.read)

    async for row in stream(read, place.shards, piece=piece):
        yield row


async def rows_after(table: Table, place: Place, shard: int, index: int, **query: Any) -> Page:
    """One query of a shard's rows behind an index; arguments as of `Table.page`."""
    low = ids.encode_index(min(index + 1, ids.MAX_INDEX))
    return await table.page(
        task_partition(place.job_id, place.shards, shard),
        between=(task_sort_key(place.run_id, low), task_sort_key(place.run_id, END)),
        **query,
    )


def last_touched(page: Page, before: int) -> int:
    """The index of the last row that a query touched, returned or not; `before` where there was
    none."""
    if page.last is not None:
        return _reference(untag_all(page.last)).index
    return _reference(page.items[-1]).index if page.items else before


def _reference(item: Item) -> Reference:
    task_id: str = item[SORT_KEY].rpartition("#")[2]
    return Reference(ids.task_index(task_id), task_id)
