"""A list in shards, in memory, that counts what is read of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter

import anyio

from conveyor.domain.ids import task_id
from conveyor.domain.shards import Shards, ShardScheme, fnv32a
from conveyor.records.sharded_reads import (
    START,
    Read,
    ShardCursor,
    ShardRead,
    ShardRows,
    merge_page,
)

RUN = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
COUNTS = (1, 2, 3, 8, 16, 64)
LAYOUTS = tuple(Shards(count, scheme) for scheme in ShardScheme for count in COUNTS)

_index = attrgetter("index")


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the list."""

    index: int


@cache
def hashed(index: int) -> int:
    """The hash of the task id at an index."""
    return fnv32a(task_id(RUN, index))


def shard_of(shards: Shards, index: int) -> int:
    """The shard of a row."""
    return (
        index % shards.count
        if shards.scheme is ShardScheme.STRIPE
        else hashed(index) % (shards.count)
    )


class ShardedRows:
    """The rows with these indexes; `end` is the index that the next row gets."""

    def __init__(self, shards: Shards, indexes: Iterable[int]) -> None:
        self.shards = shards
        self.end = 0
        self.rows_read = 0
        self.queries: list[ShardRead] = []
        self.at_once = 0
        self._parts: list[list[Line]] = [[] for _ in range(shards.count)]
        self.append(indexes)

    def append(self, indexes: Iterable[int]) -> None:
        """Add rows with higher indexes."""
        for index in indexes:
            self._parts[shard_of(self.shards, index)].append(Line(index))
            self.end = index + 1

    def reader(
        self, matches: Callable[[int], bool] = lambda _index: True, *, by_index: bool = False
    ) -> Read[Line]:
        """Reads the rows that match. A store that finds them `by_index` reads no others; one that
        looks at each row reads on until it has enough, or has reached its bound."""
        running = 0

        async def read(wanted: ShardRead) -> ShardRows[Line]:
            nonlocal running
            running += 1
            self.at_once = max(self.at_once, running)
            await anyio.lowlevel.checkpoint()
            running -= 1
            self.queries.append(wanted)
            part = self._parts[wanted.shard]
            rest = part[bisect_right(part, wanted.after, key=_index) :]
            if by_index:
                rest = [row for row in rest if matches(row.index)]
            return self._scan(rest, matches, wanted)

        return read

    def _scan(
        self, rest: Sequence[Line], matches: Callable[[int], bool], wanted: ShardRead
    ) -> ShardRows[Line]:
        found: list[Line] = []
        read = 0
        for row in rest:
            if len(found) == wanted.limit or read == wanted.most_read:
                break
            read += 1
            if matches(row.index):
                found.append(row)
        self.rows_read += read
        full = len(found) == wanted.limit or read == wanted.most_read
        last = rest[read - 1].index if full and read else None
        return ShardRows(found, None if last == self.end - 1 else last, read)


@dataclass
class Walk:
    """The result of a walk over all pages."""

    indexes: list[int]
    pages: list[ShardCursor[Line]]

    @property
    def rows_read(self) -> int:
        """Rows of the store that were read."""
        return sum(page.rows_read for page in self.pages)

    @property
    def rounds(self) -> int:
        """Rounds of queries."""
        return sum(page.rounds for page in self.pages)


async def walk(
    rows: ShardedRows,
    limit: int,
    *,
    read: Read[Line] | None = None,
    most_read: int | None = None,
    between: Callable[[int], None] = lambda _page: None,
) -> Walk:
    """Every page; `between` is called after each but the last, with its number."""
    done = Walk([], [])
    positions: tuple[int, ...] = (START,) * rows.shards.count
    while True:
        page = await merge_page(
            read or rows.reader(),
            rows.shards,
            positions,
            limit,
            end=rows.end,
            most_read=most_read,
        )
        assert len(page.rows) <= limit
        done.pages.append(page)
        done.indexes += [row.index for row in page.rows]
        if not page.more:
            return done
        assert page.positions != positions, "a page must get on"
        positions = page.positions
        between(len(done.pages))
