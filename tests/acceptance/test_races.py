"""Stopping, deleting, pausing, rerunning and repeating requests at the worst moment."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conveyor.gateway.fake import Hits
from conveyor.testing.fleet import RoleFleet
from conveyor.testing.local_server import ConveyorServer, conveyor_server
from tests.acceptance.support_bindings import FLEET, hits, holds_no_permits
from tests.acceptance.support_bindings import Hits as FleetHits
from tests.acceptance.support_data import (
    row_counts,
    rows_left,
    rows_of,
    server,
)
from tests.acceptance.support_held import HeldCalls, held_gateway, held_server
from tests.acceptance.support_inside import ORIGIN, inside
from tests.acceptance.support_wire import Wire, eventually, holds_no_permit, target, together
from tests.disk import body_files

pytestmark = pytest.mark.server

IN_FLIGHT = 10


@pytest.fixture
def anyio_backend() -> str:
    """The development store runs on asyncio."""
    return "asyncio"


@dataclass(frozen=True)
class Arena:
    """A server on a thread of this process, or a fleet: its wire, and the gateway's calls."""

    wire: Wire
    server: ConveyorServer | RoleFleet
    data_dir: Path

    def hits(self) -> Hits | FleetHits:
        """The gateway's calls so far."""
        return hits(self.server) if isinstance(self.server, RoleFleet) else self.server.hits

    def calls_of(self, urls: Sequence[str]) -> int:
        """Count the gateway's calls for these URLs."""
        counts = self.hits().counts
        return sum(counts.get(url, 0) for url in urls)

    def calls_begin(self, urls: Sequence[str], *, at_least: int = 1) -> None:
        """Wait until the gateway has been asked so often."""
        eventually(lambda: self.calls_of(urls) >= at_least or None, "calls begin")

    def idle(self) -> None:
        """Wait until no call is in flight and no task is claimed."""
        eventually(lambda: self._is_idle() or None, "all calls end")

    def _is_idle(self) -> bool:
        if self.hits().in_flight > 0:
            return False
        if isinstance(self.server, RoleFleet):
            return holds_no_permits(self.server)
        claims: list[Any] = rows_of(self.data_dir, "SELECT count(*) FROM claims")
        return claims == [(0,)]


@pytest.fixture(scope="module")
def arena(
    binding: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Arena]:
    data_dir = tmp_path_factory.mktemp("races")
    if binding == FLEET:
        fleet: RoleFleet = request.getfixturevalue("shared_fleet")
        with Wire(fleet.api, connections=100) as wire:
            yield Arena(wire, fleet, data_dir)
        return
    with (
        conveyor_server(data_dir, visibility_timeout=2.0, heartbeat=0.3, workers=100) as booted,
        Wire(booted.base_url, connections=100) as wire,
    ):
        yield Arena(wire, booted, data_dir)


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize(
    "times", [20, pytest.param(200, marks=(pytest.mark.full, pytest.mark.timeout(600)), id="full")]
)
def test_stop_within_5_ms_of_submit_stands(arena: Arena, times: int) -> None:
    times = times // 3 if isinstance(arena.server, RoleFleet) else times
    draw = random.Random(times)
    wire = arena.wire
    stopped = []
    for number in range(times):
        urls = [target(f"stop/{times}/{number}/{one}", delay=0.05) for one in range(30)]
        job_id = wire.submit(urls, max_inflight=IN_FLIGHT)["job_id"]
        time.sleep(draw.random() * 0.005)  # the moment is what the test varies
        answer = wire.ask("POST", f"/jobs/{job_id}/stop")
        called = arena.calls_of(urls)
        in_flight = sum(row["status"] == "processing" for row in wire.rows(job_id))
        called_then = arena.calls_of(urls)
        assert answer["status"] == "stopped"
        assert in_flight <= IN_FLIGHT
        assert called <= called_then
        stopped.append((job_id, urls, called, called_then + in_flight))
    arena.idle()
    for job_id, urls, called, most in stopped:
        run = wire.latest_run(job_id)
        assert run["status"] == "stopped"
        statuses = Counter(row["status"] for row in wire.rows(job_id))
        assert statuses["processing"] == 0
        assert statuses["successful"] == run["stats"]["successful"] == run["stats"]["completed"]
        assert statuses["successful"] == arena.calls_of(urls) <= min(most, called + IN_FLIGHT)
        assert wire.ask("POST", f"/jobs/{job_id}/stop")["status"] == "stopped"
        assert wire.send("POST", f"/jobs/{job_id}/resume").status_code == 409


