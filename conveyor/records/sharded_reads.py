"""Read a list that lies in many shards in the order of its index, page by page or as one stream.

The main use is a run's task rows in submission order. Asking every shard for a whole page would
read many rows that the page cannot hold. So each shard has a position of its own, and is asked for
as many rows as the page will probably take from it: exactly its part if that follows from the
index, else an equal part and a small margin. A shard that runs dry before the page is full is asked
again. Nothing is kept between two pages: the next one reads again the rows that were read and not
returned.

A row may be returned once every row below it is known. That follows from the position up to which
each shard has been read, and from the fact that an index lies in one shard only, so that the
neighbour of a known row is known.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, sqrt
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from conveyor.aio.concurrency import for_each
from conveyor.domain.ids import MAX_INDEX
from conveyor.domain.model import GroupFilter, Task, TaskStatus
from conveyor.domain.shards import Shards, ShardScheme
from conveyor.ports.tasks import TaskReader

START = -1
"""The position before the first row of a shard."""


class Indexed(Protocol):
    """A row with a place in the list, from 0."""

    @property
    def index(self) -> int:
        """The place."""
        ...


Row = TypeVar("Row", bound=Indexed)
_index = attrgetter("index")


@dataclass(frozen=True, slots=True)
class ShardRead:
    """One query: at most `limit` rows of a shard with an index above `after`. It may read at most
    `most_read` rows of the store (None: as many as it takes)."""

    shard: int
    after: int
    limit: int
    most_read: int | None = None


@dataclass(frozen=True, slots=True)
class ShardRows(Generic[Row]):
    """The answer to a query: rows in order, the index after which the shard goes on (None at its
    end), and the number of rows of the store that were read."""

    rows: Sequence[Row]
    next_index: int | None
    rows_read: int


Read = Callable[[ShardRead], Awaitable[ShardRows[Row]]]


@dataclass(frozen=True, slots=True)
class ShardCursor(Generic[Row]):
    """A page: its rows in order, the position of each shard after it, and whether more may follow.

    For measurements, also the number of rows of the store that were read, of rounds of queries, and
    of rows that the queries returned and the page does not hold.
    """

    rows: list[Row]
    positions: tuple[int, ...]
    more: bool
    rows_read: int
    rounds: int
    discarded: int = 0


async def merge_page(
    read: Read[Row],
    shards: Shards,
    positions: Sequence[int],
    limit: int,
    *,
    end: int | None = None,
    most_read: int | None = None,
) -> ShardCursor[Row]:
    """Read the next page of at most `limit` rows, after one position a shard (START at the
    beginning).

    Every row below `end` existed before the first query. Rows from `end` on are left for a later
    page, so that a row that appears between two queries cannot come out of order; None reads all
    rows. `most_read`, at least one a shard, marks a filtered list: at most so many rows are read in
    all, and the page may be short or empty with more to follow. Raises whatever `read` raises.
    """
    if shards.count == 1:
        return await _only_page(read, positions[0], limit, most_read)
    merge = _Merge[Row](shards, positions, limit, end=end, filtered=most_read is not None)
    left = most_read
    while queries := merge.queries(left):
        for query, answer in zip(queries, await _round(read, queries), strict=True):
            merge.take(query, answer)
        left = None if most_read is None else most_read - merge.rows_read
    return merge.page()


async def stream(read: Read[Row], shards: Shards, *, piece: int) -> AsyncIterator[Row]:
    """Yield every row of all shards in order, and read no row twice.

    The list must not grow meanwhile. Each query asks a shard for its share of `piece` rows; at most
    one and a half times as many are held. Raises whatever `read` raises.
    """
    share = ceil(piece / shards.count)
    parts = [_Part[Row](START, START) for _ in range(shards.count)]
    while True:
        reached = min((part.read_to for part in parts if not part.ended), default=MAX_INDEX)
        ready = [row for part in parts for row in part.release(reached)]
        ready.sort(key=_index)
        for row in ready:
            yield row
        queries = [
            ShardRead(number, part.read_to, share)
            for number, part in enumerate(parts)
            if not part.ended and len(part.rows) <= share // 2
        ]
        if not queries:
            return
        for query, answer in zip(queries, await _round(read, queries), strict=True):
            parts[query.shard].take(answer)


async def _only_page(
    read: Read[Row], after: int, limit: int, most_read: int | None
) -> ShardCursor[Row]:
    answer = await read(ShardRead(0, after, limit, most_read))
    more = answer.next_index is not None
    position = after if answer.next_index is None else answer.next_index
    return ShardCursor(list(answer.rows), (position,), more, answer.rows_read, 1)


async def _round(read: Read[Row], queries: Sequence[ShardRead]) -> list[ShardRows[Row]]:
    """Ask all queries at once; return their answers in order."""
    if len(queries) == 1:
        return [await read(queries[0])]
    answers: dict[int, ShardRows[Row]] = {}

    async def ask(numbered: tuple[int, ShardRead]) -> None:
        place, query = numbered
        answers[place] = await read(query)

    await for_each(ask, enumerate(queries))
    return [answers[place] for place in range(len(queries))]


@dataclass(slots=True)
class _Part(Generic[Row]):
    """One shard of a page in the making: it began at `position`, and has been read up to
    `read_to`."""

    position: int
    read_to: int
    ended: bool = False
    rows: list[Row] = field(default_factory=list)

    def take(self, answer: ShardRows[Row]) -> None:
        self.rows += answer.rows
        self.ended = answer.next_index is None
        if answer.next_index is not None:
            self.read_to = answer.next_index
        elif answer.rows:
            self.read_to = answer.rows[-1].index

    def rows_up_to(self, index: int) -> int:
        return bisect_right(self.rows, index, key=_index)

    def release(self, reached: int) -> list[Row]:
        """Remove and return the rows up to an index."""
        cut = self.rows_up_to(reached)
        released, self.rows = self.rows[:cut], self.rows[cut:]
        return released


class _Merge(Generic[Row]):
    """A page in the making."""

    def __init__(
        self,
        shards: Shards,
        positions: Sequence[int],
        limit: int,
        *,
        end: int | None,
        filtered: bool,
    ) -> None:
        self._count = shards.count
        self._striped = shards.scheme is ShardScheme.STRIPE
        self._limit = limit
        self._last = MAX_INDEX if end is None else end - 1
        self._filtered = filtered
        self._parts = [_Part[Row](position, position) for position in positions]
        # A page of a whole list returns every row up to its end; in a filtered list, one shard may
        # have been read further than another, past rows that do not match.
        self._known = min(positions) if filtered else max(positions)
        self._indexes: list[int] = []
        self.rows_read = 0
        self._rounds = 0

    def queries(self, left: int | None) -> list[ShardRead]:
        """List the queries of the next round, which may read `left` rows; empty where the page is
        complete."""
        self._advance()
        full = len(self._indexes) >= self._limit
        wanted = self._indexes[self._limit - 1] if full else self._last
        if self._known >= wanted:
            return []
        asked = {
            number: size
            for number, part in enumerate(self._parts)
            if not part.ended and self._reach(number) < wanted and (size := self._ask(number))
        }
        share = None if left is None else left // len(asked)
        if share == 0:
            return []
        self._rounds += 1
        return [
            ShardRead(number, self._parts[number].read_to, min(size, share or size), share)
            for number, size in asked.items()
        ]

    def take(self, query: ShardRead, answer: ShardRows[Row]) -> None:
        """Add the answer to a query."""
        self.rows_read += answer.rows_read
        self._parts[query.shard].take(answer)

    def page(self) -> ShardCursor[Row]:
        """Make the page of the rows that are certain."""
        cut = min(self._known, self._last)
        rows = [row for part in self._parts for row in part.rows if row.index <= cut]
        rows.sort(key=_index)
        del rows[self._limit :]
        discarded = sum(len(part.rows) for part in self._parts) - len(rows)
        if len(rows) == self._limit:
            cut = rows[-1].index
        positions = tuple(self._position(part, cut) for part in self._parts)
        return ShardCursor(
            rows, positions, self._more(cut), self.rows_read, self._rounds, discarded
        )

    def _advance(self) -> None:
        """Find up to which index every row is known."""
        self._indexes = sorted(
            row.index for part in self._parts for row in part.rows if row.index <= self._last
        )
        open_parts = (number for number, part in enumerate(self._parts) if not part.ended)
        self._known = min(map(self._reach, open_parts), default=MAX_INDEX)
        for index in self._indexes[bisect_right(self._indexes, self._known) :]:
            if index != self._known + 1:
                break
            self._known = index

    def _reach(self, number: int) -> int:
        """Find the index up to which every row of an open shard is known."""
        through = self._through(number)
        if self._striped:
            return through + (number - through - 1) % self._count
        return through

    def _through(self, number: int) -> int:
        return max(self._parts[number].read_to, self._known)

    def _ask(self, number: int) -> int:
        """Estimate how many more rows the page will take from a shard."""
        through = self._through(number)
        missing = self._limit - bisect_right(self._indexes, through)
        missing = min(missing, self._last - through)
        open_count = sum(not part.ended for part in self._parts)
        if self._striped and not self._filtered:
            # Neighbours lie in neighbouring shards, as far as these have not ended.
            width = missing * self._count // open_count
            passed = (through - number) // self._count
            return (through + width - number) // self._count - passed
        expected = missing / open_count
        found = bisect_right(self._indexes, self._known)
        if found:
            mine = self._parts[number].rows_up_to(self._known)
            expected = max(expected, missing * mine / found)
        return ceil(expected + sqrt(expected))

    def _position(self, part: _Part[Row], cut: int) -> int:
        """Find the position of a shard after a page that ends with `cut`."""
        returned = part.rows_up_to(cut)
        if not self._filtered:
            return part.rows[returned - 1].index if returned else part.position
        reached = part.read_to
        if returned < len(part.rows):
            reached = part.rows[returned].index - 1
        elif part.ended and self._last < MAX_INDEX:
            reached = self._last
        return max(part.position, min(reached, self._last))

    def _more(self, cut: int) -> bool:
        if cut >= self._last:
            return False
        if bisect_right(self._indexes, cut) < len(self._indexes):
            return True
        return any(
            self._reach(number) < self._last
            for number, part in enumerate(self._parts)
            if not part.ended
        )


def task_reader(
    tasks: TaskReader,
    run_id: str,
    *,
    statuses: frozenset[TaskStatus] | None,
    groups: GroupFilter | None = None,
) -> Read[Task]:
    """Return a function that reads a stretch of one shard of a run, for the functions above."""

    async def read(wanted: ShardRead) -> ShardRows[Task]:
        page = await tasks.page_tasks(
            run_id,
            shard=wanted.shard,
            statuses=statuses,
            after=wanted.after if wanted.after >= 0 else None,
            limit=wanted.limit,
            most_read=wanted.most_read,
            groups=groups,
        )
        return ShardRows(page.tasks, page.next_index, page.rows_read)

    return read


def all_tasks(
    tasks: TaskReader,
    run_id: str,
    shards: Shards,
    *,
    statuses: frozenset[TaskStatus] | None = None,
    piece: int = 1_000,
) -> AsyncIterator[Task]:
    """Yield the rows of a run in submission order: those of `statuses`, or all (None).

    No row is read twice. About `piece` rows are in memory at a time, of all shards together.
    """
    read = task_reader(tasks, run_id, statuses=statuses)
    return stream(read, shards, piece=piece)
