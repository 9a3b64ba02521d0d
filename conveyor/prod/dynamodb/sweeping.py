"""The sweeping port on one DynamoDB table.

Indexes lag behind: they tell where to look, and what is found there is read strongly. Rows of a
newer shape are left to the sweep of a process that knows them, damaged ones to whoever mends them.

What a sweep reads: rows that are due, ended runs in order of their ids, who draws on whom.

What writes of several steps leave behind when they are cut off between two of them.

A job whose rows were written and whose run never was: an intent tells. Tasks being added that never
became a part of their run: a reservation on the run tells. Pins of runs that are gone: seen when
ended runs are looked at. Rows of ended runs that nobody counted: the run is unsettled. Each gets 15
minutes, which no call takes. And what processes that are gone have left on the row of a run that
goes on for long.

Runs that have ended: when that counts, as long as others draw on them, and how they expire.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from conveyor.aio.concurrency import for_each
from conveyor.aio.resilience import log_and_continue
from conveyor.domain.model import RunStatus, TaskStatus
from conveyor.ports.maintenance import EndedRun, QuietRun
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import (
    Plain,
    Query,
    RowFilter,
    Table,
    Tagged,
    UnreadableRow,
    changed_too_often,
    condition_met,
    keys_of,
    readable,
)
from conveyor.prod.dynamodb.counters import is_crowded, recount, recount_at
from conveyor.prod.dynamodb.run_rows import (
    TRIES,
    Change,
    DynamoRunRows,
    RunMoved,
    RunPlace,
    RunRow,
    dependants,
    read_place,
    read_run_row,
)
from conveyor.prod.dynamodb.runs import delete_ended, read_all
from conveyor.prod.dynamodb.schema import (
    BEGIN,
    BY_DISPATCH,
    BY_OWNER,
    END,
    INDEXES,
    INTENTS,
    PARTITION_KEY,
    ROW_SHAPE,
    SORT_KEY,
    SPREAD,
    SWEEP,
    Key,
    by_time,
    every,
    pin_key,
)
from conveyor.prod.dynamodb.submitting import Reservation, forget, give_back
from conveyor.prod.dynamodb.task_rows import Reference, references, remove_rows

SPARE = 8
"""Index entries asked of each partition beyond its share, as no share is exact."""

_ID = INDEXES[BY_OWNER][1]
_DUE = (
    "(#status = :pending AND not_before <= :now) OR "
    "(#status = :processing AND claimed_until <= :now)"
)


def due_rows(
    table: Table, place: RunPlace, *, after: int, piece: int, now: int
) -> AsyncIterator[Reference]:
    """Rows that could be worked now, of all shards in order, with an index above `after`."""
    values: dict[str, Plain] = {
        "pending": str(TaskStatus.PENDING),
        "processing": str(TaskStatus.PROCESSING),
        "now": now,
    }
    return references(table, place, RowFilter(_DUE, values), after=after, piece=piece)


async def ended_keys(table: Table, *, after: str, piece: int) -> AsyncIterator[list[Key]]:
    """Where runs lie that have ended, each once, by run id above `after`: every batch goes on from
    the one before, of about `piece`, none is empty."""
    parts = [_Part(partition) for partition in (*every("ended"), *every("unsettled"))]
    share = ceil(piece / SPREAD) + SPARE

    async def read(part: _Part) -> None:
        page = await table.page(
            Query(
                part.partition,
                index=BY_OWNER,
                between=(f"{after}{BEGIN}", END),
                limit=share,
                start=part.last,
            )
        )
        part.entries.extend(
            (item[_ID], Key(item[PARTITION_KEY], item[SORT_KEY])) for item in page.items
        )
        part.last, part.done = page.last, page.last is None

    last: Key | None = None
    while True:
        await for_each(read, [part for part in parts if not part.entries and not part.done])
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


@dataclass(slots=True)
class _Part:
    """One index partition on its way into the merged list."""

    partition: str
    entries: deque[tuple[str, Key]] = field(default_factory=deque)
    last: dict[str, Tagged] | None = None
    done: bool = False


PATIENCE = 15 * 60_000
"""Milliseconds after which a write that is not complete counts as cut off."""

_log = logging.getLogger("conveyor.records")


class Leftovers:
    """Finds what was left behind and removes it."""

    def __init__(self, records: DynamoRunRows) -> None:
        self._records = records
        self._table = records.table
        self._looked_at: int | None = None
        self._added_since: dict[tuple[Key, str], int] = {}
        self._pins: dict[Key, int] = {}
        self._runs: set[Key] = set()

    def pin_of_gone_run(self, pin: Key) -> None:
        """Tell of a pin whose run was not found."""
        self._pins.setdefault(pin, self._table.clock.now())

    def run_with_additions(self, run: Key) -> None:
        """Tell of an ended run with additions that are not complete."""
        self._runs.add(run)

    async def tidy(self, *, now: int) -> int:
        """Remove what is old enough; how many things. What can only be seen to grow old is looked
        at every 15 minutes."""
        done = await self._end_intents(now)
        if self._looked_at is None or not 0 <= now - self._looked_at < PATIENCE:
            self._looked_at = now
            done += await self._look_at_runs(now)
            done += await self._remove_pins(now)
            await self._settle_runs(now)
        return done

    async def _end_intents(self, now: int) -> int:
        done = 0
        until = by_time(now - PATIENCE, "")
        async for page in self._table.pages(Query(INTENTS, index=BY_OWNER, between=(BEGIN, until))):
            for key in keys_of(page.items):
                done += await _attempt(f"ending the intent {key.sk}", self._end_intent(key))
        return done

    async def _end_intent(self, key: Key) -> bool:
        """Whoever still writes under the intent cannot make the run any more; then its rows go."""
        try:
            item = await self._table.update(
                key, "SET abandoned = :yes", condition="attribute_exists(pk)", yes=True
            )
        except AwsRefused as refused:
            if not refused.is_condition:
                raise
            return False
        place = read_place(item)
        run = await self._table.get(place.key)
        if run is None or read_run_row(run).place.run_id != place.run_id:
            await remove_rows(self._table, place)
        await self._table.delete(key)
        return True

    async def _look_at_runs(self, now: int) -> int:
        """Look at the rows of runs that go on, and of those that were told of; how many additions
        were taken back."""
        keys = {*self._runs, *await self._live_runs()}
        self._runs.clear()
        done, since = 0, self._added_since
        self._added_since = {}
        items = await self._table.get_many(list(keys))
        for row in readable(read_run_row, items.values()):
            done += await self._end_additions(row, since, now)
            # One that does not wait for tasks is counted once it is quiet.
            if row.run.status is RunStatus.PENDING and is_crowded(row):
                what = f"forgetting who has counted in run {row.place.run_id}"
                await _attempt(what, self._recount(row, now))
        return done

    async def _end_additions(
        self, row: RunRow, since: Mapping[tuple[Key, str], int], now: int
    ) -> int:
        """An addition carries no time: it counts from when it was first seen here."""
        key, done = row.place.key, 0
        for start in {**row.reserved, **row.given_up}:
            first_seen = since.get((key, start), now)
            if now - first_seen >= PATIENCE:
                what = f"taking back an addition to run {row.place.run_id}"
                done += await _attempt(what, self._take_back(row, start, now))
            else:
                self._added_since[key, start] = first_seen
        return done

    async def _recount(self, row: RunRow, now: int) -> bool:
        return (await recount_at(self._records, row.place, now=now)).done

    async def _take_back(self, row: RunRow, start: str, now: int) -> bool:
        """Take back one addition, or go on where that was cut off."""
        if start in row.reserved:
            reservation = Reservation(int(start), row.reserved[start])
            return await give_back(self._records, row.place, reservation, now=now)
        reservation = Reservation(int(start), row.given_up[start])
        await forget(self._records, row.place, reservation)
        return True

    async def _settle_runs(self, now: int) -> None:
        """Count what came after the end of runs that were cut short. Where something is still
        under way it is left to the next look."""
        found = await read_all(self._table, every("unsettled"), index=BY_OWNER, keys_only=True)
        items = await self._table.get_many(keys_of(found))
        for row in readable(read_run_row, items.values()):
            if row.unsettled and now - row.dispatch_changed_at >= PATIENCE:
                what = f"counting what came after the end of run {row.place.run_id}"
                await _attempt(what, self._settle_run(row, now))

    async def _settle_run(self, row: RunRow, now: int) -> bool:
        counted, done = await recount_at(self._records, row.place, now=now)
        if counted is None or not done or counted.run.status is RunStatus.DELETED:
            return False
        try:
            # Nothing of the run itself has moved: it keeps its time.
            at = counted.run.updated_at
            await self._records.change(counted, Change(unsettled=False), now=at)
        except RunMoved:
            return False
        return True

    async def _remove_pins(self, now: int) -> int:
        """Of runs that are still not there, a while after that was seen."""
        done = 0
        for pin in [pin for pin, first in self._pins.items() if now - first >= PATIENCE]:
            del self._pins[pin]
            done += await _attempt(f"removing the pin {pin.sk}", self._remove_pin(pin))
        return done

    async def _remove_pin(self, pin: Key) -> bool:
        run_id = pin.sk.rpartition("#")[2]
        if await self._records.read(run_id) is not None:
            return False
        await self._table.delete(pin)
        return True

    async def _live_runs(self) -> list[Key]:
        found: list[Key] = []

        async def find(partition: str) -> None:
            async for page in self._table.pages(
                Query(
                    partition,
                    index=BY_DISPATCH,
                    where=RowFilter(
                        "#status IN (:running, :pending)",
                        {"running": str(RunStatus.RUNNING), "pending": str(RunStatus.PENDING)},
                    ),
                )
            ):
                found.extend(keys_of(page.items))

        await for_each(find, [*every("active"), *every("idle")])
        return found


async def _attempt(what: str, step: Awaitable[bool]) -> bool:
    """Return the result of a step. If it fails, log the error and leave the step to a later sweep.

    Leave a row that this process cannot read as it is: whoever read it has logged it.
    """

    async def act() -> bool:
        try:
            return await step
        except UnreadableRow:
            return False

    return bool(await log_and_continue(_log, f"{what} failed", act))


class Ends:
    """Looks at the ends of runs. What it finds left behind, it tells `leftovers`."""

    def __init__(self, records: DynamoRunRows, leftovers: Leftovers) -> None:
        self._records = records
        self._leftovers = leftovers

    async def of(self, rows: Sequence[RunRow], *, before: int) -> list[EndedRun]:
        """Those of the runs that ended before an instant, they and all that draw on them."""
        ends: dict[str, EndedRun] = {}

        async def look(row: RunRow) -> None:
            ended_at = row.run.updated_at
            try:
                drawing = await self._drawing(row)
            except UnreadableRow:
                return
            for other in drawing:
                if not _has_ended(other):
                    return
                ended_at = max(ended_at, other.run.updated_at)
            if ended_at < before:
                ends[row.run.run_id] = EndedRun(
                    row.run.job_id,
                    row.run.run_id,
                    ended_at,
                    row.result_ttl_days,
                    row.swept,
                    row.queue_dropped,
                )

        for row in rows:
            if row.reserved or row.given_up:
                self._leftovers.run_with_additions(row.place.key)
        await for_each(
            look,
            [
                row
                for row in rows
                if _has_ended(row)
                and row.run.status is not RunStatus.DELETED
                and row.run.updated_at < before
            ],
        )
        return [ends[row.run.run_id] for row in rows if row.run.run_id in ends]

    async def expire(self, run_id: str, *, now: int) -> list[str]:
        """Turn an ended run to `deleted`; see `Sweeping.expire_run`."""
        for _ in range(TRIES):
            row = await self._records.read(run_id)
            if row is None or not _has_ended(row):
                return []
            if not all(map(_has_ended, await self._drawing(row))):
                return []
            if row.run.status is RunStatus.DELETED:
                return [run_id]
            try:
                await delete_ended(self._records, row, now=now)
            except RunMoved:
                continue
            return [run_id]
        raise changed_too_often()

    async def _drawing(self, row: RunRow) -> list[RunRow]:
        """The runs that draw on a run, but for those that are deleted."""
        job_id, run_id = row.run.job_id, row.run.run_id
        found: list[RunRow] = []
        for other_id in await dependants(self._records.table, job_id, run_id):
            other = await self._records.read(other_id)
            if other is None:
                self._leftovers.pin_of_gone_run(pin_key(job_id, run_id, other_id))
            elif other.run.status is not RunStatus.DELETED:
                found.append(other)
        return found


def _has_ended(row: RunRow) -> bool:
    return not row.live and not row.run.ingesting


CLOCKS_APART = 60_000
"""Milliseconds by which a claim may outlast one that is made now. One that lasts longer was made
before a clock was set back, and counts for nothing."""


class DynamoSweeping:
    """The sweeping port."""

    def __init__(self, records: DynamoRunRows) -> None:
        self._records = records
        self._table = records.table
        self._leftovers = Leftovers(records)
        self._ends = Ends(records, self._leftovers)

    async def claim_sweep(self, *, now: int, lapses_at: int) -> bool:
        """Whether the caller may sweep: one at a time, until `lapses_at`."""
        token = self._table.clock.new_id()
        try:
            await self._table.update(
                SWEEP,
                "SET shape = :shape, lapses_at = :lapses_at, claimed_by = :token",
                condition="attribute_not_exists(pk) OR lapses_at <= :now OR lapses_at > :most",
                shape=ROW_SHAPE,
                lapses_at=lapses_at,
                token=token,
                now=now,
                most=lapses_at + CLOCKS_APART,
            )
        except AwsRefused as refused:
            if not refused.is_condition:
                raise
            found = condition_met(refused)
            # It was carried out, and its answer lost.
            return found is not None and found["claimed_by"] == token
        return True

    async def quiet_runs(self, *, before: int) -> list[QuietRun]:
        """Live runs with tasks to be worked in which nothing was written since `before`."""
        found: list[Key] = []

        async def find(partition: str) -> None:
            async for page in self._table.pages(Query(partition, index=BY_DISPATCH)):
                found.extend(keys_of(page.items))

        await for_each(find, every("active"))
        items = await self._table.get_many(found)
        quiet = [
            QuietRun(row.run.job_id, row.run.run_id, row.run.updated_at)
            for row in readable(read_run_row, items.values())
            if row.run.status is RunStatus.RUNNING
            and not row.run.paused
            and not row.run.ingesting
            and row.run.updated_at < before
        ]
        return sorted(quiet, key=lambda run: (run.updated_at, run.run_id))

    async def reconcile_run(self, run_id: str, *, now: int) -> RunStatus | None:
        """Set a run's counters to what its rows say, and decide again whether it is complete."""
        row = await recount(self._records, run_id, now=now)
        return None if row is None else row.run.status

    async def due_references(
        self, run_id: str, *, after: int, limit: int, now: int
    ) -> list[tuple[int, str]]:
        """(index, task_id) of rows of a live run that could be worked now, in order.

        Rows of an addition that is not complete are not a part of the run yet.
        """
        run = await self._records.read(run_id)
        if run is None or not run.live:
            return []
        found: list[tuple[int, str]] = []
        async for row in due_rows(self._table, run.place, after=after, piece=limit, now=now):
            if row.index < run.run.next_index and run.holds(row.index):
                found.append((row.index, row.task_id))
            if len(found) == limit:
                break
        return found

    async def ended_runs(self, *, before: int, after: str, limit: int) -> list[EndedRun]:
        """Terminal runs, not deleted, that ended before `before`, by run id above `after`."""
        found: list[EndedRun] = []
        async for keys in ended_keys(self._table, after=after, piece=limit):
            items = await self._table.get_many(keys)
            rows = readable(read_run_row, [items[key] for key in keys if key in items])
            found += await self._ends.of(rows, before=before)
            if len(found) >= limit:
                break
        return found[:limit]

    async def mark_swept(self, run_id: str) -> None:
        """Note that the bodies of an ended run were removed for age."""
        await self._mark(run_id, "swept")

    async def mark_queue_dropped(self, run_id: str) -> None:
        """Note that nothing is left of the queue of an ended run."""
        await self._mark(run_id, "queue_dropped")

    async def expire_run(self, run_id: str, *, now: int) -> list[str]:
        """Turn an ended run to `deleted`, and its job too where no other run of it is left."""
        try:
            return await self._ends.expire(run_id, now=now)
        except UnreadableRow:
            return []

    async def tidy(self, *, now: int) -> int:
        """Set right what writes left behind that were cut off in the middle; how many things."""
        return await self._leftovers.tidy(now=now)

    async def _mark(self, run_id: str, attribute: str) -> None:
        place = await self._records.places.find(run_id)
        if place is None:
            return
        try:
            await self._table.update(
                place.key, f"SET {attribute} = :yes", condition="attribute_exists(pk)", yes=True
            )
        except UnreadableRow:
            return
        except AwsRefused as refused:
            if not refused.is_condition:
                raise
