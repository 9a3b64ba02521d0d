"""The tracer over OpenTelemetry: which keys it samples, what it refuses, how it ends."""

from __future__ import annotations

import socket
import threading

import anyio
import pytest

from conveyor.clock import SystemClock
from conveyor.engine.tracing import OpenTelemetryTracer
from tests.patient import SECONDS

pytestmark = pytest.mark.slow


def test_every_process_samples_the_same_keys() -> None:
    keys = [f"01M8MW{number:04d}" for number in range(2_000)]
    sampled = [
        {key for key in keys if tracer.begin("attempt", key, started_at=0) is not None}
        for tracer in (opened(0.1), opened(0.1))
    ]

    assert sampled[0] == sampled[1]
    assert 100 < len(sampled[0]) < 300


@pytest.mark.parametrize(("ratio", "count"), [(0.0, 0), (1.0, 50)])
def test_none_and_all_are_sampled(ratio: float, count: int) -> None:
    tracer = opened(ratio)
    found = [tracer.begin("attempt", f"task-{number}", started_at=0) for number in range(50)]

    assert sum(recording is not None for recording in found) == count
    assert tracer.begin_always("fire", started_at=0) is not None


@pytest.mark.parametrize(
    "wrong",
    ["", "00", "00-zz-zz-01", f"00-{'0' * 32}-{'1' * 16}-01", f"01-{'1' * 32}-{'1' * 16}-01"],
)
def test_a_traceparent_that_is_none_is_passed_over(wrong: str) -> None:
    recording = opened(1.0).begin_always("fire", started_at=0)
    assert recording is not None

    recording.link(wrong)
    recording.end(1, {"job_id": "j"})


def test_nothing_waits_for_a_collector_that_is_silent_once_the_tracer_is_closed() -> None:
    """It takes connections and never answers."""
    before = set(threading.enumerate())
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        tracer = OpenTelemetryTracer(
            SystemClock(),
            endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}",
            ratio=1.0,
            service="conveyor-test",
        )
        for number in range(1_500):
            recording = tracer.begin_always("fire", started_at=number)
            assert recording is not None
            recording.end(number + 1, {"job_id": "j"})
        anyio.run(tracer.aclose)
        kept = {thread for thread in threading.enumerate() if not thread.daemon} - before
        # Threads that the event loop has told to stop may take a moment to end.
        for thread in kept:
            thread.join(SECONDS)

    assert not [thread for thread in kept if thread.is_alive()]


def opened(ratio: float) -> OpenTelemetryTracer:
    endpoint = "http://127.0.0.1:9"
    return OpenTelemetryTracer(
        SystemClock(), endpoint=endpoint, ratio=ratio, service="conveyor-test"
    )
