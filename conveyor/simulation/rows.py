"""The task rows and runs of a simulation, in memory: the rules of claiming and settling.

One object serves every simulated process. Nothing interrupts its methods; the ports over it add the
latency of calls.
"""

from __future__ import annotations

from collections.abc import Callable

from conveyor.domain.interruptions import INTERRUPTED, interruption
from conveyor.domain.model import (
    DispatchableRun,
    Event,
    Job,
    NewTask,
    Problem,
    Run,
    RunFailure,
    RunStats,
    RunStatus,
    Spend,
    StoredBody,
    Task,
    TaskFailure,
    TaskSpec,
    TaskStatus,
)
from conveyor.domain.states import LIVE_RUN_STATES
from conveyor.ports.tasks import (
    Claim,
    Claimed,
    ClaimedElsewhere,
    Failed,
    NotClaimable,
    Released,
    Retry,
    Settled,
    Settlement,
    Succeeded,
)

_GONE = NotClaimable()


class Row:
    """One task. `claimed` is true while a claim, live or lapsed, is on it; `ended` is None until
    the task is terminal. `endings` counts its ends: never more than one."""

    __slots__ = (
        "attempts",
        "claim_number",
        "claimed",
        "claimed_at",
        "claimed_until",
        "created_at",
        "ended",
        "endings",
        "error",
        "events",
        "failure",
        "index",
        "interruptions",
        "not_before",
        "result",
        "spec",
        "task_id",
        "updated_at",
        "worker",
    )

    def __init__(self, task: NewTask, now: int) -> None:
        self.index = task.index
        self.task_id = task.task_id
        self.spec: TaskSpec = task.spec
        self.created_at = self.updated_at = now
        self.attempts = self.interruptions = self.claim_number = 0
        self.claimed = False
        self.claimed_at = self.claimed_until = self.not_before = 0
        self.worker = ""
        self.ended: TaskStatus | None = None
        self.endings = 0
        self.events: list[Event] = []
        self.result: StoredBody | None = None
        self.error: Problem | None = None
        self.failure: TaskFailure | None = None

    def as_task(self, run_id: str) -> Task:
        """Return the row as readers see it."""
        pending = TaskStatus.PROCESSING if self.claimed else TaskStatus.PENDING
        return Task(
            run_id=run_id,
            task_id=self.task_id,
            index=self.index,
            spec=self.spec,
            status=self.ended or pending,
            created_at=self.created_at,
            updated_at=max(self.updated_at, self.claimed_at if self.claimed else 0),
            attempts=self.attempts,
            interruptions=self.interruptions,
            claim_number=self.claim_number,
            claimed_until=self.claimed_until if self.claimed else 0,
            not_before=self.not_before,
            result=self.result,
            error=self.error,
            failure=self.failure,
        )

    def end(self, status: TaskStatus) -> None:
        """Make the task terminal."""
        self.ended = status
        self.endings += 1


