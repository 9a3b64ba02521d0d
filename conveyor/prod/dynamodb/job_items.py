"""A job's own row: what is in it, and how it is read and rewritten."""

from __future__ import annotations

from typing import Any

import msgspec

from conveyor.domain.model import Job
from conveyor.prod.dynamodb.items import Item, Table
from conveyor.prod.dynamodb.keys import caller_jobs, job_key
from conveyor.prod.dynamodb.table import ROW_SHAPE

_encode = msgspec.json.encode
_job = msgspec.json.Decoder(Job)


class JobRow(msgspec.Struct, frozen=True):
    """A job as it was read. `latest_run_sequence` is the number of the run that `latest_run_id`
    names, 0 where there is none."""

    job: Job
    latest_run_sequence: int


def job_item(row: JobRow) -> Item:
    """The item of a job: the whole of it as one text, and what conditions and indexes look at."""
    job = row.job
    return {
        "shape": ROW_SHAPE,
        "job": _encode(job).decode(),
        "job_id": job.job_id,
        "caller": job.caller,
        "status": str(job.status),
        "version": job.version,
        "latest_run_sequence": row.latest_run_sequence,
        "gsi1pk": caller_jobs(job.caller),
        "gsi1sk": job.job_id,
    }


def read_job_row(item: Item) -> JobRow:
    """A job from its item."""
    return JobRow(_job.decode(item["job"]), item["latest_run_sequence"])


def job_part(table: Table, known: JobRow, after: JobRow) -> dict[str, Any]:
    """The rewriting of a job as a part of a transaction, refused where it has changed meanwhile."""
    return table.put_part(
        job_key(known.job.job_id),
        job_item(after),
        condition="#version = :known_version",
        names={"#version": "version"},
        known_version=known.job.version,
    )


def moved(row: JobRow, *, now: int, **fields: Any) -> JobRow:
    """A job with other fields, as its next version."""
    job = row.job
    after = msgspec.structs.replace(
        job, updated_at=max(job.updated_at, now), version=job.version + 1, **fields
    )
    return JobRow(after, row.latest_run_sequence)
