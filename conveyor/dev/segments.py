"""Segment files: small bodies of one run one after the other, many in a file.

A line stands before each body: its name, its number of bytes, and the CRC-32 of both and of the
body's own CRC-32, which the row has too. Rows name a body by its place, as `records.packed_bodies`
has it. A segment is written by one process; the next one begins others.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from zlib import crc32

from conveyor.records.packed_bodies import FOLDER, PackedBody, packed_key

PACKED_MOST = 256 * 1024
"""Most bytes of a packed body: it is read in one piece, and checked before a byte of it is
served."""
_SEGMENT_BYTES = 64 * 1024 * 1024
_SEGMENT_BODIES = 16_384
_MOST_OPEN = 64
_MOST_CLOSED = 10_000
_IDLE_APPENDS = 1_000
"""Appends to other runs after which a segment is closed: its run has ended, or waits."""
_KEPT_IN_A_ROW = 4
"""Segments of a run that are kept at boot, one before the other, before no earlier one is looked
at."""
_RESULTS = "results/"
_NUMBER = re.compile(r"[0-9]{8}")
_HEAD = re.compile(rb"((\S+) (\d{1,7}) )([0-9a-f]{8})\n")
_CUT_HEAD = re.compile(rb"(\S+)( (\d{1,7}( [0-9a-f]{0,8})?)?)?")
_HEAD_FOLLOWS = re.compile(rb"\S \d{1,7} [0-9a-f]{8}\n")
_MOST_HEAD = 256


def read_packed(root: str, body: PackedBody) -> bytes | None:
    """Read a packed body below `root`; return None if it is missing or not as it was written."""
    try:
        descriptor = os.open(f"{root}/{body.pack}", os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        content = os.pread(descriptor, body.size, body.offset)
    finally:
        os.close(descriptor)
    return body.checked(content)


def packing_place(key: str, body: bytes) -> tuple[str, str] | None:
    """Return the prefix of the run whose segments a new body belongs in, without a slash at its
    end, and its name there; None if it is to have a file of its own."""
    if len(body) > PACKED_MOST or not key.startswith(_RESULTS) or key.count("/") != 5:
        return None
    run, _, name = key.rsplit("/", 2)
    return run, name


def _line_checksum(head: bytes, checksum: int) -> int:
    """Compute the checksum in the line before a body of a checksum, after the `head` of the line.
    So a body, which may be large, is gone through once."""
    return crc32(b"%08x" % checksum, crc32(head))


@dataclass(slots=True, eq=False)
class _Segment:
    """A segment that this process writes; its descriptor is negative while it is closed. `dropped`
    are the offsets of bodies that no row will ever name, `used` is the number of its last append
    among all."""

    key: str
    path: str
    descriptor: int
    end: int = 0
    bodies: int = 0
    dropped: set[int] = field(default_factory=set)
    used: int = 0

    def append(self, bodies: Sequence[tuple[str, bytes]]) -> list[str]:
        """Write (name, body) pairs in one go; return their keys. Raises OSError, and then none of
        them is part of the segment."""
        parts: list[bytes] = []
        keys: list[str] = []
        end = self.end
        for name, body in bodies:
            checksum = crc32(body)
            head = b"%s %d " % (name.encode(), len(body))
            head += b"%08x\n" % _line_checksum(head, checksum)
            end += len(head)
            keys.append(packed_key(self.key, end, len(body), checksum))
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

    @property
    def number(self) -> int:
        return int(self.key.rpartition("/")[2])

    def is_there(self) -> bool:
        """Tell whether the file still has a name: what is written to another one is lost."""
        return os.fstat(self.descriptor).st_nlink > 0

    def reopen(self) -> bool:
        """Open the file again; tell whether it is as it was left. Raises OSError."""
        try:
            self.descriptor = os.open(self.path, os.O_WRONLY)
        except (FileNotFoundError, NotADirectoryError):
            return False
        if self.is_there() and os.fstat(self.descriptor).st_size == self.end:
            return True
        self.close()
        return False

    def close(self) -> None:
        """Close the file."""
        descriptor, self.descriptor = self.descriptor, -1
        os.close(descriptor)


class SegmentWriter:
    """The segments below `root` that this process writes, the last one of each run. At most 64 are
    open; others are opened again, if their run is among the last 10,000. Threads may share it."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._lock = threading.Lock()
        # The one used longest ago first. No run is in both.
        self._open: dict[str, _Segment] = {}
        self._closed: dict[str, _Segment] = {}
        self._appends = 0

    def append(self, run: str, bodies: Sequence[tuple[str, bytes]]) -> list[str]:
        """Append (name, body) pairs to the segment of a run; return their keys. Raises OSError, and
        then none of them is stored."""
        with self._lock:
            self._appends += 1
            segment = self._writable(run)
            segment.used = self._appends
            self._close_idle()
            try:
                return segment.append(bodies)
            except BaseException:
                self._remove_if_unused(run, segment)
                raise

    def drop(self, body: PackedBody) -> None:
        """Note that no row will name a body. Its bytes stay, unless the last segment of its run has
        no other body."""
        run = body.pack.rsplit("/", 2)[0]
        with self._lock:
            segment = self._open.get(run) or self._closed.get(run)
            if segment is not None and segment.key == body.pack:
                segment.dropped.add(body.offset)
                self._remove_if_unused(run, segment)

    def close_below(self, prefix: str) -> None:
        """Write no more to the segments below a prefix, which ends in a slash."""
        with self._lock:
            for run in [run for run in self._open if f"{run}/".startswith(prefix)]:
                self._close(run)
            for run in [run for run in self._closed if f"{run}/".startswith(prefix)]:
                del self._closed[run]

    def close(self) -> None:
        """Write no more to any segment."""
        with self._lock:
            while self._open:
                self._close(next(iter(self._open)))
            self._closed.clear()

    def _writable(self, run: str) -> _Segment:
        segment = self._open.pop(run, None)
        if segment is not None:
            self._open[run] = segment  # the last one used is the last one closed
            if segment.is_there() and not segment.is_full:
                return segment
            self._close(run)
        last = self._closed.get(run)
        while len(self._open) >= _MOST_OPEN:
            self._close(next(iter(self._open)))
        if last is None or last.is_full or not last.reopen():
            last = self._new(run, last)
        self._closed.pop(run, None)
        self._open[run] = last
        return last

    def _new(self, run: str, last: _Segment | None) -> _Segment:
        folder = f"{self._root}/{run}/{FOLDER}"
        # Not the root: where somebody removed all data, nothing appears in its place.
        os.stat(self._root)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        number = max(_numbers_in(folder), default=0) if last is None else last.number
        name = f"{number + 1:08}"
        path = f"{folder}/{name}"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            self._closed.pop(run, None)  # somebody else's: the next one looks for a free number
            raise
        return _Segment(f"{run}/{FOLDER}/{name}", path, descriptor)

    def _close_idle(self) -> None:
        run, segment = next(iter(self._open.items()))
        if segment.used < self._appends - _IDLE_APPENDS:
            self._close(run)

    def _close(self, run: str) -> None:
        segment = self._closed[run] = self._open.pop(run)
        segment.close()
        while len(self._closed) > _MOST_CLOSED:
            del self._closed[next(iter(self._closed))]

    def _remove_if_unused(self, run: str, segment: _Segment) -> None:
        if segment.bodies == len(segment.dropped):
            with suppress(FileNotFoundError):
                os.unlink(segment.path)
            if run in self._open:
                self._close(run)


