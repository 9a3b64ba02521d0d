"""A job's own row: what is in it, and how it is read and rewritten."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import structs

from conveyor.domain.model import Job
from conveyor.prod.dynamodb.items import Item, Table
from conveyor.prod.dynamodb.keys import caller_jobs, job_key
from conveyor.prod.dynamodb.shapes import rewritten, whole
from conveyor.prod.dynamodb.table import ROW_SHAPE

_job = msgspec.json.Decoder(Job)


class JobRow(msgspec.Struct, frozen=True):
    """A job as it was read. `latest_run_sequence` is the number of the run that `latest_run_id`
    names, 0 where there is none. `text` is the whole of it as it lies there, "" for a new one."""

    job: Job
    latest_run_sequence: int
    text: str = ""

    def __repr__(self) -> str:
        # The text holds what the job's own repr leaves out.
        return f"JobRow({self.job!r}, {self.latest_run_sequence})"


def job_item(row: JobRow) -> Item:
    """The item of a new job: the whole of it as one text, and what conditions and indexes look
    at."""
    job = row.job
    return {
        "shape": ROW_SHAPE,
        "job_id": job.job_id,
        "caller": job.caller,
        "gsi1pk": caller_jobs(job.caller),
        "gsi1sk": job.job_id,
        **_changing(row),
    }


@whole
def read_job_row(item: Item) -> JobRow:
    """A job from its item. Raises Damaged."""
    text, sequence = item["job"], item["latest_run_sequence"]
    if type(sequence) is not int:
        raise TypeError("latest_run_sequence")
    return JobRow(_job.decode(text), sequence, text)


def job_part(table: Table, known: JobRow, after: JobRow) -> dict[str, Any]:
    """The rewriting of a job as a part of a transaction, refused where it has changed meanwhile."""
    attributes = _changing(after)
    return table.update_part(
        job_key(known.job.job_id),
        "SET " + ", ".join(f"#{name} = :{name}" for name in attributes),
        condition="#version = :known_version",
        known_version=known.job.version,
        **attributes,
    )


def moved(row: JobRow, *, now: int, **fields: Any) -> JobRow:
    """A job with other fields, as its next version."""
    job = row.job
    after = structs.replace(
        job, updated_at=max(job.updated_at, now), version=job.version + 1, **fields
    )
    return structs.replace(row, job=after)


def _changing(row: JobRow) -> Item:
    """The attributes that a job's changes move."""
    return {
        "job": rewritten(row.text, row.job),
        "status": str(row.job.status),
        "version": row.job.version,
        "latest_run_sequence": row.latest_run_sequence,
    }
