"""Delays between attempts. Randomness is passed in."""

from __future__ import annotations

MAX_EXPONENT = 32


def retry_delay(
    attempt: int,
    *,
    base: float,
    cap: float,
    jitter: float,
    at_least: float = 0.0,
) -> float:
    """Return the seconds until the next attempt, after `attempt` attempts have failed (from 1).

    Doubles from `base` up to `cap`, times a factor between a half and one and a half (`jitter` is a
    random number in [0, 1)), and never falls below `at_least`, a server's Retry-After.
    """
    exponent = min(max(attempt, 1) - 1, MAX_EXPONENT)
    delay = min(cap, base * 2.0**exponent) * (0.5 + jitter)
    return max(delay, at_least)
