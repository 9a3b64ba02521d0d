"""The dead letters of an environment: listed, sent back to their queues, or removed.

SQS shows a message only by delivering it. Each command therefore receives the letters, which hides
them from others for half a minute, and makes those visible again that stay.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import msgspec

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
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
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.aws.client import AwsClient
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


@dataclass(frozen=True, slots=True)
class Letter:
    """One dead letter, as far as this version can read it. `age` in seconds since it was first
    sent."""

    letter_id: str
    message: Message | UnreadableMessage
    age: float
    receipt: str
    attribute: str = ""

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
    def about(self) -> str:
        """Its kind, and the ids in it."""
        message = self.message
        if isinstance(message, UnreadableMessage):
            return "cannot be read"
        kind = type(message).__name__.removesuffix("Message").lower()
        part = getattr(message, "task_id", "") or getattr(message, "export_id", "")
        return " ".join(filter(None, (kind, message.job_id, message.run_id, part)))


class DeadLetters:
    """The dead letters of one environment. Opened by `open_dead_letters`; closed at the end of its
    block. `url` is the URL of their queue."""

    def __init__(self, aws: AwsClient, queues: Queues, clock: Clock, *, url: str) -> None:
        self._aws = aws
        self._queues = queues
        self._clock = clock
        self._url = url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._aws.aclose()

    async def peek(self, *, limit: int) -> list[Letter]:
        """Return at most `limit` letters, oldest first, and leave all of them in the queue."""
        found: list[Letter] = []
        async for letters in self._receive_all():
            found += letters
            if len(found) >= limit:
                break
        await self._make_visible(found)
        return sorted(found, key=lambda letter: -letter.age)[:limit]

    async def redrive(self, chosen: frozenset[str] | None) -> dict[str, str | None]:
        """Send letters back to the control queue or to the queue of their run; None: all.

        Returns by letter id None, or the reason why the letter stays. Letters that were not found
        are missing.
        """
        return await self._act_on(chosen, self._send_back)

    async def drop(self, chosen: frozenset[str] | None) -> dict[str, str | None]:
        """Remove letters for good; None: all. Returns as `redrive` does."""

        async def nothing(_letter: Letter) -> None:
            return None

        return await self._act_on(chosen, nothing)

    async def _act_on(
        self, chosen: frozenset[str] | None, act: Callable[[Letter], Awaitable[str | None]]
    ) -> dict[str, str | None]:
        """Act on letters; remove those that succeed, and make the others visible again."""
        done: dict[str, str | None] = {}
        kept: list[Letter] = []
        async for letters in self._receive_all():
            ended: list[Letter] = []
            for letter in letters:
                if chosen is not None and letter.letter_id not in chosen:
                    kept.append(letter)
                    continue
                problem = done[letter.letter_id] = await act(letter)
                (ended if problem is None else kept).append(letter)
            await self._delete(ended)
            if chosen is not None and chosen <= done.keys():
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

    async def _receive_all(self) -> AsyncIterator[list[Letter]]:
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
        return Letter(raw["MessageId"], read(raw), age, raw["ReceiptHandle"], told)

    async def _delete(self, letters: Sequence[Letter]) -> None:
        for entries in _entries(letters):
            await self._call("delete_message_batch", Entries=entries)

    async def _make_visible(self, letters: Sequence[Letter]) -> None:
        for entries in _entries(letters, VisibilityTimeout=0):
            await self._call("change_message_visibility_batch", Entries=entries)

    async def _call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        return await self._aws.call("sqs", operation, {"QueueUrl": self._url, **parameters})


def _entries(letters: Sequence[Letter], **more: int) -> Iterator[list[dict[str, Any]]]:
    """Make the entries of batch calls from the receipts of letters."""
    for start in range(0, len(letters), MAX_BATCH):
        yield [
            {"Id": str(number), "ReceiptHandle": letter.receipt, **more}
            for number, letter in enumerate(letters[start : start + MAX_BATCH])
        ]


async def open_dead_letters(options: ProdOptions, clock: Clock) -> DeadLetters:
    """Open the dead letters of one environment. Raises ConveyorError if their queue does not
    exist."""
    aws = await open_clients(options.aws, clock, "dynamodb", "sqs")
    name = f"{prefix(options.environment)}{DEAD_LETTER_QUEUE}"
    try:
        url = (await aws.call("sqs", "get_queue_url", {"QueueName": name}))["QueueUrl"]
    except AwsRefused as refused:
        await aws.aclose()
        absent = "does not exist: conveyor admin init makes it"
        text = absent if refused.word in NO_QUEUE else f"is not found: {describe(refused)}"
        raise ConveyorError(ErrorCode.UNAVAILABLE, f"the queue {name} {text}") from None
    except BaseException:
        await aws.aclose()
        raise
    table = Table(aws, options.table, clock)
    records = DynamoRunRows(table, RunPlaces(table))
    queues = SqsQueues(
        aws, clock, DynamoGenerations(records), _no_rows, environment=options.environment
    )
    return DeadLetters(aws, queues, clock, url=url)


async def _no_rows(_run_id: str, _after: int, _limit: int) -> list[tuple[int, str]]:
    """Fill no queue, because none is created here."""
    return []
