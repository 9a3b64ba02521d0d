"""Making a job: its rows first, and then, in one transaction, everything that leads to them.

Rows without their run are found by nobody. An intent says that they are being written, so that
those of a call that was cut off can be removed; whoever removes them marks it first, and the
transaction wants it unmarked.

Indexes of a run that tasks are being added under.

Adding goes: reserve, write rows, count them. A reservation stands on the run's row from the first
step to the last; its rows are no part of the run meanwhile. Reserving leaves the version alone: it
compares the next index, which nothing else moves in an open run. Every end of a reservation is
under the version.

Adding tasks to an open job: indexes reserved, rows written, and then counted with everything
that follows from it in one transaction.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec import structs

from conveyor.aio.keyed_locks import KeyedLocks
from conveyor.domain import ids
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import Job, JobStatus, JobView, NewTask, Run, RunStatus
from conveyor.domain.shards import shards_of
from conveyor.domain.states import live_run_status
from conveyor.ports.records import Appended, AppendRequest, IdempotencyScope, StoredResponse
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import Given, Item, Name, changed_too_often, untag_all
from conveyor.prod.dynamodb.idempotency import StoredResponses
from conveyor.prod.dynamodb.job_rows import JobReads, JobRow, closed, job_item, job_part, settled
from conveyor.prod.dynamodb.run_rows import (
    TRIES,
    Change,
    DynamoRunRows,
    RunPlace,
    RunRow,
    new_outbox_item,
    new_run_item,
    read_run_row,
)
from conveyor.prod.dynamodb.schema import (
    INTENTS,
    Key,
    by_time,
    intent_key,
    job_key,
    notice_key,
    place_key,
)
from conveyor.prod.dynamodb.task_rows import insert_items, new_task_item, remove_untouched

_RESERVE = "SET #reserved.#mark = :count, #next_index = :end"
_OPEN = (
    "#next_index = :start AND #status IN (:running, :pending) "
    "AND #last_batch_received = :no AND #ingesting = :no"
)


class Reservation(NamedTuple):
    """`size` indexes from `start` on."""

    start: int
    size: int

    @property
    def mark(self) -> str:
        """Its name on the run's row."""
        return str(self.start)

    def stands(self, row: RunRow) -> bool:
        """Whether it can still be counted."""
        return row.reserved.get(self.mark) == self.size


def refuse_closed(row: RunRow) -> None:
    """Raise ConveyorError where a run takes no tasks: job_not_open, run_not_terminal while its own
    rows are being written, last_batch_received."""
    if not row.live:
        raise ConveyorError(ErrorCode.JOB_NOT_OPEN, "the job takes no more tasks")
    if row.run.ingesting:
        raise ConveyorError(
            ErrorCode.RUN_NOT_TERMINAL, "the tasks of the submit are still being written"
        )
    if row.run.last_batch_received:
        raise ConveyorError(ErrorCode.LAST_BATCH_RECEIVED, "the last batch has been received")


def takes_tasks(row: RunRow) -> bool:
    """Whether `refuse_closed` has nothing against it."""
    return row.live and not row.run.ingesting and not row.run.last_batch_received


def refuse_excess(row: RunRow, count: int, *, max_tasks: int) -> None:
    """Raise ConveyorError(quota_exceeded) where a run would hold more than `max_tasks`, with those
    that are being added."""
    if row.run.stats.total + sum(row.reserved.values()) + count > max_tasks:
        raise ConveyorError(
            ErrorCode.QUOTA_EXCEEDED, f"the run would hold more than {max_tasks} tasks"
        )


async def reserve(
    records: DynamoRunRows, row: RunRow, count: int, *, max_tasks: int
) -> tuple[Reservation, RunRow] | None:
    """Take the next indexes of a run; its row with them. None where it takes no tasks any more.

    Raises ConveyorError(quota_exceeded).
    """
    table = records.table
    for _ in range(TRIES):
        refuse_excess(row, count, max_tasks=max_tasks)
        wanted = Reservation(row.run.next_index, count)
        values: dict[str, Given] = {
            "mark": Name(wanted.mark),
            "count": count,
            "start": wanted.start,
            "end": wanted.start + count,
            "running": str(RunStatus.RUNNING),
            "pending": str(RunStatus.PENDING),
            "no": False,
        }
        part = table.update_part(row.place.key, _RESERVE, condition=_OPEN, **values)
        try:
            # A transaction of one, for the sake of its token: made twice, it reserves once.
            await table.transact([part], token=table.clock.new_id())
        except AwsRefused as refused:
            if not refused.is_condition:
                raise
            [there] = refused.items
            if not there:
                return None
            row = read_run_row(untag_all(there))
            if not takes_tasks(row):
                return None
        else:
            return wanted, reserved_row(row, wanted)
    raise changed_too_often()


