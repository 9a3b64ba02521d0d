"""A worker that can be relieved by another, so that nothing of it is left while data is removed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.engine.worker import Worker


class RelievedWorker:
    """The worker of a server: the `present` one, made by `make`, until it is relieved."""

    def __init__(self, make: Callable[[], Worker]) -> None:
        self.present = make()
        self._make = make
        self._working = anyio.CancelScope()
        self._cut, self._relieved = anyio.Event(), anyio.Event()
        self._turn = anyio.Lock()
        self._is_stopping = False

    async def run(self, *, grace: float) -> None:
        """Work until `stop`, then for at most `grace` seconds more."""
        while True:
            with anyio.CancelScope() as self._working:
                await self.present.run(grace=grace)
            self._cut.set()
            if not self._working.cancelled_caught:
                return
            await self._relieved.wait()

    def stop(self) -> None:
        """Begin to stop; `run` returns once everything is given back."""
        self._is_stopping = True
        self.present.stop()

    def _has_stopped(self) -> bool:
        return self._is_stopping

    async def relieve(self, between: Callable[[], Awaitable[None]]) -> None:
        """Cut the worker off, call `between` once nothing of it runs any more, and begin with
        another one. Raises ConveyorError(unavailable) while the server stops."""
        with anyio.CancelScope(shield=True):
            async with self._turn:
                if self._has_stopped():
                    raise ConveyorError(ErrorCode.UNAVAILABLE, "the server is stopping")
                self._cut, self._relieved = anyio.Event(), anyio.Event()
                self._working.cancel()
                await self._cut.wait()
                try:
                    await between()
                finally:
                    self.present = self._make()
                    if self._has_stopped():
                        self.present.stop()
                    self._relieved.set()
