"""The ingestion port on DynamoDB: rows first, then the checkpoint behind them.

Rows are inserted only where absent, so each step can be repeated. The checkpoint moves by a
conditional write that only a live, ingesting run admits.

A large rerun starts with expected counters, `planned`. Each write of the checkpoint adds up the
rows copied, `copied`, and the end of the ingestion adds the difference. Settlements meanwhile are
never overwritten.

Rows carry no condition on the run, so a slow ingester may write some after the run was stopped or
finished by others. `repair_late_rows` handles these: a later end of the ingestion counts them, else
a recount does, and those of a deleted run are removed. If the recount has to wait, or its caller
dies, the run stays unsettled and the sweeper recounts it.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from msgspec import structs

from conveyor.aio.concurrency import for_each
from conveyor.domain.errors import CallInFlight, not_found
from conveyor.domain.model import RunFailure, RunStatus
from conveyor.domain.result_shape import SIZE_CLASSES, counted_type
from conveyor.domain.states import live_run_status
from conveyor.ports.ingestion import Ingesting, StagedRows
from conveyor.ports.maintenance import StuckIngest
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import (
    Item,
    Plain,
    conflicting_item,
    contention_error,
    decode_intact,
    decodes_row,
    keys_of,
    merge_json,
)
from conveyor.prod.dynamodb.copying import (
    CopyResult,
    Counts,
    KnownNames,
    RowCopy,
    Selection,
    fresh_item,
    sum_maps,
    summarize_rows,
)
from conveyor.prod.dynamodb.recount import recount_at
from conveyor.prod.dynamodb.run_rows import (
    GROUPS,
    REASON,
    SIZE,
    TRIES,
    TYPES,
    Change,
    DynamoRunRows,
    RunPlace,
    RunRow,
    RunVersionConflict,
    read_run_row,
)
from conveyor.prod.dynamodb.runs import query_all
from conveyor.prod.dynamodb.schema import (
    BY_OWNER,
    Key,
    all_partitions,
    pin_key,
    task_partition,
    task_sort_key,
)
from conveyor.prod.dynamodb.task_rows import insert_items

_counts = msgspec.json.Decoder(Counts)


class IngestRow(NamedTuple):
    """A run's row with the counts of its ingestion.

    `planned` holds the rows that the run's counters expect, `copied` the rows added up so far.
    `recopied`: a call may have written rows without adding them up, so only the rows themselves
    tell. The texts are the JSON as stored, "" if absent.
    """

    row: RunRow
    planned: Counts
    copied: Counts
    recopied: bool
    planned_text: str
    copied_text: str

    @property
    def can_ingest(self) -> bool:
        """True if the run admits more rows."""
        return self.row.live and self.row.run.ingesting

    @property
    def names(self) -> KnownNames:
        """The names that the run has begun with, and come upon since."""
        types = frozenset(self.planned.types) | frozenset(self.copied.types)
        return KnownNames(frozenset(self.planned.groups), types)

    @property
    def next_index(self) -> int:
        """The checkpoint."""
        ingest = self.row.run.ingest
        return 0 if ingest is None else ingest.next_index


async def find_ingest_row(records: DynamoRunRows, run_id: str) -> IngestRow | None:
    """Read a run strongly by its id; None if there is none."""
    place = await records.places.find(run_id)
    return None if place is None else await ingest_row_at(records, place)


async def ingest_row_at(records: DynamoRunRows, place: RunPlace) -> IngestRow | None:
    """Read a run strongly by its place; None if it is gone."""
    item = await records.table.get(place.key)
    return None if item is None else read_ingest_row(item)


@decodes_row
def read_ingest_row(item: Item) -> IngestRow:
    """Decode a run and the counts of its ingestion. Raises DamagedRow."""
    row = read_run_row(item)
    planned, copied = item.get("planned", ""), item.get("copied", "")
    return IngestRow(
        row,
        # All rows of a submit are fresh.
        _counts.decode(planned) if planned else Counts(fresh=row.run.stats.total),
        _counts.decode(copied) if copied else Counts(),
        item.get("recopied", False),
        planned,
        copied,
    )


def counter_changes(before: Counts, after: Counts) -> dict[str, int]:
    """Return the additions that turn counters for the rows of `before` into counters for those of
    `after`; see `map_changes` for groups and media types."""
    reasons = sorted(before.reasons.keys() | after.reasons.keys())
    adds = {
        "total": after.total - before.total,
        "successful": after.successful - before.successful,
        "failed": after.failed - before.failed,
        "inherited": after.inherited - before.inherited,
        **{
            f"{REASON}{reason}": after.reasons.get(reason, 0) - before.reasons.get(reason, 0)
            for reason in reasons
        },
        **{
            f"{SIZE}{number}": after.sizes[number] - before.sizes[number]
            for number in range(SIZE_CLASSES)
        },
    }
    return {name: change for name, change in adds.items() if change}


def map_changes(row: RunRow, before: Counts, after: Counts) -> Change:
    """Return the change that turns groups and media types of a run for the rows of `before` into
    those for the rows of `after`. It sets the maps of the base whole; as a rule they agree, and it
    does nothing."""
    sets: dict[str, Plain] = {}
    if before.groups != after.groups:
        less = {group_id: -count for group_id, count in before.groups.items()}
        change = sum_maps(less, after.groups)
        groups = {
            group_id: [max(group.failed + change.get(group_id, 0), 0), group.last_at]
            for group_id, group in row.base.groups.items()
        }
        sets[GROUPS] = groups
    if before.types != after.types:
        types = dict(row.base.types)
        for name, count in before.types.items():
            types[name] = types.get(name, 0) - count
        for name, count in after.types.items():
            counted = counted_type(name, types)
            types[counted] = types.get(counted, 0) + count
        sets[TYPES] = {name: count for name, count in types.items() if count > 0}
    if not sets:
        return Change()
    return Change(
        sets={name: value for name, value in sets.items() if value},
        removes=[name for name, value in sets.items() if not value],
    )


MARK_RECOPIED = Change(sets={"recopied": True})
"""The rows exist but may not be added up. The change raises the version, so an end of the ingestion
that has counted rows already counts again."""

MARK_UNSETTLED = Change(unsettled=True)
"""Raises the version as well, so a recount that is about to settle the run counts again."""

_STATUS_COUNTERS = ("total", "successful", "failed")


class WrittenRows(NamedTuple):
    """The rows that one call meant to write, and those whose insertion was confirmed."""

    keys: list[Key]
    inserted: list[Key]


async def finish_ingestion(records: DynamoRunRows, run_id: str, *, now: int) -> RunStatus | None:
    """End the ingestion; see `Ingestion.finish_ingest`. Raises ValueError if rows of a live run are
    missing."""
    place = await records.places.find(run_id)
    for _ in range(TRIES):
        known = None if place is None else await ingest_row_at(records, place)
        if known is None or known.row.run.status is RunStatus.DELETED:
            return None
        run = known.row.run
        if not run.ingesting:
            return run.status
        known = known._replace(row=await records.summed(known.row))
        counts = await _final_counts(records, known)
        if run.rerun_of is not None and run.ingest is not None and run.ingest.statuses is None:
            # All rows start afresh, so the run needs no body of its source.
            await records.table.delete(pin_key(run.job_id, run.rerun_of, run_id))
        try:
            after = await records.change(known.row, _finish_change(known, counts), now=now)
        except RunVersionConflict:
            continue
        # What was counted before that write found a run that still ingests.
        latest = await records.summed_anew(after)
        return (await records.write_late_status(latest, now=now)).run.status
    raise contention_error()


async def repair_late_rows(
    records: DynamoRunRows, place: RunPlace, written: WrittenRows, *, now: int
) -> bool:
    """Repair the count after the checkpoint refused rows that are written already. Return whether
    the run still ingests, so that the caller may try again."""
    for _ in range(TRIES):
        row = await records.read_bare(place)
        if row is None or row.run.status is RunStatus.DELETED:
            await records.table.delete_many(written.keys)
            return False
        if not written.inserted and _are_rows_certain(row):
            return row.live and row.run.ingesting
        try:
            if row.run.ingesting:
                return (await records.change(row, MARK_RECOPIED, now=now)).live
            # Not removed: another call may have found these rows, and counted them.
            await records.change(row, MARK_UNSETTLED, now=now)
        except RunVersionConflict:
            continue
        await recount_at(records, place, now=now)
        return False
    raise contention_error()


def _are_rows_certain(row: RunRow) -> bool:
    """Return whether the run's rows are the same whoever writes them, and all are written or will
    still be counted. Otherwise a row may have been inserted by a call whose answer was lost, which
    looks like a row that existed before."""
    ingest = row.run.ingest
    if ingest is None or (row.run.rerun_of is not None and ingest.statuses is not None):
        return False
    return row.live or ingest.next_index >= ingest.end


async def _final_counts(records: DynamoRunRows, known: IngestRow) -> Counts:
    """Return the counts of the run's rows."""
    run, live = known.row.run, known.row.live
    assert run.ingest is not None
    if live and known.next_index < run.ingest.end:
        raise ValueError(f"run {run.run_id} has rows that are not written yet")
    if run.rerun_of is None:
        return Counts(fresh=run.ingest.end if live else await _count_rows(records, known.row.place))
    if live and not known.recopied:
        return known.copied
    names = known.names
    rows = await summarize_rows(records.table, known.row.place, names, first=0, end=run.ingest.end)
    return rows.counts


