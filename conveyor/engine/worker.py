"""A worker: the dispatcher with its siblings, discovery of runs, the heartbeat and tickers."""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from conveyor.engine.discovery import Discovery
from conveyor.engine.dispatcher import Dispatcher
from conveyor.engine.telemetry import LoopLag
from conveyor.engine.ticker import Ticker
from conveyor.ports.clock import Clock


class Worker:
    """Runs one dispatcher until it is stopped, and measures the `lag` of its loop meanwhile."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        discovery: Discovery,
        clock: Clock,
        *,
        heartbeat: float,
        tickers: Sequence[Ticker] = (),
    ) -> None:
        self._dispatcher = dispatcher
        self._discovery = discovery
        self._clock = clock
        self._heartbeat = heartbeat
        self._tickers = tickers
        self.lag = LoopLag(clock)

    async def run(self, *, grace: float) -> None:
        """Work until `stop`, then for at most `grace` seconds more."""
        async with anyio.create_task_group() as siblings:
            siblings.start_soon(self._discovery.run)
            siblings.start_soon(self._beat)
            siblings.start_soon(self._tick)
            for ticker in self._tickers:
                siblings.start_soon(ticker.run)
            await self._dispatcher.run(grace=grace)
            siblings.cancel_scope.cancel()

    def stop(self) -> None:
        """Begin to stop; `run` returns when everything is given back."""
        self._discovery.stop()
        self._dispatcher.stop()

    async def _beat(self) -> None:
        """Renew what is in work; what fails waits for the next beat."""
        while True:
            await self._clock.sleep(self._heartbeat)
            self._dispatcher.renew()

    async def _tick(self) -> None:
        while True:
            await self.lag.look()
            self._dispatcher.tend()
