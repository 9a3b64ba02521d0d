"""Builds answers from records."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from pydantic_core import Url

from conveyor.aio.outages import Outage
from conveyor.domain.deliveries import DeliveryAttempt, EventDelivery, receiver_health
from conveyor.domain.failure_groups import OTHER_GROUP, FailureGroups
from conveyor.domain.fires import with_known_zones
from conveyor.domain.hosts import Politeness
from conveyor.domain.model import (
    ACCOUNT_FAILURES,
    Event,
    Job,
    JobView,
    Problem,
    Run,
    RunStats,
    RunStatus,
    Spend,
    Task,
)
from conveyor.domain.remarks import NO_REMARKS, Remarks
from conveyor.domain.result_shape import SIZE_BOUNDS, ResultShape
from conveyor.domain.run_waits import RunWait
from conveyor.domain.schedule import WEEKDAYS, Calendar
from conveyor.domain.scheduling import Scheduling
from conveyor.domain.states import LIVE_RUN_STATES
from conveyor.domain.text_rules import rfc3339
from conveyor.domain.webhooks import Webhook
from conveyor.ports.records import Appended, Rerun
from conveyor.service.schemas import (
    AddTasksBody,
    CadenceBody,
    CalendarBody,
    CallbackBody,
    DeliveryAttemptBody,
    DeliveryBody,
    EventBody,
    FailureGroupBody,
    FailuresBody,
    HistoryBody,
    JobBody,
    LoggedDeliveryBody,
    MonthDaysBody,
    OutageBody,
    PolitenessBody,
    ProblemBody,
    RateBody,
    RerunBody,
    ResultBody,
    RunBody,
    RunWaitBody,
    ScheduleBody,
    ShapeBody,
    SizeClassBody,
    SpendBody,
    StatsBody,
    SubmitBody,
    WaitBody,
    WebhookBody,
    WebhookStatusBody,
    WeekDaysBody,
    present,
)
from conveyor.service.waiting import Waits

ACTIVE, PAUSED = STATES = ("active", "paused")
"""The states of a schedule."""
PROBLEM_TYPE = "urn:conveyor:problem:"
"""The prefix of a problem's type; its code follows."""

_encoder = msgspec.json.Encoder()


def encode(body: msgspec.Struct) -> bytes:
    """Encode an answer as JSON, with a line feed behind it for the sake of terminals."""
    return _encoder.encode(body) + b"\n"


def job_body(
    view: JobView,
    outage: Outage | None = None,
    deliveries: Sequence[EventDelivery] = (),
    *,
    waits: Waits,
) -> JobBody:
    """Show a job on the wire, without its caller and its sealed key, and how its receiver did in
    the `deliveries`; `outage` and `waits` are as in `run_body`."""
    job, run = view.job, view.latest_run
    plan = None if job.scheduling is None else with_known_zones(job.scheduling)
    return JobBody(
        job_id=job.job_id,
        type="regular" if job.scheduling is None else "scheduled",
        status=job.status.value,
        format=job.format.value,
        zenrows_params=job.params,
        external_id=present(job.external_id),
        name=present(job.name),
        metadata=present(job.metadata),
        max_inflight=job.max_inflight,
        priority=job.priority,
        max_attempts=job.max_attempts,
        result_ttl_days=job.result_ttl_days,
        callback=CallbackBody(job.callback.task_token) if job.callback is not None else UNSET,
        webhook=webhook_body(job.webhook) if job.webhook is not None else UNSET,
        webhook_status=_webhook_status_body(deliveries) if deliveries else UNSET,
        politeness=UNSET if job.politeness is None else _politeness_body(job.politeness),
        schedule=UNSET if plan is None else schedule_body(plan),
        schedule_state=UNSET if plan is None else state_word(plan),
        next_scheduled_run=UNSET if plan is None else next_run(plan),
        latest_run=run_body(run, outage, waits=waits) if run is not None else UNSET,
        created_at=rfc3339(job.created_at),
        updated_at=rfc3339(job.updated_at),
    )


