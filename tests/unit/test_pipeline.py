"""The pipeline around the slots, in virtual time: claims that wait for a slot, and answers that are
settled beside it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import pytest

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.engine.dispatcher import PERMITS_TOGETHER
from conveyor.engine.lanes import Lane
from conveyor.engine.pipeline import AHEAD_AGE, AHEAD_SPAN, Pace
from conveyor.engine.telemetry import LOOK
from conveyor.ports.handler import (
    ACKNOWLEDGE,
    Held,
    Outcome,
    ResultLost,
    StagedHandler,
    Throttled,
)
from conveyor.ports.queues import Delivery
from conveyor.testing.clock import FakeClock
from tests.unit.dispatch_world import BrokenLedger, Work, World

SLOTS = 10
AT_ONCE = 20
STORE = 0.002
"""Seconds that a claim takes."""


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@dataclass(eq=False)
class Hold(Held):
    """A claimed message."""

    delivery: Delivery


class StagedWork(Work, StagedHandler):
    """A handler in stages that keeps count: of the claims that wait, of the answers that are not
    settled, and of when calls began."""

    def __init__(
        self, clock: FakeClock, duration: Callable[[Delivery], float], *, at_once: int = AT_ONCE
    ) -> None:
        super().__init__(clock, duration)
        self.at_once = at_once
        self.is_gathering = False
        self.hurried_at: list[float] = []
        self.settling = 0.0
        self.waiting: set[Hold] = set()
        self.most_waiting = 0
        self.unsettled = 0
        self.most_unsettled = 0
        self.began_at: list[tuple[str, float]] = []
        self.undone: list[Delivery] = []
        self.settled: list[int] = []
        self.trouble: Callable[[Delivery], Exception | None] = lambda _delivery: None

    @property
    def claims_at_once(self) -> int:
        return self.at_once

    @property
    def gathers(self) -> bool:
        return self.is_gathering

    def hurry(self) -> None:
        self.hurried_at.append(self.clock.monotonic())

    async def claim(self, deliveries: Sequence[Delivery]) -> list[Held | Outcome | None]:
        await self.clock.sleep(STORE)
        assert len(deliveries) <= self.at_once
        held = [Hold(delivery) for delivery in deliveries]
        self.waiting.update(held)
        # Those that a slot takes at once do not wait.
        calls = self.in_flight["all calls"]
        self.most_waiting = max(self.most_waiting, len(self.waiting) - (SLOTS - calls))
        return list(held)

    async def begin(
        self, delivery: Delivery, throttled: Throttled, held: Held | None
    ) -> Held | Outcome:
        if isinstance(held, Hold):
            self.waiting.remove(held)
        self.began_at.append((delivery.queue, self.clock.monotonic()))
        self.in_flight["all calls"] += 1
        self.peak["all calls"] = max(self.peak["all calls"], self.in_flight["all calls"])
        try:
            outcome = await self.handle(delivery, throttled)
        finally:
            self.in_flight["all calls"] -= 1
        if outcome != ACKNOWLEDGE:
            return outcome
        self.unsettled += 1
        return Hold(delivery)

    async def settle(self, answered: Sequence[Held]) -> list[Outcome | Exception]:
        self.most_unsettled = max(self.most_unsettled, self.unsettled)
        await self.clock.sleep(self.settling)
        self.unsettled -= len(answered)
        self.settled.append(len(answered))
        return [
            self.trouble(held.delivery) or ACKNOWLEDGE
            for held in answered
            if isinstance(held, Hold)
        ]

    async def undo(self, held: Sequence[Held]) -> None:
        for one in held:
            assert isinstance(one, Hold)
            self.waiting.discard(one)
            self.undone.append(one.delivery)
        await self.clock.sleep(STORE)


def staged_world(
    seconds: float, *, at_once: int = AT_ONCE, **options: Any
) -> tuple[World, StagedWork]:
    """A world whose calls take so long."""
    work = partial(StagedWork, at_once=at_once)
    world = World(slots=SLOTS, duration=lambda _delivery: seconds, work=work, **options)
    assert isinstance(world.tasks, StagedWork)
    return world, world.tasks


def calls_within(work: StagedWork, span: float) -> int:
    """The most calls that began within any span of so many seconds."""
    moments = sorted(moment for _, moment in work.began_at)
    return max(sum(first <= moment <= first + span for moment in moments) for first in moments)


# -- claims ahead --


@pytest.mark.guarantee("G5")
async def test_short_calls_have_claims_waiting_within_every_bound() -> None:
    world, work = staged_world(0.01)
    async with world.running():
        await world.submit("a", 600)
        await world.clock.advance(5)
    assert len(work.done) == len(set(work.done)) == 600
    assert work.peak["all calls"] == SLOTS
    assert 0 < work.most_waiting <= min(SLOTS, calls_within(work, AHEAD_SPAN))


async def test_calls_of_seconds_have_no_claim_waiting() -> None:
    world, work = staged_world(1.0)
    async with world.running():
        await world.submit("a", 100)
        await world.clock.advance(15)
    assert len(work.done) == 100
    assert work.most_waiting == 0


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("limit", [1, 3, 12])
async def test_a_claim_that_waits_has_its_permit(limit: int) -> None:
    world, work = staged_world(0.01)
    most = 0

    async def look() -> None:
        nonlocal most
        most = max(most, len(work.waiting) + work.in_flight["all calls"] + work.unsettled)

    async with world.running():
        await world.submit("a", 200, limit=limit)
        for _ in range(800):
            await world.clock.advance(0.005)
            await look()
    assert len(work.done) == 200
    assert 0 < most <= limit


async def test_an_urgent_run_waits_for_nobody() -> None:
    """A fast run is worked; a run of the highest priority comes, and is called for at once."""
    world, work = staged_world(0.01)
    async with world.running():
        await world.submit("fast", 2_000)
        await world.clock.advance(0.5)
        assert work.most_waiting > 0
        came = world.clock.monotonic()
        await world.submit("urgent", 20, priority=9)
        await world.clock.advance(0.5)
        urgent = [moment for queue, moment in work.began_at if queue == "run-urgent"]
    assert len(urgent) == 20
    assert urgent[0] - came < AHEAD_SPAN
    assert urgent[-1] - came < 2 * AHEAD_SPAN


async def test_claims_go_back_when_calls_become_slow() -> None:
    """Tasks claimed for short calls must not wait behind long ones, and keep others out."""
    world, work = staged_world(0.01)
    async with world.running():
        await world.submit("a", 600)
        await world.clock.advance(0.5)
        work.duration = lambda _delivery: 10.0
        await world.clock.advance(0.2)
        assert work.waiting
        await world.clock.advance(AHEAD_AGE + 2 * LOOK)
        assert not work.waiting
        assert work.undone
        await world.submit("urgent", 1, priority=9)
        work.duration = lambda _delivery: 0.01
        await world.clock.advance(10.0)
        urgent = [moment for queue, moment in work.began_at if queue == "run-urgent"]
        assert len(urgent) == 1
        await world.clock.advance(20.0)
    assert len(work.done) == len(set(work.done)) == 601


def test_only_calls_that_began_and_ended_just_now_let_claims_wait() -> None:
    pace = Pace(slots=3, claims_at_once=10)
    pace.ended(began=0.0, now=1.0)
    assert pace.allowance(1.0) == 0
    for number in range(5):
        pace.ended(began=1.0 + number / 1_000, now=1.01 + number / 1_000)
    assert pace.allowance(1.02) == 3
    assert pace.allowance(1.02 + AHEAD_SPAN) == 0


async def test_the_runs_of_a_worker_share_its_claims() -> None:
    world, work = staged_world(0.01)
    async with world.running():
        await world.submit("a", 1_000)
        await world.submit("b", 1_000)
        await world.clock.advance(0.6)
        counts = [sum(queue == f"run-{name}" for queue, _ in work.began_at) for name in "ab"]
    assert min(counts) > 0.4 * sum(counts)


# -- claims that wait are reached --


async def busy_world(limit: int = 100, **options: Any) -> tuple[World, StagedWork]:
    """A world with a fast run, whose next calls take very long: its claims are kept waiting."""
    world, work = staged_world(0.01, **options)
    await world.submit("a", 2_000, limit=limit)
    return world, work


async def make_wait(world: World, work: StagedWork) -> int:
    """Let claims wait for slots that do not come free; return the number of calls so far."""
    await world.clock.advance(0.5)
    work.duration = lambda _delivery: 1_000.0
    await world.clock.advance(0.05)
    assert work.waiting
    assert work.in_flight["all calls"] == SLOTS
    return len(work.began_at)


async def came_back(world: World, work: StagedWork) -> bool:
    """Return whether every message whose claim was undone can be received again."""
    again: set[object] = set()
    while batch := await world.queues.receive("run-a", limit=10, visibility=600.0):
        again.update(delivery.message for delivery in batch)
    return {delivery.message for delivery in work.undone} <= again


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("how", ["halted", "closed"])
async def test_a_run_that_may_not_be_worked_has_no_claim_called_for(how: str) -> None:
    world, work = await busy_world()
    async with world.running():
        called = await make_wait(world, work)
        waited = len(work.waiting)
        work.duration = lambda _delivery: 0.0
        if how == "halted":
            world.dispatcher.halt("a")
        else:
            await world.dispatcher.close_lane("a")
        await world.clock.advance(1.0)
        assert not work.waiting
        assert len(work.undone) >= waited
        assert len(work.began_at) == called
        assert await came_back(world, work)


@pytest.mark.guarantee("G5")
async def test_the_fence_reaches_claims_that_wait() -> None:
    world, work = await busy_world(ledger=BrokenLedger)
    async with world.running():
        await make_wait(world, work)
        world.broken.away = lambda _request: True
        # The claims are kept from ageing, so that the fence alone can reach them.
        for _ in range(140):
            for message in world.dispatcher._ready:
                message.since = world.clock.monotonic()
            await world.clock.advance(LOOK)
        assert not work.waiting
        assert work.in_flight["all calls"] == 0
        assert work.undone


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["claims that wait", "answers that are not settled"])
async def test_renewals_cover_what_is_in_hand_before_and_after_its_call(kind: str) -> None:
    world, work = await busy_world()
    renewed: set[str] = set()
    change = world.queues.change_visibility

    async def watched(queue: str, receipts: Sequence[str], *, visibility: float) -> None:
        if visibility == 60.0:
            renewed.update(receipts)
        await change(queue, receipts, visibility=visibility)

    async with world.running():
        if kind == "claims that wait":
            await make_wait(world, work)
        else:
            await world.clock.advance(0.5)
            work.settling = 5.0
            await world.clock.advance(0.1)
        waiting, unsettled = len(work.waiting), work.unsettled
        in_hand = waiting + unsettled + work.in_flight["all calls"]
        world.queues.change_visibility = watched  # type: ignore[method-assign]
        for one in world.dispatcher._working.values():
            one.hidden_at -= 31.0
        world.dispatcher.renew()
        await world.clock.advance(0.001)
        world.queues.change_visibility = change  # type: ignore[method-assign]
        work.settling = 0.0
        await world.clock.advance(10.0)
    assert waiting if kind == "claims that wait" else unsettled
    assert len(renewed) == in_hand


@pytest.mark.guarantee("G7")
@pytest.mark.parametrize("at_once", [1, AT_ONCE])
async def test_a_stop_settles_what_was_answered_and_undoes_what_was_only_claimed(
    at_once: int,
) -> None:
    """The grace is over before the settlements, which take longer than it."""
    world, work = staged_world(0.01, at_once=at_once)
    async with world.running():
        await world.submit("a", 2_000)
        await world.clock.advance(0.5)
        work.settling = 10.0
        await world.clock.advance(0.5)
        called = len(work.began_at)
        assert work.unsettled > 0
        world.dispatcher.stop()
        await world.clock.advance(30.0)
        assert work.unsettled == 0
        assert not work.waiting
        assert len(work.began_at) == called
        assert len(work.done) + work.cancelled == called
        assert world.granted("a") == 0
        assert await came_back(world, work)


# -- settlements beside the slots --


async def test_messages_whose_claims_are_cut_off_by_the_stop_go_back() -> None:
    world, work = staged_world(0.01)

    async def hang(deliveries: Sequence[Delivery]) -> list[Held | Outcome | None]:
        await world.clock.sleep(1_000.0)
        raise AssertionError("the worker has long ended")

    work.claim = hang  # type: ignore[method-assign]
    async with world.running():
        await world.submit("a", 40)
        await world.clock.advance(0.5)
        assert world.telemetry.counts["deliveries"] > 0

    again = []
    while batch := await world.queues.receive("run-a", limit=10, visibility=60.0):
        again += batch
    assert len(again) == 40
    assert world.granted("a") == 0


@pytest.mark.parametrize("at_once", [1, AT_ONCE])
async def test_a_slot_ends_with_its_call(at_once: int) -> None:
    """Settlements take as long as calls: were they made in the slots, it would take twice as
    long."""
    world, work = staged_world(1.0, at_once=at_once)
    work.settling = 0.9
    async with world.running():
        await world.submit("a", 10 * SLOTS)
        await world.submit("b", 10 * SLOTS)
        began = world.clock.monotonic()
        await world.clock.advance(40.0)
    assert len(work.done) == 20 * SLOTS
    assert max(work.finished_at.values()) - began < 30.0
    assert work.peak["all calls"] == SLOTS


@pytest.mark.guarantee("G5")
async def test_a_permit_ends_with_its_call_where_answers_are_gathered() -> None:
    """Were the permits of what waits in use, three calls of a hundredth of a second would begin
    each third of a second. Calls beyond the limit never are."""
    world, work = staged_world(0.01, at_once=1)
    work.is_gathering, work.settling = True, 0.3
    async with world.running():
        await world.submit("a", 100, limit=3)
        await world.clock.advance(5.0)
        assert len(work.done) == 100
        assert work.peak["all calls"] == 3
        assert 3 < work.most_unsettled <= SLOTS + 3
        await world.dispatcher.close_lane("a")
        await world.clock.advance(1.0)
        assert world.granted("a") == 0
        assert not list(world.dispatcher.lanes)


async def test_permits_of_answers_that_are_gathered_come_back_together() -> None:
    """Came each back by itself, each would be asked one message for."""
    world, work = staged_world(0.0, at_once=1)
    work.is_gathering, work.settling = True, 0.3
    durations = itertools.cycle(0.11 + number / 100 for number in range(SLOTS))
    work.duration = lambda _delivery: next(durations)
    moments: list[float] = []
    policy = world.members[0].policy
    discharge = policy.discharge

    async def noted(lane: Lane, permit: str) -> None:
        moments.append(round(world.clock.monotonic() / PERMITS_TOGETHER, 3))
        await discharge(lane, permit)

    policy.discharge = noted  # type: ignore[method-assign]
    async with world.running():
        await world.submit("a", 100)
        await world.clock.advance(10.0)
    assert len(work.done) == len(moments) == 100
    assert all(moment.is_integer() for moment in moments)
    assert len(set(moments)) < 50


@pytest.mark.guarantee("G5")
async def test_a_lane_stays_while_answers_of_it_are_gathered() -> None:
    world, work = staged_world(0.01, at_once=1)
    work.is_gathering, work.settling = True, 5.0
    async with world.running():
        await world.submit("a", 5)
        await world.clock.advance(1.0)
        [lane] = world.dispatcher.lanes
        assert (lane.busy - lane.probing, lane.kept) == (0, 5)
        await world.dispatcher.close_lane("a")
        assert list(world.dispatcher.lanes) == [lane]
        await world.clock.advance(5.0)
        assert lane.kept == lane.unsettled == 0
        assert not list(world.dispatcher.lanes)
    assert len(work.done) == 5


async def test_a_stop_tells_the_handler_before_anything_is_given_up() -> None:
    world, work = staged_world(1.0, at_once=1)
    async with world.running():
        await world.submit("a", 5)
        await world.clock.advance(0.5)
        assert not work.hurried_at
        world.dispatcher.stop()
        assert work.hurried_at == [world.clock.monotonic()]
        await world.clock.advance(2.0)


@pytest.mark.parametrize("at_once", [1, AT_ONCE])
async def test_no_more_answers_wait_than_there_are_slots(at_once: int) -> None:
    world, work = staged_world(0.01, at_once=at_once)
    work.settling = 5.0
    async with world.running():
        await world.submit("a", 500, limit=500)
        await world.clock.advance(20.0)
        # A slot that cannot hand over is held by its own answer.
        assert work.most_unsettled <= 2 * SLOTS
        assert sum(work.settled) <= SLOTS * 4
        work.settling = 0.0
        await world.clock.advance(30.0)
    assert len(work.done) == 500


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("moment", [0.3, 0.45, 0.65, 0.9])
@pytest.mark.parametrize(("at_once", "gathers"), [(1, False), (1, True), (AT_ONCE, False)])
async def test_a_stop_settles_the_answers_that_keep_their_slots(
    at_once: int, gathers: bool, moment: float
) -> None:
    """They are paid for. As nothing begins any more, they need not wait for room either."""
    world, work = staged_world(0.2, at_once=at_once)
    work.is_gathering, work.settling = gathers, 0.4
    async with world.running():
        await world.submit("a", 100)
        await world.clock.advance(moment)
        world.dispatcher.stop()
        await world.clock.advance(0.2 + 2 * 0.4 + 0.05)
        assert sum(work.settled) == len(work.done) == len(work.began_at)
        assert not world.dispatcher.has_work
        assert not world.dispatcher.unsettled
    assert world.granted("a") == 0


async def test_a_loop_that_is_cancelled_settles_its_answers_and_begins_nothing() -> None:
    world, work = staged_world(0.01)
    async with anyio.create_task_group() as group:
        group.start_soon(partial(world.dispatcher.run, grace=1.0))
        await world.submit("a", 2_000)
        await world.clock.advance(0.5)
        work.settling = 0.05
        await world.clock.advance(0.5)
        called = len(work.began_at)
        assert work.unsettled > 0
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await world.clock.advance(5.0)
    assert work.unsettled == 0
    assert len(work.began_at) == called


async def test_answers_in_hand_are_counted_until_they_are_settled() -> None:
    """With those that keep their slots: a worker that has any is not to be replaced."""
    world, work = staged_world(0.01, at_once=1)
    work.is_gathering, work.settling = True, 5.0
    async with world.running():
        assert world.dispatcher.unsettled == 0
        await world.submit("a", 100)
        await world.clock.advance(2.0)
        assert world.dispatcher.unsettled == 2 * SLOTS
        work.settling = 0.0
        await world.clock.advance(20.0)
        assert world.dispatcher.unsettled == 0
    assert len(work.done) == 100


@pytest.mark.guarantee("G5")
async def test_what_a_stopping_worker_has_in_hand_is_renewed_to_its_end() -> None:
    """No slot is left, but others must not work it meanwhile."""
    world, work = staged_world(0.01, at_once=1, workers=2)
    work.is_gathering, work.settling = True, 200.0
    async with world.running():
        await world.submit("a", 2 * SLOTS)
        await world.clock.advance(1.0)
        in_hand = world.dispatcher.unsettled
        assert in_hand > 0
        world.dispatcher.stop()
        await world.clock.advance(150.0)
        assert world.dispatcher.unsettled == in_hand
        await world.clock.advance(60.0)
        assert world.dispatcher.unsettled == 0
    assert len(work.done) == world.received() == 2 * SLOTS


async def test_answers_are_settled_together() -> None:
    world, work = staged_world(0.01)
    work.settling = 0.01
    async with world.running():
        await world.submit("a", 500)
        await world.clock.advance(5.0)
    assert len(work.done) == 500
    assert len(work.settled) < 500 / 3


@pytest.mark.parametrize(("at_once", "gathers"), [(1, False), (AT_ONCE, False), (1, True)])
async def test_a_settlement_that_fails_is_tried_again(at_once: int, gathers: bool) -> None:
    world, work = staged_world(0.01, at_once=at_once)
    work.is_gathering = gathers
    failures = 3

    def away(_delivery: Delivery) -> Exception | None:
        nonlocal failures
        failures -= 1
        return ConveyorError(ErrorCode.UNAVAILABLE, "away") if failures >= 0 else None

    work.trouble = away
    async with world.running():
        await world.submit("a", 1)
        await world.clock.advance(60.0)
        assert world.granted("a") <= 1
    assert len(work.began_at) == 4
    pauses = [
        after - before
        for (_, before), (_, after) in zip(work.began_at, work.began_at[1:], strict=False)
    ]
    assert [round(pause) for pause in pauses] == [2, 4, 8]
    # Without its permit a message is not in hand: it is hidden for as long.
    assert world.telemetry.counts["deliveries"] == (4 if gathers else 1)
    assert world.telemetry.counts["bounces"] == (3 if gathers else 0)


@pytest.mark.parametrize(
    "error", [ResultLost(ErrorCode.UNAVAILABLE, "no room"), KeyError("broken")], ids=repr
)
async def test_a_body_that_is_lost_and_a_handler_that_breaks_hide_their_own_message(
    error: Exception,
) -> None:
    world, work = staged_world(0.01)
    broken: list[Delivery] = []

    def trouble(delivery: Delivery) -> Exception | None:
        if broken and delivery.message != broken[0].message:
            return None
        broken.append(delivery)
        return error if len(broken) == 1 else None

    work.trouble = trouble
    async with world.running():
        await world.submit("a", 50)
        await world.clock.advance(1.5)
        assert len(work.began_at) == 50
        await world.clock.advance(5.0)
        assert len(work.began_at) == 51
    assert world.telemetry.counts["bounces"] == 1
    assert world.telemetry.counts["deliveries"] == 51


async def test_waiting_work_behind_a_cap_costs_no_turns() -> None:
    """10,000 tasks wait behind a cap of 5: slots are woken by calls that end, not by what waits."""
    world, work = staged_world(1.0)
    plans = 0
    plan = world.dispatcher._planner.plan

    def counted(*args: Any, **named: Any) -> Any:
        nonlocal plans
        plans += 1
        return plan(*args, **named)

    world.dispatcher._planner.plan = counted  # type: ignore[method-assign]
    async with world.running():
        await world.submit("a", 10_000, limit=5)
        await world.clock.advance(5.0)
        before, calls_before = plans, len(work.began_at)
        await world.clock.advance(100.0)
        calls = len(work.began_at) - calls_before
        assert calls == pytest.approx(500, abs=10)
        assert plans - before <= 4 * calls
