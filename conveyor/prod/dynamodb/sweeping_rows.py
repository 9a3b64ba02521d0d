"""What a sweep reads: rows that are due, ended runs in order of their ids, who draws on whom."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from math import ceil

from conveyor.aio.concurrency import side_by_side
from conveyor.domain.model import TaskStatus
from conveyor.prod.dynamodb.items import Table, keys_of
from conveyor.prod.dynamodb.keys import (
    BEGIN,
    END,
    SPREAD,
    Key,
    every,
    pin_key,
    task_partition,
    task_sort_key,
)
from conveyor.prod.dynamodb.places import Place
from conveyor.prod.dynamodb.references import Reference, references
from conveyor.prod.dynamodb.table import BY_OWNER, INDEXES, PARTITION_KEY, SORT_KEY
from conveyor.prod.dynamodb.values import Tagged

SPARE = 8
"""Index entries asked of each partition beyond its share, as no share is exact."""

_ID = INDEXES[BY_OWNER][1]
_DUE = (
    "(#status = :pending AND not_before <= :now) OR "
    "(#status = :processing AND claimed_until <= :now)"
)


def due_rows(
    table: Table, place: Place, *, after: int, piece: int, now: int
) -> AsyncIterator[Reference]:
    """Rows that could be worked now, of all shards in order, with an index above `after`."""
    wanted = {
        "filtered": _DUE,
        "pending": str(TaskStatus.PENDING),
        "processing": str(TaskStatus.PROCESSING),
        "now": now,
    }
    return references(table, place, wanted, after=after, piece=piece)


async def ended_keys(table: Table, *, after: str, piece: int) -> AsyncIterator[list[Key]]:
    """Where runs lie that have ended, each once, by run id above `after`: every batch goes on from
    the one before, of about `piece`, none is empty."""
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

    last: Key | None = None
    while True:
        await side_by_side(read, [part for part in parts if not part.entries and not part.done])
        ready: list[Key] = []
        while filled := [part for part in parts if part.entries]:
            # One that ran dry may go on with an id that comes before all others.
            if any(not part.entries and not part.done for part in parts):
                break
            key = min(filled, key=lambda part: part.entries[0]).entries.popleft()[1]
            # One that moved meanwhile is found at both places, one after the other.
            if key != last:
                ready.append(key)
            last = key
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


@dataclass(slots=True)
class _Part:
    """One index partition on its way into the merged list."""

    partition: str
    entries: deque[tuple[str, Key]] = field(default_factory=deque)
    last: dict[str, Tagged] | None = None
    done: bool = False
