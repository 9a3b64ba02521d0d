"""The end of an ingestion, and what is done about rows that were written after it.

A run's rows may be written by one that does not know yet that the run was stopped, or brought to
its end by another. Rows are written under no condition on the run, so they are set right
afterwards: counted by the end that is still to come, or else by a recount; those of a deleted run
are removed. A recount that has to wait, or whose caller is lost, is left to the sweeper: the run is
unsettled.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import structs

from conveyor.aio.concurrency import side_by_side
from conveyor.domain.model import RunStatus
from conveyor.domain.states import live_run_status
from conveyor.prod.dynamodb.copying import rows_of
from conveyor.prod.dynamodb.ingest_counts import Counts, IngestRow, difference, ingest_row_at
from conveyor.prod.dynamodb.items import changed_too_often
from conveyor.prod.dynamodb.keys import Key, pin_key, task_partition, task_sort_key
from conveyor.prod.dynamodb.places import Place
from conveyor.prod.dynamodb.recount import recount_at
from conveyor.prod.dynamodb.run_items import RunRow
from conveyor.prod.dynamodb.run_records import TRIES, Change, RunMoved, RunRecords

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


async def finish(records: RunRecords, run_id: str, *, now: int) -> RunStatus | None:
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


async def too_late(records: RunRecords, place: Place, written: Written, *, now: int) -> bool:
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


async def _written(records: RunRecords, known: IngestRow) -> Counts:
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


async def _count(records: RunRecords, place: Place) -> int:
    counted: list[int] = []

    async def count(shard: int) -> None:
        partition = task_partition(place.job_id, place.shards, shard)
        begin = task_sort_key(place.run_id, "")
        counted.append(await records.table.count(partition, begins_with=begin))

    await side_by_side(count, range(place.shards.count))
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