class RunRows:
    """One run of a closed job: its rows by task id, its counters and its status."""

    __slots__ = (
        "changed_at",
        "cost",
        "credits",
        "failed",
        "failure_detail",
        "failure_reason",
        "failure_reasons",
        "job",
        "moved",
        "paused",
        "rows",
        "run",
        "status",
        "successful",
        "updated_at",
    )

    def __init__(
        self, job: Job, run: Run, rows: dict[str, Row], moved: Callable[[RunRows], None]
    ) -> None:
        self.job = job
        self.run = run
        self.rows = rows
        self.moved = moved
        self.status = run.status
        self.paused = run.paused
        self.updated_at = self.changed_at = run.updated_at
        self.successful = self.failed = self.credits = 0
        self.cost = 0.0
        self.failure_reasons: dict[str, int] = {}
        self.failure_reason: RunFailure | None = None
        self.failure_detail: str | None = None

    @property
    def live(self) -> bool:
        """Return whether its tasks may still be claimed."""
        return self.status in LIVE_RUN_STATES

    def dispatchable(self) -> DispatchableRun | None:
        """Return the dispatcher's view of the run, if it may have work."""
        if self.status is not RunStatus.RUNNING or self.paused:
            return None
        return DispatchableRun(
            run_id=self.run.run_id,
            job_id=self.job.job_id,
            priority=self.job.priority,
            max_inflight=self.job.max_inflight,
            created_at=self.run.created_at,
        )

    def as_run(self) -> Run:
        """Return the run as readers see it."""
        run = self.run
        return Run(
            run_id=run.run_id,
            job_id=run.job_id,
            run_sequence=run.run_sequence,
            status=self.status,
            created_at=run.created_at,
            updated_at=self.updated_at,
            paused=self.paused,
            last_batch_received=True,
            next_index=len(self.rows),
            stats=RunStats(
                total=len(self.rows),
                successful=self.successful,
                failed=self.failed,
                failure_reasons=dict(self.failure_reasons),
                spend=Spend(self.credits, self.cost),
            ),
            failure_reason=self.failure_reason,
            failure_detail=self.failure_detail,
        )

    def move(self, status: RunStatus, now: int) -> bool:
        """End a live run; return False if it has ended already."""
        if not self.live:
            return False
        self.status = status
        self.changed(now)
        self.moved(self)
        return True

    def pause(self, now: int, *, paused: bool) -> bool:
        """Set or clear the pause of a live run; return False if it has ended."""
        if self.live and self.paused is not paused:
            self.paused = paused
            self.changed(now)
        return self.live

    def changed(self, now: int) -> None:
        """Record a change of status or pause at `now`, by the writer's clock."""
        self.changed_at = max(self.changed_at, now)
        self.touch(now)

    def touch(self, now: int) -> None:
        """Record a write at `now`, by the writer's clock."""
        if now > self.updated_at:
            self.updated_at = now

    def claim(
        self, task_id: str, *, worker: str, now: int, until: int, max_interruptions: int
    ) -> Claim:
        """Claim a row that is pending, or whose claim has lapsed."""
        row = self.rows.get(task_id)
        if row is None or row.ended is not None or not self.live:
            return _GONE
        if row.claimed:
            if row.claimed_until > now:
                return ClaimedElsewhere(row.claimed_until)
            if self._interrupt(row, now, max_interruptions):
                return NotClaimable(self.status)
        elif row.not_before > now:
            return ClaimedElsewhere(row.not_before)
        row.claimed = True
        row.claim_number += 1
        row.claimed_at = now
        row.claimed_until = until
        row.worker = worker
        return Claimed(
            Task(
                run_id=self.run.run_id,
                task_id=task_id,
                index=row.index,
                spec=row.spec,
                status=TaskStatus.PROCESSING,
                created_at=row.created_at,
                updated_at=now,
                attempts=row.attempts,
                interruptions=row.interruptions,
                claim_number=row.claim_number,
                claimed_until=until,
                not_before=row.not_before,
            )
        )

    def _interrupt(self, row: Row, now: int, most: int) -> bool:
        """Record a lapsed claim; return True if one too many has ended the task."""
        row.interruptions += 1
        row.updated_at = now
        event = interruption(attempts=row.attempts, claimed_at=row.claimed_at, now=now)
        row.events.append(event)
        if row.interruptions <= most:
            return False
        row.claimed = False
        row.not_before = 0
        row.error, row.failure = INTERRUPTED, TaskFailure.OTHER
        self._fail(row, TaskFailure.OTHER, now)
        return True

    def release(self, task_id: str, *, worker: str) -> None:
        """Undo a claim made by `worker`."""
        row = self.rows.get(task_id)
        if row is not None and row.claimed and row.worker == worker:
            row.claimed = False
            row.claim_number -= 1

    def renew(self, task_id: str, claim_number: int, until: int) -> None:
        """Extend a claim, if it is still its holder's."""
        row = self.rows.get(task_id)
        if row is not None and row.claimed and row.claim_number == claim_number:
            row.claimed_until = max(row.claimed_until, until)

    def settle(self, task_id: str, claim_number: int, settlement: Settlement, now: int) -> Settled:
        """Move a claimed row on, if the claim is still the caller's."""
        row = self.rows.get(task_id)
        if row is None or not row.claimed or row.claim_number != claim_number:
            return Settled(applied=False, run_status=self.status)
        row.claimed = False
        row.updated_at = now
        if isinstance(settlement, Released):
            return Settled(applied=True, run_status=self.status)
        event = settlement.event
        if not isinstance(settlement, Retry) or settlement.recorded:
            row.events.append(event)
        row.result = row.error = row.failure = None
        self.credits += event.spend.credits
        self.cost += event.spend.cost
        self.touch(now)
        if isinstance(settlement, Succeeded):
            row.attempts += 1
            row.result = settlement.result
            row.end(TaskStatus.SUCCESSFUL)
            self.successful += 1
            self._end_with_the_last(now)
        elif isinstance(settlement, Failed):
            row.attempts += 1
            row.error, row.failure = settlement.problem, settlement.failure
            self._fail(row, settlement.failure, now)
        else:
            row.attempts += settlement.burns_attempt
            row.not_before = settlement.not_before
        return Settled(applied=True, run_status=self.status)

    def _fail(self, row: Row, failure: TaskFailure, now: int) -> None:
        row.end(TaskStatus.FAILED)
        self.failed += 1
        self.failure_reasons[failure] = self.failure_reasons.get(failure, 0) + 1
        self.touch(now)
        self._end_with_the_last(now)

    def _end_with_the_last(self, now: int) -> None:
        if self.successful + self.failed >= len(self.rows):
            self.move(RunStatus.COMPLETED, now)
