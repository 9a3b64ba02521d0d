"""`conveyor admin`: the resources of a fleet, its dead letters, and its callers' schedules."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

import click

from conveyor.cli.commands import errors_as_one_line, show_help
from conveyor.client.program import Failure

if TYPE_CHECKING:
    from conveyor.settings import Settings

Say = Callable[[str], None]
Task = Callable[["Settings", Say], Awaitable[int]]


def _key_hash_line(_context: click.Context, _option: click.Parameter, value: str) -> str:
    from conveyor.domain.api_keys import is_key_hash

    word = value.strip().partition(" ")[0]
    if not is_key_hash(word):
        # Do not repeat it: it may be a key by mistake.
        raise click.BadParameter("must be sha256: and 64 hex digits; conveyor admin key-hash")
    return word.lower()


json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")


@click.group(invoke_without_command=True, no_args_is_help=False)
@click.pass_context
def admin(context: click.Context) -> None:
    """Create, check and remove the AWS resources of a fleet; look at a run, pause all; manage dead
    letters and schedules.

    Environment variables CONVEYOR_… name the fleet and its region.
    """
    show_help(context)


@admin.command()
@json_option
def init(as_json: bool) -> int:
    """Create missing resources; change nothing else.

    Table, indexes, time to live, queues, bucket, lifecycle rules and the fleet's record.
    """
    from conveyor.roles.admin import init

    return _run(partial(init, as_json=as_json))


@admin.command()
@json_option
def check(as_json: bool) -> int:
    """Check every resource, the clock and the permissions.

    Prints one line for each, ok or the fault; exits with 1 after any fault.
    """
    from conveyor.roles.admin import check

    return _run(partial(check, as_json=as_json))


@admin.command("run")
@click.argument("run_id", metavar="RUN")
@json_option
def show_run(run_id: str, as_json: bool) -> int:
    """Show why a run is as slow as it is.

    Permits in use and their holders, the ceiling after refusals for load, the depth of its queue,
    when its counters changed, the workers that have it in hand, and why it waits.
    """
    from conveyor.roles.admin import show_run

    async def shown(settings: Settings, say: Say) -> int:
        return await show_run(settings, say, run_id, as_json=as_json)

    return _run(shown)


fleet_option = click.option(
    "--fleet",
    is_flag=True,
    required=True,
    expose_value=False,
    help="The whole fleet; needed, as a confirmation.",
)


@admin.command("pause")
@fleet_option
@json_option
def pause_fleet(as_json: bool) -> int:
    """Let nothing new start in the whole fleet, until it is resumed.

    Within 10 seconds workers receive no message and make no further call. Calls under way end and
    are settled. The API goes on, and schedules fire: their runs wait.
    """
    from conveyor.roles.admin import pause

    return _run(partial(pause, as_json=as_json))


@admin.command("resume")
@fleet_option
@json_option
def resume_fleet(as_json: bool) -> int:
    """Let a paused fleet go on."""
    from conveyor.roles.admin import resume

    return _run(partial(resume, as_json=as_json))


@admin.command()
@click.option(
    "--yes",
    metavar="ENVIRONMENT",
    required=True,
    help="Name of the environment, as a confirmation.",
)
@click.option("--even-if-alive", is_flag=True, help="Do not check for live workers.")
@json_option
def destroy(yes: str, even_if_alive: bool, as_json: bool) -> int:
    """Remove every resource of the environment with its contents.

    Stop all processes first. The command listens for 30 seconds and refuses if a worker is alive;
    it cannot detect an API.
    """
    from conveyor.roles.admin import destroy

    async def confirmed(settings: Settings, say: Say) -> int:
        if yes != settings.environment:
            raise Failure(f"--yes names {yes}, CONVEYOR_ENVIRONMENT {settings.environment}")
        return await destroy(settings, say, even_if_alive=even_if_alive, as_json=as_json)

    return _run(confirmed)


@admin.command()
@click.argument("kind", type=click.Choice(["redis", "dynamodb"]))
@json_option
def ledger(kind: str, as_json: bool) -> int:
    """Move the fleet's permits to another ledger. Stop all workers first."""
    from conveyor.roles.admin import move_ledger

    async def move(settings: Settings, say: Say) -> int:
        return await move_ledger(settings, kind, say, as_json=as_json)

    return _run(move)


@admin.command()
@json_option
def rebind(as_json: bool) -> int:
    """Set the fleet's bucket, and its secret if one is set, to those of these settings.

    Does not move bodies. Stop all workers first.
    """
    from conveyor.roles.admin import rebind

    return _run(partial(rebind, as_json=as_json))


