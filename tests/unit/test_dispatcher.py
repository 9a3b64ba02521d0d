"""The dispatcher in virtual time: the messages that it receives, their order, and those it gives
back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.ids import task_id
from conveyor.ports.handler import ACKNOWLEDGE, Outcome
from conveyor.ports.queues import CONTROL_QUEUE, DeleteMessage, Delivery, TaskMessage
from tests.unit.dispatch_world import World


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.guarantee("G5")
@pytest.mark.guarantee("G6")
async def test_every_message_is_received_once_and_the_limit_holds() -> None:
    world = World(slots=20, duration=lambda _delivery: 1.0)
    async with world.running():
        await world.submit("a", 60, limit=5)
        await world.clock.advance(20)
    assert sorted(world.tasks.done) == [task for _, task in world.rows["a"]]
    assert world.telemetry.counts["deliveries"] == 60
    assert world.telemetry.counts["bounces"] == 0
    assert world.tasks.peak["run-a"] == 5


async def test_slots_bound_the_calls_of_all_runs_together() -> None:
    world = World(slots=8, duration=lambda _delivery: 1.0)
    async with world.running():
        for name in "abc":
            await world.submit(name, 20)
        await world.clock.advance(30)
    assert len(world.tasks.done) == 60
    assert world.tasks.peak["all"] == 8


async def test_a_small_run_overtakes_a_giant_one() -> None:
    world = World(slots=10, duration=lambda _delivery: 1.0)
    async with world.running():
        await world.submit("giant", 500)
        await world.clock.advance(3)
        await world.submit("small", 10)
        await world.clock.advance(5)
        assert len([t for _, t in world.rows["small"] if t in world.tasks.done]) == 10
        assert world.tasks.in_flight["run-giant"] == 10


async def test_priority_weighs_and_the_lowest_still_progresses() -> None:
    world = World(slots=20, duration=lambda _delivery: 1.0)
    async with world.running():
        await world.submit("low", 1_000, priority=0)
        await world.submit("high", 1_000, priority=9)
        await world.clock.advance(10.5)
        low = sum(task in world.tasks.done for _, task in world.rows["low"])
        high = sum(task in world.tasks.done for _, task in world.rows["high"])
    assert low > 0
    assert high > 5 * low


async def test_a_hidden_message_comes_back_after_its_delay() -> None:
    world = World(slots=2, duration=lambda _delivery: 0.0)
    world.tasks.outcome = lambda delivery: (
        Outcome(hide_for=30.0) if delivery.receive_count == 1 else ACKNOWLEDGE
    )
    async with world.running():
        await world.submit("a", 1)
        await world.clock.advance(29)
        assert world.tasks.done == []
        await world.clock.advance(7)
        assert len(world.tasks.done) == 1


async def test_slots_that_find_a_queue_empty_together_do_not_delay_a_retry() -> None:
    world = World(slots=200, duration=lambda _delivery: 0.01)
    world.read_time = 0.001
    world.tasks.outcome = lambda delivery: (
        Outcome(hide_for=0.01) if delivery.receive_count == 1 else ACKNOWLEDGE
    )
    async with world.running():
        await world.submit("a", 1)
        await world.clock.advance(2)
    assert world.tasks.finished_at["run-a"] < 0.1


async def test_a_store_that_is_away_is_not_asked_by_every_message_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A full disk must not make thousands of tries, and lines of the log, a minute."""
    tries = 0

    def away(_delivery: Delivery) -> Outcome:
        nonlocal tries
        tries += 1
        raise ConveyorError(ErrorCode.UNAVAILABLE, "the disk is full")

    world = World(slots=10, duration=lambda _delivery: 0.0)
    world.tasks.outcome = away
    async with world.running():
        await world.submit("a", 2_000)
        await world.clock.advance(30)
        assert 1 < tries <= 10 * 30
    told = [record for record in caplog.records if "handler failed" in record.getMessage()]
    assert len(told) == tries
    assert not any(record.exc_info for record in told)


async def test_a_handler_that_breaks_costs_its_message_a_pause_and_nothing_else() -> None:
    world = World(slots=2, duration=lambda _delivery: 0.0)

    def outcome(delivery: Delivery) -> Outcome:
        assert isinstance(delivery.message, TaskMessage)
        if delivery.message.task_id.startswith("0000001") and delivery.receive_count == 1:
            raise RuntimeError("broken")
        return ACKNOWLEDGE

    world.tasks.outcome = outcome
    async with world.running():
        await world.submit("a", 3)
        await world.clock.advance(1)
        assert len(world.tasks.done) == 2
        await world.clock.advance(10)
        assert len(world.tasks.done) == 3


async def test_control_is_worked_while_every_slot_is_taken() -> None:
    world = World(slots=3, duration=lambda _delivery: 1_000.0)
    async with world.running():
        await world.submit("a", 10)
        await world.clock.advance(1)
        assert world.tasks.in_flight["run-a"] == 3
        await world.queues.send(CONTROL_QUEUE, DeleteMessage("j", "r"))
        await world.clock.advance(2)
        assert world.control.done == ["control"]


async def test_a_control_message_that_takes_long_keeps_no_other_waiting() -> None:
    world = World(slots=3, duration=lambda _delivery: 1.0)
    world.control.duration = lambda delivery: 600.0 if "long" in str(delivery.message) else 0.0
    async with world.running():
        await world.clock.advance(30)  # the idle lane is asked for one message at a time
        for name in ("long", "a", "b"):
            await world.queues.send(CONTROL_QUEUE, DeleteMessage("job", name))
        await world.clock.advance(1)
        assert world.control.done == ["control"] * 2
        assert world.control.in_flight[CONTROL_QUEUE] == 1


