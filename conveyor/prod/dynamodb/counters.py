"""Counting ended tasks: group commit, one addition at a time to a run's row.

A settlement has moved its row before it comes here. Its part is added with whatever else this
process has settled in the same run meanwhile, and the settlement is answered from the row that the
addition returned. An addition carries this process's next number and the epoch that was known
before its rows moved: a repeated one finds its number on the run's row and changes nothing, one
that a recount may have counted already finds another epoch and is dropped, and the run recounted.

What the rows of a run say: the truth that its counters are a cache of.

Rows are counted page by page while others may write. What makes that safe: the counts are written
only if no addition, and no change of the run, came between; and with them the epoch is raised, so
that additions for rows that moved before it was known are refused, whether they were counted or
not. Whoever is refused counts again.

How a run is counted while its rows are being written.

A large rerun begins with the counters that it will probably have: the plan. What is really copied
is added up beside it, in the same write that moves the checkpoint, and the end of the ingestion
adds the difference. So nothing that workers count meanwhile is overwritten.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import NamedTuple

import anyio
import msgspec

from conveyor.aio.concurrency import for_each, wait_or_timeout
from conveyor.domain.backoff import Backoff
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.ids import task_index
from conveyor.domain.model import RunStats, RunStatus, Spend, TaskFailure, TaskStatus
from conveyor.domain.states import LIVE_RUN_STATES, live_run_status
from conveyor.domain.task_rules import RunDelta
from conveyor.ports.tasks import Settled
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import (
    Item,
    Name,
    Plain,
    Query,
    changed_too_often,
    condition_met,
    whole,
)
from conveyor.prod.dynamodb.run_rows import (
    REASON,
    TRIES,
    Change,
    DynamoRunRows,
    RunMoved,
    RunPlace,
    RunRow,
    counters,
    read_run_row,
)
from conveyor.prod.dynamodb.schema import task_partition, task_sort_key

MOST_SEQUENCES = 200
"""Processes whose last number a run's row may hold. Where there are more a recount forgets them
all, also if the counters are right: no addition of the epoch before is taken any more."""

_NAMES = ("task_id", "status", "failure", "events", "claimed_until")


class Recounted(NamedTuple):
    """A run after it was recounted, None where it is gone. `done` is False where it could not be
    recounted yet, because a task of it is being worked or its rows are still being written."""

    row: RunRow | None
    done: bool


async def recount(records: DynamoRunRows, run_id: str, *, now: int) -> RunRow | None:
    """Set a run's counters to what its rows say where they disagree, or where too many processes
    have counted, and let its status follow; the row then, None where it is gone.

    A run that is ingesting or deleted, or that has a task under a live claim, is left as it is.
    Raises ConveyorError(unavailable) where the run changes faster than it is counted, DamagedRow
    where one of its rows cannot be counted.
    """
    place = await records.places.find(run_id)
    return None if place is None else (await recount_at(records, place, now=now)).row


async def recount_at(records: DynamoRunRows, place: RunPlace, *, now: int) -> Recounted:
    """`recount` by a run's place."""
    for _ in range(TRIES):
        row = await records.read_at(place)
        if row is None or row.run.status is RunStatus.DELETED:
            return Recounted(row, done=True)
        if row.run.ingesting:
            return Recounted(row, done=False)
        stats = await _count(records, row, now)
        if stats is None:
            return Recounted(row, done=False)
        try:
            if not _agree(stats, row.run.stats):
                row = await records.change(row, _correction(row, stats), now=now)
            elif is_crowded(row):
                # Nothing of the run itself has moved: it keeps its time.
                at = row.run.updated_at
                row = await records.change(row, _correction(row, stats), now=at)
        except RunMoved:
            continue
        return Recounted(await records.settle_status(row, now=now), done=True)
    raise changed_too_often()


def is_crowded(row: RunRow) -> bool:
    """Whether more processes have counted in a run than its row should hold, which each addition
    pays for."""
    return len(row.sequences) > MOST_SEQUENCES


