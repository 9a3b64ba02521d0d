"""Counters of runs: a cache of what the task rows say, kept by group commit and repaired by
recounts.

**Additions.** A settlement changes its row first. `Counters` then adds its delta to the run's row,
together with the deltas of all settlements that this process makes in that run meanwhile, and
answers each one from the returned row. An addition carries this process's next number and the epoch
known before its rows moved. A repeated addition finds its number on the run's row and changes
nothing. An addition that a recount may have counted finds a newer epoch; it is dropped, and the run
is recounted.

**Recounts.** `recount` reads the task rows page by page while others write. It writes the counters
only if neither an addition nor a change of the run came between, and raises the epoch with them:
additions for rows that moved before are refused, counted or not, and lead to another recount.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from typing import NamedTuple

import anyio
import msgspec

from conveyor.aio.concurrency import for_each, wait_or_timeout
from conveyor.domain.backoff import Backoff
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.failure_groups import MOST_GROUPS, MOST_SAMPLES
from conveyor.domain.ids import task_index
from conveyor.domain.model import (
    RunStats,
    RunStatus,
    Spend,
    TaskFailure,
    TaskStatus,
)
from conveyor.domain.result_shape import (
    MOST_TYPES,
    ResultShape,
    ShapeCounter,
    counted_type,
    size_class,
)
from conveyor.domain.states import LIVE_RUN_STATES, live_run_status
from conveyor.domain.task_rules import RunDelta
from conveyor.ports.tasks import Settled
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import (
    AttributeName,
    Item,
    PlaceholderValue,
    Plain,
    Query,
    Table,
    conflicting_item,
    contention_error,
    decodes_row,
)
from conveyor.prod.dynamodb.failure_groups import FailureSample, note_failures, remove_group_items
from conveyor.prod.dynamodb.run_rows import (
    GROUPS,
    REASON,
    SIZE,
    TRIES,
    TYPES,
    Change,
    DynamoRunRows,
    GroupCount,
    RunPlace,
    RunRow,
    RunVersionConflict,
    counters,
    read_run_row,
)
from conveyor.prod.dynamodb.schema import task_partition, task_sort_key
from conveyor.prod.dynamodb.task_rows import BodyKind, read_body_kind, read_problem

MOST_SEQUENCES = 200
"""Processes whose last number a run's row may hold. Beyond that a recount forgets them all, even if
the counters are right; the new epoch refuses later additions of the old one."""

_TALLY_FIELDS = (
    "task_id",
    "status",
    "updated_at",
    "claimed_until",
    "events",
    "result",
    "error",
    "failure",
    "failure_group",
    "source_run_id",
)


class RecountResult(NamedTuple):
    """A run after a recount; None if it is gone. `done` is False if the recount has to wait for a
    live claim or for the end of the ingestion."""

    row: RunRow | None
    done: bool


async def recount(records: DynamoRunRows, run_id: str, *, now: int) -> RunRow | None:
    """Set a run's counters to what its rows say if they disagree, or if too many processes have
    counted, and update its status. Return the row afterwards; None if it is gone.

    Leaves a run alone that ingests, is deleted or has a live claim. Raises
    ConveyorError(unavailable) if the run changes faster than it is counted, DamagedRow for a row
    that cannot be counted.
    """
    place = await records.places.find(run_id)
    return None if place is None else (await recount_at(records, place, now=now)).row


async def recount_at(records: DynamoRunRows, place: RunPlace, *, now: int) -> RecountResult:
    """Recount a run by its place; see `recount`."""
    for _ in range(TRIES):
        row = await records.read_at(place)
        if row is None or row.run.status is RunStatus.DELETED:
            return RecountResult(row, done=True)
        if row.run.ingesting:
            return RecountResult(row, done=False)
        tally = await _tally_rows(records, row, now)
        if tally is None:
            return RecountResult(row, done=False)
        try:
            if not _counters_match(tally, row):
                await tally.note_new_groups(records.table, row)
                row = await records.change(row, _counter_correction(row, tally), now=now)
            elif has_too_many_sequences(row):
                # The run itself has not changed, so it keeps its time.
                at = row.run.updated_at
                row = await records.change(row, _counter_correction(row, tally), now=at)
        except RunVersionConflict:
            continue
        return RecountResult(await records.write_late_status(row, now=now), done=True)
    raise contention_error()


def has_too_many_sequences(row: RunRow) -> bool:
    """Return whether more processes have counted in a run than its row should hold. Every addition
    pays for the size of that map."""
    return len(row.sequences) > MOST_SEQUENCES


class _LiveClaimFound(Exception):
    """A task of the run is being worked."""


class _EventSpend(msgspec.Struct, frozen=True):
    credits: int = 0
    cost: Decimal = Decimal(0)


class _SpendOfEvent(msgspec.Struct, frozen=True):
    """The part of an event that a recount reads."""

    spend: _EventSpend = _EventSpend()


_spend_of_event = msgspec.json.Decoder(_SpendOfEvent)


class _TaskRow(msgspec.Struct, frozen=True):
    """The attributes of a task row that a recount reads."""

    task_id: str
    status: TaskStatus
    updated_at: int
    claimed_until: int
    events: list[str]
    result: str | None = None
    error: str | None = None
    failure: TaskFailure = TaskFailure.OTHER
    failure_group: str | None = None
    source_run_id: str | None = None


class _TallyEntry(NamedTuple):
    """The share of one row in a tally."""

    place: int
    row: _TaskRow
    spent: list[_EventSpend]
    body: BodyKind | None


@decodes_row
def _read_tally_entry(item: Item) -> _TallyEntry:
    """Decode the share of a task's item. Raises DamagedRow."""
    row = msgspec.convert(item, _TaskRow)
    spent = [_spend_of_event.decode(text).spend for text in row.events]
    if not all(spend.cost.is_finite() for spend in spent):
        raise ValueError("not an amount of money")
    body = (
        read_body_kind(row.result) if row.result and row.status is TaskStatus.SUCCESSFUL else None
    )
    return _TallyEntry(task_index(row.task_id), row, spent, body)


