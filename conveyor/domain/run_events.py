"""The events that report the end of a run to its subscribers."""

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


class EventLinks(msgspec.Struct, frozen=True):
    """The addresses of a run and of its failed results, for whoever has the caller's key."""

    run: str
    failed_results: str


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
    links: EventLinks | None = None


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
    """Build the event of an ended run for a state machine.

    `ended_as` is the noted end; without it the run's present status counts. A run that is gone was
    deleted.
    """
    status = ended_as or (RunStatus.DELETED if run is None else run.status)
    event = RunEvent(
        schema=SCHEMA,
        event_id=event_id,
        event_type=event_type(status),
        occurred_at=rfc3339(now if run is None else run.updated_at),
        job_id=job_id,
        external_id=None if job is None else job.external_id,
        metadata=None if job is None else job.metadata,
        run_id=run_id,
        run_sequence=1 if run is None else run.run_sequence,
        stats=None if run is None else _stats(run.stats),
        failure_reason=_reason(run),
        failure_detail=None if run is None else run.failure_detail,
    )
    if status is RunStatus.COMPLETED:
        return RunFinished(_text(event))
    text = _text(event)
    if len(text) > MOST_CAUSE:
        text = _text(msgspec.structs.replace(event, metadata=None))
    return RunFinished(text, f"Conveyor.Run{status.capitalize()}")


def event_type(status: RunStatus) -> str:
    """Return the type of the event of a run that ended so."""
    return f"run.{status}"


def build_webhook_event(
    run: Run, ended_as: RunStatus, job: Job, *, event_id: str, ended_at: int, origin: str
) -> bytes:
    """Build the event of an ended run for the webhook of its job, as the bytes to send.

    `ended_at` is the instant of the end, in milliseconds. `origin` is the public one of the API,
    without a slash at its end; where it is empty, the event has no links.
    """
    address = f"{origin}/v1/jobs/{job.job_id}/runs/{run.run_id}"
    event = RunEvent(
        schema=SCHEMA,
        event_id=event_id,
        event_type=event_type(ended_as),
        occurred_at=rfc3339(ended_at),
        job_id=job.job_id,
        external_id=job.external_id,
        metadata=job.metadata,
        run_id=run.run_id,
        run_sequence=run.run_sequence,
        stats=_stats(run.stats),
        failure_reason=_reason(run),
        failure_detail=run.failure_detail,
        links=EventLinks(address, f"{address}/results?status=failed") if origin else None,
    )
    return _text(event).encode()


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


def _reason(run: Run | None) -> str | None:
    if run is None or run.failure_reason not in ACCOUNT_FAILURES:
        return None
    return run.failure_reason


def _stats(stats: RunStats) -> EventStats:
    return EventStats(
        total=stats.total,
        completed=stats.completed,
        successful=stats.successful,
        failed=stats.failed,
        failure_reasons=stats.failure_reasons or None,
        spend={"credits": stats.spend.credits, "cost": stats.spend.cost},
    )
