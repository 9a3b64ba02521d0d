"""Claim, interruption and settlement, without any store."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.domain.model import (
    Event,
    EventKind,
    Format,
    Problem,
    RunStatus,
    Spend,
    StoredBody,
    TaskFailure,
    TaskStatus,
    WaitReason,
)
from conveyor.domain.result_shape import SIZE_CLASSES, ShapeCounter
from conveyor.domain.states import LIVE_RUN_STATES
from conveyor.domain.task_rules import (
    INTERRUPTED,
    TASK_TRANSITIONS,
    TERMINAL_TASK_STATES,
    Deferred,
    Failed,
    NotYet,
    Released,
    Retry,
    RunCounters,
    RunDelta,
    Settlement,
    Succeeded,
    TaskChange,
    claim_change,
    interrupted_delta,
    is_held,
    settlement_change,
)

PROPERTY = settings(database=None)
NOW = 1_000
EVENT = Event(
    kind=EventKind.ATTEMPT, attempt=1, started_at=NOW - 10, ended_at=NOW, spend=Spend(2, 0.5)
)
BODY = StoredBody(blob_key="key", size=1, content_type="text/html", format=Format.HTML)
PROBLEM = Problem(code="blocked", title="Blocked", status=502)
SETTLEMENTS: list[Settlement] = [
    Succeeded(EVENT, BODY),
    Failed(EVENT, PROBLEM, TaskFailure.BLOCKED),
    Retry(EVENT, NOW + 50),
    Retry(EVENT, NOW + 50, burns_attempt=False),
    Retry(EVENT, 0, False, recorded=False, waiting=WaitReason.LOAD_REFUSAL, since=NOW - 1),
    Released(),
    Deferred(NOW + 70, WaitReason.HOST_RETRY_AFTER, NOW - 2),
]


@dataclass
class Row:
    """A row as a store would keep it."""

    status: TaskStatus = TaskStatus.PENDING
    attempts: int = 0
    interruptions: int = 0
    claim_number: int = 0
    not_before: int = 0
    claimed_at: int = 0
    claimed_until: int = 0
    updated_at: int = 0
    events: list[Event] = field(default_factory=list)

    def apply(self, change: TaskChange) -> None:
        """Write a change."""
        assert change.status in {*TASK_TRANSITIONS[self.status], self.status}
        self.status = change.status
        self.attempts += change.attempts
        self.interruptions += change.interruptions
        self.not_before = self.not_before if change.not_before is None else change.not_before
        self.events += [change.event] if change.event is not None else []


def claim(row: Row, status: RunStatus = RunStatus.RUNNING, most: int = 2) -> object:
    return claim_change(row, run_status=status, now=NOW, max_interruptions=most)


# -- claims --


@pytest.mark.parametrize("not_before", [0, NOW])
def test_a_pending_row_that_is_due_is_taken_as_it_is(not_before: int) -> None:
    row = Row(not_before=not_before, attempts=1, interruptions=9)

    assert claim(row) == TaskChange(TaskStatus.PROCESSING)


def test_a_row_that_is_not_due_has_to_wait() -> None:
    assert claim(Row(not_before=NOW + 1)) == NotYet(NOW + 1, is_due_later=True)


@pytest.mark.parametrize(
    ("written", "wait", "held"),
    [
        (NOW, 60_000, 60_000),
        (NOW - 59_999, 60_000, 1),
        (NOW + 7_200_000, 60_000, 60_000),  # the clock was set back since
        (NOW + 7_200_000, 5, 10_000),
        (NOW + 7_200_000, -1, 10_000),
    ],
)
def test_a_row_is_held_no_longer_than_its_own_wait(written: int, wait: int, held: int) -> None:
    pending = Row(not_before=written + wait, updated_at=written)
    claimed = Row(TaskStatus.PROCESSING, claimed_at=written, claimed_until=written + wait)

    end = written + wait if held < written + wait - NOW else 0
    assert claim(pending) == NotYet(NOW + held, is_due_later=True, end=end)
    assert claim(claimed) == NotYet(NOW + held, end=end)


def test_a_live_claim_keeps_others_away_whenever_the_row_is_due() -> None:
    row = Row(TaskStatus.PROCESSING, claimed_until=NOW + 1, not_before=NOW + 50)

    assert claim(row) == NotYet(NOW + 1)


@pytest.mark.parametrize("status", sorted(TERMINAL_TASK_STATES))
def test_a_terminal_row_is_nobodys(status: TaskStatus) -> None:
    assert claim(Row(status)) is None


@pytest.mark.parametrize("status", list(RunStatus))
@pytest.mark.parametrize("row", [Row(), Row(TaskStatus.PROCESSING)], ids=["pending", "lapsed"])
def test_only_rows_of_a_live_run_are_claimed(status: RunStatus, row: Row) -> None:
    assert (claim(row, status) is not None) == (status in LIVE_RUN_STATES)


# -- interruptions --


def test_a_lapsed_claim_is_an_interruption_and_no_attempt() -> None:
    row = Row(TaskStatus.PROCESSING, attempts=3, claimed_at=NOW - 90, claimed_until=NOW)

    event = Event(
        kind=EventKind.INTERRUPTION,
        attempt=4,
        started_at=NOW - 90,
        ended_at=NOW,
        error=INTERRUPTED,
    )
    assert claim(row) == TaskChange(TaskStatus.PROCESSING, interruptions=1, event=event)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_one_interruption_too_many_fails_the_task(most: int) -> None:
    below = claim(Row(TaskStatus.PROCESSING, interruptions=most - 1), most=most)
    above = claim(Row(TaskStatus.PROCESSING, interruptions=most), most=most)

    assert isinstance(below, TaskChange)
    assert (below.status, below.error, below.delta) == (TaskStatus.PROCESSING, None, None)
    assert isinstance(above, TaskChange)
    assert (above.status, above.attempts, above.interruptions) == (TaskStatus.FAILED, 0, 1)
    assert (above.error, above.failure, above.not_before) == (INTERRUPTED, TaskFailure.OTHER, 0)
    failed = RunDelta(NOW, 0, 1, TaskFailure.OTHER, problem=INTERRUPTED)
    assert above.delta == interrupted_delta(NOW) == failed


# -- settlements --


def test_only_the_latest_claim_of_a_processing_row_holds_it() -> None:
    assert is_held(Row(TaskStatus.PROCESSING, claim_number=2), 2)
    assert not is_held(Row(TaskStatus.PROCESSING, claim_number=3), 2)
    for status in set(TaskStatus) - {TaskStatus.PROCESSING}:
        assert not is_held(Row(status, claim_number=2), 2)


def test_what_each_settlement_does() -> None:
    spent = RunDelta(NOW, spend=EVENT.spend)
    pending = TaskStatus.PENDING

    assert [settlement_change(one, now=NOW) for one in SETTLEMENTS] == [
        TaskChange(
            TaskStatus.SUCCESSFUL,
            attempts=1,
            event=EVENT,
            result=BODY,
            delta=RunDelta(NOW, successful=1, spend=EVENT.spend, result=BODY),
        ),
        TaskChange(
            TaskStatus.FAILED,
            attempts=1,
            event=EVENT,
            error=PROBLEM,
            failure=TaskFailure.BLOCKED,
            delta=RunDelta(
                NOW,
                failed=1,
                failure=TaskFailure.BLOCKED,
                spend=EVENT.spend,
                problem=PROBLEM,
            ),
        ),
        TaskChange(pending, 1, 0, NOW + 50, WaitReason.BACKOFF, 0, EVENT, delta=spent),
        TaskChange(pending, 0, 0, NOW + 50, WaitReason.BACKOFF, 0, EVENT, delta=spent),
        TaskChange(pending, 0, 0, 0, WaitReason.LOAD_REFUSAL, NOW - 1, delta=spent),
        TaskChange(pending),
        TaskChange(pending, 0, 0, NOW + 70, WaitReason.HOST_RETRY_AFTER, NOW - 2),
    ]


# -- counting --


def test_counters_take_a_change_and_never_go_back_in_time() -> None:
    counters = RunCounters(total=3, updated_at=NOW)
    counters.add(RunDelta(NOW - 5, failed=1, failure=TaskFailure.BLOCKED, spend=Spend(2, 0.5)))
    counters.add(RunDelta(NOW + 5, failed=1, failure=TaskFailure.BLOCKED))
    counters.add(RunDelta(NOW + 1, successful=1, spend=Spend(1, 0.25), result=BODY))

    assert counters == RunCounters(
        total=3,
        updated_at=NOW + 5,
        successful=1,
        failed=2,
        failure_reasons={TaskFailure.BLOCKED: 2},
        credits=3,
        cost=0.75,
        shape=ShapeCounter([0, 1, *[0] * (SIZE_CLASSES - 2)], {"text/html": 1}),
    )


@pytest.mark.parametrize(
    ("status", "ended", "job_closed", "ingesting", "after"),
    [
        ("running", 2, True, False, "running"),
        ("running", 3, True, False, "completed"),
        ("running", 3, False, False, "pending"),
        ("running", 3, True, True, "running"),
        ("pending", 2, True, False, "running"),
        ("stopped", 3, True, False, "stopped"),
        ("deleted", 3, True, False, "deleted"),
    ],
)
def test_the_status_of_a_live_run_follows_its_counters(
    status: str, ended: int, job_closed: bool, ingesting: bool, after: str
) -> None:
    counters = RunCounters(total=3, updated_at=0, successful=ended - 1, failed=1)

    found = counters.status_after(RunStatus(status), job_closed=job_closed, ingesting=ingesting)

    assert found is RunStatus(after)


# -- all together --

STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 60), st.sampled_from([None, *SETTLEMENTS])),
    max_size=60,
)


@pytest.mark.guarantee("G4")
@PROPERTY
@given(steps=STEPS, most=st.integers(0, 3))
def test_counters_agree_with_the_rows_whatever_happens(
    steps: list[tuple[int, int, Settlement | None]], most: int
) -> None:
    """Three tasks are claimed (None) and settled at random; clocks go on, claims lapse."""
    rows = [Row(), Row(), Row()]
    counters = RunCounters(total=len(rows), updated_at=0)
    run, now = RunStatus.RUNNING, 0
    for index, pause, settlement in steps:
        row, now = rows[index], now + pause
        if settlement is None:
            change = claim_change(row, run_status=run, now=now, max_interruptions=most)
        elif is_held(row, row.claim_number):
            change = settlement_change(settlement, now=now)
        else:
            continue
        if not isinstance(change, TaskChange):
            assert (
                run not in LIVE_RUN_STATES
                or row.status is not TaskStatus.PENDING
                or (row.not_before > now)
            )
            continue
        row.apply(change)
        if row.status is TaskStatus.PROCESSING:
            row.claim_number += 1
            row.claimed_at, row.claimed_until = now, now + 30
        if change.delta is not None:
            counters.add(change.delta)
            run = counters.status_after(run, job_closed=True, ingesting=False)

    events = [event for row in rows for event in row.events]
    lapsed = [event for event in events if event.kind is EventKind.INTERRUPTION]
    ended = [row for row in rows if row.status in TERMINAL_TASK_STATES]
    assert counters.successful == sum(row.status is TaskStatus.SUCCESSFUL for row in rows)
    assert counters.failed == sum(row.status is TaskStatus.FAILED for row in rows)
    assert sum(counters.failure_reasons.values()) == counters.failed
    assert (run is RunStatus.COMPLETED) == (len(ended) == len(rows))
    assert len(lapsed) == sum(row.interruptions for row in rows)
    assert sum(row.attempts for row in rows) <= len(events) - len(lapsed)
    assert all(row.interruptions <= most + 1 for row in rows)
