"""The blobs port: immutable bodies by key.

Keys are made of ids, never of URLs or of anything that a caller chose.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from conveyor.domain.errors import ConveyorError, ErrorCode

Content = bytes | AsyncIterator[bytes]
"""A body in one piece, or in pieces as it arrives."""


class BodyRefused(ConveyorError):
    """The store's refusal of one body, because it arrived damaged or is larger than the store
    takes. Other bodies can still be stored."""

    def __init__(self, reason: str) -> None:
        super().__init__(ErrorCode.UNAVAILABLE, "what was sent could not be kept", retry_after=5)
        self.args = (reason,)


class NoRoom(BodyRefused):
    """The refusal of a body that the store has no room for, though it has for smaller ones."""

    def __init__(self) -> None:
        super().__init__("no room for a body of this size")


class BlobWriter(Protocol):
    """Writing of bodies, for workers."""

    async def put(self, key: str, content: Content) -> int:
        """Store a body under a key; return its number of bytes. Readers see all of it or nothing.

        If the iterator raises, store nothing and raise the same error. Raises BodyRefused if the
        store refuses this body; ConveyorError(unavailable) if the store is away, or its setup keeps
        it from storing any body.
        """
        ...

    async def delete(self, key: str) -> None:
        """Remove one body; do nothing if the key has no body, or if it is packed with others: then
        nothing may name it any more."""
        ...


class NewBodies(Protocol):
    """Writing of bodies that no row names yet, many in one operation.

    Nobody reads a body before a row names it, so it need not appear all at once. A process that is
    killed may leave part of one; the deletion of its run removes it.
    """

    async def put_new(self, bodies: Sequence[tuple[str, bytes]]) -> list[str | Exception]:
        """Store (key, body) pairs; return for each the key that its row is to name, which may be
        another one below the run's prefix, or the error that kept it from being stored. The errors
        are those of `BlobWriter.put`, and leave nothing that a row could name."""
        ...


class BlobReader(Protocol):
    """Reading of bodies, for the API, exports and ingestion."""

    async def open(self, key: str, *, size: int | None = None) -> AsyncIterator[bytes] | None:
        """Return a body in pieces of at most 256 KiB; None if the key has no body, or with a `size`
        one of another number of bytes, which lost some, or one that is damaged where the key has
        its checksum."""
        ...

    async def read_neighbours(self, keys: Sequence[str]) -> list[bytes | None]:
        """Read packed bodies of one pack that lie near each other, in one operation; None for each
        that is missing or damaged. Raises ValueError for the key of another body."""
        ...

    async def size(self, key: str) -> int | None:
        """Return the number of bytes of a body; None if the key has no body."""
        ...


class BlobPurge(Protocol):
    """Listing and removal of bodies, for maintenance."""

    async def delete_prefix(self, prefix: str, *, limit: int | None = None) -> int:
        """Remove at most `limit` bodies whose keys start with `prefix`, which ends in "/".

        Return the number of bodies removed. A number below `limit` means that no body is left.
        """
        ...

    async def list_keys(self, prefix: str, *, after: str, limit: int) -> list[str]:
        """Return at most `limit` keys that start with `prefix`, which ends in "/", in order; only
        those above `after`."""
        ...


class BlobLinks(Protocol):
    """Links to the store itself, which the API gives to callers."""

    async def upload_link(self, key: str, *, content_type: str, seconds: int) -> str | None:
        """Return a link that accepts one body of that Content-Type for `seconds` seconds; further
        uploads replace it.

        Return None if the store has no links of its own, or cannot make one now that lasts so long:
        the API takes the body then.
        """
        ...

    async def download_link(
        self, key: str, *, seconds: int, file_name: str, content_type: str = ""
    ) -> str | None:
        """Return a link that serves one body for `seconds` seconds as an attachment of that name,
        and of a type, if one is given.

        Return None if the store has no links of its own, or cannot make one now, and for a packed
        body. If the store cannot make one that lasts so long, the link ends earlier and states its
        end; callers are to use it at once.
        """
        ...


class Blobs(BlobWriter, BlobReader, BlobPurge, BlobLinks, Protocol):
    """Every role over bodies."""
