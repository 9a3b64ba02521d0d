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
    from conveyor.client.doctor import Diagnosis
    from conveyor.roles.banner import BannerPrinter
    from conveyor.roles.dev import ClockChoice, ServerInfo
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
    records and clock.

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
    from conveyor.client.doctor import Diagnosis, examine_start
    from conveyor.clock import SystemClock
    from conveyor.roles.serving import bound
    from conveyor.settings import InvalidSetting, from_environment

    try:
        settings = from_environment(**flags)
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
@click.option(
    "--clock",
    "clock_mode",
    type=click.Choice(["system", "manual", "auto"]),
    default="system",
    help="The machine's clock, or one for tests that is moved by POST /_dev/clock, or that moves "
    "by itself to what is due while a client waits for a run [system].",
)
@click.option(
    "--clock-start",
    default="",
    metavar="INSTANT",
    help="First instant of such a clock in a new data directory [the present].",
)
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
@click.pass_context
def conveyor_dev(
    context: click.Context,
    /,
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
    if context.invoked_subcommand is not None:
        return _left_to_command(context)
    from conveyor.roles.banner import BannerPrinter
    from conveyor.settings import from_environment

    clock = (flags.pop("clock_mode"), flags.pop("clock_start"))
    opens, shows_requests = flags.pop("opens"), flags.pop("shows_requests")
    banner = BannerPrinter(quiet=quiet, as_json=as_json)
    if quiet or demo:
        flags["log_level"] = flags["log_level"] or "error"
    with errors_as_one_line(flags):
        if demo:
            if clock != ("system", "") or opens or shows_requests or seed:
                raise click.UsageError("--demo takes no --clock, --open, --requests and --seed")
            return _demo(flags, banner)
        settings = from_environment(**flags)
        if opens and not settings.dashboard:
            raise click.UsageError("--open needs the dashboard: CONVEYOR_DASHBOARD is off")
        from conveyor.roles.dev import ClockChoice

        choice = ClockChoice(*clock)
        if seed:
            choice = _plant(seed, settings, choice)
        return _serve(settings, banner, choice, opens=opens, shows_requests=shows_requests)


def _serve(
    settings: Settings,
    banner: BannerPrinter,
    clock: ClockChoice,
    *,
    opens: bool,
    shows_requests: bool,
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
        on_ready=ready,
        on_stopping=banner.stopping,
        clock=clock,
        keyboard=Keyboard(banner.say) if has_keys else None,
        shows_requests=shows_requests,
    )


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


def _demo(flags: dict[str, Any], banner: BannerPrinter) -> int:
    from conveyor.clock import SystemClock
    from conveyor.demo.run import run_demo
    from conveyor.settings import client_environment

    # The key that `conveyor` sends, so that it finds the job.
    return run_demo(flags, banner, client_environment().api_key, SystemClock())
