"""The permit stores of a simulation, each process's port to them, and two stores of lease rows.

Lease rows, the published design and the same without its race, exist for comparison: a benchmark
without them could not show what a ledger of counts saves, nor what breaking the limit gains.
Neither supports wants (`wanting` is 0), sequences (a late or repeated call is applied like any
other) or closing (lost rows are given away at once), so no worker that relies on those may use
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from conveyor.dev.pacing import MemoryPacing
from conveyor.dev.permits import JobLeases, MemoryPermits
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
from conveyor.ports.pacing import HORIZON, NOTHING_ELSE, Booking, HostState
from conveyor.ports.permits import LeaseRequest, LedgerState
from conveyor.simulation.latency import Latency, stream
from conveyor.simulation.link import Link


class LeaseRows:
    """A table with one row a permit, each under a lease: `count` permits are so many rows.

    Every method but `total` and `state` is one call of the store: it is counted in `calls` by
    its name, waits for `pause`, and then acts at once and whole. If `pause` raises, the store does
    not answer and has done nothing. All rows of a holder are written together, so they lapse
    together; lapsed rows count no more. Leases run by the clock's monotonic time.
    """

    def __init__(self, clock: Clock, pause: Callable[[], Awaitable[None]]) -> None:
        self.calls: Counter[str] = Counter()
        self._clock = clock
        self._pause = pause
        self._jobs = JobLeases()

    async def count(self, job_id: str, holder: str) -> tuple[int, int]:
        """Return the number of a job's rows, and of the holder's among them."""
        await self._call("count")
        return self.total(job_id), self._held_by(job_id, holder)

    async def insert(
        self, job_id: str, holder: str, count: int, *, lease: float, limit: int | None = None
    ) -> bool:
        """Add the rows that the holder lacks to have `count`, all of them under a fresh lease.

        With a `limit`, adds them only if the job's rows stay within it, or the holder lacks none:
        checked in the same call. Returns whether they were added.
        """
        await self._call("insert")
        own = self._held_by(job_id, holder)
        if limit is not None and count > own and self.total(job_id) - own + count > limit:
            return False
        self._put(job_id, holder, count, lease)
        return True

    async def delete(self, job_id: str, holder: str) -> None:
        """Remove all rows of a holder."""
        await self._call("delete")
        self._jobs.of(job_id, self._clock.monotonic()).drop(holder)

    async def renew(self, job_id: str, holder: str, count: int, *, lease: float) -> bool:
        """Put `count` rows of the holder under a fresh lease and remove its others.

        Returns False, and does nothing, if the holder has fewer.
        """
        await self._call("renew")
        if self._held_by(job_id, holder) < count:
            return False
        self._put(job_id, holder, count, lease)
        return True

    def total(self, job_id: str) -> int:
        """Return the number of a job's rows; not counted as a call."""
        return self._jobs.total(job_id, self._clock.monotonic())

    def state(self, job_id: str, *, granted: bool, limit: int) -> LedgerState:
        """Build the answer of a call that was `granted` or not; not counted as a call."""
        entries = self._jobs.of(job_id, self._clock.monotonic())
        free = max(0, limit - entries.total)
        return LedgerState(granted=granted, free=free, holders=entries.holders, wanting=0)

    async def _call(self, name: str) -> None:
        self.calls[name] += 1
        await self._pause()

    def _held_by(self, job_id: str, holder: str) -> int:
        entry = self._jobs.of(job_id, self._clock.monotonic()).by_holder.get(holder)
        return 0 if entry is None else entry.count

    def _put(self, job_id: str, holder: str, count: int, lease: float) -> None:
        now = self._clock.monotonic()
        self._jobs.of(job_id, now).put(holder, count, now + lease)


