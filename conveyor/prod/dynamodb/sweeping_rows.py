"""What a sweep reads: rows that are due, ended runs in order of their ids, who draws on whom."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from math import ceil

import msgspec

from conveyor.domain import ids
from conveyor.domain.gather import ShardRead, ShardRows, stream
from conveyor.prod.dynamodb.items import Item, Table
from conveyor.prod.dynamodb.keys import SPREAD, Key, every, pin_key, task_partition, task_sort_key
from conveyor.prod.dynamodb.places import Place
from conveyor.prod.dynamodb.table import BY_OWNER, INDEXES, PARTITION_KEY, SORT_KEY
from conveyor.prod.dynamodb.values import Tagged, untag_all
from conveyor.prod.together import side_by_side

MOST_TOUCHED = 1_000
"""Rows that one query for rare ones touches."""
END = "~"
"""Sorts behind every id."""
BEGIN = "!"
"""Sorts before every character of an id."""
SPARE = 8
"""Index entries asked of each partition beyond its share, as no share is exact."""

_ID = INDEXES[BY_OWNER][1]
_DUE = (
    "(#status = :pending AND #not_before <= :now) OR "
    "(#status = :processing AND #claimed_until <= :now)"
)


class Reference(msgspec.Struct, frozen=True):
    """A row by its index and its task's id."""

    index: int
    task_id: str


async def due_rows(
    table: Table, place: Place, *, after: int, piece: int, now: int
) -> AsyncIterator[Reference]:
    """Rows that could be worked now, of all shards in order, with an index above `after`."""
    sizes = [0] * place.shards.count

    async def read(wanted: ShardRead) -> ShardRows[Reference]:
        at = max(wanted.after, after)
        size = max(wanted.limit, sizes[wanted.shard])
        low = ids.encode_index(min(at + 1, ids.MAX_INDEX))
        page = await table.page(
            task_partition(place.job_id, place.shards, wanted.shard),
            between=(task_sort_key(place.run_id, low), task_sort_key(place.run_id, END)),
            filtered=_DUE,
            names={f"#{name}": name for name in ("status", "not_before", "claimed_until")},
            limit=size,
            keys_only=True,
            pending="pending",
            processing="processing",
            now=now,
        )
        rows = [_reference(item) for item in page.items]
        if 2 * len(rows) < page.read:
            sizes[wanted.shard] = min(2 * size, MOST_TOUCHED)
        following = None if page.last is None else _reference(untag_all(page.last)).index
        return ShardRows(rows, following, page.read)

    async for row in stream(read, place.shards, piece=piece):
        yield row


async def ended_keys(table: Table, *, after: str, piece: int) -> AsyncIterator[list[Key]]:
    """Where runs lie that have ended, by run id above `after`: every batch goes on from the one
    before, of about `piece`, none is empty."""
    parts = [_Part(partition) for partition in (*every("ended"), *every("unsettled"))]
    share = ceil(piece / SPREAD) + SPARE

    async def read(part: _Part) -> None:
        page = await table.page(
            part.partition,
            index=BY_OWNER,
            between=(f"{after}{BEGIN}", END),
            limit=share,
            start=part.last,
        )
        part.entries.extend(
            (item[_ID], Key(item[PARTITION_KEY], item[SORT_KEY])) for item in page.items
        )
        part.last, part.done = page.last, page.last is None

    while True:
        await side_by_side(read, [part for part in parts if not part.entries and not part.done])
        ready: list[Key] = []
        while filled := [part for part in parts if part.entries]:
            # One that ran dry may go on with an id that comes before all others.
            if any(not part.entries and not part.done for part in parts):
                break
            ready.append(min(filled, key=lambda part: part.entries[0]).entries.popleft()[1])
        if ready:
            yield ready
        elif all(part.done for part in parts):
            return


async def dependants(table: Table, job_id: str, run_id: str) -> list[str]:
    """The ids of the runs that draw bodies, or are still copied, from a run."""
    prefix = pin_key(job_id, run_id, "")
    found: list[str] = []
    async for page in table.pages(prefix.pk, begins_with=prefix.sk, keys_only=True):
        found += [item[SORT_KEY].rpartition("#")[2] for item in page.items]
    return found


async def remove_rows(table: Table, place: Place) -> None:
    """Remove every row of a run, whatever it is."""

    async def remove(shard: int) -> None:
        partition = task_partition(place.job_id, place.shards, shard)
        prefix = task_sort_key(place.run_id, "")
        async for page in table.pages(partition, begins_with=prefix, keys_only=True):
            await table.delete_many(keys_of(page.items))

    await side_by_side(remove, range(place.shards.count))


def keys_of(items: Sequence[Item]) -> list[Key]:
    """The keys of items."""
    return [Key(item[PARTITION_KEY], item[SORT_KEY]) for item in items]


@dataclass(slots=True)
class _Part:
    """One index partition on its way into the merged list."""

    partition: str
    entries: deque[tuple[str, Key]] = field(default_factory=deque)
    last: dict[str, Tagged] | None = None
    done: bool = False


def _reference(item: Item) -> Reference:
    task_id: str = item[SORT_KEY].rpartition("#")[2]
    return Reference(ids.task_index(task_id), task_id)
