"""Read what pages show: of one caller, or of all callers where `caller` is None.

A page reads a bounded number of rows, whatever the store holds: its lists have cursors, and a
filtered list of jobs looks through MOST_LOOKED jobs at most.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
from cachetools import LRUCache
from msgspec import UNSET, UnsetType

from conveyor.aio.resilience import log_and_continue
from conveyor.domain import params
from conveyor.domain.deliveries import DeliveryStatus
from conveyor.domain.errors import not_found
from conveyor.domain.fires import with_known_zones
from conveyor.domain.model import Job, JobView, Run, RunStatus, Task
from conveyor.domain.run_waits import FLEET_PAUSED, Crew, RunWaitReason, WorkerReport
from conveyor.domain.states import LIVE_RUN_STATES
from conveyor.domain.text_rules import rfc3339
from conveyor.ports.records import RunPosition
from conveyor.service.context import Context
from conveyor.service.deliveries import DeliveryQueries
from conveyor.service.exports import RunExports
from conveyor.service.failures import Failures, parse_groups
from conveyor.service.hosts import HostQueries
from conveyor.service.links import LinkSigner
from conveyor.service.page_schemas import (
    DeliveriesShown,
    JobLine,
    JobPage,
    JobsFound,
    LaneLine,
    OverviewPage,
    Preview,
    ResultsShown,
    RunPace,
    RunPage,
    RunsOfAll,
    ScheduleLine,
    SchedulePage,
    SchedulesPage,
    TaskDetails,
    Trouble,
    WorkerLine,
    WorkersPage,
)
from conveyor.service.responses import next_run, run_body, schedule_body, state_word
from conveyor.service.results import FILTERS, Cursors, Results, bad_cursor
from conveyor.service.schedules import JobSchedules
from conveyor.service.schemas import (
    DeliveriesPage,
    HostBody,
    LoggedDeliveryBody,
    ProblemBody,
    RunBody,
    present,
)
from conveyor.service.waiting import Waits

PAGE = 50
LIVE_SHOWN = 25
LIVE_LOOKED = 200
"""Live runs that an overview looks through at most, for their pace and troubles."""
ENDED_SHOWN = 10
TROUBLES_SHOWN = 25
MOST_LOOKED = 1_000
_BATCH = 100
MOST_PREVIEWED = 65_536
MOST_IMAGE = 1_048_576
RUNS_SHOWN = 20
HOSTS_SHOWN = 10
"""Hosts that hold a run back on its page."""
ROWS_READ = 200
"""Rows that a filtered page of results reads at most; then it is short, and goes on. So many are
read too for the hosts that hold a run back."""
_WITHOUT_RUN = "schedule."
"""Begins the places of scheduled jobs in a list of all callers' jobs."""
_SEEN = 2_000
"""Runs whose pace is remembered."""
STATES = (*(s.value for s in RunStatus if s is not RunStatus.DELETED), "paused")
"""The states of latest runs that a list of jobs can be filtered by."""
MASKED = "…"
"""The value shown of each custom header: it may be a password."""
FAILING_SHARE = 0.1
"""Share of failed tasks from which a live run counts as trouble, once it has FAILING_COUNT."""
FAILING_COUNT = 10
RECENT = 86_400_000
PACE_WINDOW = 300_000
PACE_STEP = 5_000
"""Milliseconds over which a pace is measured, and between two of its samples."""

_log = logging.getLogger("conveyor.service")


