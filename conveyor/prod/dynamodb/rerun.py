"""Reruns: a new run made from the rows of the latest one. A small one's rows are written first, and
then, in one transaction, everything that leads to them; of a large one only the plan is made, and
its rows are copied step by step (`ingestion`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import Ingest, IngestStatus, JobView, Run, RunStatus, TaskStatus
from conveyor.ports.records import Answer, Once, Rerun
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.answers import Answers
from conveyor.prod.dynamodb.ingest_counts import Counts
from conveyor.prod.dynamodb.items import changed_too_often
from conveyor.prod.dynamodb.live_claims import refuse_live_claims
from conveyor.prod.dynamodb.recount import recount_at
from conveyor.prod.dynamodb.rerun_rows import Intent, busy, fulfil, intend, take_back, write
from conveyor.prod.dynamodb.rerun_runs import (
    NewRun,
    Source,
    new_run,
    parts_of,
    pin_beforehand,
    pinned_by,
    presumed,
)
from conveyor.prod.dynamodb.run_items import RunRow
from conveyor.prod.dynamodb.run_records import TRIES, Change, RunRecords
from conveyor.prod.dynamodb.views import View, Views

_log = logging.getLogger("conveyor.records")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What the port's method was asked for; see `Runs.rerun`."""

    caller: str
    job_id: str
    run_id: str
    statuses: frozenset[TaskStatus] | None
    window_start: int
    large_from: int
    now: int
    answer: Callable[[Rerun], Answer]
    once: Once | None