@pytest.mark.guarantee("G10")
@pytest.mark.parametrize("ends", ["before", "after"])
@pytest.mark.parametrize("whole", [True, False], ids=["job", "run"])
def test_deleting_with_ten_in_flight_leaves_nothing(tmp_path: Path, whole: bool, ends: str) -> None:
    """Calls that end before the second pass over the deleted run, and calls that end after it."""
    urls = [target(f"early/{number}") for number in range(5)]
    late = [target(f"late/{number}", delay=1) for number in range(40)]
    with (
        held_server(tmp_path, visibility_timeout=1.0, heartbeat=0.2) as (booted, calls),
        Wire(booted.base_url) as wire,
    ):
        arena = Arena(wire, booted, tmp_path)
        job_id = wire.submit([*urls, *late], max_inflight=IN_FLIGHT)["job_id"]
        arena.calls_begin(late, at_least=IN_FLIGHT)
        eventually(lambda: len(body_files(tmp_path)) >= len(urls) or None, "bodies are stored")
        run_id = wire.latest_run(job_id)["run_id"]
        path = f"/jobs/{job_id}" if whole else f"/jobs/{job_id}/runs/{run_id}"
        assert wire.send("DELETE", path).status_code == 202
        called = arena.calls_of(late)
        if ends == "before":
            calls.release()
        assert wire.send("GET", f"/jobs/{job_id}/results").status_code == 404

        def is_gone() -> bool | None:
            left = row_counts(tmp_path)
            left["jobs"] -= 0 if whole else 1
            return (not any(left.values()) and not body_files(tmp_path)) or None

        eventually(is_gone, "no row and no file is left")
        calls.release()
        eventually(lambda: booted.hits.in_flight == 0 or None, "the last call ends")
        eventually(wire.nothing_in_hand, "its answer is dealt with")
        assert is_gone(), (row_counts(tmp_path), body_files(tmp_path))
        assert arena.calls_of(late) == called
        assert wire.send("GET", f"/jobs/{job_id}/runs/{run_id}").status_code == 404
        assert wire.send("GET", f"/jobs/{job_id}").status_code == (404 if whole else 200)
        if not whole:
            assert "latest_run" not in wire.ask("GET", f"/jobs/{job_id}")
            assert wire.send("POST", f"/jobs/{job_id}/rerun").status_code == 409


def test_pause_and_resume_crossing_leave_the_run_whole(arena: Arena) -> None:
    wire = arena.wire
    count = 100 if isinstance(arena.server, RoleFleet) else 300
    urls = [target(f"pause/{number}", delay=0.01) for number in range(count)]
    job_id = wire.submit(urls, max_inflight=IN_FLIGHT)["job_id"]

    def cross(thread: int) -> set[str]:
        seen: set[str] = set()
        for number in range(25):
            verb = "pause" if (thread + number) % 2 else "resume"
            answer = wire.send("POST", f"/jobs/{job_id}/{verb}")
            if answer.status_code == 409:
                return seen  # the run has ended
            run = answer.json()
            assert (run.get("pause_state") is not None) == (verb == "pause")
            assert run["status"] == "running"
            seen.add(verb)
        return seen

    assert set.union(*together(6, cross)) == {"pause", "resume"}
    # Refused where the run has ended by now.
    if wire.send("POST", f"/jobs/{job_id}/pause").is_success:
        arena.idle()
        called = arena.calls_of(urls)
        held = wire.latest_run(job_id)
        assert held["stats"]["completed"] == called
        wire.ask("POST", f"/jobs/{job_id}/resume")
    assert wire.ended(job_id)["stats"]["successful"] == len(urls)
    assert {url: arena.hits().counts[url] for url in urls} == dict.fromkeys(urls, 1)


