"""The sweeper: look over the whole store, now and then, for what is stuck, lost or expired.

It corrects the counters of runs that stand still, and sends their lost references again. It removes
queues that outlived their runs, bodies once their results have expired, and rows some days after
that. It may do anything twice, and two workers may do it at once.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from conveyor.aio.concurrency import Remove, Throttle
from conveyor.aio.resilience import log_and_continue
from conveyor.domain.ids import made_at
from conveyor.domain.model import JobStatus
from conveyor.domain.states import LIVE_RUN_STATES
from conveyor.ports.blobs import BlobPurge, Blobs
from conveyor.ports.clock import Clock
from conveyor.ports.deliveries import DeliveryUpkeep
from conveyor.ports.maintenance import (
    DuePosition,
    EndedRun,
    ExportUpkeep,
    InputExpiry,
    QuietRun,
    RunTombstones,
    StuckIngests,
    Sweeping,
)
from conveyor.ports.queues import (
    CONTROL_QUEUE,
    DeleteMessage,
    ExportMessage,
    Queues,
    Signals,
    ingest_message,
    run_queues,
)
from conveyor.ports.records import JobLookup
from conveyor.ports.schedules import FireUpkeep
from conveyor.records.blob_keys import (
    BODIES_A_STEP,
    LIFECYCLE_DAYS,
    TEMPLATES,
    bodies_below,
    export_key,
    input_key,
    run_prefix,
    template_list_prefix,
    template_lists,
)
from conveyor.records.task_sending import TaskSender


class RecentlyDone:
    """Remember what was done within the last `seconds`, so that a sweep does not do it again.

    The memory goes with the process, because doing it twice is harmless.
    """

    def __init__(self, clock: Clock, *, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._done: dict[str, float] = {}

    def first(self, key: str) -> bool:
        """Return whether a thing was not done recently, and count it as done from now on."""
        now = self._clock.monotonic()
        for old in [key for key, at in self._done.items() if now - at >= self._seconds]:
            del self._done[old]
        if key in self._done:
            return False
        self._done[key] = now
        return True


PIECE = 1_000
"""References read and sent at a time."""
PIECES = 100
"""Pieces sent for one run in one sweep; the next sweep goes on."""

_BEFORE_ALL = -1


class QuietRuns:
    """Look after runs in which nothing has moved for `quiet_after` seconds.

    Sending a reference a second time is harmless, because its claim shows whether work is left.
    Still, a run's references are not sent while its queue holds as many, nor twice within
    `quiet_after`.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        sweeping: Sweeping,
        queues: Queues,
        signals: Signals,
        sender: TaskSender,
        quiet_after: float,
    ) -> None:
        self._clock = clock
        self._sweeping = sweeping
        self._queues = queues
        self._signals = signals
        self._sender = sender
        self._quiet_after = quiet_after
        self._recently = RecentlyDone(clock, seconds=quiet_after)
        self._onward: dict[str, tuple[QuietRun, int]] = {}
        self._reached = ""

    async def look(self, *, until: float) -> None:
        """Go on where the last sweep reached its bound, then look at every quiet run, by id.

        End soon after the monotonic instant `until`; the next look goes on behind the last run.
        """
        for run, after in list(self._onward.values()):
            send = partial(self._send, run, after=after, until=until)
            await log_and_continue(_log, "sweeping a quiet run failed", send)
            if self._clock.monotonic() >= until:
                break
        before = self._clock.now() - round(self._quiet_after * 1_000)
        runs = await self._sweeping.quiet_runs(before=before)
        for run in sorted(runs, key=lambda run: (run.run_id <= self._reached, run.run_id)):
            if self._recently.first(run.run_id):
                await log_and_continue(
                    _log, "sweeping a quiet run failed", partial(self._set_right, run, until=until)
                )
                if self._clock.monotonic() >= until:
                    self._reached = run.run_id
                    return
        self._reached = ""

    async def _set_right(self, run: QuietRun, *, until: float) -> None:
        status = await self._sweeping.reconcile_run(run.run_id, now=self._clock.now())
        if status is None:
            return
        if status not in LIVE_RUN_STATES:
            await self._queues.drop_run(run.run_id)
            self._signals.run_ended(run.run_id)
            return
        due = await self._due(run.run_id, after=_BEFORE_ALL)
        waiting = 0
        for queue in run_queues(run.run_id, run.hosts):
            waiting += await self._queues.count(queue)
            if waiting >= len(due):
                return
        await self._send(run, after=_BEFORE_ALL, until=until)

    async def _send(self, run: QuietRun, *, after: int, until: float) -> None:
        """Send the references above `after`, up to a bound, and remember the last one."""
        for _ in range(PIECES):
            due = await self._due(run.run_id, after=after)
            if due:
                await self._sender.send(
                    run.job_id, run.run_id, due, politeness=run.politeness, lanes=run.hosts
                )
                after = due[-1][0]
            if len(due) < PIECE:
                self._onward.pop(run.run_id, None)
                break
            self._onward[run.run_id] = run, after
            if self._clock.monotonic() >= until:
                break
        self._signals.run_changed(run.run_id)

    async def _due(self, run_id: str, *, after: int) -> list[tuple[int, str]]:
        now = self._clock.now()
        return await self._sweeping.due_references(run_id, after=after, limit=PIECE, now=now)


