"""Messages, receipts and batches in the forms of SQS.

A message travels as JSON: its ids, its version and, for a delay beyond that of SQS, the instant
from which it may be seen.

A receipt holds the handle of SQS and the moment at which this process asked for the message: SQS
hides a message for at most twelve hours after its receipt, however often that is extended, and
refuses to go beyond, so the adapter must know how much of that is left.

A batch holds ten entries a call; each entry succeeds or fails by itself.

A message of a newer version or an unknown kind stays hidden, for a process that can read it. A
message that no process can read becomes a dead letter at once, instead of after too many receives.
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
from cachetools import LRUCache

from conveyor.aio.concurrency import for_each, for_each_collect
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
from conveyor.ports.queues import (
    CONTROL_QUEUE,
    DEAD_LETTER_QUEUE,
    MAX_BATCH,
    MESSAGE_VERSION,
    Message,
    TaskMessage,
    run_queue,
)
from conveyor.prod.aws.calls import Aws, retry_unprocessed
from conveyor.prod.sqs.registry import MOST_REMEMBERED, QueueRegistry, run_of

LONGEST_HIDING = 43_200
"""Seconds after its receipt for which SQS hides a message at most."""


def receipt_of(handle: str, *, asked_at: float) -> str:
    """Return the receipt of a message. `asked_at` is in seconds of the monotonic clock."""
    return f"{asked_at:.3f} {handle}"


def handle_of(receipt: str) -> str | None:
    """Return the handle in a receipt; None if this adapter did not make the receipt."""
    asked_at, _, handle = receipt.partition(" ")
    return None if _seconds(asked_at) is None else handle or None


def hiding(receipt: str, visibility: float, *, now: float) -> int | None:
    """Return for how many seconds from now SQS may hide a message, at most `visibility`.

    Rounds up, but 0 stays 0. None after twelve hours: the message is visible already.
    """
    wished = math.ceil(max(visibility, 0.0))
    asked_at = _seconds(receipt.partition(" ")[0])
    # SQS counts from an unknown moment while it answered: leave the last second alone.
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
"""Concurrent calls of one `in_batches`: half of the threads stay free to acknowledge meanwhile."""


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
    """Send entries in concurrent calls of ten, and retry those that failed.

    Ignores failures with a code in `void`. The first call that fails for good cancels the others;
    with `apart`, all calls are made before its error is raised. Raises ConveyorError (unavailable)
    if entries still fail after all rounds, (internal) if SQS refuses one for its form; AwsRefused.
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
        # SQS may have skipped the entries that it does not mention: twice is better than never.
        return [one for one in left if one["Id"] not in done]

    numbered = [{**one, "Id": str(number)} for number, one in enumerate(entries)]
    await retry_unprocessed(make, numbered, clock, complaint=f"sqs did not complete {operation}")


NOT_BEFORE = "not_before"
"""The message attribute with the instant, in milliseconds, before which a message stays hidden:
set if its delay is longer than SQS allows."""
DELAY = "delay"
"""The attribute beside it with the same delay in seconds, which SQS's own clock measures."""
SENT_AT, FIRST_RECEIVED_AT = "SentTimestamp", "ApproximateFirstReceiveTimestamp"
RECEIVES = "ApproximateReceiveCount"
MOST_HIDINGS = 3
"""Receipts after which a message counts as due: each was preceded by a hiding for all that was
left, so a clock that still calls it early is wrong."""
MOST_DELAY = 900
"""Seconds by which SQS itself delays a message at most."""
MOST_INSTANT = 10**18
"""Later than any real time, and still exact as a float."""
OF_ANOTHER_VERSION = "its version is newer than this process"
OF_ANOTHER_KIND = "this version does not know its kind"
NO_MESSAGE = "its body is not a message"
NO_INSTANT = f"its {NOT_BEFORE} is not a time"
NO_IDS = "it holds an invalid id"
NO_HOST = "it holds an invalid host"
MISPLACED = "it belongs into another queue"
REASON = "reason"
"""The message attribute of a dead letter that says why it is one."""

_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


_id = re.compile(r"[0-9A-Za-z_-]{1,64}")
_host = re.compile(r"[!-~]{0,300}")


class UnreadableMessage(msgspec.Struct, frozen=True):
    """A received message that this version cannot read. `reason` quotes nothing of it."""

    reason: str

    @property
    def may_be_read_elsewhere(self) -> bool:
        """True if a process of another version may be able to read the message."""
        return self.reason in (OF_ANOTHER_VERSION, OF_ANOTHER_KIND)


class _Header(msgspec.Struct):
    """The fields that messages of all versions have."""

    type: str
    version: int = MESSAGE_VERSION


_KINDS = {kind.__struct_config__.tag for kind in get_args(Message)}


def entry(message: Message, *, delay: float, now: int) -> dict[str, Any]:
    """Return the entry of SendMessageBatch for a message, without the entry's id.

    Rounds the delay up to whole seconds, as SQS counts them.
    """
    body = msgspec.json.encode(message).decode()
    if not body.isascii():
        # SQS refuses some characters, and a reason may hold any: send them as escapes.
        body = json.dumps(msgspec.json.decode(body))
    made: dict[str, Any] = {"MessageBody": body}
    seconds = math.ceil(max(delay, 0.0))
    if seconds:
        made["DelaySeconds"] = min(seconds, MOST_DELAY)
    if seconds > MOST_DELAY:
        until = str(now + seconds * 1_000)
        made["MessageAttributes"] = {
            NOT_BEFORE: {"DataType": "Number", "StringValue": until},
            DELAY: {"DataType": "Number", "StringValue": str(seconds)},
        }
    return made


