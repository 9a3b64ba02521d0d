"""The reserve policy: permits first, renewed in time, given up in time, handed over where fair.

Tests that name a mistake in their docstring were written for it: put back, it makes them fail.
"""

from __future__ import annotations

from typing import Any

import pytest

from conveyor.domain.ids import task_id
from conveyor.engine.leases import FULL_BATCH
from conveyor.engine.planner import Polling
from conveyor.engine.reserve import BUFFER
from conveyor.ports.queues import Delivery, TaskMessage
from tests.unit.dispatch_world import BrokenLedger, World

LEASE = 30.0


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


async def lapse(world: World, name: str, *, limit: int) -> None:
    """Move on until the ledger gives all permits of a run away; nothing may use them by then."""
    for _ in range(int(2 * LEASE / 0.25)):
        await world.clock.advance(0.25)
        if await world.take(name, limit, limit=limit):
            assert world.tasks.in_flight[f"run-{name}"] == 0
            return
    raise AssertionError("the lease never lapsed")


@pytest.mark.guarantee("G5")
async def test_calls_end_before_a_silent_workers_permits_are_given_away() -> None:
    """For the mistake of taking a renewal that failed for one that went through."""
    world = World(slots=10, duration=lambda _delivery: 1_000.0, ledger=BrokenLedger)
    async with world.running():
        await world.submit("a", 10, limit=10)
        await world.clock.advance(12)
        assert world.tasks.in_flight["run-a"] == 10
        world.broken.away = lambda _request: True
        await lapse(world, "a", limit=10)
        assert world.telemetry.counts["fenced"] == 10
        world.broken.away = lambda _request: False


@pytest.mark.guarantee("G5")
async def test_a_grant_for_one_job_does_not_renew_another() -> None:
    """For the mistake of keeping one renewal time a worker instead of one a job."""
    world = World(slots=20, duration=lambda _delivery: 1_000.0, ledger=BrokenLedger)
    async with world.running():
        await world.submit("a", 10, limit=10)
        await world.clock.advance(1)
        world.broken.away = lambda request: request.job_id == "job-a"
        await world.submit("b", 10, limit=10)
        await world.clock.advance(5)
        assert world.tasks.in_flight["run-b"] == 10
        await lapse(world, "a", limit=10)
        assert world.tasks.in_flight["run-b"] == 10


async def test_slots_that_plan_together_never_count_on_one_permit() -> None:
    """For the mistake of booking a permit in the coroutine that receives, not where it is
    planned."""
    world = World(
        slots=8, duration=lambda _delivery: 1.0, permit_policy="reserve-strict", ledger=BrokenLedger
    )
    world.read_time = 0.05
    async with world.running():
        await world.submit("a", 12, limit=1)
        await world.clock.advance(30)
        assert len(world.tasks.done) == 12
    assert world.received() == 12
    assert world.bounced() == 0
    assert world.broken.calls < 12


@pytest.mark.slow
async def test_a_ledger_in_good_health_fences_nothing() -> None:
    """For the mistake of a renewal that forgets to move the renewal time on."""
    world = World(slots=10, duration=lambda _delivery: 10 * LEASE)
    async with world.running():
        await world.submit("a", 10, limit=10)
        await world.clock.advance(10 * LEASE + 1)
        assert len(world.tasks.done) == 10
    assert world.telemetry.counts["fenced"] == 0
    assert world.received() == 10


async def test_waiting_on_empty_queues_leaves_the_slots_to_others() -> None:
    """For the mistake of letting every empty queue hold a slot."""
    world = World(slots=10, duration=lambda _delivery: 1.0)
    async with world.running():
        for number in range(20):
            await world.submit(f"drained-{number}", 1)
        await world.clock.advance(10)
        await world.submit("busy", 500)
        await world.clock.advance(10)
        assert world.tasks.in_flight["run-busy"] >= 9
        assert sum(task in world.tasks.done for _, task in world.rows["busy"]) >= 70


@pytest.mark.slow
async def test_a_slow_run_is_not_buffered_at_the_pace_of_a_fast_one() -> None:
    """For the mistake of one mean task time over all jobs."""

    def duration(delivery: Delivery) -> float:
        return 60.0 if delivery.queue == "run-slow" else 0.1

    world = World(slots=20, duration=duration)
    async with world.running():
        await world.submit("slow", 100, limit=4)
        await world.submit("fast", 5_000, limit=10)
        most_slow = most_fast = 0
        for _ in range(400):
            await world.clock.advance(0.2)
            slow, fast = world.dispatcher.lanes.get("slow"), world.dispatcher.lanes.get("fast")
            most_slow = max(most_slow, len(slow.buffer) if slow else 0)
            most_fast = max(most_fast, len(fast.buffer) if fast else 0)
    assert most_slow == 0
    assert most_fast >= 2


