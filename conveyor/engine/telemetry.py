"""The metrics of a process, among them the backlog of its queues and the lag of its event loop.

On the hot path a metric is a plain counter; a scrape turns the counters into Prometheus families.

The backlog is the number of messages in the queues of all runs with work, as the queues report it,
those included that only other workers serve: so each worker of a fleet counts the whole. Receiving
alone would not show it: a worker whose slots are taken receives from no queue.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample
from prometheus_client.utils import floatToGoString

from conveyor.aio.concurrency import for_each
from conveyor.aio.log_output import lost_lines
from conveyor.domain.histogram import CALL, STORE, WAIT, Histogram
from conveyor.engine.lanes import Lanes
from conveyor.ports.clock import Clock
from conveyor.ports.queues import run_queues
from conveyor.ports.workers import FleetPause

MOST = 1_000
"""Most queues asked for one count: if there are more, those asked longest ago."""
SIDE_BY_SIDE = 4
"""Queues asked at a time: a quarter of the calls that a process makes at once."""

_log = logging.getLogger("conveyor.engine")


class MessageCounter(Protocol):
    """The part of `Queues` that counts."""

    async def count(self, queue: str) -> int:
        """Return how many messages wait, as `Queues.count` does."""
        ...


class Backlog:
    """Count the messages in the queues of open lanes, and of the runs that other workers serve, so
    that each worker tells the same of the fleet."""

    def __init__(
        self, lanes: Lanes, queues: MessageCounter, pause: FleetPause | None = None
    ) -> None:
        self._lanes = lanes
        self._queues = queues
        self._pause = pause or FleetPause()
        self._counts: dict[str, int] = {}

    async def tell(self) -> None:
        """Log how many messages wait, and how many of them may be worked at a time. Raises what
        `count` raises, and then logs nothing: a wrong figure could take workers away."""
        tasks = await self.count()
        _log.info("backlog", extra={"tasks": tasks, "runnable": self.runnable()})

    async def count(self) -> int:
        """Ask at most MOST queues; return the sum of the latest counts of all.

        Raises the first error of a queue, and asks no further ones.
        """
        polled = [lane.queue for lane in self._lanes if not (lane.closed or lane.dropped)]
        others = self._lanes.elsewhere()
        elsewhere = [queue for run in others for queue in run_queues(run.run_id, run.hosts)]
        fresh = dict.fromkeys([self._lanes.control.queue, *polled, *elsewhere])
        known = {queue: count for queue, count in self._counts.items() if queue in fresh}
        self._counts = known
        # The dict keeps counts in the order of their answers, so the oldest come first.
        turn = [*(queue for queue in fresh if queue not in known), *known]
        await for_each(self._ask, turn[:MOST], limit=SIDE_BY_SIDE)
        return sum(self._counts.values())

    def runnable(self) -> int:
        """Return how many of the counted messages may be worked at a time: of each job at most as
        many as its limit, whatever else waits, and none while the fleet is paused."""
        if self._pause.since is not None:
            return 0
        queues = {lane.queue: (lane.job_id, lane.limit) for lane in self._lanes}
        for run in self._lanes.elsewhere():
            for queue in run_queues(run.run_id, run.hosts):
                queues[queue] = run.job_id, run.max_inflight
        waiting: Counter[str] = Counter()
        limits: dict[str, int] = {}
        for queue, (job_id, limit) in queues.items():
            waiting[job_id] += self._counts.get(queue, 0)
            limits[job_id] = limit
        control = self._counts.get(self._lanes.control.queue, 0)
        return control + sum(min(count, limits[job]) for job, count in waiting.items())

    async def _ask(self, queue: str) -> None:
        count = await self._queues.count(queue)
        self._counts.pop(queue, None)
        self._counts[queue] = count


COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

# The programs that serve a metric.
SERVERS = "conveyor-dev, conveyor api"
EVERY_SERVER = "conveyor-dev, conveyor api, conveyor worker"
WORKERS = "conveyor-dev, conveyor worker"
PRODUCTION = "conveyor api, conveyor worker"
DEVELOPMENT = "conveyor-dev"


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """The description of one metric. `labels` maps each label to its values, if they are a fixed
    set."""

    kind: str
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    served_by: str = EVERY_SERVER


_CALL: dict[str, tuple[str, ...]] = {"service": (), "operation": ()}

METRICS: dict[str, MetricInfo] = {
    "receives": MetricInfo(COUNTER, "Receive calls to queues"),
    "deliveries": MetricInfo(COUNTER, "Messages received"),
    "bounces": MetricInfo(
        COUNTER, "Messages hidden again instead of acknowledged, whatever the reason"
    ),
    "claims_undone": MetricInfo(COUNTER, "Claims given back before their work was done"),
    "fenced": MetricInfo(
        COUNTER,
        "Gateway calls cut off because their permits could not be renewed: more than 0 is an alarm",
    ),
    "gateway_calls": MetricInfo(
        COUNTER,
        "Gateway calls that ended",
        {"outcome": ("successful", "retry", "failed", "refused")},
    ),
    "gateway_seconds": MetricInfo(
        HISTOGRAM,
        "Seconds of a gateway call, until its body was there; a large one was stored meanwhile",
        {"outcome": ("successful", "failed")},
    ),
    "start_wait_seconds": MetricInfo(
        HISTOGRAM,
        "Seconds from when a task could begin, because it was submitted or its retry was due, to "
        "its call: waits for a permit, a slot or a paused run among them",
    ),
    "settlement_seconds": MetricInfo(
        HISTOGRAM,
        "Seconds from the answer of a gateway to the settlement of its task, the body stored",
    ),
    "http_seconds": MetricInfo(
        HISTOGRAM,
        "Seconds from the head of a request to the head of its answer",
        {"method": (), "route": (), "status": ("1xx", "2xx", "3xx", "4xx", "5xx")},
        SERVERS,
    ),
    "tasks": MetricInfo(COUNTER, "Tasks that ended", {"state": ("successful", "failed")}),
    "body_objects": MetricInfo(
        COUNTER,
        "Objects of one body or a pack of them that were written, where bodies are packed",
    ),
    "packed_bodies": MetricInfo(COUNTER, "Bodies in the body_objects"),
    "packed_bytes": MetricInfo(COUNTER, "Bytes in the body_objects"),
    "callbacks": MetricInfo(
        COUNTER,
        "Callbacks that were tried",
        {"outcome": ("heartbeat", "success", "failure", "unwanted", "failed")},
    ),
    "webhook_attempts": MetricInfo(
        COUNTER,
        "Attempts to deliver events to the receivers of webhooks",
        {
            "outcome": (
                "delivered",
                "http_3xx",
                "http_4xx",
                "http_5xx",
                "timeout",
                "transport_error",
            )
        },
    ),
    "webhook_oldest_due_seconds": MetricInfo(
        GAUGE,
        "Seconds since the longest due delivery became due, at this worker's latest look",
        served_by=WORKERS,
    ),
    "outbox_oldest_due_seconds": MetricInfo(
        GAUGE,
        "Seconds since the end of the longest ended run whose outbox entry this worker's latest "
        "look found",
        served_by=WORKERS,
    ),
    "fires": MetricInfo(
        COUNTER,
        "Fires of schedules that this worker decided; of those that were skipped the reason, and "
        "failed is a look that could decide nothing",
        {
            "outcome": (
                "started",
                "missed",
                "paused",
                "run_live",
                "quota_exceeded",
                "key_unreadable",
                "failed",
            )
        },
        WORKERS,
    ),
    "fire_late_seconds": MetricInfo(
        GAUGE, "Seconds from the time of the latest fire to its run", served_by=WORKERS
    ),
    "store_rows_read": MetricInfo(COUNTER, "Task, job and run rows that reads touched"),
    "store_rows_returned": MetricInfo(
        COUNTER,
        "Task rows that reads gave back, without those read for a page that are not on it; "
        "read / returned is the amplification",
    ),
    "outages": MetricInfo(
        COUNTER,
        "Times that work began to wait because something that all tasks share was away",
        {"shared": ("gateway", "resolver", "network", "file descriptors")},
        WORKERS,
    ),
    "away": MetricInfo(
        GAUGE, "Shared things, the result store among them, that work waits for", served_by=WORKERS
    ),
    "fleet_paused": MetricInfo(
        GAUGE,
        "1 while an operator has paused the fleet, as this worker last heard; else 0",
        served_by=WORKERS,
    ),
    "permits": MetricInfo(GAUGE, "Permits in this worker's hand", served_by=WORKERS),
    "lanes": MetricInfo(GAUGE, "Runs that this worker serves", served_by=WORKERS),
    "queue_depth": MetricInfo(
        GAUGE,
        "Messages waiting in the queues that this worker may receive from, about: in production "
        "several workers serve the same runs, so not to be added up over workers",
        served_by=WORKERS,
    ),
    "streams": MetricInfo(GAUGE, "Streams of progress that are open", served_by=SERVERS),
    "stream_reads": MetricInfo(COUNTER, "Reads of runs for streams", served_by=SERVERS),
    "wal_bytes": MetricInfo(GAUGE, "Size of the database's write-ahead log", served_by=DEVELOPMENT),
    "loop_lag_seconds": MetricInfo(
        GAUGE, "Latest lag of the event loop, measured four times a second"
    ),
    "log_lines_lost": MetricInfo(
        COUNTER, "Log lines that were lost because nobody read them in time"
    ),
    "aws_calls": MetricInfo(
        COUNTER,
        "Tries of calls to AWS; a condition that was not met is a refusal",
        {**_CALL, "outcome": ("ok", "refused", "failed")},
        PRODUCTION,
    ),
    "aws_seconds": MetricInfo(
        HISTOGRAM,
        "Seconds of a try of a call to AWS, the wait for a connection and long polls among them",
        _CALL,
        PRODUCTION,
    ),
    "aws_retries": MetricInfo(COUNTER, "Calls to AWS made again", _CALL, PRODUCTION),
    "aws_throttles": MetricInfo(
        COUNTER, "Calls, and parts of batches, that AWS throttled", _CALL, PRODUCTION
    ),
    "aws_undone": MetricInfo(COUNTER, "Parts of batches that AWS left undone", _CALL, PRODUCTION),
    "aws_consumed_capacity": MetricInfo(
        COUNTER, "Capacity units of DynamoDB that were used", {"operation": ()}, PRODUCTION
    ),
}
"""Every metric, by its name without `conveyor_` and without the `_total` of a counter."""

COUNTED_HERE = (
    "receives",
    "deliveries",
    "bounces",
    "claims_undone",
    "fenced",
    "body_objects",
    "packed_bodies",
    "packed_bytes",
)
LABELLED_HERE = ("gateway_calls", "tasks", "callbacks", "webhook_attempts")
TRACED = {"gateway_calls": "attempt", "tasks": "attempt", "webhook_attempts": "delivery"}
"""The traces whose outcomes are values of a metric's label, by the metric."""

