"""What the fake gateway and the fake server remember of their calls, for tests to assert on."""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from hashlib import sha256

import msgspec


class Hit(msgspec.Struct, frozen=True):
    """One call. `key_digest` tells API keys apart without keeping one."""

    url: str
    method: str
    header_names: tuple[str, ...]
    key_digest: str


class Hits:
    """Counts and the last calls, both bounded.

    `counts` holds calls a URL, of the first `limit` different URLs; `calls` the last `limit` calls;
    `total` counts all.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.counts: dict[str, int] = {}
        self.calls: deque[Hit] = deque(maxlen=limit)
        self.total = 0
        self.in_flight = 0
        self.peak_in_flight = 0

    def enter(self, url: str, method: str, header_names: tuple[str, ...], api_key: str) -> int:
        """Note a call that begins; how many calls of that URL there were before it."""
        self.total += 1
        self.in_flight += 1
        if self.in_flight > self.peak_in_flight:
            self.peak_in_flight = self.in_flight
        before = self.counts.get(url, 0)
        if before or len(self.counts) < self.limit:
            self.counts[url] = before + 1
        self.calls.append(Hit(url, method, header_names, key_digest(api_key)))
        return before

    def leave(self) -> None:
        """Note that a call ended."""
        self.in_flight -= 1

    def clear(self) -> None:
        """Forget everything but the calls in flight."""
        self.counts.clear()
        self.calls.clear()
        self.total = 0
        self.peak_in_flight = self.in_flight


@lru_cache(maxsize=256)
def key_digest(api_key: str) -> str:
    """What a Hit keeps of an API key."""
    return sha256(api_key.encode("utf-8", "replace")).hexdigest()[:16]
