"""The sweeping port on DynamoDB: `DynamoSweeping` at the end, after the parts that it is made of.

Indexes lag behind the table, so they only show where to look; rows found there are read strongly.
Rows of a newer shape are left to a process that knows it, damaged ones to whoever repairs them.

- `due_rows` and `due_keys` merge rows of shards, and entries of index partitions, in one order.
- `Leftovers` completes writes of several steps that were cut off: intents without a run, additions
  that were never counted, pins of runs that are gone, and ended runs with uncounted rows. Each gets
  15 minutes first, longer than any call takes. It also folds what processes have counted that are
  gone, and has rows of long runs stamped (`row_expiry`).
- `EndedRuns` finds runs that have ended together with all runs that draw on them, and expires them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import NamedTuple

from conveyor.aio.concurrency import for_each
from conveyor.aio.resilience import log_and_continue
from conveyor.domain.model import RunStatus, TaskStatus
from conveyor.ports.maintenance import ENDED_FOR, DuePosition, EndedRun, QuietRun
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb import schema
from conveyor.prod.dynamodb.client import (
    Item,
    Plain,
    Query,
    RowFilter,
    Table,
    Tagged,
    UnreadableRow,
    conflicting_item,
    contention_error,
    decode_intact,
    decodes_row,
    keys_of,
)
from conveyor.prod.dynamodb.recount import fold_items, recount, recount_at
from conveyor.prod.dynamodb.row_expiry import RowStamps
from conveyor.prod.dynamodb.run_rows import (
    TRIES,
    Change,
    DynamoRunRows,
    RunPlace,
    RunRow,
    RunVersionConflict,
    dependent_runs,
    read_place,
    read_run_row,
)
from conveyor.prod.dynamodb.runs import delete_ended_run, query_all
from conveyor.prod.dynamodb.schema import (
    BEGIN,
    BY_DISPATCH,
    BY_OWNER,
    END,
    INDEXES,
    PARTITION_KEY,
    ROW_SHAPE,
    SORT_KEY,
    SPREAD,
    SWEEP,
    UNSPREAD_INTENTS,
    Key,
    all_partitions,
    by_time,
    pin_key,
)
from conveyor.prod.dynamodb.submitting import Reservation, cancel_reservation, remove_given_up
from conveyor.prod.dynamodb.task_rows import Reference, find_references, remove_rows

MOST_MOVED = 1_000
"""Runs of each partition without time that one look moves."""
SPARE = 8
"""Index entries read per partition beyond its share, because no share is exact."""

_PLACE = INDEXES[BY_OWNER][1]
_DAY = 86_400_000
_DUE = (
    "(#status = :pending AND not_before <= :now) OR "
    "(#status = :processing AND claimed_until <= :now)"
)


def due_rows(
    table: Table, place: RunPlace, *, after: int, piece: int, now: int
) -> AsyncIterator[Reference]:
    """Find rows with an index above `after` that could be worked now, in index order over all
    shards."""
    values: dict[str, Plain] = {
        "pending": str(TaskStatus.PENDING),
        "processing": str(TaskStatus.PROCESSING),
        "now": now,
    }
    return find_references(table, place, RowFilter(_DUE, values), after=after, piece=piece)


class DueKey(NamedTuple):
    """A run in the list of those for which something may be due."""

    due_at: int
    run_id: str
    key: Key


async def due_keys(
    table: Table, *, now: int, row_days: int, after: DuePosition, piece: int
) -> AsyncIterator[list[DueKey]]:
    """Find the ended runs to look at, the longest due first, each once. Yields batches of about
    `piece` keys, never an empty one. Reads no entry that is not due."""
    cursors = [_IndexCursor(partition, 0) for partition in all_partitions("aging")]
    if row_days:
        cursors += [_IndexCursor(one, row_days * _DAY) for one in all_partitions("aged")]
    share = ceil(piece / SPREAD) + SPARE

    async def read(cursor: _IndexCursor) -> None:
        begin = f"{by_time(after.due_at - cursor.shift, after.run_id)}{BEGIN}"
        page = await table.page(
            Query(
                cursor.partition,
                index=BY_OWNER,
                between=(begin, by_time(now - cursor.shift, END)),
                limit=share,
                start=cursor.last,
            )
        )
        cursor.entries.extend(decode_intact(partial(_due_key, shift=cursor.shift), page.items))
        cursor.last, cursor.done = page.last, page.last is None

    last: Key | None = None
    while True:
        await for_each(read, [one for one in cursors if not one.entries and not one.done])
        ready: list[DueKey] = []
        while filled := [cursor for cursor in cursors if cursor.entries]:
            # An exhausted cursor may continue with an entry below all others: read it first.
            if any(not cursor.entries and not cursor.done for cursor in cursors):
                break
            found = min(filled, key=lambda cursor: cursor.entries[0]).entries.popleft()
            # An entry that moved meanwhile is found twice in a row.
            if found.key != last:
                ready.append(found)
            last = found.key
        if ready:
            yield ready
        elif all(cursor.done for cursor in cursors):
            return


@decodes_row
def _due_key(item: Item, *, shift: int) -> DueKey:
    instant, _, run_id = str(item[_PLACE]).partition("#")
    return DueKey(int(instant) + shift, run_id, Key(item[PARTITION_KEY], item[SORT_KEY]))


@dataclass(slots=True)
class _IndexCursor:
    """The position in one index partition of the merged list. What it holds is due `shift`
    milliseconds after the time of its entries."""

    partition: str
    shift: int
    entries: deque[DueKey] = field(default_factory=deque)
    last: dict[str, Tagged] | None = None
    done: bool = False


PATIENCE = 15 * 60_000
"""Milliseconds after which an incomplete write counts as cut off."""

_log = logging.getLogger("conveyor.records")


class Leftovers:
    """Finds and repairs the leftovers of interrupted writes."""

    def __init__(self, records: DynamoRunRows) -> None:
        self._records = records
        self._table = records.table
        self._checked_at: int | None = None
        self._first_seen: dict[tuple[Key, str], int] = {}
        self._pins: dict[Key, int] = {}
        self._runs: set[Key] = set()
        self._live: set[Key] = set()
        self._recounted: dict[Key, int] = {}
        self._changes_since: int | None = None
        self.stamps = RowStamps(records)

    def add_orphaned_pin(self, pin: Key) -> None:
        """Note a pin whose run does not exist."""
        self._pins.setdefault(pin, self._table.clock.now())

    def add_incomplete_run(self, run: Key) -> None:
        """Note an ended run with additions that are not complete."""
        self._runs.add(run)

    async def tidy(self, *, now: int) -> int:
        """Repair leftovers that are old enough, and return their number. Leftovers without a time
        are watched every 15 minutes."""
        done = await self._abandon_intents(now)
        if self._checked_at is None or not 0 <= now - self._checked_at < PATIENCE:
            self._checked_at = now
            done += await self._check_runs(now)
            done += await self._remove_pins(now)
            await self._settle_runs(now)
        await self.stamps.go_on()
        return done

    async def _abandon_intents(self, now: int) -> int:
        done = 0
        until = by_time(now - PATIENCE, "")
        partitions = [*all_partitions("intents"), UNSPREAD_INTENTS]
        old = await query_all(
            self._table, partitions, index=BY_OWNER, between=(BEGIN, until), keys_only=True
        )
        for key in keys_of(old):
            done += await _attempt(f"ending the intent {key.sk}", self._abandon_intent(key))
        return done

    async def _abandon_intent(self, key: Key) -> bool:
        """Mark an intent, so that its writer cannot make the run any more; then remove its rows."""
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

    async def _check_runs(self, now: int) -> int:
        """Check live runs and those noted; return the number of additions cancelled."""
        keys = {*self._runs, *self._live, *await self._changed_live_runs(now)}
        self._runs.clear()
        done, since = 0, self._first_seen
        self._first_seen = {}
        items = await self._table.get_many(list(keys))
        self._live = set(items)
        self._recounted = {key: at for key, at in self._recounted.items() if key in items}
        for row in decode_intact(read_run_row, items.values()):
            done += await self._cancel_reservations(row, since, now)
            if row.live:
                self.stamps.check(row, at=now)
                step_name = f"recounting the paused run {row.place.run_id}"
                await _attempt(step_name, self._recount_paused(row, now))
            else:
                self._live.discard(row.place.key)
            step_name = f"folding the counters of run {row.place.run_id}"
            await _attempt(step_name, self._fold(row, now))
        return done

    async def _cancel_reservations(
        self, row: RunRow, since: Mapping[tuple[Key, str], int], now: int
    ) -> int:
        """Cancel additions first seen 15 minutes ago; they carry no time themselves."""
        key, done = row.place.key, 0
        for start in {**row.reserved, **row.given_up}:
            first_seen = since.get((key, start), now)
            if now - first_seen >= PATIENCE:
                step_name = f"cancelling an addition to run {row.place.run_id}"
                done += await _attempt(step_name, self._cancel_reservation(row, start, now))
            else:
                self._first_seen[key, start] = first_seen
                self._runs.add(key)
        return done

    async def _recount_paused(self, row: RunRow, now: int) -> bool:
        """Recount a quiet run that is paused, once after each time it has changed: the process that
        ended its last task may have died before it counted."""
        key = row.place.key
        if not row.run.paused or row.run.ingesting:
            self._recounted.pop(key, None)
            return False
        at = (await self._records.summed(row)).run.updated_at
        if now - at < PATIENCE or self._recounted.get(key) == at:
            return False
        counted, done = await recount_at(self._records, row.place, now=now)
        if counted is not None and done:
            self._recounted[key] = counted.run.updated_at
        return done

    async def _fold(self, row: RunRow, now: int) -> bool:
        return await fold_items(self._records, row, now=now) > 0

    async def _cancel_reservation(self, row: RunRow, start: str, now: int) -> bool:
        """Cancel one addition, or continue where that was cut off."""
        if start in row.reserved:
            reservation = Reservation(int(start), row.reserved[start])
            return await cancel_reservation(self._records, row.place, reservation, now=now)
        reservation = Reservation(int(start), row.given_up[start])
        await remove_given_up(self._records, row.place, reservation)
        return True

    async def _settle_runs(self, now: int) -> None:
        """Recount unsettled runs. Those with calls in flight are left to the next look."""
        found = await query_all(
            self._table, all_partitions("unsettled"), index=BY_OWNER, keys_only=True
        )
        items = await self._table.get_many(keys_of(found))
        for row in decode_intact(read_run_row, items.values()):
            if row.unsettled and now - row.dispatch_changed_at >= PATIENCE:
                step_name = f"recounting the ended run {row.place.run_id}"
                await _attempt(step_name, self._settle_run(row, now))

    async def _settle_run(self, row: RunRow, now: int) -> bool:
        counted, done = await recount_at(self._records, row.place, now=now)
        if counted is None or not done or counted.run.status is RunStatus.DELETED:
            return False
        try:
            # The run itself has not changed, so it keeps its time.
            at = counted.run.updated_at
            await self._records.change(counted, Change(unsettled=False), now=at)
        except RunVersionConflict:
            return False
        return True

    async def _remove_pins(self, now: int) -> int:
        """Remove pins whose runs were still missing 15 minutes after they were noted."""
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

    async def _changed_live_runs(self, now: int) -> list[Key]:
        """Find the live runs whose status or pause has changed since the last call of this process;
        at its first, all of them. So no look but the first reads the entries of runs that ended
        long ago."""
        since, found = self._changes_since, list[Key]()
        begin = BEGIN if since is None else by_time(since - PATIENCE, "")

        async def find(partition: str) -> None:
            async for page in self._table.pages(
                Query(
                    partition,
                    index=BY_DISPATCH,
                    between=(begin, END),
                    where=RowFilter(
                        "#status IN (:running, :pending)",
                        {"running": str(RunStatus.RUNNING), "pending": str(RunStatus.PENDING)},
                    ),
                )
            ):
                found.extend(keys_of(page.items))

        await for_each(find, [*all_partitions("active"), *all_partitions("idle")])
        self._changes_since = now
        return found


async def _attempt(step_name: str, step: Awaitable[bool]) -> bool:
    """Run a step and return its result; log a failure in one line and return False, so that a later
    look tries again. An unreadable row was logged where it was read."""

    async def act() -> bool:
        try:
            return await step
        except UnreadableRow:
            return False

    return bool(await log_and_continue(_log, f"{step_name} failed", act))


class _Found(NamedTuple):
    """An ended run as read, and where the index has it."""

    row: RunRow
    partition: str
    place: str


@decodes_row
def _read_found(item: Item) -> _Found:
    return _Found(read_run_row(item), item.get("gsi1pk", ""), item.get(_PLACE, ""))


class EndedRuns:
    """Finds ended runs, and expires them. Reports leftovers that it meets to `leftovers`.

    The index has an ended run at the time of the next look at it. Who marks a run, draws on it or
    counts late settlements leaves that time alone: a look that comes too early puts the next one
    off. Unsettled runs, which are few and soon settled, are looked at each time. Versions before
    kept ended runs in an order without time; a look moves them from there.
    """

    def __init__(self, records: DynamoRunRows, leftovers: Leftovers) -> None:
        self._records = records
        self._table = records.table
        self._leftovers = leftovers

    async def find(
        self, *, now: int, row_days: int, after: DuePosition | None, limit: int
    ) -> list[EndedRun]:
        """Return the runs for which something is due; see `Sweeping.ended_runs`."""
        if after is None:
            await self._move_untimed()
        behind = after or DuePosition(-1, "")
        found: dict[str, EndedRun] = {}
        for run in await self._unsettled(now, row_days):
            if (run.due_at, run.run_id) > behind:
                found[run.run_id] = run
        timed: list[EndedRun] = []
        async for due in due_keys(
            self._table, now=now, row_days=row_days, after=behind, piece=limit
        ):
            timed += await self._select({one.key: one.due_at for one in due}, now, row_days)
            if len(timed) >= limit:
                break
        found |= {run.run_id: run for run in timed}
        return sorted(found.values(), key=lambda run: (run.due_at, run.run_id))[:limit]

    async def _unsettled(self, now: int, row_days: int) -> list[EndedRun]:
        items = await query_all(
            self._table, all_partitions("unsettled"), index=BY_OWNER, keys_only=True
        )
        return await self._select(dict.fromkeys(keys_of(items)), now, row_days)

    async def _move_untimed(self) -> None:
        """Give some of the runs that lie in an order without time their time."""

        async def move(partition: str) -> None:
            page = await self._table.page(
                Query(partition, index=BY_OWNER, limit=MOST_MOVED, keys_only=True)
            )
            keys = keys_of(page.items)
            items = await self._table.get_many(keys)
            for one in decode_intact(_read_found, [items[key] for key in keys if key in items]):
                if _has_ended(one.row) and one.partition == schema.ended(one.row.run.run_id):
                    await self._put_off(one, _looks_at(one.row, one.row.run.updated_at))

        await for_each(move, all_partitions("ended"))

    async def _select(
        self, places: Mapping[Key, int | None], now: int, row_days: int
    ) -> list[EndedRun]:
        """Return those of some runs for which something is due, in the same order. Put off the
        next look at the others; a run without a place has none to put off."""
        items = await self._table.get_many(list(places))
        rows = decode_intact(_read_found, [items[key] for key in places if key in items])
        due: dict[Key, EndedRun] = {}

        async def check(found: _Found) -> None:
            row = found.row
            if row.run.status is RunStatus.DELETED or not _has_ended(row):
                return
            if row.reserved or row.given_up:
                self._leftovers.add_incomplete_run(row.place.key)
            ended_at = await self._all_ended_at(row)
            self._leftovers.stamps.check(row, at=now if ended_at is None else ended_at)
            if ended_at is None:
                # Nothing can be due earlier: whoever draws on it ends after this.
                await self._put_off(found, _looks_at(row, now))
                return
            at = _looks_at(row, ended_at)
            due_at = at + row_days * _DAY if _is_aged(row) else at
            if due_at > now or (_is_aged(row) and not row_days):
                if row.reserved or row.given_up:
                    at = min(at, now + PATIENCE)
                await self._put_off(found, at)
                return
            place = places[row.place.key]
            due[row.place.key] = EndedRun(
                row.run.job_id,
                row.run.run_id,
                ended_at,
                row.result_ttl_days,
                row.swept,
                row.queue_dropped,
                due_at if place is None else place,
            )

        await for_each(check, rows)
        return [due[key] for key in places if key in due]

    async def expire(self, run_id: str, *, now: int) -> list[str]:
        """Turn an ended run to `deleted`; see `Sweeping.expire_run`."""
        for _ in range(TRIES):
            row = await self._records.read(run_id)
            if row is None or not _has_ended(row):
                return []
            if not all(map(_has_ended, await self._dependents(row))):
                return []
            if row.run.status is RunStatus.DELETED:
                return [run_id]
            try:
                await delete_ended_run(self._records, row, now=now)
            except RunVersionConflict:
                continue
            return [run_id]
        raise contention_error()

    async def _all_ended_at(self, row: RunRow) -> int | None:
        """Return when the last of a run and those that draw on it ended; None before that."""
        try:
            drawing = await self._dependents(row)
        except UnreadableRow:
            return None
        if not all(map(_has_ended, drawing)):
            return None
        return max(one.run.updated_at for one in (row, *drawing))

    async def _put_off(self, found: _Found, at: int) -> None:
        """Let the index have a run at another time, unless it has moved since it was read."""
        run_id = found.row.run.run_id
        if found.partition not in (schema.aging(run_id), schema.aged(run_id), schema.ended(run_id)):
            return
        partition = schema.aged(run_id) if _is_aged(found.row) else schema.aging(run_id)
        try:
            await self._table.update(
                found.row.place.key,
                "SET gsi1pk = :partition, gsi1sk = :place",
                condition="gsi1pk = :known_partition AND gsi1sk = :known_place",
                partition=partition,
                place=by_time(at, run_id),
                known_partition=found.partition,
                known_place=found.place,
            )
        except AwsRefused as refused:
            if not refused.is_condition:
                raise

    async def _dependents(self, row: RunRow) -> list[RunRow]:
        """Return the runs that draw on a run, without deleted ones."""
        job_id, run_id = row.run.job_id, row.run.run_id
        found: list[RunRow] = []
        for other_id in await dependent_runs(self._records.table, job_id, run_id):
            other = await self._records.read(other_id)
            if other is None:
                self._leftovers.add_orphaned_pin(pin_key(job_id, run_id, other_id))
            elif other.run.status is not RunStatus.DELETED:
                found.append(other)
        return found


def _looks_at(row: RunRow, ended_at: int) -> int:
    """Return the time at which the index has an ended run: of the next look, or, once no body is
    left, of the end of its results."""
    if not row.queue_dropped:
        return ended_at + ENDED_FOR
    return ended_at + row.result_ttl_days * _DAY


def _is_aged(row: RunRow) -> bool:
    return row.queue_dropped and row.swept


def _has_ended(row: RunRow) -> bool:
    return not row.live and not row.run.ingesting


CLOCKS_APART = 60_000
"""Milliseconds by which a lease may outlast one taken now. A longer one was taken before a clock
was set back, and does not count."""


class DynamoSweeping:
    """The sweeping port."""

    def __init__(self, records: DynamoRunRows) -> None:
        self._records = records
        self._table = records.table
        self._leftovers = Leftovers(records)
        self._ended_runs = EndedRuns(records, self._leftovers)

    async def claim_sweep(self, *, now: int, lapses_at: int) -> bool:
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
            found = conflicting_item(refused)
            # The token is this call's own: an earlier try wrote it, and its answer was lost.
            return found is not None and found["claimed_by"] == token
        return True

    async def quiet_runs(self, *, before: int) -> list[QuietRun]:
        found: list[Key] = []

        async def find(partition: str) -> None:
            async for page in self._table.pages(Query(partition, index=BY_DISPATCH)):
                found.extend(keys_of(page.items))

        await for_each(find, all_partitions("active"))
        items = await self._table.get_many(found)
        rows = [
            row
            for row in decode_intact(read_run_row, items.values())
            if row.run.status is RunStatus.RUNNING
            and not row.run.paused
            and not row.run.ingesting
            and row.run.updated_at < before
        ]
        # Counting leaves the row alone: its items tell whether the run is quiet.
        summed = await self._records.summed_all(rows)
        quiet = [
            QuietRun(row.run.job_id, row.run.run_id, row.run.updated_at, row.politeness, row.hosts)
            for row in summed.values()
            if row.run.updated_at < before
        ]
        return sorted(quiet, key=lambda run: (run.updated_at, run.run_id))

    async def reconcile_run(self, run_id: str, *, now: int) -> RunStatus | None:
        row = await recount(self._records, run_id, now=now)
        return None if row is None else row.run.status

    async def due_references(
        self, run_id: str, *, after: int, limit: int, now: int
    ) -> list[tuple[int, str]]:
        run = await self._records.read(run_id)
        if run is None or not run.live:
            return []
        found: list[tuple[int, str]] = []
        async for row in due_rows(self._table, run.place, after=after, piece=limit, now=now):
            # Rows of an addition that is not complete are not part of the run yet.
            if row.index < run.run.next_index and run.contains_index(row.index):
                found.append((row.index, row.task_id))
            if len(found) == limit:
                break
        return found

    async def ended_runs(
        self, *, now: int, row_days: int, after: DuePosition | None, limit: int
    ) -> list[EndedRun]:
        return await self._ended_runs.find(now=now, row_days=row_days, after=after, limit=limit)

    async def mark_swept(self, run_id: str) -> None:
        await self._mark(run_id, "swept")

    async def mark_queue_dropped(self, run_id: str) -> None:
        await self._mark(run_id, "queue_dropped")

    async def expire_run(self, run_id: str, *, now: int) -> list[str]:
        try:
            return await self._ended_runs.expire(run_id, now=now)
        except UnreadableRow:
            return []

    async def tidy(self, *, now: int) -> int:
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
