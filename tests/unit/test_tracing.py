"""The tracer over OpenTelemetry: which keys it samples, what it refuses, how it ends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import anyio
import pytest

from conveyor.clock import SystemClock
from conveyor.engine.tracing import OpenTelemetryTracer
from tests.patient import SECONDS

pytestmark = pytest.mark.slow


def test_every_process_samples_the_same_keys() -> None:
    keys = [f"01M8MW{number:04d}" for number in range(2_000)]
    sampled = []
    for _ in range(2):
        with opened(0.1) as tracer:
            begun = {key: tracer.begin("attempt", key, started_at=0) for key in keys}
        sampled.append({key for key, recording in begun.items() if recording is not None})

    assert sampled[0] == sampled[1]
    assert 100 < len(sampled[0]) < 300


@pytest.mark.parametrize(("ratio", "count"), [(0.0, 0), (1.0, 50)])
def test_none_and_all_are_sampled(ratio: float, count: int) -> None:
    with opened(ratio) as tracer:
        found = [tracer.begin("attempt", f"task-{number}", started_at=0) for number in range(50)]

        assert sum(recording is not None for recording in found) == count
        assert tracer.begin_always("fire", started_at=0) is not None


def test_a_traceparent_that_is_none_is_passed_over() -> None:
    none, some = "0" * 32, "1" * 32
    wrong = ["", "00", "00-zz-zz-01", f"00-{none}-{'1' * 16}-01", f"01-{some}-{'1' * 16}-01"]
    with opened(1.0) as tracer:
        for traceparent in wrong:
            recording = tracer.begin_always("fire", started_at=0)
            assert recording is not None

            recording.link(traceparent)
            recording.end(1, {"job_id": "j"})


def test_nothing_waits_for_a_collector_that_is_silent_once_the_tracer_is_closed() -> None:
    """It takes connections and never answers."""
    before = set(threading.enumerate())
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        close_at_work(silent.getsockname()[1])
        kept = {thread for thread in threading.enumerate() if not thread.daemon} - before
        # Threads that the event loop has told to stop may take a moment to end.
        for thread in kept:
            thread.join(SECONDS)

    assert not [thread for thread in kept if thread.is_alive()]


def test_a_collector_that_takes_none_is_asked_nothing_more_once_the_tracer_is_closed() -> None:
    """It answers 503: each batch is sent again and again for five seconds."""
    asked: list[str] = []

    class Refusing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_error(503)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    before = set(threading.enumerate())
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        close_at_work(server.server_port)
        at_the_end = len(asked)
        for thread in set(threading.enumerate()) - before - {serving}:
            thread.join(SECONDS)
        server.shutdown()
        serving.join(SECONDS)

    # One request may have been under way.
    assert 0 < len(asked) <= at_the_end + 1


def tracer_to(port: int, ratio: float) -> OpenTelemetryTracer:
    """A tracer whose collector listens, or does not, at a port of this machine."""
    endpoint = f"http://127.0.0.1:{port}"
    return OpenTelemetryTracer(
        SystemClock(), endpoint=endpoint, ratio=ratio, service="conveyor-test"
    )


def close_at_work(port: int) -> None:
    """Close a tracer that has some batches to send."""
    tracer = tracer_to(port, 1.0)
    for number in range(1_500):
        recording = tracer.begin_always("fire", started_at=number)
        assert recording is not None
        recording.end(number + 1, {"job_id": "j"})
    anyio.run(tracer.aclose)


@contextmanager
def opened(ratio: float) -> Iterator[OpenTelemetryTracer]:
    """A tracer without a collector."""
    tracer = tracer_to(9, ratio)
    try:
        yield tracer
    finally:
        anyio.run(tracer.aclose)