@admin.command("key-hash")
@json_option
def key_hash(as_json: bool) -> None:
    """Read API keys from standard input, one a line, and print their lines for CONVEYOR_API_KEYS.

    Prints nothing if one of them is a key that no request can carry.
    """
    from conveyor.domain.api_keys import is_valid_key, key_hash

    hashes = []
    for number, line in enumerate(sys.stdin.buffer.read().splitlines(), start=1):
        key = line.decode("latin-1").strip(" \t")
        if not key:
            continue
        # Do not repeat the line: it is a key.
        if not is_valid_key(key):
            raise Failure(
                f"line {number} is not an API key (printable ASCII without spaces, not too long)"
            )
        hashes.append(key_hash(key))
    if not hashes:
        raise click.UsageError("no key on standard input")
    click.echo("\n".join(json.dumps({"key_hash": one}) if as_json else one for one in hashes))


@admin.group(invoke_without_command=True, no_args_is_help=False)
@click.pass_context
def dlq(context: click.Context) -> None:
    """Manage the dead letters: messages that the fleet gave up on."""
    show_help(context)


@dlq.command("list")
@click.option("--limit", type=click.IntRange(1, 1_000), default=100, show_default=True)
@json_option
def list_letters(limit: int, as_json: bool) -> int:
    """List dead letters: id, age, kind, job, run, and the reason if there is one.

    An unreadable letter is listed with the fault.

    A letter without a reason was received too often: its handler never finished.
    """
    from conveyor.roles.admin import list_letters

    async def listed(settings: Settings, say: Say) -> int:
        return await list_letters(settings, say, limit=limit, as_json=as_json)

    return _run(listed)


@dlq.command()
@click.argument("letters", nargs=-1, metavar="ID...")
@click.option("--all", "every", is_flag=True, help="All of them.")
@json_option
def redrive(letters: tuple[str, ...], every: bool, as_json: bool) -> int:
    """Send dead letters back to the queues they came from."""
    from conveyor.roles.admin import redrive_letters

    chosen = _chosen(letters, every)

    async def redriven(settings: Settings, say: Say) -> int:
        return await redrive_letters(settings, say, chosen, as_json=as_json)

    return _run(redriven)


@dlq.command()
@click.argument("letters", nargs=-1, metavar="ID...")
@click.option("--all", "every", is_flag=True, help="All of them.")
@json_option
def drop(letters: tuple[str, ...], every: bool, as_json: bool) -> int:
    """Delete dead letters."""
    from conveyor.roles.admin import drop_letters

    chosen = _chosen(letters, every)

    async def dropped(settings: Settings, say: Say) -> int:
        return await drop_letters(settings, say, chosen, as_json=as_json)

    return _run(dropped)


@admin.group(invoke_without_command=True, no_args_is_help=False)
@click.pass_context
def schedules(context: click.Context) -> None:
    """Manage the schedules of all callers."""
    show_help(context)


@schedules.command("list")
@json_option
def list_schedules(as_json: bool) -> int:
    """List scheduled jobs of all callers: state, next fire, hash of the key.

    A key that is no longer in CONVEYOR_API_KEYS is marked: its schedules still fire. Without the
    setting, keys are not checked.
    """
    from conveyor.roles.admin import list_schedules

    async def listed(settings: Settings, say: Say) -> int:
        return await list_schedules(settings, say, as_json=as_json)

    return _run(listed)


key_hash_option = click.option(
    "--key-hash",
    "hashed",
    required=True,
    callback=_key_hash_line,
    metavar="sha256:...",
    help="The key, as its line in CONVEYOR_API_KEYS.",
)


@schedules.command()
@key_hash_option
@json_option
def pause(hashed: str, as_json: bool) -> int:
    """Pause every schedule of a key, such as one that was taken away."""
    return _set_schedules(hashed, paused=True, as_json=as_json)


@schedules.command()
@key_hash_option
@json_option
def resume(hashed: str, as_json: bool) -> int:
    """Resume every schedule of a key. What was due meanwhile is skipped."""
    return _set_schedules(hashed, paused=False, as_json=as_json)


def _set_schedules(hashed: str, *, paused: bool, as_json: bool) -> int:
    from conveyor.roles.admin import set_schedules

    async def changed(settings: Settings, say: Say) -> int:
        return await set_schedules(settings, say, hashed, paused=paused, as_json=as_json)

    return _run(changed)


def _chosen(letters: tuple[str, ...], every: bool) -> frozenset[str] | None:
    """Return the given ids; None means all."""
    if every == bool(letters):
        raise click.UsageError("name the letters, or give --all")
    return None if every else frozenset(letters)


def _run(task: Task) -> int:
    from dataclasses import replace

    import anyio

    from conveyor.roles.logs import start_logs
    from conveyor.roles.production import check_place
    from conveyor.settings import from_environment

    with errors_as_one_line():
        settings = from_environment(production=True)
        # A person reads these, whatever format the roles log in.
        start_logs(replace(settings, log_format="text"))
        check_place(settings)
        return anyio.run(task, settings, click.echo)
