"""Making a job: its rows first, and then, in one transaction, everything that leads to them.

Rows without their run are found by nobody. An intent says that they are being written, so that
those of a call that was cut off can be removed; whoever removes them marks it first, and the
transaction wants it unmarked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import Job, NewTask, Run
from conveyor.domain.shards import shards_of
from conveyor.ports.records import Answer, Once
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.answers import Answers
from conveyor.prod.dynamodb.items import Item, changed_too_often
from conveyor.prod.dynamodb.job_items import JobRow, job_item
from conveyor.prod.dynamodb.keys import (
    INTENTS,
    Key,
    by_time,
    intent_key,
    job_key,
    notice_key,
    place_key,
)
from conveyor.prod.dynamodb.notice_items import new_notice_item
from conveyor.prod.dynamodb.places import Place
from conveyor.prod.dynamodb.run_items import new_run_item
from conveyor.prod.dynamodb.run_records import TRIES, RunRecords
from conveyor.prod.dynamodb.task_items import new_task_item
from conveyor.prod.dynamodb.task_writes import insert_items

ABSENT = "attribute_not_exists(pk)"
INTENDED = "attribute_exists(pk) AND attribute_not_exists(abandoned)"


class Submitting:
    """Makes jobs."""

    def __init__(self, records: RunRecords, answers: Answers) -> None:
        self._table = records.table
        self._places = records.places
        self._answers = answers

    async def create(
        self, job: Job, run: Run, tasks: Sequence[NewTask], *, answer: Answer, once: Once | None
    ) -> None:
        """Write job, first run, every task and, under `once`, the answer; see `Jobs.create_job`."""
        once = await self._open(once)
        place = Place(run.run_id, job.job_id, run.run_sequence, shards_of(job))
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

    async def _open(self, once: Once | None) -> Once | None:
        """A key that stands unanswered. Raises ConveyorError(conflict) where it is answered."""
        standing = await self._answers.look(once)
        if isinstance(standing, Answer):
            raise ConveyorError(ErrorCode.CONFLICT, "the request has been answered already")
        return standing

    def _parts(
        self, job: Job, run: Run, place: Place, *, is_intended: bool
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
            notice = new_notice_item(run, job.callback)
            parts.append(table.put_part(notice_key(run.run_id), notice))
        return parts

    async def _take_back(self, place: Place, rows: Sequence[Key]) -> None:
        """Remove what was written for a run that is not to be; where this very run is there, made
        by another call, the rows are its own."""
        if not rows:
            return
        there = await self._table.get(place_key(place.run_id))
        if there is None or there["job_id"] != place.job_id:
            await self._table.delete_many(rows)
        await self._table.delete(_intent(place))


def intent_item(place: Place, *, now: int) -> Item:
    """That the rows of a run are being written since `now`."""
    return {
        **place.item(),
        "run_id": place.run_id,
        "gsi1pk": INTENTS,
        "gsi1sk": by_time(now, place.run_id),
    }


def _intent(place: Place) -> Key:
    return intent_key(place.job_id, place.run_id)


def _refuse(reasons: Sequence[str], *, is_intended: bool) -> None:
    """Raise what the reasons of the parts say; nothing where only the key was refused."""
    if "ConditionalCheckFailed" in reasons[:3]:
        raise ConveyorError(ErrorCode.CONFLICT, "the job exists already")
    if is_intended and reasons[3] == "ConditionalCheckFailed":
        raise ConveyorError(ErrorCode.UNAVAILABLE, "writing the tasks took too long", retry_after=5)