class _LiveClaim(Exception):
    """A task is being worked."""


class _Money(msgspec.Struct, frozen=True):
    credits: int = 0
    cost: Decimal = Decimal(0)


class _Spent(msgspec.Struct, frozen=True):
    """What a recount wants to know of an event."""

    spend: _Money = _Money()


_spent = msgspec.json.Decoder(_Spent)


class _TaskRow(msgspec.Struct, frozen=True):
    """What a recount wants to know of a task's row."""

    task_id: str
    status: TaskStatus
    claimed_until: int
    events: list[str]
    failure: str = str(TaskFailure.OTHER)


class _Counted(NamedTuple):
    """What a row adds to a tally."""

    place: int
    row: _TaskRow
    spent: list[_Money]


@whole
def _read_counted(item: Item) -> _Counted:
    """Of a task's item. Raises DamagedRow."""
    row = msgspec.convert(item, _TaskRow)
    spent = [_spent.decode(text).spend for text in row.events]
    if not all(spend.cost.is_finite() for spend in spent):
        raise ValueError("not an amount of money")
    return _Counted(task_index(row.task_id), row, spent)


@dataclass(slots=True)
class _Tally:
    """Rows counted so far. Money is added up as the table itself does it: in decimal digits."""

    total: int = 0
    ended: dict[TaskStatus, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    credits: int = 0
    cost: Decimal = Decimal(0)

    def add(self, counted: _Counted) -> None:
        self.total += 1
        status, reason = counted.row.status, counted.row.failure
        self.ended[status] = self.ended.get(status, 0) + 1
        if status is TaskStatus.FAILED:
            self.reasons[reason] = self.reasons.get(reason, 0) + 1
        for spend in counted.spent:
            self.credits += spend.credits
            self.cost += spend.cost

    def stats(self) -> RunStats:
        return RunStats(
            total=self.total,
            successful=self.ended.get(TaskStatus.SUCCESSFUL, 0),
            failed=self.ended.get(TaskStatus.FAILED, 0),
            failure_reasons=self.reasons,
            spend=Spend(self.credits, float(self.cost)),
        )


async def _count(records: DynamoRunRows, row: RunRow, now: int) -> RunStats | None:
    """Count every shard at once; None where a task is under a live claim. Raises DamagedRow."""
    place, tally = row.place, _Tally()
    projection = ", ".join(f"#{name}" for name in _NAMES)

    async def count(shard: int) -> None:
        partition = task_partition(place.job_id, place.shards, shard)
        async for page in records.table.pages(
            Query(partition, begins_with=task_sort_key(place.run_id, ""), projection=projection)
        ):
            for item in page.items:
                one = _read_counted(item)
                if one.row.status is TaskStatus.PROCESSING and one.row.claimed_until > now:
                    raise _LiveClaim
                # What is being added is not counted yet, nor what was reserved since this began.
                if one.place < row.run.next_index and row.holds(one.place):
                    tally.add(one)

    try:
        await for_each(count, range(place.shards.count))
    except _LiveClaim:
        return None
    return tally.stats()


def _agree(counted: RunStats, kept: RunStats) -> bool:
    """Whether nothing is to be corrected."""
    return msgspec.structs.replace(counted, spend=kept.spend) == kept and (
        counted.spend.credits == kept.spend.credits
        and math.isclose(counted.spend.cost, kept.spend.cost, rel_tol=1e-9, abs_tol=1e-9)
    )


def _correction(row: RunRow, stats: RunStats) -> Change:
    """Counts as they are written: with the epoch raised, unless an addition came between."""
    run = row.run
    status = None
    if run.status in LIVE_RUN_STATES:
        status = live_run_status(stats, job_closed=run.last_batch_received)
    gone = run.stats.failure_reasons.keys() - stats.failure_reasons.keys()
    return Change(
        status=None if status is run.status else status,
        sets={**counters(stats), "counter_epoch": row.counter_epoch + 1, "sequences": {}},
        removes=[f"{REASON}{reason}" for reason in sorted(gone)],
        condition="flushes = :seen_flushes AND counter_epoch = :seen_epoch",
        values={"seen_flushes": row.flushes, "seen_epoch": row.counter_epoch},
    )


class Counts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rows as they were written: `fresh` ones, that are to be worked, and inherited ones by their
    end, the failed ones by reason too."""

    fresh: int = 0
    successful: int = 0
    failed: int = 0
    reasons: dict[str, int] = {}

    @property
    def inherited(self) -> int:
        """Rows that came with their end."""
        return self.successful + self.failed

    @property
    def total(self) -> int:
        """All rows."""
        return self.fresh + self.inherited

    def __add__(self, other: Counts) -> Counts:
        reasons = dict(self.reasons)
        for reason, count in other.reasons.items():
            reasons[reason] = reasons.get(reason, 0) + count
        return Counts(
            self.fresh + other.fresh,
            self.successful + other.successful,
            self.failed + other.failed,
            reasons,
        )

    def with_end(self, status: str, failure: str | None) -> Counts:
        """With one inherited row more."""
        if status == TaskStatus.SUCCESSFUL:
            return self + Counts(successful=1)
        return self + Counts(failed=1, reasons={failure or str(TaskFailure.OTHER): 1})

    def stats(self) -> RunStats:
        """The counters of a run of which nothing has been worked yet."""
        return RunStats(
            total=self.total,
            successful=self.successful,
            failed=self.failed,
            failure_reasons=self.reasons,
        )


_counts = msgspec.json.Decoder(Counts)


class IngestRow(NamedTuple):
    """A run's row with the counts that go with its ingestion.

    `planned` is what the run's counters presume of the rows written, `copied` what was added up.
    `recopied`: rows may have been written that nobody added up; only the rows tell. The texts are
    the counts as they lie there, "" where there are none.
    """

    row: RunRow
    planned: Counts
    copied: Counts
    recopied: bool
    planned_text: str
    copied_text: str

    @property
    def goes_on(self) -> bool:
        """Whether rows may still be written."""
        return self.row.live and self.row.run.ingesting

    @property
    def next_index(self) -> int:
        """The checkpoint."""
        ingest = self.row.run.ingest
        return 0 if ingest is None else ingest.next_index


async def find_ingest_row(records: DynamoRunRows, run_id: str) -> IngestRow | None:
    """A run by its id, strongly read; None where there is none."""
    place = await records.places.find(run_id)
    return None if place is None else await ingest_row_at(records, place)


async def ingest_row_at(records: DynamoRunRows, place: RunPlace) -> IngestRow | None:
    """A run by its place, strongly read."""
    item = await records.table.get(place.key)
    return None if item is None else read_ingest_row(item)


@whole
def read_ingest_row(item: Item) -> IngestRow:
    """A run from its item."""
    row = read_run_row(item)
    planned, copied = item.get("planned", ""), item.get("copied", "")
    return IngestRow(
        row,
        # Of a submit every row is a fresh one.
        _counts.decode(planned) if planned else Counts(fresh=row.run.stats.total),
        _counts.decode(copied) if copied else Counts(),
        item.get("recopied", False),
        planned,
        copied,
    )


def difference(before: Counts, after: Counts) -> dict[str, int]:
    """What is to be added to a run's row for its counters to presume other rows."""
    reasons = sorted(before.reasons.keys() | after.reasons.keys())
    adds = {
        "total": after.total - before.total,
        "successful": after.successful - before.successful,
        "failed": after.failed - before.failed,
        "inherited": after.inherited - before.inherited,
        **{
            f"{REASON}{reason}": after.reasons.get(reason, 0) - before.reasons.get(reason, 0)
            for reason in reasons
        },
    }
    return {name: change for name, change in adds.items() if change}


MOST_REMEMBERED = 10_000
"""Runs whose epoch is remembered."""
RETRIES = Backoff(1.0, 30.0)
"""Seconds until what could not be written is tried again, unless something new comes first."""

_UPDATE = "SET #sequences.#worker = :number, counted_at = :now ADD flushes :one"
_CONDITION = (
    "#status <> :deleted AND counter_epoch = :epoch "
    "AND (attribute_not_exists(#sequences.#worker) OR #sequences.#worker < :number)"
)

_log = logging.getLogger("conveyor.counters")


@dataclass(slots=True, eq=False)
class _Waiting:
    """One settlement, and who waits for it."""

    delta: RunDelta
    epoch: int
    answer: asyncio.Future[Settled]


@dataclass(slots=True)
class _Addition:
    """What goes, or went, to the run's row under one number."""

    number: int
    epoch: int
    parts: list[_Waiting]


@dataclass(slots=True, eq=False)
class _RunCounters:
    """What this process knows of a run's counters, and has yet to add to them."""

    place: RunPlace
    epoch: int | None = None
    updated_at: int = 0
    began: float = float("-inf")
    pending: list[_Waiting] = field(default_factory=list)
    addition: _Addition | None = None
    dropped: list[_Waiting] = field(default_factory=list)
    recount_due: bool = False
    failures: int = 0
    retry_at: float = float("-inf")
    worker: asyncio.Task[None] | None = None
    wake: anyio.Event = field(default_factory=anyio.Event)


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

    def seen(self, row: RunRow) -> None:
        """Take note of a run's row that was just read or written."""
        run = self._run(row.place)
        run.epoch = max(run.epoch or 0, row.counter_epoch)
        run.updated_at = max(run.updated_at, row.run.updated_at)

    def epoch(self, place: RunPlace) -> int | None:
        """The latest epoch seen; None where the run's row has not been seen yet.

        To be taken before a task's row is moved, and given to `add` after that.
        """
        return self._run(place).epoch

    async def add(self, place: RunPlace, delta: RunDelta, *, epoch: int) -> Settled:
        """Account for a row that was moved; returns once that is on the run's row.

        Not applied where the run is deleted. Raises ConveyorError(unavailable) where the addition
        could not be written yet: it is tried again until it is, or this process ends. A caller that
        is cancelled changes nothing.
        """
        run = self._run(place)
        waiting = _Waiting(delta, epoch, asyncio.get_running_loop().create_future())
        run.pending.append(waiting)
        self._start(run)
        return await waiting.answer

    def doubt(self, place: RunPlace) -> None:
        """Have a run recounted soon: a row of it may have been moved, and nobody knows."""
        run = self._run(place)
        run.recount_due = True
        self._start(run)

    async def aclose(self) -> None:
        """Add what is pending, if the store can be reached."""
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
        """Go on until nothing is left to do for a run."""
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
        """Do what is due; False where it failed, and is left for later. Who waits is told."""
        try:
            if run.pending and run.addition is None:
                await self._gather(run)
            if run.addition is not None:
                await self._add(run, run.addition)
            if run.dropped or (run.recount_due and self._clock.monotonic() >= run.retry_at):
                await self._recount(run)
        except Exception as error:
            _fail(run, error)
            self._postpone(run)
            return False
        return True

    def _postpone(self, run: _RunCounters) -> None:
        """Put off what is left, longer each time."""
        run.failures += 1
        pause = RETRIES.spread(run.failures, self._clock.random())
        run.retry_at = self._clock.monotonic() + pause

    async def _gather(self, run: _RunCounters) -> None:
        """Make one addition of what is pending."""
        if self._interval > 0 and not self._closing:
            wait = run.began + self._interval - self._clock.monotonic()
            if wait > 0:
                await self._clock.sleep(wait)
            run.began = self._clock.monotonic()
        pending, run.pending = run.pending, []
        current = [one for one in pending if one.epoch == run.epoch]
        old = [one for one in pending if one.epoch != run.epoch]
        if old:
            self._drop(run, old)
        if current:
            run.addition = _Addition(next(self._numbers), current[0].epoch, current)

    async def _add(self, run: _RunCounters, addition: _Addition) -> None:
        """Write an addition, or find that it was written before."""
        now = max(run.updated_at, *(part.delta.now for part in addition.parts))
        try:
            row = read_run_row(await self._write(run.place, addition, now))
        except AwsRefused as refused:
            if not refused.is_condition:
                raise
            found = condition_met(refused)
            if found is None or found["status"] == RunStatus.DELETED:
                run.addition = None
                _answer(addition.parts, Settled(applied=False, run_status=None))
                return
            row = read_run_row(found)
            self.seen(row)
            if row.sequences.get(self._worker, 0) < addition.number:
                run.addition = None
                self._drop(run, addition.parts)
                return
        after = await self._records.settle_status(row, now=now)
        self.seen(after)
        run.addition = None
        run.failures = 0
        _answer_moved(addition.parts, before=row.run.status, after=after.run.status)

    async def _write(self, place: RunPlace, addition: _Addition, now: int) -> dict[str, Plain]:
        adds = _sum([part.delta for part in addition.parts])
        update = _UPDATE + "".join(f", #{name} :add_{name}" for name in adds)
        values = {f"add_{name}": value for name, value in adds.items()}
        return await self._records.table.update(
            place.key,
            update,
            condition=_CONDITION,
            worker=Name(self._worker),
            number=addition.number,
            now=now,
            one=1,
            deleted=str(RunStatus.DELETED),
            epoch=addition.epoch,
            **values,
        )

    def _drop(self, run: _RunCounters, parts: Sequence[_Waiting]) -> None:
        """Leave it to a recount: their rows may have been counted by the last one, or not."""
        run.dropped += parts
        run.recount_due = True

    async def _recount(self, run: _RunCounters) -> bool:
        """Recount a run; False where that has to wait, because tasks of it are being worked.

        The dropped are answered all the same: their rows tell what they did, and this process
        recounts until it could, or else the sweeper does once the run is quiet.
        """
        row, done = await recount_at(self._records, run.place, now=self._clock.now())
        dropped, run.dropped = run.dropped, []
        run.recount_due = not done
        if done:
            run.failures = 0
        else:
            self._postpone(run)
        if row is None or row.run.status is RunStatus.DELETED:
            _answer(dropped, Settled(applied=False, run_status=None))
        else:
            self.seen(row)
            _answer(dropped, Settled(applied=True, run_status=row.run.status))
        return done


def _sum(deltas: Sequence[RunDelta]) -> dict[str, Plain]:
    """What is added, by attribute; nothing that is nought. Money in decimal digits."""
    adds: dict[str, Plain] = {
        "successful": sum(delta.successful for delta in deltas),
        "failed": sum(delta.failed for delta in deltas),
        "credits": sum(delta.spend.credits for delta in deltas),
        "cost": float(sum(Decimal(repr(delta.spend.cost)) for delta in deltas)),
    }
    reasons = [delta.failure for delta in deltas if delta.failure is not None]
    adds |= {f"{REASON}{reason}": reasons.count(reason) for reason in reasons}
    return {name: value for name, value in adds.items() if value}


def _answer(parts: Sequence[_Waiting], settled: Settled) -> None:
    for part in parts:
        if not part.answer.done():
            part.answer.set_result(settled)


def _answer_moved(parts: Sequence[_Waiting], *, before: RunStatus, after: RunStatus) -> None:
    """Answer as if each part had been added alone: the last that ended a task moved the run."""
    last = [part for part in parts if part.delta.ends_task][-1:]
    _answer(last, Settled(applied=True, run_status=after))
    _answer(parts, Settled(applied=True, run_status=before))


def _fail(run: _RunCounters, error: Exception) -> None:
    """Tell who waits. What was to be added is kept, under its number: it may have been written."""
    if not isinstance(error, ConveyorError):
        _log.error("counters cannot be written", exc_info=error)
        error = ConveyorError(ErrorCode.UNAVAILABLE, "counters cannot be written", retry_after=5)
    parts = [*run.dropped, *run.pending, *(run.addition.parts if run.addition else [])]
    run.dropped = []
    for part in parts:
        if not part.answer.done():
            part.answer.set_exception(error)
