"""Watches runs on a fleet with failing parts, and checks that they are exact."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import httpx

from conveyor.testing.fleet import RoleFleet, RoleProcess
from tests.acceptance.support_bindings import hits
from tests.acceptance.support_wire import ENDED, Wire, eventually, target
from tests.patient import fetched

CAP = 8
LEASE = 6
QUICK: dict[str, Any] = {
    "permit_lease": LEASE,
    "visibility_timeout": LEASE,
    "heartbeat": 1,
    "discovery_interval": 1,
    "sweep_interval": 2,
    "quiet_after": 5,
    "idempotency_claim": 5,
    "max_interruptions": 1_000,
    "rate_limit_deadline": 600,
}
"""So quick that a test sees it."""
PATIENCE = 150.0
PAUSE = 0.05

T = TypeVar("T")


def pages(name: str, count: int, *, delay: float = 0.3) -> list[str]:
    """Return `count` URLs, each of which takes a while."""
    return [target(f"{name}/{number}", delay=delay) for number in range(count)]


def waiting_for(condition: Callable[[], T | None], what: str) -> T:
    """`eventually`, with more patience and without keeping the fleet busy by looking."""

    def look() -> T | None:
        value = condition()
        if value is None:
            time.sleep(PAUSE)
        return value

    return eventually(look, what, timeout=PATIENCE)


def calls_of(running: RoleFleet, urls: Sequence[str]) -> dict[str, int]:
    """Count the gateway's calls for these URLs so far."""
    counts = hits(running).counts
    return {url: counts[url] for url in urls if url in counts}


def until_called(running: RoleFleet, urls: Sequence[str], times: int) -> None:
    """Wait until the gateway was called so often for these."""
    waiting_for(
        lambda: sum(calls_of(running, urls).values()) >= times or None, f"{times} calls are made"
    )


def permits_of(process: RoleProcess) -> float:
    """Return the number of a worker's permits in hand."""
    return _figure(process, "permits")


def lanes_of(process: RoleProcess) -> float:
    """Return the number of runs that a worker serves."""
    return _figure(process, "lanes")


def _figure(process: RoleProcess, name: str) -> float:
    page = fetched(f"{process.info.metrics}/metrics").text
    found = re.search(rf"^conveyor_{name} (\S+)$", page, re.MULTILINE)
    assert found is not None
    return float(found[1])


def insisting(request: Callable[[], httpx.Response]) -> Any:
    """Send a request until it is answered with success, as a client does whose connection broke;
    what it says."""

    def look() -> Any:
        try:
            response = request()
        except httpx.TransportError:
            return None
        known = response.is_success or response.status_code in (409, 502, 503)
        assert known, response.text
        return response.json() if response.is_success else None

    return waiting_for(look, "a request is answered")


def ended(wire: Wire, job_id: str) -> Any:
    """The run, once it has ended; at no look before had it completed more than there was."""

    def look() -> Any:
        run = insisting(lambda: wire.send("GET", f"/jobs/{job_id}"))["latest_run"]
        stats = run["stats"]
        assert stats["completed"] == stats["successful"] + stats["failed"] <= stats["total"]
        return run if run["status"] in ENDED else None

    return waiting_for(look, f"job {job_id} ends")


def assert_exact(
    wire: Wire, running: RoleFleet, job_id: str, urls: Sequence[str], *, faults: int
) -> int:
    """Once the run has ended: every task is there once and was scraped by one attempt, counters are
    those of the rows, and the cap was kept. No fault has cost more than the calls that were in
    flight at it, nor any task more than a call. How many calls there were beyond one a task."""
    run = ended(wire, job_id)
    assert run["status"] == "completed"
    stats = run["stats"]
    assert (stats["total"], stats["successful"], stats["failed"]) == (len(urls), len(urls), 0)
    rows = wire.rows(job_id)
    assert [(row["url"], row["status"]) for row in rows] == [(url, "successful") for url in urls]
    assert hits(running).peak_in_flight <= CAP
    calls = calls_of(running, urls)
    further = sum(calls.values()) - len(urls)
    assert further <= CAP * faults
    for row in rows:
        times = calls[row["url"]]
        assert times <= 1 + faults
        if times > 1:
            kinds = [event["kind"] for event in wire.history(job_id, row["task_id"])]
            assert kinds.count("attempt") == 1
            assert set(kinds) <= {"attempt", "interruption"}
    return further