def spread_out(delivery: Delivery) -> float:
    """Two seconds on average, and never many that end together."""
    message = delivery.message
    assert isinstance(message, TaskMessage)
    return 1.0 + int(message.task_id[-4:], 16) % 1_000 / 500


async def test_a_buffer_keeps_receives_full_and_permits_busy() -> None:
    world = World(slots=50, duration=spread_out, polling=Polling(wait=100.0))
    async with world.running():
        await world.submit("a", 2_000, limit=25)
        await world.clock.advance(100)
        done = len(world.tasks.done)
        assert done >= 1_100
        assert world.telemetry.counts["receives"] <= 0.13 * done
        assert world.tasks.peak["run-a"] == 25


async def test_strict_holds_no_message_without_a_permit() -> None:
    world = World(slots=50, duration=lambda _delivery: 2.0, permit_policy="reserve-strict")
    async with world.running():
        await world.submit("a", 200, limit=25)
        for _ in range(100):
            await world.clock.advance(0.2)
            lane = world.dispatcher.lanes.get("a")
            assert lane is not None
            assert not lane.buffer
            assert world.received() - len(world.tasks.done) <= 25


async def test_a_buffered_message_that_waits_too_long_is_given_back() -> None:
    durations = {"slow": False}
    world = World(slots=25, duration=lambda _delivery: 1_000.0 if durations["slow"] else 2.0)
    async with world.running():
        await world.submit("a", 500, limit=25)
        await world.clock.advance(10.1)
        durations["slow"] = True
        await world.clock.advance(4)
        lane = world.dispatcher.lanes.get("a")
        assert lane is not None
        assert lane.buffer
        await world.clock.advance(11)
        assert not lane.buffer


@pytest.mark.slow
async def test_workers_that_come_later_get_their_fair_share() -> None:
    world = World(slots=50, duration=lambda _delivery: 2.0, workers=3)
    early, *late = world.members
    async with world.running():
        run = await world.submit("a", 5_000, limit=60)
        for member in late:
            await member.dispatcher.close_lane("a")
        await world.clock.advance(10)
        assert early.policy.held >= 50
        for member in late:
            member.dispatcher.open_lane(run)
        await world.clock.advance(60)
        held = [member.policy.held for member in world.members]
        assert sum(held) <= 60
        assert min(held) >= FULL_BATCH
        assert world.bounced() == 0
    assert world.tasks.peak["run-a"] <= 60


@pytest.mark.slow
async def test_a_small_limit_is_never_split() -> None:
    world = World(slots=50, duration=lambda _delivery: 2.0, workers=4, ledger=BrokenLedger)
    async with world.running():
        await world.submit("a", 5_000, limit=5)
        await world.clock.advance(400)
        assert sorted(member.policy.held for member in world.members) == [0, 0, 0, 5]
        assert world.broken.calls <= 0.4 * len(world.tasks.done)


@pytest.mark.slow
async def test_a_worker_that_stops_leaves_its_permits_to_others_at_once() -> None:
    world = World(slots=50, duration=lambda _delivery: 1.0, workers=2)
    first, second = world.members
    async with world.running():
        await world.submit("a", 5_000, limit=40)
        await world.clock.advance(20)
        assert first.policy.held + second.policy.held == 40
        first.dispatcher.stop()
        await world.clock.advance(1.5)
        assert first.policy.held == 0
        await world.clock.advance(8)
        assert second.policy.held == 40


async def test_permits_that_nothing_uses_go_back() -> None:
    world = World(slots=50, duration=lambda _delivery: 1.0)
    async with world.running():
        await world.submit("a", 30, limit=30)
        await world.clock.advance(0.5)
        assert world.granted("a") == 30
        await world.clock.advance(5)
        assert len(world.tasks.done) == 30
        assert world.granted("a") <= 1


async def test_a_refused_worker_asks_less_and_less_often() -> None:
    world = World(slots=10, duration=lambda _delivery: 1.0, ledger=BrokenLedger)
    assert await world.take("a", 10, limit=10)
    async with world.running():
        await world.submit("a", 10, limit=10)
        await world.clock.advance(60)
        assert world.received() == 0
        assert 5 <= world.broken.calls <= 30


async def test_permits_are_kept_while_the_ledger_is_away_for_a_short_time() -> None:
    world = World(slots=20, duration=lambda _delivery: 2.0, ledger=BrokenLedger)
    async with world.running():
        await world.submit("a", 1_000, limit=20)
        await world.clock.advance(21)
        world.broken.away = lambda _request: True
        before = len(world.tasks.done)
        await world.clock.advance(15)
        world.broken.away = lambda _request: False
        assert len(world.tasks.done) - before >= 120
        await world.clock.advance(20)
        assert world.telemetry.counts["fenced"] == 0


