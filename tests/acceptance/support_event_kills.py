"""Runs whose ends are told to a slow receiver, and the check that each has one event."""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

from tests.acceptance.support_site import in_background
from tests.acceptance.support_wire import ENDED, Wire, target

JOBS = 6
"""Jobs submitted at a time; one of them is stopped by its caller."""
EVENTS = ["run.completed", "run.failed", "run.stopped"]


class SlowReceiver(ThreadingHTTPServer):
    """A receiver that takes its time to answer, so that a kill may come in between. `got` has the
    bodies of each event, one a request, by its id."""

    def __init__(self, seed: int) -> None:
        super().__init__(("127.0.0.1", 0), _Receiving)
        self.got: dict[str, list[bytes]] = defaultdict(list)
        self._lock = Lock()
        self._draw = random.Random(seed)

    @property
    def webhook(self) -> dict[str, object]:
        """A webhook that asks for every event."""
        url = f"http://127.0.0.1:{self.server_port}/hook"
        return {"url": url, "signature": False, "events": EVENTS}

    def keep(self, event: str, body: bytes) -> float:
        """Keep an event; return for how many seconds the answer is to wait."""
        with self._lock:
            self.got[event].append(body)
            return self._draw.random() * 0.1


class _Receiving(BaseHTTPRequestHandler):
    server: SlowReceiver

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        body = self.rfile.read(length)
        if len(body) < length:
            self.close_connection = True  # whoever sent it was killed
            return
        time.sleep(self.server.keep(self.headers["X-ZenRows-Event-Id"], body))
        try:
            self.send_response(204)
            self.end_headers()
        except OSError:
            self.close_connection = True  # whoever waited for the answer was killed

    def log_message(self, format: str, *args: object) -> None:
        """Keep the output of tests clean."""


@contextmanager
def slow_receiver(seed: int) -> Iterator[SlowReceiver]:
    """A slow receiver, for as long as the context is open."""
    with SlowReceiver(seed) as receiver, in_background(receiver):
        yield receiver


def jobs_to_tell(receiver: SlowReceiver, name: str) -> list[dict[str, Any]]:
    """Return the submits of jobs whose runs end soon, one after the other."""
    return [
        {
            "tasks": [
                {"url": target(f"{name}/{number}/{task}", delay=0.02 * number)} for task in range(2)
            ],
            "webhook": receiver.webhook,
        }
        for number in range(JOBS)
    ]


def logged(wire: Wire) -> list[dict[str, Any]]:
    """Return every delivery of the log."""
    found: list[dict[str, Any]] = []
    cursor = None
    while True:
        page = wire.ask("GET", "/webhook/deliveries", limit=100, cursor=cursor)
        found += page["deliveries"]
        cursor = page.get("next_cursor")
        if cursor is None:
            return found


def all_delivered(wire: Wire, runs: int) -> bool | None:
    """Return whether there are deliveries of so many runs, and all of them are delivered."""
    deliveries = logged(wire)
    told = {delivery["run_id"] for delivery in deliveries}
    return (
        len(told) == runs and all(delivery["status"] == "delivered" for delivery in deliveries)
    ) or None


def assert_one_event_a_run(
    receiver: SlowReceiver, runs: list[dict[str, Any]], deliveries: list[dict[str, Any]]
) -> None:
    """Check that each run has one id, whose event came with the same bytes each time, at least once
    and no more often than its log says."""
    assert sorted(delivery["run_id"] for delivery in deliveries) == sorted(
        run["run_id"] for run in runs
    )
    by_run = {delivery["run_id"]: delivery for delivery in deliveries}
    assert set(receiver.got) == {delivery["delivery_id"] for delivery in deliveries}
    for run in runs:
        delivery = by_run[run["run_id"]]
        bodies = receiver.got[delivery["delivery_id"]]
        assert len(set(bodies)) == 1
        event = json.loads(bodies[0])
        assert event["event_id"] == delivery["delivery_id"]
        assert run["status"] in ENDED
        assert (event["run_id"], event["event_type"]) == (run["run_id"], f"run.{run['status']}")
        # An attempt whose worker was killed before it had sent all is in the log alone.
        assert 1 <= len(bodies) <= delivery["attempt_count"]
