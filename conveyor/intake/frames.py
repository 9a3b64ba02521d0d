"""The protocol between the server and the child process.

The server sends one line, a `ValidationRequest` as JSON, then the bytes of the list until the end
of file. The child sends frames: a kind (one byte), a length (four bytes, big-endian) and so many
bytes. A `Head` comes first for documents, then `Chunk`s, then one `Done`; or, at any moment, one
`Refusal`, which is the last frame. A document is checked as a whole before its first chunk; chunks
of a file come as it is read, and are void if a refusal follows.
"""

from __future__ import annotations

import struct
from enum import StrEnum

import msgspec

from conveyor.domain.errors import ErrorCode, InvalidTask
from conveyor.domain.remarks import Remarks
from conveyor.domain.submission import JobRequest, Limits

CHUNK_ROWS = 10_000
CHUNK_BYTES = 4 * 1_024 * 1_024
"""A chunk ends with the line that reaches this size."""
LINE_ROWS = 250
"""Maximum rows in one line of a chunk: a line is written in one step, and other work waits."""

HEADER = struct.Struct(">cI")
_CHUNK = struct.Struct(">QI")


class ListSource(StrEnum):
    """The kind of list: the JSON document of a submit, or an uploaded file."""

    DOCUMENT = "document"
    CSV = "csv"
    JSONL = "jsonl"
    URLS = "urls"


class Csv(msgspec.Struct, frozen=True, kw_only=True):
    """The way to read a CSV file; columns are named by header or by index from 0."""

    url: int | str
    external_id: int | str | None = None
    delimiter: str = ","
    quote: str = '"'
    header: bool = False


class ValidationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The child's task.

    Task ids are made from `run_id`. `limits` bound a document, `max_rows` and `max_bytes`
    (unpacked) a file; `job_params`, normalized, apply to a file's tasks, and `skip_invalid` leaves
    its bad ones out.
    """

    source: ListSource
    run_id: str
    limits: Limits = Limits()
    job_params: dict[str, str] = {}
    csv: Csv | None = None
    skip_invalid: bool = False
    max_rows: int = 100_000
    max_bytes: int = 52_428_800


class Head(msgspec.Struct, frozen=True):
    """A document without its tasks: `request.specs` is empty, `tasks` is their number."""

    request: JobRequest
    tasks: int


class Chunk(msgspec.Struct, frozen=True):
    """`count` rows from `first_index` on, in the form in which they are staged.

    `content` is lines, each a JSON array of at most LINE_ROWS pairs: a task's id and its TaskSpec.
    """

    first_index: int
    count: int
    content: bytes


class Done(msgspec.Struct, frozen=True):
    """The whole list was read: its number of rows, the write units to write them, and what is to be
    said of a file."""

    rows: int
    units: int
    remarks: Remarks = Remarks()


class Refusal(msgspec.Struct, frozen=True):
    """The list was refused; the fields are those of ConveyorError."""

    code: ErrorCode
    detail: str
    invalid_tasks: tuple[InvalidTask, ...] = ()


Frame = Head | Chunk | Done | Refusal

_KINDS: dict[bytes, type[Head | Done | Refusal]] = {b"H": Head, b"D": Done, b"E": Refusal}


def encode_frame(frame: Frame) -> list[bytes]:
    """Encode a frame as the pieces to write."""
    if isinstance(frame, Chunk):
        head = _CHUNK.pack(frame.first_index, frame.count)
        return [HEADER.pack(b"C", len(head) + len(frame.content)), head, frame.content]
    kind = next(kind for kind, shape in _KINDS.items() if isinstance(frame, shape))
    content = msgspec.json.encode(frame)
    return [HEADER.pack(kind, len(content)), content]


def decode_frame(kind: bytes, content: bytes) -> Frame:
    """Decode a frame from its kind and its bytes. Raises ValueError for an unknown kind."""
    if kind == b"C":
        first_index, count = _CHUNK.unpack_from(content)
        return Chunk(first_index, count, content[_CHUNK.size :])
    if kind not in _KINDS:
        raise ValueError(f"no such frame: {kind!r}")
    return msgspec.json.decode(content, type=_KINDS[kind])
