"""Fires of scheduled jobs: the runs that they make from the job's template."""

from __future__ import annotations

from msgspec import structs

from conveyor.domain.model import Ingest, IngestStatus, Job, Run, RunStats, RunStatus


def run_from_template(job: Job, *, run_id: str, trigger: str, now: int) -> tuple[Job, Run]:
    """Make a run of a scheduled job whose rows are ingested from the template; return the next
    version of the job, and the run. `trigger` is scheduled or manual."""
    assert job.scheduling is not None
    template = job.scheduling.template
    run = Run(
        run_id=run_id,
        job_id=job.job_id,
        run_sequence=job.run_count + 1,
        status=RunStatus.RUNNING,
        created_at=now,
        updated_at=now,
        trigger=trigger,
        last_batch_received=True,
        next_index=template.rows,
        stats=RunStats(total=template.rows),
        ingest=Ingest(
            status=IngestStatus.PENDING,
            end=template.rows,
            chunks=template.chunks,
            template=True,
            list_id=template.list_id,
        ),
    )
    after = structs.replace(
        job,
        updated_at=max(job.updated_at, now),
        latest_run_id=run_id,
        run_count=run.run_sequence,
        version=job.version + 1,
    )
    return after, run
