"""Follow a run until it ends."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import datetime

import anyio

from conveyor.aio.concurrency import unwrap
from conveyor.client.api import Api, ClientClock, StreamedRun
from conveyor.client.errors import ClientError, ServerRefused, ServerUnreachable
from conveyor.client.output import command, count, duration, printable
from conveyor.client.progress import ProgressView
from conveyor.client.wire import JobReply, RunReply, SubmitReply
from conveyor.domain.errors import ErrorCode
from conveyor.domain.model import TaskStatus
from conveyor.domain.run_waits import RunWaitReason

FIRST_INTERVAL = 0.05
LAST_INTERVAL = 1.0
GROWTH = 1.4
PATIENCE = 30.0
SEARCHED_PAGES = 50
"""Pages of unfinished rows that are searched for calls in flight."""
OPENING_SECONDS = 5.0
"""Within which a stream tells something at first, unless a proxy holds it back."""
_AWAY = frozenset(
    {RunWaitReason.NO_WORKER, RunWaitReason.BODIES_NOT_KEPT, RunWaitReason.GATEWAY_THROTTLED}
)
SILENT_FOR = 10.0
"""Seconds that a run waits for something that never answered, until that is told."""


async def follow(api: Api, run: RunReply, view: ProgressView) -> RunReply:
    """Follow a run until it has ended, and return it: by the server's stream where it has one, else
    by polls, which start fast and slow down to one a second.

    A run that was stopped ends with its last call in flight, which still counts, or when its
    counters stand still for half a minute. Raises ServerUnreachable if the server does not answer
    for as long.
    """
    pace = api.pace
    interval = FIRST_INTERVAL
    seen = _Seen(run, view, pace)
    calls = _CallsInFlight(api, seen.answered_at)
    stream = _Stream(api, seen)
    with view:
        seen.show()
        while seen.is_live() or await calls.may_still_count(seen.run):
            if seen.is_live() and await stream.follow():
                interval = FIRST_INTERVAL
                if not seen.is_live():
                    continue
            await pace.sleep(interval)
            interval = min(interval * GROWTH, LAST_INTERVAL)
            try:
                polled = await api.run(run.job_id, run.run_id)
            except ServerUnreachable as error:
                now = pace.monotonic()
                if now - seen.answered_at > PATIENCE:
                    raise
                view.trouble(f"{error} trying again", now)
                continue
            seen.answer(polled, pace.monotonic())
        if seen.run.cut_short:
            # A call may have ended between the last two looks, at the run and at its rows.
            seen.answer(await api.run(run.job_id, run.run_id), pace.monotonic())
    return seen.run


class _Seen:
    """The run as the server told it last, and what is shown of it."""

    def __init__(self, run: RunReply, view: ProgressView, pace: ClientClock) -> None:
        self.run = run
        self.answered_at = pace.monotonic()
        self._view = view
        self._unheard = _Unheard(view, pace)

    def is_live(self) -> bool:
        """Tell whether the run goes on."""
        return self.run.live

    def answer(self, run: RunReply, now: float) -> None:
        """Show what the server told at `now`, in seconds."""
        self.run, self.answered_at = run, now
        self.show(now)

    def show(self, now: float | None = None) -> None:
        """Show the run as it is known."""
        now = self.answered_at if now is None else now
        self._view.show(self.run, now)
        self._unheard.look(self.run, now)


class _Stream:
    """The stream of a run, for as long as the server has one to give."""

    def __init__(self, api: Api, seen: _Seen) -> None:
        self._api = api
        self._seen = seen
        self._last_id = ""
        self._is_given = True

    async def follow(self) -> bool:
        """Show what the stream tells until it ends; return whether it told anything.

        A server that never gave one is asked once; one that was lost may be asked again.
        """
        heard = False
        if not self._is_given:
            return heard
        with anyio.move_on_after(OPENING_SECONDS) as opening, unwrap():
            async with anyio.create_task_group() as group:
                try:
                    async for run, event_id in self._events():
                        self._last_id = event_id or self._last_id
                        if not heard:
                            heard, opening.deadline = True, math.inf
                            group.start_soon(self._show_on)
                        self._seen.answer(run or self._seen.run, self._api.pace.monotonic())
                except ServerUnreachable:
                    pass  # the poll that follows tells it
                except ClientError:
                    self._is_given = False
                group.cancel_scope.cancel()
        if opening.cancelled_caught:
            self._is_given = False
        return heard

    async def _events(self) -> AsyncIterator[StreamedRun]:
        run = self._seen.run
        events = self._api.run_events(run.job_id, run.run_id, last_id=self._last_id)
        async with aclosing(events):
            async for event in events:
                yield event

    async def _show_on(self) -> None:
        """Show the run again and again, as polls would."""
        while True:
            await self._api.pace.sleep(LAST_INTERVAL)
            self._seen.show(self._api.pace.monotonic())


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

    def __init__(self, view: ProgressView, pace: ClientClock) -> None:
        self._view = view
        self._pace = pace
        self._since: float | None = None
        self._is_told = False

    def look(self, run: RunReply, now: float) -> None:
        """Look at a run as read at `now`, in seconds."""
        outage = run.outage
        if outage is None or not outage.never_answered or run.paused:
            self._since = None
            return
        if self._since is None:
            # The server names one that is merely silent only after a while of its own.
            self._since = now - _age(outage.since, self._pace.now())
        if now - self._since >= SILENT_FOR and not self._is_told:
            self._is_told = True
            self._view.warn(
                f"warning: {printable(outage.detail)}, and it never answered since the server "
                "started; the run waits for it"
            )


def _age(since: str, now: int) -> float:
    """Return the seconds since an instant that a server told, as far as it can be known."""
    try:
        return max(0.0, now / 1_000 - datetime.fromisoformat(since).timestamp())
    except ValueError:
        return 0.0


def reason_of_outage(run: RunReply) -> str:
    """Say what a run waits for that all its work needs, and that is away; "" if nothing is."""
    if run.outage is not None:
        return printable(run.outage.detail or f"the {run.outage.shared} is away")
    if run.waiting is not None and run.waiting.reason in _AWAY:
        # In production a process of the API has no worker that could tell of an outage.
        return printable(run.waiting.detail or run.waiting.reason)
    return ""


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
