"""Decide what a failed scrape means for its task: a retry, a failure, or the end of its run."""

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
from conveyor.domain.task_rules import Deferred, Failed, Retry
from conveyor.ports.blobs import BodyRefused, NoRoom
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import Postponed, ScrapeFailed

RECORDED = 32
"""Receives of a task whose refusals for load go into its history: a refusal that lasts for a day
would make the row outgrow every store."""
SPARED_PAUSE = 1.0
"""Seconds until a task that met an outage may be tried again; the circuit says when work goes
on."""


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
        gateway's 429, a call that is postponed, something shared that is away) is bounded by a
        deadline instead, from the task's creation. There may be hundreds of these until then: those
        of later receives are not recorded, unless they cost something, nor are those that sent
        nothing.
        """
        now = self._clock.now()
        final = Failed(event, failure.problem, failure.failure)
        if not failure.retryable:
            return final
        if isinstance(failure, Postponed):
            return final if self._too_late(task, now) else _postponed(failure, event, now, receives)
        if failure.is_spared:
            if self._too_late(task, now):
                return final
            return _spared(failure, event, now + self._spared_for(), receives)
        if failure.burns_attempt:
            if event.attempt >= job.max_attempts:
                return final
            step = event.attempt
        else:
            if self._too_late(task, now):
                return Failed(event, failure.problem, TaskFailure.RATE_LIMITED)
            step = receives
        delay = self._delay(failure, step)
        recorded = failure.burns_attempt or receives <= RECORDED or event.spend != Spend()
        waiting = WaitReason.LOAD_REFUSAL
        if failure.burns_attempt:
            is_asked = failure.retry_after >= delay
            waiting = WaitReason.RETRY_AFTER if is_asked else WaitReason.BACKOFF
        return Retry(event, now + int(delay * 1000), failure.burns_attempt, recorded, waiting)

    def pause(self, failure: ScrapeFailed, task: Task, call: int) -> float | None:
        """Return the seconds to wait after `call` calls that were refused for load, or None past
        the deadline."""
        if self._too_late(task, self._clock.now()):
            return None
        return self._delay(failure, call)

    def _spared_for(self) -> int:
        return int(SPARED_PAUSE * (0.5 + self._clock.random()) * 1000)

    def _too_late(self, task: Task, now: int) -> bool:
        return now - task.created_at >= self._rate_limit_deadline * 1000

    def _delay(self, failure: ScrapeFailed, step: int) -> float:
        return max(self._backoff.spread(step, self._clock.random()), failure.retry_after)


def _postponed(failure: Postponed, event: Event, now: int, receives: int) -> Retry | Deferred:
    """Put a task off; redirects that led to a postponed call go into the history."""
    not_before = now + ceil(failure.retry_after * 1000)  # sooner, it would be postponed again
    if not failure.sent:
        return Deferred(not_before, failure.waiting)
    recorded = receives <= RECORDED
    return Retry(event, not_before, burns_attempt=False, recorded=recorded, waiting=failure.waiting)


def _spared(
    failure: ScrapeFailed, event: Event, not_before: int, receives: int
) -> Retry | Deferred:
    """Put a task off that met an outage; a request that went out goes into the history."""
    if not failure.sent:
        return Deferred(not_before, WaitReason.OUTAGE)
    recorded = receives <= RECORDED
    return Retry(
        event, not_before, burns_attempt=False, recorded=recorded, waiting=WaitReason.OUTAGE
    )


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


def attempt_event(
    task: Task, *, started_at: int, ended_at: int, failure: ScrapeFailed | None = None
) -> Event:
    """Return the event that an attempt leaves in its task's history."""
    if failure is None:
        return Event(
            kind=EventKind.ATTEMPT,
            attempt=task.attempts + 1,
            started_at=started_at,
            ended_at=ended_at,
        )
    return Event(
        kind=EventKind.ATTEMPT,
        attempt=task.attempts + 1,
        started_at=started_at,
        ended_at=ended_at,
        error=failure.problem,
        spend=failure.spend,
        sent=failure.sent,
    )
