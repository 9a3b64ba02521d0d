"""The command line: `conveyor` talks to a server, `conveyor-dev` is one.

Only parsing happens here. What a command needs is imported when it runs, so that help, errors and
the server start quickly.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from conveyor import __version__
from conveyor.client.program import FAILED as FAILED
from conveyor.client.program import INTERRUPTED as INTERRUPTED
from conveyor.client.program import Failure, Interruption, guarded
from conveyor.testing.simulate_command import simulate

if TYPE_CHECKING:
    from conveyor.client.commands import Target, Terminal
    from conveyor.roles.banner import Announcer
    from conveyor.settings import InvalidSetting

Command = TypeVar("Command", bound=Callable[..., Any])
Work = Callable[["Target", "Terminal"], Awaitable[int]]


def main(arguments: list[str] | None = None) -> None:
    """The `conveyor` program."""
    sys.exit(guarded(conveyor, "conveyor", arguments))


def dev_main(arguments: list[str] | None = None) -> None:
    """The `conveyor-dev` program."""
    sys.exit(guarded(conveyor_dev, "conveyor-dev", arguments))


def _client(work: Work, server: str | None, api_key: str | None) -> int:
    """Run a client command on an event loop of its own."""
    import anyio

    from conveyor.client.commands import Target, Terminal
    from conveyor.client.errors import ClientError, InvalidTasks
    from conveyor.clock import SystemClock
    from conveyor.settings import client_environment

    environment = client_environment()
    target = Target(
        server or environment.server,
        api_key or environment.api_key,
        SystemClock(),
        named=server or None,
    )
    terminal = Terminal()
    try:
        return anyio.run(_awaited, work, target, terminal)
    except InvalidTasks as error:
        for line in error.lines:
            terminal.warn(f"conveyor: {line}")
        raise Failure(str(error)) from None
    except ClientError as error:
        raise Failure(str(error)) from None
    except KeyboardInterrupt:
        raise Interruption(terminal.farewell) from None


async def _awaited(work: Work, target: Target, terminal: Terminal) -> int:
    return await work(target, terminal)


def _server_options(command: Command) -> Command:
    server = click.option(
        "--server",
        metavar="URL",
        help="Server [CONVEYOR_URL, ZENROWS_BATCH_BASE_URL, else http://127.0.0.1:9000/v1].",
    )
    api_key = click.option(
        "--api-key", metavar="KEY", help="Key to show the server [ZENROWS_API_KEY, else local]."
    )
    return server(api_key(command))


class _Directory(click.Path):
    """A directory that is named: an empty text would be the present one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value:
            self.fail("must not be empty", param, ctx)
        return super().convert(value, param, ctx)


