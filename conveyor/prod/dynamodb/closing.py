"""Closing a job: no task comes any more, and a drained run is complete."""

from __future__ import annotations

from typing import Any

from conveyor.domain.errors import not_found
from conveyor.domain.model import JobStatus, JobView
from conveyor.domain.states import LIVE_RUN_STATES, live_run_status
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.items import changed_too_often
from conveyor.prod.dynamodb.job_items import JobRow, job_part, moved
from conveyor.prod.dynamodb.places import Place
from conveyor.prod.dynamodb.run_items import RunRow
from conveyor.prod.dynamodb.run_records import TRIES, Change, RunRecords
from conveyor.prod.dynamodb.views import View, Views


class Closing:
    """Closes jobs."""

    def __init__(self, records: RunRecords, views: Views) -> None:
        self._records = records
        self._views = views

    async def close(self, caller: str, job_id: str, *, now: int) -> JobView:
        """Close a job; see `Jobs.close_job`."""
        for _ in range(TRIES):
            view = await self._views.need(caller, job_id)
            match view.job.job.status:
                case JobStatus.DELETED:
                    raise not_found("job")
                case JobStatus.CLOSED:
                    return view.public
            parts, after = self._parts(view, now)
            try:
                await self._records.table.transact(parts, token=self._records.table.clock.new_id())
            except AwsRefused as refused:
                if not refused.is_condition:
                    raise
                continue
            run = (
                None if view.run is None else await settled(self._records, view.run.place, now=now)
            )
            return View(after, run).public
        raise changed_too_often()

    def _parts(self, view: View, now: int) -> tuple[list[dict[str, Any]], JobRow]:
        after = closed(view.job, now=now)
        parts = [job_part(self._records.table, view.job, after)]
        if view.run is not None:
            parts.append(self._records.part(view.run, _last(view.run), now=now))
        return parts, after


def closed(job: JobRow, *, now: int) -> JobRow:
    """An open job, closed."""
    return moved(job, now=now, status=JobStatus.CLOSED)


async def settled(records: RunRecords, place: Place, *, now: int) -> RunRow | None:
    """A run whose end was just made possible, with the status that its counters give it: they may
    have moved since that was decided. None where it is gone."""
    row = await records.read_at(place)
    if row is None:
        return None
    await records.tell_end(row)
    return await records.settle_status(row, now=now)


def _last(row: RunRow) -> Change:
    run = row.run
    status = run.status
    if status in LIVE_RUN_STATES:
        status = live_run_status(run.stats, job_closed=True, ingesting=run.ingesting)
    return Change(
        status=None if status is run.status else status, sets={"last_batch_received": True}
    )
