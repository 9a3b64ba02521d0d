"""Decide what a failed scrape means for its task: a retry, a failure, or the end of its run; and
describe attempts."""

from __future__ import annotations

from math import ceil

from conveyor.domain.backoff import Backoff
from conveyor.domain.model import (
    Event,
    EventKind,
    Job,
    Problem,
    Spend,
    Task,
    TaskFailure,
    WaitReason,
)
from conveyor.domain.task_rules import Deferred, Failed, Released, Retry, Settlement, Succeeded
from conveyor.domain.text_rules import shorten
from conveyor.domain.urls import host_of
from conveyor.ports.blobs import BodyRefused, NoRoom
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import Postponed, ScrapeFailed, Success

_OUTCOMES = {
    Succeeded: "successful",
    Failed: "failed",
    Retry: "retry",
    Deferred: "deferred",
    Released: "released",
}
"""The outcome in the trace of an attempt, by the kind of its settlement."""
RECORDED = 32
"""Receives of a task whose refusals for load go into its history: a refusal that lasts for a day
would make the row outgrow every store."""
SPARED_PAUSE = 1.0
"""Seconds until a task that met an outage may be tried again; the circuit says when work goes
on."""
IDLE_SHARE = 0.25
"""Part of the deadline that the time counts for, at most, in which a task was due and nobody began
it. All of it would fail tasks after a day's pause at the first refusal; nothing of it would never
end a large run whose tasks are all refused."""


class RetryPolicy:
    """The retry rules of a deployment. All times in seconds."""

    def __init__(
        self, clock: Clock, *, base: float, cap: float, rate_limit_deadline: float
    ) -> None:
        self._clock = clock
        self._backoff = Backoff(base, cap)
        self._rate_limit_deadline = rate_limit_deadline

    def decide(
        self, failure: ScrapeFailed, task: Task, job: Job, *, event: Event, receives: int
    ) -> Failed | Retry | Deferred:
        """Decide what a scrape without a body means for its task.

        An attempt that counts is the last one if the job allows no more. One that does not count (a
        gateway's 429, a host's where a policy holds, a call that is postponed, something shared
        that is away) is bounded by a
        deadline instead, from the first of them in a row. There may be hundreds of these until
        then: those of later receives are not recorded, unless they cost something, nor are those
        that sent nothing.
        """
        now = self._clock.now()
        final = Failed(event, failure.problem, failure.failure)
        if not failure.retryable:
            return final
        if not isinstance(failure, Postponed) and not failure.is_spared and failure.burns_attempt:
            if event.attempt >= job.max_attempts:
                return final
            delay = self._delay(failure, event.attempt)
            is_asked = failure.retry_after >= delay
            waiting = WaitReason.RETRY_AFTER if is_asked else WaitReason.BACKOFF
            return Retry(event, now + int(delay * 1000), waiting=waiting)
        since = self._waits_since(failure, task, event.started_at)
        if isinstance(failure, Postponed) and failure.waiting is WaitReason.HOST_LIMIT:
            # A line within limits of our own is nobody's refusal, however long.
            until, waiting = self._put_off_until(failure, now)
            refused_since = since + until - now if task.waiting_since else 0
            return _put_off(event, until, waiting, refused_since, receives)
        is_late = self._is_late(since, now)
        if isinstance(failure, Postponed) or failure.is_spared:
            if is_late:
                return final
            return _put_off(event, *self._put_off_until(failure, now), since, receives)
        if is_late:
            return Failed(event, failure.problem, TaskFailure.RATE_LIMITED)
        delay, waiting = self._refused_for(failure, receives)
        return Retry(
            event,
            now + int(delay * 1000),
            burns_attempt=False,
            recorded=receives <= RECORDED or event.spend != Spend(),
            waiting=waiting,
            since=since,
        )

    def waits_for(self, settlement: Retry | Deferred) -> WaitReason | None:
        """Return the reason for which a task that was put off waits, for its worker: a host that
        refused it without an attempt is closed to all its tasks."""
        is_refusal = isinstance(settlement, Retry) and not settlement.burns_attempt
        if is_refusal and settlement.waiting is WaitReason.RETRY_AFTER:
            return WaitReason.HOST_RETRY_AFTER
        return settlement.waiting

    def pause(self, failure: ScrapeFailed, task: Task, call: int, *, began: int) -> float | None:
        """Return the seconds to wait after `call` calls that were refused for load, or None past
        the deadline. `began`: the moment at which the work on the task began."""
        if self._is_late(self._waits_since(failure, task, began), self._clock.now()):
            return None
        return self._delay(failure, call)

    def _refused_for(self, failure: ScrapeFailed, receives: int) -> tuple[float, WaitReason]:
        """Return the seconds until a task is due that was refused without an attempt, and why. A
        host that says for how long is closed to all its tasks, and needs no backoff of this one."""
        if failure.refusal is not None and failure.refusal.seconds is not None:
            return failure.retry_after, WaitReason.RETRY_AFTER
        # The host takes fewer calls now: no gateway is under load.
        is_host = failure.refusal is not None
        waiting = WaitReason.HOST_LIMIT if is_host else WaitReason.LOAD_REFUSAL
        return self._delay(failure, receives), waiting

    def _put_off_until(self, failure: ScrapeFailed, now: int) -> tuple[int, WaitReason]:
        """Return when a call that was not made, or met an outage, is due, and why not before."""
        if isinstance(failure, Postponed):
            # Due sooner, it would be postponed again.
            return now + ceil(failure.retry_after * 1000), failure.waiting
        spared_for = int(SPARED_PAUSE * (0.5 + self._clock.random()) * 1000)
        return now + spared_for, WaitReason.OUTAGE

    def _is_late(self, since: int, now: int) -> bool:
        return now - since >= self._rate_limit_deadline * 1000

    def _delay(self, failure: ScrapeFailed, step: int) -> float:
        return max(self._backoff.spread(step, self._clock.random()), failure.retry_after)

    def _waits_since(self, failure: ScrapeFailed, task: Task, began: int) -> int:
        """Return since when a task waits without an attempt: no pause of another task's making
        counts against it, nor the time in a queue before. Of the time since it was due, until it
        `began`, a part does: it may have been paused, or in line, or nobody may have been there."""
        now = self._clock.now()
        here = max(failure.waits_since, task.created_at) if failure.waits_since else now
        if not task.waiting_since:
            return here
        idle = began - max(task.not_before, task.waiting_since)
        spared = idle - int(IDLE_SHARE * self._rate_limit_deadline * 1000)
        return min(here, task.waiting_since + max(spared, 0))


