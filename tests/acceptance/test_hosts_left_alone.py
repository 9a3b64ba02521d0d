"""A worker leaves a host alone that asks for a pause, and scrapes other hosts meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from time import monotonic

import pytest

from tests.acceptance.support_calls import Caller
from tests.acceptance.support_fleet import serving_direct
from tests.acceptance.support_site import in_background
from tests.acceptance.support_wire import eventually
from tests.patient import fetched

PAUSE = 3
TASKS = 60


class PausingSite(ThreadingHTTPServer):
    """A site that refuses its first request and asks for a pause. `asked_at` are the times at which
    requests came, `refused_at` that of the refusal, before it was sent."""

    request_queue_size = 256

    def __init__(self, *, pauses: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.origin = f"http://127.0.0.1:{self.server_port}"
        self.asked_at: list[float] = []
        self.refused_at = 0.0
        self._pauses = pauses
        self._lock = Lock()

    def refuses(self) -> bool:
        """Count a request, and tell whether it is refused."""
        with self._lock:
            self.asked_at.append(monotonic())
            if self._pauses and len(self.asked_at) == 1:
                self.refused_at = monotonic()
                return True
            return False


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: PausingSite

    def do_GET(self) -> None:
        refuses = self.server.refuses()
        self.send_response(429 if refuses else 200)
        if refuses:
            self.send_header("Retry-After", str(PAUSE))
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"page")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def site(*, pauses: bool = False) -> Iterator[PausingSite]:
    with PausingSite(pauses=pauses) as server, in_background(server):
        yield server


def deliveries(metrics: str) -> int:
    """Count the messages that a worker has received."""
    page = fetched(f"{metrics}/metrics").text
    [line] = [line for line in page.splitlines() if line.startswith("conveyor_deliveries_total")]
    return int(float(line.split()[-1]))


@pytest.mark.slow
def test_none_of_a_host_is_asked_for_while_it_wants_to_be_left_alone(
    binding: str, tmp_path: Path
) -> None:
    with (
        site(pauses=True) as paused,
        site() as other,
        serving_direct(binding, tmp_path, workers=1, retry_base=0.01) as (api, metrics),
        Caller(api) as caller,
    ):
        first = caller.submit(f"{paused.origin}/refused")
        eventually(lambda: caller.results(first)[0].get("waiting"), "the task waits")
        job = caller.submit(*(f"{paused.origin}/{number}" for number in range(TASKS)))
        swift = caller.submit(*(f"{other.origin}/{number}" for number in range(TASKS)))
        assert caller.wait(swift)["stats"]["successful"] == TASKS
        swift_at = monotonic()
        waiting = [row["waiting"]["reason"] for row in caller.results(job) if "waiting" in row]
        seen_at = monotonic()
        assert caller.wait(job)["stats"]["successful"] == TASKS
        assert caller.wait(first)["stats"]["successful"] == 1
        received = deliveries(metrics)

    assert min(paused.asked_at[1:]) - paused.refused_at >= PAUSE
    assert len(paused.asked_at) == 1 + 1 + TASKS
    assert len(other.asked_at) == TASKS
    if swift_at < paused.refused_at + PAUSE:  # else the machine was too busy to see it
        assert set(waiting) == {"host_retry_after"}
        assert seen_at >= paused.refused_at + PAUSE or len(waiting) == TASKS
    # Each message of the host comes once in the pause and once behind it: none is polled.
    assert received <= 2 + 2 * TASKS + TASKS
