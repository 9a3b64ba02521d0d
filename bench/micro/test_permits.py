"""Measures a call's cost to the ledger: a worker grows, renews and gives back, among others of its
job."""

from __future__ import annotations

import anyio
from pytest_benchmark.fixture import BenchmarkFixture

from conveyor.clock import SystemClock
from conveyor.dev.permits import MemoryPermits
from conveyor.ports.permits import LeaseRequest

CALLS = 10_000
HOLDERS = 10
LIMIT = 100
LEASE = 30.0


async def work() -> int:
    """Move every holder between one permit and ten; return the number of granted calls."""
    permits = MemoryPermits(SystemClock())
    counts = [0] * HOLDERS
    granted = 0
    for call in range(CALLS):
        place = call % HOLDERS
        count = 1 + call // HOLDERS % 10
        request = LeaseRequest(
            job_id="job",
            holder=f"worker-{place}",
            count=count,
            before=counts[place],
            sequence=call + 1,
        )
        state = await permits.acquire_or_renew(request, limit=LIMIT, lease=LEASE)
        counts[place] = count if state.granted else counts[place]
        granted += state.granted
    return granted


def test_hold(benchmark: BenchmarkFixture) -> None:
    assert benchmark(lambda: anyio.run(work)) == CALLS
