"""Reruns: a new run made from the rows of a job's latest run.

A small rerun writes its rows under an intent (`copying`), and then, in one transaction, the run and
all that leads to it. Of a large rerun the transaction writes a plan only; `ingestion` copies its
rows step by step.

The transaction raises the version of the job, and of the source run: a concurrent delete of the
source has checked its pins, and has to check them again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import structs

from conveyor.aio.concurrency import for_each
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.failure_groups import group_filter
from conveyor.domain.model import (
    Ingest,
    IngestStatus,
    JobStatus,
    JobView,
    Run,
    RunStatus,
    TaskFailure,
    TaskStatus,
)
from conveyor.ports.records import IdempotencyScope, Rerun, RerunRequest, StoredResponse
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import Item, Query, Table, contention_error, merge_json
from conveyor.prod.dynamodb.copying import (
    NO_SIZES,
    Counts,
    Intent,
    Selection,
    abandon_intent,
    carry_groups,
    concurrent_rerun_error,
    copy_source_rows,
    delete_intent_part,
    refuse_live_claims,
    write_intent,
)
from conveyor.prod.dynamodb.counter_sums import GroupCount
from conveyor.prod.dynamodb.failure_groups import group_items
from conveyor.prod.dynamodb.idempotency import StoredResponses
from conveyor.prod.dynamodb.job_rows import JobAndRun, JobReads, JobRow, job_part, next_version
from conveyor.prod.dynamodb.outbox_rows import new_entry_parts
from conveyor.prod.dynamodb.recount import recount_at
from conveyor.prod.dynamodb.run_rows import (
    TRIES,
    Change,
    DynamoRunRows,
    RunPlace,
    RunRow,
    new_run_item,
)
from conveyor.prod.dynamodb.schema import ROW_SHAPE, SORT_KEY, Key, pin_key, place_key
from conveyor.prod.dynamodb.submitting import IS_ABSENT, DailyTasks

MOST_PINS = 80
"""Pins that one transaction writes beside everything else."""
PIN: Item = {"shape": ROW_SHAPE}


class RerunSource(NamedTuple):
    """A job as read, and its latest run, which is replayed."""

    job: JobRow
    run: RunRow

    def place(self, run_id: str) -> RunPlace:
        """Return the place of the job's next run."""
        return RunPlace(run_id, self.job.job.job_id, self.job.job.run_count + 1, self.run.shards)


class NewRun(NamedTuple):
    """A run to be made of a source: the counts of its rows, written or expected, and the runs that
    own its bodies."""

    source: RerunSource
    run: Run
    counts: Counts
    pinned: Sequence[str]

    @property
    def place(self) -> RunPlace:
        """The place of the new run."""
        return self.source.place(self.run.run_id)

    def job(self) -> JobRow:
        """Return the job with the new run as its latest, closed."""
        before = self.source.job
        after = next_version(
            before,
            now=self.run.created_at,
            status=JobStatus.CLOSED,
            latest_run_id=self.run.run_id,
            run_count=self.run.run_sequence,
        )
        return structs.replace(after, latest_run_sequence=self.run.run_sequence)


def new_run(
    source: RerunSource,
    request: RerunRequest,
    counts: Counts,
    *,
    end: int,
    pinned: Sequence[str],
    ingest: Ingest | None = None,
) -> NewRun:
    """Describe a run that replays a source, with indexes below `end`."""
    place = source.place(request.run_id)
    run = Run(
        run_id=request.run_id,
        job_id=place.job_id,
        run_sequence=place.run_sequence,
        status=RunStatus.RUNNING,
        created_at=request.now,
        updated_at=request.now,
        last_batch_received=True,
        next_index=end,
        stats=counts.stats(),
        rerun_of=source.run.run.run_id,
        ingest=ingest,
        traceparent=request.traceparent,
    )
    return NewRun(source, run, counts, pinned)


def selection(request: RerunRequest, source: RunRow) -> Selection:
    """Return the choice of the source's tasks that start afresh."""
    if request.groups is None:
        return Selection(request.statuses)
    groups = group_filter(request.groups, list(source.groups))
    return Selection(frozenset({TaskStatus.FAILED}), groups)


