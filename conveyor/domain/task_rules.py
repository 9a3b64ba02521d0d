"""The rules of a task's row: who may claim it, what a lapsed claim does to it, and what a
settlement does to it and to the counters of its run.

A `TaskChange` says what a rule does, relative to the row, so that it can be written with or without
reading the row first. SQLite and the simulation write the change; DynamoDB writes the same change
under a condition that repeats what the rule looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from conveyor.domain.model import (
    Event,
    EventKind,
    Problem,
    RunStats,
    RunStatus,
    Spend,
    StoredBody,
    TaskFailure,
    TaskStatus,
    WaitReason,
)
from conveyor.domain.result_shape import ResultShape, ShapeCounter
from conveyor.domain.states import LIVE_RUN_STATES, live_run_status

TASK_TRANSITIONS: dict[TaskStatus, frozenset[TaskStatus]] = {
    TaskStatus.PENDING: frozenset({TaskStatus.PROCESSING}),
    TaskStatus.PROCESSING: frozenset(
        {TaskStatus.PENDING, TaskStatus.SUCCESSFUL, TaskStatus.FAILED}
    ),
    TaskStatus.SUCCESSFUL: frozenset(),
    TaskStatus.FAILED: frozenset(),
}
"""The states that may follow each state. A lapsed claim returns its task to pending, whether or not
a store writes that down before the next claim."""

TERMINAL_TASK_STATES = frozenset(
    status for status, following in TASK_TRANSITIONS.items() if not following
)
"""States that a task never leaves."""

INTERRUPTED = Problem(
    code="interrupted",
    title="Interrupted",
    status=503,
    detail="the worker that held the task was lost before it had finished",
)


# -- settlements --


class Succeeded(msgspec.Struct, frozen=True):
    """The body is stored; the task ends successful."""

    event: Event
    result: StoredBody


class Failed(msgspec.Struct, frozen=True):
    """The task ends failed, for the reason given."""

    event: Event
    problem: Problem
    failure: TaskFailure


class Retry(msgspec.Struct, frozen=True):
    """Back to pending until `not_before`; `burns_attempt` tells whether a try was used up, and
    `recorded` whether the event stays in the history. One that does not has cost nothing. `since`
    is when the waits without an attempt began; 0 ends them."""

    event: Event
    not_before: int
    burns_attempt: bool = True
    recorded: bool = True
    waiting: WaitReason = WaitReason.BACKOFF
    since: int = 0


class Released(msgspec.Struct, frozen=True):
    """Back to pending as if never claimed: no event, no attempt, no interruption."""


class Deferred(msgspec.Struct, frozen=True):
    """Back to pending until `not_before`, else as if never claimed: no call was made. `since` is
    when the waits without an attempt began."""

    not_before: int
    waiting: WaitReason
    since: int = 0


Settlement = Succeeded | Failed | Retry | Released | Deferred


# -- what a rule does --


class RunDelta(msgspec.Struct, frozen=True, gc=False):
    """The addition of one change of a task to the counters of its run, at `now`. `result` is the
    body that a success kept, `problem` what a failure ended with."""

    now: int
    successful: int = 0
    failed: int = 0
    failure: TaskFailure | None = None
    spend: Spend = Spend()
    result: StoredBody | None = None
    problem: Problem | None = None

    @property
    def ends_task(self) -> bool:
        """True if the change ended a task."""
        return self.successful + self.failed > 0


class TaskChange(msgspec.Struct, frozen=True, gc=False):
    """The change of a row by a claim or a settlement.

    `attempts` and `interruptions` are added to those of the row; a `not_before` of None leaves the
    row's as it is. `waiting` is set with a `not_before` ahead, and `waiting_since` with it. `event`
    goes to the end of the history, and `result`, `error` and `failure` are written with it. `delta`
    goes to the run; None changes nothing there.
    """

    status: TaskStatus
    attempts: int = 0
    interruptions: int = 0
    not_before: int | None = None
    waiting: WaitReason | None = None
    waiting_since: int = 0
    event: Event | None = None
    result: StoredBody | None = None
    error: Problem | None = None
    failure: TaskFailure | None = None
    delta: RunDelta | None = None


class NotYet(msgspec.Struct, frozen=True, gc=False):
    """The row cannot be claimed; it is to be looked at again at `until`, or as late as at its `end`
    once that was done in vain: they differ where a clock was set back. `is_due_later`: it waits for
    that, and nobody has claimed it."""

    until: int
    is_due_later: bool = False
    end: int = 0


# -- the rules --


class HeldRow(Protocol):
    """The part of a row by which the rules know its owner."""

    @property
    def status(self) -> TaskStatus: ...

    @property
    def claim_number(self) -> int: ...


class ClaimableRow(Protocol):
    """The part of a row by which the rules decide on a claim; times in milliseconds since 1970."""

    @property
    def status(self) -> TaskStatus: ...

    @property
    def attempts(self) -> int: ...

    @property
    def interruptions(self) -> int: ...

    @property
    def not_before(self) -> int: ...

    @property
    def claimed_at(self) -> int: ...

    @property
    def claimed_until(self) -> int: ...

    @property
    def updated_at(self) -> int: ...


LEAST_HOLD = 10_000
"""Milliseconds for which a row may always be held, so that a clock that was set back does not have
it asked for too often."""

# Each task asks several times, and to look into an enumeration is slow before Python 3.12.
_PENDING, _PROCESSING, _SUCCESSFUL = (
    TaskStatus.PENDING,
    TaskStatus.PROCESSING,
    TaskStatus.SUCCESSFUL,
)
_RUNNING = RunStatus.RUNNING

_TAKEN = TaskChange(_PROCESSING)


def claim_change(
    row: ClaimableRow, *, run_status: RunStatus, now: int, max_interruptions: int
) -> TaskChange | NotYet | None:
    """Decide on a claim of a row.

    The change makes the row processing, or failed where a lapsed claim was one too many. NotYet: it
    is somebody else's, or not due. None: it is terminal, or its run is not live.
    """
    status = row.status
    if run_status not in LIVE_RUN_STATES or status in TERMINAL_TASK_STATES:
        return None
    if status is _PENDING:
        if row.not_before <= now:
            return _TAKEN
        return _held(row.not_before, since=row.updated_at, now=now, is_due_later=True)
    if row.claimed_until > now:
        return _held(row.claimed_until, since=row.claimed_at, now=now, is_due_later=False)
    return interruption_change(row, now=now, max_interruptions=max_interruptions)


def _held(end: int, *, since: int, now: int, is_due_later: bool) -> NotYet:
    """Decide when to look again at a row that is held from `since` to `end`: no later than it was
    ever to be held, because a clock that was set back may be right again by then."""
    longest = now + max(end - since, LEAST_HOLD)
    return NotYet(min(end, longest), is_due_later, end if end > longest else 0)


def interruption_change(row: ClaimableRow, *, now: int, max_interruptions: int) -> TaskChange:
    """Take over a row whose claim has lapsed, or fail it after more than `max_interruptions`.

    An interruption uses up no attempt, and carries the number of the next one.
    """
    event = Event(
        kind=EventKind.INTERRUPTION,
        attempt=row.attempts + 1,
        started_at=row.claimed_at,
        ended_at=now,
        error=INTERRUPTED,
    )
    if row.interruptions < max_interruptions:
        return TaskChange(TaskStatus.PROCESSING, interruptions=1, event=event)
    return TaskChange(
        TaskStatus.FAILED,
        interruptions=1,
        not_before=0,
        event=event,
        error=INTERRUPTED,
        failure=TaskFailure.OTHER,
        delta=interrupted_delta(now),
    )


def interrupted_delta(now: int) -> RunDelta:
    """Count a task that failed because its claims lapsed too often."""
    return RunDelta(now, failed=1, failure=TaskFailure.OTHER, problem=INTERRUPTED)


def is_held(row: HeldRow, claim_number: int) -> bool:
    """Tell whether a claim is still on a row: only its holder may renew or settle."""
    return row.status is _PROCESSING and row.claim_number == claim_number


def settlement_change(settlement: Settlement, *, now: int) -> TaskChange:
    """Decide what a settlement does to a row that `is_held`."""
    if isinstance(settlement, Succeeded):
        event = settlement.event
        return TaskChange(
            _SUCCESSFUL,
            attempts=1,
            event=event,
            result=settlement.result,
            delta=RunDelta(now, successful=1, spend=event.spend, result=settlement.result),
        )
    if isinstance(settlement, Failed):
        event, failure = settlement.event, settlement.failure
        return TaskChange(
            TaskStatus.FAILED,
            attempts=1,
            event=event,
            error=settlement.problem,
            failure=failure,
            delta=RunDelta(
                now,
                failed=1,
                failure=failure,
                spend=event.spend,
                problem=settlement.problem,
            ),
        )
    if isinstance(settlement, Released):
        return TaskChange(TaskStatus.PENDING)
    if isinstance(settlement, Deferred):
        return TaskChange(
            TaskStatus.PENDING,
            not_before=settlement.not_before,
            waiting=settlement.waiting,
            waiting_since=settlement.since,
        )
    return TaskChange(
        TaskStatus.PENDING,
        attempts=int(settlement.burns_attempt),
        not_before=settlement.not_before,
        waiting=settlement.waiting,
        waiting_since=settlement.since,
        event=settlement.event if settlement.recorded else None,
        delta=RunDelta(now, spend=settlement.event.spend),
    )


# -- counting --


@dataclass(slots=True, kw_only=True)
class RunCounters:
    """The counters of a run, while a store adds to them; `updated_at` never goes back."""

    total: int
    updated_at: int
    successful: int = 0
    failed: int = 0
    failure_reasons: dict[str, int] = field(default_factory=dict)
    credits: int = 0
    cost: float = 0.0
    shape: ShapeCounter = field(default_factory=lambda: ShapeCounter.of(ResultShape()))

    def add(self, delta: RunDelta) -> None:
        """Account for one change of a task."""
        spend = delta.spend
        self.credits += spend.credits
        self.cost += spend.cost
        if delta.now > self.updated_at:
            self.updated_at = delta.now
        self.successful += delta.successful
        self.failed += delta.failed
        if delta.failure is not None:
            self.failure_reasons[delta.failure] = self.failure_reasons.get(delta.failure, 0) + 1
        if delta.result is not None:
            self.shape.add(delta.result.size, delta.result.content_type)

    def touch(self, now: int) -> None:
        """Account for a write at `now`, by the writer's clock."""
        if now > self.updated_at:
            self.updated_at = now

    def status_after(self, status: RunStatus, *, job_closed: bool, ingesting: bool) -> RunStatus:
        """Let the status of a run follow its counters, while the run is live."""
        if status is _RUNNING and self.successful + self.failed < self.total:
            return status  # what the rule below says too, without a record for every task
        if status not in LIVE_RUN_STATES:
            return status
        stats = RunStats(total=self.total, successful=self.successful, failed=self.failed)
        return live_run_status(stats, job_closed=job_closed, ingesting=ingesting)
