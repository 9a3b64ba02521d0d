"""The permit stores of a simulation: one shared store, and each process's port over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from conveyor.dev.permits import MemoryPermits
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
from conveyor.ports.permits import Holding, Standing
from conveyor.testing.lease_rows import AtomicLeaseRows, CountThenInsertPermits, LeaseRows
from conveyor.testing.simulation.latency import Latency, stream
from conveyor.testing.simulation.link import Link

LEDGER, COUNT_THEN_INSERT, ATOMIC_ROWS = "ledger", "count-then-insert", "atomic-rows"
PERMIT_STORES = (LEDGER, COUNT_THEN_INSERT, ATOMIC_ROWS)
TIMEOUT = 1.0
"""Seconds after which a call gives up on a store that does not answer."""
APPLIED = 0.25
"""The share of calls to a store in trouble that are applied although no answer comes."""


class _Store(Protocol):
    """A permits port that tells the sum of a job's counts."""

    async def hold(self, holding: Holding, *, limit: int, lease: float) -> Standing: ...

    def total(self, job_id: str) -> int: ...


@dataclass(slots=True)
class Reach:
    """Whether a worker reaches the permit store, whichever process it is: not while something keeps
    it `cut_off`."""

    cut_off: int = 0


class PermitService:
    """The store that the whole fleet shares: a ledger, or one of the two kinds of lease rows.

    `calls` counts calls of the store; `peak_granted` is the largest total of one job at any write,
    `most_over` the most that a total was above the limit given with the write. While
    something keeps it `down`, no call is answered.
    """

    def __init__(
        self, clock: Clock, latency: Latency, *, kind: str, lease: float, seed: int
    ) -> None:
        self._clock = clock
        self._latency = latency
        self._kind = kind
        self._lease = lease
        self.stream = stream(seed, "permit store")
        self.calls = 0
        self.peak_granted = 0
        self.most_over = 0
        self.down = 0
        self._store = self._make(closed_for=0.0)

    @property
    def is_ledger(self) -> bool:
        """Whether a call of the port is one call of the store; rows wait for each of theirs."""
        return self._kind == LEDGER

    def restart_empty(self) -> None:
        """Lose every entry. A ledger knows of it and is closed for a lease; rows are just gone."""
        self._store = self._make(closed_for=self._lease)

    async def hold(self, holding: Holding, *, limit: int, lease: float) -> Standing:
        """Pass a call on, and look at what it left."""
        if self.is_ledger:
            self.calls += 1
        standing = await self._store.hold(holding, limit=limit, lease=lease)
        total = self._store.total(holding.job_id)
        self.peak_granted = max(self.peak_granted, total)
        self.most_over = max(self.most_over, total - limit)
        return standing

    def _make(self, *, closed_for: float) -> _Store:
        if self._kind == LEDGER:
            return MemoryPermits(self._clock, closed_for=closed_for)
        rows = LeaseRows(self._clock, self._row_call)
        return AtomicLeaseRows(rows) if self._kind == ATOMIC_ROWS else CountThenInsertPermits(rows)

    async def _row_call(self) -> None:
        self.calls += 1
        if self.down:
            await self._clock.sleep(TIMEOUT)
            raise no_answer()
        seconds = self._latency.draw(self.stream)
        if seconds > 0:
            await self._clock.sleep(seconds)


class SimulatedPermits:
    """The permits port of one process.

    `leases` are this process's counts by job and holder, each with the virtual second at which the
    store lets it lapse: what it may use even while nobody can ask it. `reach`: that of its worker.
    """

    def __init__(self, service: PermitService, link: Link, reach: Reach | None = None) -> None:
        self._service = service
        self._link = link
        self._reach = reach or Reach()
        self.leases: dict[str, dict[str, tuple[int, float]]] = {}

    async def hold(self, holding: Holding, *, limit: int, lease: float) -> Standing:
        """Let a holder have so many permits. Raises ConveyorError(unavailable) after a timeout."""
        service, link = self._service, self._link
        back = await link.go()
        if self._reach.cut_off or (service.down and service.is_ledger):
            return await self._in_trouble(holding, limit, lease)
        standing = await service.hold(holding, limit=limit, lease=lease)
        if standing.granted:
            self._remember(holding, lease)
        link.note(f"hold {holding.holder} {holding.before} {holding.count} {standing.granted}")
        await link.come_back(back)
        return standing

    async def _in_trouble(self, holding: Holding, limit: int, lease: float) -> Standing:
        """No answer comes; some calls are applied all the same, sooner or later."""
        service, link = self._service, self._link
        drawn = service.stream.random()
        applied_after = TIMEOUT * service.stream.random()
        await link.sleep(applied_after)
        if drawn < APPLIED:
            standing = await service.hold(holding, limit=limit, lease=lease)
            if standing.granted:
                self._remember(holding, lease)
            link.note(f"hold unheard {holding.holder} {holding.count} {standing.granted}")
        await link.come_back(TIMEOUT - applied_after)
        raise no_answer()

    def _remember(self, holding: Holding, lease: float) -> None:
        held = self.leases.setdefault(holding.job_id, {})
        if holding.count > 0:
            held[holding.holder] = (holding.count, self._link.seconds() + lease)
        else:
            held.pop(holding.holder, None)

    def usable(self, job_id: str) -> int:
        """How many permits of a job this process has under leases that have not lapsed."""
        now = self._link.seconds()
        held = self.leases.get(job_id, {})
        return sum(count for count, lapses_at in held.values() if lapses_at > now)

    def next_lapse(self) -> float | None:
        """The virtual second at which the next of its leases lapses."""
        now = self._link.seconds()
        return min(
            (
                lapses_at
                for held in self.leases.values()
                for _, lapses_at in held.values()
                if lapses_at > now
            ),
            default=None,
        )


def no_answer() -> ConveyorError:
    """What a caller gets from a store that is away."""
    return ConveyorError(ErrorCode.UNAVAILABLE, "the permit store does not answer")
