"""The blobs port: bodies by key. Keys are made of ids, never of URLs or anything a caller chose."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from conveyor.domain.errors import ConveyorError, ErrorCode

Content = bytes | AsyncIterator[bytes]
"""A body in one piece, or in pieces as it arrives."""


class BodyRefused(ConveyorError):
    """The store will not keep this very body, while it would keep others: it arrived damaged, or is
    larger than the store takes."""

    def __init__(self, reason: str) -> None:
        super().__init__(ErrorCode.UNAVAILABLE, "what was sent could not be kept", retry_after=5)
        self.args = (reason,)


class Blobs(Protocol):
    """Immutable byte strings."""

    async def put(self, key: str, content: Content) -> int:
        """Store a body under a key; the number of bytes. Readers see all of it or nothing.

        Whatever the iterator raises is raised again, and nothing is stored. Raises BodyRefused;
        ConveyorError(unavailable) where the store is away, or set up so that it keeps none.
        """
        ...

    async def open(self, key: str) -> AsyncIterator[bytes] | None:
        """The body in pieces of at most 256 KiB; None where there is none."""
        ...

    async def delete(self, key: str) -> None:
        """Remove one body; without effect where there is none."""
        ...

    async def delete_prefix(self, prefix: str, *, limit: int | None = None) -> int:
        """Remove the bodies whose keys start with `prefix` (which ends in "/"), at most `limit` of
        them; how many went. Fewer than `limit` tells that none was left."""
        ...

    async def size(self, key: str) -> int | None:
        """How many bytes a body has; None where there is none."""
        ...

    async def upload_link(self, key: str, *, content_type: str, seconds: int) -> str | None:
        """A link by which whoever holds it puts one body, sent as that Content-Type and no other,
        for so many seconds; again and again, the last one counts.

        None: this store has no links of its own, or none now that would last so long; it takes
        this body through the API.
        """
        ...

    async def download_link(self, key: str, *, seconds: int, file_name: str) -> str | None:
        """A link by which whoever holds it gets one body, for so many seconds, as an attachment of
        that name. None: this store has no links of its own, or none now.

        A link may be made for a shorter time, which it tells, where the store can give none that
        lasts so long: it is to be used now.
        """
        ...
