"""The options that say when a job runs, and the commands about scheduled jobs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from conveyor.cli.commands import run_client, show_help
from conveyor.cli.completion import suggest_jobs
from conveyor.client.options import json_option, rows_option, server_options, stacked

if TYPE_CHECKING:
    from conveyor.client.commands import ServerTarget, Terminal

_EVERY = re.compile(r"([0-9]{1,9})(m|h|d)", re.ASCII)
_UNITS = {"m": "minute", "h": "hour", "d": "day"}
_EXAMPLES = {
    "every": "6h",
    "at": "2027-09-01T09:00",
    "daily": "09:00,18:00",
    "weekly": "mon,fri@09:00",
    "monthly": "1,15@09:00",
}
"""A value of each option that says when."""

_times_options = (
    click.option("--every", metavar="15m|6h|1d", help="Run each so many minutes, hours or days."),
    click.option("--at", metavar="DATETIME", help="Run once, such as at 2027-09-01T09:00."),
    click.option("--daily", metavar="TIMES", help="Run daily, such as at 09:00,18:00; full hours."),
    click.option(
        "--weekly",
        metavar="DAYS@TIMES",
        help="Run weekly, such as --weekly mon,fri@09:00 (mon tue wed thu fri sat sun).",
    ),
    click.option(
        "--monthly",
        metavar="DAYS@TIMES",
        help="Run monthly, such as --monthly 1,15@09:00, on the days 1 to 31.",
    ),
    click.option(
        "--zone", metavar="ZONE", help="Zone of these times, such as Europe/Berlin; not of --every."
    ),
)


def _overlap_option(usual: str) -> Callable[[Any], Any]:
    """Build the option for fires during a live run."""
    return click.option(
        "--overlap",
        type=click.Choice(["skip", "wait"]),
        help=f"While a run is live, skip the next one, or let it wait [{usual}].",
    )


schedule_options = stacked(*_times_options, _overlap_option("skip"))
new_schedule_options = stacked(*_times_options, _overlap_option("as before"))


def schedule_of(flags: dict[str, Any]) -> dict[str, Any] | None:
    """Take the options of a schedule out of the flags, and build the schedule of the wire; None
    without one. Raises UsageError for what no server takes."""
    given = {kind: flags.pop(kind) for kind in _EXAMPLES}
    zone, overlap = flags.pop("zone"), flags.pop("overlap")
    chosen = {kind: text for kind, text in given.items() if text is not None}
    if not chosen:
        for option, value in (("--zone", zone), ("--overlap", overlap)):
            if value is not None:
                raise click.UsageError(f"{option} needs a schedule, such as --daily 09:00")
        return None
    if len(chosen) > 1:
        names = " and ".join(f"--{kind}" for kind in chosen)
        raise click.UsageError(f"{names}: a job has one schedule")
    [(kind, text)] = chosen.items()
    document = _document(kind, text)
    if kind != "every" and zone is None:
        raise click.UsageError(f"--{kind} needs --zone, such as --zone Europe/Berlin")
    schedule = {**document, **({} if zone is None else {"timezone": zone})}
    _check(kind, schedule)
    return schedule | ({} if overlap is None else {"overlap": overlap})


def _document(kind: str, text: str) -> dict[str, Any]:
    if kind == "every":
        found = _EVERY.fullmatch(text)
        if found is None:
            raise click.UsageError(f"--every takes 15m, 6h or 1d, not {text!r}")
        return {"rate": {"every": int(found[1]), "unit": _UNITS[found[2]]}}
    if kind == "at":
        return {"at": text}
    if kind == "daily":
        return {"calendar": {"times_of_day": _times(text), "cadence": {"daily": {}}}}
    days, at_sign, times = text.partition("@")
    if not at_sign:
        raise click.UsageError(
            f"--{kind} takes DAYS@TIMES, such as {_EXAMPLES[kind]}, not {text!r}"
        )
    named = [day.strip().lower() for day in days.split(",")]
    numbers = [int(day) if day.isascii() and day.isdecimal() else day for day in named]
    chosen = named if kind == "weekly" else numbers
    return {"calendar": {"times_of_day": _times(times), "cadence": {kind: {"days": chosen}}}}


def _times(text: str) -> list[str]:
    times = [time.strip() for time in text.split(",")]
    return [f"0{time}" if time[1:2] == ":" else time for time in times]


def _check(kind: str, schedule: dict[str, Any]) -> None:
    from conveyor.domain.errors import ConveyorError
    from conveyor.domain.schedule import parse_schedule

    try:
        parse_schedule(schedule)
    except ConveyorError as error:
        field, _, problem = error.detail.partition(": ")
        if field == "schedule.timezone":
            raise click.UsageError(f"--zone: {problem}") from None
        example = f"for example: --{kind} {_EXAMPLES[kind]}"
        raise click.UsageError(f"--{kind}: {problem}; {example}") from None


@click.group(invoke_without_command=True, no_args_is_help=False)
@click.pass_context
def schedule(context: click.Context) -> None:
    """See and change when scheduled jobs run.

    conveyor submit makes a scheduled job, with --every, --at, --daily, --weekly or --monthly.
    """
    show_help(context)


job_argument = click.argument("job", shell_complete=suggest_jobs)


@schedule.command("list")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@rows_option
@server_options
def list_schedules(limit: int, **common: Any) -> int:
    """List scheduled jobs, newest first: rule, zone, next fire, last run and how it ended."""
    from conveyor.client import schedules

    return run_client(
        lambda target, terminal: schedules.list_schedules(
            target, terminal, limit=limit, jsonl=common["as_json"]
        ),
        **common,
    )


@schedule.command()
@job_argument
@json_option
@server_options
def show(job: str, **common: Any) -> int:
    """Show the next fires of JOB, and what became of the last ones."""
    from conveyor.client import schedules

    return run_client(
        lambda target, terminal: schedules.show_schedule(target, terminal, job), **common
    )


@schedule.command()
@job_argument
@json_option
@server_options
def pause(job: str, **common: Any) -> int:
    """Skip the fires of JOB until it is resumed. A live run goes on."""
    from conveyor.client import schedules

    return run_client(
        lambda target, terminal: schedules.set_state(target, terminal, job, "paused"), **common
    )


@schedule.command()
@job_argument
@json_option
@server_options
def resume(job: str, **common: Any) -> int:
    """Let JOB fire again, from its next time on."""
    from conveyor.client import schedules

    return run_client(
        lambda target, terminal: schedules.set_state(target, terminal, job, "active"), **common
    )


@schedule.command("set")
@job_argument
@new_schedule_options
@json_option
@server_options
def set_schedule(
    job: str, *, server: str | None, api_key: str | None, as_json: bool, **flags: Any
) -> int:
    """Give JOB another schedule. A live run goes on."""
    from conveyor.client import schedules

    document = schedule_of(flags)
    if document is None:
        raise click.UsageError("say when: --every, --at, --daily, --weekly or --monthly")

    async def work(target: ServerTarget, terminal: Terminal) -> int:
        return await schedules.set_schedule(target, terminal, job, document)

    return run_client(work, server=server, api_key=api_key, as_json=as_json)
