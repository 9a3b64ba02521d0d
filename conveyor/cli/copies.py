"""`conveyor-dev data`: copies of a data directory."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from conveyor.cli.commands import errors_as_one_line, show_help
from conveyor.client.options import Directory

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object.")

data_dir_option = click.option(
    "--data-dir",
    type=Directory(path_type=Path),
    metavar="DIR",
    help="Directory of all data [.conveyor].",
)


@click.group(invoke_without_command=True, no_args_is_help=False)
@click.pass_context
def data(context: click.Context) -> None:
    """Copy the data of a server into a file, and fill an empty directory from it."""
    show_help(context)


@data.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE")
@data_dir_option
@click.option(
    "--for-sharing",
    is_flag=True,
    help="Make a secret for the copy, and leave out API and signing keys, callbacks and webhooks.",
)
@json_option
def save(file: Path, data_dir: Path | None, for_sharing: bool, as_json: bool) -> int:
    """Copy database and bodies of a running or stopped server into a new FILE, as of one instant.

    FILE can be read by its owner alone. It has the root secret and the sealed API keys in it.
    """
    with errors_as_one_line(), _ended_in_order():
        from conveyor.clock import SystemClock
        from conveyor.dev.copies import save_copy

        saved = save_copy(_directory(data_dir), file, SystemClock(), for_sharing=for_sharing)
    if as_json:
        about = {"file": str(file), "bytes": saved.size, "has_secret": saved.has_secret}
        click.echo(json.dumps({**about, "for_sharing": for_sharing, "keys": saved.keys}))
        return 0
    click.echo(f"saved {saved.size:,} bytes to {file}")
    if for_sharing:
        named = f"callers are named by the API keys {saved.keys[0]} to {saved.keys[-1]}; "
        click.echo(
            "It has a secret of its own, and no API key, signing key, callback, webhook or file "
            "input; "
            f"{named if saved.keys else ''}"
            "URLs, headers and bodies of tasks are in it as they are."
        )
    elif saved.has_secret:
        click.echo("It has the root secret and the sealed API keys in it: keep it like a key.")
    else:
        click.echo("It has sealed API keys in it; the secret is CONVEYOR_SECRET, which is not.")
    return 0


@data.command()
@click.argument(
    "file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE"
)
@data_dir_option
@json_option
def load(file: Path, data_dir: Path | None, as_json: bool) -> int:
    """Fill an empty directory from FILE, which this version or an older one has saved."""
    directory = _directory(data_dir)
    with errors_as_one_line(), _ended_in_order():
        from conveyor.dev.copies import load_copy

        about = load_copy(file, directory)
    if as_json:
        click.echo(json.dumps({"directory": str(directory), "saved_by": about.version}))
        return 0
    click.echo(f"loaded into {directory}, as saved by Conveyor {about.version}")
    return 0


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Have the signals that end a process remove what is not whole first."""

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    former = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _directory(given: Path | None) -> Path:
    """Return the directory that a server with the same flag and environment would use."""
    from conveyor.settings import from_environment

    return Path(from_environment(data_dir=None if given is None else str(given)).data_dir)