class Reruns:
    """Makes reruns."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records

    async def rerun(
        self,
        caller: str,
        job_id: str,
        run_id: str,
        *,
        statuses: frozenset[TaskStatus] | None,
        window_start: int,
        large_from: int,
        now: int,
        answer: Callable[[Rerun], Answer],
        once: Once | None,
    ) -> Answer:
        """Make the run, unless it exists, and render its answer; see `Runs.rerun`."""
        request = _Request(
            caller=caller,
            job_id=job_id,
            run_id=run_id,
            statuses=statuses,
            window_start=window_start,
            large_from=large_from,
            now=now,
            answer=answer,
            once=once,
        )
        call = _Call(self._records, request)
        try:
            given = await call.make()
        except Exception:
            await call.undo()
            raise
        await call.settle()
        return given


class _Call:
    """One call of `rerun`. It writes rows under one intent, whatever number of tries it takes."""

    def __init__(self, records: RunRecords, request: _Request) -> None:
        self._records = records
        self._table = records.table
        self._views = Views(records)
        self._answers = Answers(records.table)
        self._request = request
        self._holder = records.table.clock.new_id()
        self._intent: Intent | None = None
        self._is_overtaken = False
        self._end = 0

    async def make(self) -> Answer:
        request = self._request
        for _ in range(TRIES):
            once = await self._answers.look(request.once)
            if isinstance(once, Answer):
                return once
            view = await self._views.need(request.caller, request.job_id)
            there = await self._records.read(request.run_id)
            try:
                if there is not None:
                    return await self._tell(view, there, once)
                return await self._commit(await self._prepare(view), once)
            except AwsRefused as refused:
                if not refused.is_condition:
                    raise
        raise changed_too_often()

    async def undo(self) -> None:
        """Leave no row of a run that was not made. What fails here is found by the sweeper."""
        if self._intent is None:
            return
        try:
            await take_back(self._table, self._intent)
            await self.settle()
        except Exception as error:
            _log.warning(
                "rows of a rerun that was not made are left to the sweeper",
                extra={"run_id": self._request.run_id, "error": type(error).__name__},
            )

    async def settle(self) -> None:
        """Where another call made the run, rows that this one wrote may have come after it had
        counted them."""
        if not self._is_overtaken:
            return
        now = self._request.now
        there = await self._records.read(self._request.run_id)
        if there is None or await self._records.decide(there, self._unsettled, now=now) is None:
            return
        await recount_at(self._records, there.place, now=now)

    def _unsettled(self, row: RunRow) -> Change | None:
        if row.run.status is RunStatus.DELETED:
            return None
        return Change(unsettled=True, sets={"next_index": max(row.run.next_index, self._end)})

    async def _tell(self, view: View, there: RunRow, once: Once | None) -> Answer:
        """Answer for a run that exists already."""
        if there.run.job_id != self._request.job_id:
            raise ConveyorError(ErrorCode.CONFLICT, "the run exists already, of another job")
        answer = self._request.answer(_described(view.public, there.run, there.inherited))
        if parts := self._answers.parts(once, answer):
            await self._table.transact(parts, token=self._table.clock.new_id())
        return answer

    async def _prepare(self, view: View) -> NewRun:
        """The run as it is to be made, its rows written where it is a small one."""
        request = self._request
        source = await self._source(view)
        stats = source.run.run.stats
        if stats.total >= request.large_from:
            return await self._plan(source)
        if stats.completed >= stats.total:
            # Every task was counted with its end: no row is needed to know that none matches.
            _refuse_empty(presumed(source.run, request.statuses))
        if self._is_overtaken:
            raise busy()
        place = source.place(request.run_id)
        self._intent = await intend(
            self._table, place, source.run, holder=self._holder, now=request.now
        )
        rows = await write(self._table, self._intent, source.run, request.statuses, now=request.now)
        self._end = rows.end
        _refuse_empty(rows.counts)
        return new_run(
            source,
            request.run_id,
            rows.counts,
            end=rows.end,
            pinned=sorted(rows.sources),
            now=request.now,
        )

    async def _plan(self, source: Source) -> NewRun:
        """The run with the counters that it will have. It pins all that it may draw from: its
        source until its rows are copied, and what the source draws from."""
        request, row = self._request, source.run
        counts = presumed(row, request.statuses)
        _refuse_empty(counts)
        pinned = [row.run.run_id]
        if request.statuses is not None:
            pinned += await pinned_by(self._table, row)
        end = row.run.next_index
        ingest = Ingest(status=IngestStatus.PENDING, end=end, statuses=request.statuses)
        return new_run(
            source, request.run_id, counts, end=end, pinned=pinned, now=request.now, ingest=ingest
        )

    async def _source(self, view: View) -> Source:
        """The latest run, if it can be replayed."""
        request, row = self._request, view.run
        if row is None:
            raise ConveyorError(ErrorCode.NO_PRIOR_RUN, "the job has no run that is not deleted")
        if row.live:
            raise _not_terminal(f"the latest run is {row.run.status}")
        if row.run.ingesting:
            raise _not_terminal("the tasks of the latest run are still being written")
        if row.run.stats.total < request.large_from:
            # Of a large run each step of the copying looks at the claims of its rows.
            await refuse_live_claims(self._table, row, now=request.now)
        if request.statuses is not None and row.run.created_at < request.window_start:
            raise ConveyorError(
                ErrorCode.PARTIAL_RERUN_WINDOW_EXPIRED,
                "the latest run is too old for a partial rerun",
            )
        return Source(view.job, row)

    async def _commit(self, new: NewRun, once: Once | None) -> Answer:
        """Make the run. Raises AwsRefused where something has moved since it was read."""
        view = JobView(new.job().job, new.run)
        answer = self._request.answer(_described(view, new.run, new.counts.inherited))
        await pin_beforehand(self._table, new)
        ending = [] if self._intent is None else [fulfil(self._table, self._intent)]
        parts = [*ending, *parts_of(self._table, new), *self._answers.parts(once, answer)]
        try:
            await self._table.transact(parts, token=self._table.clock.new_id())
        except AwsRefused as refused:
            self._is_overtaken = bool(ending) and refused.reasons[:1] == ("ConditionalCheckFailed",)
            raise
        self._records.places.remember(new.place)
        return answer


def _described(view: JobView, run: Run, inherited: int) -> Rerun:
    if run.rerun_of is None:
        raise ConveyorError(ErrorCode.CONFLICT, "the run exists already, and is no rerun")
    return Rerun(
        view,
        rerun_of=run.rerun_of,
        retried=run.stats.total - inherited,
        inherited=inherited,
    )


def _refuse_empty(counts: Counts) -> None:
    if not counts.fresh:
        raise ConveyorError(ErrorCode.NO_MATCHING_TASKS, "the latest run has no such task")


def _not_terminal(detail: str) -> ConveyorError:
    return ConveyorError(ErrorCode.RUN_NOT_TERMINAL, detail)
