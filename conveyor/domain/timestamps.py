"""Writes instants as the wire does: RFC 3339, UTC, with milliseconds."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache


def rfc3339(milliseconds: int) -> str:
    """Format milliseconds since the epoch, as 2026-01-31T12:00:00.000Z."""
    seconds, rest = divmod(milliseconds, 1_000)
    return f"{_to_the_second(seconds)}.{rest:03d}Z"


@lru_cache(maxsize=4_096)
def _to_the_second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
