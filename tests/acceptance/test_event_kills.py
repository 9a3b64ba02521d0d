"""kill -9 around the ends of runs: each run that ended has one event, delivered at least once."""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from conveyor.testing.gateway_server import GatewayServer
from tests.acceptance.support_data import kill_while_booting, rows_left, rows_of, server
from tests.acceptance.support_site import in_background
from tests.acceptance.support_wire import ENDED, Wire, eventually, target

pytestmark = [pytest.mark.server, pytest.mark.slow]

SETTINGS: dict[str, object] = {
    "max_interruptions": 1_000,
    "shutdown_grace": 0,
    "outbox_interval": 0.1,
    "sweep_interval": 1,
}
JOBS = 6
"""Jobs submitted before each kill; one of them is stopped by its caller."""
EVENTS = ["run.completed", "run.failed", "run.stopped"]
_ENDS = "SELECT run_id, ended_as, ended_at FROM notices WHERE subscriber = 'webhook'"
_DELIVERIES = "SELECT delivery_id, status, record FROM deliveries"


class SlowReceiver(ThreadingHTTPServer):
    """A receiver that takes its time to answer, so that a kill may come in between. `got` has the
    bodies of each event, one a request, by its id."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(("127.0.0.1", 0), _Receiving)
        self.got: dict[str, list[bytes]] = defaultdict(list)
        self.lock = Lock()
        self._draw = draw

    @property
    def url(self) -> str:
        """The address of the receiver."""
        return f"http://127.0.0.1:{self.server_port}/hook"

    def keep(self, event: str, body: bytes) -> float:
        """Keep an event; return for how many seconds the answer is to wait."""
        with self.lock:
            self.got[event].append(body)
            return self._draw.random() * 0.1


class _Receiving(BaseHTTPRequestHandler):
    server: SlowReceiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(self.server.keep(self.headers["X-ZenRows-Event-Id"], body))
        try:
            self.send_response(204)
            self.end_headers()
        except OSError:
            self.close_connection = True  # whoever waited for the answer was killed

    def log_message(self, format: str, *args: object) -> None:
        """Keep the output of tests clean."""


@pytest.fixture
def gateway() -> Iterator[GatewayServer]:
    """A scraping API that outlives the servers under test."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(GatewayServer()) as running,
    ):
        yield running


def submit(wire: Wire, receiver: SlowReceiver, name: str) -> list[str]:
    """Submit jobs whose runs end soon, and stop the last one; return their ids."""
    webhook = {"url": receiver.url, "signature": False, "events": EVENTS}
    made: list[str] = []
    for number in range(JOBS):
        urls = [target(f"{name}/{number}/{task}", delay=0.02 * number) for task in range(2)]
        made.append(wire.submit(urls, webhook=webhook)["job_id"])
    wire.ask("POST", f"/jobs/{made[-1]}/stop")
    return made


def all_told(data_dir: Path, runs: int) -> bool | None:
    """Return whether each run has a delivery that was delivered, and nothing is owed."""
    statuses = [status for _, status, _ in rows_of(data_dir, _DELIVERIES)]
    owed = rows_of(data_dir, _ENDS)
    return (not owed and statuses == ["delivered"] * runs) or None


@pytest.mark.guarantee("G20")
@pytest.mark.parametrize(
    ("kills", "seed"),
    [
        (8, 1),
        pytest.param(40, 2, marks=(pytest.mark.full, pytest.mark.timeout(600)), id="full"),
    ],
)
def test_each_run_has_one_event_whenever_the_server_is_killed(
    tmp_path: Path, gateway: GatewayServer, kills: int, seed: int
) -> None:
    draw = random.Random(seed)
    jobs: list[str] = []
    undelivered = 0
    receiver = SlowReceiver(random.Random(seed))
    with receiver, in_background(receiver):
        for number in range(kills):
            with (
                server(tmp_path, "--gateway", gateway.url, **SETTINGS) as process,
                Wire(process.info.api) as wire,
            ):
                jobs += submit(wire, receiver, f"kill-{number}")
                time.sleep(draw.random() * 0.4)  # the moment is what the test varies
            undelivered += len(rows_left(tmp_path, f"{_ENDS} AND ended_at > 0"))
            undelivered += len(rows_left(tmp_path, f"{_DELIVERIES} WHERE status = 'pending'"))
            if number % 4 == 3:
                kill_while_booting(
                    tmp_path, "--gateway", gateway.url, after=draw.random(), **SETTINGS
                )
        with (
            server(tmp_path, "--gateway", gateway.url, **SETTINGS) as process,
            Wire(process.info.api) as wire,
        ):
            runs = [wire.ended(job_id) for job_id in jobs]
            eventually(lambda: all_told(tmp_path, len(jobs)), "each end is told")
            deliveries = rows_of(tmp_path, _DELIVERIES)
    assert undelivered > 0  # some of the kills came between an end and its delivery
    assert_one_event_a_run(receiver, runs, deliveries)


def assert_one_event_a_run(
    receiver: SlowReceiver, runs: list[dict[str, Any]], deliveries: list[tuple[str, str, str]]
) -> None:
    """Check that each run has one id, that each id came with the same bytes each time, and as often
    as its log says."""
    records = {delivery_id: json.loads(record) for delivery_id, _, record in deliveries}
    by_run: dict[str, list[str]] = defaultdict(list)
    for delivery_id, record in records.items():
        by_run[record["run_id"]].append(delivery_id)
    assert set(by_run) == {run["run_id"] for run in runs}
    assert set(receiver.got) == set(records)
    for run in runs:
        assert run["status"] in ENDED
        [only] = by_run[run["run_id"]]
        bodies = receiver.got[only]
        assert len(set(bodies)) == 1
        event = json.loads(bodies[0])
        assert event["event_id"] == only
        assert (event["run_id"], event["event_type"]) == (run["run_id"], f"run.{run['status']}")
        begun = records[only]["attempt_count"]
        # A request may have been begun, and not have come, when its server was killed.
        assert 1 <= len(bodies) <= begun
