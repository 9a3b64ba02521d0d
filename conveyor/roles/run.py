"""Run one piece of work in one process, with a development server for as long as it takes.

The work talks to the server over loopback, like any client. In-process calls of the application
would hold every body in memory, and could not be cancelled.
"""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Protocol

import anyio
from anyio.abc import TaskStatus

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.roles.dev import serve
from conveyor.roles.logs import start_logs
from conveyor.roles.serving import COLLECT_AFTER
from conveyor.settings import Settings

INTERRUPTED = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PREFIX = ".conveyor-run-"

_log = logging.getLogger("conveyor.roles")

OWN_ROWS = 10_000_000
OWN_BYTES = 10_000_000_000
OWN_SECONDS = 3_600.0
"""Minimum limits for a file: the limits guard a server from its callers, and here the only caller
has chosen the file."""


class ServerTask(Protocol):
    """Work to do with the server at the address `api`, which ends in /v1."""

    async def drain(self, api: str) -> int:
        """Do all of the work; return the exit code."""
        ...

    async def salvage(self, api: str) -> None:
        """Save the results so far, after an interrupt cancelled `drain`."""
        ...


def run_once(settings: Settings, work: ServerTask, *, data_dir: Path | None, beside: Path) -> int:
    """Serve until the work is done or interrupted; return the exit code, 130 after an interrupt.

    Without a `data_dir` a temporary one is made in the directory `beside`, which has room for the
    results, and removed at the end. A first signal cancels the work and saves its results, a second
    one cancels the saving. Raises ConveyorError if the server cannot start, and any error of the
    work.
    """
    start_logs(settings)
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 50)
    with _directory(data_dir, beside) as directory:
        chosen = replace(
            settings,
            data_dir=directory,
            max_input_rows=max(settings.max_input_rows, OWN_ROWS),
            max_input_bytes=max(settings.max_input_bytes, OWN_BYTES),
            max_validation_seconds=max(settings.max_validation_seconds, OWN_SECONDS),
            # Calls still in flight after the work belong to a run that was stopped.
            shutdown_grace=0.0,
        )
        loop = {"use_uvloop": find_spec("uvloop") is not None}
        return anyio.run(_run, chosen, work, backend_options=loop)


@contextmanager
def _directory(data_dir: Path | None, beside: Path) -> Iterator[str]:
    if data_dir is not None:
        yield str(data_dir)
        return
    _remove_leftovers(beside)
    with _signals(signal.default_int_handler):
        try:
            made = tempfile.mkdtemp(prefix=PREFIX, dir=beside)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            text = f"cannot make a directory in {beside}: {reason}"
            raise ConveyorError(ErrorCode.UNAVAILABLE, text) from None
        try:
            yield made
        finally:
            with _signals(signal.SIG_IGN):
                shutil.rmtree(made, ignore_errors=True)


def _remove_leftovers(beside: Path) -> None:
    """Remove the directories of runs that were killed. A run that lives holds the lock of its own,
    and one that has no lock yet is left alone."""
    for path in beside.glob(f"{PREFIX}*"):
        if path.is_symlink():
            continue
        try:
            lock = os.open(path / "lock", os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
            _log.warning("removed what a run that was killed had left in %s", path)
        except BlockingIOError:
            continue
        except OSError as error:
            _log.warning("cannot remove %s, which a killed run left: %s", path, error.strerror)
        finally:
            os.close(lock)


@contextmanager
def _signals(
    handler: signal.Handlers | Callable[[int, FrameType | None], object],
) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@dataclass(slots=True)
class _Interruption:
    """Cancel scopes for the first and the second signal."""

    draining: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    salvaging: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    async def listen(self, *, task_status: TaskStatus[None]) -> None:
        """Cancel a scope at each signal until cancelled."""
        with anyio.open_signal_receiver(*SIGNALS) as signals:
            task_status.started()
            async for _ in signals:
                if self.draining.cancel_called:
                    self.salvaging.cancel()
                self.draining.cancel()


async def _run(settings: Settings, work: ServerTask) -> int:
    interruption = _Interruption()
    async with anyio.create_task_group() as group:
        await group.start(interruption.listen)
        outcome = await _beside_server(settings, work, interruption)
        group.cancel_scope.cancel()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


async def _beside_server(
    settings: Settings, work: ServerTask, interruption: _Interruption
) -> int | Exception:
    """Run the work beside a server; return its exit code or error, after the server has ended in
    order."""
    stop = anyio.Event()
    outcome: int | Exception = INTERRUPTED

    async def run_server(*, task_status: TaskStatus[str]) -> None:
        await serve(settings, on_ready=lambda info: task_status.started(info.api), stop=stop)

    async with anyio.create_task_group() as group:
        # The server's own files are private; results are written under the umask of the caller.
        umask = os.umask(0o077)
        try:
            api = await group.start(run_server)
        finally:
            os.umask(umask)
        try:
            outcome = await _worked(work, api, interruption)
        except Exception as error:
            outcome = error
        finally:
            stop.set()
    return outcome


async def _worked(work: ServerTask, api: str, interruption: _Interruption) -> int:
    with interruption.draining:
        return await work.drain(api)
    with interruption.salvaging:
        await work.salvage(api)
    return INTERRUPTED
