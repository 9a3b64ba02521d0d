"""Messages as SQS carries them: their ids and their version as JSON, and when they may be seen.

Receipts as this adapter hands them out: the handle of SQS, and when its message was asked for.

SQS hides a message for twelve hours after its receipt at most, however often that is prolonged, and
refuses to go beyond: so it has to be known how much of that is left.

Batches of SQS: ten entries a call, each of which succeeds or fails by itself.

What becomes of messages that cannot be read.

One of another version, or of a kind that is not known here, stays hidden for a process that knows
it. No process will ever read the others: they are dead letters at once, not only once they were
received too often.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, get_args

import msgspec

from conveyor.aio.concurrency import for_each, for_each_collect
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
from conveyor.ports.queues import DEAD_LETTER_QUEUE, MAX_BATCH, MESSAGE_VERSION, Message
from conveyor.prod.aws.calls import Aws, retry_unprocessed
from conveyor.prod.sqs.registry import QueueRegistry, RecentlyUsed

LONGEST_HIDING = 43_200
"""Seconds after its receipt in which SQS may hide a message."""


def receipt_of(handle: str, *, asked_at: float) -> str:
    """The receipt of a message. `asked_at` in seconds of this process's clock, which never goes
    back."""
    return f"{asked_at:.3f} {handle}"


def handle_of(receipt: str) -> str | None:
    """The handle in a receipt; None where it is none of ours."""
    asked_at, _, handle = receipt.partition(" ")
    return None if _seconds(asked_at) is None else handle or None


def hiding(receipt: str, visibility: float, *, now: float) -> int | None:
    """The whole seconds that a message may be hidden from now on, so long as is wished at most.

    Rounded up, but 0 stays 0. None where twelve hours have passed: it is visible already.
    """
    wished = math.ceil(max(visibility, 0.0))
    asked_at = _seconds(receipt.partition(" ")[0])
    # The answer took a while: the last second is not touched.
    left = LONGEST_HIDING - 1 - math.ceil(now - (now if asked_at is None else asked_at))
    if wished and left <= 0:
        return None
    return min(wished, max(left, 0))


def _seconds(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


MOST_CALLS = 8
"""Calls at a time of one `in_batches`: half of the threads are left to acknowledge meanwhile."""


async def in_batches(
    aws: Aws,
    clock: Clock,
    operation: str,
    url: str,
    entries: Sequence[dict[str, Any]],
    *,
    void: frozenset[str] = frozenset(),
    apart: bool = False,
) -> None:
    """Make one call for each ten entries, some side by side, and again for entries that failed.

    Failures with a code in `void` are passed over. The first call that fails for good ends all, but
    those that are `apart` are all made, and it is raised in the end. Raises ConveyorError:
    unavailable where entries still fail after all rounds, internal where one is not fit to be
    taken; AwsRefused.
    """

    async def call(some: Sequence[dict[str, Any]]) -> None:
        await _call(aws, clock, operation, url, some, void)

    pieces = [entries[start : start + MAX_BATCH] for start in range(0, len(entries), MAX_BATCH)]
    await (for_each_collect if apart else for_each)(call, pieces, limit=MOST_CALLS)


async def _call(
    aws: Aws,
    clock: Clock,
    operation: str,
    url: str,
    entries: Sequence[dict[str, Any]],
    void: frozenset[str],
) -> None:
    async def make(left: list[dict[str, Any]]) -> list[dict[str, Any]]:
        answer = await aws.call("sqs", operation, {"QueueUrl": url, "Entries": left})
        done = {one["Id"] for one in answer.get("Successful", [])}
        for failure in answer.get("Failed", []):
            if failure["Code"] in void:
                done.add(failure["Id"])
            elif failure["SenderFault"]:
                raise ConveyorError(
                    ErrorCode.INTERNAL,
                    f"sqs refuses an entry of {operation}: {failure['Code']}",
                )
        # Of what it says nothing, nothing may have been done: twice is better than never.
        return [one for one in left if one["Id"] not in done]

    numbered = [{**one, "Id": str(number)} for number, one in enumerate(entries)]
    await retry_unprocessed(
        make, numbered, clock, complaint=f"sqs leaves a part of {operation} undone"
    )


NOT_BEFORE = "not_before"
"""The message attribute that holds an instant, in milliseconds, which no delay of SQS reaches."""
MOST_DELAY = 900
"""Seconds that SQS itself delays a message at most."""
MOST_INSTANT = 10**18
"""Beyond any time, and still a number that is exact wherever it is calculated with."""
OF_ANOTHER_VERSION = "it is of another version"
OF_ANOTHER_KIND = "it is of a kind that this version does not know"
NO_MESSAGE = "its body is no message"
NO_INSTANT = f"its {NOT_BEFORE} is no instant"
NO_IDS = "an id in it is none"

_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


_id = re.compile(r"[0-9A-Za-z_-]{1,64}")


class UnreadableMessage(msgspec.Struct, frozen=True):
    """What was received and is no message to this version, and why: in a clause that shows nothing
    of it."""

    reason: str

    @property
    def may_be_read_elsewhere(self) -> bool:
        """Whether a process of another version may understand it."""
        return self.reason in (OF_ANOTHER_VERSION, OF_ANOTHER_KIND)


class _Any(msgspec.Struct):
    """What a message of any version has."""

    type: str
    version: int = MESSAGE_VERSION


_KINDS = {kind.__struct_config__.tag for kind in get_args(Message)}


def entry(message: Message, *, delay: float, now: int) -> dict[str, Any]:
    """What SendMessageBatch takes for a message, but for the entry's id. SQS counts whole seconds:
    a message comes later rather than sooner."""
    body = msgspec.json.encode(message).decode()
    if not body.isascii():
        # SQS takes some characters in no message, and a reason may hold any: as escapes it does.
        body = json.dumps(msgspec.json.decode(body))
    made: dict[str, Any] = {"MessageBody": body}
    seconds = math.ceil(max(delay, 0.0))
    if seconds:
        made["DelaySeconds"] = min(seconds, MOST_DELAY)
    if seconds > MOST_DELAY:
        until = str(now + seconds * 1_000)
        made["MessageAttributes"] = {NOT_BEFORE: {"DataType": "Number", "StringValue": until}}
    return made


def read(received: dict[str, Any]) -> Message | UnreadableMessage:
    """The message in what was received. Anybody with the right to may have sent anything; one of
    another version a process of that version understands."""
    body = received["Body"]
    try:
        about = msgspec.json.decode(body, type=_Any)
        if about.version > MESSAGE_VERSION:
            return UnreadableMessage(OF_ANOTHER_VERSION)
        if about.type not in _KINDS:
            return UnreadableMessage(OF_ANOTHER_KIND)
        message = _decoder.decode(body)
    except (ValueError, RecursionError):
        return UnreadableMessage(NO_MESSAGE)
    ids = (getattr(message, name) for name in message.__struct_fields__ if name.endswith("_id"))
    if not all(map(_id.fullmatch, ids)):
        return UnreadableMessage(NO_IDS)
    try:
        _not_before(received)
    except (KeyError, ValueError):
        return UnreadableMessage(NO_INSTANT)
    return message


def seconds_early(received: dict[str, Any], *, now: int) -> int:
    """How many seconds too early a message came that can be read; 0 where it may be seen."""
    return max(0, math.ceil((_not_before(received) - now) / 1_000))


def _not_before(received: dict[str, Any]) -> int:
    """Raises KeyError or ValueError for an attribute that holds no instant."""
    attribute = received.get("MessageAttributes", {}).get(NOT_BEFORE)
    return 0 if attribute is None else min(int(attribute["StringValue"]), MOST_INSTANT)


_SENT = ("DataType", "StringValue", "BinaryValue")
"""What of a received attribute can be sent."""

_log = logging.getLogger("conveyor.queues")


class UnreadableMessages:
    """Tells of each once, and gives up those that nobody can read. Belongs to one event loop."""

    def __init__(self, aws: Aws, clock: Clock, addresses: QueueRegistry) -> None:
        self._aws = aws
        self._clock = clock
        self._addresses = addresses
        self._told: RecentlyUsed[bool] = RecentlyUsed()

    async def deal_with(
        self, queue: str, found: Sequence[tuple[dict[str, Any], UnreadableMessage]]
    ) -> None:
        """Deal with messages of a queue, each as it was received. One that cannot be given up now
        comes again, as it stays where it is."""
        for received, why in found:
            self._tell(queue, received["MessageId"], why.reason)
            if not why.may_be_read_elsewhere and queue != DEAD_LETTER_QUEUE:
                with suppress(ConveyorError):
                    await self._give_up(queue, received)

    async def _give_up(self, queue: str, received: dict[str, Any]) -> None:
        """Sent before it is deleted: if need be it is there twice, but never nowhere."""
        letter: dict[str, Any] = {"MessageBody": received["Body"]}
        instant = received.get("MessageAttributes", {}).get(NOT_BEFORE)
        if instant is not None:
            kept = {name: instant[name] for name in _SENT if name in instant}
            letter["MessageAttributes"] = {NOT_BEFORE: kept}
        gone = {"ReceiptHandle": received["ReceiptHandle"]}
        for operation, there, one in (
            ("send_message_batch", DEAD_LETTER_QUEUE, letter),
            ("delete_message_batch", queue, gone),
        ):
            url = await self._addresses.find(there)
            await in_batches(self._aws, self._clock, operation, url, [one])

    def _tell(self, queue: str, message_id: str, reason: str) -> None:
        if self._told.get(message_id) is None:
            self._told.put(message_id, True)
            _log.error(
                "a message cannot be read: %s",
                reason,
                extra={"queue": queue, "message_id": message_id},
            )
