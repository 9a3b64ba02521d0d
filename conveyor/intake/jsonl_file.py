"""A file of tasks, each a JSON object on a line of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from conveyor.domain import strict_json, task_input, urls
from conveyor.domain.errors import ConveyorError, InvalidTask, InvalidTaskReason
from conveyor.domain.model import TaskSpec
from conveyor.domain.text_rules import shorten
from conveyor.intake.file_tasks import Checked, FileTasks
from conveyor.intake.lines import Piece
from conveyor.intake.url_file import BLANK

# Nothing here is escaped or named twice, so it is read as the strict reader would.
_SIMPLE_TASK = re.compile(
    r'\{ ?"url" ?: ?"([!#-\[\]-~]+)" ?(?:, ?"external_id" ?: ?"([A-Za-z0-9._-]{1,128})" ?)?\}'
)


def read_jsonl(pieces: Iterator[Piece], job_params: Mapping[str, str], tasks: FileTasks) -> None:
    """Tasks as a submit takes them, under the job's params. Blank lines do not count; a line that
    is no JSON is a bad task. Raises ConveyorError as FileTasks does."""
    for piece in pieces:
        checked: list[Checked] = []
        numbers: list[int] = []
        for number, raw in enumerate(piece.text.split("\n"), start=piece.first_line):
            line = raw.strip(BLANK)
            if line:
                checked.append(read_task(line, tasks.count + len(checked), job_params))
                numbers.append(number)
        tasks.add_checked(checked, numbers)


def read_task(line: str, index: int, job_params: Mapping[str, str]) -> Checked:
    """The task at `index` of a file, from its line."""
    simple = _SIMPLE_TASK.fullmatch(line)
    if simple is not None and urls.check(simple[1]) is None:
        return TaskSpec(simple[1], simple[2])
    try:
        document = strict_json.decode(line.encode())
    except ConveyorError as error:
        problem = error.detail.removeprefix("the request body ").replace(
            " line 1 column", " column"
        )
        return InvalidTask(index, InvalidTaskReason.INVALID_ARGUMENT, shorten(problem))
    return task_input.parse(document, index, job_params)