def _politeness_body(politeness: Politeness) -> PolitenessBody:
    return PolitenessBody(
        per_host=politeness.per_host or UNSET,
        per_host_rate=politeness.per_host_rate or UNSET,
        robots=politeness.robots,
    )


def webhook_body(webhook: Webhook) -> WebhookBody:
    """Show the webhook of a job."""
    return WebhookBody(
        url=webhook.url,
        signature=webhook.signature,
        events=[event.value for event in webhook.events],
    )


def _webhook_status_body(deliveries: Sequence[EventDelivery]) -> WebhookStatusBody:
    health = receiver_health(deliveries)
    return WebhookStatusBody(
        last_outcome=present(health.outcome or None),
        last_attempt_at=_instant(health.attempted_at),
        failing_since=_instant(health.failing_since),
        next_attempt_at=_instant(health.next_at),
    )


def delivery_body(delivery: EventDelivery) -> DeliveryBody:
    """Show a delivery as a row of the log."""
    return DeliveryBody(**_delivery_fields(delivery))


def logged_delivery_body(delivery: EventDelivery) -> LoggedDeliveryBody:
    """Show a delivery with its bytes and attempts."""
    return LoggedDeliveryBody(
        **_delivery_fields(delivery),
        body=delivery.body.decode(),
        attempts=[_attempt_body(attempt) for attempt in delivery.attempts],
    )


def _delivery_fields(delivery: EventDelivery) -> dict[str, Any]:
    last = delivery.attempts[-1] if delivery.attempts else None
    return {
        "delivery_id": delivery.delivery_id,
        "job_id": delivery.job_id,
        "run_id": delivery.run_id,
        "event_type": delivery.event_type,
        "status": delivery.status.value,
        "attempt_count": delivery.attempt_count,
        "last_outcome": present(last.outcome or None if last is not None else None),
        "last_attempt_at": _instant(0 if last is None else last.started_at),
        "next_attempt_at": _instant(delivery.due_at),
        "ladder": delivery.ladder,
        "replayed_at": _instant(delivery.replayed_at),
        "created_at": rfc3339(delivery.created_at),
        "updated_at": rfc3339(delivery.updated_at or delivery.created_at),
    }


def _attempt_body(attempt: DeliveryAttempt) -> DeliveryAttemptBody:
    return DeliveryAttemptBody(
        number=attempt.number,
        started_at=rfc3339(attempt.started_at),
        milliseconds=attempt.milliseconds,
        outcome=present(attempt.outcome or None),
        host=present(attempt.host or None),
        status=present(attempt.status),
        content_type=present(attempt.content_type or None),
        length=present(attempt.length),
        next_attempt_at=_instant(attempt.next_at),
        is_replay=attempt.is_replay,
        headers=attempt.headers,
    )


def _instant(milliseconds: int) -> str | UnsetType:
    return rfc3339(milliseconds) if milliseconds else UNSET


def schedule_body(plan: Scheduling) -> ScheduleBody:
    """Show a schedule on the wire."""
    rate = plan.schedule.rate
    return ScheduleBody(
        at=present(plan.schedule.at),
        rate=UNSET if rate is None else RateBody(rate.every, rate.unit),
        calendar=_calendar_body(plan.schedule.calendar),
        timezone=present(plan.schedule.timezone),
        overlap=plan.overlap.value,
    )


def _calendar_body(calendar: Calendar | None) -> CalendarBody | UnsetType:
    if calendar is None:
        return UNSET
    if calendar.weekdays:
        cadence = CadenceBody(weekly=WeekDaysBody([WEEKDAYS[day] for day in calendar.weekdays]))
    elif calendar.month_days:
        cadence = CadenceBody(monthly=MonthDaysBody(list(calendar.month_days)))
    else:
        cadence = CadenceBody(daily={})
    return CalendarBody([f"{hour:02}:00" for hour in calendar.hours], cadence)


def state_word(plan: Scheduling) -> str:
    """Return the state of a schedule as the wire calls it."""
    return PAUSED if plan.paused else ACTIVE


def next_run(plan: Scheduling) -> str | UnsetType:
    """Show the next fire of a schedule, if one follows."""
    return UNSET if plan.next_at is None else rfc3339(plan.next_at)


