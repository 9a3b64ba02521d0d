"""The fence: no permit is used when the ledger may give it away.

Every mistake that a docstring names makes its test fail when it is put back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from conveyor.engine.telemetry import LOOK
from conveyor.settings import InvalidSetting, load
from tests.unit.dispatch_world import BrokenLedger, World

LEASE = 30.0
LATE = 0.2
"""Seconds before the end of a lease by which calls have ended, for a tick may come late."""


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.slow
@pytest.mark.parametrize("lease", [5.0, 5.1, 6.0, 7.3, 9.0, 9.9, 10.0, 11.0, 20.0, 30.0, 120.0])
async def test_no_call_outlives_a_lease_long_or_short(lease: float) -> None:
    """For the mistakes of a fence without its share of the lease (`FENCE_SHARE = 0.0`), or without
    its least (`FENCE_LEAST = 0.0`): the ledger's clock is a twentieth faster here."""
    for phase in (0.0, 0.06, 0.13, 0.19, 0.24):
        world = World(
            slots=10,
            duration=lambda _delivery: 10_000.0,
            ledger=BrokenLedger,
            permit_lease=lease,
            heartbeat=lease / 3,
        )
        world.broken.rate = 0.95
        async with world.running():
            await world.clock.advance(4 * LOOK + phase)
            await world.submit("a", 10, limit=10)
            await world.clock.advance(0.01)
            world.broken.away = lambda _holding: True
            await world.clock.advance(0.75 * lease)
            assert world.tasks.in_flight["run-a"] == 10
            ends = world.broken.granted_at + 0.95 * lease
            await world.clock.advance(ends - LATE - world.clock.monotonic())
            assert world.tasks.in_flight["run-a"] == 0
            assert world.granted("a") == 10
            await world.clock.advance(LATE + 0.01)
            assert world.granted("a") == 0


@pytest.mark.slow
@pytest.mark.parametrize("lease", [5.0, 7.0, 10.0, 30.0])
async def test_a_ledger_in_good_health_fences_nothing_whatever_the_lease(lease: float) -> None:
    """For the mistake of a fence that leaves no time to renew."""
    world = World(
        slots=10,
        duration=lambda _delivery: 20 * lease,
        ledger=BrokenLedger,
        permit_lease=lease,
        heartbeat=lease / 3,
    )
    world.broken.there = world.broken.back = 0.3
    async with world.running():
        await world.submit("a", 10, limit=10)
        await world.clock.advance(20 * lease + 3)
        assert len(world.tasks.done) == 10
    assert world.telemetry.counts["fenced"] == 0


def test_a_lease_too_short_to_be_fenced_in_time_is_refused() -> None:
    """The shortest that is allowed is the shortest of those above."""
    assert load({"CONVEYOR_PERMIT_LEASE": "5"}).permit_lease == 5.0
    with pytest.raises(InvalidSetting, match="at least 5"):
        load({"CONVEYOR_PERMIT_LEASE": "4.9"})


async def test_a_grant_counts_from_the_moment_before_its_call() -> None:
    """For the mistake of reading the clock when the answer is there."""
    world = World(slots=10, duration=lambda _delivery: 1_000.0, ledger=BrokenLedger)
    world.broken.back = 4.0
    async with world.running():
        await world.submit("a", 10, limit=10)
        await world.clock.advance(5)
        assert world.tasks.in_flight["run-a"] == 10
        world.broken.away = lambda _holding: True
        await world.clock.advance(world.broken.granted_at + LEASE - world.clock.monotonic())
        assert world.granted("a") == 0
        assert world.tasks.in_flight["run-a"] == 0
        assert world.telemetry.counts["fenced"] == 10


async def test_a_message_that_comes_behind_the_fence_is_not_admitted() -> None:
    """For the mistake of trusting the tick alone: a process that was stopped may find a message
    before its next one."""
    world = World(slots=10, duration=lambda _delivery: 1.0)
    policy = world.members[0].policy
    await world.submit("a", 1, limit=10)
    lane = world.dispatcher.lanes.get("a")
    assert lane is not None
    await policy.acquire(lane, 10)
    lane.busy = 1
    [delivery] = await world.queues.receive("run-a", limit=1, visibility=60.0)
    await world.clock.advance(0.89 * LEASE)
    assert await policy.admit(lane, delivery) == delivery.receipt
    await world.clock.advance(0.02 * LEASE)
    assert await policy.admit(lane, delivery) is None


async def test_what_is_given_up_while_a_renewal_is_out_stays_given_up() -> None:
    """For the mistake of taking the count of a grant for what there is (`permits = max(permits,
    count)`)."""
    world = World(slots=10, duration=lambda _delivery: 1.0, ledger=BrokenLedger)
    policy = world.members[0].policy
    await world.submit("a", 10, limit=10)
    lane = world.dispatcher.lanes.get("a")
    assert lane is not None
    await policy.acquire(lane, 10)
    lane.busy = 10
    async with anyio.create_task_group() as group:

        def spawn(act: Callable[[], Awaitable[None]]) -> None:
            async def run() -> None:
                await act()

            group.start_soon(run)

        world.broken.back = 1.0
        await world.clock.advance(10)
        policy.tend(world.clock.monotonic(), spawn)
        lane.busy = 4
        for _ in range(3):
            await world.clock.advance(LOOK)
            policy.tend(world.clock.monotonic(), spawn)
        assert policy.held == 4
        await world.clock.advance(1)
        assert policy.held == 4
        policy.tend(world.clock.monotonic(), spawn)
        await world.clock.advance(1)
    assert world.granted("a") == 4
