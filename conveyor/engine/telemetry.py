"""Metrics: plain counters on the hot path, turned into Prometheus families when they are
scraped.

The backlog: what waits in all queues that a worker may receive from, by the queues' own word.

Every worker of a fleet has a lane for each run with work, so each counts the whole. What it knows
from receiving is a part of that: a worker whose slots are taken receives from no queue at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conveyor.aio.concurrency import side_by_side
from conveyor.engine.lanes import Lanes
from conveyor.ports.clock import Clock

MOST = 1_000
"""Queues asked for one figure. Where there are more, those that were asked longest ago."""
SIDE_BY_SIDE = 4
"""Queues asked at a time: a quarter of the calls that a process makes at once."""

_log = logging.getLogger("conveyor.engine")


class CountsMessages(Protocol):
    """The part of `Queues` that is asked."""

    async def count(self, queue: str) -> int:
        """How many messages wait, as `Queues.count`."""
        ...


class Backlog:
    """Counts what waits in the queues of open lanes."""

    def __init__(self, lanes: Lanes, queues: CountsMessages) -> None:
        self._lanes = lanes
        self._queues = queues
        self._counts: dict[str, int] = {}

    async def tell(self) -> None:
        """Say in the log how much waits. Says nothing, and raises, where `count` raises: no figure
        is better than one that takes workers away."""
        _log.info("backlog", extra={"tasks": await self.count()})

    async def count(self) -> int:
        """Ask at most MOST queues; the sum of what all said last.

        Raises what the first of them raised that could not be asked; no other is asked then.
        """
        polled = [lane.queue for lane in self._lanes if not lane.closed]
        fresh = dict.fromkeys([self._lanes.control.queue, *polled])
        known = {queue: count for queue, count in self._counts.items() if queue in fresh}
        self._counts = known
        # Counts lie in the order in which they came in.
        turn = [*(queue for queue in fresh if queue not in known), *known]
        await side_by_side(self._ask, turn[:MOST], at_a_time=SIDE_BY_SIDE)
        return sum(self._counts.values())

    async def _ask(self, queue: str) -> None:
        count = await self._queues.count(queue)
        self._counts.pop(queue, None)
        self._counts[queue] = count


COUNTERS = {
    "receives": "Receive calls to queues",
    "deliveries": "Messages received from queues",
    "bounces": "Messages hidden again instead of acknowledged",
    "claims_undone": "Claims given back before their work was done",
    "fenced": "Gateway calls cut off because permits could not be renewed",
}
LABELLED_COUNTERS = {
    "gateway_calls": ("Gateway calls that ended", "outcome"),
    "tasks": ("Tasks that reached a terminal state", "state"),
    "callbacks": ("Callbacks that were tried", "outcome"),
}

LOOK = 0.25
"""Seconds of a look at the loop's lag. A worker looks after permits and buffers as often."""
Read = Callable[[], Iterable[tuple[tuple[str, ...], float]]]
"""Reads the counts of one family, each by the values of its labels."""


class Telemetry(Collector):
    """Counts what the loop and the handlers do. One object a process, on one event loop."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self.gateway_calls: dict[str, int] = {}
        self.tasks: dict[str, int] = {}
        self.callbacks: dict[str, int] = {}
        self._gauges: list[tuple[str, str, Callable[[], float]]] = []
        self._totals: list[tuple[str, str, Callable[[], float]]] = []
        self._families: list[tuple[str, str, tuple[str, ...], Read]] = []

    def received(self, messages: int) -> None:
        """One receive call came back with so many messages."""
        self.counts["receives"] += 1
        self.counts["deliveries"] += messages

    def hidden(self) -> None:
        """One message was hidden again."""
        self.counts["bounces"] += 1

    def fenced(self, calls: int) -> None:
        """So many calls were cut off because their permits could not be renewed."""
        self.counts["fenced"] += calls

    def claim_undone(self) -> None:
        """One claim was given back before its work was done."""
        self.counts["claims_undone"] += 1

    def gateway_called(self, outcome: str) -> None:
        """One gateway call has ended."""
        self.gateway_calls[outcome] = self.gateway_calls.get(outcome, 0) + 1

    def task_ended(self, state: str) -> None:
        """One task has reached a terminal state."""
        self.tasks[state] = self.tasks.get(state, 0) + 1

    def callback_made(self, outcome: str) -> None:
        """One callback was tried."""
        self.callbacks[outcome] = self.callbacks.get(outcome, 0) + 1

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Expose a value that is read when metrics are scraped."""
        self._gauges.append((name, text, read))

    def total(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Expose a counter that something else keeps."""
        self._totals.append((name, text, read))

    def family(self, name: str, text: str, labels: tuple[str, ...], read: Read) -> None:
        """Expose counters with labels that something else keeps."""
        self._families.append((name, text, labels, read))

    def collect(self) -> Iterator[Metric]:
        """Every family, for a Prometheus registry."""
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"conveyor_{name}", text, value=self.counts[name])
        for name, (text, label) in LABELLED_COUNTERS.items():
            family = CounterMetricFamily(f"conveyor_{name}", text, labels=[label])
            for value, count in sorted(getattr(self, name).items()):
                family.add_metric([value], count)
            yield family
        for name, text, read in self._totals:
            yield CounterMetricFamily(f"conveyor_{name}", text, value=read())
        for name, text, labels, read_all in self._families:
            family = CounterMetricFamily(f"conveyor_{name}", text, labels=labels)
            for values, count in sorted(read_all()):
                family.add_metric(values, count)
            yield family
        for name, text, read in self._gauges:
            yield GaugeMetricFamily(f"conveyor_{name}", text, value=read())

    def registry(self) -> CollectorRegistry:
        """A registry that holds these metrics alone."""
        registry = CollectorRegistry()
        registry.register(self)
        return registry


class LoopLag:
    """How late the event loop is. `seconds` is the latest lag."""

    def __init__(self, clock: Clock) -> None:
        self.seconds = 0.0
        self._clock = clock

    async def look(self) -> None:
        """Measure once, for LOOK seconds."""
        before = self._clock.monotonic()
        await self._clock.sleep(LOOK)
        self.seconds = max(0.0, self._clock.monotonic() - before - LOOK)

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            await self.look()
