"""Writing new tasks: `JobCreator` makes jobs, `TaskAppender` adds tasks to an open job.

**A new job** writes its rows first, and then, in one transaction, everything that leads to them. No
reader finds rows without their run. An intent says that they are being written, so the sweeper can
remove those of a call that was cut off. It marks the intent first; the transaction requires an
unmarked one.

**An addition** reserves indexes on the run's row, writes the rows, and counts them with everything
that follows in one transaction. The rows are not part of the run while the reservation stands.
Reserving leaves the run's version alone: it compares the next index, which nothing else moves in an
open run. Ending a reservation, counted or cancelled, changes the version.
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
from conveyor.prod.dynamodb.client import (
    AttributeName,
    Item,
    PlaceholderValue,
    contention_error,
    untag_all,
)
from conveyor.prod.dynamodb.idempotency import StoredResponses
from conveyor.prod.dynamodb.job_rows import (
    JobReads,
    JobRow,
    closed_job,
    complete_if_drained,
    job_item,
    job_part,
)
from conveyor.prod.dynamodb.outbox_rows import new_entry_parts
from conveyor.prod.dynamodb.run_rows import (
    TRIES,
    Change,
    DynamoRunRows,
    RunPlace,
    RunRow,
    new_run_item,
    read_run_row,
)
from conveyor.prod.dynamodb.schema import (
    ROW_SHAPE,
    Key,
    by_time,
    daily_tasks_key,
    intent_key,
    intents,
    job_key,
    place_key,
)
from conveyor.prod.dynamodb.task_rows import insert_items, new_task_item, remove_untouched
from conveyor.records.quotas import daily_limit_reached, day_of

IS_ABSENT = "attribute_not_exists(pk)"
CONDITION_FAILED = "ConditionalCheckFailed"
SPARE_DAYS = 2
"""Days for which the count of a day outlives it: a clock may be set back."""
_DAY_SECONDS = 86_400
INTENT_STANDS = "attribute_exists(pk) AND attribute_not_exists(abandoned)"


class DailyTasks:
    """Counts the tasks of callers by day of UTC, if there is a limit: in the very transaction that
    accepts them, so that no call is counted twice or in part."""

    def __init__(self, records: DynamoRunRows) -> None:
        self._table = records.table
        self._limit = records.daily_tasks

    async def require_room(self, caller: str, tasks: int, *, now: int) -> None:
        """Raise ConveyorError(quota_exceeded) if tasks have no room today, before their rows are
        written. `parts` decides."""
        if not self._limit or not tasks:
            return
        item = await self._table.get(daily_tasks_key(caller, day_of(now)))
        if (0 if item is None else item["tasks"]) + tasks > self._limit:
            raise daily_limit_reached(self._limit, now)

    def parts(self, caller: str, tasks: int, *, now: int) -> list[dict[str, Any]]:
        """Describe the counting of tasks, for the end of a transaction. Raises
        ConveyorError(quota_exceeded) if they are more than the limit by themselves."""
        if not self._limit or not tasks:
            return []
        if tasks > self._limit:
            raise daily_limit_reached(self._limit, now)
        day = day_of(now)
        return [
            self._table.update_part(
                daily_tasks_key(caller, day),
                "SET #shape = :shape, #ttl = :ttl ADD #tasks :count",
                condition="attribute_not_exists(pk) OR #tasks <= :room",
                tasks=AttributeName("tasks"),
                shape=ROW_SHAPE,
                ttl=(day + 1 + SPARE_DAYS) * _DAY_SECONDS,
                count=tasks,
                room=self._limit - tasks,
            )
        ]

    def refuse(self, counted: Sequence[object], reasons: Sequence[str], *, now: int) -> None:
        """Raise ConveyorError(quota_exceeded) if a transaction that ended with the parts `counted`
        was refused for the limit alone; other reasons come first."""
        if counted and CONDITION_FAILED in reasons[-1:] and CONDITION_FAILED not in reasons[:-1]:
            raise daily_limit_reached(self._limit, now)


class JobCreator:
    """Creates jobs."""

    def __init__(self, records: DynamoRunRows, responses: StoredResponses) -> None:
        self._table = records.table
        self._places = records.places
        self._responses = responses
        self._daily = DailyTasks(records)

    async def create(
        self,
        job: Job,
        run: Run | None,
        tasks: Sequence[NewTask],
        *,
        answer: StoredResponse,
        once: IdempotencyScope | None,
    ) -> None:
        """Write job, first run, tasks and response; see `Jobs.create_job`."""
        if run is None:
            await self._create_alone(job, answer, once)
            return
        once = await self._responses.unanswered(once)
        accepted, now = run.stats.total, run.created_at
        await self._daily.require_room(job.caller, accepted, now=now)
        counted = self._daily.parts(job.caller, accepted, now=now)
        place = RunPlace(run.run_id, job.job_id, run.run_sequence, shards_of(job))
        rows = [
            (
                place.task_key(task.task_id),
                new_task_item(task.task_id, task.spec, now=now),
            )
            for task in tasks
        ]
        if rows:
            await self._table.put(_intent_of(place), intent_item(place, now=now))
            await insert_items(self._table, rows)
        parts = self._parts(job, run, place, has_intent=bool(rows))
        for _ in range(TRIES):
            try:
                await self._table.transact(
                    [*parts, *self._responses.answer_parts(once, answer), *counted],
                    token=self._table.clock.new_id(),
                )
            except AwsRefused as refused:
                if not refused.is_condition:
                    raise
                try:
                    _raise_refusal(refused.reasons, has_intent=bool(rows))
                    self._daily.refuse(counted, refused.reasons, now=now)
                    once = await self._responses.unanswered(once)
                except ConveyorError:
                    await self._remove_rows(place, [key for key, _ in rows])
                    raise
            else:
                self._places.remember(place)
                return
        raise contention_error()

    async def _create_alone(
        self, job: Job, answer: StoredResponse, once: IdempotencyScope | None
    ) -> None:
        """Write a job without a run, and its response."""
        part = self._table.put_part(
            job_key(job.job_id), job_item(JobRow(job, 0)), condition=IS_ABSENT
        )
        for _ in range(TRIES):
            once = await self._responses.unanswered(once)
            parts = [part, *self._responses.answer_parts(once, answer)]
            try:
                await self._table.transact(parts, token=self._table.clock.new_id())
            except AwsRefused as refused:
                if not refused.is_condition:
                    raise
                if refused.reasons[0] == CONDITION_FAILED:
                    raise _job_exists() from None
            else:
                return
        raise contention_error()

    def _parts(
        self, job: Job, run: Run, place: RunPlace, *, has_intent: bool
    ) -> list[dict[str, Any]]:
        table = self._table
        row = job_item(JobRow(job, run.run_sequence))
        parts = [
            table.put_part(job_key(job.job_id), row, condition=IS_ABSENT),
            table.put_part(place.key, new_run_item(run, job), condition=IS_ABSENT),
            table.put_part(place_key(run.run_id), place.item(), condition=IS_ABSENT),
        ]
        if has_intent:
            parts.append(table.delete_part(_intent_of(place), condition=INTENT_STANDS))
        return [*parts, *new_entry_parts(table, job, run)]

    async def _remove_rows(self, place: RunPlace, rows: Sequence[Key]) -> None:
        """Remove the rows of a run that was not made, unless another call made this very run: then
        they belong to it."""
        if not rows:
            return
        existing = await self._table.get(place_key(place.run_id))
        if existing is None or existing["job_id"] != place.job_id:
            await self._table.delete_many(rows)
        await self._table.delete(_intent_of(place))


def intent_item(place: RunPlace, *, now: int) -> Item:
    """Make the item of an intent written at `now`."""
    return {
        **place.item(),
        "run_id": place.run_id,
        "gsi1pk": intents(place.run_id),
        "gsi1sk": by_time(now, place.run_id),
    }


def _intent_of(place: RunPlace) -> Key:
    return intent_key(place.job_id, place.run_id)


def _job_exists() -> ConveyorError:
    return ConveyorError(ErrorCode.CONFLICT, "the job exists already")


def _raise_refusal(reasons: Sequence[str], *, has_intent: bool) -> None:
    """Raise the error for the refused parts of the transaction; return if only the key was
    refused."""
    if CONDITION_FAILED in reasons[:3]:
        raise _job_exists()
    if has_intent and reasons[3] == CONDITION_FAILED:
        raise ConveyorError(ErrorCode.UNAVAILABLE, "writing the tasks took too long", retry_after=5)


_RESERVE = "SET #reserved.#mark = :count, #next_index = :end"
_TAKES_TASKS = (
    "#next_index = :start AND #status IN (:running, :pending) "
    "AND #last_batch_received = :no AND #ingesting = :no"
)


class Reservation(NamedTuple):
    """`size` indexes from `start` on, reserved on a run's row."""

    start: int
    size: int

    @property
    def mark(self) -> str:
        """Key of the reservation in the row's map."""
        return str(self.start)

    def is_pending_in(self, row: RunRow) -> bool:
        """Return whether the reservation can still be counted."""
        return row.reserved.get(self.mark) == self.size