def remove_unsettled(root: str, keys: Collection[str]) -> None:
    """Remove the segments that hold nothing but new bodies of these keys, which no row names.

    The process before wrote such, last of all: the segments of a run are looked at from the last
    one back, until several in a row are kept. Of a segment the bodies of these keys are read, up to
    the first other one.
    """
    names: dict[str, set[bytes]] = {}
    for key in keys:
        run, _, name = key.rsplit("/", 2)
        names.setdefault(run, set()).add(name.encode())
    for run, unsettled in names.items():
        kept = 0
        folder = f"{root}/{run}/{FOLDER}"
        for number in sorted(_numbers_in(folder), reverse=True):
            path = f"{folder}/{number:08}"
            if _holds_only(path, unsettled):
                os.unlink(path)
                kept = 0
            elif (kept := kept + 1) == _KEPT_IN_A_ROW:
                break


def _numbers_in(folder: str) -> list[int]:
    """Return the numbers of the segments in a folder. Files whose names are not ours have none."""
    try:
        return [int(name) for name in os.listdir(folder) if _NUMBER.fullmatch(name)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _holds_only(path: str, names: Collection[bytes]) -> bool:
    """Tell whether every body in a segment has one of these names and is as it was written. A kill
    may have cut off the last one. Where anything is damaged, bodies may follow that nobody finds
    any more but by their rows."""
    with open(path, "rb") as file:
        while line := file.readline(_MOST_HEAD):
            head = _HEAD.fullmatch(line)
            if head is None:
                return _is_cut_head(line, names)
            size = int(head[3])
            if head[2] not in names or size > PACKED_MOST:
                return False
            body = file.read(size)
            if len(body) < size:
                return _HEAD_FOLLOWS.search(body) is None
            if _line_checksum(head[1], crc32(body)) != int(head[4], 16):
                return False
    return True


def _is_cut_head(line: bytes, names: Collection[bytes]) -> bool:
    """Tell whether a kill can have left this of the line before a body of one of these names."""
    head = _CUT_HEAD.fullmatch(line)
    if head is None:
        return False
    return head[1] in names if head[2] else any(name.startswith(line) for name in names)
