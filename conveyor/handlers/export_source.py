"""What goes into an export: the rows of a run in portions, each with the bodies that are there."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from conveyor.domain.export_rows import Exported
from conveyor.domain.model import Job, Task, TaskStatus
from conveyor.domain.shards import shards_of
from conveyor.domain.together import side_by_side
from conveyor.ports.binding import Binding
from conveyor.ports.clock import Clock
from conveyor.ports.expiry import Expiry
from conveyor.ports.reading import all_tasks

PORTION_ROWS = 128
PORTION_BYTES = 4 * 1024 * 1024
"""A portion ends with whichever comes first; a larger body is in a portion of its own."""

READS_AT_A_TIME = 4


class TooLarge(Exception):
    """The bodies of a run are larger than an export may be."""


class Source:
    """The rows of one run, read once."""

    def __init__(self, binding: Binding, clock: Clock, job: Job, run_id: str) -> None:
        self._binding = binding
        self._clock = clock
        self._job = job
        self._run_id = run_id
        self._expiry = Expiry(binding.tasks)

    async def portions(self, *, max_bytes: int) -> AsyncGenerator[list[Exported], None]:
        """Every row in submission order. Raises TooLarge before it reads a body beyond
        `max_bytes` of bodies in all."""
        rows: list[Task] = []
        held = total = 0
        tasks = all_tasks(self._binding.tasks, self._run_id, shards_of(self._job))
        async for task in tasks:
            size = _body_size(task)
            total += size
            if total > max_bytes:
                raise TooLarge
            if rows and (len(rows) == PORTION_ROWS or held + size > PORTION_BYTES):
                yield await self._with_bodies(rows)
                rows, held = [], 0
            rows.append(task)
            held += size
        if rows:
            yield await self._with_bodies(rows)

    async def _with_bodies(self, tasks: list[Task]) -> list[Exported]:
        now = self._clock.now()
        ends = await self._expiry.of(tasks, self._job.result_ttl_days, horizon=now)
        bodies: list[tuple[bytes, ...] | None] = [None] * len(tasks)

        async def read(place: int) -> None:
            bodies[place] = await self._body(tasks[place])

        due = [place for place, end in enumerate(ends) if end is not None and end > now]
        await side_by_side(read, due, at_a_time=READS_AT_A_TIME)
        return [Exported(task, body) for task, body in zip(tasks, bodies, strict=True)]

    async def _body(self, task: Task) -> tuple[bytes, ...] | None:
        if task.result is None:
            return None
        pieces = await self._binding.blobs.open(task.result.blob_key)
        return None if pieces is None else tuple([piece async for piece in pieces])


def _body_size(task: Task) -> int:
    return task.result.size if task.status is TaskStatus.SUCCESSFUL and task.result else 0
