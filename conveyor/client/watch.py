"""Follow a run until it ends."""

from __future__ import annotations

from conveyor.client.api import Api
from conveyor.client.errors import ClientError, ServerRefused, ServerUnreachable
from conveyor.client.output import command, count, duration, printable
from conveyor.client.progress import ProgressView
from conveyor.client.wire import JobReply, RunReply, SubmitReply
from conveyor.domain.errors import ErrorCode
from conveyor.domain.model import TaskStatus

FIRST_INTERVAL = 0.05
LAST_INTERVAL = 1.0
GROWTH = 1.4
PATIENCE = 30.0
SEARCHED_PAGES = 50
"""Pages of unfinished rows that are searched for calls in flight."""
SILENT_FOR = 10.0
"""Seconds that a run waits for something that never answered, until that is told."""


async def follow(api: Api, run: RunReply, view: ProgressView) -> RunReply:
    """Poll a run until it has ended, and return it. Polls start fast and slow down to one a second.

    A run that was stopped ends with its last call in flight, which still counts, or when its
    counters stand still for half a minute. Raises ServerUnreachable if the server does not answer
    for as long.
    """
    pace = api.pace
    interval = FIRST_INTERVAL
    unheard = _Unheard(view)
    answered_at = pace.monotonic()
    calls = _CallsInFlight(api, answered_at)
    with view:
        view.show(run, answered_at)
        unheard.look(run, answered_at)
        while run.live or await calls.may_still_count(run):
            await pace.sleep(interval)
            interval = min(interval * GROWTH, LAST_INTERVAL)
            try:
                run = await api.run(run.job_id, run.run_id)
            except ServerUnreachable as error:
                now = pace.monotonic()
                if now - answered_at > PATIENCE:
                    raise
                view.trouble(f"{error} trying again", now)
                continue
            answered_at = pace.monotonic()
            view.show(run, answered_at)
            unheard.look(run, answered_at)
        if run.cut_short:
            # A call may have ended between the last two looks, at the run and at its rows.
            run = await api.run(run.job_id, run.run_id)
            view.show(run, pace.monotonic())
    return run


class _CallsInFlight:
    """Looks for the rows in work of a run that was cut short.

    Rows that wait are never taken up any more, so each look begins at the page where the last one
    found a row in work.
    """

    def __init__(self, api: Api, now: float) -> None:
        self._api = api
        self._cursor: str | None = None
        self._pages = 0
        self._completed = -1
        self._counted_at = now

    async def may_still_count(self, run: RunReply) -> bool:
        """Tell whether the counters of an ended run are likely to change."""
        if not run.cut_short:
            return False
        now = self._api.pace.monotonic()
        if run.stats.completed != self._completed:
            self._completed, self._counted_at = run.stats.completed, now
        if now - self._counted_at > PATIENCE:
            return False
        try:
            return await self._exist(run)
        except ServerUnreachable:
            # The next poll of the run tells it.
            return True

    async def _exist(self, run: RunReply) -> bool:
        while self._pages < SEARCHED_PAGES:
            page = await self._api.results_page(
                run.job_id, run.run_id, status="processing", cursor=self._cursor
            )
            if any(row.status == TaskStatus.PROCESSING for row, _raw in page.rows):
                return True
            if page.next_cursor is None:
                return False
            self._pages += 1
            self._cursor = page.next_cursor
        return False


class _Unheard:
    """Tells once, after a while, that a run waits for something that never answered: it may be
    named wrongly, and only what answered before is waited for in silence."""

    def __init__(self, view: ProgressView) -> None:
        self._view = view
        self._since: float | None = None
        self._is_told = False

    def look(self, run: RunReply, now: float) -> None:
        """Look at a run as read at `now`, in seconds."""
        outage = run.outage
        if outage is None or not outage.never_answered or run.paused:
            self._since = None
            return
        self._since = now if self._since is None else self._since
        if now - self._since >= SILENT_FOR and not self._is_told:
            self._is_told = True
            self._view.warn(
                f"warning: {printable(outage.detail)}, and it never answered since the server "
                "started; the run waits for it"
            )


async def latest_run(api: Api, job_id: str, *, server: str | None = None) -> RunReply:
    """Read the latest run of a job. Raises ClientError as `run_of` does."""
    return run_of(await api.job(job_id), server=server)


async def named_run(
    api: Api, job_id: str, run_id: str | None, *, server: str | None = None
) -> RunReply:
    """Read a run of a job, by default the latest. Raises ClientError if there is none."""
    if not run_id:
        return await latest_run(api, job_id, server=server)
    unknown = ClientError(f"job {printable(job_id)} has no run {printable(run_id)}")
    if not run_id.strip("."):
        # In a path it would name something else.
        raise unknown
    try:
        return await api.run(job_id, run_id)
    except ServerRefused as refusal:
        if refusal.code != ErrorCode.NOT_FOUND:
            raise
        raise unknown from None


def run_of(job: JobReply | SubmitReply, *, server: str | None = None) -> RunReply:
    """Return the latest run of a job.

    `server` is the option of the command being run. Raises ClientError if there is no run, or the
    job is deleted.
    """
    if isinstance(job, JobReply) and job.status == "deleted":
        raise ClientError(f"job {printable(job.job_id)} is deleted")
    if job.latest_run is None:
        waits = isinstance(job, JobReply) and job.schedule is not None
        show = command("schedule", "show", job.job_id, server=server)
        yet = f" yet; when it fires: {show}" if waits else ""
        raise ClientError(f"job {printable(job.job_id)} has no run{yet}")
    return job.latest_run


def _reason(word: str) -> str:
    # The direct gateway, which has its errors too, is the server itself: to its user it is none.
    return "no good answer" if word == "gateway_error" else printable(word)


def summary(run: RunReply, seconds: float | None = None) -> str:
    """Summarise an ended run in one line, with the reasons of its failures."""
    stats = run.stats
    parts = [count(stats.total, "task"), f"{stats.successful:,} ok", f"{stats.failed:,} failed"]
    if unfinished := stats.total - stats.completed:
        parts.append(f"{unfinished:,} not done")
    line = f"{printable(run.status)}: {', '.join(parts)}"
    if stats.failure_reasons:
        reasons = sorted(stats.failure_reasons.items(), key=lambda item: (-item[1], item[0]))
        line += f" ({', '.join(f'{_reason(word)} {number:,}' for word, number in reasons)})"
    if seconds is not None:
        line += f" in {duration(seconds)}"
    if why := ": ".join(filter(None, (run.failure_reason, run.failure_detail))):
        line += f"; {printable(why)}"
    return line
