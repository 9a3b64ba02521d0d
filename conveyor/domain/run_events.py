"""The event that reports the end of a run to its subscribers."""

from __future__ import annotations

import msgspec

from conveyor.domain.model import ACCOUNT_FAILURES, Job, Run, RunStats, RunStatus
from conveyor.domain.text_rules import rfc3339

SCHEMA = "1"
"""The version of the event."""
MOST_CAUSE = 32_768
"""Maximum characters in the cause of a failure (Step Functions, SendTaskFailure)."""


class RunFinished(msgspec.Struct, frozen=True, omit_defaults=True):
    """The event of a run's end as JSON text and, unless the run was completed, the name of the
    error."""

    event: str
    error: str = ""


class EventStats(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The counters of a run at its end."""

    total: int
    completed: int
    successful: int
    failed: int
    failure_reasons: dict[str, int] | None = None
    spend: dict[str, float]


class RunEvent(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The event of a run's end.

    `event_type` is run.completed, run.failed, run.stopped, run.deleted or webhook.test. Fields that
    are no longer known, because the run is gone, are left out.
    """

    schema: str
    event_id: str
    event_type: str
    occurred_at: str
    job_id: str
    external_id: str | None = None
    metadata: dict[str, str] | None = None
    run_id: str
    run_sequence: int
    stats: EventStats | None = None
    failure_reason: str | None = None
    failure_detail: str | None = None


def build_run_event(
    run: Run | None,
    ended_as: RunStatus | None,
    job: Job | None,
    *,
    job_id: str,
    run_id: str,
    event_id: str,
    now: int,
) -> RunFinished:
    """Build the event of an ended run.

    `ended_as` is the noted end; without it the run's present status counts. A run that is gone was
    deleted.
    """
    status = ended_as or (RunStatus.DELETED if run is None else run.status)
    event = RunEvent(
        schema=SCHEMA,
        event_id=event_id,
        event_type=f"run.{status}",
        occurred_at=rfc3339(now if run is None else run.updated_at),
        job_id=job_id,
        external_id=None if job is None else job.external_id,
        metadata=None if job is None else job.metadata,
        run_id=run_id,
        run_sequence=1 if run is None else run.run_sequence,
        stats=None if run is None else _stats(run.stats),
        failure_reason=run.failure_reason
        if run and run.failure_reason in ACCOUNT_FAILURES
        else None,
        failure_detail=None if run is None else run.failure_detail,
    )
    if status is RunStatus.COMPLETED:
        return RunFinished(_text(event))
    text = _text(event)
    if len(text) > MOST_CAUSE:
        text = _text(msgspec.structs.replace(event, metadata=None))
    return RunFinished(text, f"Conveyor.Run{status.capitalize()}")


TEST = "test"
"""Job and run of an event that only tests a receiver."""


def build_test_event(*, event_id: str, now: int) -> str:
    """Build the event `webhook.test`, of no job."""
    return _text(
        RunEvent(
            schema=SCHEMA,
            event_id=event_id,
            event_type="webhook.test",
            occurred_at=rfc3339(now),
            job_id=TEST,
            run_id=TEST,
            run_sequence=1,
        )
    )


def _text(event: RunEvent) -> str:
    return msgspec.json.encode(event).decode()


def _stats(stats: RunStats) -> EventStats:
    return EventStats(
        total=stats.total,
        completed=stats.completed,
        successful=stats.successful,
        failed=stats.failed,
        failure_reasons=stats.failure_reasons or None,
        spend={"credits": stats.spend.credits, "cost": stats.spend.cost},
    )
