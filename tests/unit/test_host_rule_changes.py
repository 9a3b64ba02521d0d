"""Rules of hosts that change while messages are in hand: none of these goes by the old ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest

from conveyor.domain.hosts import HostPattern, HostRules, host_key
from conveyor.domain.model import DispatchableRun
from conveyor.engine.lanes import Lanes
from conveyor.ports.pacing import NOTHING_ELSE, Booking
from tests.unit.dispatch_world import World
from tests.unit.test_empty_lanes import booked
from tests.unit.test_host_lanes import A, B, most_in_flight, starts_of, world

LATER = 0.6
"""Seconds within which each worker has looked at the rules."""


async def in_hand(bench: World, run: DispatchableRun, seconds: float) -> None:
    """Let the messages of a run come due while nobody asks for them, and then all at once."""
    await bench.clock.advance(2.0)
    for member in bench.members:
        await member.dispatcher.close_lane(run.run_id)
    await bench.clock.advance(seconds)
    for member in bench.members:
        member.dispatcher.open_lane(run)
    await bench.clock.advance(5.0)


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_limit_that_is_added_holds_for_what_is_in_hand(workers: int) -> None:
    bench = world(rate=2.0, seconds=5.0, workers=workers)
    async with bench.running():
        await in_hand(bench, await bench.submit("a", 60, hosts=(A,)), 20.0)
        bench.limits = HostRules(rate=2.0, limit=1)
        since = bench.clock.monotonic() + LATER
        await bench.clock.advance(30.0)
        assert 3 <= sum(start > since for start in starts_of(bench)) <= 7
    assert most_in_flight(bench, since, 5.0) == 1
    assert bench.permits.total(host_key(A)) == 0


async def test_a_start_that_is_booked_while_a_rate_goes_is_not_waited_for() -> None:
    """Of messages that name no host: it is known with their call alone."""
    bench = world(rate=0.5, seconds=0.1)
    book, booked_at = bench.pacing.book, list[float]()

    async def unknown(_run_id: str, _tasks: Sequence[tuple[int, str]]) -> list[str]:
        return []

    async def booking(
        host: str, interval: float, count: int = 1, *, also: Mapping[str, float] = NOTHING_ELSE
    ) -> Booking:
        found = await book(host, interval, count, also=also)
        booked_at.append(bench.clock.monotonic())
        if len(booked_at) == 2:
            bench.limits = HostRules()
        return found

    bench._hosts_of = unknown  # type: ignore[assignment, method-assign]
    bench.queues._task_hosts = unknown
    bench.pacing.book = booking  # type: ignore[method-assign]
    async with bench.running():
        await bench.submit("a", 6, hosts=(A,))
        await bench.clock.advance(5.0)
    assert len(booked_at) == 2
    assert starts_of(bench) == [booked_at[1]] * 6


@pytest.mark.slow
async def test_a_rate_that_is_lowered_holds_for_starts_in_hand() -> None:
    bench = world(rate=10.0, seconds=0.1, workers=2)
    async with bench.running():
        await in_hand(bench, await bench.submit("a", 400, hosts=(A,)), 20.0)
        bench.limits = HostRules(rate=0.2)
        changed = bench.clock.monotonic()
        await bench.clock.advance(40.0)
    since = [start for start in starts_of(bench) if start > changed]
    assert sum(start < changed + 10.1 for start in since) <= 3
    assert 6 <= len(since) <= 9


async def test_hosts_that_are_counted_together_give_up_the_starts_that_each_had() -> None:
    bench = world(rate=5.0, seconds=0.1)
    async with bench.running():
        await in_hand(bench, await bench.submit("a", 400, hosts=(A, B)), 20.0)
        together = HostPattern(rate=0.5, together=True)
        bench.limits = HostRules(patterns={"*.example": together})
        changed = bench.clock.monotonic()
        await bench.clock.advance(30.0)
    since = [start for start, _ in bench.starts if start > changed]
    assert len(since) >= 9, "once those that were booked are over"
    assert all(later - one > 1.99 for one, later in pairwise(since))


async def test_a_limit_that_is_lowered_holds_for_messages_that_have_permits() -> None:
    bench = world(limit=30, rate=2.0, seconds=20.0)
    async with bench.running():
        await in_hand(bench, await bench.submit("a", 60, hosts=(A,)), 20.0)
        before = len(bench.starts)
        bench.limits = HostRules(limit=1, rate=2.0)
        await bench.clock.advance(18.0)
        assert len(bench.starts) == before
        await bench.clock.advance(40.0)
        assert len(bench.starts) > before
        since = bench.starts[before][0]
    assert most_in_flight(bench, since, 20.0) == 1


async def test_a_limit_that_is_lowered_holds_for_what_a_lane_was_asked_for() -> None:
    bench = world(limit=20, rate=10.0, seconds=5.0)
    async with bench.running():
        await bench.submit("a", 200, hosts=(A,), lanes=(A,))
        await bench.clock.advance(1.05)
        bench.limits = HostRules(limit=1, rate=10.0)
        before = len(bench.starts)
        await bench.clock.advance(4.8)
        assert len(bench.starts) == before, "as many are in flight, and more"
        await bench.clock.advance(40.0)
        assert len(bench.starts) > before + 4
        since = bench.starts[before][0]
    assert most_in_flight(bench, since, 5.0) == 1


@pytest.mark.parametrize("lanes", [(), (A,)])
async def test_a_first_rule_holds_for_messages_that_came_without_one(
    lanes: tuple[str, ...],
) -> None:
    bench = World(slots=5, duration=lambda _: 1.0, limits=HostRules())
    async with bench.running():
        await bench.submit("a", 60, hosts=(A,), lanes=lanes)
        await bench.clock.advance(3.5)
        bench.limits = HostRules(limit=1)
        since = bench.clock.monotonic()
        await bench.clock.advance(20.0)
        assert sum(start > since for start in starts_of(bench)) > 10
    assert most_in_flight(bench, since) == 1


@pytest.mark.parametrize("lanes", [(), (A, B)])
async def test_rules_that_are_gone_bound_no_message_in_hand(lanes: tuple[str, ...]) -> None:
    bench = world(rate=1.0, limit=1, seconds=0.5)
    async with bench.running():
        await bench.submit("a", 8, hosts=(A, B), lanes=lanes)
        await bench.clock.advance(2.1)
        bench.limits = HostRules()
        await bench.clock.advance(4.0)
        assert len(bench.tasks.done) == 8


@pytest.mark.parametrize("lanes", [(), (A,)])
async def test_another_hosts_rule_costs_a_host_no_start(lanes: tuple[str, ...]) -> None:
    bench = world(rate=2.0, seconds=0.1)
    keys = booked(bench)
    async with bench.running():
        await bench.submit("a", 30, hosts=(A,), lanes=lanes)
        for limit in range(1, 30):
            bench.limits = HostRules(rate=2.0, patterns={"b.example": HostPattern(limit=limit)})
            await bench.clock.advance(0.5)
        await bench.clock.advance(1.0)
        assert len(bench.tasks.done) == 30
        assert len(keys) <= 30 + len(lanes), "a lane books one more as it runs dry"


@pytest.mark.slow
async def test_messages_of_slow_hosts_in_hand_leave_room_for_those_of_a_fast_one() -> None:
    slow, fast = [f"s{number}.slow:443" for number in range(7)], "a.fast:443"

    def rules(rate: float) -> HostRules:
        pattern = {"*.slow": HostPattern(rate=rate), "*.fast": HostPattern(rate=2.0)}
        return HostRules(patterns=pattern)

    bench = World(slots=20, duration=lambda _: 0.1, limits=rules(3.0))
    bench.queues._window = 10_000
    async with bench.running():
        run = await bench.submit("a", 1_200, hosts=(*slow, fast))
        await in_hand(bench, run, 60.0)
        bench.limits = rules(0.02)
        since = bench.clock.monotonic()
        await bench.clock.advance(40.0)
        assert sum(start >= since for start in starts_of(bench, f"https://{fast}/")) >= 72
        lane = bench.dispatcher.lanes.get("a")
        assert lane is not None
        assert lane.waiting < 7 * 6 + 60


@pytest.mark.parametrize("after", [HostRules(rate=50.0), HostRules()])
async def test_hidden_messages_come_sooner_once_their_host_may_be_called_more_often(
    after: HostRules,
) -> None:
    bench = world(rate=0.1, seconds=0.1, workers=2)
    async with bench.running():
        await bench.submit("a", 90, hosts=(A,))
        await bench.clock.advance(4.0)
        bench.limits = after
        await bench.clock.advance(25.0)
        assert len(bench.tasks.done) == 90
        for put_off in bench.dispatcher.lanes.put_off.values():
            put_off.forget_due(bench.clock.monotonic())
            assert not put_off.by_reason(), "no row is said to wait for a limit that is gone"
        await bench.submit("b", 20, hosts=(A,))
        await bench.clock.advance(4.0)
        assert len(bench.tasks.done) == 110, "none stands behind places that nobody waits for"


@pytest.mark.parametrize("lanes", [(), (A,)])
async def test_a_very_low_rate_that_is_raised_holds_at_once(lanes: tuple[str, ...]) -> None:
    bench = world(rate=0.01, seconds=0.1)
    async with bench.running():
        await bench.submit("a", 20, hosts=(A,), lanes=lanes)
        await bench.clock.advance(4.0)
        bench.limits = HostRules(rate=1.0)
        await bench.clock.advance(30.0)
        assert len(bench.tasks.done) == 20
    assert all(later - one > 0.99 for one, later in pairwise(starts_of(bench)))


async def test_hidden_messages_of_hosts_that_are_counted_together_no_more_come_sooner() -> None:
    together = HostPattern(rate=1.0, together=True)
    bench = World(
        slots=20, duration=lambda _: 0.1, limits=HostRules(patterns={"*.example": together})
    )
    hosts = tuple(f"{name}.example:443" for name in "abcdefgh")
    async with bench.running():
        await bench.submit("a", 96, hosts=hosts)
        await bench.clock.advance(4.0)
        bench.limits = HostRules(rate=1.0)
        await bench.clock.advance(30.0)
        assert len(bench.tasks.done) == 96, "as fast as before, but each host by itself"
    assert bench.received() <= 3 * 96


async def test_hidden_messages_that_came_sooner_once_stay_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second change that makes no host faster moves none of them again."""
    moved, hasten = list[float](), Lanes.hasten_row

    def noting(lanes: Lanes, run_id: str, now: float, due: float, sooner: float) -> None:
        moved.append(sooner)
        hasten(lanes, run_id, now, due, sooner)

    monkeypatch.setattr(Lanes, "hasten_row", noting)
    together = HostPattern(rate=1.0, together=True)
    bench = World(
        slots=20, duration=lambda _: 0.1, limits=HostRules(patterns={"*.example": together})
    )
    async with bench.running():
        await bench.submit("a", 96, hosts=tuple(f"{name}.example:443" for name in "abcdefgh"))
        await bench.clock.advance(4.0)
        bench.limits = HostRules(rate=1.0)
        await bench.clock.advance(2.5)
        assert moved
        moved.clear()
        bench.limits = HostRules(rate=1.0, limit=50)
        await bench.clock.advance(2.0)
        assert not moved