@pytest.mark.parametrize("gap", [0.0, 0.3, 2.0, 8.0])
async def test_a_lane_that_comes_back_is_worked_within_a_second(gap: float) -> None:
    """For the mistake of numbering calls by lease: the ledger remembers more than a new lease does,
    and takes all its calls for late ones until the lease is over."""
    world = World(slots=20, duration=spread_out)
    async with world.running():
        run = await world.submit("a", 5_000, limit=10)
        await world.clock.advance(10)
        await world.dispatcher.close_lane("a")
        await world.clock.advance(3.5 + gap)
        assert world.tasks.in_flight["run-a"] == 0
        world.dispatcher.open_lane(run)
        await world.clock.advance(1)
        assert world.tasks.in_flight["run-a"] == 10


async def test_an_evicted_lane_is_worked_within_a_second_of_its_coming_back() -> None:
    world = World(slots=20, duration=lambda _delivery: 0.5)
    async with world.running():
        run = await world.submit("a", 200, limit=10)
        await world.clock.advance(20)
        await world.dispatcher.evict_lanes(empty_for=5)
        await world.clock.advance(5)
        assert world.dispatcher.lanes.get("a") is None
        world.rows["a"] = [(index, task_id("a", index)) for index in range(200, 210)]
        await world.queues.send_tasks(run.job_id, "a", world.rows["a"])
        world.dispatcher.open_lane(run)
        await world.clock.advance(1)
        assert len(world.tasks.done) == 210


async def test_a_rerun_is_worked_within_a_second() -> None:
    """The next run of a job whose lease went with the lane of the run before."""
    world = World(slots=20, duration=lambda _delivery: 0.5)
    async with world.running():
        await world.submit("a", 200, limit=10)
        await world.clock.advance(12)
        assert len(world.tasks.done) == 200
        await world.dispatcher.close_lane("a")
        await world.clock.advance(2)
        await world.submit("again", 10, limit=10, job="a")
        await world.clock.advance(1)
        assert len(world.tasks.done) == 210


async def test_a_refused_renewal_ends_the_calls_at_once_and_the_next_grant_is_used() -> None:
    """For the mistakes of taking only a refused giving-back for a loss (`count < before`), and of
    never forgetting one (`forfeit` that keeps `lost`)."""
    world = World(slots=10, duration=lambda _delivery: 1_000.0, ledger=BrokenLedger)
    world.broken.rate = 0.5
    async with world.running():
        await world.submit("a", 10, limit=10)
        await world.clock.advance(1)
        world.broken.away = lambda request: request.before == 10
        await world.clock.advance(LEASE / 2)
        assert world.tasks.in_flight["run-a"] == 10
        assert await world.take("a", 10, limit=10)
        world.broken.away = lambda _request: False
        await world.clock.advance(2)
        assert world.tasks.in_flight["run-a"] == 0
        world.broken.rate = 1.0
        assert await world.leave("a", limit=10)
        await world.clock.advance(10)
        assert world.tasks.in_flight["run-a"] == 10
        assert world.telemetry.counts["fenced"] == 10


async def test_permits_are_renewed_twice_as_often_where_others_hold_some() -> None:
    """For the mistake of one pace for workers alone and in company."""
    calls = []
    for workers in (1, 2):
        world = World(
            slots=40, duration=lambda _delivery: 1_000.0, workers=workers, ledger=BrokenLedger
        )
        async with world.running():
            await world.submit("a", 100, limit=80)
            await world.clock.advance(20)
            assert all(member.policy.held for member in world.members)
            before = world.broken.calls
            await world.clock.advance(60)
            calls.append(world.broken.calls - before)
    assert 5 <= calls[0] <= 6
    assert 2 * 10 <= calls[1] <= 2 * 12


async def test_receives_under_way_count_as_buffered() -> None:
    """For the mistake of filling the buffer without regard to what was asked for already."""
    world = World(slots=50, duration=spread_out)
    world.queues.receive_time = 0.5
    most = 0
    async with world.running():
        await world.submit("a", 3_000, limit=50)
        for _ in range(400):
            await world.clock.advance(0.1)
            lane = world.dispatcher.lanes.get("a")
            assert lane is not None
            most = max(most, len(lane.buffer) + lane.refilling)
    assert FULL_BATCH <= most <= BUFFER


async def test_permits_that_could_not_be_given_back_are_given_back_later() -> None:
    """For the mistake of forgetting a lease before the ledger knows of its end."""
    world = World(slots=10, duration=lambda _delivery: 1.0, ledger=BrokenLedger)
    async with world.running():
        await world.submit("a", 10, limit=10)
        await world.clock.advance(0.5)
        world.broken.away = lambda _request: True
        await world.dispatcher.close_lane("a")
        await world.clock.advance(3)
        assert world.dispatcher.lanes.get("a") is None
        assert world.granted("a") == 10
        world.broken.away = lambda _request: False
        await world.clock.advance(2)
        assert world.granted("a") == 0
