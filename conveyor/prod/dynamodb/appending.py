"""Adding tasks to an open job: indexes reserved, rows written, and then counted with everything
that follows from it in one transaction."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec import structs

from conveyor.aio.keyed_locks import Turns
from conveyor.domain import ids
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import JobStatus, JobView, Run, TaskSpec
from conveyor.domain.states import live_run_status
from conveyor.ports.records import Answer, Appended, Once
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.answers import Answers
from conveyor.prod.dynamodb.closing import closed, settled
from conveyor.prod.dynamodb.items import Item, changed_too_often
from conveyor.prod.dynamodb.job_items import JobRow, job_part
from conveyor.prod.dynamodb.keys import Key
from conveyor.prod.dynamodb.places import Place
from conveyor.prod.dynamodb.reservations import (
    Reservation,
    give_back,
    refuse_closed,
    refuse_excess,
    reserve,
    takes_tasks,
)
from conveyor.prod.dynamodb.run_items import RunRow, read_run_row
from conveyor.prod.dynamodb.run_records import TRIES, Change, RunRecords
from conveyor.prod.dynamodb.task_items import new_task_item
from conveyor.prod.dynamodb.task_writes import insert_items
from conveyor.prod.dynamodb.values import Name, untag_all
from conveyor.prod.dynamodb.views import Views

CONDITION = "ConditionalCheckFailed"

_log = logging.getLogger("conveyor.records")


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """What the port's method was asked for; see `Jobs.append_tasks`."""

    caller: str
    job_id: str
    specs: Sequence[TaskSpec]
    last_batch: bool
    max_tasks: int
    now: int
    answer: Callable[[Appended], Answer]
    once: Once | None


class _Open(NamedTuple):
    """An open job, its live run, and the key that the answer is stored under, if any."""

    job: JobRow
    run: RunRow
    once: Once | None


class _Step(NamedTuple):
    """What counting an addition writes, the run's row first, and the answer that goes with it."""

    parts: list[dict[str, Any]]
    answer: Answer


class _Answered(Exception):
    """Another call under the same key did it first."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer


class Appending:
    """Adds tasks. Adders of one run in this process take turns where they would only collide."""

    def __init__(self, records: RunRecords, views: Views, answers: Answers) -> None:
        self._records = records
        self._views = views
        self._answers = answers
        self._turns = Turns()

    async def append(self, addition: Addition) -> Answer:
        """Add tasks; see `Jobs.append_tasks`."""
        try:
            found = await self._open(addition)
            refuse_excess(found.run, len(addition.specs), max_tasks=addition.max_tasks)
            if addition.specs:
                return await self._add(addition, found)
            return await self._count(addition, found, None)
        except _Answered as earlier:
            return earlier.answer

    async def _add(self, addition: Addition, found: _Open) -> Answer:
        place = found.run.place
        turn = self._turns.of(place.run_id)
        async with turn:
            reservation, found = await self._reserve(addition, found)
        try:
            await insert_items(self._records.table, _rows(place, reservation, addition))
            async with turn:
                return await self._count(addition, found, reservation)
        except Exception:
            await self._undo(place, reservation, addition.now)
            raise

    async def _reserve(self, addition: Addition, found: _Open) -> tuple[Reservation, _Open]:
        for _ in range(TRIES):
            reserved = await reserve(
                self._records, found.run, len(addition.specs), max_tasks=addition.max_tasks
            )
            if reserved is not None:
                return reserved[0], found._replace(run=reserved[1])
            found = await self._open(addition)
        raise changed_too_often()

    async def _undo(self, place: Place, reservation: Reservation, now: int) -> None:
        """What fails here is found by the sweeper."""
        try:
            await give_back(self._records, place, reservation, now=now)
        except Exception as error:
            _log.warning(
                "tasks that could not be added are left to the sweeper",
                extra={"run_id": place.run_id, "error": type(error).__name__},
            )

    async def _open(self, addition: Addition) -> _Open:
        """The job as it takes tasks. Raises _Answered; ConveyorError where it takes none."""
        standing = await self._answers.look(addition.once)
        if isinstance(standing, Answer):
            raise _Answered(standing)
        view = await self._views.need(addition.caller, addition.job_id)
        if view.job.job.status is not JobStatus.OPEN or view.run is None:
            raise ConveyorError(ErrorCode.JOB_NOT_OPEN, "the job takes no more tasks")
        refuse_closed(view.run)
        return _Open(view.job, view.run, standing)

    async def _count(
        self, addition: Addition, found: _Open, reservation: Reservation | None
    ) -> Answer:
        """Make what was written a part of the run, and close the job where that was asked for."""
        table = self._records.table
        for _ in range(TRIES):
            step = self._step(addition, found, reservation)
            try:
                if step.parts:
                    await table.transact(step.parts, token=table.clock.new_id())
            except AwsRefused as refused:
                if not refused.is_condition:
                    raise
                found = await self._again(addition, found, refused)
                if reservation is not None and not reservation.stands(found.run):
                    raise ConveyorError(
                        ErrorCode.UNAVAILABLE, "adding the tasks took too long", retry_after=5
                    ) from None
                continue
            if addition.last_batch:
                await settled(self._records, found.run.place, now=addition.now)
            return step.answer
        raise changed_too_often()

    async def _again(self, addition: Addition, found: _Open, refused: AwsRefused) -> _Open:
        """How things stand after a refusal, which tells it where the run alone has moved on."""
        if refused.reasons.count(CONDITION) == 1 and refused.reasons[0] == CONDITION:
            item = refused.items[0]
            if item and "next_index" in item:
                row = read_run_row(untag_all(item))
                if takes_tasks(row):
                    return found._replace(run=row)
        return await self._open(addition)

    def _step(self, addition: Addition, found: _Open, reservation: Reservation | None) -> _Step:
        """What is to be written for things to be as asked for, from how they stand now."""
        job, row = found.job, found.run
        added = 0 if reservation is None else reservation.size
        stats = structs.replace(row.run.stats, total=row.run.stats.total + added)
        run = row.run
        parts: list[dict[str, Any]] = []
        if added or addition.last_batch:
            run = structs.replace(
                run,
                stats=stats,
                status=live_run_status(stats, job_closed=addition.last_batch),
                last_batch_received=addition.last_batch,
                updated_at=max(run.updated_at, addition.now),
                version=run.version + 1,
            )
            parts.append(
                self._records.part(row, _change(row.run, run, reservation), now=addition.now)
            )
        if addition.last_batch:
            job = closed(job, now=addition.now)
            parts.append(job_part(self._records.table, found.job, job))
        first = row.run.next_index if reservation is None else reservation.start
        answer = addition.answer(Appended(JobView(job.job, run), added, first))
        return _Step([*parts, *self._answers.parts(found.once, answer)], answer)


def _change(before: Run, after: Run, reservation: Reservation | None) -> Change:
    change = Change(
        status=None if after.status is before.status else after.status,
        sets={"total": after.stats.total, "last_batch_received": after.last_batch_received},
    )
    if reservation is None:
        return change
    # It is there: whoever takes it away moves the version.
    return change._replace(removes=["#reserved.#mark"], values={"mark": Name(reservation.mark)})


def _rows(place: Place, reservation: Reservation, addition: Addition) -> list[tuple[Key, Item]]:
    task_ids = ids.task_ids(place.run_id, reservation.start, reservation.size)
    return [
        (place.task(task_id), new_task_item(task_id, spec, now=addition.now))
        for task_id, spec in zip(task_ids, addition.specs, strict=True)
    ]
