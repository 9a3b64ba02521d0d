"""Lanes of hosts that have run empty: they cost the ledger little, and keep nothing from others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

import pytest

from conveyor.domain.hosts import HostPattern, HostRules, host_key
from conveyor.ports.handler import ACKNOWLEDGE, Outcome
from conveyor.ports.pacing import NOTHING_ELSE, Booking
from conveyor.ports.queues import Delivery, host_queue, run_queue
from tests.unit.dispatch_world import BrokenLedger, World
from tests.unit.test_host_lanes import A, B, world


async def test_an_empty_lane_keeps_no_permit_of_its_host_from_a_run_elsewhere() -> None:
    bench = World(
        slots=20,
        duration=lambda delivery: 500.0 if delivery.queue == host_queue("a", 1) else 0.2,
        workers=2,
        limits=HostRules(limit=1, rate=10.0),
    )
    async with bench.running():
        await bench.submit("a", 12, hosts=(A, B), lanes=(A, B))
        await bench.clock.advance(5.0)
        assert len(bench.tasks.done) == 6, "the lane of the first host is empty"
        await bench.submit("b", 12, hosts=(A,))
        await bench.clock.advance(20.0)
        assert len(bench.tasks.done) == 18
        assert bench.tasks.peak[run_queue("b")] == 1


def counted(bench: World) -> Counter[str]:
    """Count the calls of the ledger of starts."""
    calls: Counter[str] = Counter()

    def counting(name: str, call: Callable[..., Awaitable[object]]) -> Callable[..., object]:
        async def count(*given: object, **named: object) -> object:
            calls[name] += 1
            return await call(*given, **named)

        return count

    for name in ("book", "line_up", "state"):
        setattr(bench.pacing, name, counting(name, getattr(bench.pacing, name)))
    return calls


@pytest.mark.slow
async def test_lanes_whose_rows_all_wait_cost_the_ledger_next_to_nothing() -> None:
    hosts = tuple(f"h{number}.example:443" for number in range(63))
    bench = world(limit=2, rate=5.0, seconds=0.1)
    calls = counted(bench)
    bench.tasks.outcome = lambda _delivery: Outcome(hide_for=60.0)
    async with bench.running():
        await bench.submit("a", 63, hosts=hosts, lanes=hosts)
        await bench.clock.advance(30.0)
        assert len(bench.starts) == 63
        before = bench.broken.calls + calls.total()
        await bench.clock.advance(20.0)
        assert bench.broken.calls + calls.total() - before <= 200 / 3
        bench.tasks.outcome = lambda _delivery: ACKNOWLEDGE
        due = 60.0 + max(moment for moment, _ in bench.starts) + 0.1
        await bench.clock.advance(due - bench.clock.monotonic() + 6.2)
        assert len(bench.tasks.done) == 63, "each within the pause, and the wait of its look"


async def test_a_message_of_an_empty_lane_waits_for_its_host_without_slot_and_permit() -> None:
    bench = World(
        slots=20,
        duration=lambda delivery: 40.0 if delivery.queue == run_queue("b") else 0.2,
        workers=2,
        limits=HostRules(limit=1, rate=10.0),
    )
    puts_off = Outcome(hide_for=10.0)
    bench.tasks.outcome = lambda one: puts_off if one.receive_count == 1 else ACKNOWLEDGE
    async with bench.running():
        await bench.submit("a", 1, hosts=(A,), lanes=(A,))
        await bench.members[1].dispatcher.close_lane("a")
        await bench.clock.advance(2.0)
        bench.tasks.outcome = lambda _delivery: ACKNOWLEDGE
        await bench.submit("b", 1, hosts=(A,))
        await bench.dispatcher.close_lane("b")
        await bench.clock.advance(18.0)
        lane = bench.dispatcher.lanes.of("a")[1]
        assert (lane.busy, lane.kept, lane.waiting) == (0, 1, 1)
        assert bench.dispatcher.calling == 0
        received = bench.received()
        await bench.clock.advance(30.0)
        assert len(bench.tasks.done) == 2
        assert bench.received() == received
        assert bench.tasks.peak["all"] == 1


@pytest.mark.slow
async def test_empty_lanes_leave_the_starts_that_hosts_share_to_those_with_work() -> None:
    hosts = tuple(f"h{number}.example:443" for number in range(12))
    together = HostPattern(limit=None, rate=4.0, together=True)
    bench = World(
        slots=20, duration=lambda _: 0.1, limits=HostRules(patterns={"*.example": together})
    )
    async with bench.running():
        await bench.submit("a", 12, hosts=hosts, lanes=hosts)
        await bench.clock.advance(15.0)
        await bench.submit("b", 70, hosts=hosts[:1], lanes=hosts[:1])
        await bench.clock.advance(5.0)
        before = len(bench.starts)
        await bench.clock.advance(6.0)
        assert len(bench.starts) - before >= 23, "of 24"


def shared(*, rate: float) -> World:
    """Hosts that are counted as one."""
    return World(
        slots=20,
        duration=lambda _delivery: 0.1,
        ledger=BrokenLedger,
        limits=HostRules(patterns={"*.example": HostPattern(limit=None, rate=rate, together=True)}),
    )


def booked(bench: World) -> list[tuple[str, ...]]:
    """Note the keys of each start that is booked."""
    book, keys = bench.pacing.book, []

    async def noting(
        host: str, interval: float, count: int = 1, *, also: Mapping[str, float] = NOTHING_ELSE
    ) -> Booking:
        booking = await book(host, interval, count, also=also)
        keys.extend([(host, *also)] * len(booking.starts))
        return booking

    bench.pacing.book = noting  # type: ignore[method-assign]
    return keys


async def test_hosts_that_share_starts_use_all_of_them_as_their_lanes_run_dry() -> None:
    hosts = tuple(f"h{number}.example:443" for number in range(12))
    bench = shared(rate=2.0)
    bench.queues.receive_time = 0.03
    keys = booked(bench)
    async with bench.running():
        await bench.submit("a", 36, hosts=hosts, lanes=hosts)
        await bench.clock.advance(35 / 2.0 + 1.0)
        assert len(bench.tasks.done) == 36
        assert (len(keys), bench.received()) == (36, 36)


async def test_a_lane_that_has_never_given_a_message_is_asked_without_a_start() -> None:
    bench = world(rate=0.5)
    keys = booked(bench)
    async with bench.running():
        await bench.submit("a", 3, hosts=(B,), lanes=(A, B))
        await bench.clock.advance(10.0)
    assert len(bench.tasks.done) == 3
    assert not [asked for asked in keys if host_key(A) in asked]


@pytest.mark.slow
async def test_hosts_that_share_starts_do_not_each_ask_for_the_next_one() -> None:
    hosts = tuple(f"h{number}.example:443" for number in range(30))
    bench = shared(rate=0.05)
    calls = counted(bench)
    async with bench.running():
        await bench.submit("a", 90, hosts=hosts, lanes=hosts)
        await bench.clock.advance(41.0)
        assert len(bench.starts) == 3
        assert calls["book"] <= 6


async def test_a_worker_without_rules_of_hosts_looks_for_one_message_at_a_time() -> None:
    bench = World(slots=10, duration=lambda _delivery: 1.0)
    receive, limits = bench.queues.receive, list[int]()

    async def counting(
        queue: str, *, limit: int, visibility: float, wait: float = 0.0
    ) -> list[Delivery]:
        if queue == host_queue("a", 0):
            limits.append(limit)
        return await receive(queue, limit=limit, visibility=visibility, wait=wait)

    bench.queues.receive = counting  # type: ignore[method-assign]
    async with bench.running():
        await bench.submit("a", 5, hosts=(A,), lanes=(A,))
        await bench.clock.advance(10.0)
    assert len(bench.tasks.done) == 5
    assert limits[0] == 1
