"""Messages as SQS carries them: their ids and their version as JSON, and when they may be seen."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec

from conveyor.ports.queues import MESSAGE_VERSION, Message

NOT_BEFORE = "not_before"
"""The message attribute that holds an instant, in milliseconds, which no delay of SQS reaches."""
MOST_DELAY = 900
"""Seconds that SQS itself delays a message at most."""

_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


class _Versioned(msgspec.Struct):
    version: int = MESSAGE_VERSION


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


def read(received: dict[str, Any]) -> Message | None:
    """The message in what was received; None for one of another version, which a process of that
    version understands."""
    body = received["Body"]
    try:
        if msgspec.json.decode(body, type=_Versioned).version > MESSAGE_VERSION:
            return None
        return _decoder.decode(body)
    except msgspec.DecodeError:
        return None


def seconds_early(received: dict[str, Any], *, now: int) -> int:
    """How many seconds too early a message came; 0 where it may be seen."""
    attribute = received.get("MessageAttributes", {}).get(NOT_BEFORE)
    if attribute is None:
        return 0
    return max(0, math.ceil((int(attribute["StringValue"]) - now) / 1_000))
