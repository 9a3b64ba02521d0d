"""The robots port: what was found at the robots.txt of each origin, for all workers."""

from __future__ import annotations

from typing import Protocol

import msgspec

MOST_KEPT = 350_000
"""Most bytes of a file, or of a piece of one: DynamoDB takes few more in one item."""


class KeptFile(msgspec.Struct, frozen=True):
    """A file as one worker put it down; it is forgotten `left` seconds from now."""

    content: bytes
    left: float


class RobotsFiles(Protocol):
    """Files by origin, such as `https://example.com`, kept for some seconds.

    Each method raises ConveyorError(unavailable) if the store does not answer.
    """

    async def find(self, origin: str) -> KeptFile | None:
        """Return the file of an origin; None if there is none, or none any more."""
        ...

    async def keep(self, origin: str, content: bytes, seconds: float) -> None:
        """Put down a file, of at most MOST_KEPT bytes, in place of the one before."""
        ...