async def _count_rows(records: DynamoRunRows, place: RunPlace) -> int:
    counted: list[int] = []

    async def count(shard: int) -> None:
        partition = task_partition(place.job_id, place.shards, shard)
        begin = task_sort_key(place.run_id, "")
        counted.append(await records.table.count(partition, begins_with=begin))

    await for_each(count, range(place.shards.count))
    return sum(counted)


def _finish_change(known: IngestRow, counts: Counts) -> Change:
    """Make the change that ends the ingestion. No checkpoint can move after it was read: it is at
    its end, or the run is not live."""
    run = known.row.run
    adds = counter_changes(known.planned, counts)
    status = None
    if known.row.live:
        counters = {name: getattr(run.stats, name) + adds.get(name, 0) for name in _STATUS_COUNTERS}
        stats = structs.replace(run.stats, **counters)
        status = live_run_status(stats, job_closed=run.last_batch_received)
    maps = map_changes(known.row, known.planned, counts)
    return maps._replace(
        status=None if status is run.status else status,
        ingesting=False,
        adds=adds,
        # With many groups these are large, and every read of the row would pay for them.
        removes=[*maps.removes, "planned", "copied"],
    )


_pairs = msgspec.json.Decoder(list[tuple[str, msgspec.Raw]])

_IS_INGESTING = "#status IN (:running, :pending) AND ingesting = :yes"
_MOVE_CHECKPOINT = "SET ingest_next = :end, counted_at = :at, ingest_by = :token"


