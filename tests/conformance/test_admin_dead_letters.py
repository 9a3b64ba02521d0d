"""`conveyor admin dlq`: letters listed with their reason and age, sent back, removed."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import pytest

from conveyor.clock import SystemClock
from conveyor.ports.queues import (
    CONTROL_QUEUE,
    DEAD_LETTER_QUEUE,
    DeleteMessage,
    ExportMessage,
    IngestMessage,
    Message,
    TaskMessage,
    TemplateMessage,
)
from conveyor.prod.admin.dead_letters import DeadLetters, Letter, open_dead_letters
from conveyor.prod.admin.resources import QueuesResource, TableResource
from conveyor.prod.aws.client import AwsClient
from conveyor.prod.aws.opening import open_aws
from conveyor.prod.dynamodb.client import Table
from conveyor.prod.dynamodb.run_rows import DynamoRunRows, RunPlaces
from conveyor.prod.dynamodb.runs import DynamoGenerations
from conveyor.prod.options import ProdOptions
from conveyor.prod.sqs.messages import MISPLACED, NO_MESSAGE, OF_ANOTHER_VERSION
from conveyor.prod.sqs.queues import SqsQueues
from conveyor.prod.sqs.registry import prefix
from tests.conformance.emulators import address, aws_options

pytestmark = pytest.mark.extended

CLOCK = SystemClock()
JOB, RUN = "01JOB0000000000000000000AA", "01RVN0000000000000000000AA"
REASON = "a part of the staged list is missing"


class Fleet:
    """The queues of one environment, and its dead letters."""

    def __init__(self, aws: AwsClient, options: ProdOptions, letters: DeadLetters) -> None:
        self.letters = letters
        self.aws = aws
        table = Table(aws, options.table, CLOCK)
        self.queues = SqsQueues(
            aws,
            CLOCK,
            DynamoGenerations(DynamoRunRows(table, RunPlaces(table))),
            self._no_rows,
            environment=options.environment,
        )
        self._dead = f"{prefix(options.environment)}{DEAD_LETTER_QUEUE}"

    async def bury(self, *messages: Message) -> None:
        """Give messages up."""
        for message in messages:
            await self.queues.send(DEAD_LETTER_QUEUE, message)

    async def bury_text(self, text: str) -> None:
        """Give up whatever somebody sent."""
        where = await self.aws.call("sqs", "get_queue_url", {"QueueName": self._dead})
        entry = {"Id": "0", "MessageBody": text}
        await self.aws.call(
            "sqs", "send_message_batch", {"QueueUrl": where["QueueUrl"], "Entries": [entry]}
        )

    async def control(self) -> list[Message]:
        """Return the messages of the control queue."""
        found = await self.queues.receive(CONTROL_QUEUE, limit=10, visibility=30.0)
        return [delivery.message for delivery in found]

    async def _no_rows(self, _run_id: str, _after: int, _limit: int) -> list[tuple[int, str]]:
        return []


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    environment = f"test-{secrets.token_hex(6)}"
    options = ProdOptions(
        aws=aws_options(
            dynamodb_endpoint=address("CONVEYOR_TEST_DYNAMODB"),
            sqs_endpoint=address("CONVEYOR_TEST_SQS"),
        ),
        environment=environment,
        table=f"conveyor-{environment}",
        bucket="none",
        ledger="dynamodb",
        root_secret=b"x",
    )
    aws = await open_aws(options.aws, CLOCK, "dynamodb", "sqs")
    table = TableResource(aws, options.table, CLOCK)
    queues = QueuesResource(aws, CLOCK, environment=environment, max_receives=1_000)
    await table.ensure()
    await queues.ensure()
    async with await open_dead_letters(options, CLOCK) as letters:
        yield Fleet(aws, options, letters)
    await queues.remove()
    await table.remove()
    await aws.aclose()


async def test_letters_are_listed_and_stay(fleet: Fleet) -> None:
    assert await fleet.letters.peek(limit=10) == []
    await fleet.bury(IngestMessage(JOB, RUN, REASON), TaskMessage(JOB, RUN, "0" * 26))
    await fleet.bury(TemplateMessage(JOB, RUN, REASON))
    await fleet.bury_text('{"type":"task","version":99}')
    first = await fleet.letters.peek(limit=10)
    second = await fleet.letters.peek(limit=10)

    assert {letter.about for letter in first} == {
        f"ingest {JOB} {RUN}",
        f"template {JOB} {RUN}",
        f"task {JOB} {RUN} {'0' * 26}",
        "cannot be read",
    }
    assert {letter.reason for letter in first} == {REASON, "", OF_ANOTHER_VERSION}
    assert all(0.0 <= letter.age < 60.0 for letter in first)
    assert all(letter.left == 14 * 86_400 - letter.age for letter in first)
    assert {letter.letter_id for letter in second} == {letter.letter_id for letter in first}
    assert len(await fleet.letters.peek(limit=2)) == 2


async def test_a_letter_that_lay_in_a_queue_of_other_messages_says_so(fleet: Fleet) -> None:
    await fleet.queues.send(CONTROL_QUEUE, TaskMessage(JOB, RUN, "0" * 26))
    assert await fleet.control() == []

    [letter] = await fleet.letters.peek(limit=10)
    assert letter.about == f"task {JOB} {RUN} {'0' * 26}"
    assert letter.reason == MISPLACED


def test_a_letter_is_kept_until_14_days_after_it_was_first_sent() -> None:
    """Not after it was moved here."""
    message = TaskMessage(JOB, RUN, "0" * 26)
    moved_after_13_days = Letter("one", message, age=13 * 86_400.0 + 3_600.0, receipt="")

    assert moved_after_13_days.left == 23 * 3_600.0
    assert Letter("one", message, age=15 * 86_400.0, receipt="").left == 0.0


async def test_a_letter_goes_back_to_the_control_queue_without_its_reason(fleet: Fleet) -> None:
    await fleet.bury(ExportMessage(JOB, RUN, "E", REASON), DeleteMessage(JOB, RUN, final=True))
    await fleet.bury(TemplateMessage(JOB, RUN, REASON))
    letters = {letter.about.split()[0]: letter for letter in await fleet.letters.peek(limit=10)}
    chosen = frozenset(letters[kind].letter_id for kind in ("export", "template"))

    assert await fleet.letters.redrive(chosen) == dict.fromkeys(chosen)
    sent = sorted(await fleet.control(), key=repr)
    assert sent == [ExportMessage(JOB, RUN, "E"), TemplateMessage(JOB, RUN)]
    [left] = await fleet.letters.peek(limit=10)
    assert left.message == DeleteMessage(JOB, RUN, final=True)


async def test_all_of_them_go_back(fleet: Fleet) -> None:
    for number in range(12):
        await fleet.bury(DeleteMessage(JOB, f"{RUN[:-2]}{number:02}"))
    done = await fleet.letters.redrive(None)

    assert list(done.values()) == [None] * 12
    assert await fleet.letters.peek(limit=20) == []
    assert len(await fleet.control() + await fleet.control()) == 12


async def test_what_cannot_go_back_stays_and_says_why(fleet: Fleet) -> None:
    await fleet.bury(TaskMessage(JOB, RUN, "0" * 26))
    await fleet.bury_text("no message")
    done = await fleet.letters.redrive(None)

    assert set(done.values()) == {"its run has no queue any more", NO_MESSAGE}
    assert len(await fleet.letters.peek(limit=10)) == 2


async def test_letters_are_removed_by_their_ids(fleet: Fleet) -> None:
    await fleet.bury(DeleteMessage(JOB, RUN), IngestMessage(JOB, RUN))
    [first, second] = await fleet.letters.peek(limit=10)
    gone = frozenset({first.letter_id, "unknown"})

    assert await fleet.letters.drop(gone) == {first.letter_id: None}
    assert [letter.letter_id for letter in await fleet.letters.peek(limit=10)] == [second.letter_id]
    assert await fleet.letters.drop(None) == {second.letter_id: None}
    assert await fleet.letters.peek(limit=10) == []
    assert await fleet.control() == []
