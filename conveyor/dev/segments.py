"""Segment files: small bodies of one run one after the other, many in a file.

A line stands before each body: its name, its number of bytes and its CRC-32. The key of a packed
body is that of its segment, then offset, bytes and CRC-32, so that a row which names it says all
that a reader needs. A segment is written by one process; the next one begins others.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

PACKED_MOST = 256 * 1024
"""Most bytes of a packed body: it is read in one piece, and checked before a byte of it is
served."""
_FOLDER = "segments"
_SEGMENT_BYTES = 64 * 1024 * 1024
_SEGMENT_BODIES = 16_384
_MOST_OPEN = 64
_RESULTS = "results/"
_KEY = re.compile(rf"(.+/{_FOLDER}/\d{{8}})\.(\d{{1,10}})\.(\d{{1,7}})\.([0-9a-f]{{8}})")
_HEAD = re.compile(rb"(\S+) (\d{1,7}) ([0-9a-f]{8})\n")
_MOST_HEAD = 256

_log = logging.getLogger("conveyor.dev")


class PackedBody(NamedTuple):
    """The place of a body: the key of its segment, where it begins there, its bytes and their
    CRC-32."""

    segment: str
    offset: int
    size: int
    checksum: int

    @property
    def key(self) -> str:
        """The key under which a row names it."""
        return f"{self.segment}.{self.offset}.{self.size}.{self.checksum:08x}"

    def read(self, root: str) -> bytes | None:
        """Read it below `root`; return None if it is missing or not as it was written."""
        try:
            descriptor = os.open(f"{root}/{self.segment}", os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            body = os.pread(descriptor, self.size, self.offset)
        finally:
            os.close(descriptor)
        if len(body) == self.size and crc32(body) == self.checksum:
            return body
        _log.error("a stored body is damaged", extra={"key": self.key})
        return None


def packed_body(key: str) -> PackedBody | None:
    """Return the place that a key tells; None for the key of a body in a file of its own."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    return PackedBody(match[1], int(match[2]), int(match[3]), int(match[4], 16))


def packing_run(key: str, body: bytes) -> str | None:
    """Return the prefix of the run whose segments a new body belongs in, without a slash at its
    end; None if it is to have a file of its own."""
    if len(body) > PACKED_MOST or not key.startswith(_RESULTS) or key.count("/") != 5:
        return None
    return key.rsplit("/", 2)[0]


@dataclass(slots=True, eq=False)
class _Segment:
    """A segment that is being written. `dropped` are the offsets of bodies that no row will ever
    name."""

    key: str
    path: str
    descriptor: int
    end: int = 0
    bodies: int = 0
    dropped: set[int] = field(default_factory=set)

    def append(self, bodies: Sequence[tuple[str, bytes]]) -> list[str]:
        """Write (name, body) pairs in one go; return their keys. Raises OSError, and then none of
        them is part of the segment."""
        parts: list[bytes] = []
        keys: list[str] = []
        end = self.end
        for name, body in bodies:
            checksum = crc32(body)
            head = b"%s %d %08x\n" % (name.encode(), len(body), checksum)
            end += len(head)
            keys.append(PackedBody(self.key, end, len(body), checksum).key)
            parts += (head, body)
            end += len(body)
        data = memoryview(b"".join(parts))
        try:
            place = self.end
            while data:
                written = os.pwrite(self.descriptor, data, place)
                place, data = place + written, data[written:]
        except BaseException:
            with suppress(OSError):  # the next bodies overwrite what is left of these
                os.ftruncate(self.descriptor, self.end)
            raise
        self.end = end
        self.bodies += len(bodies)
        return keys

    @property
    def is_full(self) -> bool:
        return self.end >= _SEGMENT_BYTES or self.bodies >= _SEGMENT_BODIES

    def is_there(self) -> bool:
        """Tell whether the file still has a name: what is written to another one is lost."""
        return os.fstat(self.descriptor).st_nlink > 0


class SegmentWriter:
    """The segments below `root` that this process writes, at most 64 at a time, one a run. Threads
    may share it."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._open: dict[str, _Segment] = {}

    def append(self, run: str, bodies: Sequence[tuple[str, bytes]]) -> list[str]:
        """Append (name, body) pairs to the segment of a run; return their keys. Raises OSError, and
        then none of them is stored."""
        with self._lock:
            segment = self._writable(run)
            try:
                return segment.append(bodies)
            except BaseException:
                self._remove_if_unused(run, segment)
                raise

    def drop(self, body: PackedBody) -> None:
        """Note that no row will name a body. Its bytes stay, unless the segment that is being
        written has no other body."""
        run = body.segment.rsplit("/", 2)[0]
        with self._lock:
            segment = self._open.get(run)
            if segment is not None and segment.key == body.segment:
                segment.dropped.add(body.offset)
                self._remove_if_unused(run, segment)

    def close_below(self, prefix: str) -> None:
        """Write no more to the segments below a prefix, which ends in a slash."""
        with self._lock:
            for run in [run for run in self._open if f"{run}/".startswith(prefix)]:
                self._close(run)

    def close(self) -> None:
        """Write no more to any segment."""
        with self._lock:
            while self._open:
                self._close(next(iter(self._open)))

    def _writable(self, run: str) -> _Segment:
        segment = self._open.pop(run, None)
        if segment is not None:
            self._open[run] = segment  # the last one used is the last one closed
            if segment.is_there() and not segment.is_full:
                return segment
            self._close(run)
        while len(self._open) >= _MOST_OPEN:
            self._close(next(iter(self._open)))
        segment = self._open[run] = self._new(run)
        return segment

    def _new(self, run: str) -> _Segment:
        folder = f"{self._root}/{run}/{_FOLDER}"
        # Not the root: where somebody removed all data, nothing appears in its place.
        os.stat(self._root)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        numbers = (int(name) for name in os.listdir(folder) if name.isdecimal())
        name = f"{max(numbers, default=0) + 1:08}"
        path = f"{folder}/{name}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        return _Segment(f"{run}/{_FOLDER}/{name}", path, descriptor)

    def _close(self, run: str) -> None:
        os.close(self._open.pop(run).descriptor)

    def _remove_if_unused(self, run: str, segment: _Segment) -> None:
        if segment.bodies == len(segment.dropped):
            with suppress(FileNotFoundError):
                os.unlink(segment.path)
            self._close(run)


def remove_unsettled(root: str, keys: Collection[str]) -> None:
    """Remove the segments that hold nothing but new bodies of these keys, which no row names.

    Only the process before wrote such: of any other segment one line is read.
    """
    names: dict[str, set[bytes]] = {}
    for key in keys:
        run, _, name = key.rsplit("/", 2)
        names.setdefault(run, set()).add(name.encode())
    for run, unsettled in names.items():
        for path in _segments_in(f"{root}/{run}/{_FOLDER}"):
            if _holds_only(path, unsettled):
                os.unlink(path)


def _segments_in(folder: str) -> list[str]:
    try:
        return [f"{folder}/{name}" for name in os.listdir(folder) if name.isdecimal()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _holds_only(path: str, names: Collection[bytes]) -> bool:
    """Tell whether every body in a segment has one of these names. A kill may have cut off the last
    one; where a line is damaged, others may follow that nobody finds any more but by their rows."""
    with open(path, "rb") as file:
        while line := file.readline(_MOST_HEAD):
            match = _HEAD.fullmatch(line)
            if match is None:
                return len(line) < _MOST_HEAD and not line.endswith(b"\n")
            if match[1] not in names:
                return False
            file.seek(int(match[2]), os.SEEK_CUR)
    return True