def expected_counts(
    source: RunRow, chosen: Selection, reasons_of: Mapping[str, str] | None = None
) -> Counts:
    """Return the counts of a rerun's rows as the source's counters suggest.

    Counters do not tell pending tasks from claimed ones, so a rerun of either kind expects both
    until its rows are copied. `reasons_of` has the reason of each failure group.
    """
    stats, statuses = source.run.stats, chosen.statuses
    if statuses is None:
        return Counts(fresh=stats.total)
    kept = {
        group_id: group.failed
        for group_id, group in source.groups.items()
        if group.failed and not chosen.takes(TaskStatus.FAILED, group_id)
    }
    failed = sum(kept.values())
    others_kept = not chosen.takes(TaskStatus.FAILED, None)
    if others_kept:
        failed += stats.failed - sum(group.failed for group in source.groups.values())
    keeps_bodies = TaskStatus.SUCCESSFUL not in statuses
    unfinished = {TaskStatus.PENDING, TaskStatus.PROCESSING} & statuses
    fresh = stats.failed - failed + (max(0, stats.total - stats.completed) if unfinished else 0)
    return Counts(
        fresh=fresh if keeps_bodies else fresh + stats.successful,
        successful=stats.successful if keeps_bodies else 0,
        failed=failed,
        reasons=_reasons_kept(source, kept, reasons_of or {}, others_kept=others_kept),
        groups=kept,
        sizes=stats.shape.sizes if keeps_bodies else NO_SIZES,
        types=dict(stats.shape.types) if keeps_bodies else {},
    )


def _reasons_kept(
    source: RunRow, kept: Mapping[str, int], reasons_of: Mapping[str, str], *, others_kept: bool
) -> dict[str, int]:
    """Return the inherited failures by reason: those of the groups `kept`, and of none."""
    if others_kept:
        reasons = {str(one): count for one, count in source.run.stats.failure_reasons.items()}
        changes = {one: -group.failed for one, group in source.groups.items() if one not in kept}
    else:
        reasons, changes = {}, dict(kept)
    for group_id, count in changes.items():
        reason = reasons_of.get(group_id, str(TaskFailure.OTHER))
        reasons[reason] = reasons.get(reason, 0) + count
    return {reason: count for reason, count in reasons.items() if count > 0}


async def pinned_runs(table: Table, source: RunRow) -> list[str]:
    """Return the runs that a source draws bodies from."""
    found: list[str] = []
    partition = source.place.key.pk
    async for page in table.pages(Query(partition, begins_with="Pin#", keys_only=True)):
        for item in page.items:
            _, owner, drawing = item[SORT_KEY].split("#")
            if drawing == source.run.run_id:
                found.append(owner)
    return found


async def write_early_pins(table: Table, new: NewRun) -> None:
    """Write the pins for which the transaction has no room. If the run is not made, they have no
    effect, and the sweeper removes them."""

    async def pin(key: Key) -> None:
        await table.put(key, PIN)

    await for_each(pin, _pins(new)[MOST_PINS:])


