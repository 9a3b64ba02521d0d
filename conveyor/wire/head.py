"""Read the head of an answer, and decide by it how the body is framed.

A head is collected to its end and read once, so no verdict depends on how its bytes arrived. Where
browsers are lenient and nothing is at risk, so is this reader; the connection is then not kept.
docs/hostile-answers.md has the cases and the reasons.
"""

from __future__ import annotations

import re
from enum import Enum

from conveyor.wire.errors import TransportError, TransportTrouble

MAX_HEAD = 262_144
"""Bytes of a head, status line and line ends included."""
MAX_LENGTH = 2**63 - 1

_STATUS_LINE = re.compile(rb"HTTP/1\.([0-9])[ ]+([1-9][0-9]{2})(?:[ \t][^\x00\r]*)?")
_USUAL_STATUS_LINE = re.compile(
    rb"HTTP/1\.([0-9])[ ]+([1-9][0-9]{2})(?:[ \t][^\x00-\x08\x0a-\x1f\x7f]*)?"
)
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROLS = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_ON_FRAMING = re.compile(rb"[ \t]|[^:]*(?:content-length|transfer-encoding)", re.IGNORECASE)

_Value = bytes | bytearray
_MAX_KNOWN, _MAX_KNOWN_LINE = 2_048, 128


class _KnownLines(dict[bytes, tuple[bytes, list[_Value]]]):
    """Fields by their lines, which are read once: most lines of most answers are alike. A field is
    its lowercase name, empty for a line that is not written by the book, and the list of its one
    value, which many answers share, so that nobody may change it."""

    def __missing__(self, line: bytes) -> tuple[bytes, list[_Value]]:
        name, value, is_exact = _read_field(line)
        if not is_exact or _CONTROLS.search(line):
            name = b""
        field: tuple[bytes, list[_Value]] = (name, [value])
        if len(line) <= _MAX_KNOWN_LINE:
            if len(self) >= _MAX_KNOWN:
                self.clear()
            self[line] = field
        return field


_known = _KnownLines()


class HeaderFields:
    """The header fields of an answer: bytes, decoded when asked for, looked up without regard to
    case."""

    __slots__ = ("_fields",)

    def __init__(self, fields: dict[bytes, list[_Value]]) -> None:
        self._fields = fields

    def get(self, name: str, default: str) -> str:
        """Return the first field of that name."""
        values = self._fields.get(name.lower().encode())
        return default if values is None else values[0].decode("utf-8", "surrogateescape")

    def getall(self, name: str, default: list[str]) -> list[str]:
        """Return every field of that name, in order."""
        values = self._fields.get(name.lower().encode())
        if values is None:
            return default
        return [value.decode("utf-8", "surrogateescape") for value in values]

    def values(self) -> list[str]:
        """Return the value of every field."""
        return [
            value.decode("utf-8", "surrogateescape")
            for values in self._fields.values()
            for value in values
        ]

    def firsts(self) -> dict[str, str]:
        """Return the first field of each name, by its name in lowercase."""
        return {
            name.decode(): values[0].decode("utf-8", "surrogateescape")
            for name, values in self._fields.items()
        }


class Framing(Enum):
    """The mark of a body's end."""

    NO_BODY = "no body"
    LENGTH = "its announced length"
    CHUNKS = "its last chunk"
    CONNECTION = "the end of the connection"


NO_BODY, LENGTH, CHUNKS, CONNECTION = Framing
"""By names of their own: every answer asks several times, and to look into an enumeration is slow
before Python 3.12."""


class ResponseHead:
    """The head of an answer.

    `length` is in bytes, and 0 unless the framing is by length. `may_keep` is False if the
    connection must not carry another request.
    """

    __slots__ = ("framing", "headers", "length", "may_keep", "status")

    def __init__(
        self, status: int, headers: HeaderFields, framing: Framing, length: int, may_keep: bool
    ) -> None:
        self.status = status
        self.headers = headers
        self.framing = framing
        self.length = length
        self.may_keep = may_keep


def head_end(data: bytes | bytearray, start: int = 0) -> int:
    """Return the index after the first empty line, or -1 if there is none yet.

    `start` is an index before which no empty line begins.
    """
    mixed = data.find(b"\n\r\n", start)
    # The line feed that begins the one may end the other.
    bare = data.find(b"\n\n", start, mixed + 1 if mixed >= 0 else None)
    if bare >= 0:
        return bare + 2
    return mixed + 3 if mixed >= 0 else -1


