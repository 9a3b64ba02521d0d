"""A small collector of traces: it takes OTLP over HTTP and keeps the decoded spans."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """The spans that came so far, and the bytes that held them."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.paths: set[str] = set()
        self.bytes = b""
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    def take(self, path: str, content: bytes) -> None:
        """Keep the spans of a request."""
        request = ExportTraceServiceRequest()
        request.ParseFromString(content)
        with self._lock:
            self.paths.add(path)
            self.bytes += content
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    self._spans.extend(scope.spans)

    def roots(self, name: str) -> list[Span]:
        """Return the first spans of the traces of this name."""
        with self._lock:
            return [span for span in self._spans if span.name == name and not span.parent_span_id]

    def parts(self, root: Span) -> list[Span]:
        """Return the spans within a root, by their start."""
        with self._lock:
            found = [span for span in self._spans if span.parent_span_id == root.span_id]
        return sorted(found, key=lambda span: span.start_time_unix_nano)

    def all(self) -> list[Span]:
        """Return every span."""
        with self._lock:
            return list(self._spans)


def attributes(span: Span) -> dict[str, str | int]:
    """Return the attributes of a span, without the prefix of their names."""
    return {
        one.key.removeprefix("conveyor."): (
            one.value.int_value if one.value.HasField("int_value") else one.value.string_value
        )
        for one in span.attributes
    }


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                content = gzip.decompress(content)
            collector.take(self.path, content)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
