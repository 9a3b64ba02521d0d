"""Traces over OpenTelemetry, sent in batches by a thread of its SDK.

The queue of spans is bounded. Spans that find it full are lost, and so are those that a collector
does not take: no task waits for either. Only this module imports the SDK, and only once an endpoint
is configured.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import anyio
from opentelemetry import trace as api
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace.status import Status

from conveyor import __version__
from conveyor.ports.clock import Clock
from conveyor.ports.tracing import Recording, is_sampled

MOST_WAITING = 2_048
"""Spans that wait to be sent."""
AT_ONCE = 512
EXPORT_EVERY = 1_000
"""Milliseconds between batches."""
EXPORT_TIMEOUT = 5.0
"""Seconds that one request to the collector may take, its repetitions included."""
CLOSING_TIMEOUT = 3.0
"""Seconds that the end of the process waits for the last batch."""

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_MILLISECOND = 1_000_000

_log = logging.getLogger("conveyor.engine")


class _ToldExporter(SpanExporter):
    """An exporter that logs when a collector ceases to take spans, and when it takes them again."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._fails = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        fails = result is not SpanExportResult.SUCCESS
        if fails is not self._fails:
            self._fails = fails
            if fails:
                _log.warning("the collector of traces takes none", extra={"at": self._endpoint})
            else:
                _log.info("the collector of traces takes them again", extra={"at": self._endpoint})
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class OpenTelemetryTracer:
    """The tracing port over the SDK.

    `endpoint` is the base URL of an OTLP collector over HTTP; without a path, /v1/traces is added.
    `ratio` is the share of keys that are sampled, 0 to 1. `service` is the name of the program in
    the traces. `latest` has the trace id of the latest
    sampled end of each outcome, by name of the trace and outcome, for exemplars.
    """

    def __init__(self, clock: Clock, *, endpoint: str, ratio: float, service: str) -> None:
        self.latest: dict[tuple[str, str], str] = {}
        # It would log every failed request; what users need to know is told above.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        parts = urlsplit(endpoint)
        path = parts.path if parts.path.strip("/") else "/v1/traces"
        url = parts._replace(path=path).geturl()
        self._exporter: SpanExporter = OTLPSpanExporter(url, timeout=EXPORT_TIMEOUT)
        shown = f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}"
        self._target = _Target(
            BatchSpanProcessor(
                _ToldExporter(self._exporter, shown),
                max_queue_size=MOST_WAITING,
                schedule_delay_millis=EXPORT_EVERY,
                max_export_batch_size=AT_ONCE,
            ),
            Resource.create({"service.name": service, "service.version": __version__}),
            clock,
        )
        self._ratio = ratio

    def begin(self, name: str, key: str, *, started_at: int) -> Recording | None:
        """Begin a trace if the key is sampled."""
        if not is_sampled(key, self._ratio):
            return None
        return self.begin_always(name, started_at=started_at)

    def begin_always(self, name: str, *, started_at: int) -> Recording | None:
        """Begin a trace."""
        return _SpanRecording(self._target, name, started_at, self.latest)

    async def aclose(self) -> None:
        """Send what waits, for at most CLOSING_TIMEOUT; what is left is lost."""
        await anyio.to_thread.run_sync(self._close)

    def _close(self) -> None:
        # Of a thread that is no daemon the interpreter would wait for the end, however long the
        # collector keeps silent.
        closing = threading.Thread(
            target=self._target.processor.shutdown, name="traces", daemon=True
        )
        closing.start()
        closing.join(CLOSING_TIMEOUT)
        if closing.is_alive():
            # Else the batch under way would be sent again and again, and then the next one.
            self._exporter.shutdown()


@dataclass(frozen=True, slots=True)
class _Target:
    """The processor that takes spans, and what all spans of this process share."""

    processor: BatchSpanProcessor
    resource: Resource
    clock: Clock
    scope: InstrumentationScope = InstrumentationScope("conveyor", __version__)

    def new_trace_id(self) -> int:
        """Return a random trace id, which is not 0."""
        return int.from_bytes(self.clock.token(16)) or 1

    def new_context(self, trace_id: int) -> api.SpanContext:
        """Return the context of a new span of a trace."""
        span_id = int.from_bytes(self.clock.token(8)) or 1
        return api.SpanContext(trace_id, span_id, is_remote=False, trace_flags=_SAMPLED)


_SAMPLED = api.TraceFlags(api.TraceFlags.SAMPLED)
_UNSET = Status()


class _SpanRecording:
    """A recording of a span and its children, which become spans at the end of the recording.

    The SDK's own spans lock and copy at each step, for code that changes them in several threads:
    five of them cost four times as much as these, which are complete when they are made.
    """

    __slots__ = ("_context", "_latest", "_links", "_name", "_parts", "_started_at", "_target")

    def __init__(
        self, target: _Target, name: str, started_at: int, latest: dict[tuple[str, str], str]
    ) -> None:
        self._target = target
        self._name = name
        self._started_at = started_at
        self._latest = latest
        self._context = target.new_context(target.new_trace_id())
        self._links: list[api.Link] = []
        self._parts: list[tuple[str, int, int]] = []

    @property
    def traceparent(self) -> str:
        return f"00-{self._context.trace_id:032x}-{self._context.span_id:016x}-01"

    def link(self, traceparent: str) -> None:
        found = _TRACEPARENT.fullmatch(traceparent)
        if found is None:
            return
        trace_id, span_id, flags = (int(text, 16) for text in found.groups())
        context = api.SpanContext(
            trace_id, span_id, is_remote=True, trace_flags=api.TraceFlags(flags)
        )
        if context.is_valid:
            self._links.append(api.Link(context))

    def part(self, name: str, started_at: int, ended_at: int) -> None:
        self._parts.append((name, started_at, max(started_at, ended_at)))

    def end(
        self, ended_at: int, attributes: Mapping[str, str | int], *, failed: bool = False
    ) -> None:
        outcome = attributes.get("outcome")
        if isinstance(outcome, str):
            self._latest[self._name, outcome] = f"{self._context.trace_id:032x}"
        target, trace_id = self._target, self._context.trace_id
        for name, began, ended in self._parts:
            context = target.new_context(trace_id)
            self._send(name, context, began, ended, parent=self._context)
        self._send(
            self._name,
            self._context,
            self._started_at,
            ended_at,
            attributes={f"conveyor.{name}": value for name, value in attributes.items()},
            links=self._links,
            status=Status(api.StatusCode.ERROR) if failed else _UNSET,
        )

    def _send(
        self, name: str, context: api.SpanContext, began: int, ended: int, **fields: Any
    ) -> None:
        """Queue a span; instants are in milliseconds."""
        self._target.processor.on_end(
            ReadableSpan(
                name,
                context,
                resource=self._target.resource,
                start_time=began * _MILLISECOND,
                end_time=ended * _MILLISECOND,
                instrumentation_scope=self._target.scope,
                **fields,
            )
        )
