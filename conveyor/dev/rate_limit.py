"""The rate limit port in memory, for the callers of one process."""

from __future__ import annotations

from cachetools import LRUCache

from conveyor.domain.token_bucket import Bucket, take
from conveyor.ports.clock import Clock
from conveyor.ports.rate_limit import RateLimit

MOST_CALLERS = 10_000
"""Callers remembered. The one that was silent longest is forgotten first; its bucket is full when
it comes back."""


class MemoryRateLimit(RateLimit):
    """Token buckets by caller: `rate` requests a second, `burst` at once."""

    def __init__(self, clock: Clock, *, rate: float, burst: int) -> None:
        self._clock = clock
        self._rate = rate
        self._burst = burst
        self._buckets: LRUCache[str, Bucket] = LRUCache(MOST_CALLERS)

    async def take(self, caller: str) -> float:
        bucket, wait = take(
            self._buckets.get(caller),
            self._clock.monotonic(),
            rate=self._rate,
            burst=self._burst,
        )
        self._buckets[caller] = bucket
        return wait
