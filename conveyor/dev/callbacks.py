"""The callbacks port of a machine without state machines: what would be told goes to a file."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock

_log = logging.getLogger("conveyor.callbacks")


class FileCallbacks:
    """The callbacks port. Each end is a line of JSON in one file, which only its owner may read:
    the tokens are in it. Somebody always waits."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._turn = anyio.Lock()

    async def send_heartbeat(self, task_token: str) -> None:
        """Without effect, but for a line in the log that does not name the token."""
        _log.debug("a heartbeat would be sent")

    async def send_success(self, task_token: str, *, output: str) -> None:
        """Append `at`, `task_token`, `succeeded`: true, and `output` as JSON."""
        await self._append(task_token, succeeded=True, output=_as_json(output))

    async def send_failure(self, task_token: str, *, error: str, cause: str) -> None:
        """Append `at`, `task_token`, `succeeded`: false, `error`, `cause` (as JSON where it is)."""
        await self._append(task_token, succeeded=False, error=error, cause=_as_json(cause))

    async def _append(self, task_token: str, **told: Any) -> None:
        line = msgspec.json.encode({"at": self._clock.now(), "task_token": task_token, **told})
        async with self._turn:
            try:
                await anyio.to_thread.run_sync(_write, self._path, line + b"\n")
            except OSError as error:
                raise ConveyorError(
                    ErrorCode.UNAVAILABLE, f"{self._path.name} cannot be written: {error.strerror}"
                ) from None


def _write(path: Path, line: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with open(descriptor, "ab") as file:
        os.fchmod(descriptor, 0o600)
        file.write(line)


def _as_json(text: str) -> Any:
    """What a text says as JSON; the text where it is none."""
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(text)
    return text
