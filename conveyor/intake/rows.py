"""Turns the tasks of a list into chunks of rows to stage.

Tasks of a file become rows as they are read, as long as all are good; bad ones are counted and the
first of them remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from conveyor.domain import ids
from conveyor.domain.errors import ConveyorError, ErrorCode, InvalidTask
from conveyor.domain.model import TaskSpec
from conveyor.domain.remarks import MAX_LISTED, Remarks, UnknownFields
from conveyor.domain.shards import WRITE_UNIT, write_units
from conveyor.intake.frames import CHUNK_BYTES, CHUNK_ROWS, LINE_ROWS, Chunk, Done

LINE_BYTES = 524_288
"""A line ends with the row that reaches this size."""

_AROUND_SPEC = len('["",]') + ids.TASK_ID_LENGTH
_encode = msgspec.json.Encoder().encode


class RowWriter:
    """Gives rows their ids, counts them and their write units, and emits full chunks.

    The cost of a row is computed from its TaskSpec as JSON.
    """

    def __init__(self, run_id: str, emit: Callable[[Chunk], None]) -> None:
        self._run_id = run_id
        self._emit = emit
        self._rows = 0
        self._units = 0
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._lines: list[bytes] = []
        self._lines_bytes = 0
        self._first_index = 0
        self._count = 0

    def add(self, specs: Sequence[TaskSpec]) -> None:
        """Add the next tasks; a few hundred at a time, for they are encoded together."""
        if not specs:
            return
        task_ids = ids.task_ids(self._run_id, self._rows, len(specs))
        rows = list(map(_encode, zip(task_ids, specs, strict=True)))
        self._rows += len(rows)
        sizes = list(map(len, rows))
        if max(sizes) <= WRITE_UNIT:
            self._units += len(rows)
        else:
            self._units += sum(write_units(size - _AROUND_SPEC) for size in sizes)
        if self._pending_bytes + sum(sizes) < LINE_BYTES and len(rows) <= self._room():
            self._pending += rows
            self._pending_bytes += sum(sizes)
            if not self._room():
                self._end_line()
            return
        for row, size in zip(rows, sizes, strict=True):
            self._pending.append(row)
            self._pending_bytes += size
            if not self._room() or self._pending_bytes >= LINE_BYTES:
                self._end_line()

    def finish(self) -> Done:
        """Emit the rest; return the counts of the whole list."""
        self._end_line()
        self._end_chunk()
        return Done(self._rows, self._units)

    def _room(self) -> int:
        """Return how many more rows the line may hold."""
        return LINE_ROWS - len(self._pending)

    def _end_line(self) -> None:
        """Close the line, and the chunk if it is full; a line that would make the chunk too long
        begins the next."""
        if not self._pending:
            return
        if self._count + len(self._pending) > CHUNK_ROWS:
            self._end_chunk()
        line = b"[" + b",".join(self._pending) + b"]\n"
        self._lines.append(line)
        self._lines_bytes += len(line)
        self._count += len(self._pending)
        self._pending = []
        self._pending_bytes = 0
        if self._count == CHUNK_ROWS or self._lines_bytes >= CHUNK_BYTES:
            self._end_chunk()

    def _end_chunk(self) -> None:
        if not self._lines:
            return
        self._emit(Chunk(self._first_index, self._count, b"".join(self._lines)))
        self._first_index += self._count
        self._count = 0
        self._lines = []
        self._lines_bytes = 0


Checked = TaskSpec | InvalidTask


class FileTasks:
    """Collects the tasks that a reader of files finds.

    A task's index is its place among them; the number of its record is one more. With
    `skip_invalid` bad ones are left out. `unknown` is told of fields that nobody reads.
    """

    def __init__(self, writer: RowWriter, *, max_rows: int, skip_invalid: bool = False) -> None:
        self._writer = writer
        self._max_rows = max_rows
        self._skips = skip_invalid
        self.unknown = UnknownFields()
        self._invalid: list[InvalidTask] = []
        self._bad = 0
        self._first_bad = ""
        self.count = 0

    def add(self, specs: Sequence[TaskSpec]) -> None:
        """Add good tasks, at most a few hundred. Raises ConveyorError if the file holds too
        many."""
        self._take(len(specs))
        if self._skips or not self._bad:
            self._writer.add(specs)

    def add_checked(self, checked: Sequence[Checked], lines: Sequence[int]) -> None:
        """Add tasks, bad ones included with their index, and the line where each begins.

        Raises as add does.
        """
        specs: list[TaskSpec] = []
        for task, line in zip(checked, lines, strict=True):
            if isinstance(task, InvalidTask):
                self._note(task, line)
            else:
                specs.append(task)
        self._take(len(checked))
        if self._skips or not self._bad:
            self._writer.add(specs)

    def finish(self) -> Done:
        """End the file. Raises ConveyorError(invalid_argument) if a task was bad and not to be left
        out, or the file had no good one."""
        if self._bad and not (self._skips and self._bad < self.count):
            raise ConveyorError(
                ErrorCode.INVALID_ARGUMENT,
                f"{self._bad} of {self.count} tasks in the file are invalid; nothing was created; "
                f"the first is {self._first_bad}",
                invalid_tasks=tuple(self._invalid),
            )
        if not self.count:
            raise ConveyorError(ErrorCode.INVALID_ARGUMENT, "the file holds no task")
        remarks = Remarks(self._bad, tuple(self._invalid), self.unknown.warnings())
        return msgspec.structs.replace(self._writer.finish(), remarks=remarks)

    def _take(self, count: int) -> None:
        self.count += count
        if self.count > self._max_rows:
            raise ConveyorError(
                ErrorCode.INVALID_ARGUMENT,
                f"the file holds more than {self._max_rows:,} tasks (CONVEYOR_MAX_INPUT_ROWS)",
            )

    def _note(self, task: InvalidTask, line: int) -> None:
        if not self._bad:
            value = "" if task.value is None else f" ({task.value})"
            detail = "" if task.detail in (None, task.value) else f": {task.detail}"
            where = f"record {task.index + 1} at line {line}"
            self._first_bad = f"{where}: {task.reason}{value}{detail}"
        self._bad += 1
        if len(self._invalid) < MAX_LISTED:
            self._invalid.append(msgspec.structs.replace(task, line=line))
