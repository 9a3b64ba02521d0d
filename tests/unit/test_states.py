"""The transition tables: forward only."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.domain.model import JobStatus, RunStats, RunStatus, TaskStatus
from conveyor.domain.states import (
    JOB_TRANSITIONS,
    LIVE_RUN_STATES,
    RUN_TRANSITIONS,
    live_run_status,
)
from conveyor.domain.task_rules import TASK_TRANSITIONS, TERMINAL_TASK_STATES

PROPERTY = settings(database=None)
TABLES: list[tuple[type[StrEnum], Mapping[Any, frozenset[Any]]]] = [
    (JobStatus, JOB_TRANSITIONS),
    (RunStatus, RUN_TRANSITIONS),
    (TaskStatus, TASK_TRANSITIONS),
]


def reachable(table: Mapping[Any, frozenset[Any]], start: Any) -> set[Any]:
    found: set[Any] = set()
    frontier = set(table[start])
    while frontier:
        state = frontier.pop()
        found.add(state)
        frontier |= table[state] - found
    return found


@pytest.mark.parametrize(("states", "table"), TABLES)
def test_every_state_has_a_row_and_none_follows_itself(
    states: type[StrEnum], table: Mapping[Any, frozenset[Any]]
) -> None:
    assert set(table) == set(states)
    assert all(state not in following for state, following in table.items())


def test_jobs_only_move_forward() -> None:
    assert reachable(JOB_TRANSITIONS, JobStatus.OPEN) == {JobStatus.CLOSED, JobStatus.DELETED}
    assert reachable(JOB_TRANSITIONS, JobStatus.CLOSED) == {JobStatus.DELETED}
    assert reachable(JOB_TRANSITIONS, JobStatus.DELETED) == set()


def test_a_run_that_ended_never_lives_again() -> None:
    for state in set(RunStatus) - LIVE_RUN_STATES:
        assert reachable(RUN_TRANSITIONS, state) <= {RunStatus.DELETED}
    assert {RunStatus.RUNNING, RunStatus.PENDING} == LIVE_RUN_STATES
    assert set(RunStatus) - LIVE_RUN_STATES == {
        RunStatus.COMPLETED,
        RunStatus.STOPPED,
        RunStatus.FAILED,
        RunStatus.DELETED,
    }
    for state in LIVE_RUN_STATES:
        assert RUN_TRANSITIONS[state] == set(RunStatus) - {state}


def test_a_task_that_ended_never_moves() -> None:
    assert {TaskStatus.SUCCESSFUL, TaskStatus.FAILED} == TERMINAL_TASK_STATES
    assert TASK_TRANSITIONS[TaskStatus.PENDING] == {TaskStatus.PROCESSING}
    for state in TERMINAL_TASK_STATES:
        assert state in reachable(TASK_TRANSITIONS, TaskStatus.PENDING)


@pytest.mark.parametrize(
    ("total", "successful", "failed", "job_closed", "expected"),
    [
        (3, 1, 1, True, RunStatus.RUNNING),
        (3, 1, 1, False, RunStatus.RUNNING),
        (3, 2, 1, True, RunStatus.COMPLETED),
        (3, 0, 3, True, RunStatus.COMPLETED),
        (3, 2, 1, False, RunStatus.PENDING),
        (0, 0, 0, False, RunStatus.PENDING),
        (0, 0, 0, True, RunStatus.COMPLETED),
    ],
)
def test_where_a_live_run_stands(
    total: int, successful: int, failed: int, job_closed: bool, expected: RunStatus
) -> None:
    stats = RunStats(total=total, successful=successful, failed=failed)
    assert live_run_status(stats, job_closed=job_closed) is expected


@pytest.mark.guarantee("G4")
@PROPERTY
@given(
    ends=st.lists(st.booleans(), max_size=30),
    more=st.integers(0, 5),
    job_closed=st.booleans(),
)
def test_a_run_ends_exactly_when_nothing_can_come(
    ends: list[bool], more: int, job_closed: bool
) -> None:
    stats = RunStats(total=len(ends) + more, successful=sum(ends), failed=len(ends) - sum(ends))
    ended = live_run_status(stats, job_closed=job_closed) is RunStatus.COMPLETED
    assert ended == (job_closed and more == 0)
