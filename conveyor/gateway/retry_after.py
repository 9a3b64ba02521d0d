"""The Retry-After header, in both of its forms."""

from __future__ import annotations

from datetime import UTC
from email.utils import parsedate_to_datetime


def retry_after(text: str, *, now: int, cap: float) -> float:
    """Seconds to wait, from 0 to `cap`; 0 where the text is missing or means nothing.

    `now` is in milliseconds; an HTTP date is read against it.
    """
    text = text.strip()
    if not text.isascii() or len(text) > 64:
        return 0.0
    if text.isdecimal():
        return min(float(text), cap)
    try:
        moment = parsedate_to_datetime(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        seconds = moment.timestamp() - now / 1_000
    except (ValueError, OverflowError):
        return 0.0
    return min(max(seconds, 0.0), cap)
