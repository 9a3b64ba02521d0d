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
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROLS = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_ON_FRAMING = re.compile(rb"[ \t]|[^:]*(?:content-length|transfer-encoding)", re.IGNORECASE)
_WITHOUT_CONTROLS = bytes(byte for byte in range(256) if byte == 9 or 32 <= byte != 127)

_Value = bytes | bytearray
_Field = tuple[bytes, bytes, bool]
"""The lowercase name of a field, empty for a line that is none; its value; whether the line is
written by the book."""
_MAX_KNOWN, _MAX_KNOWN_LINE = 2_048, 128
_known: dict[bytes, _Field] = {}
"""Lines that were read before: most lines of most answers are alike."""


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
    lines, is_clean = _lines(data)
    matched = _STATUS_LINE.fullmatch(lines[0])
    if matched is None:
        raise malformed()
    status = int(matched[2])
    fields: dict[bytes, list[_Value]] = {}
    values: list[_Value] | None = None
    known = _known.get
    for line in lines[1:]:
        name, value, is_exact = known(line) or _read_field(line)
        if not is_exact:
            is_clean = False
            if not name:
                values = _fold(line, values)
                continue
        if name in fields:
            values = fields[name]
            values.append(value)
        else:
            values = fields[name] = [value]
    framing, length, is_exact = _framing(status, method, fields)
    may_keep = is_clean and is_exact and matched[1] != b"0" and framing is not Framing.CONNECTION
    connection = fields.get(b"connection") if may_keep else None
    if connection is not None and connection != [b"keep-alive"]:
        may_keep = b"close" not in _elements(connection)
    if method == "CONNECT" and framing is Framing.NO_BODY:
        may_keep = True  # a tunnel, of whatever version the proxy speaks
    return ResponseHead(status, HeaderFields(fields), framing, length, may_keep)


def malformed() -> TransportError:
    """Return the error of an answer that is not HTTP."""
    return TransportError(TransportTrouble.MALFORMED)


def _lines(data: bytes) -> tuple[list[bytes], bool]:
    """Split a head into its lines; return whether they end by the book."""
    lines = data[:-4].split(b"\r\n")
    if data.translate(None, _WITHOUT_CONTROLS) == b"\r\n" * (len(lines) + 1):
        return lines, True
    lines = [line.removesuffix(b"\r") for line in data.split(b"\n")]
    if any(b"\r" in line or b"\0" in line for line in lines):
        raise malformed()
    # A field with another control byte counts for nothing, nor does what is folded to it.
    fields = [b"" if _CONTROLS.search(line) else line for line in lines[1:]]
    for line, field in zip(lines[1:], fields, strict=True):
        # To pass over a line about the framing, or its fold, would be to guess the framing.
        if not field and _ON_FRAMING.match(line):
            raise malformed()
    return [lines[0], *fields], False


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


def _read_field(line: bytes) -> _Field:
    name, colon, value = line.partition(b":")
    bare = name.rstrip(b" \t")
    is_field = bool(colon) and _TOKEN.fullmatch(bare) is not None
    field = (bare.lower() if is_field else b"", value.strip(b" \t"), is_field and bare == name)
    if len(line) <= _MAX_KNOWN_LINE:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[line] = field
    return field


def _framing(
    status: int, method: str, fields: dict[bytes, list[_Value]]
) -> tuple[Framing, int, bool]:
    """Return what ends the body, its length, and whether the fields agree with each other."""
    lengths = fields.get(b"content-length")
    codings = fields.get(b"transfer-encoding")
    if status < 200 or status in (204, 304) or method == "HEAD":
        is_exact = codings is None and (status == 304 or lengths in (None, [b"0"]))
        return Framing.NO_BODY, 0, is_exact or (method == "HEAD" and status >= 200)
    if method == "CONNECT" and status < 300:
        return Framing.NO_BODY, 0, True
    if codings is not None:
        applied = [coding for coding in _elements(codings) if coding not in (b"", b"identity")]
        if applied == [b"chunked"]:
            return Framing.CHUNKS, 0, lengths is None
        if applied:
            raise malformed()
    if lengths is None:
        return Framing.CONNECTION, 0, False
    return Framing.LENGTH, _length(lengths), codings is None


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