class JobSearch(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs to list: by the state of their latest run, type, beginning of the name and external
    id."""

    state: str | None = None
    job_type: str | None = None
    name: str | None = None
    external_id: str | None = None

    @property
    def is_filtered(self) -> bool:
        """Tell whether any job could be left out."""
        return self != JobSearch()

    def takes(self, view: JobView) -> bool:
        """Tell whether a job is to be listed."""
        job = view.job
        return (
            (self.state is None or self.state == _state(view.latest_run))
            and (self.job_type is None or self.job_type == _job_type(job))
            and (self.name is None or (job.name or "").startswith(self.name))
            and (self.external_id is None or job.external_id == self.external_id)
        )


class Paces:
    """The pace of runs, by what readers saw of them before: the store keeps no history of counts.

    A run that nobody looked at yet has the pace of its whole life.
    """

    def __init__(self) -> None:
        self._seen: LRUCache[str, deque[tuple[int, int]]] = LRUCache(maxsize=_SEEN)

    def of(self, run: Run, now: int) -> RunPace | None:
        """Note what a live run has done by `now`, and return its pace."""
        if run.status not in LIVE_RUN_STATES:
            return None
        done = run.stats.completed - run.stats.inherited
        seen = self._seen.setdefault(run.run_id, deque([(run.created_at, 0)]))
        while len(seen) > 1 and now - seen[1][0] >= PACE_WINDOW:
            seen.popleft()
        since, before = seen[0]
        if now - seen[-1][0] >= PACE_STEP:
            seen.append((now, done))
        if now <= since:
            return None
        return RunPace(max(0, done - before) * 1_000 / (now - since), (now - since) // 1_000)


class Overviews:
    """Reads pages."""

    def __init__(
        self,
        context: Context,
        cursors: Cursors,
        *,
        links: LinkSigner,
        failures: Failures,
        deliveries: DeliveryQueries,
        schedules: JobSchedules,
        exports: RunExports,
    ) -> None:
        self._context = context
        self._cursors = cursors
        self._results = Results(context, cursors, links, least_read=ROWS_READ)
        self._hosts = HostQueries(context)
        self._failures = failures
        self._deliveries = deliveries
        self._schedules = schedules
        self._exports = exports
        self._paces = Paces()

    async def owner(self, caller: str | None, job_id: str) -> str:
        """Return the caller under whom a job is read: `caller`, or where that is None the job's
        own. Raises ConveyorError(not_found)."""
        if caller is not None:
            return caller
        job = await self._context.jobs.find_job(job_id)
        if job is None:
            raise not_found("job")
        return job.caller

    # -- lists --

    async def overview(self, caller: str | None) -> OverviewPage:
        """Return what works, what ended last and what is wrong."""
        runs = self._context.runs
        found = await runs.changed_runs(caller, before=None, limit=LIVE_LOOKED + 1, live=True)
        live = [(one.job, one.run) for one in found[:LIVE_LOOKED]]
        latest = await runs.changed_runs(caller, before=None, limit=ENDED_SHOWN, live=False)
        ended = [(one.job, one.run) for one in latest]
        reports = await self._context.workers.all()
        waits = await self._waits()
        lines = [self._line(job, run, waits) for job, run in live]
        own = None if caller is None else {run.run_id for _, run in live}
        now = self._context.clock.now()
        silent = [report for report in reports if report.is_silent(now)]
        paces = [line.pace for line in lines if line.pace]
        crew = Crew(reports, heard_at=now, heartbeat=0.0)
        troubles = self._troubles(live, ended, silent, crew.paused_since(now))
        return OverviewPage(
            at=rfc3339(now),
            live=lines[:LIVE_SHOWN],
            looked=len(live),
            is_cut=len(found) > LIVE_LOOKED,
            ended=[self._line(job, run, waits) for job, run in ended],
            troubles=troubles[:TROUBLES_SHOWN],
            more_troubles=len(troubles[TROUBLES_SHOWN:]),
            tasks_per_second=round(sum(pace.per_second for pace in paces), 2),
            calls_in_flight=_in_flight(reports, own),
            slots=sum(report.slots for report in reports),
            workers=len(reports) - len(silent),
            silent_workers=len(silent),
            oldest_waiting=min(
                (line for line in lines if line.run and line.run.waiting),
                key=_waiting_since,
                default=UNSET,
            ),
        )

    async def jobs(
        self, caller: str | None, wanted: JobSearch, *, cursor: str | None, limit: int = PAGE
    ) -> JobsFound:
        """Return the next jobs that `wanted` takes, and look through MOST_LOOKED at most.

        A caller's jobs come newest first; those of all callers by the latest change of a run, and
        then scheduled jobs that never ran. Raises
        ConveyorError(invalid_argument) for a bad cursor.
        """
        scope = f"dashboard:jobs:{caller}:{_digest(wanted)}"
        place = None if cursor is None else self._cursors.decode(cursor, scope=scope)
        batch = _BATCH if wanted.is_filtered else limit
        views = self._of_all(place, batch) if caller is None else self._of(caller, place, batch)
        found: list[JobView] = []
        looked, goes_on = 0, False
        async with aclosing(views):
            async for view, reached in views:
                if len(found) == limit or looked == MOST_LOOKED:
                    goes_on = True
                    break
                looked, place = looked + 1, reached
                if view is not None and wanted.takes(view):
                    found.append(view)
        following = None
        if goes_on and place is not None:
            following = self._cursors.encode(place, scope=scope)
        waits = await self._waits()
        return JobsFound(
            jobs=[self._line(view.job, view.latest_run, waits) for view in found],
            looked=looked,
            next_cursor=present(following),
        )

    async def _of(
        self, caller: str, before: str | None, batch: int
    ) -> AsyncGenerator[tuple[JobView | None, str], None]:
        while True:
            views = await self._context.jobs.list_jobs(
                caller, status=None, before=before, limit=batch + 1
            )
            for view in views:
                before = view.job.job_id
                yield view, before
            if len(views) <= batch:
                return

    async def _of_all(
        self, place: str | None, batch: int
    ) -> AsyncGenerator[tuple[JobView | None, str], None]:
        """Yield jobs at the places of their latest runs, then scheduled jobs that never ran; None
        at the places of earlier runs, and of scheduled jobs that were there before."""
        place = place or ""
        if not place.startswith(_WITHOUT_RUN):
            async for one in self._with_runs(place, batch):
                yield one
        after = place.removeprefix(_WITHOUT_RUN) if place.startswith(_WITHOUT_RUN) else ""
        while True:
            jobs = await self._context.schedules.list_schedules(after=after, limit=batch + 1)
            for job in jobs:
                after = job.job_id
                view = JobView(job, None) if job.latest_run_id is None else None
                yield view, f"{_WITHOUT_RUN}{after}"
            if len(jobs) <= batch:
                return

    async def _with_runs(
        self, place: str, batch: int
    ) -> AsyncGenerator[tuple[JobView | None, str], None]:
        before = _position(place) if place else None
        while True:
            found = await self._context.runs.changed_runs(None, before=before, limit=batch + 1)
            for one in found:
                before = one.position
                is_latest = one.job.latest_run_id == one.run.run_id
                yield (
                    JobView(one.job, one.run) if is_latest else None,
                    _place(before),
                )
            if len(found) <= batch:
                return

    async def all_runs(self) -> RunsOfAll:
        """Return the runs of all callers that have work left, and those that changed last."""
        waits = await self._waits()
        busy: list[JobLine] = []
        before, more = None, True
        while more and len(busy) < PAGE:
            found = await self._context.runs.changed_runs(
                None, before=before, limit=_BATCH, live=True
            )
            more = len(found) == _BATCH
            for one in found:
                before = one.position
                if one.run.status is RunStatus.RUNNING:
                    busy.append(self._line(one.job, one.run, waits))
        latest = await self._context.runs.changed_runs(None, before=None, limit=RUNS_SHOWN)
        return RunsOfAll(
            busy=busy[:PAGE], latest=[self._line(one.job, one.run, waits) for one in latest]
        )

    async def schedules(self, caller: str | None, *, cursor: str | None) -> SchedulesPage:
        """Return a page of scheduled jobs. Raises ConveyorError(invalid_argument) for a bad
        cursor."""
        scope = f"dashboard:schedules:{caller}"
        place = None if cursor is None else self._cursors.decode(cursor, scope=scope)
        if caller is None:
            jobs = await self._context.schedules.list_schedules(after=place or "", limit=PAGE + 1)
            views = [JobView(job, None) for job in jobs]
        else:
            views = await self._context.jobs.list_jobs(
                caller, status=None, before=place, limit=PAGE + 1, scheduled=True
            )
        following = None
        if len(views) > PAGE:
            following = self._cursors.encode(views[PAGE - 1].job.job_id, scope=scope)
        waits = await self._waits()
        lines = [line for view in views[:PAGE] if (line := self._schedule_line(view, waits))]
        return SchedulesPage(lines, present(following))

    def _schedule_line(self, view: JobView, waits: Waits) -> ScheduleLine | None:
        if view.job.scheduling is None:
            return None
        plan = with_known_zones(view.job.scheduling)
        return ScheduleLine(
            job=self._line(view.job, view.latest_run, waits),
            schedule=schedule_body(plan),
            schedule_state=state_word(plan),
            next_scheduled_run=next_run(plan),
        )

    async def schedule(self, owner: str, job_id: str, *, cursor: str | None) -> SchedulePage:
        """Return the schedule of a job with its next fires, and a page of the outcomes of fires.

        Raises ConveyorError: not_found; conflict on a regular job; invalid_argument for a bad
        cursor.
        """
        view = await self._context.live_job(owner, job_id)
        shown = await self._schedules.show(owner, job_id)
        fires = await self._schedules.list_fires(owner, job_id, cursor=cursor, limit=PAGE)
        line = self._line(view.job, view.latest_run, await self._waits())
        return SchedulePage(line, shown, fires.fires, fires.next_cursor)

    async def deliveries(
        self,
        caller: str | None,
        job_id: str | None,
        *,
        status: DeliveryStatus | None,
        cursor: str | None,
    ) -> DeliveriesShown:
        """Return a page of events. Raises ConveyorError: not_found; invalid_argument for a bad
        cursor."""
        if caller is None and job_id is None:
            return await self._jobs_with_webhooks(cursor)
        owner = caller if job_id is None else await self.owner(caller, job_id)
        page = await self._deliveries.list_deliveries(
            owner or "", job_id, status=status, since=0, cursor=cursor, limit=PAGE
        )
        return DeliveriesShown(
            jobs=[],
            page=page,
            job_id=present(job_id),
            status=UNSET if status is None else status.value,
        )

    async def _jobs_with_webhooks(self, cursor: str | None) -> DeliveriesShown:
        """Find the jobs with a webhook behind the next _BATCH runs of all callers."""
        scope = "dashboard:webhooks"
        place = None if cursor is None else self._cursors.decode(cursor, scope=scope)
        before = None if place is None else _position(place)
        found = await self._context.runs.changed_runs(None, before=before, limit=_BATCH)
        waits = await self._waits()
        lines = [
            self._line(one.job, one.run, waits)
            for one in found
            if one.job.webhook is not None and one.job.latest_run_id == one.run.run_id
        ]
        following = None
        if len(found) == _BATCH:
            following = self._cursors.encode(_place(found[-1].position), scope=scope)
        return DeliveriesShown(jobs=lines, page=DeliveriesPage([], present(following)))

    async def delivery(self, owner: str, job_id: str, delivery_id: str) -> LoggedDeliveryBody:
        """Return an event of a job with its attempts. Raises ConveyorError(not_found)."""
        found = await self._deliveries.get_delivery(owner, delivery_id)
        if found.job_id != job_id:
            raise not_found("delivery")
        return found

    async def workers(self, caller: str | None) -> WorkersPage:
        """Return the workers that said a word lately; a caller sees the lanes of their own runs."""
        reports = await self._context.workers.all()
        live = await self._context.runs.changed_runs(caller, before=None, limit=_BATCH, live=True)
        jobs = {one.run.run_id: one.job for one in live}
        now = self._context.clock.now()
        return WorkersPage(
            [_worker_line(report, jobs, now, every=caller is None) for report in reports]
        )

    # -- one job --

    async def job(self, owner: str, job_id: str) -> JobPage:
        """Return a job, for want of a run of it. Raises ConveyorError(not_found)."""
        view = await self._context.live_job(owner, job_id)
        return JobPage(self._line(view.job, view.latest_run, await self._waits()))

    # -- one run --

    async def run(self, owner: str, job_id: str, run_id: str | None) -> RunPage:
        """Return a run, the latest where `run_id` is None. Raises ConveyorError(not_found)."""
        view, run = await self._context.live_run(owner, job_id, run_id)
        runs = await self._context.runs.list_runs(owner, job_id, before=None, limit=RUNS_SHOWN + 1)
        groups = []
        if run.stats.failed:
            groups = (await self._failures.of_run(owner, job_id, run.run_id)).groups
        waits = await self._waits()
        line = self._line(view.job, run, waits)
        left = run.stats.total - run.stats.completed
        held = await self._held(view.job, run, waits)
        return RunPage(
            job=line,
            run=self._run_body(run, waits),
            is_latest=view.job.latest_run_id == run.run_id,
            waiting_tasks=left,
            seconds_left=_seconds_left(run, left, line.pace),
            shape=run.stats.shape,
            rerun_of=present(run.rerun_of),
            groups=groups,
            exports=await self._exports.latest(job_id, run.run_id),
            runs=[run_body(one, waits=waits) for one in runs[:RUNS_SHOWN]],
            has_more_runs=len(runs) > RUNS_SHOWN,
            has_webhook=view.job.webhook is not None,
            has_schedule=view.job.scheduling is not None,
            hosts=held[:HOSTS_SHOWN],
            more_hosts=len(held[HOSTS_SHOWN:]),
        )

    async def _held(self, job: Job, run: Run, waits: Waits) -> list[HostBody]:
        """Return the hosts that hold a run back, where nothing else does; none while the ledger
        does not answer."""
        wait = waits(run)
        if wait is not None and wait.reason is not RunWaitReason.HOST_CLOSED:
            return []
        held = await log_and_continue(
            _log,
            "the limits of hosts could not be read",
            partial(self._hosts.held, job, run, most=ROWS_READ),
        )
        return [] if held is None else held.hosts

    async def results(
        self,
        owner: str,
        job_id: str,
        run_id: str,
        *,
        status: str,
        group: str | None,
        cursor: str | None,
    ) -> ResultsShown:
        """Return a page of rows. Raises ConveyorError: not_found; invalid_argument for a bad
        cursor or a group without the status `failed`; no_matching_tasks for an unknown group."""
        groups = parse_groups(group, FILTERS[status])
        view, run = await self._context.live_run(owner, job_id, run_id)
        page = await self._results.page(
            owner, job_id, run_id, status=status, groups=groups, cursor=cursor, limit=PAGE
        )
        waits = await self._waits()
        return ResultsShown(
            job=self._line(view.job, run, waits),
            run=self._run_body(run, waits),
            is_latest=view.latest_run is not None and view.latest_run.run_id == run.run_id,
            status=status,
            group=present(group),
            results=page.results,
            next_cursor=page.next_cursor,
        )

    async def task(self, owner: str, job_id: str, run_id: str, task_id: str) -> TaskDetails:
        """Return a task with its attempts. Raises ConveyorError(not_found)."""
        view, run = await self._context.live_run(owner, job_id, run_id)
        task = await self._context.tasks.get_task(run.run_id, task_id)
        if task is None:
            raise not_found("task")
        history = await self._results.history(owner, job_id, run_id, task_id)
        [row] = await self._results.rows(view.job, run, [task])
        waits = await self._waits()
        return TaskDetails(
            job=self._line(view.job, run, waits),
            run=self._run_body(run, waits),
            task_id=task.task_id,
            status=row.status,
            url=row.url,
            method=task.spec.method,
            params=_masked(params.merge(view.job.params, task.spec.params)),
            request=_request(view.job, task),
            attempts=history.events,
            external_id=row.external_id,
            metadata=row.metadata,
            waiting=row.waiting,
            error=row.error,
            group=present(task.failure_group),
            source_run_id=row.source_run_id,
            size=row.size,
            content_type=UNSET if task.result is None else task.result.content_type,
            result_url=row.result_url,
            created_at=row.created_at,
            updated_at=row.updated_at,
        )

    async def preview(
        self, owner: str, job_id: str, run_id: str, task_id: str, *, most: int = MOST_PREVIEWED
    ) -> Preview:
        """Read at most `most` bytes of the body of a task.

        Raises ConveyorError: not_found, also for a failed task; task_not_ready; result_expired.
        """
        found = await self._results.content(owner, job_id, run_id, task_id)
        if isinstance(found, ProblemBody):
            raise not_found("body: the task failed")
        pieces: list[bytes] = []
        missing = min(most, found.size)
        async for piece in found.pieces:
            pieces.append(piece[:missing])
            missing -= len(pieces[-1])
            if not missing:
                break
        await _close(found.pieces)
        return Preview(b"".join(pieces), found.size, found.content_type)

    # -- parts --

    async def _waits(self) -> Waits:
        return await self._context.waits.look()

    def _run_body(self, run: Run, waits: Waits) -> RunBody:
        return run_body(run, self._context.outage(), waits=waits)

    def _line(self, job: Job, run: Run | None, waits: Waits) -> JobLine:
        pace = None if run is None else self._paces.of(run, self._context.clock.now())
        return JobLine(
            job_id=job.job_id,
            type=_job_type(job),
            status=job.status.value,
            priority=job.priority,
            name=present(job.name),
            external_id=present(job.external_id),
            run=UNSET if run is None else self._run_body(run, waits),
            inherited=0 if run is None else run.stats.inherited,
            pace=present(pace),
            created_at=rfc3339(job.created_at),
        )

    def _troubles(
        self,
        live: Sequence[tuple[Job, Run]],
        ended: Sequence[tuple[Job, Run]],
        silent: Sequence[WorkerReport],
        paused_since: int | None,
    ) -> list[Trouble]:
        found = [
            Trouble(kind="outage", detail=outage.detail, since=rfc3339(outage.since))
            for outage in self._context.outages()
        ]
        if paused_since is not None:
            since = rfc3339(paused_since)
            found.append(Trouble(kind="fleet_paused", detail=FLEET_PAUSED, since=since))
        found += [
            Trouble(kind="worker_silent", detail=report.worker_id, since=rfc3339(report.said_at))
            for report in silent
        ]
        now = self._context.clock.now()
        for job, run in [*live, *ended]:
            stats = run.stats
            if run.status is RunStatus.FAILED and now - run.updated_at <= RECENT:
                kind, detail = "run_failed", run.failure_detail or ""
            elif stats.failed >= max(FAILING_COUNT, FAILING_SHARE * stats.completed) and (
                run.status in LIVE_RUN_STATES
            ):
                kind, detail = "run_failing", f"{stats.failed} of {stats.completed} tasks failed"
            else:
                continue
            found.append(
                Trouble(
                    kind=kind,
                    detail=detail,
                    since=rfc3339(run.updated_at),
                    job_id=job.job_id,
                    run_id=run.run_id,
                    name=present(job.name),
                )
            )
        return found


def _waiting_since(line: JobLine) -> str:
    """Return since when the run of a line waits, which sorts by time."""
    return line.run.waiting.since if line.run and line.run.waiting else ""


def _state(run: Run | None) -> str | None:
    if run is None:
        return None
    return "paused" if run.paused and run.status in LIVE_RUN_STATES else run.status.value


def _job_type(job: Job) -> str:
    return "regular" if job.scheduling is None else "scheduled"


def _digest(wanted: JobSearch) -> str:
    return hashlib.sha256(msgspec.json.encode(wanted)).hexdigest()


def _place(position: RunPosition) -> str:
    return f"{position.changed_at}.{position.run_id}"


def _position(place: str) -> RunPosition:
    changed_at, _, run_id = place.partition(".")
    if not changed_at.isdecimal():
        raise bad_cursor()
    return RunPosition(int(changed_at), run_id)


def _in_flight(reports: Sequence[WorkerReport], own: set[str] | None) -> int:
    """Count the calls under way, of the runs `own` or of all."""
    if own is None:
        return sum(report.in_use for report in reports)
    lanes = (lane for report in reports for lane in report.lanes)
    return sum(lane.in_flight for lane in lanes if lane.run_id in own)


def _worker_line(
    report: WorkerReport, jobs: dict[str, Job], now: int, *, every: bool
) -> WorkerLine:
    lanes = [(lane, jobs.get(lane.run_id)) for lane in report.lanes]
    return WorkerLine(
        worker_id=report.worker_id,
        version=report.version,
        started_at=rfc3339(report.started_at),
        said_at=rfc3339(report.said_at),
        age_seconds=max(0, now - report.said_at) / 1_000,
        is_silent=report.is_silent(now),
        slots=report.slots,
        in_use=report.in_use,
        away=list(report.away),
        lanes=[
            LaneLine(
                run_id=lane.run_id,
                job_id=UNSET if job is None else job.job_id,
                name=UNSET if job is None else present(job.name),
                in_flight=lane.in_flight,
                buffered=lane.buffered,
                permits=lane.permits,
                ceiling=lane.ceiling,
                reason=UNSET if lane.reason is None else lane.reason.value,
                since=rfc3339(lane.since) if lane.since else UNSET,
                until=UNSET if lane.until is None else rfc3339(lane.until),
            )
            for lane, job in lanes
            if every or job is not None
        ],
        lanes_left_out=report.lanes_left_out,
    )


def _seconds_left(run: Run, left: int, pace: RunPace | UnsetType) -> float | UnsetType:
    """Estimate how long the rest takes; UNSET where nothing is left, or nothing moves."""
    if run.paused or not left or not pace or not pace.per_second:
        return UNSET
    return round(left / pace.per_second, 1)


def _masked(merged: dict[str, str]) -> dict[str, str]:
    """Mask the values of custom headers."""
    if "custom_headers" not in merged:
        return merged
    names = json.loads(merged["custom_headers"])
    return {
        **merged,
        "custom_headers": json.dumps(dict.fromkeys(names, MASKED), ensure_ascii=False),
    }


def _request(job: Job, task: Task) -> dict[str, Any]:
    """Build the submit that would make this one task again."""
    spec = task.spec
    fields: dict[str, Any] = {"url": spec.url}
    if spec.external_id is not None:
        fields["external_id"] = spec.external_id
    if spec.metadata:
        fields["metadata"] = spec.metadata
    if spec.method != "GET":
        fields["method"] = spec.method
    if spec.body is not None:
        is_json = spec.body.content_type == "application/json"
        fields["body"] = json.loads(spec.body.content) if is_json else spec.body.content
    merged = _masked(params.merge(job.params, spec.params))
    return {"tasks": [fields], **({"zenrows_params": merged} if merged else {})}


async def _close(pieces: AsyncIterator[bytes]) -> None:
    """End a reader that is not read to its end."""
    if isinstance(pieces, AsyncGenerator):
        await pieces.aclose()
