"""The simulated permit stores: away, empty again, and what they count."""

from __future__ import annotations

import anyio
import pytest

from conveyor.domain.errors import ConveyorError
from conveyor.ports.permits import LeaseRequest
from conveyor.simulation.latency import Latency
from conveyor.simulation.link import Gate
from conveyor.simulation.permits import (
    ATOMIC_ROWS,
    COUNT_THEN_INSERT,
    LEDGER,
    PERMIT_STORES,
    TIMEOUT,
    LedgerReach,
    PermitService,
    SimulatedPermits,
)
from conveyor.simulation.process import SimulatedClock
from tests.unit.simulated_parts import Place, in_place

JOB = "JOB"
LEASE = 30.0
QUICK = Latency(0.01)


def _service(place: Place, kind: str, *, latency: Latency = QUICK) -> PermitService:
    clock = SimulatedClock(place.time, Gate(), seed=0, process="permit store")
    return PermitService(clock, latency, kind=kind, lease=LEASE, seed=0)


def _request(holder: str, count: int, *, before: int = 0, sequence: int = 1) -> LeaseRequest:
    return LeaseRequest(job_id=JOB, holder=holder, count=count, before=before, sequence=sequence)


async def _ask(permits: SimulatedPermits, request: LeaseRequest, *, limit: int = 10) -> bool:
    return (await permits.acquire_or_renew(request, limit=limit, lease=LEASE)).granted


@pytest.mark.parametrize("kind", PERMIT_STORES)
def test_a_store_that_is_down_answers_nobody_and_then_everybody(kind: str) -> None:
    async def main(place: Place) -> None:
        service = _service(place, kind)
        permits = SimulatedPermits(service, place.link(Gate()))
        service.down += 1
        before = place.time.seconds()
        with pytest.raises(ConveyorError, match="does not answer"):
            await _ask(permits, _request("a", 1))
        assert place.time.seconds() - before == pytest.approx(TIMEOUT)
        service.down -= 1
        assert await _ask(permits, _request("b", 1))

    in_place(main)


def test_some_calls_to_a_ledger_in_trouble_are_applied_all_the_same() -> None:
    async def main(place: Place) -> None:
        service = _service(place, LEDGER)
        permits = SimulatedPermits(service, place.link(Gate()))
        service.down += 1
        for number in range(100):
            with pytest.raises(ConveyorError):
                await _ask(permits, _request(str(number), 1), limit=1_000)
        assert 10 <= service.peak_granted <= 20
        assert 1 <= permits.usable(JOB) <= service.peak_granted

    in_place(main)


@pytest.mark.parametrize("kind", PERMIT_STORES)
def test_a_worker_that_is_cut_off_gets_no_answer_and_the_others_do(kind: str) -> None:
    async def main(place: Place) -> None:
        service, reach = _service(place, kind), LedgerReach()
        cut_off = SimulatedPermits(service, place.link(Gate()), reach)
        other = SimulatedPermits(service, place.link(Gate(), process="w2"), LedgerReach())
        reach.cut_off += 1
        heard = 0
        for number in range(40):
            with pytest.raises(ConveyorError, match="does not answer"):
                await _ask(cut_off, _request(str(number), 1), limit=100)
            heard += await _ask(other, _request("other", 1, sequence=number + 1), limit=100)
        assert heard == 40
        assert 1 < service.peak_granted < 40
        reach.cut_off -= 1
        assert await _ask(cut_off, _request("again", 1), limit=100)

    in_place(main)


def test_a_ledger_that_comes_back_empty_is_closed_for_a_lease() -> None:
    async def main(place: Place) -> None:
        service = _service(place, LEDGER)
        permits = SimulatedPermits(service, place.link(Gate()))
        assert await _ask(permits, _request("a", 10))
        service.restart_empty()
        assert not await _ask(permits, _request("b", 1))
        assert await _ask(permits, _request("a", 10, before=10, sequence=2))
        await place.time.sleep(LEASE)
        assert await _ask(permits, _request("b", 1, sequence=2))
        assert (service.peak_granted, service.most_over) == (10, 0)

    in_place(main)


@pytest.mark.parametrize(
    ("kind", "calls", "granted"), [(LEDGER, 3, 2), (ATOMIC_ROWS, 3, 2), (COUNT_THEN_INSERT, 6, 3)]
)
def test_calls_of_the_store_and_its_largest_total_are_counted(
    kind: str, calls: int, granted: int
) -> None:
    """Three ask at once for two permits; counting and then inserting takes two calls each, and
    grants three."""

    async def main(place: Place) -> None:
        service = _service(place, kind)
        async with anyio.create_task_group() as group:
            for holder in "abc":
                permits = SimulatedPermits(service, place.link(Gate(), process=holder))
                group.start_soon(_ask_for_one_of_two, permits, holder)
        assert (service.calls, service.peak_granted) == (calls, granted)
        assert service.most_over == max(0, granted - 2)

    in_place(main)


async def _ask_for_one_of_two(permits: SimulatedPermits, holder: str) -> None:
    await _ask(permits, _request(holder, 1), limit=2)


def test_a_process_knows_until_when_its_permits_are_its_own() -> None:
    async def main(place: Place) -> None:
        permits = SimulatedPermits(_service(place, LEDGER), place.link(Gate()))
        await _ask(permits, _request("a", 3))
        await place.time.sleep(10)
        await _ask(permits, _request("b", 2))
        assert (permits.usable(JOB), permits.next_lapse()) == (5, LEASE)
        await place.time.sleep(20)
        assert (permits.usable(JOB), permits.next_lapse()) == (2, LEASE + 10)
        await _ask(permits, _request("b", 0, before=2, sequence=2))
        assert (permits.usable(JOB), permits.next_lapse()) == (0, None)

    in_place(main)
