"""Receives on SQS: their waiting, the messages of a cancelled one, and the longest hiding."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import pytest

from conveyor.clock import SystemClock
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.queues import (
    CONTROL_QUEUE,
    Delivery,
    IngestMessage,
    QueueMissing,
    run_queue,
)
from conveyor.prod.aws.calls import Answer, Aws, Parameters
from conveyor.prod.sqs.messages import (
    LONGEST_HIDING,
    MOST_HIDINGS,
    handle_of,
    hiding,
    receipt_of,
)
from conveyor.prod.sqs.queues import LONGEST_POLL
from conveyor.testing.aws_faults import FaultyAws
from conveyor.testing.clock import FakeClock
from tests.conformance.queue_benches import JOB, QUEUE, RUN, deletion, indexes_of
from tests.conformance.sqs_bench import JumpingClock, SqsBench, sqs_bench

RECEIVE = ("sqs", "receive_message")
HIDE = ("sqs", "change_message_visibility_batch")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def bench() -> AsyncIterator[SqsBench]:
    async with sqs_bench() as opened:
        yield opened


class Recording:
    """A transport that keeps the parameters of calls. `asked` is set with the first receive. A
    clock passed in moves on by the wait of each receive, however long that takes."""

    def __init__(self, aws: Aws, *, moved: FakeClock | None = None) -> None:
        self.parameters: dict[str, list[Parameters]] = {}
        self.asked = anyio.Event()
        self._aws = aws
        self._moved = moved

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        """Make the call."""
        self.parameters.setdefault(operation, []).append(parameters)
        if operation == "receive_message":
            self.asked.set()
            if self._moved is not None:
                await self._moved.advance(parameters["WaitTimeSeconds"])
        return await self._aws.call(service, operation, parameters)

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        """Pass the call on."""
        return self._aws.presign(operation, parameters, seconds=seconds)

    def waits(self) -> list[int]:
        """The seconds that each receive was allowed to wait."""
        return [asked["WaitTimeSeconds"] for asked in self.parameters["receive_message"]]

    def hidden_for(self) -> list[int]:
        """The seconds that messages were hidden for, in order."""
        entries: list[dict[str, Any]] = []
        for asked in self.parameters.get("change_message_visibility_batch", []):
            entries += asked["Entries"]
        return [entry["VisibilityTimeout"] for entry in entries]


async def meanwhile(
    bench: SqsBench, queue: str, act: Callable[[], Awaitable[None]]
) -> list[Delivery]:
    """Return the messages of a receive that waits in real time, while something happens."""
    seam = Recording(bench.aws)
    queues = bench.process(aws=seam, clock=SystemClock())
    deliveries: list[Delivery] = []

    async def wait() -> None:
        deliveries.extend(await queues.receive(queue, limit=10, visibility=60, wait=60))

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await seam.asked.wait()
        await act()
    assert set(seam.waits()) == {LONGEST_POLL}
    return deliveries


async def test_a_receive_that_finds_nothing_ends_after_its_wait(bench: SqsBench) -> None:
    clock = FakeClock()
    seam = Recording(bench.aws, moved=clock)
    queues = bench.process(aws=seam, clock=clock)
    assert await queues.receive(CONTROL_QUEUE, limit=1, visibility=60, wait=1.5) == []
    assert seam.waits() == [1, 1]


@pytest.mark.parametrize("how", ["lapse", "delay", "give back", "shorten"])
async def test_a_waiting_receive_takes_what_becomes_visible(bench: SqsBench, how: str) -> None:
    await bench.queues.send(CONTROL_QUEUE, deletion(RUN), delay=20 if how == "delay" else 0)
    held = await bench.queues.receive(CONTROL_QUEUE, limit=1, visibility=20)
    receipts = [delivery.receipt for delivery in held]

    async def act() -> None:
        match how:
            case "give back":
                await bench.queues.change_visibility(CONTROL_QUEUE, receipts, visibility=0)
            case "shorten":
                await bench.queues.change_visibility(CONTROL_QUEUE, receipts, visibility=2)
                await bench.advance(2)
            case _:
                await bench.advance(20)

    [delivery] = await meanwhile(bench, CONTROL_QUEUE, act)
    assert delivery.message == deletion(RUN)


async def test_a_waiting_receive_ends_with_its_queue(bench: SqsBench) -> None:
    await bench.queues.send_tasks(JOB, RUN, [])
    with pytest.raises(ExceptionGroup) as caught:
        await meanwhile(bench, QUEUE, partial(bench.queues.drop_run, RUN))
    assert [type(error) for error in caught.value.exceptions] == [QueueMissing]


async def test_waiting_lanes_leave_threads_to_those_that_only_look(bench: SqsBench) -> None:
    seam, clock = Recording(bench.aws), JumpingClock()
    queues = bench.process(aws=seam, clock=clock, long_polls=2)
    names = [run_queue(f"{RUN}{number}") for number in range(3)]
    for number in range(3):
        await bench.queues.send_tasks(JOB, f"{RUN}{number}", [])
    for _ in range(2):
        seam.parameters.clear()
        clock.slept.clear()
        async with anyio.create_task_group() as group:
            for name in names:
                group.start_soon(partial(queues.receive, name, limit=1, visibility=60, wait=1))
        # The one without a thread to wait in asks again once its time is over, and no sooner.
        assert sorted(seam.waits()) == [0, 0, 1, 1]
        assert clock.slept == [LONGEST_POLL]


async def test_what_a_cancelled_receive_brings_is_given_back_at_once(bench: SqsBench) -> None:
    await bench.queues.send_tasks(JOB, RUN, bench.rows.write(RUN, 0, 1))
    faulty = FaultyAws(bench.aws)
    queues = bench.process(aws=faulty)
    with anyio.CancelScope() as scope:

        async def cancel() -> None:
            scope.cancel()

        faulty.after(*RECEIVE, cancel)
        await queues.receive(QUEUE, limit=10, visibility=600, wait=20)
    assert scope.cancelled_caught
    again = await bench.queues.receive(QUEUE, limit=10, visibility=60)
    assert sorted(indexes_of(again)) == [0, 1]
    assert {delivery.receive_count for delivery in again} == {2}


async def test_a_cancelled_receive_ends_though_nothing_can_be_given_back(bench: SqsBench) -> None:
    await bench.queues.send_tasks(JOB, RUN, bench.rows.write(RUN, 0))
    faulty = FaultyAws(bench.aws)
    faulty.fail(*HIDE, ConveyorError(ErrorCode.UNAVAILABLE, "sqs is away"))
    queues = bench.process(aws=faulty)
    with anyio.CancelScope() as scope:

        async def cancel() -> None:
            scope.cancel()

        faulty.after(*RECEIVE, cancel)
        await queues.receive(QUEUE, limit=10, visibility=30, wait=20)
    assert scope.cancelled_caught
    assert faulty.fired == 2
    await bench.advance(30)
    assert indexes_of(await bench.queues.receive(QUEUE, limit=10, visibility=60)) == [0]


async def test_early_messages_are_hidden_by_one_call_and_late_ones_given(bench: SqsBench) -> None:
    for number in range(4):
        await bench.queues.send(CONTROL_QUEUE, deletion(f"R{number}"), delay=1_000 + number)
    await bench.queues.send(CONTROL_QUEUE, deletion("NOW"), delay=900)
    await bench.advance(900)
    seam = Recording(bench.aws)
    [now] = await bench.process(aws=seam).receive(CONTROL_QUEUE, limit=10, visibility=60)
    assert now.message == deletion("NOW")
    # By the clock of the emulator, which goes on meanwhile.
    assert all(80 < seconds <= 103 for seconds in seam.hidden_for())
    assert len(set(seam.hidden_for())) == 4
    assert len(seam.parameters["change_message_visibility_batch"]) == 1


async def test_an_early_message_that_cannot_be_hidden_comes_again_and_not_too_soon(
    bench: SqsBench,
) -> None:
    await bench.queues.send(CONTROL_QUEUE, deletion(RUN), delay=1_000)
    await bench.advance(900)
    faulty = FaultyAws(bench.aws)
    faulty.fail(*HIDE, ConveyorError(ErrorCode.UNAVAILABLE, "sqs is away"))
    queues = bench.process(aws=faulty)
    assert await queues.receive(CONTROL_QUEUE, limit=10, visibility=30) == []
    await bench.advance(30)
    assert await queues.receive(CONTROL_QUEUE, limit=10, visibility=30) == []
    assert faulty.calls.count(HIDE) == 2
    await bench.advance(70)
    [delivery] = await queues.receive(CONTROL_QUEUE, limit=10, visibility=30)
    assert (delivery.message, delivery.receive_count) == (deletion(RUN), 3)


@pytest.mark.parametrize("wrong", [-7_200, 7_200])
async def test_a_clock_that_is_wrong_at_the_receipt_does_not_move_a_delay(
    bench: SqsBench, wrong: int
) -> None:
    await bench.queues.send(CONTROL_QUEUE, deletion(RUN), delay=1_000)
    await bench.advance(900)
    seam, clock = Recording(bench.aws), FakeClock(start=bench.clock.now() + wrong * 1_000)
    queues = bench.process(aws=seam, clock=clock)
    assert await queues.receive(CONTROL_QUEUE, limit=10, visibility=30) == []
    (hidden,) = seam.hidden_for()
    assert 80 < hidden <= 100
    await bench.advance(100)
    [delivery] = await bench.process().receive(CONTROL_QUEUE, limit=10, visibility=30)
    assert delivery.message == deletion(RUN)


async def test_a_clock_that_stays_behind_ends_no_message_as_a_dead_letter(bench: SqsBench) -> None:
    await bench.queues.send(CONTROL_QUEUE, deletion(RUN), delay=1_000)
    await bench.advance(900)
    behind = FakeClock(start=bench.clock.now() - 86_400_000)
    queues = bench.process(clock=behind)
    for _ in range(MOST_HIDINGS):
        assert await queues.receive(CONTROL_QUEUE, limit=10, visibility=30) == []
        await bench.advance(100)
    [delivery] = await queues.receive(CONTROL_QUEUE, limit=10, visibility=30)
    assert delivery.receive_count == MOST_HIDINGS + 1


async def test_no_message_is_hidden_beyond_twelve_hours_after_its_receipt(bench: SqsBench) -> None:
    await bench.queues.send(CONTROL_QUEUE, deletion(RUN))
    seam = Recording(bench.aws)
    queues = bench.process(aws=seam)
    [delivery] = await queues.receive(CONTROL_QUEUE, limit=1, visibility=86_400)
    assert seam.parameters["receive_message"][0]["VisibilityTimeout"] == LONGEST_HIDING
    await bench.advance(43_000)
    for visibility in (60, 600, 0):
        await queues.change_visibility(CONTROL_QUEUE, [delivery.receipt], visibility=visibility)
    await bench.advance(200)
    # It has come back by itself, and SQS would refuse.
    await queues.change_visibility(CONTROL_QUEUE, [delivery.receipt], visibility=60)
    assert seam.hidden_for() == [60, 199, 0]


def test_a_receipt_knows_how_long_its_message_may_still_be_hidden() -> None:
    receipt = receipt_of("a handle with spaces", asked_at=12.5)
    assert handle_of(receipt) == "a handle with spaces"
    assert hiding(receipt, 0.2, now=13) == 1
    assert hiding(receipt, -1, now=13) == 0
    assert hiding(receipt, 50_000, now=12.5) == LONGEST_HIDING - 1
    assert hiding(receipt, 1, now=12.5 + LONGEST_HIDING) is None
    assert hiding(receipt, 0, now=12.5 + LONGEST_HIDING) == 0
    for foreign in ("", "1", "1 ", "no receipt"):
        assert handle_of(foreign) is None


async def test_a_reason_may_hold_characters_that_sqs_takes_in_no_message(bench: SqsBench) -> None:
    reason = "a\x00b\x1b[31m\uffff\ufffe é 🚚"
    message = IngestMessage(JOB, RUN, reason=reason)
    await bench.queues.send(CONTROL_QUEUE, message)
    [delivery] = await bench.queues.receive(CONTROL_QUEUE, limit=1, visibility=60)
    assert delivery.message == message