class _CheckpointMove(NamedTuple):
    """The run's row after a write of the checkpoint, or as found instead; None if it is gone.
    `done` tells whether the checkpoint moved."""

    done: bool
    row: IngestRow | None


class DynamoIngestion:
    """The ingestion port."""

    def __init__(self, records: DynamoRunRows) -> None:
        self._records = records
        self._table = records.table

    async def ingesting(self, run_id: str) -> Ingesting | None:
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
            politeness=row.politeness,
        )

    async def write_rows(self, run_id: str, rows: StagedRows, *, now: int) -> bool:
        known = await find_ingest_row(self._records, run_id)
        if known is None or not known.can_ingest:
            return False
        place = known.row.place
        items = _staged_items(place, rows, now)
        inserted = await insert_items(self._table, items)
        end = rows.first_index + rows.count
        moved = await self._move_checkpoint(
            known, _MOVE_CHECKPOINT, condition="ingest_next < :end", end=end, now=now
        )
        if moved.done or (moved.row is not None and moved.row.can_ingest):
            return True
        written = WrittenRows([key for key, _ in items], inserted)
        await repair_late_rows(self._records, place, written, now=now)
        return False

    async def copy_rows(
        self, run_id: str, *, first_index: int, end_index: int, now: int
    ) -> list[tuple[int, str]] | None:
        for _ in range(TRIES):
            known = await find_ingest_row(self._records, run_id)
            if known is None or not known.can_ingest or known.row.run.rerun_of is None:
                return None
            place = known.row.place
            if known.next_index >= end_index:
                return await self._references(known, first_index, end_index)
            # Rows before the checkpoint exist, whoever wrote them.
            start = known.next_index
            copied = await self._copy(known, start, end_index, now)
            if copied.in_flight is not None:
                await self._raise_in_flight(known, copied, now)
                return None
            rows = copied.rows
            if not copied.all_inserted:
                names = known.names
                rows = await summarize_rows(self._table, place, names, first=start, end=end_index)
            if await self._count_copied(known, rows.counts, end=end_index, now=now):
                earlier = await self._references(known, first_index, start)
                return earlier + [one for one in rows.references if one[0] >= first_index]
            written = WrittenRows(copied.keys, copied.inserted)
            if not await repair_late_rows(self._records, place, written, now=now):
                return None
        raise contention_error()

    async def finish_ingest(self, run_id: str, *, now: int) -> RunStatus | None:
        return await finish_ingestion(self._records, run_id, now=now)

    async def fail_ingest(self, run_id: str, *, detail: str, now: int) -> bool:
        row = await self._records.read(run_id)
        if row is None:
            return False
        failed = Change(
            status=RunStatus.FAILED,
            sets={"failure_reason": str(RunFailure.INGEST_FAILED), "failure_detail": detail},
        )
        after = await self._records.change_with_retry(
            row, lambda known: failed if known.live and known.run.ingesting else None, now=now
        )
        if after is None:
            return False
        # A crash here leaves an ended run that ingests: the sweeper finds it as stuck.
        await finish_ingestion(self._records, run_id, now=now)
        return True

    async def stuck_ingests(self, *, before: int) -> list[StuckIngest]:
        """Find stuck ingestions by index, in order of run ids; check their rows strongly."""
        found = await query_all(
            self._table, all_partitions("ingesting"), index=BY_OWNER, keys_only=True
        )
        items = await self._table.get_many(keys_of(found))
        stuck = [
            StuckIngest(run.job_id, run.run_id, run.ingest is not None and run.ingest.template)
            for run in (row.run for row in decode_intact(read_run_row, items.values()))
            if run.ingesting and run.status is not RunStatus.DELETED and run.updated_at < before
        ]
        return sorted(stuck, key=lambda one: one.run_id)

    async def _copy(self, known: IngestRow, first: int, end: int, now: int) -> CopyResult:
        run = known.row.run
        assert run.ingest is not None
        assert run.rerun_of is not None
        source = await self._records.read(run.rerun_of)
        if source is None:
            raise not_found("run")
        copy = RowCopy(
            self._table,
            source,
            known.row.place,
            Selection(run.ingest.statuses, run.ingest.groups),
            known.names,
        )
        return await copy.run(first=first, end=end, now=now)

    async def _raise_in_flight(self, known: IngestRow, copied: CopyResult, now: int) -> None:
        """Raise CallInFlight unless the run has ended. The next try finds the rows copied so far,
        or the end of the ingestion counts them."""
        assert copied.in_flight is not None
        run, place = known.row.run, known.row.place
        row = await self._records.read_at(place)
        if row is not None and row.live and row.run.ingesting:
            raise CallInFlight(run.rerun_of or "", copied.in_flight)
        await repair_late_rows(
            self._records, place, WrittenRows(copied.keys, copied.inserted), now=now
        )

    async def _references(self, known: IngestRow, first: int, end: int) -> list[tuple[int, str]]:
        """Return the references of copied rows, from `first` below `end`, that are still to be
        worked."""
        if first >= end:
            return []
        names = known.names
        rows = await summarize_rows(self._table, known.row.place, names, first=first, end=end)
        return rows.references

    async def _count_copied(self, known: IngestRow, counts: Counts, *, end: int, now: int) -> bool:
        """Move the checkpoint of a rerun and add the copied rows; return False if it had moved
        meanwhile."""
        planned, copied = known.planned, known.copied + counts
        update = f"{_MOVE_CHECKPOINT}, copied = :copied"
        values: dict[str, Plain] = {
            "seen": known.next_index,
            "copied": merge_json(known.copied_text, copied),
        }
        # Raise the total first, so that tasks ended meanwhile never exceed it.
        more = max(0, copied.fresh - planned.fresh)
        if more:
            update += ", planned = :planned ADD #total :more"
            text = merge_json(known.planned_text, planned + Counts(fresh=more))
            values |= {"planned": text, "more": more}
        moved = await self._move_checkpoint(
            known, update, condition="ingest_next = :seen", end=end, now=now, **values
        )
        return moved.done

    async def _move_checkpoint(
        self, known: IngestRow, update: str, *, condition: str, end: int, now: int, **values: Plain
    ) -> _CheckpointMove:
        """Move the checkpoint of a run that still ingests."""
        token = self._table.clock.new_id()
        try:
            item = await self._table.update(
                known.row.place.key,
                update,
                condition=f"{_IS_INGESTING} AND {condition}",
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
            found = conflicting_item(refused)
            if found is None:
                return _CheckpointMove(done=False, row=None)
            # The token is this call's own: an earlier try wrote it, and its answer was lost.
            return _CheckpointMove(found.get("ingest_by") == token, read_ingest_row(found))
        return _CheckpointMove(done=True, row=read_ingest_row(item))


def _staged_items(place: RunPlace, rows: StagedRows, now: int) -> list[tuple[Key, Item]]:
    """Make the rows of staged tasks. Specs stay the texts that they are."""
    return [
        (place.task_key(task_id), fresh_item(task_id, bytes(spec).decode(), now=now))
        for task_id, spec in _pairs.decode(rows.rows)
    ]
