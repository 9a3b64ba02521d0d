"""`conveyor api` and `conveyor worker`: the roles of production."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from conveyor.cli.work import in_one_line

if TYPE_CHECKING:
    from conveyor.roles.production import RoleInfo

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
    """Serve the API over AWS, working no task; any number of these make a fleet with workers.

    Set by environment variables CONVEYOR_…
    """
    return run_role("api", as_json=as_json, **flags)


@click.command()
@click.option("--workers", type=click.IntRange(1, 10_000), help="Gateway calls at a time [50].")
@metrics_port_option
@json_option
def worker(as_json: bool, **flags: Any) -> int:
    """Work the tasks of a fleet over AWS, serving no API.

    Set by environment variables CONVEYOR_…
    """
    return run_role("worker", as_json=as_json, **flags)


def run_role(role: str, *, as_json: bool = False, **flags: Any) -> int:
    """Be a role until a signal; the exit code."""
    from conveyor.roles.production import run
    from conveyor.settings import from_environment

    def ready(info: RoleInfo) -> None:
        if as_json:
            import msgspec

            click.echo(msgspec.json.encode(info).decode())

    with in_one_line(flags):
        return run(from_environment(production=True, role=role, **flags), on_ready=ready)
