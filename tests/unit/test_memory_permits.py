"""The ledger in memory: it forgets idle jobs, and reports its totals."""

from __future__ import annotations

from conveyor.dev.permits import MemoryPermits
from conveyor.ports.permits import LeaseRequest
from conveyor.testing.clock import FakeClock

JOB, OTHER_JOB = "JOB", "OTHER"
LEASE = 30.0


async def _hold_one(permits: MemoryPermits, job_id: str, holder: str) -> None:
    request = LeaseRequest(job_id=job_id, holder=holder, count=1, before=0, sequence=1)
    await permits.acquire_or_renew(request, limit=5_000, lease=LEASE)


async def test_the_memory_ledger_forgets_jobs_that_nobody_asks_about() -> None:
    clock = FakeClock()
    permits = MemoryPermits(clock)
    for number in range(5_000):
        await _hold_one(permits, f"job-{number}", "a")
        await clock.advance(1)
    assert len(permits._jobs) <= 2 * LEASE + 64


async def test_the_memory_ledger_forgets_holders_whose_lease_has_lapsed() -> None:
    clock = FakeClock()
    permits = MemoryPermits(clock)
    for number in range(5_000):
        await _hold_one(permits, JOB, f"holder-{number}")
        await clock.advance(1)
    assert len(permits._jobs.of(JOB, clock.monotonic()).by_holder) == permits.total(JOB) < LEASE


async def test_the_memory_ledger_tells_its_total_by_job() -> None:
    clock = FakeClock()
    permits = MemoryPermits(clock)
    await _hold_one(permits, JOB, "a")
    await clock.advance(LEASE / 2)
    await _hold_one(permits, JOB, "b")
    assert (permits.total(JOB), permits.total(OTHER_JOB)) == (2, 0)
    await clock.advance(LEASE / 2)
    assert permits.total(JOB) == 1
