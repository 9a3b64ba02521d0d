"""A bucket of tokens: full at first, one token a request, refilled at a steady rate."""

from __future__ import annotations

import msgspec

ROUNDING = 1e-9
"""A token may be short by this much: what was waited for is then really there."""


class Bucket(msgspec.Struct, frozen=True):
    """`tokens` that were in it at `at`, in seconds of any clock."""

    tokens: float
    at: float


def take(bucket: Bucket | None, now: float, *, rate: float, burst: int) -> tuple[Bucket, float]:
    """The bucket after a request, and 0.0 where it got a token, else the seconds until one is in.

    `rate` in tokens a second, `burst` tokens at most; None is a full bucket.
    """
    tokens = float(burst)
    if bucket is not None:
        tokens = min(tokens, bucket.tokens + max(0.0, now - bucket.at) * rate)
    if tokens >= 1.0 - ROUNDING:
        return Bucket(max(0.0, tokens - 1.0), now), 0.0
    return Bucket(tokens, now), (1.0 - tokens) / rate
