"""Read the webhook of a job: where its events go, which ones, and whether they are signed."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.text_rules import has_control

MOST_WEBHOOK_URL = 2_048
"""Characters of a URL."""


class EventType(StrEnum):
    """The events about a run that a webhook may ask for."""

    COMPLETED = "run.completed"
    FAILED = "run.failed"
    STOPPED = "run.stopped"


USUAL_EVENTS = (EventType.COMPLETED, EventType.FAILED)


class Webhook(msgspec.Struct, frozen=True, omit_defaults=True):
    """A receiver of events. Whether the URL may be used is judged elsewhere. `events` has no
    repetition, and the order of EventType."""

    url: str
    signature: bool = False
    events: tuple[EventType, ...] = USUAL_EVENTS


def parse_webhook(document: object, *, usual: tuple[EventType, ...] = USUAL_EVENTS) -> Webhook:
    """Read a JSON object; unknown fields are ignored, `signature` is false where it is absent or
    null. An absent `events` is `usual`, null is USUAL_EVENTS.

    Raises ConveyorError(invalid_argument), naming the field.
    """
    fields = _object(document)
    url, signature = fields.get("url"), fields.get("signature")
    if not isinstance(url, str) or not url or url != url.strip() or has_control(url):
        raise _invalid("url: must be a URL")
    if signature is not None and not isinstance(signature, bool):
        raise _invalid("signature: must be true or false")
    if len(url) > MOST_WEBHOOK_URL:
        raise _invalid(f"url: must have at most {MOST_WEBHOOK_URL} characters")
    return Webhook(url, bool(signature), _events(fields, usual))


def parse_webhook_update(document: object, *, before: Webhook | None) -> Webhook:
    """Read the webhook that replaces `before`. Both `url` and `signature` must be there; events
    that are not named stay as they were.

    Raises ConveyorError(invalid_argument), naming the field.
    """
    fields = _object(document)
    if fields.get("signature") is None:
        raise _invalid("signature: must be true or false")
    return parse_webhook(fields, usual=USUAL_EVENTS if before is None else before.events)


def _object(document: object) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise _invalid("a webhook is a JSON object")
    return document


def _events(fields: Mapping[str, Any], usual: tuple[EventType, ...]) -> tuple[EventType, ...]:
    if "events" not in fields:
        return usual
    names = fields["events"]
    if names is None:
        return USUAL_EVENTS
    known = [kind.value for kind in EventType]
    if not isinstance(names, list) or not names or not all(name in known for name in names):
        raise _invalid(f"events: must be a list out of {', '.join(known)}")
    return tuple(kind for kind in EventType if kind.value in names)


def _invalid(problem: str) -> ConveyorError:
    return ConveyorError(ErrorCode.INVALID_ARGUMENT, problem)