def transaction_parts(table: Table, new: NewRun) -> list[dict[str, Any]]:
    """Describe the transaction that makes the run, without its intent and its idempotency key."""
    job, source = new.source
    groups = {
        group_id: GroupCount(count, source.groups[group_id].last_at)
        for group_id, count in new.counts.groups.items()
    }
    item = new_run_item(new.run, job.job, groups=groups)
    if new.run.ingest is not None:
        item["planned"] = merge_json("", new.counts)
    return [
        table.put_part(new.place.key, item, condition=IS_ABSENT),
        table.put_part(place_key(new.run.run_id), new.place.item(), condition=IS_ABSENT),
        job_part(table, job, new.job()),
        table.update_part(
            source.place.key,
            "SET #version = :next",
            condition="#version = :known",
            known=source.run.version,
            next=source.run.version + 1,
        ),
        *[table.put_part(key, PIN) for key in _pins(new)[:MOST_PINS]],
        *new_entry_parts(table, job.job, new.run),
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
        """Make the run unless it exists, and answer; see `RunWriter.rerun`."""
        call = _RerunCall(self._records, request, answer, once)
        try:
            given = await call.make()
        except Exception:
            await call.undo()
            raise
        await call.recount_overtaken()
        return given


class _RerunCall:
    """One call of `rerun`: however many times it tries, it writes rows under one intent."""

    def __init__(
        self,
        records: DynamoRunRows,
        request: RerunRequest,
        answer: Callable[[Rerun], StoredResponse],
        once: IdempotencyScope | None,
    ) -> None:
        self._records = records
        self._table = records.table
        self._job_reads = JobReads(records)
        self._responses = StoredResponses(records.table)
        self._daily = DailyTasks(records)
        self._request = request
        self._answer = answer
        self._once = once
        self._holder = records.table.clock.new_id()
        self._intent: Intent | None = None
        self._is_overtaken = False
        self._end = 0

    async def make(self) -> StoredResponse:
        """Make the run, or answer for an existing one; start over after a lost race."""
        request = self._request
        for _ in range(TRIES):
            once = await self._responses.lookup(self._once)
            if isinstance(once, StoredResponse):
                return once
            view = await self._job_reads.require(request.caller, request.job_id)
            existing = await self._records.read(request.run_id)
            try:
                if existing is not None:
                    return await self._answer_existing(view, existing, once)
                return await self._commit(await self._prepare(view), once)
            except AwsRefused as refused:
                if not refused.is_condition:
                    raise
        raise contention_error()

    async def undo(self) -> None:
        """Remove the rows of a run that was not made. The sweeper finds those that remain after a
        failure."""
        if self._intent is None:
            return
        try:
            await abandon_intent(self._table, self._intent)
            await self.recount_overtaken()
        except Exception as error:
            _log.warning(
                "could not remove the rows of an abandoned rerun, leaving them to the sweeper",
                extra={"run_id": self._request.run_id, "error": type(error).__name__},
            )

    async def recount_overtaken(self) -> None:
        """Recount a run that another call made, because rows of this call may have come after its
        count."""
        if not self._is_overtaken:
            return
        now = self._request.now
        existing = await self._records.read(self._request.run_id)
        if (
            existing is None
            or existing.run.ingest is not None
            or await self._records.change_with_retry(existing, self._unsettled_change, now=now)
            is None
        ):
            return
        await recount_at(self._records, existing.place, now=now)

    def _unsettled_change(self, row: RunRow) -> Change | None:
        if row.run.status is RunStatus.DELETED:
            return None
        return Change(unsettled=True, sets={"next_index": max(row.run.next_index, self._end)})

    async def _answer_existing(
        self, view: JobAndRun, existing: RunRow, once: IdempotencyScope | None
    ) -> StoredResponse:
        """Answer for a run that exists already."""
        if existing.run.job_id != self._request.job_id:
            raise ConveyorError(ErrorCode.CONFLICT, "the run exists already, of another job")
        answer = self._answer(_rerun_result(view.job_view, existing.run))
        if parts := self._responses.answer_parts(once, answer):
            await self._table.transact(parts, token=self._table.clock.new_id())
        return answer

    async def _prepare(self, view: JobAndRun) -> NewRun:
        """Prepare the run; of a small rerun, write the rows."""
        request = self._request
        source = await self._check_source(view)
        stats = source.run.run.stats
        least = stats.total if request.statuses is None else 1
        await self._daily.require_room(request.caller, least, now=request.now)
        if stats.total >= request.large_from:
            return await self._prepare_large(source)
        if stats.completed >= stats.total:
            # All tasks have ended, so the counters alone tell whether any matches.
            _refuse_empty(expected_counts(source.run, selection(request, source.run)))
        await self._take_intent(source)
        assert self._intent is not None
        rows = await copy_source_rows(
            self._table, self._intent, source.run, selection(request, source.run), now=request.now
        )
        self._end = rows.end
        _refuse_empty(rows.counts)
        if rows.counts.groups:
            items = await group_items(self._table, source.run.run.run_id)
            await carry_groups(self._table, self._intent, items, rows.counts.groups)
        return new_run(source, request, rows.counts, end=rows.end, pinned=sorted(rows.sources))

    async def _take_intent(self, source: RerunSource) -> None:
        if self._is_overtaken:
            raise concurrent_rerun_error()
        request, place = self._request, source.place(self._request.run_id)
        self._intent = await write_intent(
            self._table, place, source.run, holder=self._holder, now=request.now
        )

    async def _prepare_large(self, source: RerunSource) -> NewRun:
        """Prepare the run with expected counters. It pins its source until the rows are copied, and
        the runs that the source draws from. An intent covers the groups that it begins with."""
        request, row = self._request, source.run
        chosen = selection(request, row)
        items: dict[str, Item] = {}
        if row.groups and chosen.leaves_failures:
            items = await group_items(self._table, row.run.run_id)
        counts = expected_counts(
            row, chosen, {group_id: item["reason"] for group_id, item in items.items()}
        )
        _refuse_empty(counts)
        pinned = [row.run.run_id]
        if chosen.statuses is not None:
            pinned += await pinned_runs(self._table, row)
        end = row.run.next_index
        ingest = Ingest(
            status=IngestStatus.PENDING, end=end, statuses=chosen.statuses, groups=chosen.groups
        )
        if counts.groups:
            await self._take_intent(source)
            assert self._intent is not None
            await carry_groups(self._table, self._intent, items, counts.groups)
        return new_run(source, request, counts, end=end, pinned=pinned, ingest=ingest)

    async def _check_source(self, view: JobAndRun) -> RerunSource:
        """Return the latest run as a source. Raises ConveyorError if it cannot be replayed."""
        request, row = self._request, view.run
        if row is None:
            raise ConveyorError(ErrorCode.NO_PRIOR_RUN, "the job has no run that is not deleted")
        if row.live:
            raise _not_terminal(f"the latest run is {row.run.status}")
        if row.run.ingesting:
            raise _not_terminal("the tasks of the latest run are still being written")
        if row.run.stats.total < request.large_from:
            # Copying a large run checks the claims of its rows, step by step.
            await refuse_live_claims(self._table, row, now=request.now)
        is_partial = request.statuses is not None or request.groups is not None
        if is_partial and row.run.created_at < request.window_start:
            raise ConveyorError(
                ErrorCode.PARTIAL_RERUN_WINDOW_EXPIRED,
                "the latest run is too old for a partial rerun",
            )
        return RerunSource(view.job, row)

    async def _commit(self, new: NewRun, once: IdempotencyScope | None) -> StoredResponse:
        """Write the transaction. Raises AwsRefused if anything has changed since it was read."""
        view = JobView(new.job().job, new.run)
        answer = self._answer(_rerun_result(view, new.run))
        await write_early_pins(self._table, new)
        intent_parts = (
            [] if self._intent is None else [delete_intent_part(self._table, self._intent)]
        )
        caller, now = self._request.caller, self._request.now
        counted = self._daily.parts(caller, new.counts.fresh, now=now)
        parts = [
            *intent_parts,
            *transaction_parts(self._table, new),
            *self._responses.answer_parts(once, answer),
            *counted,
        ]
        try:
            await self._table.transact(parts, token=self._table.clock.new_id())
        except AwsRefused as refused:
            self._is_overtaken = bool(intent_parts) and refused.reasons[:1] == (
                "ConditionalCheckFailed",
            )
            self._daily.refuse(counted, refused.reasons, now=now)
            raise
        self._records.places.remember(new.place)
        return answer


def _rerun_result(view: JobView, run: Run) -> Rerun:
    if run.rerun_of is None:
        raise ConveyorError(ErrorCode.CONFLICT, "the run exists already and is not a rerun")
    return Rerun(
        view,
        rerun_of=run.rerun_of,
        retried=run.stats.total - run.stats.inherited,
        inherited=run.stats.inherited,
    )


def _refuse_empty(counts: Counts) -> None:
    if not counts.fresh:
        raise ConveyorError(ErrorCode.NO_MATCHING_TASKS, "the latest run has no such task")


def _not_terminal(detail: str) -> ConveyorError:
    return ConveyorError(ErrorCode.RUN_NOT_TERMINAL, detail)
