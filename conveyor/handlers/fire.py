"""Fire the scheduled jobs that are due: make runs of their templates, and note what passes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

import msgspec
from msgspec import structs

from conveyor.aio.concurrency import for_each
from conveyor.aio.resilience import log_and_continue, log_failure
from conveyor.domain.api_keys import NONCE_LENGTH, KeySealer, UnsealError
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.fires import FireDecision, FireLook, decide_fires, with_present_zones
from conveyor.domain.model import Job
from conveyor.domain.schedule import ZONES_VERSION
from conveyor.domain.scheduling import SkipReason
from conveyor.domain.states import LIVE_RUN_STATES
from conveyor.ports.clock import Clock
from conveyor.ports.queues import CONTROL_QUEUE, Queues, Signals, TemplateMessage
from conveyor.ports.records import JobReader, RunLookup
from conveyor.ports.schedules import ScheduleChange, Schedules
from conveyor.ports.tracing import NO_TRACER, Tracer
from conveyor.records.quotas import ActiveJobQuota

PAGE = 100
"""Schedules read at a time; a look goes on while there are as many."""
RENEWED_PAGE = 1_000
"""Schedules read at a time to compute next fires anew. A store may read its whole index for each
page."""
SIDE_BY_SIDE = 10
"""Schedules decided about at a time."""
PUT_OFF = 300.0
"""Seconds for which a schedule is left alone after nothing could be decided about it: however many
there are of that kind, others come in between."""
FAILED = "failed"
"""The outcome of a look at a schedule about which nothing could be decided."""

_log = logging.getLogger("conveyor.handlers")


class SchedulerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a scheduler: seconds between looks, seconds that a fire may be late, and the
    most unfinished jobs of a caller (0: no limit)."""

    interval: float
    catch_up: float
    max_active_jobs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerPorts:
    """The roles that a scheduler uses; `sealer` opens callers' keys and seals them anew."""

    schedules: Schedules
    jobs: JobReader
    runs: RunLookup
    queues: Queues
    signals: Signals
    sealer: KeySealer
    tracer: Tracer = NO_TRACER


