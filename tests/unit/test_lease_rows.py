"""The cost of lease rows, and the effects of a store that does not answer."""

from __future__ import annotations

import pytest

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.permits import LeaseRequest, LedgerState
from conveyor.simulation.permits import AtomicLeaseRows, CountThenInsertPermits, LeaseRows
from conveyor.testing.clock import FakeClock

Kind = type[CountThenInsertPermits]
BOTH = pytest.mark.parametrize("kind", [CountThenInsertPermits, AtomicLeaseRows])
GROWTH = {CountThenInsertPermits: {"count": 1, "insert": 1}, AtomicLeaseRows: {"insert": 1}}
REFUSAL = {CountThenInsertPermits: {"count": 1}, AtomicLeaseRows: {"insert": 1}}


class Costs:
    """An adapter over a store that can stop answering; it records the cost of each call."""

    def __init__(self, kind: Kind) -> None:
        self.clock = FakeClock()
        self.down = False
        self.pauses = 0
        self.permits = kind(LeaseRows(self.clock, self._pause))

    async def _pause(self) -> None:
        self.pauses += 1
        if self.down:
            raise ConveyorError(ErrorCode.UNAVAILABLE, "the store is down")

    async def acquire_or_renew(self, holder: str, count: int, *, before: int) -> LedgerState:
        self.permits.calls.clear()
        request = LeaseRequest(job_id="job", holder=holder, count=count, before=before, sequence=1)
        return await self.permits.acquire_or_renew(request, limit=3, lease=30)

    async def cost(self, holder: str, count: int, *, before: int) -> dict[str, int]:
        await self.acquire_or_renew(holder, count, before=before)
        return dict(self.permits.calls)


@BOTH
async def test_growing_costs_a_count_and_an_insert_unless_it_is_one_call(kind: Kind) -> None:
    costs = Costs(kind)
    assert await costs.cost("a", 1, before=0) == GROWTH[kind]
    assert await costs.cost("a", 3, before=1) == GROWTH[kind]
    assert costs.permits.total("job") == 3


@BOTH
async def test_being_refused_costs_one_call(kind: Kind) -> None:
    costs = Costs(kind)
    await costs.acquire_or_renew("a", 3, before=0)
    assert await costs.cost("b", 1, before=0) == REFUSAL[kind]


@BOTH
async def test_renewing_and_giving_back_cost_one_call(kind: Kind) -> None:
    costs = Costs(kind)
    await costs.acquire_or_renew("a", 3, before=0)
    assert await costs.cost("a", 3, before=3) == {"renew": 1}
    assert await costs.cost("a", 2, before=3) == {"renew": 1}
    assert await costs.cost("a", 0, before=2) == {"delete": 1}
    assert costs.permits.total("job") == 0


@BOTH
async def test_renewing_what_has_lapsed_is_growing_again(kind: Kind) -> None:
    costs = Costs(kind)
    await costs.acquire_or_renew("a", 3, before=0)
    await costs.clock.advance(30)
    assert await costs.cost("a", 3, before=3) == {"renew": 1} | GROWTH[kind]


@BOTH
async def test_every_store_call_pauses_once(kind: Kind) -> None:
    costs = Costs(kind)
    calls = 0
    for count, before in ((3, 0), (3, 3), (2, 3), (4, 2), (0, 2)):
        calls += sum((await costs.cost("a", count, before=before)).values())
    assert costs.pauses == calls > 0


@BOTH
async def test_a_store_that_does_not_answer_changes_nothing(kind: Kind) -> None:
    costs = Costs(kind)
    await costs.acquire_or_renew("a", 2, before=0)
    costs.down = True
    for count in (3, 2, 1, 0):
        with pytest.raises(ConveyorError):
            await costs.acquire_or_renew("a", count, before=2)
    assert costs.permits.total("job") == 2


@BOTH
async def test_wants_and_sequences_are_not_known(kind: Kind) -> None:
    costs = Costs(kind)
    request = LeaseRequest(job_id="job", holder="a", count=1, before=0, sequence=1, wants=True)
    states = [await costs.permits.acquire_or_renew(request, limit=3, lease=30) for _ in range(2)]
    assert [(state.granted, state.wanting) for state in states] == [(True, 0)] * 2
