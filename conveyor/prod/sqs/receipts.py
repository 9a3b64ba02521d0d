"""Receipts as this adapter hands them out: the handle of SQS, and when its message was asked for.

SQS hides a message for twelve hours after its receipt at most, however often that is prolonged, and
refuses to go beyond: so it has to be known how much of that is left.
"""

from __future__ import annotations

import math

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
