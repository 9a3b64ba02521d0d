"""`conveyor admin dlq` and the page of operators: letters listed with their reason and age, sent
back, removed."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import anyio
import pytest
from msgspec import UNSET

from conveyor.clock import SystemClock
from conveyor.domain.errors import ConveyorError
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
from conveyor.prod.admin import dead_letters
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
from conveyor.prod.sqs.registry import RETENTION, prefix
from conveyor.service.dead_letters import LETTERS_SHOWN, OperatorLetters
from conveyor.service.results import Cursors
from tests.conformance.emulators import address, aws_options
from tests.conformance.queue_rows import Rows

pytestmark = pytest.mark.extended

CLOCK = SystemClock()
JOB, RUN = "01JOB0000000000000000000AA", "01RVN0000000000000000000AA"
REASON = "a part of the staged list is missing"


class Fleet:
    """The queues of one environment, and its dead letters."""

    def __init__(self, aws: AwsClient, options: ProdOptions, letters: DeadLetters) -> None:
        self.letters = letters
        self.environment = options.environment
        self.aws = aws
        table = Table(aws, options.table, CLOCK)
        self.queues = SqsQueues(
            aws,
            CLOCK,
            DynamoGenerations(DynamoRunRows(table, RunPlaces(table))),
            Rows(),
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
    async with open_dead_letters(options, CLOCK) as letters:
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


# -- the page of operators --


def letters_of_an_api(fleet: Fleet, *, environment: str = "", most: int = 100) -> DeadLetters:
    """The dead letters as an API opens them: their queue is not looked for yet."""
    name = environment or fleet.environment
    return DeadLetters(fleet.aws, fleet.queues, CLOCK, environment=name, most=most)


async def test_the_page_of_operators_has_each_letter_once_and_leaves_all(fleet: Fleet) -> None:
    count = LETTERS_SHOWN + 3
    for number in range(count - 2):
        await fleet.bury(DeleteMessage(JOB, f"{RUN[:-2]}{number:02}"))
    await fleet.bury(TaskMessage(JOB, RUN, "0" * 26), ExportMessage(JOB, RUN, "E", REASON))
    letters = OperatorLetters(letters_of_an_api(fleet), Cursors([b"key"]))

    first = await letters.page(None)
    assert isinstance(first.next_cursor, str)
    second = await letters.page(first.next_cursor)

    found = {one.letter_id: one for one in (*first.letters, *second.letters)}
    assert (len(first.letters), len(second.letters), len(found)) == (LETTERS_SHOWN, 3, count)
    assert (first.looked, first.is_cut, second.next_cursor) == (count, False, UNSET)
    [task] = [one for one in found.values() if one.kind == "task"]
    [export] = [one for one in found.values() if one.kind == "export"]
    assert (task.job_id, task.run_id, task.task_id, task.reason) == (JOB, RUN, "0" * 26, UNSET)
    assert (export.run_id, export.export_id, export.reason) == (RUN, "E", REASON)
    assert len(await fleet.letters.peek(limit=100)) == count


async def test_a_page_tells_when_the_letter_was_first_sent_and_how_long_it_is_kept(
    fleet: Fleet,
) -> None:
    before = CLOCK.now()
    await fleet.bury_text("no message")
    letters = letters_of_an_api(fleet)
    [letter] = (await letters.page(None, limit=10)).letters
    [again] = (await letters.page(None, limit=10)).letters

    assert before - 1_000 <= letter.first_sent <= CLOCK.now() + 1_000
    assert letter.kept_until - letter.first_sent == RETENTION * 1_000
    assert (letter.kind, letter.job_id, letter.reason) == ("", "", NO_MESSAGE)
    assert again == letter


async def test_looks_at_the_same_time_hide_no_letter_from_each_other(fleet: Fleet) -> None:
    for number in range(12):
        await fleet.bury(DeleteMessage(JOB, f"{RUN[:-2]}{number:02}"))
    letters, looked = letters_of_an_api(fleet), []

    async def look() -> None:
        looked.append((await letters.page(None, limit=20)).looked)

    async with anyio.create_task_group() as looks:
        for _ in range(3):
            looks.start_soon(look)
    assert looked == [12] * 3


async def test_a_long_queue_is_looked_through_in_part_and_says_so(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "MOST_LISTED", 10)
    for number in range(25):
        await fleet.bury(DeleteMessage(JOB, f"{RUN[:-2]}{number:02}"))
    page = await letters_of_an_api(fleet).page(None, limit=5)

    assert (len(page.letters), page.looked, page.has_more, page.is_cut) == (5, 10, True, True)
    assert await letters_of_an_api(fleet, most=10).drop(frozenset({"unknown"})) == {}
    assert len(await fleet.letters.peek(limit=100)) == 25


async def test_an_operator_sends_one_back_and_drops_one(fleet: Fleet) -> None:
    await fleet.bury(ExportMessage(JOB, RUN, "E", REASON), TaskMessage(JOB, RUN, "0" * 26))
    letters = OperatorLetters(letters_of_an_api(fleet), Cursors([b"key"]))
    by_kind = {one.kind: one.letter_id for one in (await letters.page(None)).letters}

    await letters.redrive(by_kind["export"])
    assert await fleet.control() == [ExportMessage(JOB, RUN, "E")]
    with pytest.raises(ConveyorError, match="the letter stays: its run has no queue any more"):
        await letters.redrive(by_kind["task"])
    await letters.drop(by_kind["task"])
    with pytest.raises(ConveyorError, match="no such dead letter"):
        await letters.drop(by_kind["task"])
    assert (await letters.page(None)).letters == []


async def test_a_fleet_without_its_queue_says_what_makes_it(fleet: Fleet) -> None:
    with pytest.raises(ConveyorError, match="does not exist: conveyor admin init makes it"):
        await letters_of_an_api(fleet, environment="never-made").page(None, limit=5)
