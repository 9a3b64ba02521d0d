"""The rate limit port: the limit on each caller's requests."""

from __future__ import annotations

from typing import Protocol


class RateLimit(Protocol):
    """A bucket of tokens for each caller, which the API takes from: a request costs one token, and
    tokens come back at a steady rate."""

    async def take(self, caller: str) -> float:
        """Take a token for one request of a caller and return 0.0; if the bucket is empty, take
        nothing and return the seconds until it has a token.

        If the store of the counts is away, return 0.0 and raise nothing: a request is never refused
        because it could not be counted.
        """
        ...
