"""Traces over OpenTelemetry, sent in batches by a thread of its SDK.

The queue of spans is bounded. Spans that find it full are lost, and so are those that a collector
does not take: no task waits for either. Only this module imports the SDK, and only once an endpoint
is configured.
"""

from __future__ import annotations

import logging
import re
import threading
import zlib
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import anyio
from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from conveyor import __version__
from conveyor.ports.clock import Clock
from conveyor.ports.tracing import Recording

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


class _ClockIds(IdGenerator):
    """Ids from the injected clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def generate_span_id(self) -> int:
        return int.from_bytes(self._clock.token(8)) or 1

    def generate_trace_id(self) -> int:
        return int.from_bytes(self._clock.token(16)) or 1

    def is_trace_id_random(self) -> bool:
        return True


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
        exporter = OTLPSpanExporter(parts._replace(path=path).geturl(), timeout=EXPORT_TIMEOUT)
        shown = f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}"
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource.create({"service.name": service, "service.version": __version__}),
            shutdown_on_exit=False,
            id_generator=_ClockIds(clock),
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                _ToldExporter(exporter, shown),
                max_queue_size=MOST_WAITING,
                schedule_delay_millis=EXPORT_EVERY,
                max_export_batch_size=AT_ONCE,
            )
        )
        self._tracer = self._provider.get_tracer("conveyor", __version__)
        self._below = round(ratio * (1 << 32))

    def begin(self, name: str, key: str, *, started_at: int) -> Recording | None:
        """Begin a trace if the key is sampled."""
        if zlib.crc32(key.encode()) >= self._below:
            return None
        return self.begin_always(name, started_at=started_at)

    def begin_always(self, name: str, *, started_at: int) -> Recording | None:
        """Begin a trace."""
        return _SpanRecording(self._tracer, name, started_at, self.latest)

    async def aclose(self) -> None:
        """Send what waits, for at most CLOSING_TIMEOUT; what is left is lost."""
        await anyio.to_thread.run_sync(self._close)

    def _close(self) -> None:
        # Of a thread that is no daemon the interpreter would wait for the end, however long the
        # collector keeps silent.
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(CLOSING_TIMEOUT)


class _SpanRecording:
    """A recording over a span and its children."""

    def __init__(
        self, tracer: api.Tracer, name: str, started_at: int, latest: dict[tuple[str, str], str]
    ) -> None:
        self._tracer = tracer
        self._name = name
        self._latest = latest
        self._span = tracer.start_span(
            name, context=Context(), start_time=started_at * _MILLISECOND
        )

    @property
    def traceparent(self) -> str:
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"

    def link(self, traceparent: str) -> None:
        found = _TRACEPARENT.fullmatch(traceparent)
        if found is None:
            return
        trace_id, span_id, flags = (int(text, 16) for text in found.groups())
        context = api.SpanContext(
            trace_id, span_id, is_remote=True, trace_flags=api.TraceFlags(flags)
        )
        if context.is_valid:
            self._span.add_link(context)

    def part(self, name: str, started_at: int, ended_at: int) -> None:
        context = api.set_span_in_context(self._span, Context())
        part = self._tracer.start_span(name, context, start_time=started_at * _MILLISECOND)
        part.end(max(started_at, ended_at) * _MILLISECOND)

    def end(
        self, ended_at: int, attributes: Mapping[str, str | int], *, failed: bool = False
    ) -> None:
        self._span.set_attributes({f"conveyor.{name}": value for name, value in attributes.items()})
        if failed:
            self._span.set_status(api.StatusCode.ERROR)
        outcome = attributes.get("outcome")
        if isinstance(outcome, str):
            trace_id = self._span.get_span_context().trace_id
            self._latest[self._name, outcome] = f"{trace_id:032x}"
        self._span.end(ended_at * _MILLISECOND)
