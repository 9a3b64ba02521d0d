"""A call to the permit ledger that arrives long after its sender has given its permits up."""

from __future__ import annotations

from conveyor.dev.permits import MemoryPermits
from conveyor.ports.permits import LeaseRequest, LedgerState, Permits
from conveyor.testing.clock import FakeClock
from tests.unit.dispatch_world import World

LIMIT, LEASE = 40, 30.0
DELAY = 62.0
LONG = 1_000.0


class SlowWay:
    """A ledger that can come back empty, to which the renewals of one holder can take long."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.ledger = MemoryPermits(clock)
        self.slow = ""
        self.arrived: list[tuple[bool, int]] = []

    async def acquire_or_renew(
        self, request: LeaseRequest, *, limit: int, lease: float
    ) -> LedgerState:
        late = request.holder == self.slow and request.count == request.before > 0
        if late:
            await self._clock.sleep(DELAY)
        state = await self.ledger.acquire_or_renew(request, limit=limit, lease=lease)
        if late:
            self.arrived.append((state.granted, self.ledger.total(request.job_id)))
        return state


async def test_a_late_announcement_to_an_empty_ledger_gives_nobody_more_to_use() -> None:
    """While it is closed the ledger believes what it is told, so its sum may exceed the limit. The
    late sender has forfeited what it announces, so what is used does not."""
    way: list[SlowWay] = []

    def slowly(_permits: Permits, clock: FakeClock) -> Permits:
        way.append(SlowWay(clock))
        return way[0]

    it = World(slots=LIMIT, workers=2, duration=lambda _delivery: LONG, ledger=slowly)
    async with it.running():
        await it.submit("a", 2 * LIMIT, limit=LIMIT)
        await it.clock.advance(3)
        held = [member.policy.held for member in it.members]
        assert sum(held) == LIMIT
        late, other = it.members if held[0] else it.members[::-1]
        way[0].slow = "w0" if held[0] else "w1"
        await it.clock.advance(50)
        assert (late.policy.held, other.policy.held) == (0, LIMIT)
        way[0].ledger = MemoryPermits(it.clock, closed_for=LEASE)
        await it.clock.advance(25)
        assert [granted for granted, _ in way[0].arrived] == [True]
        assert way[0].arrived[0][1] > LIMIT
        assert late.policy.held == 0
        assert it.tasks.in_flight["run-a"] == LIMIT
        way[0].slow = ""
        await it.clock.advance(2 * LEASE)
        assert way[0].ledger.total("job-a") == LIMIT
        assert it.tasks.peak["run-a"] == LIMIT