INTERVAL = 3_600.0
"""Seconds between two looks at the ended runs."""
BUDGET = 30.0
"""Seconds after which a look lets the rest of the sweep go first; the next sweep goes on."""
_DAY = 86_400_000


class Retention:
    """Remove expired things of runs that have ended.

    A worker drops a run's queue once the run has ended; if it died just then, the queue is removed
    here, once. A result expires `result_ttl_days` after its scrape. A run's bodies are removed that
    long after its end, when the last of them has expired. `row_days` 0 keeps the rows.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        sweeping: Sweeping,
        blobs: BlobPurge,
        queues: Queues,
        row_days: int,
    ) -> None:
        self._clock = clock
        self._sweeping = sweeping
        self._blobs = blobs
        self._queues = queues
        self._pace = Throttle(clock)
        self._row_days = row_days
        self._looked_at: int | None = None
        self._after: DuePosition | None = None
        self._rests_until = 0.0

    async def look(self, *, until: float) -> None:
        """Look at the ended runs for which something is due, the longest due first, if the last
        look was long enough ago; or go on with an unfinished look.

        End soon after the monotonic instant `until`, or after its own budget, in the middle of a
        run if need be, but after at least one step of removal.
        """
        now = self._clock.monotonic()
        if now < self._rests_until or not (self._after or self._is_due()):
            return
        until = min(until, now + BUDGET)
        while True:
            runs = await self._sweeping.ended_runs(
                now=self._clock.now(), row_days=self._row_days, after=self._after, limit=PAGE
            )
            for run in runs:
                if not await self._age(run, until=until):
                    return
                self._after = DuePosition(run.due_at, run.run_id)
                if self._clock.monotonic() >= until:
                    return
            if len(runs) < PAGE:
                self._after = None
                self._looked_at = self._clock.now()
                return

    def _is_due(self) -> bool:
        """Return whether a look is due by wall time, as expiry is: also after the clock was set."""
        if self._looked_at is None:
            return True
        return not 0 <= self._clock.now() - self._looked_at < INTERVAL * 1_000

    async def _age(self, run: EndedRun, *, until: float) -> bool:
        """Remove what is due of a run; return False if the time was over before that."""
        if not run.queue_dropped:
            drop = partial(self._drop_queue, run.run_id)
            await log_and_continue(_log, "dropping the queue of an ended run failed", drop)
        expired_for = self._clock.now() - run.ended_at - run.result_ttl_days * _DAY
        if expired_for < 0:
            return True
        if not run.swept:
            for days in LIFECYCLE_DAYS:
                prefix = run_prefix(run.job_id, run.run_id, days)
                if not await self._remove(bodies_below(self._blobs, prefix), until=until):
                    return False
            await self._sweeping.mark_swept(run.run_id)
        if self._row_days and expired_for >= self._row_days * _DAY:
            now = self._clock.now()
            for run_id in await self._sweeping.expire_run(run.run_id, now=now):
                message = DeleteMessage(run.job_id, run_id)
                await self._queues.send(CONTROL_QUEUE, message)
        return True

    async def _drop_queue(self, run_id: str) -> None:
        await self._queues.drop_run(run_id)
        await self._sweeping.mark_queue_dropped(run_id)

    async def _remove(self, remove: Remove, *, until: float) -> bool:
        """Remove step by step; return False if the time was over first. A rest that does not end in
        time is left to the next look, which begins no step before it has passed."""
        while (rest := await self._pace.step_without_rest(remove, BODIES_A_STEP)) is not None:
            self._rests_until = self._clock.monotonic() + rest
            if self._rests_until >= until:
                return False
            await self._clock.sleep(rest)
        return True


TEMPLATES_INTERVAL = 3_600.0
"""Seconds between two looks at every template."""
TEMPLATE_KEYS = 1_000
"""Keys of chunks read at a time."""
STAGED_FOR = _DAY
"""Milliseconds after its id was made at which the list of a submit is finished or given up."""


class Templates:
    """Remove lists of scheduled jobs that nothing leads to any more: no rule of a store does.

    An api that dies while it stages a list leaves it behind. One that dies while it deletes a job
    which never had a run leaves list and tombstone.
    """

    def __init__(self, clock: Clock, *, jobs: JobLookup, blobs: BlobPurge, queues: Queues) -> None:
        self._clock = clock
        self._jobs = jobs
        self._blobs = blobs
        self._queues = queues
        self._due_at = 0.0
        self._after = ""

    async def look(self, *, until: float) -> None:
        """Look at the lists, by key, if that is due; or go on with an unfinished look. End soon
        after the monotonic instant `until`."""
        if not self._after and self._clock.monotonic() < self._due_at:
            return
        while True:
            keys = await self._blobs.list_keys(TEMPLATES, after=self._after, limit=TEMPLATE_KEYS)
            for job_id, list_id in template_lists(keys):
                await self._check(job_id, list_id)
            if len(keys) < TEMPLATE_KEYS:
                self._after = ""
                self._due_at = self._clock.monotonic() + TEMPLATES_INTERVAL
                return
            self._after = keys[-1]
            if self._clock.monotonic() >= until:
                return

    async def _check(self, job_id: str, list_id: str) -> None:
        job = await self._jobs.find_job(job_id)
        if job is not None and job.status is JobStatus.DELETED:
            # Its runs may be under way; the template may go before them.
            await self._queues.send(CONTROL_QUEUE, DeleteMessage(job_id, job_id))
            return
        kept = None if job is None or job.scheduling is None else job.scheduling.template.list_id
        if list_id != kept and self._clock.now() - made_at(list_id) > STAGED_FOR:
            await self._blobs.delete_prefix(template_list_prefix(job_id, list_id))


CLAIM_SHARE = 0.8
"""Share of the interval for which a claimed sweep keeps other workers from theirs: less than any
interval with its jitter, so that a worker never blocks itself."""
LEAST = 1.0
"""Least seconds for each part of a sweep, whatever the others took of the claim."""
DELETE_PATIENCE = 4
"""Quiet periods after which an untouched tombstone's delete message is sent again."""
PAGE = 100