@dataclass(slots=True)
class _TalliedGroup:
    """The failed rows of one group: their number, the first few as they came, and the latest
    instant."""

    count: int = 0
    last_at: int = 0
    samples: list[_TaskRow] = field(default_factory=list)

    def add(self, row: _TaskRow) -> None:
        self.count += 1
        self.last_at = max(self.last_at, row.updated_at)
        if len(self.samples) < MOST_SAMPLES:
            self.samples.append(row)


@dataclass(slots=True)
class _Tally:
    """The rows counted so far. Adds up money in decimal digits, as DynamoDB does.

    Groups and media types that the run counts by name keep their place; rows of others get one
    while there is room. `groups` holds all those that the run keeps, also without a row.
    """

    groups: dict[str, _TalliedGroup]
    shape: ShapeCounter
    total: int = 0
    inherited: int = 0
    ended: dict[TaskStatus, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    credits: int = 0
    cost: Decimal = Decimal(0)

    @classmethod
    def of(cls, row: RunRow) -> _Tally:
        """Begin a tally of a run's rows."""
        names = dict.fromkeys(row.run.stats.shape.types, 0)
        return cls(
            {group_id: _TalliedGroup() for group_id in row.groups},
            ShapeCounter.of(ResultShape(types=names)),
        )

    def add(self, counted: _TallyEntry) -> None:
        self.total += 1
        row = counted.row
        self.ended[row.status] = self.ended.get(row.status, 0) + 1
        self.inherited += row.source_run_id is not None
        if counted.body is not None:
            self.shape.add(counted.body.size, counted.body.content_type)
        if row.status is TaskStatus.FAILED:
            self.reasons[row.failure] = self.reasons.get(row.failure, 0) + 1
            self._add_to_group(row)
        for spend in counted.spent:
            self.credits += spend.credits
            self.cost += spend.cost

    def _add_to_group(self, row: _TaskRow) -> None:
        group_id = row.failure_group
        if group_id is None:
            return
        if group_id not in self.groups and len(self.groups) < MOST_GROUPS:
            self.groups[group_id] = _TalliedGroup()
        if group_id in self.groups:
            self.groups[group_id].add(row)

    def stats(self) -> RunStats:
        shape = self.shape.shape()
        types = {name: count for name, count in shape.types.items() if count}
        return RunStats(
            total=self.total,
            successful=self.ended.get(TaskStatus.SUCCESSFUL, 0),
            failed=self.ended.get(TaskStatus.FAILED, 0),
            failure_reasons=self.reasons,
            spend=Spend(self.credits, float(self.cost)),
            inherited=self.inherited,
            shape=ResultShape(shape.sizes, types),
        )

    def group_counts(self, row: RunRow) -> dict[str, GroupCount]:
        """Return the groups that have rows. Those that the run keeps have their latest failure from
        there, as an inherited row has the time of its copy."""
        return {
            group_id: GroupCount(
                group.count,
                row.groups[group_id].last_at if group_id in row.groups else group.last_at,
            )
            for group_id, group in self.groups.items()
            if group.count
        }

    async def note_new_groups(self, table: Table, row: RunRow) -> None:
        """Write the items of the groups that the run does not keep yet."""
        for group_id in self.groups.keys() - row.groups.keys():
            failures = [
                FailureSample.of(one.task_id, one.failure, read_problem(one.error), one.updated_at)
                for one in self.groups[group_id].samples
                if one.error is not None
            ]
            if failures:
                await note_failures(table, row.run.run_id, failures, begins=True)


async def _tally_rows(records: DynamoRunRows, row: RunRow, now: int) -> _Tally | None:
    """Count the rows of all shards concurrently; None if a task has a live claim. Raises
    DamagedRow."""
    place, tally = row.place, _Tally.of(row)
    projection = ", ".join(f"#{name}" for name in _TALLY_FIELDS)

    async def count(shard: int) -> None:
        partition = task_partition(place.job_id, place.shards, shard)
        async for page in records.table.pages(
            Query(partition, begins_with=task_sort_key(place.run_id, ""), projection=projection)
        ):
            for item in page.items:
                one = _read_tally_entry(item)
                if one.row.status is TaskStatus.PROCESSING and one.row.claimed_until > now:
                    raise _LiveClaimFound
                # Leave out additions under way, and indexes reserved since the run was read.
                if one.place < row.run.next_index and row.contains_index(one.place):
                    tally.add(one)

    try:
        await for_each(count, range(place.shards.count))
    except _LiveClaimFound:
        return None
    return tally


def _counters_match(tally: _Tally, row: RunRow) -> bool:
    """Return whether counted and stored counters agree."""
    counted, kept = tally.stats(), row.run.stats
    groups = {group_id: group for group_id, group in row.groups.items() if group.failed}
    if tally.group_counts(row) != groups:
        return False
    return msgspec.structs.replace(counted, spend=kept.spend) == kept and (
        counted.spend.credits == kept.spend.credits
        and math.isclose(counted.spend.cost, kept.spend.cost, rel_tol=1e-9, abs_tol=1e-9)
    )


def _counter_correction(row: RunRow, tally: _Tally) -> Change:
    """Make the change that sets the counters and raises the epoch, unless an addition came
    between."""
    run, stats = row.run, tally.stats()
    status = None
    if run.status in LIVE_RUN_STATES:
        status = live_run_status(stats, job_closed=run.last_batch_received)
    counted = counters(stats, tally.group_counts(row))
    gone = counters(run.stats, row.groups).keys() - counted.keys()
    return Change(
        status=None if status is run.status else status,
        sets={**counted, "counter_epoch": row.counter_epoch + 1, "sequences": {}},
        removes=sorted(gone),
        condition="flushes = :seen_flushes AND counter_epoch = :seen_epoch",
        values={"seen_flushes": row.flushes, "seen_epoch": row.counter_epoch},
    )


MOST_REMEMBERED = 2_000
"""Runs whose row is remembered, which may hold 200 failure groups. Of others the row is read once
more before a task settles."""
RETRIES = Backoff(1.0, 30.0)
"""Seconds until what could not be written is tried again, unless something new comes first."""

MOST_GROUPS_ADDED = 50
"""Groups that one addition counts in, because an expression may have 4 KB."""

_SETS = "#sequences.#worker = :number, counted_at = :now"
_CONDITION = (
    "#status <> :deleted AND counter_epoch = :epoch "
    "AND (attribute_not_exists(#sequences.#worker) OR #sequences.#worker < :number)"
)

_log = logging.getLogger("conveyor.counters")


@dataclass(slots=True, eq=False)
class _PendingDelta:
    """One settlement that waits for its addition; with the failure, if it is one."""

    delta: RunDelta
    failure: FailureSample | None
    epoch: int
    answer: asyncio.Future[Settled]


@dataclass(slots=True)
class _Addition:
    """The deltas that are written, or were written, under one number."""

    number: int
    epoch: int
    parts: list[_PendingDelta]


@dataclass(slots=True, eq=False)
class _RunCounters:
    """The state of a run's counters in this process: its latest row seen, and the deltas to be
    added."""

    place: RunPlace
    row: RunRow | None = None
    updated_at: int = 0
    began: float = float("-inf")
    pending: list[_PendingDelta] = field(default_factory=list)
    addition: _Addition | None = None
    dropped: list[_PendingDelta] = field(default_factory=list)
    recount_due: bool = False
    failures: int = 0
    retry_at: float = float("-inf")
    worker: asyncio.Task[None] | None = None
    wake: anyio.Event = field(default_factory=anyio.Event)

    @property
    def epoch(self) -> int | None:
        """The latest epoch seen."""
        return None if self.row is None else self.row.counter_epoch


class Counters:
    """The counters of the runs that this process works. Belongs to one event loop.

    `worker` is this process's name, never used by another one. `flush_interval`: seconds between
    the beginnings of two additions to one run, at least.
    """

    def __init__(self, records: DynamoRunRows, *, worker: str, flush_interval: float) -> None:
        self._records = records
        self._clock = records.table.clock
        self._worker = worker
        self._interval = flush_interval
        # Of all runs together, so that a run may be forgotten and come back.
        self._numbers = itertools.count(1)
        self._runs: OrderedDict[str, _RunCounters] = OrderedDict()
        self._closing = False

    def observe(self, row: RunRow) -> None:
        """Note a run's row that was just read or written, if it is the latest one seen."""
        run = self._run(row.place)
        if run.row is None or _age(row) >= _age(run.row):
            run.row = row
        run.updated_at = max(run.updated_at, row.run.updated_at)

    def epoch(self, place: RunPlace) -> int | None:
        """Return the latest epoch seen; None if the run's row has not been seen yet.

        Callers take it before they change a task's row, and pass it to `add` afterwards.
        """
        return self._run(place).epoch

    async def add(self, place: RunPlace, task_id: str, delta: RunDelta, *, epoch: int) -> Settled:
        """Count a task's row that has changed; return once the run's row includes it.

        Not applied if the run is deleted. Raises ConveyorError(unavailable) if the addition could
        not be written yet; this process keeps trying until it succeeds or ends. A cancelled caller
        changes nothing.
        """
        run = self._run(place)
        failure = None
        if delta.failure is not None and delta.problem is not None:
            failure = FailureSample.of(task_id, delta.failure, delta.problem, delta.now)
        answer = asyncio.get_running_loop().create_future()
        waiting = _PendingDelta(delta, failure, epoch, answer)
        run.pending.append(waiting)
        self._start(run)
        return await waiting.answer

    def mark_counters_uncertain(self, place: RunPlace) -> None:
        """Have a run recounted soon, because a row of it may have changed without being counted."""
        run = self._run(place)
        run.recount_due = True
        self._start(run)

    async def aclose(self) -> None:
        """Write pending additions if the table can be reached."""
        self._closing = True
        for run in self._runs.values():
            run.wake.set()
        await asyncio.gather(*(run.worker for run in self._runs.values() if run.worker is not None))

    def _run(self, place: RunPlace) -> _RunCounters:
        run = self._runs.get(place.run_id)
        if run is None:
            run = self._runs[place.run_id] = _RunCounters(place)
            if len(self._runs) > MOST_REMEMBERED:
                self._forget_one()
        else:
            self._runs.move_to_end(place.run_id)
        return run

    def _forget_one(self) -> None:
        for run_id, run in self._runs.items():
            if run.worker is None:
                del self._runs[run_id]
                return

    def _start(self, run: _RunCounters) -> None:
        if run.worker is None:
            run.worker = asyncio.create_task(self._work(run))
        else:
            run.wake.set()

    async def _work(self, run: _RunCounters) -> None:
        """Add and recount until nothing is left to do for the run."""
        try:
            while run.pending or run.addition or run.recount_due:
                run.wake = anyio.Event()
                if await self._step(run) and run.pending:
                    continue
                if self._closing:
                    return
                if run.pending or run.addition or run.recount_due:
                    # Until it is time to try again, or for something new.
                    rest = run.retry_at - self._clock.monotonic()
                    await wait_or_timeout(run.wake, self._clock, rest)
        finally:
            run.worker = None

    async def _step(self, run: _RunCounters) -> bool:
        """Do the work that is due; on failure answer the waiters, postpone the rest and return
        False."""
        try:
            if run.pending and run.addition is None:
                await self._start_addition(run)
            if run.addition is not None:
                await self._commit(run, run.addition)
            if run.dropped or (run.recount_due and self._clock.monotonic() >= run.retry_at):
                await self._recount(run)
        except Exception as error:
            _fail_waiters(run, error)
            self._postpone(run)
            return False
        return True

    def _postpone(self, run: _RunCounters) -> None:
        """Put off what is left, longer each time."""
        run.failures += 1
        pause = RETRIES.spread(run.failures, self._clock.random())
        run.retry_at = self._clock.monotonic() + pause

    async def _start_addition(self, run: _RunCounters) -> None:
        """Combine pending deltas of the current epoch into one addition; leave others to a
        recount."""
        if self._interval > 0 and not self._closing:
            wait = run.began + self._interval - self._clock.monotonic()
            if wait > 0:
                await self._clock.sleep(wait)
            run.began = self._clock.monotonic()
        pending, run.pending = run.pending, []
        current = [one for one in pending if one.epoch == run.epoch]
        old = [one for one in pending if one.epoch != run.epoch]
        if old:
            self._leave_to_recount(run, old)
        current, run.pending = _split(current)
        if current:
            run.addition = _Addition(next(self._numbers), current[0].epoch, current)

    async def _commit(self, run: _RunCounters, addition: _Addition) -> None:
        """Write an addition, or find that an earlier try wrote it."""
        now = max(run.updated_at, *(part.delta.now for part in addition.parts))
        row = await self._write_once(run, addition, now)
        if row is None:
            return
        after = await self._records.write_late_status(row, now=now)
        before = row.run.status
        self.observe(after)
        run.addition = None
        run.failures = 0
        _resolve_in_order(addition.parts, before=before, after=after.run.status)
        if after.run.status is RunStatus.COMPLETED and _lacks_sizes(after) and not run.recount_due:
            await self._recount_sizes(run)

    async def _write_once(self, run: _RunCounters, addition: _Addition, now: int) -> RunRow | None:
        """Write an addition unless an earlier try did, and return the row; return None, and let go
        of the addition, if the run is gone or has been recounted.

        Another process may begin a group or a media type meanwhile, which refuses an addition that
        begins one; each refusal is thus a step towards the bound of both.
        """
        for _ in range(TRIES + MOST_GROUPS + MOST_TYPES):
            assert run.row is not None  # an addition has the epoch of a row
            update = _AdditionUpdate(run.row, addition.parts)
            if update.samples:
                await for_each(partial(self._note, run.place), update.samples)
            try:
                return read_run_row(await self._write(run.place, addition, update, now))
            except AwsRefused as refused:
                if not refused.is_condition:
                    raise
                found = conflicting_item(refused)
            if found is None or found["status"] == RunStatus.DELETED:
                if update.samples:
                    # The removal of the run may have come before its samples.
                    await remove_group_items(self._records.table, run.place.run_id)
                run.addition = None
                _resolve(addition.parts, Settled(applied=False, run_status=None))
                return None
            row = read_run_row(found)
            self.observe(row)
            if row.sequences.get(self._worker, 0) >= addition.number:
                return row
            if row.counter_epoch != addition.epoch:
                run.addition = None
                self._leave_to_recount(run, addition.parts)
                return None
        raise contention_error()

    async def _note(self, place: RunPlace, sample: tuple[list[FailureSample], bool]) -> None:
        failures, begins = sample
        await note_failures(self._records.table, place.run_id, failures, begins=begins)

    async def _write(
        self, place: RunPlace, addition: _Addition, update: _AdditionUpdate, now: int
    ) -> dict[str, Plain]:
        return await self._records.table.update(
            place.key,
            update.expression,
            condition=" AND ".join([_CONDITION, *update.conditions]),
            worker=AttributeName(self._worker),
            number=addition.number,
            now=now,
            one=1,
            deleted=str(RunStatus.DELETED),
            epoch=addition.epoch,
            **update.values,
        )

    async def _recount_sizes(self, run: _RunCounters) -> None:
        """Recount a run that has just completed. Makes one try, as the sizes are not worth more."""
        try:
            await self._recount(run)
        except ConveyorError as error:
            _log.warning(
                "the sizes of results stay too few: %s",
                error.detail,
                extra={"run_id": run.place.run_id},
            )

    def _leave_to_recount(self, run: _RunCounters, parts: Sequence[_PendingDelta]) -> None:
        """Leave deltas to a recount, because the last one may or may not have counted their
        rows."""
        run.dropped += parts
        run.recount_due = True

    async def _recount(self, run: _RunCounters) -> bool:
        """Recount a run; return False if the recount has to wait for a live claim.

        Answers dropped deltas either way, because their rows hold the result. This process retries
        the recount; if it ends first, the sweeper recounts the run once it is quiet.
        """
        row, done = await recount_at(self._records, run.place, now=self._clock.now())
        dropped, run.dropped = run.dropped, []
        run.recount_due = not done
        if done:
            run.failures = 0
        else:
            self._postpone(run)
        if row is None or row.run.status is RunStatus.DELETED:
            _resolve(dropped, Settled(applied=False, run_status=None))
        else:
            self.observe(row)
            _resolve(dropped, Settled(applied=True, run_status=row.run.status))
        return done


def _lacks_sizes(row: RunRow) -> bool:
    """Tell whether a version that counted no sizes has counted in a run. Its rows have them."""
    return sum(row.run.stats.shape.sizes) < row.run.stats.successful


def _age(row: RunRow) -> tuple[int, int]:
    """Return what only grows while counters change: rows may be seen in another order."""
    return row.counter_epoch, row.flushes


def _split(parts: list[_PendingDelta]) -> tuple[list[_PendingDelta], list[_PendingDelta]]:
    """Split deltas into those of the next addition, and those that wait for the one after it."""
    group_ids: set[str] = set()
    for number, part in enumerate(parts):
        if part.failure is None:
            continue
        if len(group_ids) == MOST_GROUPS_ADDED and part.failure.group_id not in group_ids:
            return parts[:number], parts[number:]
        group_ids.add(part.failure.group_id)
    return parts, []


class _AdditionUpdate:
    """The update of a run's row, as it was last seen, by one addition.

    A group, or a media type, may begin only while the run keeps exactly those that it kept when it
    was seen, so that all processes agree on the first of them. `samples` are failures to be noted
    before, by group, each with whether the group begins.
    """

    def __init__(self, row: RunRow, parts: Sequence[_PendingDelta]) -> None:
        deltas = [part.delta for part in parts]
        self.samples: list[tuple[list[FailureSample], bool]] = []
        self.conditions: list[str] = []
        self.values: dict[str, PlaceholderValue] = {}
        self._sets = [_SETS]
        self._add_types(row.run.stats.shape.types, deltas)
        self._add_groups(row, [part.failure for part in parts if part.failure is not None])
        adds = _sum_by_attribute(deltas)
        self.values |= {f"add_{name}": value for name, value in adds.items()}
        self.expression = f"SET {', '.join(self._sets)} ADD flushes :one" + "".join(
            f", #{name} :add_{name}" for name in adds
        )

    def _add_types(self, kept: Mapping[str, int], deltas: Sequence[RunDelta]) -> None:
        counted, adds = dict(kept), dict[str, int]()
        for delta in deltas:
            if delta.result is not None:
                name = counted_type(delta.result.content_type, counted)
                counted.setdefault(name, 0)
                adds[name] = adds.get(name, 0) + 1
        if self._begin("t", TYPES, kept, adds):
            return
        for number, (name, count) in enumerate(adds.items()):
            path, value = f"#t.#t{number}", f":t{number}n"
            self._sets.append(f"{path} = {path} + {value}" if name in kept else f"{path} = {value}")
            self.values |= {f"t{number}": AttributeName(name), f"t{number}n": count}

    def _add_groups(self, row: RunRow, failures: Sequence[FailureSample]) -> None:
        """Count failures in their groups; leave out those of groups that may not begin."""
        kept = row.groups
        counted = sum(group.failed for group in kept.values())
        # While a failed task lies in no group, a new group could not count all of its tasks.
        room = MOST_GROUPS - len(kept) if counted >= row.run.stats.failed else 0
        found: dict[str, list[FailureSample]] = {}
        for failure in failures:
            if failure.group_id in found:
                found[failure.group_id].append(failure)
            elif failure.group_id in kept or room > 0:
                room -= failure.group_id not in kept
                found[failure.group_id] = [failure]
        for group_id, some in found.items():
            begins = group_id not in kept
            if begins or kept[group_id].failed < MOST_SAMPLES:
                self.samples.append((some, begins))
        adds = {one: [len(some), some[-1].at] for one, some in found.items()}
        if self._begin("g", GROUPS, kept, adds):
            return
        for number, (group_id, (count, last_at)) in enumerate(adds.items()):
            path = f"#g.#g{number}"
            self.values |= {f"g{number}": AttributeName(group_id), f"g{number}n": count}
            if group_id in kept:
                self._sets.append(f"{path}[0] = {path}[0] + :g{number}n, {path}[1] = :g{number}t")
                self.values[f"g{number}t"] = last_at
            else:
                self._sets.append(f"{path} = :g{number}n")
                self.values[f"g{number}n"] = [count, last_at]

    def _begin(
        self, alias: str, name: str, kept: Collection[str], adds: Mapping[str, Plain]
    ) -> bool:
        """Name a map by its short alias, and add the condition under which entries of it may begin;
        return True if the map itself does."""
        if not adds:
            return False
        self.values[alias] = AttributeName(name)
        if all(one in kept for one in adds):
            return False
        if kept:
            self.conditions.append(f"size(#{alias}) = :{alias}_kept")
            self.values[f"{alias}_kept"] = len(kept)
            return False
        self.conditions.append(f"attribute_not_exists(#{alias})")
        self._sets.append(f"#{alias} = :{alias}_all")
        self.values[f"{alias}_all"] = dict(adds)
        return True


def _sum_by_attribute(deltas: Sequence[RunDelta]) -> dict[str, Plain]:
    """Sum deltas by attribute; leave out zeros. Adds up money in decimal digits."""
    adds: dict[str, Plain] = {
        "successful": sum(delta.successful for delta in deltas),
        "failed": sum(delta.failed for delta in deltas),
        "credits": sum(delta.spend.credits for delta in deltas),
        "cost": float(sum(Decimal(repr(delta.spend.cost)) for delta in deltas)),
    }
    names = [f"{REASON}{delta.failure}" for delta in deltas if delta.failure is not None]
    names += [f"{SIZE}{size_class(one.result.size)}" for one in deltas if one.result is not None]
    adds |= Counter(names)
    return {name: value for name, value in adds.items() if value}


def _resolve(parts: Sequence[_PendingDelta], settled: Settled) -> None:
    for part in parts:
        if not part.answer.done():
            part.answer.set_result(settled)


def _resolve_in_order(
    parts: Sequence[_PendingDelta], *, before: RunStatus, after: RunStatus
) -> None:
    """Answer as if each delta had been added alone: the last one that ended a task changed the
    status."""
    last = [part for part in parts if part.delta.ends_task][-1:]
    _resolve(last, Settled(applied=True, run_status=after))
    _resolve(parts, Settled(applied=True, run_status=before))


def _fail_waiters(run: _RunCounters, error: Exception) -> None:
    """Fail the waiters. The addition keeps its number, because it may have been written."""
    if not isinstance(error, ConveyorError):
        _log.error("counters cannot be written", exc_info=error)
        error = ConveyorError(ErrorCode.UNAVAILABLE, "counters cannot be written", retry_after=5)
    parts = [*run.dropped, *run.pending, *(run.addition.parts if run.addition else [])]
    run.dropped = []
    for part in parts:
        if not part.answer.done():
            part.answer.set_exception(error)