async def test_throttling_lowers_the_calls_in_flight() -> None:
    world = World(slots=20, duration=lambda _delivery: 1.0)
    world.tasks.outcome = lambda _delivery: Outcome(hide_for=2.0)
    world.tasks.refuses = lambda _delivery: True
    async with world.running():
        await world.submit("a", 100, limit=20)
        await world.clock.advance(1.5)
        assert world.tasks.peak["run-a"] == 20
        await world.clock.advance(20)
        assert world.tasks.in_flight["run-a"] < 5


@pytest.mark.slow
async def test_a_closed_lane_gives_its_permits_back() -> None:
    world = World(slots=4, duration=lambda _delivery: 1.0)
    async with world.running():
        await world.submit("a", 10)
        await world.clock.advance(0.5)
        assert world.granted("a") == 4
        await world.dispatcher.close_lane("a")
        await world.clock.advance(2)
        assert world.granted("a") == 0
        assert len(world.tasks.done) == 4
        assert world.dispatcher.lanes.get("a") is None


async def test_stop_lets_work_in_hand_end_and_receives_nothing_more() -> None:
    world = World(slots=4, duration=lambda _delivery: 1.0)
    async with world.running():
        await world.submit("a", 20)
        await world.clock.advance(0.5)
    assert len(world.tasks.done) == 4
    assert world.tasks.cancelled == 0
    assert world.granted("a") == 0


@pytest.mark.guarantee("G7")
async def test_after_the_grace_work_is_cancelled_and_given_back_at_once() -> None:
    world = World(slots=4, duration=lambda _delivery: 1_000.0)
    async with world.running():
        await world.submit("a", 20)
        await world.clock.advance(0.5)
    assert world.tasks.done == []
    assert world.tasks.cancelled == 4
    assert world.granted("a") == 0
    again = []
    while batch := await world.queues.receive("run-a", limit=10, visibility=60.0):
        again += batch
    assert len(again) == 20


@pytest.mark.guarantee("G6")
async def test_renewal_keeps_long_work_hidden() -> None:
    world = World(slots=1, duration=lambda _delivery: 200.0)
    async with world.running():
        await world.submit("a", 1)
        for _ in range(25):
            await world.clock.advance(10)
    assert len(world.tasks.done) == 1
    assert world.telemetry.counts["deliveries"] == 1


async def test_a_queue_that_is_gone_is_not_asked_in_a_tight_loop() -> None:
    world = World(slots=2, duration=lambda _delivery: 0.0)
    async with world.running():
        await world.submit("a", 1)
        await world.clock.advance(1)
        await world.queues.drop_run("a")
        before = world.telemetry.counts["receives"]
        await world.clock.advance(60)
        assert world.telemetry.counts["receives"] - before < 200


async def test_what_a_waiting_receive_brings_after_a_pause_is_given_back() -> None:
    world = World(slots=10, duration=lambda _delivery: 0.0)
    async with world.running():
        run = await world.submit("a", 1)
        await world.clock.advance(5.25)
        await world.dispatcher.close_lane("a")
        world.rows["a"].append((1, task_id("a", 1)))
        await world.queues.send_tasks(run.job_id, "a", world.rows["a"][1:])
        await world.clock.advance(30)
        assert len(world.tasks.done) == 1
        world.dispatcher.open_lane(run)
        await world.clock.advance(1)
        assert len(world.tasks.done) == 2


async def test_a_queue_is_dropped_once_no_acknowledgement_is_under_way() -> None:
    world = World(slots=20, duration=lambda delivery: 2.0 if delivery.message == last else 1.0)
    last = TaskMessage("job-a", "a", task_id("a", 10))
    acknowledge = world.queues.delete
    under_way = 0
    seen: list[tuple[float, int]] = []

    async def delete(queue: str, receipts: Sequence[str]) -> None:
        """Ten take ten seconds, the last one takes a second."""
        nonlocal under_way
        under_way += 1
        await world.clock.sleep(float(len(receipts)))
        await acknowledge(queue, receipts)
        under_way -= 1

    async def drop() -> None:
        seen.append((world.clock.monotonic() - began, under_way))
        await world.queues.drop_run("a")

    world.queues.delete = delete  # type: ignore[method-assign]
    world.tasks.outcome = lambda delivery: (
        Outcome(drop_queue=drop) if delivery.message == last else ACKNOWLEDGE
    )
    async with world.running():
        began = world.clock.monotonic()
        await world.submit("a", 11)
        await world.clock.advance(20)
    [(seconds, calls)] = seen
    assert calls == 0
    assert 11.0 <= seconds < 12.0


async def test_a_queue_that_cannot_be_dropped_is_left_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(slots=2, duration=lambda _delivery: 1.0)

    async def drop() -> None:
        raise ConveyorError(ErrorCode.UNAVAILABLE, "no queues today")

    world.tasks.outcome = lambda delivery: (
        Outcome(drop_queue=drop) if delivery.queue == "run-a" else ACKNOWLEDGE
    )
    async with world.running():
        await world.submit("a", 1)
        await world.clock.advance(2)
        assert world.queues.depth("run-a") == 0
        await world.submit("b", 1)
        await world.clock.advance(2)
    assert len(world.tasks.done) == 2
    assert "the queue of an ended run was not dropped: unavailable: no queues today" in caplog.text
