"""The rate limit port in memory, for the callers of one process."""

from __future__ import annotations

from cachetools import LRUCache

from conveyor.domain.token_bucket import Bucket, take
from conveyor.ports.clock import Clock

MOST_CALLERS = 10_000
"""Callers remembered. The one that was silent longest is forgotten first, and begins anew."""


class MemoryRateLimit:
    """Token buckets by caller: `rate` requests a second, `burst` at once."""

    def __init__(self, clock: Clock, *, rate: float, burst: int) -> None:
        self._clock = clock
        self._rate = rate
        self._burst = burst
        self._buckets: LRUCache[str, Bucket] = LRUCache(MOST_CALLERS)

    async def take(self, caller: str) -> float:
        """Take a token; see `RateLimit.take`."""
        bucket, wait = take(
            self._buckets.get(caller),
            self._clock.monotonic(),
            rate=self._rate,
            burst=self._burst,
        )
        self._buckets[caller] = bucket
        return wait