async def test_a_run_that_was_paused_comes_sooner_once_its_host_may_be_called_more_often() -> None:
    for changes_first in (True, False):
        bench = world(rate=0.1, seconds=0.1)
        (member,) = bench.members
        async with bench.running():
            run = await bench.submit("a", 90, hosts=(A,))
            await bench.clock.advance(14.0)
            await member.dispatcher.close_lane("a")
            await bench.clock.advance(5.0)
            if changes_first:
                bench.limits = HostRules(rate=50.0)
                await bench.clock.advance(2.0)
            member.dispatcher.open_lane(run)
            await bench.clock.advance(2.0)
            bench.limits = HostRules(rate=50.0)
            await bench.clock.advance(25.0)
            assert len(bench.tasks.done) == 90


async def test_a_run_that_was_paused_does_not_stand_behind_one_that_was_stopped() -> None:
    bench = world(rate=2.0, seconds=0.1)
    bench.queues._window = 10_000
    (member,) = bench.members
    async with bench.running():
        await bench.submit("a", 900, hosts=(A,))
        await bench.clock.advance(2.0)
        run = await bench.submit("b", 20, hosts=(A,))
        await bench.clock.advance(5.0)
        await member.dispatcher.close_lane("b")
        await bench.clock.advance(3.0)
        await member.dispatcher.close_lane("a")
        await bench.clock.advance(3.0)
        member.dispatcher.open_lane(run)
        await bench.clock.advance(20.0)
        done = set(bench.tasks.done)
        assert sum(task in done for _, task in bench.rows["b"]) == 20
        assert bench.received() <= 3 * 920


async def test_no_slot_is_kept_for_a_start_that_a_slower_rate_puts_off() -> None:
    bench = World(
        slots=10,
        duration=lambda _: 3.0,
        limits=HostRules(patterns={"a.example": HostPattern(rate=0.2)}),
    )
    planner = bench.dispatcher._planner
    async with bench.running():
        await bench.submit("a", 1_000, hosts=(A, B), lanes=(A,))
        while not planner.reserved:
            await bench.clock.advance(0.25)
        bench.limits = HostRules(patterns={"a.example": HostPattern(rate=0.01)})
        await bench.clock.advance(5.0)
        seen = []
        for _ in range(40):
            seen.append(planner.reserved)
            await bench.clock.advance(1.0)
    assert sum(seen) <= 6, "for the time of a call before one start at most, and a little more"
