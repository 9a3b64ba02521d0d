"""Lists for the child process that checks them, and what became of them."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

import msgspec

from conveyor.domain import ids
from conveyor.domain.model import TaskSpec
from conveyor.intake import child
from conveyor.intake.frames import (
    CHUNK_ROWS,
    HEADER,
    LINE_ROWS,
    Chunk,
    Csv,
    Done,
    Frame,
    ListSource,
    Refusal,
    ValidationRequest,
    decode_frame,
)

RUN = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
URLS_WORK = ValidationRequest(source=ListSource.URLS, run_id=RUN)
JSONL_WORK = ValidationRequest(source=ListSource.JSONL, run_id=RUN)
DOCUMENT_WORK = ValidationRequest(source=ListSource.DOCUMENT, run_id=RUN)

_ROWS = msgspec.json.Decoder(list[tuple[str, TaskSpec]])


def csv_work(
    url: int | str = 0, external_id: int | str | None = None, **spec: object
) -> ValidationRequest:
    """Work on a CSV file; `spec` as in Csv."""
    fields = {"url": url, "external_id": external_id, **spec}
    return ValidationRequest(source=ListSource.CSV, run_id=RUN, csv=msgspec.convert(fields, Csv))


def with_limits(
    work: ValidationRequest, *, rows: int = 100_000, size: int = 52_428_800
) -> ValidationRequest:
    """The same work under other limits."""
    return msgspec.structs.replace(work, max_rows=rows, max_bytes=size)


class Slow(io.RawIOBase):
    """A file that gives at most so many bytes at a time."""

    def __init__(self, content: bytes, step: int) -> None:
        self._content = io.BytesIO(content)
        self._step = step

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """Return the available bytes, at most a step; all of them if no size is given."""
        return self._content.read(min(size, self._step) if size >= 0 else -1)

    def readline(self, size: int | None = -1) -> bytes:
        return self._content.readline()


def answer(work: ValidationRequest, content: bytes, *, step: int = 65_536) -> list[Frame]:
    """The frames that a list gets, its bytes given in steps of a size."""
    out = io.BytesIO()
    child.serve(Slow(msgspec.json.encode(work) + b"\n" + content, step), out)  # type: ignore[arg-type]
    return list(split_frames(out.getvalue()))


def split_frames(content: bytes) -> Iterator[Frame]:
    """The frames that the bytes are."""
    place = 0
    while place < len(content):
        kind, length = HEADER.unpack_from(content, place)
        place += HEADER.size
        assert place + length <= len(content), "a frame is cut off"
        yield decode_frame(kind, content[place : place + length])
        place += length


def rows_of(frames: Sequence[Frame]) -> list[TaskSpec]:
    """The tasks of all chunks, which must be what the list was accepted as."""
    done = frames[-1]
    assert isinstance(done, Done), done
    found: list[tuple[str, TaskSpec]] = []
    for chunk in frames:
        if isinstance(chunk, Chunk):
            assert chunk.first_index == len(found)
            assert chunk.content.endswith(b"]\n")
            rows = [_ROWS.decode(line) for line in chunk.content.splitlines()]
            assert all(0 < len(line) <= LINE_ROWS for line in rows)
            assert chunk.count == sum(map(len, rows)) <= CHUNK_ROWS
            found += [row for line in rows for row in line]
    assert [task_id for task_id, _ in found] == [ids.task_id(RUN, i) for i in range(len(found))]
    assert done.rows == len(found)
    return [spec for _, spec in found]


def accepted(work: ValidationRequest, content: bytes, *, step: int = 65_536) -> list[TaskSpec]:
    """The tasks of a list that must be good."""
    return rows_of(answer(work, content, step=step))


def refused(work: ValidationRequest, content: bytes, *, step: int = 65_536) -> Refusal:
    """Return the refusal of a list, which must be refused; nothing follows it."""
    frames = answer(work, content, step=step)
    assert not any(isinstance(frame, Done | Refusal) for frame in frames[:-1])
    refusal = frames[-1]
    assert isinstance(refusal, Refusal), refusal
    return refusal
