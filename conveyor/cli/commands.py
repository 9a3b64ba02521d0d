"""From flags to commands: choose the server, read the tasks, report errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import click

from conveyor.client.options import FileType, csv_options, parameters, politeness_of
from conveyor.client.program import Failure, Interruption

if TYPE_CHECKING:
    from conveyor.client.commands import ServerTarget, Terminal
    from conveyor.client.inputs import OpenInput
    from conveyor.client.submit import JobOptions
    from conveyor.settings import InvalidSetting

Work = Callable[["ServerTarget", "Terminal"], Awaitable[int]]


def run_client(
    work: Work,
    *,
    server: str | None,
    api_key: str | None,
    as_json: bool,
    id_alone: bool = False,
) -> int:
    """Run a client command on its own event loop."""
    import anyio

    target = target_of(server, api_key)
    with report_error(as_json=as_json, id_alone=id_alone) as terminal:
        return anyio.run(_awaited, work, target, terminal)


async def _awaited(work: Work, target: ServerTarget, terminal: Terminal) -> int:
    return await work(target, terminal)


def target_of(server: str | None, api_key: str | None, *, lasts: bool = True) -> ServerTarget:
    """Choose the server and the key from the flags or the environment; see Target for `lasts`."""
    from conveyor.client.commands import ServerTarget
    from conveyor.clock import SystemClock
    from conveyor.settings import client_environment

    environment = client_environment()
    return ServerTarget(
        server or environment.server,
        api_key or environment.api_key,
        SystemClock(),
        named=server or None,
        lasts=lasts,
    )


@contextmanager
def report_error(*, as_json: bool = False, id_alone: bool = False) -> Iterator[Terminal]:
    """Build a terminal for a command that prints each error as one line."""
    from conveyor.client.commands import Printing, Terminal
    from conveyor.client.errors import ClientError, InvalidTasks

    alone = Printing.ID if id_alone else Printing.TEXT
    terminal = Terminal(Printing.JSON if as_json else alone)
    try:
        yield terminal
    except InvalidTasks as error:
        for line in error.lines:
            terminal.warn(f"conveyor: {line}")
        raise Failure(str(error)) from None
    except ClientError as error:
        raise Failure(str(error)) from None
    except KeyboardInterrupt:
        raise Interruption(terminal.farewell) from None


@contextmanager
def tasks_of(inputs: tuple[str, ...], flags: dict[str, Any]) -> Iterator[list[Any] | OpenInput]:
    """Read or open the inputs that the arguments name; remove the file options from the flags."""
    from conveyor.client.errors import ClientError
    from conveyor.client.inputs import file_input, opened, read_tasks
    from conveyor.client.rewriting import Reading

    file_type = flags.pop("file_type")
    csv = csv_options(
        flags.pop("fields"),
        header=flags.pop("header"),
        delimiter=flags.pop("delimiter"),
        quote=flags.pop("quote"),
    )
    reading = Reading(flags.pop("encoding"), flags.pop("scheme"), flags["skip_invalid"])
    with ExitStack() as files:
        try:
            kind = FileType(file_type) if file_type else None
            chosen = file_input(inputs, kind, csv, reading)
            tasks = (
                read_tasks(inputs, reading)
                if chosen is None
                else files.enter_context(opened(chosen))
            )
        except ClientError as error:
            raise Failure(str(error)) from None
        yield tasks


def job_options(flags: dict[str, Any]) -> JobOptions:
    """Turn the remaining flags into fields of a job."""
    from conveyor.client.submit import JobOptions

    return JobOptions(
        zenrows_params=parameters(flags.pop("params")), politeness=politeness_of(flags), **flags
    )


def show_help(context: click.Context) -> None:
    """Show the help of a group called without a command."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def unfit(error: InvalidSetting, flags: Mapping[str, Any]) -> click.ClickException:
    """Name the invalid setting as the user gave it: by its flag or its variable."""
    from conveyor.settings import PREFIX

    variable, _, problem = error.detail.partition(" ")
    name = variable.removeprefix(PREFIX).lower()
    if flags.get(name) is None:
        return Failure(error.detail)
    return click.UsageError(f"--{name.replace('_', '-')} {problem}")


@contextmanager
def errors_as_one_line(flags: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Report the error that ends a server, a role or its administration in one line."""
    from conveyor.domain.errors import ConveyorError
    from conveyor.settings import InvalidSetting

    try:
        yield
    except (click.ClickException, OSError):
        raise  # the program reports it
    except Exception as error:
        from conveyor.aio.concurrency import first_error

        first = first_error(error, prefer=ConveyorError)
        if isinstance(first, InvalidSetting):
            raise unfit(first, flags or {}) from None
        raise Failure(reason(error)) from None


def reason(error: Exception) -> str:
    """Describe an error, or a group of errors that ended a server."""
    from conveyor.aio.concurrency import first_error
    from conveyor.domain.errors import ConveyorError

    first = first_error(error, prefer=ConveyorError)
    if isinstance(first, ConveyorError):
        return first.detail
    return f"{type(first).__name__}: {first}"