def _put_off(
    event: Event, not_before: int, waiting: WaitReason, since: int, receives: int
) -> Retry | Deferred:
    """Put a task off; requests that went out go into the history."""
    if not event.sent:
        return Deferred(not_before, waiting, since)
    recorded = receives <= RECORDED
    return Retry(event, not_before, False, recorded, waiting, since)


def internal_failure() -> ScrapeFailed:
    """Return the failure of an unexpected error of Conveyor: an attempt that counts, and may be
    retried."""
    problem = Problem(
        code="internal", title="Internal error", status=500, detail="the attempt broke off"
    )
    return ScrapeFailed(problem, TaskFailure.OTHER, retryable=True)


def refused_body(refusal: BodyRefused) -> ScrapeFailed:
    """Return the failure of an attempt whose body the store does not take: it counts, and may be
    retried."""
    if not isinstance(refusal, NoRoom):
        return internal_failure()
    problem = Problem(
        code="no_room",
        title="the result store has no room for a body of this size",
        status=507,
        detail="smaller bodies still fit; free space where the results are kept",
    )
    return ScrapeFailed(problem, TaskFailure.OTHER, retryable=True)


def unreadable_key() -> ScrapeFailed:
    """Return the failure of a job whose API key cannot be unsealed, such as after the secret was
    replaced: only a new job helps."""
    problem = Problem(
        code="unauthenticated",
        title="API key not readable",
        status=401,
        detail="the job's API key was sealed with a secret that is no longer known",
    )
    return ScrapeFailed(problem, TaskFailure.AUTH_FAILED)


def last_attempt(settlement: Settlement | None) -> tuple[Event | None, str | None]:
    """Return the last attempt at a task that ended, and why the task failed, if it did."""
    if isinstance(settlement, Succeeded):
        return settlement.event, None
    if isinstance(settlement, Failed):
        return settlement.event, f"{settlement.failure}: {shorten(settlement.problem.code)}"
    return None, "interrupted"


def trace_attributes(job_id: str, task: Task, settlement: Settlement) -> dict[str, str | int]:
    """Describe an attempt that has been settled: ids, the verdict, the host, sizes."""
    attributes: dict[str, str | int] = {
        "job_id": job_id,
        "run_id": task.run_id,
        "task_id": task.task_id,
        "attempt": task.attempts + 1,
        "host": host_of(task.spec.url),
        "outcome": _OUTCOMES[type(settlement)],
    }
    if isinstance(settlement, Succeeded):
        attributes |= {"bytes": settlement.result.size, "sent": settlement.event.sent}
    if isinstance(settlement, Failed):
        code = shorten(settlement.problem.code)
        attributes |= {"reason": settlement.failure.value, "code": code}
    return attributes


_ATTEMPT = EventKind.ATTEMPT


def attempt_event(
    task: Task, ended: Success | ScrapeFailed, *, started_at: int, ended_at: int
) -> Event:
    """Return the event that an attempt leaves in its task's history."""
    return Event(
        kind=_ATTEMPT,
        attempt=task.attempts + 1,
        started_at=started_at,
        ended_at=ended_at,
        error=ended.problem if isinstance(ended, ScrapeFailed) else None,
        spend=ended.spend,
        sent=ended.sent,
    )
