"""Follow a run until it ends."""

from __future__ import annotations

from conveyor.client.api import Api
from conveyor.client.errors import ClientError, ServerUnreachable
from conveyor.client.output import count, duration, printable
from conveyor.client.progress import ProgressView
from conveyor.client.wire import ResultRow, RunReply

FIRST_INTERVAL = 0.05
LAST_INTERVAL = 1.0
GROWTH = 1.4
PATIENCE = 30.0


async def follow(api: Api, run: RunReply, view: ProgressView) -> RunReply:
    """Poll a run until it has ended, and return it. Polls start fast and slow down to one a second.

    Raises ServerUnreachable if the server does not answer for half a minute.
    """
    pace = api.pace
    interval = FIRST_INTERVAL
    answered_at = pace.monotonic()
    with view:
        view.show(run, answered_at)
        while run.live:
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
    return run


async def latest_run(api: Api, job_id: str) -> RunReply:
    """Read the latest run of a job. Raises ClientError if there is none, or the job is deleted."""
    job = await api.job(job_id)
    if job.status == "deleted":
        raise ClientError(f"job {printable(job_id)} is deleted")
    if job.latest_run is None:
        raise ClientError(f"job {printable(job_id)} has no run")
    return job.latest_run


def summary(run: RunReply, seconds: float | None = None) -> str:
    """Summarise an ended run in one line, with the reasons of its failures."""
    stats = run.stats
    parts = [count(stats.total, "task"), f"{stats.successful:,} ok", f"{stats.failed:,} failed"]
    if unfinished := stats.total - stats.completed:
        parts.append(f"{unfinished:,} not done")
    line = f"{printable(run.status)}: {', '.join(parts)}"
    if stats.failure_reasons:
        reasons = sorted(stats.failure_reasons.items(), key=lambda item: (-item[1], item[0]))
        line += f" ({', '.join(f'{printable(reason)} {number:,}' for reason, number in reasons)})"
    if seconds is not None:
        line += f" in {duration(seconds)}"
    if why := ": ".join(filter(None, (run.failure_reason, run.failure_detail))):
        line += f"; {printable(why)}"
    return line


def failure_line(row: ResultRow) -> str:
    """Describe a failed task in one line."""
    error = row.error
    reason = f"{error.code}: {error.detail or error.title}" if error else "no reason given"
    return f"failed: {printable(row.url)}: {printable(reason)}"
