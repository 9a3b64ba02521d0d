"""The dead letters of an environment: listed, sent back to their queues, or removed.

SQS shows a message only by delivering it. Each look and each command therefore receives the
letters, which hides them from others, for half a minute at most, and makes those visible again that
stay.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import msgspec

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
from conveyor.ports.dead_letters import DeadLetter, LetterPage
from conveyor.ports.queues import (
    CONTROL_QUEUE,
    DEAD_LETTER_QUEUE,
    MAX_BATCH,
    ExportMessage,
    IngestMessage,
    Message,
    QueueMissing,
    Queues,
    TaskMessage,
    TemplateMessage,
    run_queue,
)
from conveyor.ports.tasks import UnfinishedTasks
from conveyor.prod.aws.calls import Aws, AwsRefused
from conveyor.prod.aws.opening import open_clients
from conveyor.prod.aws.refusals import describe
from conveyor.prod.dynamodb.client import Table
from conveyor.prod.dynamodb.run_rows import DynamoRunRows, RunPlaces
from conveyor.prod.dynamodb.runs import DynamoGenerations
from conveyor.prod.options import ProdOptions
from conveyor.prod.sqs.messages import NOT_BEFORE, REASON, UnreadableMessage, read
from conveyor.prod.sqs.queues import SqsQueues
from conveyor.prod.sqs.registry import NO_QUEUE, RETENTION, prefix

VISIBILITY_TIMEOUT = 30
"""Seconds that an interrupted command leaves letters hidden."""
RECEIVE_WAIT = 1
"""Seconds that a receive waits; a short poll would ask only some of the servers."""
MOST_LISTED = 500
"""Letters that a page is chosen from."""
MOST_SOUGHT = 5_000
"""Letters among which an API looks for a chosen one: somebody waits for the page."""


@dataclass(frozen=True, slots=True)
class Letter:
    """One dead letter, as far as this version can read it. `sent` is the instant, in milliseconds,
    when it first was, and `age` the seconds since then."""

    letter_id: str
    message: Message | UnreadableMessage
    age: float
    receipt: str
    attribute: str = ""
    sent: int = 0

    @property
    def left(self) -> float:
        """Seconds until SQS removes it, which counts from when it was first sent."""
        return max(0.0, RETENTION - self.age)

    @property
    def reason(self) -> str:
        """The reason why it was given up: in the message, or in the `attribute` of the letter. A
        message that SQS moved after too many receives has none."""
        message = self.message
        tells = IngestMessage | TemplateMessage | ExportMessage | UnreadableMessage
        told = message.reason if isinstance(message, tells) else ""
        return told or self.attribute

    @property
    def kind(self) -> str:
        """The kind of its message, "" if it cannot be read."""
        message = self.message
        if isinstance(message, UnreadableMessage):
            return ""
        return type(message).__name__.removesuffix("Message").lower()

    @property
    def about(self) -> str:
        """Its kind, and the ids in it."""
        message = self.message
        if isinstance(message, UnreadableMessage):
            return "cannot be read"
        part = getattr(message, "task_id", "") or getattr(message, "export_id", "")
        return " ".join(filter(None, (self.kind, message.job_id, message.run_id, part)))

    def shown(self) -> DeadLetter:
        """Return it as operators are shown it."""
        message = self.message
        return DeadLetter(
            letter_id=self.letter_id,
            kind=self.kind,
            job_id=getattr(message, "job_id", ""),
            run_id=getattr(message, "run_id", ""),
            task_id=getattr(message, "task_id", ""),
            export_id=getattr(message, "export_id", ""),
            reason=self.reason,
            first_sent=self.sent,
            kept_until=self.sent + RETENTION * 1_000,
        )


class DeadLetters:
    """The dead letters of one environment. Belongs to one event loop.

    Looks of one process come one after the other, so that none hides letters from another. A
    chosen letter is looked for among `most` of them.
    """

    def __init__(
        self,
        aws: Aws,
        queues: Queues,
        clock: Clock,
        *,
        environment: str,
        most: float = math.inf,
    ) -> None:
        self._aws = aws
        self._queues = queues
        self._clock = clock
        self._name = f"{prefix(environment)}{DEAD_LETTER_QUEUE}"
        self._most = most
        self._url = ""
        self._looks = anyio.Lock()

    async def find(self) -> str:
        """Return the URL of the queue, which is looked up once. Raises ConveyorError if it does not
        exist."""
        if self._url:
            return self._url
        try:
            answer = await self._aws.call("sqs", "get_queue_url", {"QueueName": self._name})
        except AwsRefused as refused:
            absent = "does not exist: conveyor admin init makes it"
            text = absent if refused.word in NO_QUEUE else f"is not found: {describe(refused)}"
            problem = f"the queue {self._name} {text}"
            raise ConveyorError(ErrorCode.UNAVAILABLE, problem) from None
        self._url = answer["QueueUrl"]
        return self._url

    async def peek(self, *, limit: int) -> list[Letter]:
        """Return at most `limit` letters, oldest first, and leave all of them in the queue."""
        found: list[Letter] = []
        async with self._looks, aclosing(self._receive_all()) as receives:
            async for letters in receives:
                found += letters
                if len(found) >= limit:
                    break
            await self._make_visible(found)
        return sorted(found, key=lambda letter: -letter.age)[:limit]

    async def page(self, after: tuple[int, str] | None, *, limit: int) -> LetterPage:
        found = await self.peek(limit=MOST_LISTED)
        shown = sorted((letter.shown() for letter in found), key=lambda one: one.place)
        behind = [one for one in shown if after is None or one.place > after]
        return LetterPage(
            letters=behind[:limit],
            looked=len(found),
            has_more=len(behind) > limit,
            is_cut=len(found) == MOST_LISTED,
        )

    async def redrive(self, chosen: frozenset[str] | None) -> dict[str, str | None]:
        return await self._act_on(chosen, self._send_back)

    async def drop(self, chosen: frozenset[str] | None) -> dict[str, str | None]:
        async def nothing(_letter: Letter) -> None:
            return None

        return await self._act_on(chosen, nothing)

    async def _act_on(
        self, chosen: frozenset[str] | None, act: Callable[[Letter], Awaitable[str | None]]
    ) -> dict[str, str | None]:
        """Act on letters; remove those that succeed, and make the others visible again."""
        done: dict[str, str | None] = {}
        kept: list[Letter] = []
        async with self._looks, aclosing(self._receive_all()) as receives:
            async for letters in receives:
                ended: list[Letter] = []
                for letter in letters:
                    if chosen is not None and letter.letter_id not in chosen:
                        kept.append(letter)
                        continue
                    problem = done[letter.letter_id] = await act(letter)
                    (ended if problem is None else kept).append(letter)
                await self._delete(ended)
                if chosen is not None and (chosen <= done.keys() or len(kept) >= self._most):
                    break
            await self._make_visible(kept)
        return done

    async def _send_back(self, letter: Letter) -> str | None:
        message = letter.message
        if isinstance(message, UnreadableMessage):
            return message.reason
        if isinstance(message, IngestMessage | TemplateMessage | ExportMessage):
            message = msgspec.structs.replace(message, reason="")
        to = run_queue(message.run_id) if isinstance(message, TaskMessage) else CONTROL_QUEUE
        try:
            await self._queues.send(to, message)
        except QueueMissing:
            return "its run has no queue any more"
        return None

    async def _receive_all(self) -> AsyncGenerator[list[Letter]]:
        """Receive letters, ten at a time and each once, until no new one comes."""
        seen: set[str] = set()
        while True:
            answer = await self._call(
                "receive_message",
                MaxNumberOfMessages=MAX_BATCH,
                VisibilityTimeout=VISIBILITY_TIMEOUT,
                WaitTimeSeconds=RECEIVE_WAIT,
                AttributeNames=["SentTimestamp"],
                MessageAttributeNames=[NOT_BEFORE, REASON],
            )
            letters = [self._letter(raw) for raw in answer.get("Messages", [])]
            fresh = [letter for letter in letters if letter.letter_id not in seen]
            if not fresh:
                return
            seen.update(letter.letter_id for letter in fresh)
            yield fresh

    def _letter(self, raw: dict[str, Any]) -> Letter:
        sent = int(raw.get("Attributes", {}).get("SentTimestamp", self._clock.now()))
        age = max(0.0, (self._clock.now() - sent) / 1_000)
        told = raw.get("MessageAttributes", {}).get(REASON, {}).get("StringValue", "")
        return Letter(raw["MessageId"], read(raw), age, raw["ReceiptHandle"], told, sent)

    async def _delete(self, letters: Sequence[Letter]) -> None:
        for entries in _entries(letters):
            await self._call("delete_message_batch", Entries=entries)

    async def _make_visible(self, letters: Sequence[Letter]) -> None:
        for entries in _entries(letters, VisibilityTimeout=0):
            await self._call("change_message_visibility_batch", Entries=entries)

    async def _call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        url = await self.find()
        return await self._aws.call("sqs", operation, {"QueueUrl": url, **parameters})


def _entries(letters: Sequence[Letter], **more: int) -> Iterator[list[dict[str, Any]]]:
    """Make the entries of batch calls from the receipts of letters."""
    for start in range(0, len(letters), MAX_BATCH):
        yield [
            {"Id": str(number), "ReceiptHandle": letter.receipt, **more}
            for number, letter in enumerate(letters[start : start + MAX_BATCH])
        ]


@asynccontextmanager
async def open_dead_letters(options: ProdOptions, clock: Clock) -> AsyncIterator[DeadLetters]:
    """Open the dead letters of one environment. Raises ConveyorError if their queue does not
    exist."""
    aws = await open_clients(options.aws, clock, "dynamodb", "sqs")
    async with aclosing(aws):
        table = Table(aws, options.table, clock)
        records = DynamoRunRows(table, RunPlaces(table))
        queues = SqsQueues(
            aws, clock, DynamoGenerations(records), _NoRows(), environment=options.environment
        )
        letters = DeadLetters(aws, queues, clock, environment=options.environment)
        await letters.find()
        yield letters


class _NoRows(UnfinishedTasks):
    """Fills no queue, because none is created here."""

    async def unfinished_after(self, run_id: str, after: int, limit: int) -> list[tuple[int, str]]:
        return []

    async def task_hosts(self, run_id: str, tasks: Sequence[tuple[int, str]]) -> list[str]:
        return [""] * len(tasks)