class CountThenInsertPermits:
    """Lease rows as published: a COUNT and, if it leaves room, an INSERT, in two calls.

    It breaks the limit. All holders that count before the others have inserted see the same room,
    so overlapping calls may all be granted: many times the limit, if many slots ask at once. Part
    of its speed in a comparison comes from that.

    Growing takes two calls, or one if refused; renewing and giving back take one. Renewing lapsed
    rows is growing again, after the call that found out.
    """

    def __init__(self, rows: LeaseRows) -> None:
        self._rows = rows

    @property
    def calls(self) -> Counter[str]:
        """Return the calls of the store by name: `count`, `insert`, `delete`, `renew`."""
        return self._rows.calls

    def total(self, job_id: str) -> int:
        """Return the sum of a job's counts under unexpired leases."""
        return self._rows.total(job_id)

    async def acquire_or_renew(
        self, request: LeaseRequest, *, limit: int, lease: float
    ) -> LedgerState:
        """Let a holder have `request.count` permits for `lease` seconds, or change nothing.

        Raises ValueError if `request.count` is negative, and any error of the store's pause.
        """
        job_id, holder, count = request.job_id, request.holder, request.count
        if count < 0:
            raise ValueError("a count of permits is not negative")
        if count == 0:
            await self._rows.delete(job_id, holder)
            granted = True
        elif count <= request.before and await self._rows.renew(job_id, holder, count, lease=lease):
            granted = True
        else:
            granted = await self._grow(request, limit, lease)
        return self._rows.state(job_id, granted=granted, limit=limit)

    async def _grow(self, request: LeaseRequest, limit: int, lease: float) -> bool:
        job_id, holder, count = request.job_id, request.holder, request.count
        total, own = await self._rows.count(job_id, holder)
        if count > own and total - own + count > limit:
            return False
        return await self._rows.insert(job_id, holder, count, lease=lease)


class AtomicLeaseRows(CountThenInsertPermits):
    """The same without the race: the insert checks the limit itself, in one call, so it is kept at
    every moment."""

    async def _grow(self, request: LeaseRequest, limit: int, lease: float) -> bool:
        return await self._rows.insert(
            request.job_id, request.holder, request.count, lease=lease, limit=limit
        )


LEDGER, COUNT_THEN_INSERT, ATOMIC_ROWS = "ledger", "count-then-insert", "atomic-rows"
PERMIT_STORES = (LEDGER, COUNT_THEN_INSERT, ATOMIC_ROWS)


TIMEOUT = 1.0
"""Seconds after which a call gives up on a store that does not answer."""
APPLIED = 0.25
"""The share of unanswered calls that the store applies all the same."""


class _Store(Protocol):
    """A permits port that reports the sum of a job's counts."""

    async def acquire_or_renew(
        self, request: LeaseRequest, *, limit: int, lease: float
    ) -> LedgerState: ...

    def total(self, job_id: str) -> int: ...


@dataclass(slots=True)
class LedgerReach:
    """The connection of a worker, across its processes, to the permit store; broken while
    `cut_off`."""

    cut_off: int = 0


class PermitService:
    """The store that the whole fleet shares: a ledger, or one of the two kinds of lease rows.

    `calls` counts calls of the store; `peak_granted` is the largest total of one job at any write,
    `most_over` the most that a total was above the limit given with the write. While `down`, the
    store answers no call.
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
        self.pacing = MemoryPacing(clock)

    @property
    def is_ledger(self) -> bool:
        """Return whether a call of the port is one call of the store; rows wait for each of
        theirs."""
        return self._kind == LEDGER

    def restart_empty(self) -> None:
        """Lose every entry. A ledger notices and is closed for a lease; rows are just gone."""
        self._store = self._make(closed_for=self._lease)
        self.pacing = MemoryPacing(self._clock, closed_for=HORIZON)

    async def acquire_or_renew(
        self, request: LeaseRequest, *, limit: int, lease: float
    ) -> LedgerState:
        """Pass a call on, and record the totals after it."""
        if self.is_ledger:
            self.calls += 1
        state = await self._store.acquire_or_renew(request, limit=limit, lease=lease)
        total = self._store.total(request.job_id)
        self.peak_granted = max(self.peak_granted, total)
        self.most_over = max(self.most_over, total - limit)
        return state

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
    store lets it lapse: the permits usable even while the store does not answer. `reach` is its
    worker's.
    """

    def __init__(
        self, service: PermitService, link: Link, reach: LedgerReach | None = None
    ) -> None:
        self._service = service
        self._link = link
        self._reach = reach or LedgerReach()
        self.leases: dict[str, dict[str, tuple[int, float]]] = {}

    async def acquire_or_renew(
        self, request: LeaseRequest, *, limit: int, lease: float
    ) -> LedgerState:
        """Let a holder have permits. Raises ConveyorError(unavailable) after a timeout."""
        service, link = self._service, self._link
        back = await link.go()
        if self._reach.cut_off or (service.down and service.is_ledger):
            return await self._leave_unanswered(request, limit, lease)
        state = await service.acquire_or_renew(request, limit=limit, lease=lease)
        if state.granted:
            self._record_lease(request, lease)
        link.note(f"hold {request.holder} {request.before} {request.count} {state.granted}")
        await link.come_back(back)
        return state

    async def _leave_unanswered(
        self, request: LeaseRequest, limit: int, lease: float
    ) -> LedgerState:
        """Give no answer; apply some calls all the same, sooner or later."""
        service, link = self._service, self._link
        drawn = service.stream.random()
        applied_after = TIMEOUT * service.stream.random()
        await link.sleep(applied_after)
        if drawn < APPLIED:
            state = await service.acquire_or_renew(request, limit=limit, lease=lease)
            if state.granted:
                self._record_lease(request, lease)
            link.note(f"hold unheard {request.holder} {request.count} {state.granted}")
        await link.come_back(TIMEOUT - applied_after)
        raise no_answer()

    def _record_lease(self, request: LeaseRequest, lease: float) -> None:
        held = self.leases.setdefault(request.job_id, {})
        if request.count > 0:
            held[request.holder] = (request.count, self._link.seconds() + lease)
        else:
            held.pop(request.holder, None)

    def usable(self, job_id: str) -> int:
        """Return the number of a job's permits that this process has under unexpired leases."""
        now = self._link.seconds()
        held = self.leases.get(job_id, {})
        return sum(count for count, lapses_at in held.values() if lapses_at > now)

    def next_lapse(self) -> float | None:
        """Return the virtual second at which the next of its leases lapses."""
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


