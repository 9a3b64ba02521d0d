"""The schedules port on DynamoDB.

A scheduled job is an ordinary job item, whose attributes bring it into the index by its due time.
One transaction makes a change: the job under its version, its new run with an outbox entry, its
fires and the response.

The index lags behind the table, so it only shows where to look: jobs found there are read strongly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import msgspec
from msgspec import structs

from conveyor.aio.concurrency import for_each
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import Job, JobStatus, Run
from conveyor.domain.scheduling import FireRecord
from conveyor.domain.shards import shards_of
from conveyor.ports.schedules import ScheduleChange, Schedules
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import (
    Item,
    Query,
    RowFilter,
    contention_error,
    decode_intact,
    decodes_row,
    keys_of,
    merge_json,
)
from conveyor.prod.dynamodb.idempotency import StoredResponses
from conveyor.prod.dynamodb.job_rows import JobReads, JobRow, job_part, read_job_row
from conveyor.prod.dynamodb.outbox_rows import new_entry_parts
from conveyor.prod.dynamodb.run_rows import TRIES, DynamoRunRows, RunPlace, new_run_item
from conveyor.prod.dynamodb.schema import (
    BEGIN,
    BY_DISPATCH,
    END,
    INDEXES,
    ROW_SHAPE,
    TIME_TO_LIVE,
    Key,
    all_partitions,
    by_time,
    fire_key,
    place_key,
)
from conveyor.prod.dynamodb.submitting import CONDITION_FAILED, IS_ABSENT, DailyTasks

FIRE_RETENTION_DAYS = 30
"""Days that a row of the fires is kept, by default."""

_JOBS_PER_READ = 100
_fire = msgspec.json.Decoder(FireRecord)


class DynamoSchedules(Schedules):
    """The schedules port. Fires have a time to live, `fire_retention_days` after their last
    change."""

    def __init__(
        self, records: DynamoRunRows, *, fire_retention_days: int = FIRE_RETENTION_DAYS
    ) -> None:
        self._records = records
        self._table = records.table
        self._job_reads = JobReads(records)
        self._responses = StoredResponses(records.table)
        self._daily = DailyTasks(records)
        self._fire_retention_days = fire_retention_days

    async def change_schedule(self, change: ScheduleChange) -> bool:
        for refusals in range(TRIES):
            once = await self._responses.unanswered(change.once)
            known = await self._job_reads.job(change.before.job_id)
            if known is None or known.job.version != change.before.version:
                return False
            if refusals:
                await self._refuse_made(change.run)
            parts = await self._parts(change, known)
            if change.answer is not None:
                parts += self._responses.answer_parts(once, change.answer)
            counted: list[dict[str, Any]] = []
            if change.run is not None:
                accepted, made_at = change.run.stats.total, change.run.created_at
                counted = self._daily.parts(change.after.caller, accepted, now=made_at)
            try:
                # The token lets a repetition after a lost answer pass for the first call.
                await self._table.transact([*parts, *counted], token=self._table.clock.new_id())
            except AwsRefused as refused:
                if not refused.is_condition:
                    raise
                _raise_if_run_exists(refused.reasons, change)
                if change.run is not None:
                    self._daily.refuse(counted, refused.reasons, now=change.run.created_at)
            else:
                return True
        raise contention_error()

    async def _refuse_made(self, run: Run | None) -> None:
        """Raise ConveyorError(conflict) if a run exists already."""
        if run is not None and await self._records.read(run.run_id) is not None:
            raise ConveyorError(ErrorCode.CONFLICT, "the run exists already")

    async def due_schedules(self, *, now: int, limit: int) -> list[Job]:
        """Read an index page of each partition, then the jobs, longest due first, until enough are
        found."""
        reads = [
            _DueRead(Query(partition, index=BY_DISPATCH, between=_until(now), limit=limit))
            for partition in all_partitions("schedules")
        ]
        # An entry that moves while its index is read is found twice.
        found: dict[str, Job] = {}
        while reads and len(found) < limit:
            await for_each(self._read_page, reads)
            keys = [key for _, key in sorted(entry for read in reads for entry in read.entries)]
            for start in range(0, len(keys), limit):
                jobs = await self._read(keys[start : start + limit])
                found |= {job.job_id: job for job in jobs if _due_at(job) <= now}
                if len(found) >= limit:
                    break
            reads = [read for read in reads if read.query.start is not None]
        return sorted(found.values(), key=lambda job: (_due_at(job), job.job_id))[:limit]

    async def list_schedules(self, *, after: str, limit: int) -> list[Job]:
        """Read the whole index, as it is sorted by time."""
        keys: list[Key] = []

        async def find(partition: str) -> None:
            where = RowFilter("job_id > :after", {"after": after or BEGIN})
            async for page in self._table.pages(
                Query(partition, index=BY_DISPATCH, where=where, keys_only=True)
            ):
                keys.extend(keys_of(page.items))

        await for_each(find, all_partitions("schedules"))
        # An entry that moves while its index is read is found twice.
        keys = sorted(set(keys))
        found: list[Job] = []
        for start in range(0, len(keys), _JOBS_PER_READ):
            found += await self._read(keys[start : start + _JOBS_PER_READ])
            if len(found) >= limit:
                break
        return found[:limit]

    async def list_fires(self, job_id: str, *, before: str | None, limit: int) -> list[FireRecord]:
        first, last = fire_key(job_id, BEGIN), fire_key(job_id, before or END)
        found: list[FireRecord] = []
        async for page in self._table.pages(
            Query(
                first.pk,
                between=(first.sk, last.sk),
                forward=False,
                # Of a range, the end is part.
                limit=limit if before is None else limit + 1,
                known_only=True,
            )
        ):
            fires = decode_intact(_read_fire, page.items)
            found += [fire for fire in fires if fire.fire_id != before]
            if len(found) >= limit:
                break
        return found[:limit]

    async def drop_old_fires(self, *, before: int, limit: int) -> int:
        return 0  # DynamoDB removes them by their time to live

    async def _read_page(self, read: _DueRead) -> None:
        page = await self._table.page(read.query)
        sort_key = INDEXES[BY_DISPATCH][1]
        keys = zip(page.items, keys_of(page.items), strict=True)
        read.entries = [(item[sort_key], key) for item, key in keys]
        read.query = replace(read.query, start=page.last)

    async def _read(self, keys: Sequence[Key]) -> list[Job]:
        """Read jobs strongly, in the given order; leave out deleted and unreadable ones."""
        items = await self._table.get_many(keys)
        rows = decode_intact(read_job_row, [items[key] for key in keys if key in items])
        return [
            row.job
            for row in rows
            if row.job.scheduling is not None and row.job.status is not JobStatus.DELETED
        ]

    async def _parts(self, change: ScheduleChange, known: JobRow) -> list[dict[str, Any]]:
        """Describe the transaction, without its idempotency key."""
        job, run = change.after, change.run
        after = structs.replace(known, job=job)
        parts: list[dict[str, Any]] = []
        if run is not None:
            after = structs.replace(after, latest_run_sequence=run.run_sequence)
            parts += self._run_parts(job, run)
        keys = [fire_key(job.job_id, fire.fire_id) for fire in change.fires]
        found = await self._table.get_many(keys)
        for key, fire in zip(keys, change.fires, strict=True):
            text = _text_kept(found[key]) if key in found else ""
            item = fire_item(text, fire, retention_days=self._fire_retention_days)
            update = "SET " + ", ".join(f"#{name} = :{name}" for name in item)
            parts.append(self._table.update_part(key, update, condition="", **item))
        return [job_part(self._table, known, after), *parts]

    def _run_parts(self, job: Job, run: Run) -> list[dict[str, Any]]:
        table = self._table
        place = RunPlace(run.run_id, job.job_id, run.run_sequence, shards_of(job))
        return [
            table.put_part(place.key, new_run_item(run, job), condition=IS_ABSENT),
            table.put_part(place_key(run.run_id), place.item(), condition=IS_ABSENT),
            *new_entry_parts(table, job, run),
        ]


def _raise_if_run_exists(reasons: Sequence[str], change: ScheduleChange) -> None:
    """Raise ConveyorError(conflict) if not the job was refused, but its run or the run's place."""
    job, *others = reasons
    if change.run is not None and job != CONDITION_FAILED and CONDITION_FAILED in others[:2]:
        raise ConveyorError(ErrorCode.CONFLICT, "the run exists already")


@dataclass(slots=True)
class _DueRead:
    """The query of one partition, and the entries of its latest page: sort key and job."""

    query: Query
    entries: list[tuple[str, Key]] = field(default_factory=list)


def _until(now: int) -> tuple[str, str]:
    """Return the bounds of the index entries that are due."""
    return by_time(0, ""), by_time(now, END)


def _due_at(job: Job) -> float:
    """Return when a scheduled job is due, infinity for never."""
    assert job.scheduling is not None
    return inf if job.scheduling.due_at is None else job.scheduling.due_at


def fire_item(text: str, fire: FireRecord, *, retention_days: int) -> Item:
    """Make a row of the fires, of which `text` is there already; "" for a new one."""
    last_noted = -(-fire.noted_at // 1_000)
    return {
        "shape": ROW_SHAPE,
        "fire": merge_json(text, fire),
        TIME_TO_LIVE: last_noted + retention_days * 86_400,
    }


@decodes_row
def _read_fire(item: Item) -> FireRecord:
    return _fire.decode(item["fire"])


def _text_kept(item: Item) -> str:
    """Return the JSON of a row that is written anew, "" if it is damaged."""
    return item["fire"] if decode_intact(_read_fire, [item]) else ""
