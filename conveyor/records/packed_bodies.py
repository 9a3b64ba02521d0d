"""Bodies that lie one after the other in one object of their run, each under a key that tells its
place.

The key of a packed body is that of its pack, then offset, bytes and the CRC-32 of the body, so that
a row which names it says all that a reader needs, and so does a row that is a copy of it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from zlib import crc32

FOLDER = "segments"
"""The folder of packs below the prefix of a run."""
RANGE_BYTES = 4 * 1024 * 1024
"""Most bytes of a pack that are read at once."""
_GAP = 256 * 1024
"""Most bytes between two neighbours that are read along, for less than another read costs."""
_KEY = re.compile(rf"(.+/{FOLDER}/[^/]+)\.(\d{{1,10}})\.(\d{{1,7}})\.([0-9a-f]{{8}})")

_log = logging.getLogger("conveyor.bodies")


def packed_key(pack: str, offset: int, size: int, checksum: int) -> str:
    """The key of a body at a place in a pack."""
    return f"{pack}.{offset}.{size}.{checksum:08x}"


class PackedBody(NamedTuple):
    """The place of a body: the key of its pack, where it begins there, its bytes and their
    CRC-32."""

    pack: str
    offset: int
    size: int
    checksum: int

    @property
    def key(self) -> str:
        """The key under which a row names it."""
        return packed_key(self.pack, self.offset, self.size, self.checksum)

    @property
    def end(self) -> int:
        """The offset behind its last byte."""
        return self.offset + self.size

    def checked(self, body: bytes) -> bytes | None:
        """Return the bytes that were read from its place; None, and a line in the log, if they are
        not those that were written."""
        if len(body) == self.size and crc32(body) == self.checksum:
            return body
        _log.error("a stored body is damaged", extra={"key": self.key})
        return None


def place_body(pack: str, offset: int, body: bytes) -> PackedBody:
    """Describe a body that is about to be written to a pack."""
    return PackedBody(pack, offset, len(body), crc32(body))


def packed_body(key: str) -> PackedBody | None:
    """Return the place that a key tells; None for the key of a body in an object of its own."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    return PackedBody(match[1], int(match[2]), int(match[3]), int(match[4], 16))


def packed_bodies(keys: Iterable[str]) -> list[PackedBody]:
    """Return the places that keys of packed bodies tell. Raises ValueError for another key."""
    places = [packed_body(key) for key in keys]
    if None in places:
        raise ValueError("not the key of a packed body")
    return [place for place in places if place is not None]


def pack_key(first: str) -> str:
    """Return the key of the pack that begins with the body of a key: no other body has its name,
    and packs are spread over the prefixes of a run as bodies are."""
    folder, _, name = first.rpartition("/")
    return f"{folder}/{FOLDER}/{name}"


def neighbours(bodies: Iterable[PackedBody]) -> list[Sequence[PackedBody]]:
    """Group bodies that are worth one read: those of one pack, near each other, in order."""
    groups: list[list[PackedBody]] = []
    for body in sorted(set(bodies)):
        last = groups[-1] if groups else None
        if (
            last is not None
            and last[-1].pack == body.pack
            and body.offset <= last[-1].end + _GAP
            and body.end - last[0].offset <= RANGE_BYTES
        ):
            last.append(body)
        else:
            groups.append([body])
    return list(groups)
