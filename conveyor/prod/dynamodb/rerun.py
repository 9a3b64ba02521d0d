"""Reruns: a new run made from the rows of the latest one. A small one's rows are written first, and
then, in one transaction, everything that leads to them; of a large one only the plan is made, and
its rows are copied step by step (`ingestion`).

The run that a rerun makes, and the transaction that makes it.

It moves the version of the job, and of the source too: whoever is about to delete the source has
looked at its pins, and is made to look again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec import structs

from conveyor.aio.concurrency import for_each
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import (
    Ingest,
    IngestStatus,
    JobStatus,
    JobView,
    Run,
    RunStatus,
    TaskStatus,
)
from conveyor.ports.records import IdempotencyScope, Rerun, RerunRequest, StoredResponse
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import Item, Query, Table, changed_too_often, rewritten
from conveyor.prod.dynamodb.copying import (
    Intent,
    busy,
    fulfil,
    intend,
    refuse_live_claims,
    take_back,
    write,
)
from conveyor.prod.dynamodb.counters import Counts, recount_at
from conveyor.prod.dynamodb.idempotency import StoredResponses
from conveyor.prod.dynamodb.job_rows import JobAndRun, JobReads, JobRow, job_part, moved
from conveyor.prod.dynamodb.run_rows import (
    TRIES,
    Change,
    DynamoRunRows,
    RunPlace,
    RunRow,
    new_run_item,
)
from conveyor.prod.dynamodb.schema import ROW_SHAPE, SORT_KEY, Key, pin_key, place_key
from conveyor.prod.dynamodb.submitting import ABSENT

MOST_PINS = 80
"""Pins that one transaction takes beside all else."""
PIN: Item = {"shape": ROW_SHAPE}


class RerunSource(NamedTuple):
    """A job as it was read, and its latest run, which is replayed."""

    job: JobRow
    run: RunRow

    def place(self, run_id: str) -> RunPlace:
        """Where the next run of the job lies."""
        return RunPlace(run_id, self.job.job.job_id, self.job.job.run_count + 1, self.run.shards)


class NewRun(NamedTuple):
    """A run to be made of a source, its rows as they are, or will be, and whom it draws on."""

    source: RerunSource
    run: Run
    counts: Counts
    pinned: Sequence[str]

    @property
    def place(self) -> RunPlace:
        """Where it will lie."""
        return self.source.place(self.run.run_id)

    def job(self) -> JobRow:
        """The job with it: closed, if it was not."""
        before = self.source.job
        after = moved(
            before,
            now=self.run.created_at,
            status=JobStatus.CLOSED,
            latest_run_id=self.run.run_id,
            run_count=self.run.run_sequence,
        )
        return structs.replace(after, latest_run_sequence=self.run.run_sequence)


def new_run(
    source: RerunSource,
    run_id: str,
    counts: Counts,
    *,
    end: int,
    pinned: Sequence[str],
    now: int,
    ingest: Ingest | None = None,
) -> NewRun:
    """A run that replays a source, with indexes below `end`."""
    place = source.place(run_id)
    run = Run(
        run_id=run_id,
        job_id=place.job_id,
        run_sequence=place.run_sequence,
        status=RunStatus.RUNNING,
        created_at=now,
        updated_at=now,
        last_batch_received=True,
        next_index=end,
        stats=counts.stats(),
        rerun_of=source.run.run.run_id,
        ingest=ingest,
    )
    return NewRun(source, run, counts, pinned)


def presumed(source: RunRow, statuses: frozenset[TaskStatus] | None) -> Counts:
    """What a rerun's rows will be, told by the source's counters alone. They do not tell pending
    tasks from those that were left under a claim: who asks for one kind gets the number of both,
    until the rows are copied."""
    stats = source.run.stats
    if statuses is None:
        return Counts(fresh=stats.total)
    unfinished = {TaskStatus.PENDING, TaskStatus.PROCESSING} & statuses
    fresh = max(0, stats.total - stats.completed) if unfinished else 0
    is_inherited = {one: one not in statuses for one in TaskStatus}
    fresh += 0 if is_inherited[TaskStatus.SUCCESSFUL] else stats.successful
    fresh += 0 if is_inherited[TaskStatus.FAILED] else stats.failed
    return Counts(
        fresh=fresh,
        successful=stats.successful if is_inherited[TaskStatus.SUCCESSFUL] else 0,
        failed=stats.failed if is_inherited[TaskStatus.FAILED] else 0,
        reasons=stats.failure_reasons if is_inherited[TaskStatus.FAILED] else {},
    )


async def pinned_by(table: Table, source: RunRow) -> list[str]:
    """The runs that a source draws bodies from."""
    found: list[str] = []
    partition = source.place.key.pk
    async for page in table.pages(Query(partition, begins_with="Pin#", keys_only=True)):
        for item in page.items:
            _, owner, drawing = item[SORT_KEY].split("#")
            if drawing == source.run.run_id:
                found.append(owner)
    return found


async def pin_beforehand(table: Table, new: NewRun) -> None:
    """Write the pins that the transaction has no room for. Those of a run that is not made after
    all count for nothing, and the sweeper removes them."""

    async def pin(key: Key) -> None:
        await table.put(key, PIN)

    await for_each(pin, _pins(new)[MOST_PINS:])


def parts_of(table: Table, new: NewRun) -> list[dict[str, Any]]:
    """Everything of the transaction but what is to become of an intent and of a key."""
    job, source = new.source
    item = new_run_item(new.run, job.job, inherited=new.counts.inherited)
    if new.run.ingest is not None:
        item["planned"] = rewritten("", new.counts)
    return [
        table.put_part(new.place.key, item, condition=ABSENT),
        table.put_part(place_key(new.run.run_id), new.place.item(), condition=ABSENT),
        job_part(table, job, new.job()),
        table.update_part(
            source.place.key,
            "SET #version = :next",
            condition="#version = :known",
            known=source.run.version,
            next=source.run.version + 1,
        ),
        *[table.put_part(key, PIN) for key in _pins(new)[:MOST_PINS]],
    ]


def _pins(new: NewRun) -> list[Key]:
    return [pin_key(new.run.job_id, owner, new.run.run_id) for owner in new.pinned]


_log = logging.getLogger("conveyor.records")


class DynamoReruns:
    """Makes reruns."""

    def __init__(self, records: DynamoRunRows) -> None:
        self._records = records

    async def rerun(
        self,
        request: RerunRequest,
        *,
        answer: Callable[[Rerun], StoredResponse],
        once: IdempotencyScope | None,
    ) -> StoredResponse:
        """Make the run, unless it exists, and render its answer; see `RunWriter.rerun`."""
        call = _Call(self._records, request, answer, once)
        try:
            given = await call.make()
        except Exception:
            await call.undo()
            raise
        await call.settle()
        return given


class _Call:
    """One call of `rerun`. It writes rows under one intent, whatever number of tries it takes."""

    def __init__(
        self,
        records: DynamoRunRows,
        request: RerunRequest,
        answer: Callable[[Rerun], StoredResponse],
        once: IdempotencyScope | None,
    ) -> None:
        self._records = records
        self._table = records.table
        self._views = JobReads(records)
        self._answers = StoredResponses(records.table)
        self._request = request
        self._answer = answer
        self._once = once
        self._holder = records.table.clock.new_id()
        self._intent: Intent | None = None
        self._is_overtaken = False
        self._end = 0

    async def make(self) -> StoredResponse:
        request = self._request
        for _ in range(TRIES):
            once = await self._answers.look(self._once)
            if isinstance(once, StoredResponse):
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

    async def _tell(
        self, view: JobAndRun, there: RunRow, once: IdempotencyScope | None
    ) -> StoredResponse:
        """Answer for a run that exists already."""
        if there.run.job_id != self._request.job_id:
            raise ConveyorError(ErrorCode.CONFLICT, "the run exists already, of another job")
        answer = self._answer(_described(view.public, there.run, there.inherited))
        if parts := self._answers.parts(once, answer):
            await self._table.transact(parts, token=self._table.clock.new_id())
        return answer

    async def _prepare(self, view: JobAndRun) -> NewRun:
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

    async def _plan(self, source: RerunSource) -> NewRun:
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

    async def _source(self, view: JobAndRun) -> RerunSource:
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
        return RerunSource(view.job, row)

    async def _commit(self, new: NewRun, once: IdempotencyScope | None) -> StoredResponse:
        """Make the run. Raises AwsRefused where something has moved since it was read."""
        view = JobView(new.job().job, new.run)
        answer = self._answer(_described(view, new.run, new.counts.inherited))
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
