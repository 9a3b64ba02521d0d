"""`conveyor admin`: the resources of a fleet, and its dead letters."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import click

from conveyor.cli.commands import errors_as_one_line, show_help
from conveyor.client.program import Failure

if TYPE_CHECKING:
    from conveyor.settings import Settings

Say = Callable[[str], None]
Task = Callable[["Settings", Say], Awaitable[int]]


@click.group(invoke_without_command=True, no_args_is_help=False)
@click.pass_context
def admin(context: click.Context) -> None:
    """Make, check and remove what a fleet needs in AWS, and look after its dead letters.

    Which fleet, and where, is told by environment variables CONVEYOR_…
    """
    show_help(context)


@admin.command()
def init() -> int:
    """Make what is missing, and change nothing else.

    Table, indexes, time to live, queues, bucket, lifecycle rules and the fleet's record.
    """
    from conveyor.roles.admin import init

    return _run(init)


@admin.command()
def check() -> int:
    """Check every resource, the clock and the permissions.

    Prints a line for each thing, ok or what is wrong; exit code 1 where anything is wrong.
    """
    from conveyor.roles.admin import check

    return _run(check)


@admin.command()
@click.option("--yes", metavar="ENVIRONMENT", required=True, help="The environment, once more.")
@click.option("--even-if-alive", is_flag=True, help="Do not look whether a worker is alive.")
def destroy(yes: str, even_if_alive: bool) -> int:
    """Remove every resource of the environment with all that is in it.

    All processes have to be stopped. It waits for 30 seconds in which no worker speaks, and refuses
    where one does; it does not notice an API.
    """
    from conveyor.roles.admin import destroy

    async def confirmed(settings: Settings, say: Say) -> int:
        if yes != settings.environment:
            raise Failure(f"--yes names {yes}, CONVEYOR_ENVIRONMENT {settings.environment}")
        return await destroy(settings, say, even_if_alive=even_if_alive)

    return _run(confirmed)


@admin.command()
@click.argument("kind", type=click.Choice(["redis", "dynamodb"]))
def ledger(kind: str) -> int:
    """Let the fleet keep its permits elsewhere from now on. All workers have to be stopped."""
    from conveyor.roles.admin import move_ledger

    async def move(settings: Settings, say: Say) -> int:
        return await move_ledger(settings, kind, say)

    return _run(move)


@admin.command()
def rebind() -> int:
    """Let the fleet have the bucket, and the secret if one is set, of these settings from now on.

    Bodies are not moved. All workers have to be stopped.
    """
    from conveyor.roles.admin import rebind

    return _run(rebind)


@admin.command("key-hash")
def key_hash() -> None:
    """Read API keys from standard input, one a line, and print their lines for CONVEYOR_API_KEYS.

    Nothing is printed where one of them is a key that no request can carry.
    """
    from conveyor.domain.api_keys import is_valid_key, key_hash

    hashes = []
    for number, line in enumerate(sys.stdin.buffer.read().splitlines(), start=1):
        key = line.decode("latin-1").strip(" \t")
        if not key:
            continue
        # The line is not repeated: it is a key.
        if not is_valid_key(key):
            raise Failure(
                f"line {number} is no API key: printable ASCII without spaces, not too long"
            )
        hashes.append(key_hash(key))
    if not hashes:
        raise click.UsageError("no key on standard input")
    click.echo("\n".join(hashes))


@admin.group(invoke_without_command=True, no_args_is_help=False)
@click.pass_context
def dlq(context: click.Context) -> None:
    """Look after the dead letters: messages that were given up."""
    show_help(context)


@dlq.command("list")
@click.option("--limit", type=click.IntRange(1, 1_000), default=100, show_default=True)
def list_letters(limit: int) -> int:
    """List dead letters: id, age, kind, job, run, and the reason if one was given.

    A letter that cannot be read is listed with why it cannot.

    A letter without a reason was received too often: its handler never got to an end.
    """
    from conveyor.roles.admin import list_letters

    async def listed(settings: Settings, say: Say) -> int:
        return await list_letters(settings, say, limit=limit)

    return _run(listed)


@dlq.command()
@click.argument("letters", nargs=-1, metavar="ID...")
@click.option("--all", "every", is_flag=True, help="All of them.")
def redrive(letters: tuple[str, ...], every: bool) -> int:
    """Send dead letters back to where they came from."""
    from conveyor.roles.admin import redrive_letters

    chosen = _chosen(letters, every)

    async def redriven(settings: Settings, say: Say) -> int:
        return await redrive_letters(settings, say, chosen)

    return _run(redriven)


@dlq.command()
@click.argument("letters", nargs=-1, metavar="ID...")
@click.option("--all", "every", is_flag=True, help="All of them.")
def drop(letters: tuple[str, ...], every: bool) -> int:
    """Remove dead letters for good."""
    from conveyor.roles.admin import drop_letters

    chosen = _chosen(letters, every)

    async def dropped(settings: Settings, say: Say) -> int:
        return await drop_letters(settings, say, chosen)

    return _run(dropped)


def _chosen(letters: tuple[str, ...], every: bool) -> frozenset[str] | None:
    """The ids that were named; None for all."""
    if every == bool(letters):
        raise click.UsageError("name the letters, or say --all")
    return None if every else frozenset(letters)


def _run(task: Task) -> int:
    from dataclasses import replace

    import anyio

    from conveyor.roles.logs import start_logs
    from conveyor.roles.production import check_place
    from conveyor.settings import from_environment

    with errors_as_one_line():
        settings = from_environment(production=True)
        # Read by a person, whatever the roles' logs are for.
        start_logs(replace(settings, log_format="text"))
        check_place(settings)
        return anyio.run(task, settings, click.echo)
