"""The rate limit port: how many requests a caller may make."""

from __future__ import annotations

from typing import Protocol


class RateLimit(Protocol):
    """A bucket of tokens a caller: a request takes one, and they come back at a steady rate."""

    async def take(self, caller: str) -> float:
        """Take a token for one request of a caller, and answer 0.0; where there is none take
        nothing, and answer the seconds until there is one.

        A limit that cannot tell (what it counts in is away) answers 0.0 and raises nothing: a
        request is never refused for want of counting.
        """
        ...
