"""The run that a rerun makes, and the transaction that makes it.

It moves the version of the job, and of the source too: whoever is about to delete the source has
looked at its pins, and is made to look again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec import structs

from conveyor.aio.concurrency import side_by_side
from conveyor.domain.model import Ingest, JobStatus, Run, RunStatus, TaskStatus
from conveyor.prod.dynamodb.ingest_counts import Counts
from conveyor.prod.dynamodb.items import Item, Table
from conveyor.prod.dynamodb.job_items import JobRow, job_part, moved
from conveyor.prod.dynamodb.keys import Key, pin_key, place_key
from conveyor.prod.dynamodb.places import Place
from conveyor.prod.dynamodb.run_items import RunRow, new_run_item
from conveyor.prod.dynamodb.shapes import rewritten
from conveyor.prod.dynamodb.submitting import ABSENT
from conveyor.prod.dynamodb.table import ROW_SHAPE, SORT_KEY

MOST_PINS = 80
"""Pins that one transaction takes beside all else."""
PIN: Item = {"shape": ROW_SHAPE}


class Source(NamedTuple):
    """A job as it was read, and its latest run, which is replayed."""

    job: JobRow
    run: RunRow

    def place(self, run_id: str) -> Place:
        """Where the next run of the job lies."""
        return Place(run_id, self.job.job.job_id, self.job.job.run_count + 1, self.run.shards)


class NewRun(NamedTuple):
    """A run to be made of a source, its rows as they are, or will be, and whom it draws on."""

    source: Source
    run: Run
    counts: Counts
    pinned: Sequence[str]

    @property
    def place(self) -> Place:
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
    source: Source,
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
    async for page in table.pages(partition, begins_with="Pin#", keys_only=True):
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

    await side_by_side(pin, _pins(new)[MOST_PINS:])


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
