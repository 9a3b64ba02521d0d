"""The ingestion port on one DynamoDB table: rows first, then the checkpoint behind them.

Rows are inserted where they are absent, so that any step can be made again. The checkpoint moves by
a conditional write that only a live, ingesting run admits; whoever is refused has come too late,
and sets right what that means for the rows it has just written (`ingest_end`).

The end of an ingestion, and what is done about rows that were written after it.

A run's rows may be written by one that does not know yet that the run was stopped, or brought to
its end by another. Rows are written under no condition on the run, so they are set right
afterwards: counted by the end that is still to come, or else by a recount; those of a deleted run
are removed. A recount that has to wait, or whose caller is lost, is left to the sweeper: the run is
unsettled.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from msgspec import structs

from conveyor.aio.concurrency import for_each
from conveyor.domain.errors import CallInFlight, not_found
from conveyor.domain.model import RunFailure, RunStatus
from conveyor.domain.states import live_run_status
from conveyor.ports.ingestion import Ingesting, StagedRows
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import (
    Item,
    Plain,
    changed_too_often,
    condition_met,
    keys_of,
    readable,
    rewritten,
)
from conveyor.prod.dynamodb.copying import ItemCopy, ItemsCopied, fresh_item, rows_of
from conveyor.prod.dynamodb.counters import (
    Counts,
    IngestRow,
    difference,
    find_ingest_row,
    ingest_row_at,
    read_ingest_row,
    recount_at,
)
from conveyor.prod.dynamodb.run_rows import (
    TRIES,
    Change,
    DynamoRunRows,
    RunMoved,
    RunPlace,
    RunRow,
    read_run_row,
)
from conveyor.prod.dynamodb.runs import read_all
from conveyor.prod.dynamodb.schema import (
    BY_OWNER,
    Key,
    every,
    pin_key,
    task_partition,
    task_sort_key,
)
from conveyor.prod.dynamodb.task_rows import insert_items

RECOPIED = Change(sets={"recopied": True})
"""The rows tell how many they are, not who added them up. It moves the version: an end that has
counted them already counts again."""

UNSETTLED = Change(unsettled=True)
"""It moves the version too: a recount that is about to settle the run has come too early."""

_DECIDING = ("total", "successful", "failed")


class Written(NamedTuple):
    """Rows that one call meant to write, and those that it inserted, as far as answers tell."""

    keys: list[Key]
    inserted: list[Key]


async def finish(records: DynamoRunRows, run_id: str, *, now: int) -> RunStatus | None:
    """Latch; see `Ingestion.finish_ingest`. Raises ValueError where rows of a live run are not
    written yet."""
    place = await records.places.find(run_id)
    for _ in range(TRIES):
        known = None if place is None else await ingest_row_at(records, place)
        if known is None or known.row.run.status is RunStatus.DELETED:
            return None
        run = known.row.run
        if not run.ingesting:
            return run.status
        counts = await _written(records, known)
        if run.rerun_of is not None and run.ingest is not None and run.ingest.statuses is None:
            # Every row starts afresh: from here on nothing of the source is needed.
            await records.table.delete(pin_key(run.job_id, run.rerun_of, run_id))
        try:
            after = await records.change(known.row, _latch(known, counts), now=now)
        except RunMoved:
            continue
        return (await records.settle_status(after, now=now)).run.status
    raise changed_too_often()


async def too_late(records: DynamoRunRows, place: RunPlace, written: Written, *, now: int) -> bool:
    """Set right what was written when the checkpoint could not be moved; whether the run goes on
    ingesting, so that the caller may look again."""
    for _ in range(TRIES):
        row = await records.read_at(place)
        if row is None or row.run.status is RunStatus.DELETED:
            await records.table.delete_many(written.keys)
            return False
        if not written.inserted and _is_certain(row):
            return row.live and row.run.ingesting
        try:
            if row.run.ingesting:
                return (await records.change(row, RECOPIED, now=now)).live
            # Not taken back: another may have found them there, and counted on them.
            await records.change(row, UNSETTLED, now=now)
        except RunMoved:
            continue
        await recount_at(records, place, now=now)
        return False
    raise changed_too_often()


def _is_certain(row: RunRow) -> bool:
    """Whether the run's rows are the same whoever wrote them, and are all there or still to be
    counted. Else a row may have been inserted by a call whose answer was lost: it then looks like
    one that was there before."""
    ingest = row.run.ingest
    if ingest is None or (row.run.rerun_of is not None and ingest.statuses is not None):
        return False
    return row.live or ingest.next_index >= ingest.end


async def _written(records: DynamoRunRows, known: IngestRow) -> Counts:
    """The rows that a run has."""
    run, live = known.row.run, known.row.live
    assert run.ingest is not None
    if live and known.next_index < run.ingest.end:
        raise ValueError(f"run {run.run_id} has rows that are not written yet")
    if run.rerun_of is None:
        return Counts(fresh=run.ingest.end if live else await _count(records, known.row.place))
    if live and not known.recopied:
        return known.copied
    rows = await rows_of(records.table, known.row.place, first=0, end=run.ingest.end)
    return rows.counts


async def _count(records: DynamoRunRows, place: RunPlace) -> int:
    counted: list[int] = []

    async def count(shard: int) -> None:
        partition = task_partition(place.job_id, place.shards, shard)
        begin = task_sort_key(place.run_id, "")
        counted.append(await records.table.count(partition, begins_with=begin))

    await for_each(count, range(place.shards.count))
    return sum(counted)


def _latch(known: IngestRow, counts: Counts) -> Change:
    """No checkpoint can move any more: it is at its end, or the run is not live."""
    run = known.row.run
    adds = difference(known.planned, counts)
    status = None
    if known.row.live:
        counters = {name: getattr(run.stats, name) + adds.get(name, 0) for name in _DECIDING}
        stats = structs.replace(run.stats, **counters)
        status = live_run_status(stats, job_closed=run.last_batch_received)
    return Change(status=None if status is run.status else status, ingesting=False, adds=adds)


_pairs = msgspec.json.Decoder(list[tuple[str, msgspec.Raw]])

_GOES_ON = "#status IN (:running, :pending) AND ingesting = :yes"
_MOVE = "SET ingest_next = :end, counted_at = :at, ingest_by = :token"


class _Moved(NamedTuple):
    """Whether the checkpoint was moved, and the run after that, or as it was found instead; None
    where it is gone."""

    done: bool
    row: IngestRow | None


class DynamoIngestion:
    """The ingestion port."""

    def __init__(self, records: DynamoRunRows) -> None:
        self._records = records
        self._table = records.table

    async def ingesting(self, run_id: str) -> Ingesting | None:
        """How far a run is; None where it is gone, deleted, or done with ingesting."""
        row = await self._records.read(run_id)
        if row is None or row.run.status is RunStatus.DELETED or row.run.ingest is None:
            return None
        if not row.run.ingesting:
            return None
        return Ingesting(
            job_id=row.run.job_id,
            run_id=run_id,
            live=row.live,
            ingest=row.run.ingest,
            rerun_of=row.run.rerun_of,
        )

    async def write_rows(self, run_id: str, rows: StagedRows, *, now: int) -> bool:
        """Insert the pending rows that are absent, and move the checkpoint behind them."""
        known = await find_ingest_row(self._records, run_id)
        if known is None or not known.goes_on:
            return False
        place = known.row.place
        items = _staged_items(place, rows, now)
        inserted = await insert_items(self._table, items)
        end = rows.first_index + rows.count
        moved = await self._move(known, _MOVE, condition="ingest_next < :end", end=end, now=now)
        if moved.done or (moved.row is not None and moved.row.goes_on):
            return True
        written = Written([key for key, _ in items], inserted)
        await too_late(self._records, place, written, now=now)
        return False

    async def copy_rows(
        self, run_id: str, *, first_index: int, end_index: int, now: int
    ) -> list[tuple[int, str]] | None:
        """Copy rows of the source where they are absent, and move the checkpoint behind them."""
        for _ in range(TRIES):
            known = await find_ingest_row(self._records, run_id)
            if known is None or not known.goes_on or known.row.run.rerun_of is None:
                return None
            place = known.row.place
            if known.next_index >= end_index:
                return await self._references(place, first_index, end_index)
            # What lies before the checkpoint is there, whoever wrote it.
            start = known.next_index
            copied = await self._copy(known, start, end_index, now)
            if copied.held is not None:
                await self._refuse(known, copied, now)
                return None
            rows = copied.rows
            if not copied.all_inserted:
                rows = await rows_of(self._table, place, first=start, end=end_index)
            if await self._count(known, rows.counts, end=end_index, now=now):
                earlier = await self._references(place, first_index, start)
                return earlier + [one for one in rows.references if one[0] >= first_index]
            written = Written(copied.keys, copied.inserted)
            if not await too_late(self._records, place, written, now=now):
                return None
        raise changed_too_often()

    async def finish_ingest(self, run_id: str, *, now: int) -> RunStatus | None:
        """End the ingestion; where the run stands then."""
        return await finish(self._records, run_id, now=now)

    async def fail_ingest(self, run_id: str, *, detail: str, now: int) -> bool:
        """End a live run as `failed`, because its rows cannot be written."""
        row = await self._records.read(run_id)
        if row is None:
            return False
        failed = Change(
            status=RunStatus.FAILED,
            sets={"failure_reason": str(RunFailure.INGEST_FAILED), "failure_detail": detail},
        )
        after = await self._records.decide(
            row, lambda known: failed if known.live and known.run.ingesting else None, now=now
        )
        if after is None:
            return False
        # Cut off here, it is a stuck ingestion of a run that has ended.
        await finish(self._records, run_id, now=now)
        return True

    async def stuck_ingests(self, *, before: int) -> list[tuple[str, str]]:
        """(job_id, run_id) of runs that ingest and have not moved on since `before`, by run id."""
        found = await read_all(self._table, every("ingesting"), index=BY_OWNER, keys_only=True)
        items = await self._table.get_many(keys_of(found))
        stuck = [
            (run.job_id, run.run_id)
            for run in (row.run for row in readable(read_run_row, items.values()))
            if run.ingesting and run.status is not RunStatus.DELETED and run.updated_at < before
        ]
        return sorted(stuck, key=lambda names: names[1])

    async def _copy(self, known: IngestRow, first: int, end: int, now: int) -> ItemsCopied:
        run = known.row.run
        assert run.ingest is not None
        assert run.rerun_of is not None
        source = await self._records.read(run.rerun_of)
        if source is None:
            raise not_found("run")
        copy = ItemCopy(self._table, source, known.row.place, run.ingest.statuses)
        return await copy.run(first=first, end=end, now=now)

    async def _refuse(self, known: IngestRow, copied: ItemsCopied, now: int) -> None:
        """Raise CallInFlight, unless the run has come to its end. What was copied is found again by
        the next try, or counted by the end that is still to come."""
        assert copied.held is not None
        run, place = known.row.run, known.row.place
        row = await self._records.read_at(place)
        if row is not None and row.live and row.run.ingesting:
            raise CallInFlight(run.rerun_of or "", copied.held)
        await too_late(self._records, place, Written(copied.keys, copied.inserted), now=now)

    async def _references(self, place: RunPlace, first: int, end: int) -> list[tuple[int, str]]:
        """Those of a stretch that was copied before which are still to be worked."""
        if first >= end:
            return []
        return (await rows_of(self._table, place, first=first, end=end)).references

    async def _count(self, known: IngestRow, counts: Counts, *, end: int, now: int) -> bool:
        """Move the checkpoint of a rerun, with what was copied; False where it moved meanwhile."""
        planned, copied = known.planned, known.copied + counts
        update = f"{_MOVE}, copied = :copied"
        values: dict[str, Plain] = {
            "seen": known.next_index,
            "copied": rewritten(known.copied_text, copied),
        }
        # What workers end while the run ingests stays within the total, whatever the plan was.
        more = max(0, copied.fresh - planned.fresh)
        if more:
            update += ", planned = :planned ADD #total :more"
            text = rewritten(known.planned_text, planned + Counts(fresh=more))
            values |= {"planned": text, "more": more}
        moved = await self._move(
            known, update, condition="ingest_next = :seen", end=end, now=now, **values
        )
        return moved.done

    async def _move(
        self, known: IngestRow, update: str, *, condition: str, end: int, now: int, **values: Plain
    ) -> _Moved:
        """Move the checkpoint of a run that goes on ingesting."""
        token = self._table.clock.new_id()
        try:
            item = await self._table.update(
                known.row.place.key,
                update,
                condition=f"{_GOES_ON} AND {condition}",
                running=str(RunStatus.RUNNING),
                pending=str(RunStatus.PENDING),
                yes=True,
                end=end,
                at=max(known.row.run.updated_at, now),
                token=token,
                **values,
            )
        except AwsRefused as refused:
            if not refused.is_condition:
                raise
            found = condition_met(refused)
            if found is None:
                return _Moved(done=False, row=None)
            # Carried out before, if its own token is there; only the answer was lost.
            return _Moved(found.get("ingest_by") == token, read_ingest_row(found))
        return _Moved(done=True, row=read_ingest_row(item))


def _staged_items(place: RunPlace, rows: StagedRows, now: int) -> list[tuple[Key, Item]]:
    """The rows of a stretch. A spec stays the text that it is."""
    return [
        (place.task(task_id), fresh_item(task_id, bytes(spec).decode(), now=now))
        for task_id, spec in _pairs.decode(rows.rows)
    ]
