"""A worker: the dispatcher, discovery of runs, the heartbeat and tickers, side by side."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from conveyor.aio.concurrency import wait_or_timeout
from conveyor.aio.outages import Outages
from conveyor.aio.resilience import log_and_continue
from conveyor.engine.discovery import Discovery
from conveyor.engine.dispatcher import Dispatcher
from conveyor.engine.reporter import WorkerReporter
from conveyor.engine.telemetry import LoopLag
from conveyor.ports.clock import Clock

JITTER = 0.1
"""Share of the interval by which a tick comes earlier or later, so that the workers of a fleet do
not tick together."""

WAKING = 0.2
"""Seconds from a wake to the tick that it asks for: what comes about meanwhile is in it, too."""

_log = logging.getLogger("conveyor.engine")


class Ticker:
    """Call `act` about every `interval` seconds, and soon after it was woken. A call that fails is
    logged.

    `what` names the work in the log. The next interval begins when a call has ended.
    """

    def __init__(
        self, act: Callable[[], Awaitable[None]], clock: Clock, *, interval: float, what: str
    ) -> None:
        self._act = act
        self._clock = clock
        self._interval = interval
        self._what = what
        self._woken = anyio.Event()

    def wake(self) -> None:
        """Tick soon, for what has just come about; once more after a tick that is under way."""
        self._woken.set()

    async def run(self) -> None:
        """Tick until cancelled, the first time after one interval unless woken."""
        while True:
            await self._pause()
            self._woken = anyio.Event()
            await log_and_continue(_log, f"{self._what} failed", self._act)

    async def _pause(self) -> None:
        await wait_or_timeout(self._woken, self._clock, self._interval * (1.0 - JITTER))
        if not self._woken.is_set():
            # Draw after the longer sleep: a ticker that never ticks must draw nothing.
            rest = 2.0 * JITTER * self._interval * self._clock.random()
            await wait_or_timeout(self._woken, self._clock, rest)
        if self._woken.is_set():
            await self._clock.sleep(min(WAKING, self._interval))


class OverlappingTicker:
    """A ticker whose calls start work that goes on beside later ones, in the task group that `act`
    is given. `stop` asks that work to begin nothing more."""

    def __init__(
        self,
        act: Callable[[TaskGroup], Awaitable[None]],
        clock: Clock,
        *,
        interval: float,
        what: str,
        stop: Callable[[], None],
    ) -> None:
        self.ended = anyio.Event()
        self._act = act
        self._stop = stop
        self._ticking = anyio.CancelScope()
        self._ticker = Ticker(self._tick, clock, interval=interval, what=what)
        self._group: TaskGroup | None = None

    def wake(self) -> None:
        """Tick soon, for what has just come about."""
        self._ticker.wake()

    async def run(self) -> None:
        """Tick until stopped or cancelled; return once the started work has ended, too."""
        try:
            async with anyio.create_task_group() as self._group:
                with self._ticking:
                    await self._ticker.run()
        finally:
            self.ended.set()

    def stop(self) -> None:
        """Tick no more. `ended` is set once the work that was started has ended."""
        self._stop()
        self._ticking.cancel()

    async def _tick(self) -> None:
        assert self._group is not None
        await self._act(self._group)


class Beside(NamedTuple):
    """The work of a worker beside its dispatcher: tickers, those whose work goes on meanwhile, and
    what says what it does."""

    tickers: Sequence[Ticker] = ()
    overlapping: Sequence[OverlappingTicker] = ()
    reporter: WorkerReporter | None = None


class Worker:
    """Run one dispatcher until it is stopped, and measure the `lag` of its event loop meanwhile.
    `outages` tells what its work waits for."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        discovery: Discovery,
        clock: Clock,
        *,
        heartbeat: float,
        beside: Beside = Beside(),  # noqa: B008  (immutable)
        outages: Outages | None = None,
    ) -> None:
        self.outages = outages or Outages(clock)
        self._dispatcher = dispatcher
        self._discovery = discovery
        self._clock = clock
        self._heartbeat = heartbeat
        self._tickers, self._overlapping, self._reporter = beside
        self._stopped_at = 0.0
        self._beats_at: float  # from before there is work
        self.lag = LoopLag(clock)

    def away(self) -> list[str]:
        """Return the names of what its work waits for."""
        return [outage.shared.value for outage in self.outages.now()]

    def serving(self) -> list[str]:
        """Return the runs that it serves."""
        return self._dispatcher.lanes.serving()

    @property
    def unsettled(self) -> int:
        """The answers that it has in hand and has not settled yet."""
        return self._dispatcher.unsettled

    def next_beat(self) -> float | None:
        """Return the monotonic instant of the next heartbeat, if anything is in hand for it."""
        return self._beats_at if self._dispatcher.has_work else None

    def next_message(self, visible_at: Callable[[str], float | None]) -> float | None:
        """Return when the dispatcher will next have something to receive: see there."""
        return self._dispatcher.next_message(visible_at)

    async def run(self, *, grace: float) -> None:
        """Work until `stop`, then for at most `grace` seconds more."""
        async with anyio.create_task_group() as siblings:
            siblings.start_soon(self._discovery.run)
            siblings.start_soon(self._beat)
            siblings.start_soon(self._tick)
            if self._reporter is not None:
                siblings.start_soon(self._reporter.run)
            for ticker in self._tickers:
                siblings.start_soon(ticker.run)
            for overlapping in self._overlapping:
                siblings.start_soon(overlapping.run)
            await self._dispatcher.run(grace=grace)
            for overlapping in self._overlapping:
                left = self._stopped_at + grace - self._clock.monotonic()
                await wait_or_timeout(overlapping.ended, self._clock, max(left, 0.0))
            siblings.cancel_scope.cancel()
        if self._reporter is not None:
            await self._reporter.leave()

    def stop(self) -> None:
        """Begin to stop; `run` returns once everything is given back."""
        self._stopped_at = self._clock.monotonic()
        self._discovery.stop()
        self._dispatcher.stop()
        for overlapping in self._overlapping:
            overlapping.stop()

    async def _beat(self) -> None:
        """Renew what is in work; a renewal that fails waits for the next beat."""
        while True:
            self._beats_at = self._clock.monotonic() + self._heartbeat
            await self._clock.sleep(self._heartbeat)
            self._dispatcher.renew()

    async def _tick(self) -> None:
        while True:
            await self.lag.look()
            self._dispatcher.tend()
