"""The commands that serve: `conveyor-dev`, `conveyor api` and `conveyor worker`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from conveyor import __version__
from conveyor.cli.commands import errors_as_one_line, report_error, target_of, unfit
from conveyor.cli.copies import data
from conveyor.client.options import Directory, gateway_options, server_options, stacked
from conveyor.client.options import json_option as json_lines_option

if TYPE_CHECKING:
    from conveyor.bootstrap.recording import RecordingChoice
    from conveyor.client.doctor import Diagnosis
    from conveyor.roles.banner import BannerPrinter
    from conveyor.roles.dev import ClockChoice, ServerChoices, ServerInfo
    from conveyor.roles.production import RoleInfo
    from conveyor.settings import Settings

metrics_port_option = click.option(
    "--metrics-port",
    type=click.IntRange(0, 65_535),
    help="Port of /metrics and /readyz; 0 picks a free one [9001].",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one machine-readable line when ready."
)


@click.command()
@click.option("--host", help="Address to listen on [0.0.0.0].")
@click.option("--port", type=click.IntRange(0, 65_535), help="Port; 0 picks a free one [9000].")
@metrics_port_option
@json_option
def api(as_json: bool, **flags: Any) -> int:
    """Serve the API over AWS without working tasks; any number of these and workers make a fleet.

    Configured by environment variables CONVEYOR_…
    """
    return run_role("api", as_json=as_json, **flags)


@click.command()
@click.option(
    "--workers", type=click.IntRange(1, 10_000), help="Number of gateway calls at a time [50]."
)
@metrics_port_option
@json_option
def worker(as_json: bool, **flags: Any) -> int:
    """Work the tasks of a fleet over AWS without serving the API.

    Configured by environment variables CONVEYOR_…
    """
    return run_role("worker", as_json=as_json, **flags)


def run_role(role: str, *, as_json: bool = False, **flags: Any) -> int:
    """Run a role until a signal; return the exit code."""
    from conveyor.roles.production import run
    from conveyor.settings import from_environment

    def ready(info: RoleInfo) -> None:
        if as_json:
            import msgspec

            click.echo(msgspec.json.encode(info).decode())

    with errors_as_one_line(flags):
        return run(from_environment(production=True, role=role, **flags), on_ready=ready)


clock_options = stacked(
    click.option(
        "--clock",
        "clock_mode",
        type=click.Choice(["system", "manual", "auto"]),
        default="system",
        help="The machine's clock, or one for tests that is moved by POST /_dev/clock, or that "
        "moves by itself to what is due while a client waits for a run [system].",
    ),
    click.option(
        "--clock-start",
        default="",
        metavar="INSTANT",
        help="First instant of such a clock in a new data directory [the present].",
    ),
)
rules_option = click.option(
    "--rules",
    type=click.Path(dir_okay=False),
    default="",
    metavar="FILE",
    help="Rules of the fake gateway, and names to redact, in TOML; read again when it changes.",
)
recording_options = stacked(
    click.option(
        "--record",
        type=Directory(),
        metavar="DIR",
        help="Write what the gateway answers into a new directory, without secrets.",
    ),
    click.option(
        "--replay", type=Directory(), metavar="DIR", help="Answer from what was recorded there."
    ),
    click.option(
        "--missing",
        type=click.Choice(["fail", "pass", "record"]),
        help="Fail a call that --replay has no answer for, make it, or make and add it [fail].",
    ),
)
address_options = stacked(
    click.option("--host", help="Address to listen on [127.0.0.1]."),
    click.option("--port", type=click.IntRange(0, 65_535), help="Port; 0 picks a free one [9000]."),
    click.option(
        "--data-dir", type=Directory(), metavar="DIR", help="Directory of all data [.conveyor]."
    ),
)


@click.command()
@address_options
@json_lines_option
@server_options
def doctor(as_json: bool, server: str | None, api_key: str | None, **flags: Any) -> int:
    """Say what would keep conveyor-dev from starting: settings, Python, port, directory, disk,
    records, secret and clock.

    A server that CONVEYOR_URL names is asked too; with --server, it alone. Prints one line for
    each, ok or the fault; exits with 1 after any fault.
    """
    import anyio

    from conveyor.client.doctor import doctor as examine
    from conveyor.settings import client_environment

    target = target_of(server, api_key)
    start = iter(()) if server else _examined_start(flags)
    asked = target if server or client_environment().names_server else None
    with report_error(as_json=as_json) as terminal:
        return anyio.run(examine, asked, terminal, start)


def _examined_start(flags: dict[str, Any]) -> Iterator[Diagnosis]:
    from conveyor.bootstrap.host_rules import watched_rules
    from conveyor.client.doctor import Diagnosis, examine_start
    from conveyor.clock import SystemClock
    from conveyor.roles.serving import bound
    from conveyor.settings import InvalidSetting, from_environment

    try:
        settings = from_environment(**flags)
        watched_rules(settings, SystemClock())
    except InvalidSetting as error:
        yield Diagnosis("settings", unfit(error, flags).message)
        return
    yield from examine_start(settings, SystemClock(), bound)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
    no_args_is_help=False,
)
@address_options
@gateway_options
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]))
@click.option("--log-format", type=click.Choice(["text", "json"]))
@click.option("--quiet", is_flag=True, help="Print nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one machine-readable line.")
@clock_options
@recording_options
@rules_option
@click.option(
    "--seed",
    metavar="demo|FILE",
    help="Fill an empty data directory with the jobs and outcomes of a TOML file first.",
)
@click.option(
    "--demo", is_flag=True, help="Run a job over a small flaky site, with a kill in its middle."
)
@click.option("--open", "opens", is_flag=True, help="Open the dashboard in a browser.")
@click.option(
    "--requests",
    "shows_requests",
    is_flag=True,
    help="Log a line for each request and each task, whatever the log level.",
)
@click.version_option(__version__, prog_name="conveyor-dev")
def conveyor_dev(
    quiet: bool,
    as_json: bool,
    demo: bool,
    seed: str | None,
    **flags: Any,
) -> int:
    """Run a Conveyor server on this machine: the API and the worker in one process.

    On a terminal it takes keys: ? lists them. Every setting can also be given as an environment
    variable CONVEYOR_…
    """
    context = click.get_current_context()
    if context.invoked_subcommand is not None:
        return _left_to_command(context)
    from conveyor.roles.banner import BannerPrinter
    from conveyor.settings import from_environment

    banner = BannerPrinter(quiet=quiet, as_json=as_json)
    if quiet or demo:
        flags["log_level"] = flags["log_level"] or "error"
    opens = flags.pop("opens")
    names = ("clock_mode", "clock_start", "record", "replay", "missing", "rules", "shows_requests")
    chosen = {name: flags.pop(name) or "" for name in names}
    with errors_as_one_line(flags):
        if demo:
            if seed or opens or {*chosen.values()} - {"", "system"}:
                flag = "--clock, --record, --replay, --rules, --seed, --open and --requests"
                raise click.UsageError(f"--demo takes no {flag}")
            return _demo(flags, banner)
        settings = from_environment(**flags)
        if opens and not settings.dashboard:
            raise click.UsageError("--open needs the dashboard: CONVEYOR_DASHBOARD is off")
        return _serve(settings, banner, _choices(settings, seed, **chosen), opens=opens)


def _choices(
    settings: Settings,
    seed: str | None,
    *,
    clock_mode: str,
    clock_start: str,
    rules: str,
    shows_requests: bool | str,
    **recorded: str,
) -> ServerChoices:
    """Read what a server has beside its settings, and fill its data directory with a seed."""
    from conveyor.roles.dev import ClockChoice, ServerChoices

    if rules and settings.gateway != "fake" and not any(recorded.values()):
        raise click.UsageError("--rules is for --gateway fake, --record and --replay")
    recording = _recording_choice(**recorded)
    clock = ClockChoice(clock_mode, clock_start)
    if seed:
        clock = _plant(seed, settings, clock)
    return ServerChoices(clock, recording, rules, bool(shows_requests))


def _serve(
    settings: Settings, banner: BannerPrinter, choices: ServerChoices, *, opens: bool
) -> int:
    from conveyor.roles.dev import run
    from conveyor.roles.keys import Keyboard, on_terminal, open_browser

    has_keys = banner.stream is not None and not banner.as_json and on_terminal()

    def ready(info: ServerInfo) -> None:
        banner.ready(info, settings)
        banner.try_out(info, has_keys=has_keys)
        if opens:
            import threading

            threading.Thread(target=open_browser, args=(info.pages,), daemon=True).start()

    return run(
        settings,
        choices,
        on_ready=ready,
        on_stopping=banner.stopping,
        on_ended=banner.say,
        keyboard=Keyboard(banner.say, _plant_demo) if has_keys else None,
    )


async def _plant_demo(settings: Settings) -> None:
    """Fill the data directory of the settings with the jobs of the demo."""
    from conveyor.demo.seeds import plant_apart
    from conveyor.settings import client_environment

    await plant_apart(settings, client_environment().api_key)


def _plant(seed: str, settings: Settings, clock: ClockChoice) -> ClockChoice:
    """Fill the data directory; return the clock to go on with."""
    import msgspec

    from conveyor.demo.seeds import plant, read_seed
    from conveyor.settings import client_environment

    clock.make()
    # The key that `conveyor` sends, so that it finds the jobs.
    key = client_environment().api_key
    plant(read_seed(seed, start=clock.start), settings, key, clock=clock)
    return msgspec.structs.replace(clock, start="")


def _left_to_command(context: click.Context) -> int:
    """Leave all to a command. Raises UsageError for a flag before its name."""
    flags = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    for name in context.params:
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            command = context.invoked_subcommand
            raise click.UsageError(
                f"{flags[name]} is for a server: flags of {command} come behind it"
            )
    return 0


conveyor_dev.add_command(data)


@conveyor_dev.command("exec", context_settings={"allow_interspersed_args": False})
@gateway_options
@clock_options
@recording_options
@rules_option
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]))
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND …")
def exec_command(command: tuple[str, ...], **flags: Any) -> int:
    """Run a command against a server of its own, on a free port and over a directory that is
    removed, and exit with its code: 128 and the number for a signal, 70 if the server fails.

    The command gets CONVEYOR_URL, ZENROWS_BATCH_BASE_URL, ZENROWS_API_KEY, CONVEYOR_DEV_URL and
    CONVEYOR_DEV_TOKEN. Nothing else is printed, unless the server fails: then its last 50 lines; or
    answers were not recorded: then how many, and of which hosts.
    """
    from conveyor.roles.exec import run_with_server

    names = {"clock_mode": "clock"}
    given: list[str] = []
    for name, value in flags.items():
        flag = f"--{names.get(name, name).replace('_', '-')}"
        if value is True:
            given.append(flag)
        elif value:
            given += [flag, str(value)]
    return run_with_server(command, given)


def _recording_choice(record: str, replay: str, missing: str) -> RecordingChoice:
    from conveyor.bootstrap.recording import RecordingChoice

    if missing and not replay:
        raise click.UsageError("--missing is about what --replay does not have")
    if record and replay:
        raise click.UsageError("--record and --replay exclude each other; see --missing record")
    return RecordingChoice(record, replay, missing or "fail")


def _demo(flags: dict[str, Any], banner: BannerPrinter) -> int:
    from conveyor.clock import SystemClock
    from conveyor.demo.run import run_demo
    from conveyor.settings import client_environment

    # The key that `conveyor` sends, so that it finds the job.
    return run_demo(flags, banner, client_environment().api_key, SystemClock())
