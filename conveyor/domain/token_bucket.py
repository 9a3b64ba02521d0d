"""A token bucket: full at first, refilled at a steady rate; each request takes one token."""

from __future__ import annotations

import msgspec

ROUNDING = 1e-9
"""Tolerance for a missing part of a token, so that a caller who waited finds it there."""


class Bucket(msgspec.Struct, frozen=True):
    """The `tokens` in the bucket at `at`, in seconds of any clock."""

    tokens: float
    at: float


def take(bucket: Bucket | None, now: float, *, rate: float, burst: int) -> tuple[Bucket, float]:
    """Take one token; return the bucket, and 0.0, or the seconds until a token is in.

    `rate` is in tokens a second, `burst` the most tokens it holds; None is a full bucket.
    """
    tokens = float(burst)
    if bucket is not None:
        tokens = min(tokens, bucket.tokens + max(0.0, now - bucket.at) * rate)
    if tokens >= 1.0 - ROUNDING:
        return Bucket(max(0.0, tokens - 1.0), now), 0.0
    return Bucket(tokens, now), (1.0 - tokens) / rate
