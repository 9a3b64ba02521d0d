"""The commands of `conveyor` that talk to a server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from conveyor import __version__
from conveyor.cli.admin import admin
from conveyor.cli.commands import job_options, report_error, run_client, tasks_of
from conveyor.cli.completion import complete, completion, suggest_jobs
from conveyor.cli.run import run
from conveyor.cli.schedules import schedule, schedule_of, schedule_options
from conveyor.cli.server import api, conveyor_dev, doctor, run_role, worker
from conveyor.cli.simulate import simulate
from conveyor.cli.webhooks import keys, listen, webhook, webhook_of
from conveyor.client.options import (
    file_options,
    group_option,
    json_option,
    out_option,
    rows_option,
    server_options,
    status_option,
    task_options,
    watch_option,
)
from conveyor.client.program import Failure, Interruption

if TYPE_CHECKING:
    from conveyor.client.commands import ServerTarget, Terminal
    from conveyor.client.directory import Destination
    from conveyor.client.inputs import OpenInput
    from conveyor.client.submit import JobOptions
    from conveyor.client.wire import JobReply


job_argument = click.argument("job", shell_complete=suggest_jobs)
jobs_argument = click.argument(
    "jobs", nargs=-1, required=True, metavar="JOB...", shell_complete=suggest_jobs
)


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="conveyor")
@click.pass_context
def conveyor(context: click.Context) -> int | None:
    """Submit scraping jobs to a Conveyor server, follow them, fetch their results.

    JOB is the id of a job, the beginning of one, or last for the newest. Without a command, run the
    role that CONVEYOR_ROLE names, if any.

    Exit codes: 0 every task succeeded, 1 error, 2 usage, 3 some task did not succeed, 130
    interrupted.
    """
    if context.invoked_subcommand is None:
        from conveyor.settings import completion_asked, role_named

        if asked := completion_asked():
            return complete(conveyor, asked)
        if role := role_named():
            return run_role(role)
        click.echo(context.get_help())
    return None


@conveyor.command()
@click.argument("inputs", nargs=-1, required=True, metavar="FILE|-|URL...")
@watch_option
@out_option
@file_options
@task_options
@click.option("--name", help="Label of the job.")
@click.option("--external-id", metavar="ID", help="Your id for the job.")
@click.option("--priority", type=int, metavar="0-9", help="Higher runs sooner.")
@click.option("--webhook", "webhook_url", metavar="URL", help="Post events of its runs to URL.")
@click.option("--sign", "signed", is_flag=True, help="Sign these events with your active key.")
@schedule_options
@click.option(
    "--idempotency-key", metavar="KEY", help="Submitting twice with one key makes one job."
)
@click.option("--check", is_flag=True, help="Check the tasks here, and submit nothing.")
@json_option
@server_options
def submit(
    inputs: tuple[str, ...],
    watch: bool,
    out: Destination | None,
    idempotency_key: str | None,
    **flags: Any,
) -> int:
    """Submit URLs, files with one URL or one JSON task a line, or a CSV file.

    Blank lines and lines that start with # are skipped; - reads standard input. A CSV file, a .gz
    file and a list of more than 4 MiB are uploaded whole: submit each by itself.

    Standard output that is no terminal gets the id of the job alone.
    """
    from conveyor.client.commands import submit_tasks

    common = {name: flags.pop(name) for name in ("server", "api_key", "as_json")}
    flags |= {"webhook": webhook_of(flags), "schedule": schedule_of(flags)}
    if flags["schedule"] is not None:
        flags["type"] = "scheduled"
        if watch or out is not None:
            raise click.UsageError("a scheduled job has no run yet: leave out --watch and --out")
    with tasks_of(inputs, flags) as tasks:
        only_checks = flags.pop("check")
        options = job_options(flags)
        if only_checks:
            return _checked(tasks, options, as_json=common["as_json"])

        async def work(target: ServerTarget, terminal: Terminal) -> int:
            return await submit_tasks(
                target,
                terminal,
                tasks,
                options,
                idempotency_key=idempotency_key,
                watch=watch,
                out=out,
            )

        return run_client(work, id_alone=not sys.stdout.isatty(), **common)


def _checked(tasks: list[Any] | OpenInput, options: JobOptions, *, as_json: bool) -> int:
    from conveyor.client.check import check_tasks
    from conveyor.client.output import count

    with report_error(as_json=as_json) as terminal:
        number, skipped, lines = check_tasks(tasks, options)
        for line in lines:
            terminal.warn(line)
        refused = f"{skipped:,}" if skipped else "none"
        terminal.say(f"{count(number, 'task')}, {refused} refused; nothing was submitted")
        terminal.give({"checked_tasks": number, "skipped_tasks": skipped})
    return 0


@conveyor.command()
@job_argument
@click.option("--run", "run_id", metavar="RUN", help="A run of JOB [the latest].")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, allow_dash=True),
    required=True,
    metavar="FILE",
    help="File to write; - is standard output.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["zip", "jsonl", "csv", "parquet"]),
    help="Format [by the ending of FILE; zip where it has none].",
)
@click.option("--force", is_flag=True, help="Replace FILE.")
@json_option
@server_options
def export(
    job: str,
    run_id: str | None,
    out: Path,
    form: str | None,
    force: bool,
    **common: Any,
) -> int:
    """Export the results of a run of JOB into one file: a zip of bodies, or a table of rows."""
    from conveyor.client.export import export_job, form_of

    to_stdout = str(out) == "-"
    if to_stdout and sys.stdout.isatty():
        raise click.UsageError("cannot write an export to a terminal: name a file, or redirect it")
    if to_stdout and common["as_json"]:
        raise click.UsageError("standard output gets the export: --json needs a file")
    chosen = form or ("zip" if to_stdout else form_of(out))
    if chosen is None:
        raise click.UsageError(
            f"no export is a {out.suffix}: name FILE .zip, .jsonl, .ndjson, .csv or .parquet, or "
            "choose its --format"
        )

    async def work(target: ServerTarget, terminal: Terminal) -> int:
        return await export_job(
            target,
            terminal,
            job,
            run_id=run_id,
            out=None if to_stdout else out,
            form=chosen,
            force=force,
        )

    return run_client(work, **common)


@conveyor.command()
@job_argument
@out_option
@json_option
@server_options
def watch(job: str, out: Destination | None, **common: Any) -> int:
    """Follow the latest run of JOB to its end."""
    from conveyor.client.commands import watch_job

    return run_client(lambda target, terminal: watch_job(target, terminal, job, out), **common)


@conveyor.command("open")
@click.argument("job", required=False, shell_complete=suggest_jobs)
@json_option
@server_options
def open_command(job: str | None, **common: Any) -> int:
    """Open the dashboard in a browser, at JOB if it is named; print its address."""
    from conveyor.client.commands import open_pages

    return run_client(lambda target, terminal: open_pages(target, terminal, job), **common)


@conveyor.command()
@job_argument
@json_option
@server_options
def explain(job: str, **common: Any) -> int:
    """Say why JOB is not faster, or why it stands, and what helps."""
    from conveyor.client.explain import explain_job

    return run_client(lambda target, terminal: explain_job(target, terminal, job), **common)


@conveyor.command()
@job_argument
@rows_option
@out_option
@status_option
@group_option
@server_options
def results(
    job: str,
    out: Destination | None,
    status: str | None,
    groups: tuple[str, ...],
    **common: Any,
) -> int:
    """List the results of the latest run of JOB, or download their bodies into a directory.

    The list shows the present state; with --out, follow a live run to its end first.
    """
    from conveyor.client.commands import fetch_results, show_results

    if groups and (out is not None or status not in (None, "failed")):
        raise click.UsageError("--group lists tasks that failed: leave out --out and --status")

    async def work(target: ServerTarget, terminal: Terminal) -> int:
        if out is not None:
            return await fetch_results(target, terminal, job, out=out, status=status)
        return await show_results(
            target,
            terminal,
            job,
            jsonl=common["as_json"],
            status="failed" if groups else status,
            group=",".join(groups) or None,
        )

    return run_client(work, **common)


@conveyor.command()
@job_argument
@click.option("--run", "run_id", metavar="RUN", help="A run of JOB [the latest].")
@json_option
@server_options
def failures(job: str, run_id: str | None, **common: Any) -> int:
    """List the failed tasks of a run of JOB by kind, and the commands that run them again."""
    from conveyor.client.commands import show_failures

    return run_client(
        lambda target, terminal: show_failures(target, terminal, job, run_id=run_id), **common
    )


@conveyor.command()
@job_argument
@click.option("--run", "run_id", metavar="RUN", help="A run of JOB [the latest].")
@json_option
@server_options
def hosts(job: str, run_id: str | None, **common: Any) -> int:
    """List what a run of JOB does to each host, and the limits there."""
    from conveyor.client.commands import show_hosts

    return run_client(
        lambda target, terminal: show_hosts(target, terminal, job, run_id=run_id), **common
    )


@conveyor.command()
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@click.option("--status", type=click.Choice(["open", "closed"]), help="Only these jobs.")
@rows_option
@server_options
def jobs(limit: int, status: str | None, **common: Any) -> int:
    """List jobs, newest first; times are UTC."""
    from conveyor.client.commands import list_jobs

    return run_client(
        lambda target, terminal: list_jobs(
            target, terminal, limit=limit, status=status, jsonl=common["as_json"]
        ),
        **common,
    )


def _add_run_command(verb: str, help_text: str) -> None:
    @conveyor.command(verb, help=help_text)
    @jobs_argument
    @json_option
    @server_options
    def command(jobs: tuple[str, ...], **common: Any) -> int:
        from conveyor.client.commands import change_runs

        return run_client(
            lambda target, terminal: change_runs(target, terminal, jobs, verb), **common
        )


_add_run_command("stop", "Stop the latest run of each JOB; its results so far are kept.")
_add_run_command("pause", "Pause each JOB until it is resumed.")
_add_run_command("resume", "Resume each paused JOB.")


@conveyor.command()
@job_argument
@click.option("--failed", is_flag=True, help="Only the tasks that failed; keep the other results.")
@click.option(
    "--unfinished",
    is_flag=True,
    help="Only the tasks without a result, such as after a stop; with --failed, both.",
)
@group_option
@watch_option
@out_option
@json_option
@server_options
def rerun(
    job: str,
    failed: bool,
    unfinished: bool,
    groups: tuple[str, ...],
    watch: bool,
    out: Destination | None,
    **common: Any,
) -> int:
    """Run JOB again."""
    from conveyor.client.commands import rerun_job
    from conveyor.domain.model import TaskStatus

    if groups and unfinished:
        raise click.UsageError("--group takes tasks that failed: leave out --unfinished")
    statuses = [TaskStatus.FAILED] if failed or groups else []
    if unfinished:
        statuses += [TaskStatus.PENDING, TaskStatus.PROCESSING]
    return run_client(
        lambda target, terminal: rerun_job(
            target,
            terminal,
            job,
            statuses=statuses,
            group=",".join(groups) or None,
            watch=watch,
            out=out,
        ),
        **common,
    )


@conveyor.command()
@jobs_argument
@click.option("--yes", is_flag=True, help="Do not ask on a terminal.")
@json_option
@server_options
def rm(jobs: tuple[str, ...], yes: bool, **common: Any) -> int:
    """Delete each JOB with its runs and results."""
    from conveyor.client.commands import remove_jobs

    chosen = jobs if yes or not sys.stdin.isatty() else _confirmed(jobs, common)
    return run_client(lambda target, terminal: remove_jobs(target, terminal, chosen), **common)


def _confirmed(jobs: tuple[str, ...], common: dict[str, Any]) -> list[str]:
    """Ask whether to delete the jobs, outside an event loop, which would swallow an interrupt."""
    from conveyor.client.commands import read_jobs, removal

    found: list[JobReply] = []

    async def look(target: ServerTarget, terminal: Terminal) -> int:
        found.extend(await read_jobs(target, terminal, jobs))
        return 0

    run_client(look, **common)
    try:
        is_sure = click.confirm(f"{removal(found)}\nSure?", err=True)
    except click.Abort:
        click.echo(err=True)  # the cursor is still behind the question
        raise Interruption("interrupted; nothing was deleted") from None
    if not is_sure:
        raise Failure("nothing was deleted")
    return [job.job_id for job in found]


for command in (
    *(keys, webhook, listen, schedule, run, simulate),
    *(doctor, api, worker, admin, completion),
):
    conveyor.add_command(command)
conveyor.add_command(conveyor_dev, "dev")
