"""A server on a clock that is moved: days in seconds, the same each time, with every call made by
the time a move has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from anyio.from_thread import start_blocking_portal

from conveyor.clock import JournalLine, ManualClock
from conveyor.dev import files
from conveyor.dev.sqlite.database import Connection
from conveyor.settings import load
from conveyor.testing.gateway_server import GatewayServer
from conveyor.testing.local_server import ConveyorServer, conveyor_server, serving
from tests.acceptance.support_cli import QUIET_PYTEST
from tests.acceptance.support_data import ForkedServer
from tests.acceptance.support_wire import eventually
from tests.patient import SECONDS

ROOT = Path(__file__).parents[2]
START = "2027-03-01T00:00:00Z"
MOST_IDLE_WAKES = 2_000
"""Sleepers woken by 40 days without work: an idle server on the system's clock wakes 16 million."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ConveyorServer]:
    """A server whose clock is moved."""
    with conveyor_server(tmp_path, clock="manual", clock_start=START) as booted:
        yield booted


def _client(server: ConveyorServer) -> httpx.Client:
    return httpx.Client(base_url=server.base_url, headers={"X-API-Key": server.api_key}, timeout=60)


def _submit(server: ConveyorServer, tasks: list[str], **fields: Any) -> str:
    with _client(server) as client:
        body = {"tasks": [{"url": url} for url in tasks], **fields}
        answer = client.post("/jobs", json=body)
    assert answer.status_code in (201, 202), answer.text
    job_id: str = answer.json()["job_id"]
    return job_id


@pytest.mark.slow
def test_forty_idle_days_wake_a_bounded_number_of_sleepers(server: ConveyorServer) -> None:
    _submit(server, [server.url("page")])
    server.clock.run_until_idle()
    before = server.clock.wakes
    server.clock.advance(days=40)
    assert server.clock.wakes - before <= MOST_IDLE_WAKES


@pytest.mark.slow
def test_a_paused_run_and_an_open_job_cost_no_wakes(server: ConveyorServer) -> None:
    job = _submit(server, [server.url(f"page/{number}", delay=60) for number in range(20)])
    with _client(server) as client:
        assert client.post(f"/jobs/{job}/pause").status_code in (200, 202)
    server.clock.advance(hours=1)
    before = server.clock.wakes
    server.clock.advance(days=40)
    assert server.clock.wakes - before <= MOST_IDLE_WAKES


@pytest.mark.slow
def test_a_clock_that_was_set_back_looks_ever_less_often_at_a_task_that_waits(
    tmp_path: Path,
) -> None:
    with conveyor_server(tmp_path, clock="manual", clock_start=START, retry_base=5.0) as server:
        job = _submit(server, [server.url("page", flaky=2)])
        server.clock.advance(seconds=1)
        before = server.clock.wakes
        server.clock.shift(hours=-3)
        server.clock.run_until_idle()
        with _client(server) as client:
            assert client.get(f"/jobs/{job}").json()["latest_run"]["status"] == "completed"
        # 518; with a look each 10 s, the least that a row is left alone, 10,031.
        assert server.clock.wakes - before <= 1_000


@pytest.mark.slow
def test_a_move_waits_for_a_call_over_a_network(tmp_path: Path) -> None:
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(GatewayServer()) as gateway,
    ):
        settings = load({}, data_dir=str(tmp_path), port=0, gateway=gateway.url, log_level="error")
        clock = ManualClock()
        with serving(settings, clock=clock) as (info, server):
            headers = {"X-API-Key": "k"}
            with httpx.Client(base_url=info.api, headers=headers, timeout=SECONDS) as client:
                tasks = [{"url": "http://site.test/slow?delay=0.4"}]
                job = client.post("/jobs", json={"tasks": tasks}).json()["job_id"]
                server.call(clock.advance, 0.0)
                assert client.get(f"/jobs/{job}").json()["latest_run"]["status"] == "completed"
            assert (gateway.hits.total, gateway.hits.in_flight) == (1, 0)
            assert clock.monotonic() == 0.0


@pytest.mark.extended
@pytest.mark.slow
def test_every_attempt_of_a_thousand_tasks_was_a_call_that_had_ended(
    server: ConveyorServer,
) -> None:
    job = _submit(server, [server.url(f"page/{number}", flaky=2) for number in range(1_000)])
    server.clock.advance(hours=2)
    made, under_way = server.hits.total, server.hits.in_flight
    assert under_way == 0
    attempts = 0
    with _client(server) as client:
        cursor = None
        while True:
            query = {"limit": 1_000, **({"cursor": cursor} if cursor else {})}
            page = client.get(f"/jobs/{job}/results", params=query).json()
            attempts += sum(_attempts(client, job, row["task_id"]) for row in page["results"])
            cursor = page.get("next_cursor")
            if not cursor:
                break
    assert attempts == made == 3_000
    assert server.hits.total == made


def _attempts(client: httpx.Client, job: str, task: str) -> int:
    history = client.get(f"/jobs/{job}/tasks/{task}/history")
    assert history.status_code == 200, history.text
    return len(history.json()["events"])


def _scenario(directory: Path) -> list[JournalLine]:
    """Work three jobs over a day; return what came about."""
    with conveyor_server(directory, clock="manual", clock_start=START) as server:
        urls = [f"http://fake.test/page/{number}?flaky={number % 3}" for number in range(12)]
        _submit(server, urls)
        server.clock.advance()
        _submit(server, [f"http://fake.test/slow/{number}?delay=5" for number in range(4)])
        server.clock.advance(minutes=1)
        _submit(server, ["http://fake.test/closed?status=503&retry_after=600"], max_attempts=4)
        server.clock.advance(days=1)
        return server.clock.journal


