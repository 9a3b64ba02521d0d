"""The additions of SQS to the port: batches that fail in part, long delays, queues lost and made
again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial

import anyio
import pytest

from conveyor.clock import SystemClock
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.queues import (
    CONTROL_QUEUE,
    DeleteMessage,
    Delivery,
    QueueMissing,
    TaskMessage,
    run_queue,
)
from conveyor.prod.aws.calls import Answer, Aws, AwsRefused, Parameters
from conveyor.prod.sqs import messages
from conveyor.prod.sqs.messages import MOST_CALLS
from conveyor.testing.aws_faults import FaultyAws
from tests.conformance.queue_benches import JOB, QUEUE, RUN, deletion, indexes_of
from tests.conformance.sqs_bench import SqsBench, sqs_bench


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def bench() -> AsyncIterator[SqsBench]:
    async with sqs_bench() as opened:
        yield opened


class PartlyFailing:
    """A transport whose batches leave their first entry undone a number of times, and report it or
    do not."""

    def __init__(
        self, aws: Aws, *, times: int, sender_fault: bool = False, silent: bool = False
    ) -> None:
        self.batches: list[int] = []
        self._aws = aws
        self._times = times
        self._sender_fault = sender_fault
        self._silent = silent

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        """Make the call, without the first entry while times are left."""
        entries = parameters.get("Entries", [])
        if not entries:
            return await self._aws.call(service, operation, parameters)
        self.batches.append(len(entries))
        if not self._times:
            return await self._aws.call(service, operation, parameters)
        self._times -= 1
        first, *rest = entries
        answer: Answer = {}
        if rest:
            answer = await self._aws.call(service, operation, {**parameters, "Entries": rest})
        if self._silent:
            return answer
        code = "InvalidMessageContents" if self._sender_fault else "InternalError"
        failed = {"Id": first["Id"], "SenderFault": self._sender_fault, "Code": code}
        return {**answer, "Failed": [failed]}

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        """Pass the call on."""
        return self._aws.presign(operation, parameters, seconds=seconds)


class Busy:
    """A transport that counts sends, and the most of them under way."""

    def __init__(self, aws: Aws) -> None:
        self.sends = self.most = self._under_way = 0
        self._aws = aws

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        """Make the call."""
        sends = operation == "send_message_batch"
        self.sends += sends
        self._under_way += sends
        self.most = max(self.most, self._under_way)
        answer = await self._aws.call(service, operation, parameters)
        self._under_way -= sends
        return answer

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        """Pass the call on."""
        return self._aws.presign(operation, parameters, seconds=seconds)


async def received(bench: SqsBench, queue: str = QUEUE) -> list[int]:
    """The rows that all visible messages of a queue refer to."""
    found: list[int] = []
    while batch := await bench.queues.receive(queue, limit=10, visibility=60):
        found += indexes_of(batch)
    return sorted(found)


@pytest.mark.parametrize("silent", [False, True])
async def test_only_the_entries_that_failed_are_sent_again(bench: SqsBench, silent: bool) -> None:
    seam = PartlyFailing(bench.aws, times=2, silent=silent)
    queues = bench.process(aws=seam, clock=SystemClock())
    await queues.send_tasks(JOB, RUN, bench.rows.write(RUN, *range(10)))
    assert seam.batches == [10, 1, 1]
    assert await received(bench) == list(range(10))


async def test_an_entry_that_sqs_will_never_take_is_an_error(bench: SqsBench) -> None:
    queues = bench.process(aws=PartlyFailing(bench.aws, times=1, sender_fault=True))
    with pytest.raises(ConveyorError, match="InvalidMessageContents") as caught:
        await queues.send(CONTROL_QUEUE, deletion(RUN))
    assert caught.value.code is ErrorCode.INTERNAL


async def test_a_lost_answer_doubles_a_message_and_loses_none(bench: SqsBench) -> None:
    faulty = FaultyAws(bench.aws)
    faulty.lose_answer("sqs", "send_message_batch")
    await bench.process(aws=faulty).send_tasks(JOB, RUN, bench.rows.write(RUN, 0, 1))
    assert faulty.fired == 1
    assert await received(bench) == [0, 0, 1, 1]


async def test_references_go_ten_a_call_into_one_queue(bench: SqsBench) -> None:
    faulty = FaultyAws(bench.aws)
    await bench.process(aws=faulty).send_tasks(JOB, RUN, bench.rows.write(RUN, *range(95)))
    assert faulty.calls.count(("sqs", "send_message_batch")) == 10
    assert faulty.calls.count(("sqs", "create_queue")) == 1


@pytest.mark.parametrize("act", ["renew", "delete"])
async def test_a_batch_of_receipts_that_fails_keeps_no_other_from_being_made(
    bench: SqsBench, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    await bench.queues.send_tasks(JOB, RUN, bench.rows.write(RUN, *range(30)))
    receipts: list[str] = []
    while len(receipts) < 30:
        got = await bench.queues.receive(run_queue(RUN), limit=10, visibility=60)
        receipts += [delivery.receipt for delivery in got]
    faulty = FaultyAws(bench.aws)
    operation = {"renew": "change_message_visibility_batch", "delete": "delete_message_batch"}[act]
    faulty.fail("sqs", operation, ConveyorError(ErrorCode.UNAVAILABLE, "away"))
    # One after the other: the others are yet to come when the first fails.
    monkeypatch.setattr(messages, "MOST_CALLS", 1)
    queues = bench.process(aws=faulty)
    acts: dict[str, Callable[[str, list[str]], Awaitable[None]]] = {
        "renew": partial(queues.change_visibility, visibility=600),
        "delete": queues.delete,
    }
    with pytest.raises(ConveyorError, match="away"):
        await acts[act](run_queue(RUN), receipts)
    assert faulty.calls.count(("sqs", operation)) == 3
    await bench.advance(61)
    again = await bench.queues.receive(run_queue(RUN), limit=10, visibility=60)
    assert len(again) == 10
    assert await bench.queues.receive(run_queue(RUN), limit=10, visibility=60) == []


async def test_a_delay_beyond_what_sqs_knows_is_kept(bench: SqsBench) -> None:
    await bench.queues.send(CONTROL_QUEUE, deletion(RUN), delay=3_000)
    for _ in range(2):
        await bench.advance(1_490)
        assert await bench.queues.receive(CONTROL_QUEUE, limit=1, visibility=60) == []
    await bench.advance(21)
    [delivery] = await bench.queues.receive(CONTROL_QUEUE, limit=1, visibility=60)
    assert delivery.message == deletion(RUN)


async def test_fractions_of_a_second_are_rounded_up(bench: SqsBench) -> None:
    # What was asked for tells: a second of the emulator's passes in real time, too.
    asked: list[Parameters] = []

    def note(parameters: Parameters) -> bool:
        asked.append(parameters)
        return False

    faulty = FaultyAws(bench.aws)
    for operation in ("send_message_batch", "receive_message", "change_message_visibility_batch"):
        faulty.lose_answer("sqs", operation, where=note)
    queues = bench.process(aws=faulty)
    await queues.send(CONTROL_QUEUE, deletion(RUN), delay=0.2)
    await bench.advance(1)
    [delivery] = await queues.receive(CONTROL_QUEUE, limit=1, visibility=0.5)
    await queues.change_visibility(CONTROL_QUEUE, [delivery.receipt], visibility=0.2)
    sent, received, hidden = asked
    await bench.advance(1)
    assert len(await queues.receive(CONTROL_QUEUE, limit=1, visibility=60)) == 1
    assert [entry["DelaySeconds"] for entry in sent["Entries"]] == [1]
    assert received["VisibilityTimeout"] == 1
    assert [entry["VisibilityTimeout"] for entry in hidden["Entries"]] == [1]


async def test_a_visibility_beyond_twelve_hours_is_the_longest_there_is(bench: SqsBench) -> None:
    await bench.queues.send(CONTROL_QUEUE, deletion(RUN))
    [delivery] = await bench.queues.receive(CONTROL_QUEUE, limit=1, visibility=60)
    await bench.queues.change_visibility(CONTROL_QUEUE, [delivery.receipt], visibility=86_400)
    await bench.advance(43_180)
    assert await bench.queues.receive(CONTROL_QUEUE, limit=1, visibility=60) == []
    await bench.advance(19)
    assert len(await bench.queues.receive(CONTROL_QUEUE, limit=1, visibility=60)) == 1


async def test_every_process_finds_the_queue_that_one_made(bench: SqsBench) -> None:
    await bench.process().send_tasks(JOB, RUN, bench.rows.write(RUN, 0))
    await bench.process().send_tasks(JOB, RUN, bench.rows.write(RUN, 1))
    assert await received(bench) == [0, 1]
    assert bench.generations.numbers == {RUN: 1}


async def test_a_queue_deleted_under_a_live_run_is_made_again_with_every_reference(
    bench: SqsBench,
) -> None:
    other = bench.process()
    await bench.queues.send_tasks(JOB, RUN, bench.rows.write(RUN, *range(25)))
    assert len(await other.receive(QUEUE, limit=5, visibility=60)) == 5
    await bench.lose(RUN)
    for process in (bench.queues, other):
        with pytest.raises(QueueMissing):
            await process.receive(QUEUE, limit=10, visibility=60)
    async with anyio.create_task_group() as group:
        group.start_soon(bench.queues.remake_run, JOB, RUN)
        group.start_soon(other.remake_run, JOB, RUN)
    # Both find it missing, and one of them fills it.
    assert await received(bench) == list(range(25))
    assert bench.generations.numbers == {RUN: 2}


async def test_a_dropped_queue_is_dropped_for_all_and_its_name_not_used_again(
    bench: SqsBench,
) -> None:
    other = bench.process()
    await bench.queues.send_tasks(JOB, RUN, bench.rows.write(RUN, 0))
    await other.receive(QUEUE, limit=1, visibility=0)
    await bench.queues.drop_run(RUN)
    await bench.queues.drop_run(RUN)
    with pytest.raises(QueueMissing):
        await other.receive(QUEUE, limit=1, visibility=60)
    with pytest.raises(QueueMissing):
        await other.send(QUEUE, DeleteMessage(JOB, RUN))
    bench.rows.rows[RUN].clear()
    await other.send_tasks(JOB, RUN, bench.rows.write(RUN, 7))
    assert await received(bench) == [7]
    assert bench.generations.numbers == {RUN: 2}


async def test_of_a_refusal_a_caller_sees_the_word_alone(bench: SqsBench) -> None:
    asked = ("sqs", "send_message_batch")
    faulty = FaultyAws(bench.aws)
    faulty.fail(*asked, AwsRefused("InvalidMessageContents", "for arn:aws:sqs:1", asked=asked))
    with pytest.raises(ConveyorError) as caught:
        await bench.process(aws=faulty).send(CONTROL_QUEUE, deletion(RUN))
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert caught.value.detail == (
        "sqs refuses send_message_batch: InvalidMessageContents (queue control)"
    )


async def test_depth_is_asked_beside_receives_and_not_with_each(bench: SqsBench) -> None:
    faulty = FaultyAws(bench.aws)
    queues = bench.process(aws=faulty)
    assert queues.depth(QUEUE) == 0
    await queues.send_tasks(JOB, RUN, bench.rows.write(RUN, *range(3)))
    for _ in range(5):
        await queues.receive(QUEUE, limit=1, visibility=60)
    assert queues.depth(QUEUE) == 3
    assert faulty.calls.count(("sqs", "get_queue_attributes")) == 2  # once for an ARN
    await bench.advance(11)
    await queues.receive(QUEUE, limit=1, visibility=60)
    assert faulty.calls.count(("sqs", "get_queue_attributes")) == 3
    await queues.drop_run(RUN)
    assert queues.depth(QUEUE) == 0


async def test_a_depth_stands_until_it_is_asked_again(bench: SqsBench) -> None:
    """A queue that nobody receives from, since all slots are taken, is no empty one."""
    await bench.queues.send_tasks(JOB, RUN, bench.rows.write(RUN, 0))
    await bench.queues.receive(QUEUE, limit=1, visibility=60)
    await bench.advance(600)
    assert bench.queues.depth(QUEUE) == 1
    await bench.process().send_tasks(JOB, RUN, bench.rows.write(RUN, 1))
    assert bench.queues.depth(QUEUE) == 1
    assert await bench.queues.count(QUEUE) == bench.queues.depth(QUEUE) == 2


async def test_a_queue_that_is_lost_has_no_depth(bench: SqsBench) -> None:
    await bench.queues.send_tasks(JOB, RUN, bench.rows.write(RUN, 0))
    await bench.lose(RUN)
    await bench.process().remake_run(JOB, RUN)
    for _ in range(2):
        # The first finds the old one gone, the second the new one.
        with suppress(QueueMissing):
            await bench.queues.receive(QUEUE, limit=1, visibility=60)
    assert bench.queues.depth(QUEUE) == 1
    await bench.lose(RUN, 2)
    with pytest.raises(QueueMissing):
        await bench.queues.receive(QUEUE, limit=1, visibility=60)
    assert bench.queues.depth(QUEUE) == 0


async def test_a_large_send_leaves_room_for_other_calls(bench: SqsBench) -> None:
    seam = Busy(bench.aws)
    await bench.process(aws=seam).send_tasks(JOB, RUN, bench.rows.write(RUN, *range(300)))
    assert (seam.sends, seam.most) == (30, MOST_CALLS)


async def test_a_receive_waits_in_short_polls_and_takes_what_comes(bench: SqsBench) -> None:
    faulty = FaultyAws(bench.aws)
    queues = bench.process(aws=faulty)
    asked = anyio.Event()
    found: list[Delivery] = []

    async def note() -> None:
        asked.set()

    async def wait() -> None:
        found.extend(await queues.receive(CONTROL_QUEUE, limit=1, visibility=60, wait=20))

    faulty.before("sqs", "receive_message", note)
    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await asked.wait()
        await bench.queues.send(CONTROL_QUEUE, deletion(RUN))
    assert [delivery.message for delivery in found] == [deletion(RUN)]


async def test_a_send_that_finds_the_queue_lost_names_the_hosts_of_all(bench: SqsBench) -> None:
    async def holds(_run_id: str) -> bool:
        return True

    bench.queues.has_policy = holds
    bench.rows.hosts = ("a.example:443", "b.example:80")
    await bench.queues.send_tasks(JOB, RUN, bench.rows.write(RUN, *range(4)))
    await bench.lose(RUN)
    more = bench.rows.write(RUN, 4, 5)
    await bench.queues.send_tasks(JOB, RUN, more, bench.rows.hosts_of(more))
    found = await bench.queues.receive(QUEUE, limit=10, visibility=60)
    messages = [one.message for one in found if isinstance(one.message, TaskMessage)]
    assert len(messages) == 6
    assert {one.host for one in messages} == set(bench.rows.hosts)


async def test_an_unknown_queue_of_another_run_is_missing(bench: SqsBench) -> None:
    with pytest.raises(QueueMissing):
        await bench.queues.receive(run_queue("NEVER"), limit=1, visibility=1)
    assert bench.generations.numbers == {}


async def test_a_count_is_that_of_the_queue_whoever_receives_from_it(bench: SqsBench) -> None:
    await bench.queues.send_tasks(JOB, RUN, bench.rows.write(RUN, *range(3)))
    await bench.queues.receive(QUEUE, limit=1, visibility=60)
    idle = bench.process()
    assert (idle.depth(QUEUE), await idle.count(QUEUE)) == (0, 3)
    await bench.lose(RUN)
    assert (await idle.count(QUEUE), idle.depth(QUEUE)) == (0, 0)
    await bench.process().remake_run(JOB, RUN)
    assert await idle.count(QUEUE) == 3
