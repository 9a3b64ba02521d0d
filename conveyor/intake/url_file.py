"""A file of URLs, one a line."""

from __future__ import annotations

from collections.abc import Iterator

from conveyor.domain import task_input, urls
from conveyor.domain.model import TaskSpec
from conveyor.intake.file_tasks import Checked, FileTasks
from conveyor.intake.lines import Piece

BLANK = " \t\r"
"""What does not count at the start and end of a line."""


def read_urls(pieces: Iterator[Piece], tasks: FileTasks) -> None:
    """Blank lines and lines that start with # do not count. Raises ConveyorError as FileTasks
    does."""
    for piece in pieces:
        lines = [line.strip(BLANK) for line in piece.text.split("\n")]
        found = [line for line in lines if line and line[0] != "#"]
        if urls.are_plain(found):
            tasks.add(list(map(TaskSpec, found)))
        else:
            _add_one_by_one(lines, piece.first_line, tasks)


def _add_one_by_one(lines: list[str], first_line: int, tasks: FileTasks) -> None:
    checked: list[Checked] = []
    numbers: list[int] = []
    for number, line in enumerate(lines, start=first_line):
        if line and line[0] != "#":
            checked.append(task_input.parse({"url": line}, tasks.count + len(checked), {}))
            numbers.append(number)
    tasks.add_checked(checked, numbers)
