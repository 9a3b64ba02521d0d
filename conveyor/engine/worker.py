"""A worker: the dispatcher with its siblings, discovery of runs and the heartbeat."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import anyio

from conveyor.domain.errors import ConveyorError
from conveyor.engine.dispatcher import Dispatcher
from conveyor.ports.clock import Clock
from conveyor.ports.records import Runs
from conveyor.ports.signals import Signals

LAG_INTERVAL = 0.25

_log = logging.getLogger("conveyor.engine")


class Worker:
    """Runs one dispatcher until it is stopped. `loop_lag` is the latest lag seen, in seconds."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        runs: Runs,
        signals: Signals,
        clock: Clock,
        *,
        discovery_interval: float,
        heartbeat: float,
    ) -> None:
        self._dispatcher = dispatcher
        self._runs = runs
        self._signals = signals
        self._clock = clock
        self._discovery_interval = discovery_interval
        self._heartbeat = heartbeat
        self._stopped = anyio.Event()
        self.loop_lag = 0.0

    async def run(self, *, grace: float) -> None:
        """Work until `stop`, then for at most `grace` seconds more."""
        async with anyio.create_task_group() as siblings:
            siblings.start_soon(self._every, self._discovery_interval, self._discover)
            siblings.start_soon(self._every, self._heartbeat, self._dispatcher.renew)
            siblings.start_soon(self._listen)
            siblings.start_soon(self._measure_lag)
            await self._dispatcher.run(grace=grace)
            siblings.cancel_scope.cancel()

    def stop(self) -> None:
        """Begin to stop; `run` returns when everything is given back."""
        self._stopped.set()
        self._dispatcher.stop()

    async def _every(self, interval: float, act: Callable[[], Awaitable[None]]) -> None:
        """At once, and then again after each interval; a failure waits for the next turn."""
        while True:
            try:
                await act()
            except ConveyorError:
                _log.exception("a turn of the worker's upkeep failed")
            await self._clock.sleep(interval)

    async def _discover(self) -> None:
        """The whole truth: open lanes of runs with work, close the others."""
        if self._stopped.is_set():
            return
        found = await self._runs.dispatchable_runs()
        lanes = self._dispatcher.lanes
        for run_id in lanes.missing_from([run.run_id for run in found]):
            await self._dispatcher.close_lane(run_id)
        for run in found:
            lane = lanes.get(run.run_id)
            if lane is None or lane.closed:
                await self._dispatcher.open_lane(run)

    async def _listen(self) -> None:
        """Hints make discovery immediate within one process."""
        while True:
            for run_id in await self._signals.wait():
                try:
                    run = await self._runs.dispatchable_run(run_id)
                except ConveyorError:
                    _log.exception("a changed run could not be read")
                    continue
                if run is None:
                    await self._dispatcher.close_lane(run_id)
                elif not self._stopped.is_set():
                    await self._dispatcher.open_lane(run)

    async def _measure_lag(self) -> None:
        while True:
            before = self._clock.monotonic()
            await self._clock.sleep(LAG_INTERVAL)
            self.loop_lag = max(0.0, self._clock.monotonic() - before - LAG_INTERVAL)
