"""Transition tables of jobs and runs. `task_rules` has the table of tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conveyor.domain.model import JobStatus, RunStatus

if TYPE_CHECKING:
    from conveyor.domain.model import RunStats

JOB_TRANSITIONS: dict[JobStatus, frozenset[JobStatus]] = {
    JobStatus.OPEN: frozenset({JobStatus.CLOSED, JobStatus.DELETED}),
    JobStatus.CLOSED: frozenset({JobStatus.DELETED}),
    JobStatus.DELETED: frozenset(),
}

RUN_TRANSITIONS: dict[RunStatus, frozenset[RunStatus]] = {
    RunStatus.RUNNING: frozenset(
        {
            RunStatus.PENDING,
            RunStatus.COMPLETED,
            RunStatus.STOPPED,
            RunStatus.FAILED,
            RunStatus.DELETED,
        }
    ),
    RunStatus.PENDING: frozenset(
        {
            RunStatus.RUNNING,
            RunStatus.COMPLETED,
            RunStatus.STOPPED,
            RunStatus.FAILED,
            RunStatus.DELETED,
        }
    ),
    RunStatus.COMPLETED: frozenset({RunStatus.DELETED}),
    RunStatus.STOPPED: frozenset({RunStatus.DELETED}),
    RunStatus.FAILED: frozenset({RunStatus.DELETED}),
    RunStatus.DELETED: frozenset(),
}

LIVE_RUN_STATES = frozenset(
    status for status, following in RUN_TRANSITIONS.items() if RunStatus.COMPLETED in following
)
"""States in which a run may still work: those that it may yet complete from."""


def live_run_status(stats: RunStats, *, job_closed: bool, ingesting: bool = False) -> RunStatus:
    """Derive the status of a live run from its counters.

    `job_closed` says that no task can come any more, `ingesting` that rows of the total are still
    being written. Every writer that may be the last one (of a settled task, a close, a last batch)
    decides with this function on the counters that its own write returned, so that two crossing
    writers never leave a run hanging.
    """
    if ingesting or stats.completed < stats.total:
        return RunStatus.RUNNING
    return RunStatus.COMPLETED if job_closed else RunStatus.PENDING
