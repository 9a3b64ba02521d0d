"""Checks of single values: each says what a value must be, or None where it is just that."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Check = Callable[[Any], str | None]

HOUR = 3_600
"""Seconds beyond which work stands still that waits for somebody to look, or to be given up."""
MOST_VISIBILITY = 43_200
"""Seconds for which SQS hides a message at most."""
MOST_LINK = 604_800
"""Seconds for which S3 believes a signed link at most."""
LONG = 31_536_000
"""Seconds, a year: longer is a mistake, and times far beyond cannot be written down."""
MOST_DAYS = 36_500
"""Days, a hundred years: the same of days."""


def at_least(low: float) -> Check:
    """A number from `low` on."""
    return lambda value: None if value >= low else f"must be at least {low:g}"


def between(low: float, high: float) -> Check:
    """A number from `low` to `high`, both included."""
    return lambda value: None if low <= value <= high else f"must be from {low:g} to {high:g}"


def lasting(low: float, high: float = LONG) -> Check:
    """A time from `low` to `high`, both included; in seconds, where that is left out."""

    def check(value: float) -> str | None:
        if not value >= low:
            return f"must be at least {low:g}"
        return None if value <= high else f"must be at most {high:.10g}"

    return check


def one_of(*words: str) -> Check:
    """One of some words; "" among them stands for none."""
    return lambda value: (
        None if value in words else f"must be one of {', '.join(filter(None, words))}"
    )


def not_empty(value: str) -> str | None:
    """A path that is named."""
    return None if value else "must be the path of a directory"


def name(value: str) -> str | None:
    """What can be a part of the name of a table, a queue and a bucket, or nothing."""
    if not value or re.fullmatch(r"[a-z][a-z0-9-]{0,31}", value):
        return None
    return "must be a lower-case letter and up to 31 more, digits or hyphens"