async def give_back(
    records: DynamoRunRows, place: RunPlace, reservation: Reservation, *, now: int
) -> bool:
    """Undo an addition that has not been counted; False where it has been, or somebody else undoes
    it.

    It is marked as given up first, so that it cannot be counted any more; then its rows go, but
    for those that were claimed somehow, which a recount finds; then the mark. Whoever finds it half
    done goes on from there.
    """
    row = await records.read_at(place)
    if row is None or not await _give_up(records, row, reservation, now=now):
        return False
    await forget(records, place, reservation)
    return True


async def forget(records: DynamoRunRows, place: RunPlace, reservation: Reservation) -> None:
    """What is left to do for an addition that is marked as given up."""
    task_ids = ids.task_ids(place.run_id, reservation.start, reservation.size)
    await remove_untouched(records.table, [place.task(task_id) for task_id in task_ids])
    try:
        await records.table.update(
            place.key,
            "REMOVE #given_up.#mark",
            condition="attribute_exists(#given_up.#mark)",
            mark=Name(reservation.mark),
        )
    except AwsRefused as refused:
        if not refused.is_condition:
            raise


async def _give_up(
    records: DynamoRunRows, row: RunRow, reservation: Reservation, *, now: int
) -> bool:
    def decision(known: RunRow) -> Change | None:
        if not reservation.stands(known):
            return None
        return Change(
            sets={"given_up": {**known.given_up, reservation.mark: reservation.size}},
            removes=["#reserved.#mark"],
            values={"mark": Name(reservation.mark)},
        )

    return await records.decide(row, decision, now=now) is not None


def reserved_row(row: RunRow, reservation: Reservation) -> RunRow:
    """A run's row with a reservation."""
    end = reservation.start + reservation.size
    return structs.replace(
        row,
        run=structs.replace(row.run, next_index=end),
        reserved={**row.reserved, reservation.mark: reservation.size},
    )


CONDITION = "ConditionalCheckFailed"

_log = logging.getLogger("conveyor.records")


class Addition(NamedTuple):
    """A call of `JobWriter.append_tasks`."""

    request: AppendRequest
    answer: Callable[[Appended], StoredResponse]
    once: IdempotencyScope | None


class _Open(NamedTuple):
    """An open job, its live run, and the key that the answer is stored under, if any."""

    job: JobRow
    run: RunRow
    once: IdempotencyScope | None


class _Step(NamedTuple):
    """What counting an addition writes, the run's row first, and the answer that goes with it."""

    parts: list[dict[str, Any]]
    answer: StoredResponse


class _Answered(Exception):
    """Another call under the same key did it first."""

    def __init__(self, answer: StoredResponse) -> None:
        super().__init__()
        self.answer = answer


class TaskAppender:
    """Adds tasks. Adders of one run in this process take turns where they would only collide."""

    def __init__(self, records: DynamoRunRows, views: JobReads, answers: StoredResponses) -> None:
        self._records = records
        self._views = views
        self._answers = answers
        self._locks = KeyedLocks()

    async def append(self, addition: Addition) -> StoredResponse:
        """Add tasks; see `JobWriter.append_tasks`."""
        request = addition.request
        try:
            found = await self._open(addition)
            refuse_excess(found.run, len(request.specs), max_tasks=request.max_tasks)
            if request.specs:
                return await self._add(addition, found)
            return await self._count(addition, found, None)
        except _Answered as earlier:
            return earlier.answer

    async def _add(self, addition: Addition, found: _Open) -> StoredResponse:
        place = found.run.place
        turn = self._locks.lock(place.run_id)
        async with turn:
            reservation, found = await self._reserve(addition, found)
        try:
            await insert_items(self._records.table, _rows(place, reservation, addition))
            async with turn:
                return await self._count(addition, found, reservation)
        except Exception:
            await self._undo(place, reservation, addition.request.now)
            raise

    async def _reserve(self, addition: Addition, found: _Open) -> tuple[Reservation, _Open]:
        request = addition.request
        for _ in range(TRIES):
            reserved = await reserve(
                self._records,
                found.run,
                len(request.specs),
                max_tasks=request.max_tasks,
            )
            if reserved is not None:
                return reserved[0], found._replace(run=reserved[1])
            found = await self._open(addition)
        raise changed_too_often()

    async def _undo(self, place: RunPlace, reservation: Reservation, now: int) -> None:
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
        if isinstance(standing, StoredResponse):
            raise _Answered(standing)
        view = await self._views.need(addition.request.caller, addition.request.job_id)
        if view.job.job.status is not JobStatus.OPEN or view.run is None:
            raise ConveyorError(ErrorCode.JOB_NOT_OPEN, "the job takes no more tasks")
        refuse_closed(view.run)
        return _Open(view.job, view.run, standing)

    async def _count(
        self, addition: Addition, found: _Open, reservation: Reservation | None
    ) -> StoredResponse:
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
            if addition.request.last_batch:
                await settled(self._records, found.run.place, now=addition.request.now)
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
        job, row, request = found.job, found.run, addition.request
        added = 0 if reservation is None else reservation.size
        stats = structs.replace(row.run.stats, total=row.run.stats.total + added)
        run = row.run
        parts: list[dict[str, Any]] = []
        if added or request.last_batch:
            run = structs.replace(
                run,
                stats=stats,
                status=live_run_status(stats, job_closed=request.last_batch),
                last_batch_received=request.last_batch,
                updated_at=max(run.updated_at, request.now),
                version=run.version + 1,
            )
            parts.append(
                self._records.part(row, _change(row.run, run, reservation), now=request.now)
            )
        if request.last_batch:
            job = closed(job, now=request.now)
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


