"""The expiry of inherited results, and the reads to find it."""

from __future__ import annotations

from typing import cast

import anyio
import pytest

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import Format, StoredBody, Task, TaskSpec, TaskStatus
from conveyor.ports.binding import Tasks
from conveyor.records.expiry import READS_AT_A_TIME, Expiry

DAY = 86_400_000
SOURCE = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
MADE_AT = 1_469_922_850_259
"""The instant at which the id of the source was made, and it began."""


class Source:
    """The tasks port of a source run, whose tasks ended one millisecond after the other; every
    third is gone. Counts the reads, and how many there were at a time."""

    def __init__(self) -> None:
        self.reads = self.at_once = self.most_at_once = 0
        self.broken = False

    async def get_task(self, run_id: str, task_id: str) -> Task | None:
        """Answer as the port does; later rows are answered sooner."""
        assert run_id == SOURCE
        self.reads += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        for _ in range(20 - int(task_id) % 20):
            await anyio.lowlevel.checkpoint()
        self.at_once -= 1
        if self.broken:
            raise ConveyorError(ErrorCode.UNAVAILABLE, "away")
        if int(task_id) % 3 == 0:
            return None
        return _task(int(task_id), MADE_AT + int(task_id))


def _task(index: int, updated_at: int, *, source: str | None = None) -> Task:
    return Task(
        run_id="RUN",
        task_id=str(index),
        index=index,
        spec=TaskSpec(url="https://site.test/"),
        status=TaskStatus.SUCCESSFUL,
        created_at=0,
        updated_at=updated_at,
        result=StoredBody("key", 1, "text/html", Format.HTML),
        source_run_id=source,
    )


def _inherited(count: int) -> list[Task]:
    return [_task(index, MADE_AT + 9 * DAY, source=SOURCE) for index in range(count)]


async def test_sources_are_read_side_by_side_and_told_in_order() -> None:
    source = Source()
    tasks = _inherited(1_000)
    ends = await Expiry(cast(Tasks, source)).of(tasks, 1, horizon=MADE_AT + 2 * DAY)
    assert ends == [MADE_AT + DAY + (0 if index % 3 == 0 else index) for index in range(1_000)]
    assert source.reads == 1_000
    assert source.most_at_once == READS_AT_A_TIME


async def test_only_rows_that_may_be_past_their_time_are_looked_up() -> None:
    source = Source()
    own = _task(1, MADE_AT + 5)
    inherited = _task(2, MADE_AT + 9 * DAY, source=SOURCE)
    unfinished = Task(
        run_id="RUN",
        task_id="3",
        index=3,
        spec=TaskSpec(url="https://site.test/"),
        status=TaskStatus.PENDING,
        created_at=0,
        updated_at=0,
    )
    expiry = Expiry(cast(Tasks, source))
    tasks = [unfinished, own, inherited]
    assert await expiry.of(tasks, 1, horizon=MADE_AT + DAY - 1) == [
        None,
        MADE_AT + DAY + 5,
        MADE_AT + DAY,
    ]
    assert source.reads == 0
    assert (await expiry.of(tasks, 1, horizon=MADE_AT + DAY))[2] == MADE_AT + DAY + 2
    assert source.reads == 1


async def test_a_read_that_fails_is_raised_as_it_was() -> None:
    source = Source()
    source.broken = True
    with pytest.raises(ConveyorError) as away:
        await Expiry(cast(Tasks, source)).of(_inherited(50), 1, horizon=MADE_AT + 2 * DAY)
    assert away.value.code is ErrorCode.UNAVAILABLE
