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


class BlobWriter(Protocol):
    """Bodies as a worker of tasks keeps them."""

    async def put(self, key: str, content: Content) -> int:
        """Store a body under a key; return its number of bytes. Readers see all of it or nothing.

        If the iterator raises, raise the same, and store nothing. Raises BodyRefused;
        ConveyorError(unavailable) if the store is away, or set up so that it keeps no body.
        """
        ...

    async def delete(self, key: str) -> None:
        """Remove one body; without effect if there is no such body."""
        ...


class BlobReader(Protocol):
    """Bodies as the API, exports and ingestion read them."""

    async def open(self, key: str) -> AsyncIterator[bytes] | None:
        """Return the body in pieces of at most 256 KiB; None if there is no such body."""
        ...

    async def size(self, key: str) -> int | None:
        """Return the number of bytes of a body; None if there is no such body."""
        ...


class BlobPurge(Protocol):
    """Bodies as maintenance removes them."""

    async def delete_prefix(self, prefix: str, *, limit: int | None = None) -> int:
        """Remove the bodies whose keys start with `prefix` (which ends in "/"), at most `limit` of
        them; return how many. Fewer than `limit` means that no body is left."""
        ...


class BlobLinks(Protocol):
    """Links by which callers reach the store itself."""

    async def upload_link(self, key: str, *, content_type: str, seconds: int) -> str | None:
        """Return a link that accepts one body of that Content-Type for so many seconds; further
        uploads replace it.

        None if the store has no links of its own, or none now that would last so long: then the API
        takes the body.
        """
        ...

    async def download_link(self, key: str, *, seconds: int, file_name: str) -> str | None:
        """Return a link that serves one body for so many seconds as an attachment of that name.
        None if the store has no links of its own, or none now.

        The link may end earlier, and says so, if the store can give none that lasts so long: it is
        to be used now.
        """
        ...


class Blobs(BlobWriter, BlobReader, BlobPurge, BlobLinks, Protocol):
    """Immutable byte strings by key."""