class Scheduler:
    """Fire schedules. Any number of workers may do so at once: a fire is one conditional step.

    `outcomes` counts the fires by outcome, and `late` is how many seconds after its time the latest
    one made its run, for metrics.
    """

    def __init__(self, ports: SchedulerPorts, clock: Clock, *, options: SchedulerOptions) -> None:
        self._ports = ports
        self._clock = clock
        self._options = options
        self._quota = ActiveJobQuota(ports.jobs, limit=options.max_active_jobs)
        self._renewed_to: str | None = ""
        self.outcomes: dict[str, int] = {}
        self.late = 0.0

    async def fire(self) -> None:
        """Decide about every schedule that is due. One that fails is logged and left to a later
        look; the others are fired."""
        if self._renewed_to is not None:
            await self._renew(self._renewed_to)
        before: list[str] = []
        while True:
            now = self._clock.now()
            due = await self._ports.schedules.due_schedules(now=now, limit=PAGE)
            await for_each(self._alone, due, limit=SIDE_BY_SIDE)
            job_ids = [job.job_id for job in due]
            if len(due) < PAGE or job_ids == before:
                return
            before = job_ids

    async def _renew(self, after: str) -> None:
        """Compute the next fires anew that were computed by other zone rules, once in the life of a
        process: new rules may want one earlier than its look would come."""
        while True:
            jobs = await self._ports.schedules.list_schedules(after=after, limit=RENEWED_PAGE)
            for job in jobs:
                name = f"computing the next fire of job {job.job_id} failed"
                await log_and_continue(_log, name, partial(self._renew_one, job))
                self._renewed_to = after = job.job_id
            if len(jobs) < RENEWED_PAGE:
                self._renewed_to = None
                return

    async def _renew_one(self, job: Job) -> None:
        assert job.scheduling is not None
        if job.scheduling.zones_version == ZONES_VERSION:
            return
        scheduling = with_present_zones(job.scheduling)
        after = structs.replace(job, scheduling=scheduling, version=job.version + 1)
        # Whoever was quicker has computed it as well, or a later look does.
        await self._ports.schedules.change_schedule(ScheduleChange(before=job, after=after))

    async def _alone(self, job: Job) -> None:
        failed = f"firing job {job.job_id} failed"
        try:
            await self._decide(job)
        except ConveyorError as error:
            # The store is away, or busy: the next look comes soon enough.
            self._count(FAILED, 1)
            log_failure(_log, failed, error)
        except Exception as error:
            self._count(FAILED, 1)
            log_failure(_log, failed, error)
            _warn(job.job_id, FAILED, 1)
            await log_and_continue(_log, failed, partial(self._put_off, job))

    async def _decide(self, job: Job) -> None:
        ports = self._ports
        run = await ports.runs.get_run(job.caller, job.job_id, None)
        newest = await ports.schedules.list_fires(job.job_id, before=None, limit=1)
        look = FireLook(
            now=self._clock.now(),
            is_live=run is not None and run.status in LIVE_RUN_STATES,
            newest=newest[0] if newest else None,
            run_id=self._clock.new_id(),
            fire_id=self._clock.new_id(),
            catch_up=round(self._options.catch_up * 1_000),
            interval=round(self._options.interval * 1_000),
        )
        decision = decide_fires(job, look)
        sealed_key = self._seal_anew(job)
        if decision.run is not None and sealed_key is None:
            decision = decide_fires(job, look, refused=SkipReason.KEY_UNREADABLE)
        sealed_key = sealed_key or job.sealed_key
        if decision.run is None:
            await self._write(job, decision, sealed_key, look.now)
            return
        try:
            async with self._quota.room_for_one(job.caller):
                await self._write(job, decision, sealed_key, look.now)
        except ConveyorError as error:
            if error.code is not ErrorCode.QUOTA_EXCEEDED:
                raise
            decision = decide_fires(job, look, refused=SkipReason.QUOTA_EXCEEDED)
            await self._write(job, decision, sealed_key, look.now)

    async def _write(self, job: Job, decision: FireDecision, sealed_key: bytes, now: int) -> None:
        """Make the step, unless another write of the job came first."""
        after = structs.replace(decision.after, sealed_key=sealed_key)
        run, trace = decision.run, None
        if run is not None:
            trace = self._ports.tracer.begin_always("fire", started_at=now)
            run = structs.replace(run, traceparent=trace.traceparent if trace else None)
        change = ScheduleChange(before=job, after=after, run=run, fires=decision.fires)
        if await self._ports.schedules.change_schedule(change):
            await self._tell(decision, now)
            if run is not None and trace is not None:
                trace.end(self._clock.now(), {"job_id": job.job_id, "run_id": run.run_id})

    def _seal_anew(self, job: Job) -> bytes | None:
        """Seal the caller's key under the first secret, so that older ones can be dropped; return
        None if no secret opens it."""
        try:
            api_key = self._ports.sealer.unseal(job)
        except UnsealError:
            return None
        nonce = self._clock.token(NONCE_LENGTH)
        return self._ports.sealer.seal(api_key, caller=job.caller, nonce=nonce)

    async def _tell(self, decision: FireDecision, now: int) -> None:
        """Count the fires, and have the rows of the run written."""
        job_id, run = decision.after.job_id, decision.run
        for outcome, count in decision.outcomes.items():
            self._count(outcome, count)
        for outcome, count in decision.lost.items():
            _warn(job_id, outcome, count)
        if run is None or decision.started is None:
            return
        self.late = max(0, now - decision.started.instant) / 1_000
        # If the message is lost, the sweeper finds an ingestion that does not move.
        send = partial(self._ports.queues.send, CONTROL_QUEUE, TemplateMessage(job_id, run.run_id))
        await log_and_continue(_log, f"sending for the rows of run {run.run_id} failed", send)
        self._ports.signals.run_changed(run.run_id)

    async def _put_off(self, job: Job) -> None:
        assert job.scheduling is not None
        look_at = self._clock.now() + round(PUT_OFF * 1_000)
        scheduling = structs.replace(job.scheduling, look_at=look_at)
        after = structs.replace(job, scheduling=scheduling, version=job.version + 1)
        await self._ports.schedules.change_schedule(ScheduleChange(before=job, after=after))

    def _count(self, outcome: str, count: int) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + count


def _warn(job_id: str, reason: str, count: int) -> None:
    """Log what an alarm counts."""
    fields = {"job_id": job_id, "reason": str(reason), "count": count}
    _log.warning("fires made no run", extra=fields)