def require_open(row: RunRow) -> None:
    """Raise ConveyorError if a run takes no tasks: job_not_open; run_not_terminal while the rows of
    its submit are being written; last_batch_received."""
    if not row.live:
        raise ConveyorError(ErrorCode.JOB_NOT_OPEN, "the job takes no more tasks")
    if row.run.ingesting:
        raise ConveyorError(
            ErrorCode.RUN_NOT_TERMINAL, "the tasks of the submit are still being written"
        )
    if row.run.last_batch_received:
        raise ConveyorError(ErrorCode.LAST_BATCH_RECEIVED, "the last batch has been received")


def takes_tasks(row: RunRow) -> bool:
    """Return whether a run takes tasks: `require_open` would not raise."""
    return row.live and not row.run.ingesting and not row.run.last_batch_received


def check_quota(row: RunRow, count: int, *, max_tasks: int) -> None:
    """Raise ConveyorError(quota_exceeded) if a run, with its reservations, would exceed
    `max_tasks`."""
    if row.run.stats.total + sum(row.reserved.values()) + count > max_tasks:
        raise ConveyorError(
            ErrorCode.QUOTA_EXCEEDED, f"the run would hold more than {max_tasks} tasks"
        )


async def reserve(
    records: DynamoRunRows, row: RunRow, count: int, *, max_tasks: int
) -> tuple[Reservation, RunRow] | None:
    """Reserve the next indexes of a run; return its row with them, or None if it takes no more
    tasks.

    Raises ConveyorError(quota_exceeded).
    """
    table = records.table
    for _ in range(TRIES):
        check_quota(row, count, max_tasks=max_tasks)
        wanted = Reservation(row.run.next_index, count)
        values: dict[str, PlaceholderValue] = {
            "mark": AttributeName(wanted.mark),
            "count": count,
            "start": wanted.start,
            "end": wanted.start + count,
            "running": str(RunStatus.RUNNING),
            "pending": str(RunStatus.PENDING),
            "no": False,
        }
        part = table.update_part(row.place.key, _RESERVE, condition=_TAKES_TASKS, **values)
        try:
            # A transaction of one part, for its token: a repeated call reserves once.
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
            row = await records.summed(row)
        else:
            return wanted, reserved_row(row, wanted)
    raise contention_error()


