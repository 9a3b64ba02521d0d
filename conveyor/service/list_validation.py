"""Runs the child process that checks a long list of tasks: starts, feeds, reads and ends it.

A child never outlives the call that it works for, however that call ends. The work is cancelled if
the client disconnects.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import anyio
import msgspec
from anyio.abc import ByteSendStream, Process
from anyio.streams.buffered import BufferedByteReceiveStream

from conveyor.aio.concurrency import unwrap
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.intake.frames import (
    HEADER,
    Chunk,
    Done,
    Frame,
    Head,
    Refusal,
    ValidationRequest,
    decode_frame,
)
from conveyor.ports.clock import Clock
from conveyor.ports.idle import OpenWork, counted

CHECKS = "checks of lists"
CHILDREN = 2
"""Maximum children at a time; further calls wait."""
ESTIMATE_AFTER = 2.0
"""Seconds of work before the time for the whole list is estimated."""

COMMAND = (sys.executable, "-P", "-m", "conveyor.intake")

_ESTIMATE_EVERY = 0.5
_BUFFERED = 262_144
"""Bytes that may be in flight before the child has begun to read."""

Pieces = Sequence[bytes] | AsyncIterator[bytes]
Sink = Callable[[Head | Chunk], Awaitable[None]]


class ListValidator:
    """Has children check lists. `max_seconds` bounds the time for one list."""

    def __init__(
        self,
        clock: Clock,
        *,
        max_seconds: float,
        command: Sequence[str] = COMMAND,
        work: OpenWork | None = None,
    ) -> None:
        self._work = work
        self._clock = clock
        self._max_seconds = max_seconds
        self._command = command
        self._limiter = anyio.CapacityLimiter(CHILDREN)

    async def stage(
        self, work: ValidationRequest, pieces: Pieces, *, total: int, sink: Sink
    ) -> Done:
        """Have a child check one list of `total` bytes; pass its frames to the sink as they come.

        Raises ConveyorError: the child's refusal of a bad list; payload_too_large where the list
        would take too long; unavailable where the child breaks off; and any error of `pieces` and
        `sink`. The frames passed to the sink are void then.
        """
        with counted(self._work, CHECKS):
            async with self._limiter, _child(self._command) as process:
                session = _Session(
                    process, self._clock, total=total, max_seconds=self._max_seconds, sink=sink
                )
                return await session.run(work, pieces)


@dataclass(slots=True)
class _Session:
    """One list, one child: writes and reads at once, so that neither pipe blocks the other."""

    process: Process
    clock: Clock
    total: int = field(kw_only=True)
    max_seconds: float = field(kw_only=True)
    sink: Sink = field(kw_only=True)
    fed: int = 0
    reading_since: float | None = None

    async def run(self, work: ValidationRequest, pieces: Pieces) -> Done:
        done: list[Done] = []
        try:
            with unwrap():
                async with anyio.create_task_group() as group:

                    async def listen() -> None:
                        done.append(await self._listen())
                        group.cancel_scope.cancel()

                    group.start_soon(self._feed, work, pieces)
                    group.start_soon(self._watch_time)
                    group.start_soon(listen)
        except Exception:
            # The child has seen enough: whatever broke while it was fed more is of no matter.
            if not done:
                raise
        return done[0]

    async def _feed(self, work: ValidationRequest, pieces: Pieces) -> None:
        stdin = self.process.stdin
        assert stdin is not None
        await _write(stdin, msgspec.json.encode(work) + b"\n")
        async with aclosing(_iterate(pieces)) as each:
            async for piece in each:
                await _write(stdin, piece)
                self.fed += len(piece)
                if self.fed > _BUFFERED:
                    self._note_reading()
        with suppress(ConnectionError):
            await stdin.aclose()
        self._note_reading()

    def _note_reading(self) -> None:
        if self.reading_since is None:
            self.reading_since = self.clock.monotonic()

    async def _listen(self) -> Done:
        assert self.process.stdout is not None
        frames = BufferedByteReceiveStream(self.process.stdout)
        while True:
            frame = await _next_frame(frames)
            if isinstance(frame, Done):
                return frame
            if isinstance(frame, Refusal):
                raise ConveyorError(frame.code, frame.detail, invalid_tasks=frame.invalid_tasks)
            await self.sink(frame)

    async def _watch_time(self) -> None:
        began = self.clock.monotonic()
        await self.clock.sleep(ESTIMATE_AFTER)
        while True:
            now = self.clock.monotonic()
            estimate = now - began
            if self.reading_since is not None and now - self.reading_since >= ESTIMATE_AFTER:
                share = self.fed / self.total if self.fed < self.total else 1.0
                estimate = max(estimate, (now - self.reading_since) / share)
            if estimate > self.max_seconds:
                raise ConveyorError(
                    ErrorCode.PAYLOAD_TOO_LARGE,
                    f"checking this list of tasks would take about {estimate:.0f} s: "
                    f"CONVEYOR_MAX_VALIDATION_SECONDS allows {self.max_seconds:g}",
                )
            await self.clock.sleep(_ESTIMATE_EVERY)


@asynccontextmanager
async def _child(command: Sequence[str]) -> AsyncIterator[Process]:
    """Run a child, dead and reaped at the exit.

    It gets this process's import path and no other part of its environment; a session of its own
    keeps the terminal's signals from it.
    """
    with anyio.CancelScope(shield=True):
        try:
            process = await anyio.open_process(
                command,
                stderr=subprocess.DEVNULL,
                env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,
            )
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise ConveyorError(
                ErrorCode.UNAVAILABLE, f"no process could be started to check the list: {reason}"
            ) from error
    try:
        yield process
    finally:
        with anyio.CancelScope(shield=True):
            with suppress(ProcessLookupError):
                process.kill()
            await process.aclose()


async def _write(stdin: ByteSendStream, piece: bytes) -> None:
    """Write a piece to the child, unless it has closed its end: then its last frame says why."""
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, ConnectionError):
        await stdin.send(piece)


async def _iterate(pieces: Pieces) -> AsyncGenerator[bytes, None]:
    if isinstance(pieces, Sequence):
        for piece in pieces:
            yield piece
    else:
        async for piece in pieces:
            yield piece


async def _next_frame(frames: BufferedByteReceiveStream) -> Frame:
    try:
        kind, length = HEADER.unpack(await frames.receive_exactly(HEADER.size))
        return decode_frame(kind, await frames.receive_exactly(length))
    except (anyio.IncompleteRead, anyio.EndOfStream, anyio.ClosedResourceError, ValueError) as gone:
        raise ConveyorError(
            ErrorCode.UNAVAILABLE, "the check of the list of tasks broke off; send it again"
        ) from gone


T = TypeVar("T")


class CancelOnDisconnect(Protocol):
    """Runs work until its client disconnects.

    The work is cancelled then, and an exception reports it to the HTTP layer.
    """

    async def __call__(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work`; return its result or raise its error."""
        ...


async def never_disconnected(work: Callable[[], Awaitable[T]]) -> T:
    """Run the work, whether or not the client disconnects."""
    return await work()