def _rows(place: RunPlace, reservation: Reservation, addition: Addition) -> list[tuple[Key, Item]]:
    task_ids = ids.task_ids(place.run_id, reservation.start, reservation.size)
    return [
        (place.task(task_id), new_task_item(task_id, spec, now=addition.request.now))
        for task_id, spec in zip(task_ids, addition.request.specs, strict=True)
    ]


ABSENT = "attribute_not_exists(pk)"
INTENDED = "attribute_exists(pk) AND attribute_not_exists(abandoned)"


class JobCreator:
    """Makes jobs."""

    def __init__(self, records: DynamoRunRows, answers: StoredResponses) -> None:
        self._table = records.table
        self._places = records.places
        self._answers = answers

    async def create(
        self,
        job: Job,
        run: Run,
        tasks: Sequence[NewTask],
        *,
        answer: StoredResponse,
        once: IdempotencyScope | None,
    ) -> None:
        """Write job, first run, every task and, under `once`, the answer; see `Jobs.create_job`."""
        once = await self._open(once)
        place = RunPlace(run.run_id, job.job_id, run.run_sequence, shards_of(job))
        rows = [
            (place.task(task.task_id), new_task_item(task.task_id, task.spec, now=run.created_at))
            for task in tasks
        ]
        if rows:
            await self._table.put(_intent(place), intent_item(place, now=run.created_at))
            await insert_items(self._table, rows)
        parts = self._parts(job, run, place, is_intended=bool(rows))
        for _ in range(TRIES):
            try:
                await self._table.transact(
                    [*parts, *self._answers.parts(once, answer)], token=self._table.clock.new_id()
                )
            except AwsRefused as refused:
                if not refused.is_condition:
                    raise
                try:
                    _refuse(refused.reasons, is_intended=bool(rows))
                    once = await self._open(once)
                except ConveyorError:
                    await self._take_back(place, [key for key, _ in rows])
                    raise
            else:
                self._places.remember(place)
                return
        raise changed_too_often()

    async def _open(self, once: IdempotencyScope | None) -> IdempotencyScope | None:
        """A key that stands unanswered. Raises ConveyorError(conflict) where it is answered."""
        standing = await self._answers.look(once)
        if isinstance(standing, StoredResponse):
            raise ConveyorError(ErrorCode.CONFLICT, "the request has been answered already")
        return standing

    def _parts(
        self, job: Job, run: Run, place: RunPlace, *, is_intended: bool
    ) -> list[dict[str, Any]]:
        table = self._table
        row = job_item(JobRow(job, run.run_sequence))
        run_item = new_run_item(run, job)
        if job.callback is not None:
            run_item["calls_back"] = True
        parts = [
            table.put_part(job_key(job.job_id), row, condition=ABSENT),
            table.put_part(place.key, run_item, condition=ABSENT),
            table.put_part(place_key(run.run_id), place.item(), condition=ABSENT),
        ]
        if is_intended:
            parts.append(table.delete_part(_intent(place), condition=INTENDED))
        if job.callback is not None:
            notice = new_outbox_item(run, job.callback)
            parts.append(table.put_part(notice_key(run.run_id), notice))
        return parts

    async def _take_back(self, place: RunPlace, rows: Sequence[Key]) -> None:
        """Remove what was written for a run that is not to be; where this very run is there, made
        by another call, the rows are its own."""
        if not rows:
            return
        there = await self._table.get(place_key(place.run_id))
        if there is None or there["job_id"] != place.job_id:
            await self._table.delete_many(rows)
        await self._table.delete(_intent(place))


def intent_item(place: RunPlace, *, now: int) -> Item:
    """That the rows of a run are being written since `now`."""
    return {
        **place.item(),
        "run_id": place.run_id,
        "gsi1pk": INTENTS,
        "gsi1sk": by_time(now, place.run_id),
    }


def _intent(place: RunPlace) -> Key:
    return intent_key(place.job_id, place.run_id)


def _refuse(reasons: Sequence[str], *, is_intended: bool) -> None:
    """Raise what the reasons of the parts say; nothing where only the key was refused."""
    if "ConditionalCheckFailed" in reasons[:3]:
        raise ConveyorError(ErrorCode.CONFLICT, "the job exists already")
    if is_intended and reasons[3] == "ConditionalCheckFailed":
        raise ConveyorError(ErrorCode.UNAVAILABLE, "writing the tasks took too long", retry_after=5)
