"""Counting ended tasks: group commit, one addition at a time to a run's row.

A settlement has moved its row before it comes here. Its part is added with whatever else this
process has settled in the same run meanwhile, and the settlement is answered from the row that the
addition returned. An addition carries this process's next number and the epoch that was known
before its rows moved: a repeated one finds its number on the run's row and changes nothing, one
that a recount may have counted already finds another epoch and is dropped, and the run recounted.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal

import anyio
import msgspec

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import RunStatus, Spend, TaskFailure
from conveyor.ports.tasks import Settled
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.items import met
from conveyor.prod.dynamodb.places import Place
from conveyor.prod.dynamodb.recount import recount_at
from conveyor.prod.dynamodb.run_items import REASON, RunRow, read_run_row
from conveyor.prod.dynamodb.run_records import RunRecords
from conveyor.prod.dynamodb.values import Name, Plain

MOST_REMEMBERED = 10_000
"""Runs whose epoch is remembered."""
PAUSE = 1.0
"""Seconds until what could not be written is tried again, unless something new comes first."""
LONGEST_PAUSE = 30.0
MOST_FAILURES = 16
"""Failures in a row that are counted: the pause has its full length long before."""

_UPDATE = "SET #sequences.#worker = :number, counted_at = :now ADD flushes :one"
_CONDITION = (
    "#status <> :deleted AND counter_epoch = :epoch "
    "AND (attribute_not_exists(#sequences.#worker) OR #sequences.#worker < :number)"
)

_log = logging.getLogger("conveyor.counters")


class Delta(msgspec.Struct, frozen=True):
    """What one settlement adds to its run. `now`: when it was made."""

    now: int
    successful: int = 0
    failed: int = 0
    failure: TaskFailure | None = None
    spend: Spend = Spend()

    @property
    def ends_task(self) -> bool:
        """Whether a task came to its end with it."""
        return self.successful + self.failed > 0


@dataclass(slots=True, eq=False)
class _Waiting:
    """One settlement, and who waits for it."""

    delta: Delta
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

    place: Place
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

    def __init__(self, records: RunRecords, *, worker: str, flush_interval: float) -> None:
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

    def epoch(self, place: Place) -> int | None:
        """The latest epoch seen; None where the run's row has not been seen yet.

        To be taken before a task's row is moved, and given to `add` after that.
        """
        return self._run(place).epoch

    async def add(self, place: Place, delta: Delta, *, epoch: int) -> Settled:
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

    def doubt(self, place: Place) -> None:
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

    def _run(self, place: Place) -> _RunCounters:
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
                    await self._rest(run)
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
        pause = min(LONGEST_PAUSE, PAUSE * 2.0**run.failures) * (0.5 + self._clock.random())
        run.failures = min(run.failures + 1, MOST_FAILURES)
        run.retry_at = self._clock.monotonic() + pause

    async def _rest(self, run: _RunCounters) -> None:
        """Wait until it is time to try again, or for something new."""
        async with anyio.create_task_group() as group:

            async def sleep() -> None:
                await self._clock.sleep(run.retry_at - self._clock.monotonic())
                group.cancel_scope.cancel()

            group.start_soon(sleep)
            await run.wake.wait()
            group.cancel_scope.cancel()

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
            found = met(refused)
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

    async def _write(self, place: Place, addition: _Addition, now: int) -> dict[str, Plain]:
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


def _sum(deltas: Sequence[Delta]) -> dict[str, Plain]:
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
