"""The policies that receive first: the messages that each gate lets through, and the cost of a
bounce."""

from __future__ import annotations

from typing import Any

import pytest

from conveyor.engine.planner import Polling
from conveyor.ports.permits import Permits
from conveyor.ports.queues import DEAD_LETTER_QUEUE
from conveyor.simulation.permits import AtomicLeaseRows, LeaseRows
from conveyor.simulation.policies import Bounces
from conveyor.testing.clock import FakeClock
from tests.unit.dispatch_world import BrokenLedger, World

POLLERS = Polling(batch=1, wait=0.0, pause=0.05, pause_cap=0.05)
BRIEF = Bounces(first=0.2, longest=0.2, cooldown=0.0)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


def slow_rows(_permits: Permits, clock: FakeClock) -> Permits:
    """A ledger whose every call takes a while, so that pollers pass the gate together."""

    async def pause() -> None:
        await clock.sleep(0.005)

    return AtomicLeaseRows(LeaseRows(clock, pause))


def world(policy: str, bounces: Bounces) -> World:
    """Twenty pollers of one worker."""
    return World(
        slots=20,
        duration=lambda _delivery: 0.5,
        polling=POLLERS,
        ledger=slow_rows,
        permit_policy=policy,
        bounces=bounces,
    )


async def bounces(policy: str) -> int:
    """Bounces of forty messages under a limit of four."""
    it = world(policy, BRIEF)
    async with it.running():
        await it.submit("a", 40, limit=4)
        await it.clock.advance(30)
        assert len(it.tasks.done) == 40
    assert it.tasks.peak["run-a"] == 4
    assert it.received() == 40 + it.bounced()
    return it.bounced()


@pytest.mark.slow
async def test_the_tighter_the_gate_the_fewer_bounces_and_every_one_keeps_the_limit() -> None:
    assert await bounces("local-exact") == 0
    assert 0 < await bounces("local") < await bounces("off")


async def asked_in_one_burst(policy: str) -> int:
    """Messages received at once by twenty pollers under a limit of four, nothing being done yet."""
    it = world(policy, Bounces(first=60.0, longest=60.0, cooldown=0.0))
    async with it.running():
        await it.submit("a", 40, limit=4)
        await it.clock.advance(0.4)
        assert it.tasks.in_flight["run-a"] == 4
        received = it.received()
    return received


async def test_pollers_pass_the_local_gate_together_and_the_exact_one_never() -> None:
    """`local` checks first and counts later; `local-exact` counts what it asks for."""
    assert await asked_in_one_burst("local-exact") == 4
    assert await asked_in_one_burst("local") > 4


@pytest.mark.slow
async def test_a_bounced_message_is_hidden_twice_as_long_each_time_up_to_the_cap() -> None:
    it = World(
        slots=1,
        duration=lambda _delivery: 0.1,
        polling=POLLERS,
        permit_policy="off",
        bounces=Bounces(first=5.0, longest=20.0, cooldown=0.0),
    )
    assert await it.take("a", 1, limit=1)
    received_at = []
    async with it.running():
        await it.submit("a", 1, limit=1)
        for second in range(100):
            before = it.received()
            await it.clock.advance(1)
            if it.received() > before:
                received_at.append(second)
    waits = [later - earlier for earlier, later in zip(received_at, received_at[1:], strict=False)]
    assert waits[:4] == [5, 10, 20, 20]


async def test_a_queue_rests_after_a_refused_permit() -> None:
    it = World(
        slots=20,
        duration=lambda _delivery: 0.5,
        polling=POLLERS,
        permit_policy="off",
        bounces=Bounces(first=0.0, longest=0.0, cooldown=2.0),
    )
    assert await it.take("a", 1, limit=1)
    async with it.running():
        await it.submit("a", 1, limit=1)
        await it.clock.advance(20.5)
        assert 8 <= it.received() <= 14


async def test_permits_of_long_calls_are_renewed_and_given_back() -> None:
    it = World(slots=4, duration=lambda _delivery: 100.0, permit_policy="local-exact")
    async with it.running():
        await it.submit("a", 4, limit=4)
        await it.clock.advance(99)
        assert it.granted("a") == 4
        await it.clock.advance(5)
        assert len(it.tasks.done) == 4
        assert it.granted("a") == 0


async def test_a_stopped_worker_leaves_no_permit_behind() -> None:
    it = World(slots=4, duration=lambda _delivery: 1_000.0, permit_policy="local")
    async with it.running():
        await it.submit("a", 4, limit=4)
        await it.clock.advance(1)
        assert it.granted("a") == 4
    assert it.granted("a") == 0


async def test_a_permit_on_its_way_back_is_not_renewed() -> None:
    """For the mistake of renewing without regard to what is being given back: a renewal that comes
    first would turn the giving back away as a late call."""
    it = World(
        slots=4,
        duration=lambda _delivery: 8.5,
        permit_policy="local-exact",
        ledger=BrokenLedger,
    )
    it.broken.there = 1.0
    async with it.running():
        await it.submit("a", 4, limit=4)
        await it.clock.advance(15)
        assert len(it.tasks.done) == 4
    for number in range(1, 5):
        counts = [call.count for call in it.broken.asked if call.holder == f"w0/{number}"]
        assert counts == [1, 0]
    assert it.granted("a") == 0


async def test_what_is_cut_off_on_its_way_back_is_given_back_at_the_end() -> None:
    """For the mistake of a release that gives nothing back: with the grace over, the giving back
    of each message's permit is cancelled along with its work."""
    it = World(
        slots=4, duration=lambda _delivery: 1_000.0, permit_policy="local", ledger=BrokenLedger
    )
    it.broken.there = 0.5
    async with it.running():
        await it.submit("a", 4, limit=4)
        await it.clock.advance(2)
        assert it.granted("a") == 4
    assert it.granted("a") == 0


@pytest.mark.slow
async def test_bouncing_makes_no_dead_letters() -> None:
    it = World(
        slots=10,
        duration=lambda _delivery: 1.0,
        polling=POLLERS,
        permit_policy="off",
        redrive=5,
        max_receives=5,
        bounces=BRIEF,
    )
    async with it.running():
        await it.submit("a", 30, limit=1)
        await it.clock.advance(60)
        assert sorted(set(it.tasks.done)) == [task for _, task in it.rows["a"]]
    assert it.bounced() > 5 * 30
    assert it.queues.depth(DEAD_LETTER_QUEUE) == 0
