"""Renewals beside each other: a service that hangs keeps nothing else from being renewed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import anyio
from anyio.abc import TaskGroup

from conveyor.engine.returns import Returns
from conveyor.engine.surviving import survive
from conveyor.ports.queues import Delivery
from conveyor.ports.work import Handler


class Renewals:
    """Renews messages, and what the handlers hold.

    Nobody waits for a renewal: a call may last for longer than a claim does. One that has not ended
    is not begun again, and the others are.
    """

    def __init__(self, returns: Returns, *, tasks: Handler, control: Handler) -> None:
        self._returns = returns
        self._tasks = tasks
        self._control = control
        self._group: TaskGroup | None = None
        self._going: set[str] = set()

    async def run(self) -> None:
        """Make the renewals that are begun; until cancelled."""
        async with anyio.create_task_group() as self._group:
            try:
                await anyio.sleep_forever()
            finally:
                self._group = None

    def begin(self, deliveries: Sequence[Delivery], *, seconds: float) -> None:
        """Begin to renew these messages, for so many seconds from now, and what the handlers hold.
        What fails is told. Nothing is begun unless `run` runs."""
        keep = partial(self._returns.keep, deliveries, seconds=seconds)
        self._start("messages were not renewed", keep)
        self._start("claims were not renewed", self._tasks.renew)
        self._start("control work was not renewed", self._control.renew)

    def _start(self, failed: str, act: Callable[[], Awaitable[None]]) -> None:
        if self._group is not None and failed not in self._going:
            self._going.add(failed)
            self._group.start_soon(self._renew, failed, act)

    async def _renew(self, failed: str, act: Callable[[], Awaitable[None]]) -> None:
        try:
            await survive(failed, act)
        finally:
            self._going.discard(failed)