class SimulatedPacing:
    """The pacing port of one process. The store that keeps permits keeps the starts too."""

    def __init__(self, service: PermitService, link: Link, reach: LedgerReach) -> None:
        self._service = service
        self._link = link
        self._reach = reach

    async def book(
        self,
        host: str,
        interval: float,
        count: int = 1,
        *,
        also: Mapping[str, float] = NOTHING_ELSE,
    ) -> Booking:
        """Book starts. Raises ConveyorError(unavailable) after a timeout."""
        back = await self._go()
        booking = await self._service.pacing.book(host, interval, count, also=also)
        self._link.note(f"book {host} {booking.starts} {booking.closed_for}")
        await self._link.come_back(back)
        return booking

    async def line_up(self, host: str, interval: float, run: str = "") -> float:
        """Take a place in the line. Raises ConveyorError(unavailable) after a timeout."""
        back = await self._go()
        wait = await self._service.pacing.line_up(host, interval, run)
        self._link.note(f"line up {host} {wait}")
        await self._link.come_back(back)
        return wait

    async def leave(self, run: str, hosts: Sequence[str] | None = None) -> None:
        """Leave lines. Raises ConveyorError(unavailable) after a timeout."""
        back = await self._go()
        await self._service.pacing.leave(run, hosts)
        self._link.note(f"leave {run} {hosts}")
        await self._link.come_back(back)

    async def close(self, host: str, seconds: float) -> None:
        """Close a host. Raises ConveyorError(unavailable) after a timeout."""
        back = await self._go()
        await self._service.pacing.close(host, seconds)
        self._link.note(f"close {host} {seconds}")
        await self._link.come_back(back)

    async def lower(self, host: str, limit: int, age: float = 0.0) -> int:
        """Halve a ceiling. Raises ConveyorError(unavailable) after a timeout."""
        back = await self._go()
        ceiling = await self._service.pacing.lower(host, limit, age)
        self._link.note(f"lower {host} {ceiling}")
        await self._link.come_back(back)
        return ceiling

    async def lift(self, host: str, limit: int) -> None:
        """Let a ceiling grow. Raises ConveyorError(unavailable) after a timeout."""
        back = await self._go()
        await self._service.pacing.lift(host, limit)
        self._link.note(f"lift {host}")
        await self._link.come_back(back)

    async def slow(self, host: str, interval: float, seconds: float) -> None:
        """Slow a host down. Raises ConveyorError(unavailable) after a timeout."""
        back = await self._go()
        await self._service.pacing.slow(host, interval, seconds)
        self._link.note(f"slow {host} {interval}")
        await self._link.come_back(back)

    async def state(self, hosts: Iterable[str]) -> dict[str, HostState]:
        """Look at hosts. Raises ConveyorError(unavailable) after a timeout."""
        back = await self._go()
        state = await self._service.pacing.state(hosts)
        await self._link.come_back(back)
        return state

    async def _go(self) -> float:
        back = await self._link.go()
        if self._reach.cut_off or self._service.down:
            await self._link.come_back(TIMEOUT)
            raise no_answer()
        return back


def no_answer() -> ConveyorError:
    """Build the error of a store that is away."""
    return ConveyorError(ErrorCode.UNAVAILABLE, "the permit store does not answer")
