"""Run a program: set up its standard streams, and report any error as one line and an exit code."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

import click

from conveyor.client.output import printable

SUCCEEDED = 0
FAILED = 1
INCOMPLETE = 3
INTERRUPTED = 130

EXIT_CODES: dict[int, str] = {
    SUCCEEDED: "success, and every task that was waited for or listed succeeded",
    FAILED: "an error, reported in one line on standard error, never a traceback; a failed "
    "download; a closed output",
    click.UsageError.exit_code: "invalid command line",
    INCOMPLETE: "success, but some task did not succeed, or the run was stopped or failed",
    INTERRUPTED: "interrupted; the last line says how to continue",
}
"""Exit codes of the programs."""


class Failure(click.ClickException):
    """A line for standard error, with exit code 1."""


class Interruption(click.ClickException):
    """The last line of a command that the user interrupts."""

    exit_code = INTERRUPTED


def guarded(command: click.Command, name: str, arguments: list[str] | None) -> int:
    """Run a command, by default on the process's arguments; return the exit code."""
    reopen_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # Characters that the terminal's encoding lacks are escaped, not fatal.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _run(command, name, sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        return FAILED
    except click.ClickException as error:
        return _complain(name, error.format_message(), error.exit_code)
    except KeyboardInterrupt:
        return _complain(name, "interrupted", INTERRUPTED)
    except OSError as error:
        return _complain(name, error.strerror or type(error).__name__, FAILED)
    finally:
        _drop_what_cannot_be_written()


def reopen_closed_streams() -> None:
    """Open closed standard streams on the null device.

    Otherwise the next opened file or socket would take the number of one.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is the missing one.
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 (the process's own)


def _run(command: click.Command, name: str, arguments: list[str]) -> int:
    # click's own `main` writes a blank line and its own exit code in some cases.
    try:
        with command.make_context(name, list(arguments)) as context:
            code = command.invoke(context)
    except ExceptionGroup as group:
        # A command that runs a task group: what broke in it first is told as by itself.
        error: Exception = group
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        raise error from error.__cause__
    except click.exceptions.Exit as end:
        return end.exit_code
    return code if isinstance(code, int) else 0


def _complain(name: str, text: str, code: int) -> int:
    with suppress(OSError):
        print(f"{name}: {printable(' '.join(text.split()))}", file=sys.stderr, flush=True)
    return code


def _drop_what_cannot_be_written() -> None:
    """Redirect broken streams to the null device: the interpreter flushes again at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
