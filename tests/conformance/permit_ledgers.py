"""The permit ledgers that the conformance tests run over: one entry each, with what it can do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from conveyor.dev.permits import MemoryPermits
from conveyor.ports.permits import LeaseRequest, LedgerState, Permits
from conveyor.simulation.permits import AtomicLeaseRows, CountThenInsertPermits, LeaseRows
from conveyor.testing.clock import FakeClock
from tests.conformance.permit_servers import VirtualRedis, dynamo_permits

JOB, OTHER_JOB = "JOB", "OTHER"
LIMIT = 10
LEASE = 30.0
_ANY_NUMBER = 1_000_000


@dataclass
class Bench:
    """A ledger under test and the clock that its leases run by.

    `reopen` makes it lose its entries and know it, closed for a lease of `LEASE`; None where an
    adapter has no such thing. `close` ends what it holds open. Remembers for each job and holder
    what it was granted and the last sequence, so that a test names only what it is about.
    """

    permits: Permits
    clock: FakeClock
    reopen: Callable[[], Permits] | None = None
    close: Callable[[], Awaitable[None]] | None = None
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    sequences: dict[tuple[str, str], int] = field(default_factory=dict)

    async def acquire_or_renew(
        self,
        holder: str,
        count: int,
        *,
        before: int | None = None,
        sequence: int | None = None,
        wants: bool = False,
        job_id: str = JOB,
        limit: int = LIMIT,
        lease: float = LEASE,
    ) -> LedgerState:
        """Make one call; by default, `before` is the last granted count and `sequence` the next."""
        key = (job_id, holder)
        if sequence is None:
            sequence = self.sequences.get(key, 0) + 1
        self.sequences[key] = max(sequence, self.sequences.get(key, 0))
        request = LeaseRequest(
            job_id=job_id,
            holder=holder,
            count=count,
            before=self.counts.get(key, 0) if before is None else before,
            sequence=sequence,
            wants=wants,
        )
        state = await self.permits.acquire_or_renew(request, limit=limit, lease=lease)
        if state.granted:
            self.counts[key] = count
        return state

    async def asks(self, holder: str, count: int, *, before: int | None = None) -> bool:
        """Return whether a call is granted."""
        return (await self.acquire_or_renew(holder, count, before=before)).granted

    async def look(self, *, job_id: str = JOB, limit: int = LIMIT) -> LedgerState:
        """Return the state of the ledger, from a call that wants no permits."""
        return await self.acquire_or_renew("onlooker", 0, job_id=job_id, limit=limit)

    async def total(self, job_id: str = JOB) -> int:
        """The sum of unexpired counts; of no use while the ledger is closed."""
        return _ANY_NUMBER - (await self.look(job_id=job_id, limit=_ANY_NUMBER)).free

    async def come_back_empty(self) -> None:
        """Lose every entry."""
        assert self.reopen is not None
        self.permits = self.reopen()

    async def aclose(self) -> None:
        """Let go of servers."""
        if self.close is not None:
            await self.close()


@dataclass(frozen=True, slots=True)
class Ledger:
    """An adapter. `atomic`: the limit holds where calls overlap. `keeps_wants`: `wants` count.
    `sequenced`: late and repeated calls are turned away. `can_reopen_empty`: it knows that it may
    have lost entries. `examples`: fleets that the search for a broken limit tries."""

    open: Callable[[], Bench]
    atomic: bool = True
    keeps_wants: bool = True
    sequenced: bool = True
    can_reopen_empty: bool = True
    examples: int = 120


def _memory() -> Bench:
    clock = FakeClock()
    return Bench(MemoryPermits(clock), clock, lambda: MemoryPermits(clock, closed_for=LEASE))


def _atomic_rows() -> Bench:
    clock = FakeClock()
    return Bench(AtomicLeaseRows(LeaseRows(clock, lambda: clock.sleep(0))), clock)


def _count_then_insert() -> Bench:
    clock = FakeClock()
    return Bench(CountThenInsertPermits(LeaseRows(clock, lambda: clock.sleep(0))), clock)


def _redis() -> Bench:
    clock = FakeClock()
    ledger = VirtualRedis(clock, lease=LEASE)
    return Bench(ledger.permits, clock, ledger.come_back_empty, ledger.aclose)


def _dynamodb() -> Bench:
    clock = FakeClock()
    return Bench(dynamo_permits(clock), clock)


LEDGERS: dict[str, Ledger] = {
    "memory": Ledger(_memory),
    "atomic-rows": Ledger(
        _atomic_rows, keeps_wants=False, sequenced=False, can_reopen_empty=False, examples=30
    ),
    "count-then-insert": Ledger(
        _count_then_insert,
        atomic=False,
        keeps_wants=False,
        sequenced=False,
        can_reopen_empty=False,
        examples=30,
    ),
    "redis": Ledger(_redis, examples=50),
    # A table's rows are not lost with a process, so it never comes back empty. The emulator makes
    # about a hundred writes a second.
    "dynamodb": Ledger(_dynamodb, can_reopen_empty=False, examples=8),
}


def over(able: Callable[[Ledger], bool]) -> pytest.MarkDecorator:
    """Marks a test to run over the ledgers that are able to, as its `bench`."""
    names = [name for name, ledger in LEDGERS.items() if able(ledger)]
    return pytest.mark.parametrize("bench", names, indirect=True)