@pytest.mark.parametrize("statuses", [None, "pending,processing,failed"])
def test_rerun_right_after_stop_waits_for_what_is_in_flight(
    arena: Arena, statuses: str | None
) -> None:
    wire = arena.wire
    urls = [target(f"rerun/{statuses}/{number}", delay=0.5) for number in range(25)]
    job_id = wire.submit(urls, max_inflight=IN_FLIGHT)["job_id"]
    arena.calls_begin(urls, at_least=IN_FLIGHT)
    stopped = wire.ask("POST", f"/jobs/{job_id}/stop")
    made = wire.ask("POST", f"/jobs/{job_id}/rerun", status=statuses)
    assert made["rerun_of"] == stopped["run_id"]
    source = wire.ask("GET", f"/jobs/{job_id}/runs/{stopped['run_id']}")
    assert source["status"] == "stopped"
    finished = source["stats"]["successful"]
    assert IN_FLIGHT <= finished < len(urls)
    inherited = 0 if statuses is None else finished
    assert made["inherited_tasks"] == inherited
    assert made["retried_tasks"] == len(urls) - inherited

    run = wire.ended(job_id)
    assert run["run_id"] == made["latest_run"]["run_id"]
    assert run["stats"]["successful"] == run["stats"]["total"] == len(urls)
    assert [row["url"] for row in wire.rows(job_id)] == urls
    assert arena.calls_of(urls) == finished + len(urls) - inherited
    assert wire.ask("GET", f"/jobs/{job_id}/runs/{stopped['run_id']}") == source


@pytest.mark.guarantee("G9")
def test_a_run_stopped_and_killed_at_once_stays_stopped(tmp_path: Path) -> None:
    urls = [target(f"dead/{number}", delay=0.3) for number in range(30)]
    with held_gateway() as (gateway, calls):
        flags = ("--gateway", gateway.url)
        with server(tmp_path, *flags) as process, Wire(process.info.api) as wire:
            job_id = wire.submit(urls, max_inflight=IN_FLIGHT)["job_id"]
            claims = "SELECT 1 FROM claims"
            eventually(lambda: len(rows_of(tmp_path, claims)) == IN_FLIGHT or None, "claims")
            wire.ask("POST", f"/jobs/{job_id}/stop")
            process.kill()
        assert len(rows_left(tmp_path, claims)) == IN_FLIGHT
        calls.release()
        with server(tmp_path, *flags) as process, Wire(process.info.api) as wire:
            run = wire.latest_run(job_id)
            assert (run["status"], run["stats"]["completed"]) == ("stopped", 0)
            assert {row["status"] for row in wire.rows(job_id)} == {"pending"}
            made = wire.ask("POST", f"/jobs/{job_id}/rerun", status="pending")
            assert made["retried_tasks"] == len(urls)
            assert wire.ended(job_id)["stats"]["successful"] == len(urls)


@pytest.mark.guarantee("G10")
async def test_a_late_answer_resurrects_nothing(tmp_path: Path) -> None:
    late, calls = target("resurrected", delay=1), HeldCalls()
    async with inside(tmp_path, lambda ports: ports, gateway_clock=calls) as booted:
        job = await booted.ask("POST", "/jobs", json={"tasks": [{"url": late}]})
        job_id, run_id = job["job_id"], job["latest_run"]["run_id"]

        async def has_begun() -> bool:
            return booted.gateway.hits.in_flight == 1

        await booted.until(has_begun, "the call begins")
        await booted.ask("DELETE", f"/jobs/{job_id}/runs/{run_id}")
        calls.release()

        async def is_dealt_with() -> bool:
            metrics = await booted.client.get(f"{ORIGIN}/metrics")
            return booted.gateway.hits.in_flight == 0 and holds_no_permit(metrics.text)

        await booted.until(is_dealt_with, "the call ends, and its answer is dealt with")
        assert (await booted.client.get(f"/jobs/{job_id}/results")).status_code == 404
        assert rows_of(tmp_path, "SELECT status, successful FROM runs") == [("deleted", 0)]
        assert rows_of(tmp_path, "SELECT count(*) FROM tasks") == [(0,)]
        assert body_files(tmp_path) == []