async def cancel_reservation(
    records: DynamoRunRows, place: RunPlace, reservation: Reservation, *, now: int
) -> bool:
    """Cancel an addition that is not counted yet; return False if it is counted, or another call
    cancels it.

    Marks the reservation as given up first, so that it cannot be counted any more. Then removes its
    rows, except claimed ones, which a recount finds, and last the mark. After a crash the sweeper
    continues from there.
    """
    row = await records.read_at(place)
    if row is None or not await _mark_given_up(records, row, reservation, now=now):
        return False
    await remove_given_up(records, place, reservation)
    return True


async def remove_given_up(
    records: DynamoRunRows, place: RunPlace, reservation: Reservation
) -> None:
    """Remove the rows and the mark of a reservation that is given up."""
    task_ids = ids.task_ids(place.run_id, reservation.start, reservation.size)
    await remove_untouched(records.table, [place.task_key(task_id) for task_id in task_ids])
    try:
        await records.table.update(
            place.key,
            "REMOVE #given_up.#mark",
            condition="attribute_exists(#given_up.#mark)",
            mark=AttributeName(reservation.mark),
        )
    except AwsRefused as refused:
        if not refused.is_condition:
            raise


async def _mark_given_up(
    records: DynamoRunRows, row: RunRow, reservation: Reservation, *, now: int
) -> bool:
    def decision(known: RunRow) -> Change | None:
        if not reservation.is_pending_in(known):
            return None
        return Change(
            sets={"given_up": {**known.given_up, reservation.mark: reservation.size}},
            removes=["#reserved.#mark"],
            values={"mark": AttributeName(reservation.mark)},
        )

    return await records.change_with_retry(row, decision, now=now) is not None


