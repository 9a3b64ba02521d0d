"""kill -9 at any moment, a task that kills, and SIGTERM: nothing lost, nothing counted twice."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from conveyor.gateway.fake import expected_body
from conveyor.testing.gateway_server import GatewayServer
from tests.acceptance.support_data import (
    kill_while_booting,
    rows_left,
    rows_of,
    server,
    temporary_files,
)
from tests.acceptance.support_held import HeldCalls, held_gateway
from tests.acceptance.support_wire import Wire, eventually, target

pytestmark = pytest.mark.server

IN_FLIGHT = 10
_CLAIMS = "SELECT task_key, claim_number FROM claims"


@contextmanager
def restarted(
    data_dir: Path, gateway: GatewayServer, **settings: object
) -> Iterator[tuple[Wire, int]]:
    """A server on the data directory, whatever happened to the one before, and its process id;
    killed at the end where it still runs."""
    with (
        server(data_dir, "--gateway", gateway.url, **settings) as process,
        Wire(process.info.api) as wire,
    ):
        yield wire, process.info.pid


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize(
    ("tasks", "kills", "seed"),
    [
        (300, 5, 1),
        pytest.param(1_000, 50, 2, marks=(pytest.mark.full, pytest.mark.timeout(600)), id="full"),
    ],
)
def test_a_run_survives_kills_at_random_moments(
    tmp_path: Path, gateway: GatewayServer, tasks: int, kills: int, seed: int
) -> None:
    draw = random.Random(seed)
    urls = [target(f"kill/{number}", delay=0.03) for number in range(tasks)]
    settings = {"max_interruptions": 1_000, "shutdown_grace": 0}
    drain_seconds = 0.03 * tasks / IN_FLIGHT
    claimed_at_kills: set[tuple[int, int]] = set()
    job_id = ""
    for number in range(kills):
        with restarted(tmp_path, gateway, **settings) as (wire, _):
            if not job_id:
                job_id = wire.submit(urls, max_inflight=IN_FLIGHT)["job_id"]
            time.sleep(draw.random() * 1.4 * drain_seconds / kills)
        claimed_at_kills.update(rows_left(tmp_path, _CLAIMS))
        if number % 5 == 4:
            kill_while_booting(tmp_path, "--gateway", gateway.url, after=draw.random(), **settings)
            claimed_at_kills.update(rows_left(tmp_path, _CLAIMS))
    assert len(claimed_at_kills) <= IN_FLIGHT * (kills + kills // 5)

    with restarted(tmp_path, gateway, **settings) as (wire, _):
        run = wire.ended(job_id)
        assert run["status"] == "completed"
        assert run["stats"]["successful"] == run["stats"]["total"] == tasks
        assert run["stats"]["failed"] == 0
        assert [row["url"] for row in wire.rows(job_id, status="successful")] == urls
        interruptions = assert_histories(wire, tmp_path, job_id)
        assert_bodies(wire, job_id)
        assert temporary_files(tmp_path) == []
    # A claim that only waited for a slot counts as no interruption.
    assert 0 < interruptions <= len(claimed_at_kills)
    assert set(gateway.hits.counts) == set(urls)
    assert tasks <= gateway.hits.total <= tasks + interruptions


def assert_histories(wire: Wire, data_dir: Path, job_id: str) -> int:
    """Check that each task's history has one attempt and each of its interruptions; return the
    number of interruptions."""
    counted = dict(rows_of(data_dir, "SELECT task_id, interruptions FROM tasks"))
    rows = wire.rows(job_id)
    with ThreadPoolExecutor(8) as pool:
        histories = list(pool.map(lambda row: wire.history(job_id, row["task_id"]), rows))
    for row, events in zip(rows, histories, strict=True):
        kinds = [event["kind"] for event in events]
        assert kinds == ["interruption"] * counted[row["task_id"]] + ["attempt"], row
        assert {event["attempt"] for event in events} == {1}, row
    return sum(counted.values())


def assert_bodies(wire: Wire, job_id: str) -> None:
    """Every body can be read, and is what the gateway gave for its URL."""

    def read(row: dict[str, str]) -> tuple[bytes, bytes]:
        content = wire.send("GET", f"/jobs/{job_id}/tasks/{row['task_id']}/content")
        assert content.status_code == 200, row
        return content.content, expected_body(row["url"])

    with ThreadPoolExecutor(8) as pool:
        for found, expected in pool.map(read, wire.rows(job_id)):
            assert found == expected


def seen(gateway: GatewayServer, url: str, *, times: int) -> Callable[[], bool | None]:
    """Return whether the gateway was called for a URL `times` times."""
    return lambda: gateway.hits.counts.get(url, 0) >= times or None


@pytest.mark.guarantee("G8")
def test_a_task_that_kills_its_worker_ends_failed_and_alone(
    tmp_path: Path, gateway: GatewayServer
) -> None:
    limit = 2
    poison = target("poison", delay=30)
    neighbours = [target(f"neighbour/{number}", delay=0.2) for number in range(20)]
    urls = [*neighbours[:3], poison, *neighbours[3:]]
    job_id = ""
    for death in range(1, limit + 2):
        with restarted(tmp_path, gateway, max_interruptions=limit) as (wire, _):
            if not job_id:
                job_id = wire.submit(urls, max_inflight=IN_FLIGHT)["job_id"]
            eventually(seen(gateway, poison, times=death), "the poison is swallowed")
    with restarted(tmp_path, gateway, max_interruptions=limit) as (wire, _):
        run = wire.ended(job_id)
        assert run["status"] == "completed"
        assert {row["url"]: row["status"] for row in wire.rows(job_id)} == {
            url: "failed" if url == poison else "successful" for url in urls
        }
        assert run["stats"]["failure_reasons"] == {"other": 1}
        [row] = wire.rows(job_id, status="failed")
        assert row["error"]["code"] == "interrupted"
        kinds = [event["kind"] for event in wire.history(job_id, row["task_id"])]
        assert kinds == ["interruption"] * (limit + 1)
    assert gateway.hits.counts[poison] == limit + 1


@pytest.fixture
def held() -> Iterator[tuple[GatewayServer, HeldCalls]]:
    """A scraping API that outlives the servers under test, and what lets its calls end."""
    with held_gateway() as running:
        yield running


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("grace", [0, 60])
def test_sigterm_loses_nothing_and_leaves_nothing_to_wait_for(
    tmp_path: Path, held: tuple[GatewayServer, HeldCalls], grace: int
) -> None:
    gateway, calls = held
    tasks = 30
    urls = [target(f"term/{number}", delay=1) for number in range(tasks)]
    settings = {"shutdown_grace": grace, "visibility_timeout": 3_600, "permit_lease": 3_600}
    with server(tmp_path, "--gateway", gateway.url, **settings) as process:
        with Wire(process.info.api) as wire:
            job_id = wire.submit(urls, max_inflight=IN_FLIGHT)["job_id"]
            eventually(lambda: gateway.hits.in_flight == IN_FLIGHT or None, "calls are in flight")
        at_signal = gateway.hits.total
        process.signal(signal.SIGTERM)
        eventually(process.errors, "the server has seen the signal")
        if grace:
            calls.release()
        exit_code, errors = process.wait(timeout=60)
        assert (exit_code, errors) == (0, "stopping\n")
    calls.release()
    assert rows_left(tmp_path, "SELECT count(*) FROM claims") == [(0,)]
    [(ended,)] = rows_left(tmp_path, "SELECT count(*) FROM tasks WHERE state > 0")
    given_back = at_signal - ended
    assert gateway.hits.total == at_signal
    assert given_back == (0 if grace else IN_FLIGHT)

    with restarted(tmp_path, gateway, **settings) as (wire, _):
        run = wire.ended(job_id, timeout=60)
        assert run["stats"]["successful"] == run["stats"]["total"] == tasks
        for row in wire.rows(job_id):
            [event] = wire.history(job_id, row["task_id"])
            assert (event["kind"], event["attempt"]) == ("attempt", 1)
        assert temporary_files(tmp_path) == []
        assert_bodies(wire, job_id)
    assert gateway.hits.total == tasks + given_back


def test_sigterm_amid_claims_and_settlements_interrupts_none(
    tmp_path: Path, gateway: GatewayServer
) -> None:
    urls = [target(f"amid/{number}") for number in range(1_500)]
    settings = {"shutdown_grace": 0, "visibility_timeout": 3_600}
    job_id = ""
    for sooner in range(3):
        with server(tmp_path, "--gateway", gateway.url, **settings) as process:
            with Wire(process.info.api) as wire:
                job_id = job_id or wire.submit(urls)["job_id"]
                before = gateway.hits.total
                eventually(made_since(gateway, before, calls=100 - sooner), "work goes on")
            process.signal(signal.SIGTERM)
            process.wait(timeout=60)
        assert rows_left(tmp_path, "SELECT count(*) FROM claims") == [(0,)]
    assert rows_left(tmp_path, "SELECT count(*) FROM tasks WHERE state = 0") > [(0,)]
    with restarted(tmp_path, gateway, **settings) as (wire, _):
        assert wire.ended(job_id)["stats"]["successful"] == len(urls)
        assert rows_of(tmp_path, "SELECT sum(interruptions), max(attempts) FROM tasks") == [(0, 1)]


def made_since(gateway: GatewayServer, before: int, *, calls: int) -> Callable[[], bool | None]:
    """Return whether the gateway was called `calls` times since it had been called `before`
    times."""
    return lambda: gateway.hits.total >= before + calls or None


def test_sigterm_between_attempts_keeps_what_was_tried(
    tmp_path: Path, gateway: GatewayServer
) -> None:
    urls = [target(f"retry/{number}", flaky=1) for number in range(20)]
    settings = {"shutdown_grace": 0, "retry_base": 1.0, "visibility_timeout": 3_600}
    with server(tmp_path, "--gateway", gateway.url, **settings) as process:
        with Wire(process.info.api) as wire:
            job_id = wire.submit(urls, max_attempts=2)["job_id"]
            eventually(lambda: gateway.hits.total >= len(urls) or None, "all were tried once")
        process.signal(signal.SIGTERM)
        process.wait(timeout=60)
    with restarted(tmp_path, gateway, **settings) as (wire, _):
        assert wire.ended(job_id)["stats"]["successful"] == len(urls)
        for row in wire.rows(job_id):
            attempts = [event["attempt"] for event in wire.history(job_id, row["task_id"])]
            assert attempts[-1] == len(attempts) <= 2