def run_body(run: Run, outage: Outage | None = None, *, waits: Waits) -> RunBody:
    """Show a run on the wire, the `outage` that it waits for if it has work, and why it waits, as
    `waits` tells."""
    wait = waits(run)
    failed = run.status is RunStatus.FAILED
    reason = run.failure_reason if failed and run.failure_reason in ACCOUNT_FAILURES else None
    return RunBody(
        run_id=run.run_id,
        job_id=run.job_id,
        run_sequence=run.run_sequence,
        status=run.status.value,
        trigger=run.trigger,
        stats=_stats_body(run.stats),
        last_batch_received=run.last_batch_received if run.run_sequence == 1 else UNSET,
        pause_state="paused" if run.paused and run.status in LIVE_RUN_STATES else UNSET,
        ingest_status=run.ingest.status.value if run.ingest is not None else UNSET,
        created_at=rfc3339(run.created_at),
        updated_at=rfc3339(run.updated_at),
        failure_reason=UNSET if reason is None else reason.value,
        failure_detail=present(run.failure_detail if failed else None),
        outage=_outage_body(outage) if outage is not None and _has_work(run) else UNSET,
        waiting=UNSET if wait is None else _run_wait_body(wait),
    )


def _run_wait_body(wait: RunWait) -> RunWaitBody:
    return RunWaitBody(
        reason=wait.reason.value,
        since=rfc3339(wait.since),
        until=UNSET if wait.until is None else rfc3339(wait.until),
        detail=wait.detail,
        others=[reason.value for reason in wait.others] or UNSET,
    )


def _has_work(run: Run) -> bool:
    return run.status is RunStatus.RUNNING and not run.paused


def _outage_body(outage: Outage) -> OutageBody:
    return OutageBody(
        shared=outage.shared.value,
        detail=outage.detail,
        since=rfc3339(outage.since),
        never_answered=UNSET if outage.was_heard else True,
    )


def submit_body(
    job: Job, run: Run | None, *, accepted: int, waits: Waits, remarks: Remarks = NO_REMARKS
) -> SubmitBody:
    """Build the answer to a submit."""
    return SubmitBody(
        job_id=job.job_id,
        status=job.status.value,
        latest_run=run_body(run, waits=waits) if run is not None else UNSET,
        accepted_tasks=accepted,
        webhook=webhook_body(job.webhook) if job.webhook is not None else UNSET,
        skipped_tasks=remarks.skipped or UNSET,
        invalid_tasks=remarks.invalid_tasks or UNSET,
        warnings=remarks.warnings or UNSET,
    )


def add_tasks_body(appended: Appended, remarks: Remarks, *, waits: Waits) -> AddTasksBody:
    """Build the answer to an addition of tasks."""
    return AddTasksBody(
        accepted_tasks=appended.accepted,
        job_status=appended.view.job.status.value,
        latest_run=run_body(made_run(appended.view), waits=waits),
        skipped_tasks=remarks.skipped or UNSET,
        invalid_tasks=remarks.invalid_tasks or UNSET,
        warnings=remarks.warnings or UNSET,
    )


def rerun_body(rerun: Rerun, *, waits: Waits) -> RerunBody:
    """Build the answer to a rerun."""
    return RerunBody(
        job_id=rerun.view.job.job_id,
        status=rerun.view.job.status.value,
        latest_run=run_body(made_run(rerun.view), waits=waits),
        rerun_of=rerun.rerun_of,
        retried_tasks=rerun.retried,
        inherited_tasks=rerun.inherited,
    )


def first_rerun_body(job: Job, run: Run, *, waits: Waits) -> RerunBody:
    """Build the answer to a rerun that made the first run of a scheduled job."""
    return RerunBody(
        job_id=job.job_id,
        status=job.status.value,
        latest_run=run_body(run, waits=waits),
        retried_tasks=run.stats.total,
        inherited_tasks=0,
    )