LOOK = 0.25
"""Seconds of one measurement of the lag. A worker tends permits and buffers as often."""
Read = Callable[[], Iterable[tuple[tuple[str, ...], float]]]
"""Read the counts of one family, each with the values of its labels."""


class Telemetry(Collector):
    """Count what the loop and the handlers do. One object a process, on one event loop."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = dict.fromkeys(COUNTED_HERE, 0)
        self.gateway_calls: dict[str, int] = {}
        self.tasks: dict[str, int] = {}
        self.callbacks: dict[str, int] = {}
        self.webhook_attempts: dict[str, int] = {}
        self._calls, self._waits, self.settlements = map(Histogram, (CALL, WAIT, STORE))
        self._histograms: dict[str, Histogram] = {
            "gateway_seconds": self._calls,
            "start_wait_seconds": self._waits,
            "settlement_seconds": self.settlements,
        }
        # By name: a worker that takes the place of another shows its own figures.
        self._gauges: dict[str, Callable[[], float]] = {}
        self._totals: dict[str, Callable[[], float]] = {"log_lines_lost": lost_lines}
        self._families: dict[str, Read] = {}
        self._exemplars: Callable[[], Mapping[tuple[str, str], str]] = dict

    def received(self, messages: int) -> None:
        """Count a receive call, and the messages that it brought."""
        self.counts["receives"] += 1
        self.counts["deliveries"] += messages

    def hidden(self) -> None:
        """Count a message that was hidden again."""
        self.counts["bounces"] += 1

    def fenced(self, calls: int) -> None:
        """Count calls that were cancelled because their permits could not be renewed."""
        self.counts["fenced"] += calls

    def claim_undone(self) -> None:
        """Count a claim that was given back before its work was done."""
        self.counts["claims_undone"] += 1

    def bodies_written(self, bodies: int, size: int) -> None:
        """Count an object that was written, its bodies and its bytes."""
        self.counts["body_objects"] += 1
        self.counts["packed_bodies"] += bodies
        self.counts["packed_bytes"] += size

    def gateway_called(self, outcome: str) -> None:
        """Count a gateway call that has ended."""
        self.gateway_calls[outcome] = self.gateway_calls.get(outcome, 0) + 1

    def gateway_took(self, seconds: float, outcome: str, *, traceparent: str) -> None:
        """Count how long a gateway call took."""
        self._calls.observe(seconds, outcome, traceparent=traceparent)

    def task_began(self, waited: float) -> None:
        """Count how long a task waited for its call."""
        self._waits.observe(waited)

    def task_settled(self, seconds: float) -> None:
        """Count how long a settlement was waited for."""
        self.settlements.observe(seconds)

    def task_ended(self, state: str) -> None:
        """Count a task that has reached a terminal state."""
        self.tasks[state] = self.tasks.get(state, 0) + 1

    def callback_made(self, outcome: str) -> None:
        """Count a callback that was tried."""
        self.callbacks[outcome] = self.callbacks.get(outcome, 0) + 1

    def webhook_attempted(self, outcome: str) -> None:
        """Count an attempt to deliver an event."""
        self.webhook_attempts[outcome] = self.webhook_attempts.get(outcome, 0) + 1

    def gauge(self, name: str, read: Callable[[], float]) -> None:
        """Expose a gauge of METRICS; `read` is called at each scrape."""
        self._gauges[name] = read

    def total(self, name: str, read: Callable[[], float]) -> None:
        """Expose a counter of METRICS that another object keeps."""
        self._totals[name] = read

    def family(self, name: str, read: Read) -> None:
        """Expose counters of METRICS with labels that another object keeps."""
        self._families[name] = read

    def histogram(self, name: str, histogram: Histogram) -> None:
        """Expose a histogram of METRICS that another object keeps."""
        self._histograms[name] = histogram

    def exemplars(self, read: Callable[[], Mapping[tuple[str, str], str]]) -> None:
        """Show the latest traces beside the counts of what they traced. `read` returns their ids,
        by the name of the trace and its outcome."""
        self._exemplars = read

    def collect(self) -> Iterator[Metric]:
        """Yield every family, for a Prometheus registry."""
        for name in COUNTED_HERE:
            yield CounterMetricFamily(*_described(name), value=self.counts[name])
        for name in LABELLED_HERE:
            counts = {(value,): count for value, count in getattr(self, name).items()}
            yield _with_labels(name, counts.items(), self._traces_of(name))
        for name, read in self._totals.items():
            yield CounterMetricFamily(*_described(name), value=read())
        for name, read_all in self._families.items():
            yield _with_labels(name, read_all())
        for name, histogram in self._histograms.items():
            yield _as_histogram(name, histogram)
        for name, read in self._gauges.items():
            yield GaugeMetricFamily(*_described(name), value=read())

    def _traces_of(self, name: str) -> Mapping[str, str]:
        traced = TRACED.get(name)
        return {outcome: at for (kind, outcome), at in self._exemplars().items() if kind == traced}

    def registry(self) -> CollectorRegistry:
        """Return a registry that holds these metrics alone."""
        registry = CollectorRegistry()
        registry.register(self)
        return registry


def _described(name: str) -> tuple[str, str]:
    return f"conveyor_{name}", METRICS[name].help


def _with_labels(
    name: str,
    counts: Iterable[tuple[tuple[str, ...], float]],
    traces: Mapping[str, str] = MappingProxyType({}),
) -> Metric:
    """Make a family; the counts of a value with one of the `traces` get its id as exemplar."""
    family = CounterMetricFamily(*_described(name), labels=list(METRICS[name].labels))
    for values, count in sorted(counts):
        trace_id = traces.get(values[0])
        exemplar = None if trace_id is None else Exemplar({"trace_id": trace_id}, 1.0)
        family.samples.append(
            Sample(
                f"{family.name}_total",
                dict(zip(METRICS[name].labels, values, strict=True)),
                count,
                exemplar=exemplar,
            )
        )
    return family


def _as_histogram(name: str, histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(*_described(name), labels=list(METRICS[name].labels))
    bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
    for labels, buckets in histogram.read():
        rows: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        for at, count in enumerate(itertools.accumulate(buckets.counts)):
            trace_id, seconds = buckets.traces.get(at, ("", 0.0))
            row = bounds[at], float(count)
            exemplar = Exemplar({"trace_id": trace_id}, seconds)
            rows.append((*row, exemplar) if trace_id else row)
        family.add_metric(labels, rows, buckets.sum)
    return family


class Reports:
    """Tell how reports of runs get on: those of the outbox and those of webhooks.

    `notices` and `events` read how many seconds the oldest due one of each has waited.
    """

    def __init__(
        self, telemetry: Telemetry, *, notices: Callable[[], float], events: Callable[[], float]
    ) -> None:
        telemetry.gauge("outbox_oldest_due_seconds", notices)
        telemetry.gauge("webhook_oldest_due_seconds", events)
        self._counts = telemetry.webhook_attempts
        self._notices = notices
        self._events = events
        self._delivered = self._failed = 0

    async def tell(self) -> None:
        """Log how many attempts were made since the last time, and how old the oldest due report
        is."""
        delivered = self._counts.get("delivered", 0)
        failed = sum(self._counts.values()) - delivered
        figures = {
            "delivered": delivered - self._delivered,
            "failed": failed - self._failed,
            "oldest_seconds": round(max(self._notices(), self._events()), 3),
        }
        self._delivered, self._failed = delivered, failed
        _log.info("webhooks", extra=figures)


SLOW_SHARE = 0.95
"""The share of settlements that the line of progress tells the duration of."""


class TaskFigures:
    """Tell how many tasks ended, how long 95 % of them waited at most to be settled, and how many
    calls were cut off by the fence."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._ended = self._fenced = 0
        self._settled = telemetry.settlements.counts()

    async def tell(self) -> None:
        """Log what came about since the last time."""
        ended, fenced = sum(self._telemetry.tasks.values()), self._telemetry.counts["fenced"]
        settled = self._telemetry.settlements.counts()
        new = [now - before for now, before in zip(settled, self._settled, strict=True)]
        since = {
            "ended": ended - self._ended,
            "fenced": fenced - self._fenced,
            "settlement_seconds": self._telemetry.settlements.within(SLOW_SHARE, new),
        }
        self._ended, self._fenced, self._settled = ended, fenced, settled
        _log.info("progress", extra=since)


STILL_AFTER = 30.0
"""Seconds without a turn after which the event loop counts as stuck."""


class LoopLag:
    """Measure how late the event loop is. `seconds` is the latest lag."""

    def __init__(self, clock: Clock) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._turned_at = clock.monotonic()

    def trouble(self) -> str:
        """Say that the loop has not come round for long; "" if it has."""
        still = self._clock.monotonic() - self._turned_at
        return "" if still < STILL_AFTER else f"the loop has not turned for {still:.0f} s"

    async def look(self) -> None:
        """Measure once, for LOOK seconds."""
        before = self._clock.monotonic()
        await self._clock.sleep(LOOK)
        self._turned_at = self._clock.monotonic()
        self.seconds = max(0.0, self._turned_at - before - LOOK)

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            await self.look()