def _assert_equal_journals(tmp_path: Path, times: int) -> None:
    journals = [_scenario(tmp_path / str(number)) for number in range(times)]
    assert {line.kind for line in journals[0]} == {"move", "id", "call"}
    assert sum(line.kind == "call" for line in journals[0]) == 12 + 12 + 4 + 4
    for journal in journals[1:]:
        assert journal == journals[0]


@pytest.mark.extended
@pytest.mark.slow
def test_the_same_scenario_gives_the_same_journal(tmp_path: Path) -> None:
    _assert_equal_journals(tmp_path, 20)


@pytest.mark.full
@pytest.mark.timeout(1_800)
def test_the_same_scenario_gives_the_same_journal_500_times(tmp_path: Path) -> None:
    _assert_equal_journals(tmp_path, 500)


@pytest.mark.slow
def test_slow_threads_change_nothing_in_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = _scenario(tmp_path / "usual")
    numbers = Counter[str]()
    run = Connection.run

    async def slow(self: Connection, function: Callable[[Any], Any]) -> Any:
        def late(connection: Any) -> Any:
            numbers["operations"] += 1
            threading.Event().wait(0.002 * (numbers["operations"] % 3))
            return function(connection)

        return await run(self, late)

    write = files.FileWriter._write

    def slow_write(self: files.FileWriter, job: Any) -> None:
        numbers["files"] += 1
        threading.Event().wait(0.003 * (numbers["files"] % 2))
        write(self, job)

    monkeypatch.setattr(Connection, "run", slow)
    monkeypatch.setattr(files.FileWriter, "_write", slow_write)
    assert _scenario(tmp_path / "slow") == usual
    assert numbers["operations"] > 50
    assert numbers["files"] > 5


class _Moved:
    """The routes of a server in a process of its own."""

    def __init__(self, server: ForkedServer) -> None:
        self.api = httpx.Client(base_url=server.info.api, headers={"X-API-Key": "k"}, timeout=60)
        self._url = server.info.api.removesuffix("/v1") + "/_dev/clock"
        self._headers = {"Authorization": f"Bearer {server.info.dev_token}"}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.api.close()

    def move(self, **move: str) -> str:
        """Move the clock; return the instant at which it stands."""
        answer = self.api.post(self._url, json=move, headers=self._headers)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["now"])

    def now(self) -> str:
        """Return the instant at which the clock stands."""
        return str(self.api.get(self._url, headers=self._headers).json()["now"])

    def submit(self, url: str) -> str:
        """Submit a job of one page; return its id."""
        return str(self.api.post("/jobs", json={"tasks": [{"url": url}]}).json()["job_id"])

    def status(self, job: str) -> str:
        """Return the status of the run of a job."""
        return str(self.api.get(f"/jobs/{job}").json()["latest_run"]["status"])


FLAGS = ("--gateway", "fake", "--clock-start", START)


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.extended)]
)
def test_a_server_that_ended_goes_on_where_its_clock_stood(
    tmp_path: Path, number: signal.Signals
) -> None:
    with ForkedServer(tmp_path, *FLAGS, "--clock", "manual") as first, _Moved(first) as moved:
        job = moved.submit("http://fake.test/slow?delay=30")
        stood = moved.move(advance="2d")[:10]
        other = moved.submit("http://fake.test/slower?delay=30")
        stopped_at = moved.move(advance="5s")
        first.signal(number)
        first.wait()
    with ForkedServer(tmp_path, *FLAGS, "--clock", "manual") as second, _Moved(second) as moved:
        assert moved.status(job) == "completed"
        assert moved.now() >= stopped_at > stood
        assert moved.submit("http://fake.test/new") > other > job
        moved.move(advance="10m")
        assert moved.status(other) == "completed"


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.extended
def test_a_clock_that_moves_by_itself_ends_the_wait_of_a_client(tmp_path: Path) -> None:
    with ForkedServer(tmp_path, *FLAGS, "--clock", "auto") as server, _Moved(server) as moved:
        job = moved.submit("http://fake.test/closed?status=503&retry_after=600")
        # Each look finds a live run, and lets the clock go on.
        eventually(lambda: moved.status(job) == "completed" or None, "the end of the run")
        assert moved.now() > "2027-03-01T00:20"
        # Whoever waited finds the results: they do not lapse under his eyes.
        other = moved.submit("http://fake.test/closed?status=503&retry_after=600")
        eventually(lambda: moved.status(other) == "completed" or None, "the end of the other run")
        for one in (job, other):
            assert len(moved.api.get(f"/jobs/{one}/results").json()["results"]) == 1
        assert moved.now() < "2027-03-02"


@pytest.mark.server
@pytest.mark.slow
def test_a_wrong_start_is_told_in_one_line(tmp_path: Path) -> None:
    for flags in (("--clock", "manual", "--clock-start", "noon"), ("--clock-start", START)):
        with pytest.raises(RuntimeError, match="--clock") as caught:
            ForkedServer(tmp_path, *flags).__enter__()
        assert "Traceback" not in str(caught.value)


@pytest.mark.extended
@pytest.mark.slow
def test_the_samples_pass_without_a_real_sleep_and_live_for_forty_days(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    command = [*QUIET_PYTEST, "-p", "no:asyncio"]
    ended = subprocess.run(
        [*command, f"--junitxml={report}", "-ojunit_family=xunit1", "scripts/samples"],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ended.returncode == 0, ended.stdout[-4_000:]
    cases = ElementTree.parse(report).getroot().iter("property")
    days = [float(case.attrib["value"]) for case in cases if case.attrib["name"] == "virtual_days"]
    assert len(days) >= 35
    assert sum(days) >= 40
    for sample in (ROOT / "scripts" / "samples").glob("*.py"):
        assert "sleep" not in sample.read_text()