def made_run(view: JobView) -> Run:
    """Return the run that a write has just made or changed: the latest of its job."""
    if view.latest_run is None:
        raise ValueError(f"job {view.job.job_id} has no run right after a write to it")
    return view.latest_run


def wait_body(task: Task, run: Run, *, now: int) -> WaitBody | UnsetType:
    """Show why a task of a run waits, and until when."""
    reason = task.wait_at(now) if run.status in LIVE_RUN_STATES else None
    return UNSET if reason is None else WaitBody(reason.value, rfc3339(task.not_before))


def result_body(
    task: Task, *, expired: bool, result_url: str | None, waiting: WaitBody | UnsetType
) -> ResultBody:
    """Show a task as a row of a list of results."""
    spec = task.spec
    result = task.result
    return ResultBody(
        task_id=task.task_id,
        external_id=present(spec.external_id),
        run_id=task.run_id,
        url=spec.url,
        metadata=present(spec.metadata),
        method=spec.method if spec.method != "GET" else UNSET,
        status="expired" if expired else task.status.value,
        waiting=waiting,
        type=result.format.value if result is not None else UNSET,
        size=result.size if result is not None else UNSET,
        result_url=present(result_url),
        error=problem_body(task.error) if task.error is not None else UNSET,
        failure_group=present(task.failure_group),
        source_run_id=present(task.source_run_id),
        created_at=rfc3339(task.created_at),
        updated_at=rfc3339(task.updated_at),
    )


def history_body(events: list[Event], waiting: WaitBody | UnsetType) -> HistoryBody:
    """Build the history of a task."""
    return HistoryBody(
        [
            EventBody(
                started_at=rfc3339(event.started_at),
                ended_at=rfc3339(event.ended_at),
                attempt=max(event.attempt, 1),
                kind=event.kind.value,
                sent=UNSET if event.sent == 1 else event.sent,
                error=problem_body(event.error) if event.error is not None else UNSET,
                spend=_spend_body(event.spend),
            )
            for event in events
        ],
        waiting,
    )


def problem_body(problem: Problem) -> ProblemBody:
    """Show a stored problem, with a type that every client can read as a URL."""
    return ProblemBody(
        type=problem.type if _is_url(problem.type) else PROBLEM_TYPE + problem.code,
        title=problem.title,
        status=problem.status,
        detail=present(problem.detail),
        code=problem.code,
        instance=present(problem.instance),
    )


def _stats_body(stats: RunStats) -> StatsBody:
    return StatsBody(
        total=stats.total,
        completed=stats.completed,
        successful=stats.successful,
        failed=stats.failed,
        failure_reasons=stats.failure_reasons or UNSET,
        spend=_spend_body(stats.spend),
        inherited=stats.inherited or UNSET,
        shape=_shape_body(stats.shape),
    )


def _shape_body(shape: ResultShape) -> ShapeBody | UnsetType:
    if not any(shape.sizes):
        return UNSET
    classes = zip((0, *SIZE_BOUNDS), shape.sizes, strict=True)
    return ShapeBody([SizeClassBody(*one) for one in classes], dict(shape.types))


def failures_body(run_id: str, found: FailureGroups) -> FailuresBody:
    """Show the failure groups of a run, the largest first; what is in none of them as one more."""
    groups = [
        FailureGroupBody(
            group=group.group_id,
            count=group.count,
            reason=group.reason.value,
            code=group.code,
            status=group.status,
            detail=present(group.detail),
            first_at=rfc3339(group.first_at),
            last_at=rfc3339(group.last_at),
            task_ids=list(group.task_ids),
        )
        for group in found.groups
    ]
    if found.other:
        groups.append(FailureGroupBody(group=OTHER_GROUP, count=found.other))
    # Sorting is stable: groups of one size keep their order, and `other` stands behind them.
    groups.sort(key=lambda group: -group.count)
    return FailuresBody(run_id, found.failed, groups)


def _spend_body(spend: Spend) -> SpendBody:
    return SpendBody(spend.credits, spend.cost)


@lru_cache(maxsize=1_024)
def _is_url(text: str) -> bool:
    try:
        Url(text)
    except ValueError:
        return False
    return True
