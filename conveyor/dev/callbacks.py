"""The callbacks port on a machine without state machines: every notification goes to a file."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import anyio
import anyio.to_thread
import msgspec

from conveyor.clock import LAST_INSTANT
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.text_rules import rfc3339
from conveyor.ports.clock import Clock
from conveyor.ports.idle import OpenWork, turn
from conveyor.ports.outbox import Callbacks, SentCallback

MOST_SENT = 1_000
"""Callbacks that are shown."""

_log = logging.getLogger("conveyor.callbacks")


class FileCallbacks(Callbacks):
    """Callbacks as lines of JSON in one file, which only its owner may read, as the tokens are in
    it.

    No token ever expires here. A heartbeat writes nothing but a line of the log.
    """

    def __init__(self, path: Path, clock: Clock, *, work: OpenWork | None = None) -> None:
        self._work = work
        self._path = path
        self._clock = clock
        self._turn = anyio.Lock()

    async def send_heartbeat(self, task_token: str) -> None:
        _log.debug("heartbeat not sent: there is no state machine here")

    async def send_success(self, task_token: str, *, output: str) -> None:
        await self._append(task_token, succeeded=True, output=_as_json(output))

    async def send_failure(self, task_token: str, *, error: str, cause: str) -> None:
        await self._append(task_token, succeeded=False, error=error, cause=_as_json(cause))

    async def sent(self) -> list[SentCallback]:
        """Return the last MOST_SENT callbacks, oldest first, with digests in place of the tokens.
        Raises ConveyorError(unavailable)."""
        async with self._turn, turn(self._work, "callbacks"):
            try:
                lines = await anyio.to_thread.run_sync(_last_lines, self._path)
            except OSError as error:
                detail = f"{self._path.name} cannot be read: {error.strerror}"
                raise ConveyorError(ErrorCode.UNAVAILABLE, detail) from None
        shown = [callback for line in lines if (callback := _shown(line)) is not None]
        if len(shown) < len(lines):
            damaged = len(lines) - len(shown)
            _log.warning("%s: left out %d damaged lines", self._path.name, damaged)
        return shown

    async def clear(self) -> None:
        """Empty the file, where there is one."""
        async with self._turn, turn(self._work, "callbacks"):
            with contextlib.suppress(FileNotFoundError):
                await anyio.to_thread.run_sync(os.truncate, self._path, 0)

    async def _append(self, task_token: str, **fields: Any) -> None:
        line = msgspec.json.encode({"at": self._clock.now(), "task_token": task_token, **fields})
        async with self._turn:
            try:
                async with turn(self._work, "callbacks"):
                    await anyio.to_thread.run_sync(_write, self._path, line + b"\n")
            except OSError as error:
                raise ConveyorError(
                    ErrorCode.UNAVAILABLE, f"{self._path.name} cannot be written: {error.strerror}"
                ) from None


def _write(path: Path, line: bytes) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    with open(descriptor, "ab") as file:
        os.fchmod(descriptor, 0o600)
        # A kill or a full disk may have cut the last line off: this one is not to be joined to it.
        size = os.fstat(descriptor).st_size
        is_cut = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        file.write(b"\n" + line if is_cut else line)


def _last_lines(path: Path) -> Sequence[bytes]:
    try:
        with path.open("rb") as file:
            return deque(file, MOST_SENT)
    except FileNotFoundError:
        return ()


class _Kept(msgspec.Struct, frozen=True):
    """A line of the file."""

    at: Annotated[int, msgspec.Meta(ge=0, le=LAST_INSTANT)]
    task_token: str
    succeeded: bool
    output: Any = None
    error: str | None = None
    cause: Any = None


def _shown(line: bytes) -> SentCallback | None:
    """Return the callback of a line; None for a damaged one."""
    try:
        kept = msgspec.json.decode(line, type=_Kept)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    token = sha256(kept.task_token.encode("utf-8", "replace")).hexdigest()[:16]
    return SentCallback(
        rfc3339(kept.at), f"sha256:{token}", kept.succeeded, kept.output, kept.error, kept.cause
    )


def _as_json(text: str) -> Any:
    """Parse a text as JSON; return the text itself where it is none."""
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(text)
    return text