def reserved_row(row: RunRow, reservation: Reservation) -> RunRow:
    """Return a run's row with a reservation."""
    end = reservation.start + reservation.size
    return structs.replace(
        row,
        run=structs.replace(row.run, next_index=end),
        reserved={**row.reserved, reservation.mark: reservation.size},
    )


_log = logging.getLogger("conveyor.records")


class Addition(NamedTuple):
    """One call of `JobWriter.append_tasks`."""

    request: AppendRequest
    answer: Callable[[Appended], StoredResponse]
    once: IdempotencyScope | None


class _OpenJob(NamedTuple):
    """An open job, its live run, and the idempotency key of the call, if any."""

    job: JobRow
    run: RunRow
    once: IdempotencyScope | None


class _Commit(NamedTuple):
    """The transaction that counts an addition, the run's part first, and in the end the parts
    `counted` of the caller's day; and the response that it stores."""

    parts: list[dict[str, Any]]
    answer: StoredResponse
    counted: list[dict[str, Any]]


class _AlreadyAnswered(Exception):
    """Another call under the same idempotency key was first."""

    def __init__(self, answer: StoredResponse) -> None:
        super().__init__()
        self.answer = answer


class TaskAppender:
    """Adds tasks to open jobs. Calls of this process take turns per run where they would only
    collide."""

    def __init__(
        self, records: DynamoRunRows, job_reads: JobReads, responses: StoredResponses
    ) -> None:
        self._records = records
        self._job_reads = job_reads
        self._responses = responses
        self._daily = DailyTasks(records)
        self._locks = KeyedLocks()

    async def append(self, addition: Addition) -> StoredResponse:
        """Add tasks; see `JobWriter.append_tasks`."""
        request = addition.request
        try:
            found = await self._open(addition)
            added = len(request.specs)
            check_quota(found.run, added, max_tasks=request.max_tasks)
            await self._daily.require_room(request.caller, added, now=request.now)
            if request.specs:
                return await self._add(addition, found)
            return await self._commit(addition, found, None)
        except _AlreadyAnswered as earlier:
            return earlier.answer

    async def _add(self, addition: Addition, found: _OpenJob) -> StoredResponse:
        place = found.run.place
        lock = self._locks.lock(place.run_id)
        async with lock:
            reservation, found = await self._reserve(addition, found)
        try:
            await insert_items(self._records.table, _rows(place, reservation, addition))
            async with lock:
                return await self._commit(addition, found, reservation)
        except Exception:
            await self._undo(place, reservation, addition.request.now)
            raise

    async def _reserve(self, addition: Addition, found: _OpenJob) -> tuple[Reservation, _OpenJob]:
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
        raise contention_error()

    async def _undo(self, place: RunPlace, reservation: Reservation, now: int) -> None:
        """Cancel a reservation after a failure. The sweeper cancels it if that fails too."""
        try:
            await cancel_reservation(self._records, place, reservation, now=now)
        except Exception as error:
            _log.warning(
                "could not remove tasks of a failed addition, leaving them to the sweeper",
                extra={"run_id": place.run_id, "error": type(error).__name__},
            )

    async def _open(self, addition: Addition) -> _OpenJob:
        """Read a job that takes tasks. Raises _AlreadyAnswered; ConveyorError if the job takes
        none."""
        found_key = await self._responses.lookup(addition.once)
        if isinstance(found_key, StoredResponse):
            raise _AlreadyAnswered(found_key)
        view = await self._job_reads.require(addition.request.caller, addition.request.job_id)
        if view.job.job.status is not JobStatus.OPEN or view.run is None:
            raise ConveyorError(ErrorCode.JOB_NOT_OPEN, "the job takes no more tasks")
        require_open(view.run)
        return _OpenJob(view.job, view.run, found_key)

    async def _commit(
        self, addition: Addition, found: _OpenJob, reservation: Reservation | None
    ) -> StoredResponse:
        """Count the written rows as part of the run, and close the job if asked to."""
        table = self._records.table
        for _ in range(TRIES):
            step = self._prepare_commit(addition, found, reservation)
            try:
                if step.parts:
                    await table.transact(step.parts, token=table.clock.new_id())
            except AwsRefused as refused:
                if not refused.is_condition:
                    raise
                self._daily.refuse(step.counted, refused.reasons, now=addition.request.now)
                found = await self._reread(addition, found, refused)
                if reservation is not None and not reservation.is_pending_in(found.run):
                    raise ConveyorError(
                        ErrorCode.UNAVAILABLE, "adding the tasks took too long", retry_after=5
                    ) from None
                continue
            if addition.request.last_batch:
                await complete_if_drained(self._records, found.run.place, now=addition.request.now)
            return step.answer
        raise contention_error()

    async def _reread(self, addition: Addition, found: _OpenJob, refused: AwsRefused) -> _OpenJob:
        """Return the state after a refusal; the refusal itself carries it if only the run has
        changed."""
        if refused.reasons.count(CONDITION_FAILED) == 1 and refused.reasons[0] == CONDITION_FAILED:
            item = refused.items[0]
            if item and "next_index" in item:
                row = read_run_row(untag_all(item))
                if takes_tasks(row):
                    return found._replace(run=await self._records.summed(row))
        return await self._open(addition)

    def _prepare_commit(
        self, addition: Addition, found: _OpenJob, reservation: Reservation | None
    ) -> _Commit:
        """Prepare the transaction for the state as read."""
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
                self._records.change_part(row, _change(row.run, run, reservation), now=request.now)
            )
        if request.last_batch:
            job = closed_job(job, now=request.now)
            parts.append(job_part(self._records.table, found.job, job))
        first = row.run.next_index if reservation is None else reservation.start
        answer = addition.answer(Appended(JobView(job.job, run), added, first))
        counted = self._daily.parts(request.caller, added, now=request.now)
        answers = self._responses.answer_parts(found.once, answer)
        return _Commit([*parts, *answers, *counted], answer, counted)


def _change(before: Run, after: Run, reservation: Reservation | None) -> Change:
    change = Change(
        status=None if after.status is before.status else after.status,
        sets={"total": after.stats.total, "last_batch_received": after.last_batch_received},
    )
    if reservation is None:
        return change
    # The reservation stands: removing it changes the version, on which this write depends.
    return change._replace(
        removes=["#reserved.#mark"], values={"mark": AttributeName(reservation.mark)}
    )


def _rows(place: RunPlace, reservation: Reservation, addition: Addition) -> list[tuple[Key, Item]]:
    task_ids = ids.task_ids(place.run_id, reservation.start, reservation.size)
    return [
        (place.task_key(task_id), new_task_item(task_id, spec, now=addition.request.now))
        for task_id, spec in zip(task_ids, addition.request.specs, strict=True)
    ]
