"""Read the webhook of a request: where events go, and whether they are signed."""

from __future__ import annotations

from typing import Any

import msgspec

from conveyor.domain.errors import ConveyorError, ErrorCode

MOST_WEBHOOK_URL = 2_048
"""Characters of a URL."""


class Webhook(msgspec.Struct, frozen=True):
    """A receiver of events. Whether the URL may be used is judged elsewhere."""

    url: str
    signature: bool = False


def parse_webhook(document: object) -> Webhook:
    """Read a JSON object; unknown fields are ignored, `signature` is false where it is absent or
    null. Raises ConveyorError(invalid_argument), naming the field."""
    if not isinstance(document, dict):
        raise _invalid("a webhook is a JSON object")
    fields: dict[str, Any] = document
    url, signature = fields.get("url"), fields.get("signature")
    if not isinstance(url, str) or not url:
        raise _invalid("url: must be a URL")
    if signature is not None and not isinstance(signature, bool):
        raise _invalid("signature: must be true or false")
    if len(url) > MOST_WEBHOOK_URL:
        raise _invalid(f"url: must have at most {MOST_WEBHOOK_URL} characters")
    return Webhook(url, bool(signature))


def _invalid(problem: str) -> ConveyorError:
    return ConveyorError(ErrorCode.INVALID_ARGUMENT, problem)
