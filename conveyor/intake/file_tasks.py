"""The tasks of a file as they are read: good ones become rows while none was bad, bad ones are
counted and the first of them remembered."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from conveyor.domain.errors import ConveyorError, ErrorCode, InvalidTask
from conveyor.domain.model import TaskSpec
from conveyor.intake.frames import Done
from conveyor.intake.rows import RowWriter

MAX_LISTED = 100
"""Most bad rows of a file that a refusal lists."""

Checked = TaskSpec | InvalidTask


class FileTasks:
    """What a reader of files hands its tasks to. A task's index is its place among them; the
    number of its record is one more."""

    def __init__(self, writer: RowWriter, *, max_rows: int) -> None:
        self._writer = writer
        self._max_rows = max_rows
        self._invalid: list[InvalidTask] = []
        self._bad = 0
        self._first_bad = ""
        self.count = 0

    def add(self, specs: Sequence[TaskSpec]) -> None:
        """Good tasks, at most a few hundred. Raises ConveyorError where there are too many in
        all."""
        self._take(len(specs))
        if not self._bad:
            self._writer.add(specs)

    def add_checked(self, checked: Sequence[Checked], lines: Sequence[int]) -> None:
        """Tasks, bad ones among them with their index, and the line where each begins. Raises as
        add does."""
        specs: list[TaskSpec] = []
        for task, line in zip(checked, lines, strict=True):
            if isinstance(task, InvalidTask):
                self._note(task, line)
            else:
                specs.append(task)
        self._take(len(checked))
        if not self._bad:
            self._writer.add(specs)

    def finish(self) -> Done:
        """The end of the file. Raises ConveyorError(invalid_argument) where a task was bad, or none
        was there."""
        if self._bad:
            raise ConveyorError(
                ErrorCode.INVALID_ARGUMENT,
                f"{self._bad} of {self.count} tasks in the file are invalid; nothing was created; "
                f"the first is {self._first_bad}",
                invalid_tasks=tuple(self._invalid),
            )
        if not self.count:
            raise ConveyorError(ErrorCode.INVALID_ARGUMENT, "the file holds no task")
        return self._writer.finish()

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
            self._first_bad = f"record {task.index + 1} at line {line}: {task.reason}{value}"
        self._bad += 1
        if len(self._invalid) < MAX_LISTED:
            self._invalid.append(msgspec.structs.replace(task, line=line))
