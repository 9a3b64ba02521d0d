"""Bounds of the dispatcher over time: slots and places to wait come back, calls rise to the limit
again, no message is kept waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.ids import task_id
from conveyor.engine.delivery import LINGER
from conveyor.engine.dispatcher import CALM, ERROR_PAUSE
from conveyor.engine.lanes import THROTTLE_FACTOR, Lane
from conveyor.engine.planner import PROBE_SHARE
from conveyor.ports.handler import ACKNOWLEDGE, Outcome
from conveyor.ports.queues import Delivery, TaskMessage
from tests.unit.dispatch_world import World

SLOTS = 20


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Receives:
    """The receives of run queues: of each the moment, the wait, the messages asked for and those
    that came."""

    def __init__(self, world: World, *, waits: bool = True) -> None:
        self.seen: list[tuple[float, float, int, int]] = []
        self.asked = self.brought = 0
        ask = world.queues.receive

        async def receive(
            queue: str, *, limit: int, visibility: float, wait: float = 0.0
        ) -> list[Delivery]:
            began = world.clock.monotonic()
            found = await ask(
                queue, limit=limit, visibility=visibility, wait=wait if waits else 0.0
            )
            self.asked += 1
            self.brought += len(found)
            if queue.startswith("run-"):
                self.seen.append((began, wait, limit, len(found)))
                assert len(self.seen) < 20_000, "a queue is asked without end"
            return found

        world.queues.receive = receive  # type: ignore[method-assign]


# -- the ceiling of a throttled job --


async def refused(world: World, refuses: Callable[[Delivery], bool]) -> None:
    """Submit a run, and let the gateway refuse some of its first calls at one instant."""
    world.tasks.refuses = lambda delivery: delivery.receive_count == 1 and refuses(delivery)
    world.tasks.outcome = lambda delivery: (
        Outcome(hide_for=500.0) if world.tasks.refuses(delivery) else ACKNOWLEDGE
    )
    await world.submit("a", 3_000, limit=SLOTS)


async def test_refusals_at_one_instant_lower_the_calls_once() -> None:
    first = {task_id("a", index) for index in range(10)}
    world = World(slots=SLOTS, duration=lambda _delivery: 1.0)
    async with world.running():
        await refused(world, lambda delivery: getattr(delivery.message, "task_id", "") in first)
        await world.clock.advance(1.5)
        calls = world.tasks.in_flight["run-a"]

    assert int(SLOTS * THROTTLE_FACTOR) <= calls < SLOTS


async def test_after_refusals_the_calls_rise_to_the_limit_again() -> None:
    refuses = True
    world = World(slots=SLOTS, duration=lambda _delivery: 1.0)
    async with world.running():
        await refused(world, lambda _delivery: refuses)
        await world.clock.advance(20.5)
        assert world.tasks.in_flight["run-a"] < SLOTS / 4
        refuses = False
        world.tasks.peak.clear()
        await world.clock.advance(45)

    assert world.tasks.peak["run-a"] == SLOTS


# -- slots --


async def test_a_lane_that_closes_during_a_receive_leaves_its_slots_to_others() -> None:
    world = World(slots=SLOTS, duration=lambda _delivery: 10.0)
    world.queues.receive_time = 1.0
    async with world.running():
        for name in ("a", "b", "c"):
            await world.submit(name, 50)
            await world.clock.advance(0.5)
            await world.dispatcher.close_lane(name)
            await world.clock.advance(1.0)
        assert not world.tasks.in_flight.total()
        await world.submit("d", 50)
        await world.clock.advance(8)

        assert world.tasks.in_flight["run-d"] == SLOTS


# -- empty queues --


async def test_slots_still_wait_on_a_queue_that_was_empty_for_long() -> None:
    world = World(slots=SLOTS, duration=lambda _delivery: 0.0)
    async with world.running():
        await world.submit("a", 1)
        receives = Receives(world)
        await world.clock.advance(60)

    assert len(receives.seen) > 10 * SLOTS // PROBE_SHARE
    assert all(wait for _, wait, _, _ in receives.seen[-10:])


async def test_a_queue_that_answers_early_with_nothing_is_asked_a_few_times_a_second() -> None:
    world = World(slots=SLOTS, duration=lambda _delivery: 0.0)
    receives = Receives(world, waits=False)
    async with world.running():
        await world.submit("a", 1)
        await world.clock.advance(100)

    late = [moment for moment, _, _, _ in receives.seen if moment > world.clock.monotonic() - 60]
    assert 0 < len(late) <= 60
    assert world.telemetry.counts["receives"] == receives.asked
    assert world.telemetry.counts["deliveries"] == receives.brought == 1


# -- acknowledgements --


async def test_what_is_done_when_the_worker_stops_is_acknowledged() -> None:
    world = World(slots=SLOTS, duration=lambda _delivery: 1.0)
    async with world.running():
        await world.submit("a", 3)
        await world.submit("b", 1)
        await world.clock.advance(1.01)
        assert len(world.tasks.done) == 4

    assert world.queues.depth("run-a") == world.queues.depth("run-b") == 0
    await world.clock.advance(100)
    for queue in ("run-a", "run-b"):
        assert await world.queues.receive(queue, limit=10, visibility=60.0) == []


async def test_what_ends_during_a_slow_acknowledgement_is_acknowledged_at_the_stop() -> None:
    """The call for one run is under way when a task of another ends and the worker stops."""
    later = 1.0 + LINGER + 0.5
    world = World(slots=SLOTS, duration=lambda one: later if one.queue == "run-b" else 1.0)
    delete, under_way = world.queues.delete, set[str]()

    async def slow_delete(queue: str, receipts: Sequence[str]) -> None:
        under_way.add(queue)
        await world.clock.sleep(1.0)
        await delete(queue, receipts)
        under_way.remove(queue)

    world.queues.delete = slow_delete  # type: ignore[method-assign]
    async with world.running():
        await world.submit("a", 1)
        await world.submit("b", 1)
        await world.clock.advance(later + 0.1)
        assert len(world.tasks.done) == 2
        assert under_way == {"run-a"}

    assert world.queues.depth("run-a") == world.queues.depth("run-b") == 0
    await world.clock.advance(100)
    assert await world.queues.receive("run-b", limit=10, visibility=60.0) == []


# -- the buffer --


def waiting(world: World, name: str = "a") -> int:
    """Count the messages of a run that wait in the buffer of the first worker."""
    lane = world.dispatcher.lanes.get(name)
    return 0 if lane is None else len(lane.buffer)


@pytest.mark.parametrize("visibility", [12.0, 60.0])
async def test_no_message_waits_in_a_buffer_for_a_third_of_its_hiding(visibility: float) -> None:
    times: dict[str, float] = {}
    waits: list[float] = []
    duration: Callable[[Delivery], float] = lambda _delivery: 1.0  # noqa: E731
    world = World(slots=4, duration=lambda delivery: duration(delivery), visibility=visibility)
    ask = world.queues.receive

    async def receive(*args: Any, **options: Any) -> list[Delivery]:
        found: list[Delivery] = await ask(*args, **options)
        times.update((one.receipt, world.clock.monotonic()) for one in found)
        return found

    async def show(queue: str, receipts: list[str], *, visibility: float) -> None:
        if not visibility:
            waits.extend(world.clock.monotonic() - times[receipt] for receipt in receipts)
        await change(queue, receipts, visibility=visibility)

    change = world.queues.change_visibility
    world.queues.receive = receive  # type: ignore[method-assign]
    world.queues.change_visibility = show  # type: ignore[method-assign, assignment]
    async with world.running():
        await world.submit("a", 200)
        await world.clock.advance(3.5)
        duration = lambda _delivery: 1_000.0  # noqa: E731
        assert waiting(world)
        await world.clock.advance(12)
        assert not waiting(world)
        given_back = list(waits)

    assert given_back
    assert max(given_back) <= min(10.0, visibility / 3) + 1.0


async def test_slots_do_not_wait_for_receives_while_a_queue_gives_all_it_is_asked_for() -> None:
    """The buffer is filled up beside them, before it is empty."""
    world = World(slots=10, duration=lambda _delivery: 0.5)
    world.queues.receive_time = 0.3
    async with world.running():
        await world.submit("a", 1_000)
        await world.clock.advance(30)

    assert len(world.tasks.done) >= 0.95 * 10 * 30 / 0.5


async def test_a_queue_that_brought_less_than_it_was_asked_is_not_asked_for_more_at_once() -> None:
    """Messages come a bit faster than they are worked."""
    slots = 4
    world = World(slots=slots, duration=lambda _delivery: 1.0)
    receives = Receives(world)
    async with world.running():
        run = await world.submit("a", 10)
        for index in range(10, 60):
            await world.clock.advance(0.24)
            world.rows["a"].append((index, task_id("a", index)))
            await world.queues.send_tasks(run.job_id, "a", world.rows["a"][-1:])

    for_buffer = [one for one in receives.seen if one[2] > slots]
    short = [moment for moment, _, limit, found in for_buffer if found < limit]
    assert len(for_buffer) > len(short) > 0
    for moment in short:
        assert not [later for later, *_ in for_buffer if moment < later < moment + CALM]


# -- a store that is away --


async def test_a_run_rests_after_a_store_was_away() -> None:
    """One task meets the outage. The others end a moment later, and nothing takes their place."""
    first = task_id("a", 0)
    world = World(slots=SLOTS, duration=lambda one: 0.5 if is_first(one) else 0.7)
    receives = Receives(world)

    def is_first(delivery: Delivery) -> bool:
        return getattr(delivery.message, "task_id", "") == first

    def outcome(delivery: Delivery) -> Outcome:
        if is_first(delivery) and world.clock.monotonic() < 1.0:
            raise ConveyorError(ErrorCode.UNAVAILABLE, "away")
        return ACKNOWLEDGE

    world.tasks.outcome = outcome
    async with world.running():
        await world.submit("a", 200)
        await world.clock.advance(10)

    moments = [moment for moment, *_ in receives.seen]
    assert not [moment for moment in moments if 0.5 < moment < 0.5 + ERROR_PAUSE]
    assert [moment for moment in moments if 0.5 + ERROR_PAUSE <= moment < 0.6 + ERROR_PAUSE]
    assert len(world.tasks.done) == 200


def test_a_lane_that_holds_or_expects_a_message_neither_idles_nor_only_waits() -> None:
    """It would be forgotten, or evicted, with the message."""
    lane = Lane(queue="run-a", run_id="a", job_id="job", limit=100, priority=5)
    assert (lane.idle, lane.only_waits) == (True, True)
    lane.busy, lane.probing = 1, True
    assert (lane.idle, lane.only_waits) == (False, True)
    lane.busy, lane.probing = 0, False
    lane.refilling = 1
    assert (lane.idle, lane.only_waits) == (False, False)
    lane.refilling = 0
    message = TaskMessage("job", "a", task_id("a", 0))
    lane.buffer.append((Delivery("run-a", message, "receipt", 1), 0.0))
    assert (lane.idle, lane.only_waits) == (False, False)


@pytest.mark.parametrize(
    ("seconds", "failures", "renewed_at"),
    [(29.0, 0, []), (75.0, 0, [40.0]), (75.0, 1, [40.0, 50.0]), (105.0, 0, [40.0, 80.0])],
)
async def test_a_message_is_hidden_for_longer_once_less_than_half_of_its_time_is_left(
    seconds: float, failures: int, renewed_at: list[float]
) -> None:
    world = World(slots=1, duration=lambda _delivery: seconds, visibility=60.0, heartbeat=10)
    asked_at: list[float] = []
    change = world.queues.change_visibility

    async def watched(queue: str, receipts: Sequence[str], *, visibility: float) -> None:
        asked_at.append(round(world.clock.monotonic(), 3))
        if len(asked_at) <= failures:
            raise ConveyorError(ErrorCode.UNAVAILABLE, "the queue is away")
        await change(queue, receipts, visibility=visibility)

    world.queues.change_visibility = watched  # type: ignore[method-assign]
    async with world.running():
        await world.submit("a", 1)
        await world.clock.advance(seconds + 2.0)
    assert asked_at == renewed_at
    assert world.received() == 1
    assert len(world.tasks.done) == 1


async def test_a_message_that_waited_in_the_buffer_is_hidden_since_it_was_received() -> None:
    world = World(slots=4, duration=lambda _delivery: 2.0)
    received_at: dict[str, float] = {}
    ask = world.queues.receive

    async def receive(*args: Any, **options: Any) -> list[Delivery]:
        found: list[Delivery] = await ask(*args, **options)
        received_at.update((one.receipt, world.clock.monotonic()) for one in found)
        return found

    world.queues.receive = receive  # type: ignore[method-assign]
    waits = []
    async with world.running():
        await world.submit("a", 60)
        for _ in range(8):
            await world.clock.advance(1.5)
            for receipt, one in world.dispatcher._working.items():
                assert one.hidden_at == received_at[receipt]
                waits.append(one.since - one.hidden_at)
    assert max(waits) > 0.0
