"""Messages as SQS carries them: their ids and their version as JSON, and when they may be seen."""

from __future__ import annotations

import json
import math
import re
from typing import Any, get_args

import msgspec

from conveyor.ports.queues import MESSAGE_VERSION, Message

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


class Unreadable(msgspec.Struct, frozen=True):
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


def read(received: dict[str, Any]) -> Message | Unreadable:
    """The message in what was received. Anybody with the right to may have sent anything; one of
    another version a process of that version understands."""
    body = received["Body"]
    try:
        about = msgspec.json.decode(body, type=_Any)
        if about.version > MESSAGE_VERSION:
            return Unreadable(OF_ANOTHER_VERSION)
        if about.type not in _KINDS:
            return Unreadable(OF_ANOTHER_KIND)
        message = _decoder.decode(body)
    except (ValueError, RecursionError):
        return Unreadable(NO_MESSAGE)
    ids = (getattr(message, name) for name in message.__struct_fields__ if name.endswith("_id"))
    if not all(map(_id.fullmatch, ids)):
        return Unreadable(NO_IDS)
    try:
        _not_before(received)
    except (KeyError, ValueError):
        return Unreadable(NO_INSTANT)
    return message


def seconds_early(received: dict[str, Any], *, now: int) -> int:
    """How many seconds too early a message came that can be read; 0 where it may be seen."""
    return max(0, math.ceil((_not_before(received) - now) / 1_000))


def _not_before(received: dict[str, Any]) -> int:
    """Raises KeyError or ValueError for an attribute that holds no instant."""
    attribute = received.get("MessageAttributes", {}).get(NOT_BEFORE)
    return 0 if attribute is None else min(int(attribute["StringValue"]), MOST_INSTANT)