def read_head(data: bytes, method: str) -> ResponseHead:
    """Read a whole head, its empty line included. Raises TransportError(MALFORMED)."""
    lines = data[:-4].split(b"\r\n")
    matched = _USUAL_STATUS_LINE.fullmatch(lines[0])
    del lines[0]
    fields = dict(map(_known.__getitem__, lines))
    is_clean = matched is not None and b"" not in fields and data.endswith(b"\r\n\r\n")
    if not is_clean:
        matched, fields = _read_odd(data)
    elif len(fields) < len(lines):
        fields = _gathered(lines)
    if matched is None:
        raise malformed()
    status = int(matched[2])
    framing, length, is_exact = _framing(status, method, fields)
    may_keep = is_clean and is_exact and matched[1] != b"0" and framing is not CONNECTION
    connection = fields.get(b"connection") if may_keep else None
    if connection is not None and connection != [b"keep-alive"]:
        may_keep = b"close" not in _elements(connection)
    if method == "CONNECT" and framing is NO_BODY:
        may_keep = True  # a tunnel, of whatever version the proxy speaks
    return ResponseHead(status, HeaderFields(fields), framing, length, may_keep)


def malformed() -> TransportError:
    """Return the error of an answer that is not HTTP."""
    return TransportError(TransportTrouble.MALFORMED)


def _read_odd(data: bytes) -> tuple[re.Match[bytes] | None, dict[bytes, list[_Value]]]:
    """Read the status line, None if it is none, and the fields of a head that is not written by the
    book."""
    first, *lines = _lines(data)
    return _STATUS_LINE.fullmatch(first), _read_fields(lines)


def _lines(data: bytes) -> list[bytes]:
    """Split a head into its lines, which end in one way or another."""
    lines = [line.removesuffix(b"\r") for line in data.split(b"\n")]
    if any(b"\r" in line or b"\0" in line for line in lines):
        raise malformed()
    # A field with another control byte counts for nothing, nor does what is folded to it.
    fields = [b"" if _CONTROLS.search(line) else line for line in lines[1:]]
    for line, field in zip(lines[1:], fields, strict=True):
        # To pass over a line about the framing, or its fold, would be to guess the framing.
        if not field and _ON_FRAMING.match(line):
            raise malformed()
    return [lines[0], *fields]


def _gathered(lines: list[bytes]) -> dict[bytes, list[_Value]]:
    """Read fields by the book of which some come more than once."""
    fields: dict[bytes, list[_Value]] = {}
    for name, [value] in map(_known.__getitem__, lines):
        fields.setdefault(name, []).append(value)
    return fields


def _read_fields(lines: list[bytes]) -> dict[bytes, list[_Value]]:
    """Read fields of which some are not written by the book."""
    fields: dict[bytes, list[_Value]] = {}
    values: list[_Value] | None = None
    for line in lines:
        name, value, _ = _read_field(line)
        if not name:
            values = _fold(line, values)
            continue
        values = fields.setdefault(name, [])
        values.append(value)
    return fields


def _fold(line: bytes, values: list[_Value] | None) -> list[_Value] | None:
    """Join a folded line to the field before it; pass over a line that is no field."""
    if line[:1] not in (b" ", b"\t") or values is None:
        return None
    value = values[-1]
    if not isinstance(value, bytearray):
        # Grows in place: a head may have a hundred thousand folds.
        value = values[-1] = bytearray(value)
    value += b" " + line.strip(b" \t")
    return values


def _read_field(line: bytes) -> tuple[bytes, bytes, bool]:
    """Return the lowercase name of a field, empty for a line that is none; its value; whether the
    line is written by the book."""
    name, colon, value = line.partition(b":")
    bare = name.rstrip(b" \t")
    is_field = bool(colon) and _TOKEN.fullmatch(bare) is not None
    return bare.lower() if is_field else b"", value.strip(b" \t"), is_field and bare == name


def _framing(
    status: int, method: str, fields: dict[bytes, list[_Value]]
) -> tuple[Framing, int, bool]:
    """Return what ends the body, its length, and whether the fields agree with each other."""
    lengths = fields.get(b"content-length")
    codings = fields.get(b"transfer-encoding")
    if status < 200 or status in (204, 304) or method == "HEAD":
        is_exact = codings is None and (status == 304 or lengths in (None, [b"0"]))
        return NO_BODY, 0, is_exact or (method == "HEAD" and status >= 200)
    if method == "CONNECT" and status < 300:
        return NO_BODY, 0, True
    if codings is not None:
        applied = [coding for coding in _elements(codings) if coding not in (b"", b"identity")]
        if applied == [b"chunked"]:
            return CHUNKS, 0, lengths is None
        if applied:
            raise malformed()
    if lengths is None:
        return CONNECTION, 0, False
    return LENGTH, _length(lengths), codings is None


def _length(values: list[_Value]) -> int:
    text = values[0]
    if len(values) == 1 and text.isdigit() and len(text) < 19:
        return int(text)
    given = set()
    for element in _elements(values):
        # int() reads no more digits than fit: a number of thousands of digits would take long.
        if not element.isdigit() or len(element.lstrip(b"0")) > 19:
            raise malformed()
        given.add(int(element.lstrip(b"0") or b"0"))
    if len(given) != 1 or (length := given.pop()) > MAX_LENGTH:
        raise malformed()
    return length


def _elements(values: list[_Value]) -> list[_Value]:
    """Return the elements of a list field, in lowercase."""
    return [element.strip(b" \t").lower() for value in values for element in value.split(b",")]
