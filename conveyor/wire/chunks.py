"""Take the framing of chunks away from a body as it arrives."""

from __future__ import annotations

import re

from conveyor.wire.head import MAX_LENGTH, malformed

_USUAL = re.compile(rb"\r\n([1-9A-Fa-f][0-9A-Fa-f]{0,7})\r\n")
"""The end of a chunk and the beginning of another, by the book: most are, and a body may have
millions."""
_LINE = re.compile(rb"(0*)([0-9A-Fa-f]{0,16})([ \t]*)(;[^\r\n]*)?\r?\n")


class ChunkReader:
    """The state between two pieces of a chunked body.

    `padding` counts the bytes that are no body and could be left out: leading zeros, spaces,
    extensions, trailers. The caller bounds it. `is_exact` is False after a bare line feed, and
    after a bare carriage return in a trailer.
    """

    __slots__ = (
        "_held",
        "_in_trailers",
        "_left",
        "_wants_line_end",
        "is_complete",
        "is_exact",
        "padding",
    )

    def __init__(self) -> None:
        self._held = b""
        self._left = 0
        self._wants_line_end = False
        self._in_trailers = False
        self.is_complete = False
        self.is_exact = True
        self.padding = 0

    def feed(self, data: bytes, body: list[bytes]) -> bool:
        """Append the body bytes in `data` to `body`; return whether bytes follow the end.

        Raises TransportError(MALFORMED).
        """
        if self._held:
            data = self._held + data
            self._held = b""
        place = 0
        while True:
            if self._left:
                piece = data[place : place + self._left]
                if piece:
                    body.append(piece)
                    self._left -= len(piece)
                    place += len(piece)
                if self._left:
                    return False
                usual = _USUAL.match(data, place)
                if usual is not None:
                    self._left = int(usual[1], 16)
                    place = usual.end()
                    continue
                self._wants_line_end = True
            line_end = data.find(b"\n", place)
            if line_end < 0:
                self._hold(data[place:])
                return False
            line = data[place : line_end + 1]
            place = line_end + 1
            if self._wants_line_end:
                self._end_chunk(line)
            elif self._in_trailers:
                self.is_exact &= line.endswith(b"\r\n")
                if line in (b"\r\n", b"\n"):
                    self.is_complete = True
                    return place < len(data)
                self.padding += len(line)
                self.is_exact &= b"\r" not in line[:-2]
            else:
                self._begin_chunk(line)

    @property
    def pending(self) -> int:
        """The bytes of an unfinished line that will count as padding at least."""
        return max(0, len(self._held) - (2 if self._in_trailers else 18))

    def _hold(self, rest: bytes) -> None:
        if self._wants_line_end and rest not in (b"", b"\r"):
            raise malformed()
        self._held = rest

    def _begin_chunk(self, line: bytes) -> None:
        matched = _LINE.fullmatch(line)
        if matched is None:
            raise malformed()
        zeros, digits, spaces, extension = matched.groups(b"")
        if not (zeros or digits):
            raise malformed()
        self._left = int(digits or b"0", 16)
        if self._left > MAX_LENGTH:
            raise malformed()
        self.padding += len(zeros) + len(spaces) + len(extension) - (not digits)
        self.is_exact &= line.endswith(b"\r\n")
        self._in_trailers = not self._left

    def _end_chunk(self, line: bytes) -> None:
        if line not in (b"\r\n", b"\n"):
            raise malformed()
        self.is_exact &= line == b"\r\n"
        self._wants_line_end = False
