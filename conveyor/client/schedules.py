"""Show and change the schedules of jobs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from datetime import datetime
from typing import Any

import msgspec

from conveyor.client.commands import ServerTarget, Terminal, about
from conveyor.client.jobs import find_job, newest_jobs
from conveyor.client.output import (
    clean_json,
    printable,
    shorten,
    to_the_minute,
    to_the_minute_or_second,
)
from conveyor.client.program import SUCCEEDED
from conveyor.client.progress import describe
from conveyor.client.wire import CalendarReply, FireReply, JobReply, RunReply, ScheduleReply
from conveyor.domain.schedule import local_time, zone_names

SHOWN_FIRES = 10
"""Fires of the past that are shown."""
WIDTH = 80
LEAST_NAME = 20
"""Columns of a name that a long rule leaves it."""
HEADER = f"{'job':<26}  {'next fire':<19}  last run"
NONE_YET = "no scheduled jobs yet: conveyor submit URL --every 6h"


async def list_schedules(
    target: ServerTarget, terminal: Terminal, *, limit: int, jsonl: bool
) -> int:
    """List scheduled jobs, newest first."""
    shown = 0
    async with (
        target.connect(terminal) as api,
        aclosing(newest_jobs(api, limit, kind="scheduled")) as jobs,
    ):
        async for job in jobs:
            if job.schedule is None:  # a server that does not know the filter
                continue
            if jsonl:
                print(clean_json(msgspec.json.encode(job).decode()))
            else:
                lines = _lines(job, job.schedule)
                for line in lines if shown else [HEADER, *lines]:
                    print(line)
            shown += 1
    if not shown and not jsonl:
        terminal.warn(NONE_YET)
    return SUCCEEDED


def _lines(job: JobReply, schedule: ScheduleReply) -> list[str]:
    following = _next(job, schedule)
    last = _last(job.latest_run, schedule)
    name = printable(job.name or job.external_id or "")
    rule = _rule(schedule)
    first = f"{printable(job.job_id):<26}  {following:<19}  {last}".rstrip()
    label = f"{shorten(name, max(WIDTH - len(rule) - 4, LEAST_NAME))}: " if name else ""
    return [first, shorten(f"  {label}{rule}", WIDTH)]


def _next(job: JobReply, schedule: ScheduleReply) -> str:
    if job.schedule_state == "paused":
        return "paused"
    following = job.next_scheduled_run
    if following is None:
        return "none"
    return to_the_minute_or_second(_in_zone(following, _zone(schedule)))


def _last(run: RunReply | None, schedule: ScheduleReply) -> str:
    if run is None:
        return "none"
    if run.live:
        return describe(run)
    ended = to_the_minute(_in_zone(run.updated_at, _zone(schedule)))
    return f"{describe(run)} {ended}".rstrip()


def _zone(schedule: ScheduleReply) -> str | None:
    return None if schedule.rate is not None else schedule.timezone


def _in_zone(instant: str, zone: str | None) -> str:
    """Show an instant on the clock of a zone; in UTC if this machine does not know the zone."""
    known = zone if zone in zone_names() else None
    try:
        milliseconds = round(datetime.fromisoformat(instant).timestamp() * 1_000)
    except ValueError:
        return instant
    return local_time(milliseconds, known)


def _rule(schedule: ScheduleReply) -> str:
    """Say when a schedule fires, and by which clock."""
    zone = printable(_zone(schedule) or "UTC")
    if schedule.rate is not None:
        every, unit = schedule.rate.every, printable(schedule.rate.unit)
        rule = f"every {unit}" if every == 1 else f"every {every} {unit}s"
    elif schedule.at is not None:
        rule = f"once at {to_the_minute_or_second(schedule.at)}"
    elif schedule.calendar is not None:
        rule = _calendar(schedule.calendar)
    else:
        rule = "by a rule that this version does not know"
    return f"{rule}, {zone}"


def _calendar(calendar: CalendarReply) -> str:
    times = ",".join(map(printable, calendar.times_of_day))
    weekly, monthly = calendar.cadence.weekly, calendar.cadence.monthly
    if weekly is not None:
        return f"{','.join(printable(str(day)) for day in weekly.days)} at {times}"
    if monthly is not None:
        return f"day {','.join(printable(str(day)) for day in monthly.days)} at {times}"
    return f"daily at {times}"


async def show_schedule(target: ServerTarget, terminal: Terminal, job_id: str) -> int:
    """Show the next fires of a job, and what became of the last ones."""
    async with target.connect(terminal) as api:
        job_id = await find_job(api, job_id)
        with about(job_id):
            shown = await api.schedule(job_id)
            past = await api.fires(job_id, limit=SHOWN_FIRES)
    overlap = f", overlap {printable(shown.schedule.overlap)}" if shown.schedule.overlap else ""
    state = printable(shown.schedule_state)
    terminal.say(f"job {printable(job_id)}: {_rule(shown.schedule)}, {state}{overlap}")
    if shown.waiting:
        terminal.say(f"waiting  {to_the_minute_or_second(shown.waiting)}  for the live run to end")
    if shown.note:
        terminal.say(f"note     {printable(shown.note)}")
    for fire in shown.fires:
        note = f"  {printable(fire.note)}" if fire.note else ""
        terminal.say(f"next     {to_the_minute_or_second(fire.local_time)}{note}")
    for row in past.fires:
        terminal.say(_fire_line(row))
    terminal.give({**msgspec.to_builtins(shown), "past_fires": past.fires})
    return SUCCEEDED


def _fire_line(fire: FireReply) -> str:
    when = to_the_minute_or_second(fire.local_time)
    if fire.count > 1:
        when += f" to {to_the_minute_or_second(fire.last_local_time)}, {fire.count:,} times"
    why = f", {printable(fire.reason)}" if fire.reason else ""
    run = f"  run {printable(fire.run_id)}" if fire.run_id else ""
    return f"{printable(fire.status):<8} {when}{why}{run}"


async def set_state(target: ServerTarget, terminal: Terminal, job_id: str, state: str) -> int:
    """Pause or resume a schedule."""
    async with target.connect(terminal) as api:
        job_id = await find_job(api, job_id)
        with about(job_id):
            job = await api.set_schedule_state(job_id, state)
    _tell(terminal, job)
    return SUCCEEDED


async def set_schedule(
    target: ServerTarget, terminal: Terminal, job_id: str, schedule: Mapping[str, Any]
) -> int:
    """Replace a schedule."""
    async with target.connect(terminal) as api:
        job_id = await find_job(api, job_id)
        with about(job_id):
            job = await api.set_schedule(job_id, schedule)
    _tell(terminal, job)
    return SUCCEEDED


def _tell(terminal: Terminal, job: JobReply) -> None:
    following = ""
    if job.schedule is not None:
        following = f", {_rule(job.schedule)}"
        if job.schedule_state != "paused":
            following += f", next fire {_next(job, job.schedule)}"
    terminal.say(f"job {printable(job.job_id)}: {printable(job.schedule_state or '')}{following}")
    terminal.give(job)