_out_option = click.option(
    "--out",
    type=_Directory(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Put the result bodies into DIR; waits for the end of the run.",
)
_watch_option = click.option("--watch", is_flag=True, help="Follow the run to its end.")
_status_option = click.option(
    "--status",
    type=click.Choice(["all", "successful", "failed", "processing"]),
    help="Only these tasks.",
)


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="conveyor")
@click.pass_context
def conveyor(context: click.Context) -> None:
    """Submit scraping jobs to a Conveyor server, follow them, fetch their results.

    Exit codes: 0 every task succeeded, 1 error, 2 usage, 3 some task did not succeed,
    130 interrupted.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@conveyor.command()
@click.argument("inputs", nargs=-1, required=True, metavar="FILE|-|URL...")
@_watch_option
@_out_option
@click.option("--param", "params", multiple=True, metavar="K=V", help="Scraper parameter.")
@click.option("--name", help="Label of the job.")
@click.option("--external-id", metavar="ID", help="Your id for the job.")
@click.option("--max-inflight", type=int, metavar="N", help="Most tasks worked at a time.")
@click.option("--priority", type=int, metavar="0-9", help="Higher runs sooner.")
@click.option("--max-attempts", type=int, metavar="N", help="Attempts a task gets.")
@click.option("--idempotency-key", metavar="KEY", help="Submitting twice makes one job.")
@_server_options
def submit(
    inputs: tuple[str, ...],
    params: tuple[str, ...],
    watch: bool,
    out: Path | None,
    idempotency_key: str | None,
    server: str | None,
    api_key: str | None,
    **fields: Any,
) -> int:
    """Submit URLs, or files with one URL or one JSON task a line.

    Blank lines and lines that start with # are skipped; - reads standard input.
    """
    from conveyor.client.commands import submit_tasks
    from conveyor.client.inputs import read_tasks
    from conveyor.client.submit import JobOptions

    options = JobOptions(zenrows_params=_parameters(params), **fields)

    async def work(target: Target, terminal: Terminal) -> int:
        return await submit_tasks(
            target,
            terminal,
            tasks,
            options,
            idempotency_key=idempotency_key,
            watch=watch,
            out=out,
        )

    tasks = _reading(lambda: read_tasks(inputs))
    return _client(work, server, api_key)


def _reading(read: Callable[[], list[Any]]) -> list[Any]:
    from conveyor.client.errors import ClientError

    try:
        return read()
    except ClientError as error:
        raise Failure(str(error)) from None


def _parameters(pairs: tuple[str, ...]) -> dict[str, str] | None:
    parameters = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise click.UsageError(f"--param takes KEY=VALUE, not {pair!r}")
        parameters[key] = value
    return parameters or None


@conveyor.command()
@click.argument("job")
@_out_option
@_server_options
def watch(job: str, out: Path | None, server: str | None, api_key: str | None) -> int:
    """Follow the latest run of JOB to its end."""
    from conveyor.client.commands import watch_job

    return _client(lambda target, terminal: watch_job(target, terminal, job, out), server, api_key)


@conveyor.command()
@click.argument("job")
@click.option("--jsonl", is_flag=True, help="One JSON object a line.")
@_out_option
@_status_option
@_server_options
def results(
    job: str,
    jsonl: bool,
    out: Path | None,
    status: str | None,
    server: str | None,
    api_key: str | None,
) -> int:
    """List the results of the latest run of JOB, or put their bodies into a directory.

    The list is as things stand; with --out a run that is not over is followed to its end first.
    """
    from conveyor.client.commands import fetch_results, show_results

    if jsonl and out is not None:
        raise click.UsageError("--jsonl lists rows and --out fetches bodies: choose one")

    async def work(target: Target, terminal: Terminal) -> int:
        if out is not None:
            return await fetch_results(target, terminal, job, out=out, status=status)
        return await show_results(target, terminal, job, jsonl=jsonl, status=status)

    return _client(work, server, api_key)


@conveyor.command()
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@click.option("--status", type=click.Choice(["open", "closed"]), help="Only these jobs.")
@click.option("--jsonl", is_flag=True, help="One JSON object a line.")
@_server_options
def jobs(
    limit: int, status: str | None, jsonl: bool, server: str | None, api_key: str | None
) -> int:
    """List jobs, newest first; times are UTC."""
    from conveyor.client.commands import list_jobs

    return _client(
        lambda target, terminal: list_jobs(
            target, terminal, limit=limit, status=status, jsonl=jsonl
        ),
        server,
        api_key,
    )


def _add_run_command(verb: str, help_text: str) -> None:
    @conveyor.command(verb, help=help_text)
    @click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
    @_server_options
    def command(jobs: tuple[str, ...], server: str | None, api_key: str | None) -> int:
        from conveyor.client.commands import change_runs

        return _client(
            lambda target, terminal: change_runs(target, terminal, jobs, verb), server, api_key
        )


_add_run_command("stop", "Stop the running run of each JOB; what is done is kept.")
_add_run_command("pause", "Pause each JOB until it is resumed.")
_add_run_command("resume", "Let each paused JOB go on.")


@conveyor.command()
@click.argument("job")
@click.option("--failed", is_flag=True, help="Only the tasks that failed; keep the others.")
@_watch_option
@_out_option
@_server_options
def rerun(
    job: str,
    failed: bool,
    watch: bool,
    out: Path | None,
    server: str | None,
    api_key: str | None,
) -> int:
    """Run JOB again."""
    from conveyor.client.commands import rerun_job

    status = "failed" if failed else None
    return _client(
        lambda target, terminal: rerun_job(
            target, terminal, job, status=status, watch=watch, out=out
        ),
        server,
        api_key,
    )


@conveyor.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@_server_options
def rm(jobs: tuple[str, ...], server: str | None, api_key: str | None) -> int:
    """Delete each JOB with its runs and results."""
    from conveyor.client.commands import remove_jobs

    return _client(lambda target, terminal: remove_jobs(target, terminal, jobs), server, api_key)


conveyor.add_command(simulate)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--host", help="Address to listen on [127.0.0.1].")
@click.option("--port", type=click.IntRange(0, 65_535), help="Port; 0 picks a free one [9000].")
@click.option(
    "--data-dir", type=_Directory(), metavar="DIR", help="Where everything is kept [.conveyor]."
)
@click.option("--gateway", metavar="direct|fake|URL", help="What scrapes [direct].")
@click.option("--allow-private", is_flag=True, default=None, help="Fetch private addresses too.")
@click.option("--workers", type=click.IntRange(1, 10_000), help="Gateway calls at a time [50].")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]))
@click.option("--log-format", type=click.Choice(["text", "json"]))
@click.option("--quiet", is_flag=True, help="Print nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one machine-readable line.")
@click.option("--demo", is_flag=True, help="Run a job over a small site that is served, too.")
@click.version_option(__version__, prog_name="conveyor-dev")
def conveyor_dev(quiet: bool, as_json: bool, demo: bool, **flags: Any) -> int:
    """Run a Conveyor server on this machine: the API and the worker in one process.

    Every setting can also be given as an environment variable CONVEYOR_…
    """
    from conveyor.domain.errors import ConveyorError
    from conveyor.roles.banner import Announcer
    from conveyor.settings import InvalidSetting, from_environment

    announcer = Announcer(quiet=quiet, as_json=as_json)
    if quiet or demo:
        flags["log_level"] = flags["log_level"] or "error"
    try:
        if demo:
            return _demo(flags, announcer)
        settings = from_environment(**flags)
        from conveyor.roles.dev import run

        return run(
            settings,
            on_ready=lambda info: announcer.ready(info, settings),
            on_stopping=announcer.stopping,
        )
    except InvalidSetting as error:
        raise _unfit(error, flags) from None
    except ConveyorError as error:
        raise Failure(error.detail) from None
    except ExceptionGroup as group:
        raise Failure(_reason(group)) from None


def _unfit(error: InvalidSetting, flags: Mapping[str, Any]) -> click.ClickException:
    """The setting that does not fit, named as it was given: by a flag or by a variable."""
    from conveyor.settings import PREFIX

    variable, _, problem = error.detail.partition(" ")
    name = variable.removeprefix(PREFIX).lower()
    if flags.get(name) is None:
        return Failure(error.detail)
    return click.UsageError(f"--{name.replace('_', '-')} {problem}")


def _demo(flags: dict[str, Any], announcer: Announcer) -> int:
    from conveyor.client.tour import tour
    from conveyor.clock import SystemClock
    from conveyor.roles.demo import run_demo
    from conveyor.settings import client_environment

    pace = SystemClock()
    # The key that `conveyor` shows, so that it finds the job.
    key = client_environment().api_key

    async def job(api: str, urls: Mapping[str, str], out: Path, to: Announcer) -> None:
        await tour(api, key, urls, out, pace=pace, say=to.say, stream=to.stream)

    return run_demo(flags, announcer, job)


def _reason(group: ExceptionGroup[Exception]) -> str:
    """What to tell of errors that ended a server together: ours if there is one."""
    from conveyor.domain.errors import ConveyorError

    ours = group.subgroup(ConveyorError)
    error: BaseException = ours or group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ConveyorError):
        return error.detail
    return f"{type(error).__name__}: {error}"
