"""Messages on SQS that cannot be read: they hold nothing up, and end where they are seen."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.queues import (
    CONTROL_QUEUE,
    DEAD_LETTER_QUEUE,
    Delivery,
    ExportMessage,
    IngestMessage,
    Message,
    TaskMessage,
    TemplateMessage,
    run_queue,
)
from conveyor.prod.sqs import messages as sqs_messages
from conveyor.prod.sqs.messages import (
    MISPLACED,
    NO_INSTANT,
    NO_MESSAGE,
    NOT_BEFORE,
    OF_ANOTHER_KIND,
    OF_ANOTHER_VERSION,
    REASON,
)
from conveyor.prod.sqs.queues import SqsQueues
from conveyor.testing.aws_faults import FaultyAws
from tests.conformance.queue_benches import JOB, QUEUE, RUN, deletion
from tests.conformance.sqs_bench import SqsBench, sqs_bench

READABLE = msgspec.json.encode(deletion(RUN)).decode()
LATER = '{"type":"delete","version":99}'
NEW = '{"type":"new"}'
GARBAGE = "[" * 100_000
SEND = ("sqs", "send_message_batch")
DELETE = ("sqs", "delete_message_batch")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def bench() -> AsyncIterator[SqsBench]:
    async with sqs_bench() as opened:
        yield opened


async def received(bench: SqsBench, queue: str) -> list[dict[str, Any]]:
    """Return the messages of a queue, as SQS gives them."""
    answer = await bench.aws.call(
        "sqs",
        "receive_message",
        {
            **await bench.url(queue),
            "MaxNumberOfMessages": 10,
            "VisibilityTimeout": 0,
            "MessageAttributeNames": ["All"],
        },
    )
    found: list[dict[str, Any]] = answer.get("Messages", [])
    return found


async def bodies(bench: SqsBench, queue: str) -> list[str]:
    return sorted(one["Body"] for one in await received(bench, queue))


async def send(bench: SqsBench, queue: str, *entries: dict[str, Any]) -> None:
    where = await bench.url(queue)
    numbered = [{"Id": str(number), **entry} for number, entry in enumerate(entries)]
    await bench.aws.call("sqs", "send_message_batch", {**where, "Entries": numbered})


async def looks(bench: SqsBench, queues: SqsQueues, queue: str = CONTROL_QUEUE) -> list[Delivery]:
    """Three receives, each after what the one before had hidden is visible again."""
    found: list[Delivery] = []
    for _ in range(3):
        more = await queues.receive(queue, limit=10, visibility=20)
        await queues.delete(queue, [delivery.receipt for delivery in more])
        found += more
        await bench.advance(20)
    return found


async def test_what_nobody_can_read_is_a_dead_letter_at_once_and_told_once(
    bench: SqsBench, caplog: pytest.LogCaptureFixture
) -> None:
    at = {NOT_BEFORE: {"DataType": "Number", "StringValue": "1.5"}}
    await send(
        bench,
        CONTROL_QUEUE,
        {"MessageBody": READABLE, "MessageAttributes": at},
        {"MessageBody": GARBAGE},
        {"MessageBody": READABLE},
        {"MessageBody": LATER},
        {"MessageBody": NEW},
    )
    found = await looks(bench, bench.queues)

    assert [delivery.message for delivery in found] == [deletion(RUN)]
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    reasons = (NO_MESSAGE, NO_INSTANT, OF_ANOTHER_VERSION, OF_ANOTHER_KIND)
    assert sorted(told) == sorted(f"a message cannot be read: {reason}" for reason in reasons)
    assert await bodies(bench, CONTROL_QUEUE) == [LATER, NEW]
    letters = {one["Body"]: one for one in await received(bench, DEAD_LETTER_QUEUE)}
    assert set(letters) == {READABLE, GARBAGE}
    assert letters[READABLE]["MessageAttributes"][NOT_BEFORE]["StringValue"] == "1.5"


async def test_what_lies_in_the_queue_of_a_run_is_a_dead_letter_too(bench: SqsBench) -> None:
    await bench.queues.send_tasks(JOB, RUN, [(0, "0" * 26)])
    await send(bench, f"{run_queue(RUN)}-1", {"MessageBody": "garbage"})

    assert len(await looks(bench, bench.queues, QUEUE)) == 1
    assert await bodies(bench, DEAD_LETTER_QUEUE) == ["garbage"]
    assert await bodies(bench, f"{run_queue(RUN)}-1") == []


@pytest.mark.parametrize(
    ("queue", "message"),
    [
        (QUEUE, deletion(RUN)),
        (QUEUE, IngestMessage(JOB, RUN)),
        (QUEUE, TemplateMessage(JOB, RUN)),
        (QUEUE, ExportMessage(JOB, RUN, "EXPORT")),
        (QUEUE, TaskMessage(JOB, "OTHER", "0" * 26)),
        (CONTROL_QUEUE, TaskMessage(JOB, RUN, "0" * 26)),
    ],
)
async def test_what_lies_in_a_queue_of_other_messages_is_a_dead_letter_with_its_reason(
    bench: SqsBench, caplog: pytest.LogCaptureFixture, queue: str, message: Message
) -> None:
    await bench.queues.send_tasks(JOB, RUN, [(0, "0" * 26)])
    await bench.queues.send(queue, message)

    found = await looks(bench, bench.queues, queue)
    own = [TaskMessage(JOB, RUN, "0" * 26)] if queue == QUEUE else []
    assert [delivery.message for delivery in found] == own
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert told == [f"a message cannot be read: {MISPLACED}"]
    [letter] = await received(bench, DEAD_LETTER_QUEUE)
    assert msgspec.json.decode(letter["Body"], type=Message) == message
    assert letter["MessageAttributes"][REASON]["StringValue"] == MISPLACED


@pytest.mark.parametrize("fails", [SEND, DELETE])
async def test_what_cannot_be_moved_now_is_moved_when_it_comes_again(
    bench: SqsBench, fails: tuple[str, str]
) -> None:
    faulty = FaultyAws(bench.aws)
    faulty.fail(*fails, ConveyorError(ErrorCode.UNAVAILABLE, "sqs is away"))
    await send(bench, CONTROL_QUEUE, {"MessageBody": "garbage"}, {"MessageBody": READABLE})
    found = await bench.process(aws=faulty).receive(CONTROL_QUEUE, limit=10, visibility=20)

    assert [delivery.message for delivery in found] == [deletion(RUN)]
    assert faulty.fired == 1
    assert await bodies(bench, DEAD_LETTER_QUEUE) == ["garbage"] * (fails == DELETE)
    await bench.advance(20)
    await looks(bench, bench.process(aws=faulty))
    assert await bodies(bench, DEAD_LETTER_QUEUE) == ["garbage"] * (1 + (fails == DELETE))
    assert await bodies(bench, CONTROL_QUEUE) == []


async def test_a_dead_letter_that_is_received_stays_one(bench: SqsBench) -> None:
    await send(bench, DEAD_LETTER_QUEUE, {"MessageBody": "garbage"})

    assert await looks(bench, bench.queues, DEAD_LETTER_QUEUE) == []
    assert await bodies(bench, DEAD_LETTER_QUEUE) == ["garbage"]


def form(index: int) -> str:
    """The order to work a row, by turns as versions without limits of hosts write it, and as those
    with them do."""
    ids = f'"job_id":"{JOB}","run_id":"{RUN}","task_id":"{RUN}-{index}"'
    more = '"version":2,"host":"a.example:80"' if index % 2 else '"version":1'
    return f'{{"type":"task",{ids},{more}}}'


@pytest.mark.slow
async def test_old_and_new_workers_side_by_side_lose_no_message_and_make_none_a_dead_letter(
    bench: SqsBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, old = 40, bench.process()
    await bench.queues.send_tasks(JOB, RUN, bench.rows.write(RUN, 0))
    await looks(bench, bench.queues, QUEUE)
    where = f"{run_queue(RUN)}-1"
    for first in range(0, count, 10):
        await send(bench, where, *({"MessageBody": form(one)} for one in range(first, first + 10)))

    worked: dict[str, list[str]] = {"old": [], "new": []}
    sides = [("old", old, 1), ("new", bench.queues, 2)]
    for _ in range(20):
        sides.reverse()
        for name, queues, version in sides:
            monkeypatch.setattr(sqs_messages, "MESSAGE_VERSION", version)
            found = await queues.receive(QUEUE, limit=4, visibility=20)
            worked[name] += [_task(delivery) for delivery in found]
            await queues.delete(QUEUE, [delivery.receipt for delivery in found])
        await bench.advance(20)

    assert sorted(worked["old"] + worked["new"]) == sorted(f"{RUN}-{n}" for n in range(count))
    assert {int(one.rpartition("-")[2]) % 2 for one in worked["old"]} == {0}
    assert await bodies(bench, where) == await bodies(bench, DEAD_LETTER_QUEUE) == []


def _task(delivery: Delivery) -> str:
    assert isinstance(delivery.message, TaskMessage)
    return delivery.message.task_id