def read(received: dict[str, Any]) -> Message | UnreadableMessage:
    """Read a received message. Trusts nothing in it: anybody with access to the queue may have sent
    it."""
    body = received["Body"]
    try:
        about = msgspec.json.decode(body, type=_Header)
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
    if isinstance(message, TaskMessage) and not _host.fullmatch(message.host):
        return UnreadableMessage(NO_HOST)
    try:
        _not_before(received)
    except (KeyError, ValueError):
        return UnreadableMessage(NO_INSTANT)
    return message


def find_misplaced(queue: str, message: Message) -> UnreadableMessage | None:
    """Return the reason for which nobody who receives from this queue works the message, if any:
    the queues of a run hold its tasks alone, and the control queue none."""
    if isinstance(message, TaskMessage):
        is_here = queue == run_queue(message.run_id) or run_of(queue) == message.run_id
    else:
        is_here = queue == CONTROL_QUEUE
    return None if is_here or queue == DEAD_LETTER_QUEUE else UnreadableMessage(MISPLACED)


def seconds_early(received: dict[str, Any], *, now: int) -> int:
    """Return for how many more seconds a readable message has to stay hidden; 0 if it is due.

    At its first receipt the clock of SQS tells, whatever this machine's says. Later nobody knows
    the time of SQS: then `now` is believed, but for no more than was left at first.
    """
    left = max(0, math.ceil((_not_before(received) - now) / 1_000))
    found = _left_at_first(received)
    if found is None:
        return left
    receives, at_first = found
    if receives <= 1:
        return at_first
    return min(left, at_first) if receives <= MOST_HIDINGS else 0


def _left_at_first(received: dict[str, Any]) -> tuple[int, int] | None:
    """Return how often a message was received, and the seconds that its delay had left at first;
    None for one without a delay, or of an older version."""
    about = received.get("Attributes", {})
    try:
        delay = int(received["MessageAttributes"][DELAY]["StringValue"])
        waited = int(about[FIRST_RECEIVED_AT]) - int(about[SENT_AT])
        receives = int(about[RECEIVES])
    except (KeyError, ValueError):
        return None
    left = math.ceil(min(delay, MOST_INSTANT) - waited / 1_000)
    return receives, max(0, left)


def _not_before(received: dict[str, Any]) -> int:
    """Return the instant of the attribute, 0 without one. Raises KeyError or ValueError."""
    attribute = received.get("MessageAttributes", {}).get(NOT_BEFORE)
    return 0 if attribute is None else min(int(attribute["StringValue"]), MOST_INSTANT)


_SENT = ("DataType", "StringValue", "BinaryValue")
"""The fields of a received attribute that can be sent again."""

_log = logging.getLogger("conveyor.queues")


class UnreadableMessages:
    """Logs each unreadable message once, and moves those that no process can read to dead letters.

    Belongs to one event loop.
    """

    def __init__(self, aws: Aws, clock: Clock, registry: QueueRegistry) -> None:
        self._aws = aws
        self._clock = clock
        self._registry = registry
        self._logged: LRUCache[str, bool] = LRUCache(MOST_REMEMBERED)

    async def handle(
        self, queue: str, found: Sequence[tuple[dict[str, Any], UnreadableMessage]]
    ) -> None:
        """Handle the unreadable messages of one receive. If a move fails, the message stays in its
        queue and comes again."""
        for received, why in found:
            self._log_once(queue, received["MessageId"], why.reason)
            if not why.may_be_read_elsewhere and queue != DEAD_LETTER_QUEUE:
                with suppress(ConveyorError):
                    await self._move_to_dead_letters(queue, received, why.reason)

    async def _move_to_dead_letters(
        self, queue: str, received: dict[str, Any], reason: str
    ) -> None:
        """Send first, then delete: a failure in between leaves two copies rather than none."""
        attributes: dict[str, Any] = {REASON: {"DataType": "String", "StringValue": reason}}
        letter = {"MessageBody": received["Body"], "MessageAttributes": attributes}
        instant = received.get("MessageAttributes", {}).get(NOT_BEFORE)
        if instant is not None:
            attributes[NOT_BEFORE] = {name: instant[name] for name in _SENT if name in instant}
        gone = {"ReceiptHandle": received["ReceiptHandle"]}
        for operation, there, one in (
            ("send_message_batch", DEAD_LETTER_QUEUE, letter),
            ("delete_message_batch", queue, gone),
        ):
            url = await self._registry.find(there)
            await in_batches(self._aws, self._clock, operation, url, [one])

    def _log_once(self, queue: str, message_id: str, reason: str) -> None:
        if message_id not in self._logged:
            self._logged[message_id] = True
            _log.error(
                "a message cannot be read: %s",
                reason,
                extra={"queue": queue, "message_id": message_id},
            )