_log = logging.getLogger("conveyor.handlers")


class SweepOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the sweeper, in seconds and days."""

    interval: float
    quiet_after: float
    row_retention_days: int
    delivery_retention_days: int
    fire_retention_days: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPorts:
    """The roles that a sweeper uses."""

    sweeping: Sweeping
    ingestion: StuckIngests
    exports: ExportUpkeep
    inputs: InputExpiry
    deliveries: DeliveryUpkeep
    schedules: FireUpkeep
    jobs: JobLookup
    runs: RunTombstones
    blobs: Blobs
    queues: Queues
    signals: Signals
    sender: TaskSender


class Sweeper:
    """Sweep the whole store once a call; one worker of a fleet does so at a time."""

    def __init__(self, ports: SweepPorts, clock: Clock, *, options: SweepOptions) -> None:
        self._ports = ports
        self._clock = clock
        self._options = options
        self._recently = RecentlyDone(clock, seconds=options.quiet_after)
        self._claimed_until = 0.0
        self._quiet_runs = QuietRuns(
            clock,
            sweeping=ports.sweeping,
            queues=ports.queues,
            signals=ports.signals,
            sender=ports.sender,
            quiet_after=options.quiet_after,
        )
        self._retention = Retention(
            clock,
            sweeping=ports.sweeping,
            blobs=ports.blobs,
            queues=ports.queues,
            row_days=options.row_retention_days,
        )
        self._templates = Templates(clock, jobs=ports.jobs, blobs=ports.blobs, queues=ports.queues)

    async def sweep(self) -> None:
        """Sweep once. A part that fails is logged and left to the next sweep; the others are done.

        Long parts end with the claim; the next worker that sweeps, or this one, goes on.
        """
        now = self._clock.now()
        lasts = self._options.interval * CLAIM_SHARE
        self._claimed_until = self._clock.monotonic() + lasts
        lapses_at = now + round(lasts * 1_000)
        if not await self._ports.sweeping.claim_sweep(now=now, lapses_at=lapses_at):
            return
        await log_and_continue(_log, "sweeping unfinished writes failed", self._unfinished_writes)
        await log_and_continue(_log, "sweeping stuck ingestions failed", self._ingestions)
        await log_and_continue(_log, "sweeping unfinished exports failed", self._exports)
        await log_and_continue(
            _log, "sweeping quiet runs failed", partial(self._quiet_runs.look, until=self._until)
        )
        await log_and_continue(_log, "sweeping unfinished deletions failed", self._deletions)
        await log_and_continue(
            _log, "sweeping expired inputs failed", partial(self._expired_inputs, until=self._until)
        )
        await log_and_continue(
            _log,
            "sweeping expired exports failed",
            partial(self._expired_exports, until=self._until),
        )
        await log_and_continue(
            _log, "sweeping old deliveries failed", partial(self._old_deliveries, until=self._until)
        )
        await log_and_continue(
            _log, "sweeping old fires failed", partial(self._old_fires, until=self._until)
        )
        await log_and_continue(
            _log, "sweeping templates failed", partial(self._templates.look, until=self._until)
        )
        await log_and_continue(
            _log,
            "sweeping expired results failed",
            partial(self._retention.look, until=self._until),
        )

    @property
    def _until(self) -> float:
        """The end of a part that begins now, by the monotonic clock."""
        return max(self._claimed_until, self._clock.monotonic() + LEAST)

    @property
    def _quiet_since(self) -> int:
        return self._clock.now() - round(self._options.quiet_after * 1_000)

    async def _unfinished_writes(self) -> None:
        if count := await self._ports.sweeping.tidy(now=self._clock.now()):
            _log.warning("removed %d leftovers of interrupted writes", count)

    async def _ingestions(self) -> None:
        stuck = await self._ports.ingestion.stuck_ingests(before=self._quiet_since)
        for job_id, run_id, template in stuck:
            if self._recently.first(f"ingest {run_id}"):
                message = ingest_message(job_id, run_id, template=template)
                await self._ports.queues.send(CONTROL_QUEUE, message)

    async def _exports(self) -> None:
        """Send exports that nobody touches: a worker touches one while it makes it or lets it
        wait."""
        exports = self._ports.exports
        for export in await exports.unfinished_exports(before=self._quiet_since):
            await exports.touch_export(export.export_id, now=self._clock.now())
            message = ExportMessage(export.job_id, export.run_id, export.export_id)
            await self._ports.queues.send(CONTROL_QUEUE, message)

    async def _deletions(self) -> None:
        """Send deletions whose tombstones nobody touches: a worker that scrubs a run does so."""
        now = self._clock.now()
        before = now - round(DELETE_PATIENCE * self._options.quiet_after * 1_000)
        for job_id, run_id in await self._ports.runs.deleted_runs(before=before):
            # Touch first, so that only one worker sends a message, even if sending fails.
            await self._ports.runs.touch_tombstone(run_id, now=now)
            await self._ports.queues.send(CONTROL_QUEUE, DeleteMessage(job_id, run_id))

    async def _expired_inputs(self, *, until: float) -> None:
        page = partial(self._ports.inputs.expired_inputs, now=self._clock.now(), limit=PAGE)
        while expired := await page():
            for input_id in expired:
                await self._ports.blobs.delete(input_key(input_id))
                await self._ports.inputs.drop_input(input_id)
                if self._clock.monotonic() >= until:
                    return

    async def _expired_exports(self, *, until: float) -> None:
        page = partial(self._ports.exports.expired_exports, now=self._clock.now(), limit=PAGE)
        while expired := await page():
            for export in expired:
                key = export_key(export.job_id, export.run_id, export.export_id)
                await self._ports.blobs.delete(key)
                await self._ports.exports.drop_export(export.export_id)
                if self._clock.monotonic() >= until:
                    return

    async def _old_deliveries(self, *, until: float) -> None:
        before = self._clock.now() - self._options.delivery_retention_days * _DAY
        drop = partial(self._ports.deliveries.drop_old_deliveries, before=before, limit=PAGE)
        await self._in_pages(drop, until=until)

    async def _old_fires(self, *, until: float) -> None:
        before = self._clock.now() - self._options.fire_retention_days * _DAY
        drop = partial(self._ports.schedules.drop_old_fires, before=before, limit=PAGE)
        await self._in_pages(drop, until=until)

    async def _in_pages(self, drop: Callable[[], Awaitable[int]], *, until: float) -> None:
        """Drop page after page, until one is not full or the time is over."""
        while await drop() == PAGE and self._clock.monotonic() < until:
            pass
