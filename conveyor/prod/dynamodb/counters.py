"""The counters that a process keeps of the runs it works, written to an item of its own a run.

**Flushes.** A settlement changes its row first. `Counters` then writes the item of this process
with all that it has counted in the run, together with the settlements that come meanwhile. The
values are absolute and carry a number that grows, so no answer has to be known: the next flush says
it all again. Each settlement has the epoch known before its row moved.

**Late flushes.** A flush is put off for LATE seconds after the one before while this process has a
claim in the run, unless many settlements wait. Those that are put off are answered at once: the
rows hold them, and if this process dies a recount finds them.

**Items.** An item is opened only while the run has that epoch and no recount has begun. If a
recount closes it, the process drops what the item lacks, since the recount may have counted it, and
has the run recounted; where the recount counted nothing, it goes on in the next epoch with what the
item lacks. If the item has moved to the base, the process goes on in another one.

**Looks.** A process that may have settled the last task reads row and items after its flush, and
writes the status that follows. Of two that cross, at least one sees both. Such a process has no
live claim in the run, and nothing left to write; looks of a run are kept apart, none is dropped.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from math import ceil

import anyio

from conveyor.aio.concurrency import for_each, wait_or_timeout
from conveyor.domain.backoff import Backoff
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.failure_groups import MOST_GROUPS, MOST_SAMPLES
from conveyor.domain.model import RunStatus
from conveyor.domain.states import LIVE_RUN_STATES
from conveyor.domain.task_rules import RunDelta
from conveyor.ports.tasks import Settled
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import Item, contention_error, untag_all
from conveyor.prod.dynamodb.counter_sums import (
    NOTHING,
    CountedDelta,
    CountedValues,
    GroupCount,
    ProcessItem,
    count_deltas,
    encode_values,
    new_process_item,
    process_item_key,
    read_process_item,
)
from conveyor.prod.dynamodb.failure_groups import FailureSample, note_failures, remove_group_items
from conveyor.prod.dynamodb.recount import recount_at
from conveyor.prod.dynamodb.run_rows import (
    RECOUNTING,
    TRIES,
    DynamoRunRows,
    RunPlace,
    RunRow,
)
from conveyor.prod.dynamodb.schema import Key

MOST_REMEMBERED = 2_000
"""Runs whose counts are remembered. Of others the row is read once more before a task settles, and
the item of this process when it is written again."""
RETRIES = Backoff(1.0, 30.0)
"""Seconds until what could not be written is tried again, unless something new comes first."""
RECOUNT_PAUSE = 0.5
"""Seconds between two looks at a recount under way, which keeps this process from counting."""
RECOUNT_LOOKS = 20
"""Looks after which a recount under way counts as cut off, and this process takes it over."""

LATE = 3.0
"""Seconds by which counters may follow the rows while tasks of the run are in work here."""
MOST_LATE = 32
"""Settlements that are not put off any longer."""
WRITES_PER_PART = 500
"""Units a second that the flushes of all processes together take of one partition: half of what it
has."""
LOOK_APART = 10
"""Flush intervals between two looks at a run, at least."""
LOOK_UNITS = 1_500
"""Units a second that the looks of all processes together take of one partition."""
READ_UNIT = 4_096
WRITE_UNIT = 1_024
REFRESH_FIRST, REFRESH_LAST = 1.0, 30.0
"""Seconds between two looks that a process at work takes to learn how many others there are; the
pause doubles from the first to the last."""
MANY_PROCESSES = 100
"""Processes from which on looks that fall due at one moment are spread in time."""

_FLUSH = "SET seq = :number, counts = :counts"
_IS_OPEN = "attribute_exists(pk) AND seq < :number AND attribute_not_exists(closed)"
_MAY_OPEN = f"#status <> :deleted AND counter_epoch = :epoch AND attribute_not_exists({RECOUNTING})"

_log = logging.getLogger("conveyor.counters")


@dataclass(slots=True, eq=False)
class _PendingDelta:
    """One settlement that waits to be counted; with the failure, if it is one."""

    delta: RunDelta
    failure: FailureSample | None
    epoch: int
    answer: asyncio.Future[Settled]
    is_noted: bool = False

    @property
    def is_awaited(self) -> bool:
        """True while its caller waits for it to be counted."""
        return not self.answer.done()

    @property
    def counted(self) -> CountedDelta:
        """The part of it that goes into values."""
        return CountedDelta(self.delta, None if self.failure is None else self.failure.group_id)


class _Outcome(Enum):
    """The end of one try to write: AGAIN after a change of what this process knows, BLOCKED by a
    recount under way, GONE with the run."""

    WRITTEN = auto()
    AGAIN = auto()
    BLOCKED = auto()
    GONE = auto()


@dataclass(slots=True, eq=False)
class _OwnItem:
    """The item of this process in one epoch of a run.

    `held` are the values that the item is known to hold. `tries` has, by number, how many of the
    deltas sent since each try carried that is not answered.
    """

    epoch: int
    generation: int = 0
    is_open: bool = False
    held: CountedValues = NOTHING
    tries: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Looks:
    """The times of the looks of this process at a run, in seconds of its clock.

    `row` is the run at the last look, `ended` the number of tasks that this process has ended
    since, and `has_flushed` tells whether it has counted anything since. `is_due`: it may have been
    the last one, and has not looked since.
    """

    row: RunRow | None = None
    ended: int = 0
    has_flushed: bool = False
    is_due: bool = False
    next_at: float = float("-inf")
    refresh_at: float = float("-inf")
    refresh_pause: float = REFRESH_FIRST


@dataclass(slots=True, eq=False)
class _RunCounters:
    """The state of a run's counters in this process.

    `row` is the latest one seen, `pending` waits for a flush, `sent` was in one that is not
    answered, `written` is in the item and waits for its answer or a look, `dropped` for a recount.
    `claims` has when the claims of this process lapse, by task. `puts_off` is True while the flush
    is put off.
    """

    place: RunPlace
    row: RunRow | None = None
    item: _OwnItem | None = None
    updated_at: int = 0
    began: float = float("-inf")
    pending: list[_PendingDelta] = field(default_factory=list)
    sent: list[_PendingDelta] = field(default_factory=list)
    written: list[_PendingDelta] = field(default_factory=list)
    dropped: list[_PendingDelta] = field(default_factory=list)
    claims: dict[str, int] = field(default_factory=dict)
    looks: _Looks = field(default_factory=_Looks)
    recount_due: bool = False
    failures: int = 0
    retry_at: float = float("-inf")
    worker: asyncio.Task[None] | None = None
    puts_off: bool = False
    wake: anyio.Event = field(default_factory=anyio.Event)

    @property
    def epoch(self) -> int | None:
        """The latest epoch seen."""
        return None if self.row is None else self.row.counter_epoch

    @property
    def status(self) -> RunStatus | None:
        """The latest status seen."""
        return None if self.row is None else self.row.run.status

    @property
    def processes(self) -> int:
        """The number of processes that counted in the run at the last look."""
        return max(1, 0 if self.looks.row is None else self.looks.row.processes)

    @property
    def has_to_flush(self) -> bool:
        """True if settlements wait for a flush, or for the end of one."""
        return bool(self.pending or self.sent or self.written)

    @property
    def is_busy(self) -> bool:
        """True if something is left to do at once or later."""
        return bool(self.has_to_flush or self.recount_due or self.looks.is_due)


class Counters:
    """The counters of the runs that this process works. Belongs to one event loop.

    `worker` is this process's name, never used by another one. `flush_interval`: seconds between
    the beginnings of two flushes to one run, at least; where it is 0, looks are not kept apart.
    """

    def __init__(self, records: DynamoRunRows, *, worker: str, flush_interval: float) -> None:
        self._records = records
        self._table = records.table
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

    def processes(self, place: RunPlace) -> int:
        """Return how many processes counted in a run when this one last looked, 1 at least."""
        run = self._runs.get(place.run_id)
        return 1 if run is None else run.processes

    def note_claim(self, place: RunPlace, task_id: str, claimed_until: int) -> None:
        """Note a claim of this process, or its extension: until it ends or lapses, the process has
        not settled the last task of the run."""
        self._run(place).claims[task_id] = claimed_until

    def extend_claim(self, place: RunPlace, task_id: str, claimed_until: int) -> None:
        """Note the extension of a claim that was noted."""
        run = self._runs.get(place.run_id)
        if run is not None and task_id in run.claims:
            run.claims[task_id] = claimed_until

    def end_claim(self, place: RunPlace, task_id: str, *, counts: bool) -> None:
        """Note that this process has no claim of a task any more. Unless a settlement of it
        `counts`, what was counted before may have been the last of the run."""
        run = self._runs.get(place.run_id)
        if run is None:
            return
        run.claims.pop(task_id, None)
        if counts or self._has_claim(run):
            return
        if run.pending:
            # It looks after the flush.
            run.wake.set()
        elif run.looks.has_flushed and not self._works(run):
            self._call_for_look(run)
            self._start(run)

    async def add(self, place: RunPlace, task_id: str, delta: RunDelta, *, epoch: int) -> Settled:
        """Count a task's row that has changed; return once an item of the run holds it, or at once
        if that is put off.

        Not applied if the run is deleted. Raises ConveyorError(unavailable) if it could not be
        written yet; this process keeps trying until it succeeds or ends. A cancelled caller changes
        nothing.
        """
        run = self._run(place)
        failure = None
        if delta.failure is not None and delta.problem is not None:
            failure = FailureSample.of(task_id, delta.failure, delta.problem, delta.now)
        answer = asyncio.get_running_loop().create_future()
        waiting = _PendingDelta(delta, failure, epoch, answer)
        run.pending.append(waiting)
        if self._flush_due(run, asks=waiting) > self._clock.monotonic():
            answer.set_result(Settled(applied=True, run_status=run.status))
        if waiting.is_awaited or not run.puts_off:
            self._start(run)
        return await waiting.answer

    def mark_counters_uncertain(self, place: RunPlace) -> None:
        """Have a run recounted soon, because a row of it may have changed without being counted."""
        run = self._run(place)
        run.recount_due = True
        self._start(run)

    async def aclose(self) -> None:
        """Write pending settlements, and look where that is due, if the table can be reached."""
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
            if run.worker is None and not self._works(run):
                del self._runs[run_id]
                return

    def _works(self, run: _RunCounters) -> bool:
        """Tell whether this process has a live claim in a run, or something to write to it."""
        if run.pending or run.sent:
            return True
        now = self._clock.now()
        for task_id in [one for one, until in run.claims.items() if until <= now]:
            del run.claims[task_id]
        return bool(run.claims)

    def _has_claim(self, run: _RunCounters) -> bool:
        """Tell whether this process has a live claim in a run."""
        now = self._clock.now()
        return any(until > now for until in run.claims.values())

    def _flush_due(self, run: _RunCounters, *, asks: _PendingDelta | None = None) -> float:
        """Return until when the next flush is put off. It is not where it may show the end of the
        run, where the last one failed, or where somebody waits for it, other than the one that
        asks."""
        is_prompt = (
            self._interval <= 0
            or self._closing
            or run.failures > 0
            or run.recount_due
            or run.status not in LIVE_RUN_STATES
            or len(run.pending) >= MOST_LATE
            or any(one is not asks and one.is_awaited for one in run.pending)
            or not self._has_claim(run)
        )
        return float("-inf") if is_prompt else run.began + LATE

    def _start(self, run: _RunCounters) -> None:
        if run.worker is None:
            run.worker = asyncio.create_task(self._work(run))
        else:
            run.wake.set()

    async def _work(self, run: _RunCounters) -> None:
        """Flush, recount and look until nothing is left to do for the run."""
        try:
            while run.is_busy:
                run.wake = anyio.Event()
                if await self._step(run) and run.pending:
                    continue
                if self._closing:
                    return
                if run.is_busy:
                    # Until it is time to try again, or for something new.
                    await wait_or_timeout(run.wake, self._clock, self._rest(run))
        finally:
            run.worker, run.puts_off = None, False

    def _rest(self, run: _RunCounters) -> float:
        """Return the seconds until there is something to do."""
        now = self._clock.monotonic()
        waits = [run.retry_at - now] if run.has_to_flush or run.recount_due else []
        # A look comes after the flush, so it does not hasten that.
        if run.looks.is_due and not run.has_to_flush:
            waits.append(run.looks.next_at - now)
        return max(0.0, min(waits, default=0.0))

    async def _step(self, run: _RunCounters) -> bool:
        """Do the work that is due; on failure answer the waiters, postpone the rest and return
        False."""
        try:
            if run.has_to_flush:
                await self._flush(run)
            if run.dropped or (run.recount_due and self._is_time(run.retry_at)):
                await self._recount(run)
            if run.looks.is_due and self._is_time(run.looks.next_at):
                await self._look(run)
        except Exception as error:
            _fail_waiters(run, error)
            self._postpone(run)
            return False
        return True

    def _is_time(self, at: float) -> bool:
        return self._closing or self._clock.monotonic() >= at

    def _postpone(self, run: _RunCounters) -> None:
        """Put off what is left, longer each time."""
        run.failures += 1
        pause = RETRIES.spread(run.failures, self._clock.random())
        run.retry_at = self._clock.monotonic() + pause

    async def _flush(self, run: _RunCounters) -> None:
        """Write what is counted, answer the settlements, and look if this process may have been the
        last one."""
        await self._keep_apart(run)
        if not await self._write_all(run):
            return
        run.failures = 0
        if not run.written:
            return
        ended = sum(one.delta.ends_task for one in run.written)
        looks, now = run.looks, self._clock.monotonic()
        looks.ended += ended
        looks.has_flushed = True
        if not self._works(run):
            self._call_for_look(run)
        refreshes = self._interval > 0 and now >= looks.refresh_at
        if refreshes or (looks.is_due and (now >= looks.next_at or _is_complete(run))):
            await self._look(run)
        else:
            written, run.written = run.written, []
            _resolve(written, Settled(applied=True, run_status=run.status))

    async def _keep_apart(self, run: _RunCounters) -> None:
        """Wait until the next flush may begin: the more processes count, and the more each of them
        writes, the longer."""
        while (due := self._flush_due(run)) > self._clock.monotonic():
            run.wake, run.puts_off = anyio.Event(), True
            await wait_or_timeout(run.wake, self._clock, due - self._clock.monotonic())
        run.puts_off = False
        if self._interval <= 0 or self._closing:
            return
        parts = 1 if run.row is None else run.row.parts
        held = NOTHING if run.item is None else run.item.held
        units = ceil(len(encode_values(held)) / WRITE_UNIT)
        interval = max(self._interval, run.processes * units / (WRITES_PER_PART * parts))
        wait = run.began + interval - self._clock.monotonic()
        if wait > 0:
            await self._clock.sleep(wait)
        run.began = self._clock.monotonic()

    async def _write_all(self, run: _RunCounters) -> bool:
        """Write pending settlements of the current epoch; leave others to a recount. Return False
        if the run is gone."""
        blocked = 0
        for _ in range(TRIES + RECOUNT_LOOKS):
            await self._follow_epoch(run)
            pending, run.pending = run.pending, []
            run.sent += [one for one in pending if one.epoch == run.epoch]
            self._leave_to_recount(run, [one for one in pending if one.epoch != run.epoch])
            if not run.sent:
                return True
            outcome = await self._write(run)
            if outcome is _Outcome.WRITTEN:
                return True
            if outcome is _Outcome.GONE:
                await self._let_go(run)
                return False
            if outcome is _Outcome.BLOCKED:
                blocked += 1
                if blocked > RECOUNT_LOOKS or self._closing:
                    self._leave_to_recount(run, run.sent)
                    run.sent, run.item = [], None
                    return True
                await self._clock.sleep(RECOUNT_PAUSE)
        raise contention_error()

    async def _follow_epoch(self, run: _RunCounters) -> None:
        """Go over to the current epoch. What the item of the epoch before lacks is counted there if
        its sum was carried over, else left to a recount."""
        row, item = run.row, run.item
        assert row is not None  # settlements have the epoch of a row
        carried_from = row.counter_epoch - 1 if row.carried else None
        if item is not None and item.epoch != row.counter_epoch:
            if run.sent:
                found = await self._table.get(self._key(run, item))
                if found is not None:
                    _acknowledge(run, item, found)
                elif item.is_open:
                    carried_from = None  # it has expired, and may have held anything
            if item.epoch == carried_from:
                run.pending = [*run.sent, *run.pending]
            else:
                self._leave_to_recount(run, run.sent)
            run.sent, run.item = [], None
        if run.item is None:
            run.item = _OwnItem(row.counter_epoch)
        for one in run.pending:
            if one.epoch == carried_from:
                one.epoch = row.counter_epoch

    async def _write(self, run: _RunCounters) -> _Outcome:
        """Write the item of this process with all that was sent."""
        item, row = run.item, run.row
        assert item is not None
        assert row is not None  # settlements have the epoch of a row
        await self._note_samples(run)
        number = next(self._numbers)
        deltas = [one.counted for one in run.sent]
        values = count_deltas(item.held, deltas, row.run.stats.shape.types)
        item.tries[number] = len(run.sent)
        try:
            if item.is_open:
                await self._table.update(
                    self._key(run, item),
                    _FLUSH,
                    condition=_IS_OPEN,
                    number=number,
                    counts=encode_values(values),
                )
            else:
                await self._open(run, item, number, values)
        except AwsRefused as refused:
            if not refused.is_condition:
                raise
            found = refused.items[0] if refused.items else refused.item
            if found:
                return await self._go_on_from(run, item, untag_all(found))
            return await self._go_on_without(run, item)
        item.is_open = True
        item.held = values
        item.tries.clear()
        run.written += run.sent
        run.sent = []
        return _Outcome.WRITTEN

    async def _open(
        self, run: _RunCounters, item: _OwnItem, number: int, values: CountedValues
    ) -> None:
        """Make the item of this process, unless the epoch has passed, or ends."""
        table = self._table
        check = table.check_part(
            run.place.key, condition=_MAY_OPEN, deleted=str(RunStatus.DELETED), epoch=item.epoch
        )
        made = table.put_part(
            self._key(run, item),
            new_process_item(number, values),
            condition="attribute_not_exists(pk)",
        )
        await table.transact([made, check], token=self._clock.new_id())

    def _key(self, run: _RunCounters, item: _OwnItem) -> Key:
        assert run.row is not None  # an item has the epoch of a row
        return process_item_key(
            run.place.run_id, run.row.parts, item.epoch, self._worker, item.generation
        )

    async def _go_on_from(self, run: _RunCounters, item: _OwnItem, found: Item) -> _Outcome:
        """Go on after a refusal by the item as found: an earlier try wrote it, or it takes no more
        values."""
        read = _acknowledge(run, item, found)
        if not read.closed:
            return _Outcome.WRITTEN if not run.sent else _Outcome.AGAIN
        if read.folded:
            run.item = _OwnItem(item.epoch, item.generation + 1)
            return _Outcome.AGAIN
        return await self._wait_for_epoch(run, item)

    async def _go_on_without(self, run: _RunCounters, item: _OwnItem) -> _Outcome:
        """Go on after a refusal where there is no item: the run does not admit one, or the item has
        expired."""
        outcome = await self._wait_for_epoch(run, item)
        if outcome is _Outcome.GONE or run.epoch != item.epoch:
            return outcome
        found = await self._table.get(self._key(run, item))
        if found is not None:
            return await self._go_on_from(run, item, found)
        if item.is_open:
            # It may have held what was sent.
            self._leave_to_recount(run, run.sent)
            run.sent, run.item = [], _OwnItem(item.epoch, item.generation + 1)
            return _Outcome.AGAIN
        return outcome

    async def _wait_for_epoch(self, run: _RunCounters, item: _OwnItem) -> _Outcome:
        """Read whether the epoch of an item has passed, or a recount is about to end it."""
        row = await self._records.read_bare(run.place)
        if row is None or row.run.status is RunStatus.DELETED:
            return _Outcome.GONE
        self.observe(row)
        is_counted = bool(row.recounting) and row.counter_epoch == item.epoch
        return _Outcome.BLOCKED if is_counted else _Outcome.AGAIN

    async def _note_samples(self, run: _RunCounters) -> None:
        """Write the items of groups that begin, and the first few failures of each, before they are
        counted."""
        assert run.item is not None
        own, known = run.item.held.groups, _known_groups(run)
        found: dict[str, list[_PendingDelta]] = {}
        for one in run.sent:
            if one.failure is not None and not one.is_noted:
                found.setdefault(one.failure.group_id, []).append(one)

        async def note(group_id: str) -> None:
            failures = [one.failure for one in found[group_id] if one.failure is not None]
            begins = group_id not in own and group_id not in known
            await note_failures(self._table, run.place.run_id, failures, begins=begins)

        def has_room(group_id: str) -> bool:
            counted = max(one[group_id].failed if group_id in one else 0 for one in (own, known))
            if counted:
                return counted < MOST_SAMPLES
            return max(len(own), len(known)) < MOST_GROUPS

        await for_each(note, filter(has_room, found))
        for some in found.values():
            for one in some:
                one.is_noted = True

    async def _let_go(self, run: _RunCounters) -> None:
        """Answer the settlements of a run that is deleted or gone."""
        waiting = [*run.written, *run.sent, *run.pending]
        if any(one.failure is not None for one in waiting):
            # The removal of the run may have come before its samples.
            await remove_group_items(self._table, run.place.run_id)
        _resolve(waiting, Settled(applied=False, run_status=None))
        run.written, run.sent, run.pending, run.item = [], [], [], None
        run.looks.is_due = False

    async def _look(self, run: _RunCounters) -> None:
        """Read the run with its sum, write the status that follows, and answer what was written."""
        looks = run.looks
        looks.is_due = True
        try:
            before = await self._records.read_at(run.place)
            after = None
            if before is not None and before.run.status is not RunStatus.DELETED:
                now = max(run.updated_at, before.run.updated_at)
                after = await self._records.write_late_status(before, now=now)
                if not after.live:
                    after = await self._records.keep_sum(run.place)
        except BaseException:
            _resolve(run.written, Settled(applied=True, run_status=run.status))
            run.written = []
            pause = RETRIES.spread(run.failures + 1, self._clock.random())
            looks.next_at = self._clock.monotonic() + pause
            raise
        if before is None or after is None or after.run.status is RunStatus.DELETED:
            await self._let_go(run)
            return
        self._note_look(run, after)
        written, run.written = run.written, []
        _resolve_in_order(written, before=before.run.status, after=after.run.status)

    def _note_look(self, run: _RunCounters, row: RunRow) -> None:
        """Note the run as it was read with its sum, and put off the next look."""
        self.observe(row)
        looks, now = run.looks, self._clock.monotonic()
        looks.row, looks.ended, looks.has_flushed, looks.is_due = row, 0, False, False
        looks.next_at = now + self._look_apart(run)
        pause = max(looks.refresh_pause, self._look_share(run))
        looks.refresh_at = now + pause * (0.5 + self._clock.random())
        most = max(REFRESH_LAST, self._look_apart(run) * LOOK_APART)
        looks.refresh_pause = min(2 * looks.refresh_pause, most)

    def _look_apart(self, run: _RunCounters) -> float:
        """Return the seconds between two looks at a run."""
        return max(LOOK_APART * self._interval, self._look_share(run))

    def _look_share(self, run: _RunCounters) -> float:
        """Return the seconds between two looks with which those of all processes, each of which
        reads the items of all, fit into each partition."""
        row = run.looks.row
        if row is None:
            return 0.0
        units = ceil(row.item_bytes / (row.parts * READ_UNIT))
        return run.processes * units / LOOK_UNITS

    def _call_for_look(self, run: _RunCounters) -> None:
        """Have this process look at a run: at once as a rule. Many processes that run out of tasks
        at one moment take turns."""
        if not run.looks.is_due and run.processes > MANY_PROCESSES:
            spread = self._clock.random() * self._look_apart(run)
            run.looks.next_at = max(run.looks.next_at, self._clock.monotonic() + spread)
        run.looks.is_due = True

    def _leave_to_recount(self, run: _RunCounters, parts: Sequence[_PendingDelta]) -> None:
        """Leave deltas to a recount, because the last one may or may not have counted their
        rows."""
        run.dropped += parts
        run.recount_due = run.recount_due or bool(parts)

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


def _age(row: RunRow) -> tuple[int, int]:
    """Return what only grows while a run changes: rows may be seen in another order."""
    return row.counter_epoch, row.run.version


def _known_groups(run: _RunCounters) -> Mapping[str, GroupCount]:
    """Return the groups that the run keeps, as far as this process has seen."""
    rows = [one for one in (run.looks.row, run.row) if one is not None]
    return max((one.groups for one in rows), key=len, default={})


def _is_complete(run: _RunCounters) -> bool:
    """Tell whether all tasks have ended by what this process knows alone."""
    seen, row = run.looks.row, run.row
    if seen is None or row is None:
        return False
    return seen.run.stats.completed + run.looks.ended >= row.run.stats.total


def _acknowledge(run: _RunCounters, item: _OwnItem, found: Item) -> ProcessItem:
    """Note which of the deltas sent an item holds, as found."""
    read = read_process_item(found)
    count = item.tries.get(read.number, 0)
    run.written += run.sent[:count]
    run.sent = run.sent[count:]
    item.held, item.is_open = read.values, True
    # Those before it can no longer arrive; a later one still may.
    item.tries = {
        number: carried - count for number, carried in item.tries.items() if number > read.number
    }
    return read


def _resolve(parts: Sequence[_PendingDelta], settled: Settled) -> None:
    for part in parts:
        if not part.answer.done():
            part.answer.set_result(settled)


def _resolve_in_order(
    parts: Sequence[_PendingDelta], *, before: RunStatus, after: RunStatus
) -> None:
    """Answer as if each delta had been counted alone: of those that wait, the last one that ended a
    task changed the status."""
    last = [part for part in parts if part.delta.ends_task and part.is_awaited][-1:]
    _resolve(last, Settled(applied=True, run_status=after))
    _resolve(parts, Settled(applied=True, run_status=before))


def _fail_waiters(run: _RunCounters, error: Exception) -> None:
    """Fail the waiters. What was sent is sent again, because it may not have been written; what is
    written is applied, and only waits for a look."""
    _resolve(run.written, Settled(applied=True, run_status=run.status))
    if not isinstance(error, ConveyorError):
        _log.error("counters cannot be written", exc_info=error)
        error = ConveyorError(ErrorCode.UNAVAILABLE, "counters cannot be written", retry_after=5)
    parts = [*run.dropped, *run.pending, *run.sent]
    run.dropped = []
    for part in parts:
        if not part.answer.done():
            part.answer.set_exception(error)
