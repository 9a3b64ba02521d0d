"""The task rows and runs of a simulation, in memory: the rules of claiming and settling.

One object serves every simulated process. Nothing interrupts its methods; the ports over it add the
latency of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from conveyor.domain.failure_groups import failure_kind
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
    WaitReason,
)
from conveyor.domain.states import LIVE_RUN_STATES, RUN_TRANSITIONS
from conveyor.domain.task_rules import (
    TERMINAL_TASK_STATES,
    NotYet,
    RunCounters,
    Settlement,
    TaskChange,
    claim_change,
    is_held,
    settlement_change,
)
from conveyor.ports.queues import MOST_HOST_QUEUES
from conveyor.ports.tasks import Claim, Claimed, ClaimedElsewhere, NotClaimable, Settled


class Row:
    """One task. `claimed` is true while a claim, live or lapsed, is on it; `ended` is None until
    the task is terminal. `endings` counts its ends: never more than one."""

    __slots__ = (
        "attempts",
        "claim_number",
        "claimed_at",
        "claimed_until",
        "created_at",
        "endings",
        "error",
        "events",
        "failure",
        "index",
        "interruptions",
        "not_before",
        "result",
        "spec",
        "status",
        "task_id",
        "updated_at",
        "waiting",
        "waiting_since",
        "worker",
    )

    def __init__(self, task: NewTask, now: int) -> None:
        self.index = task.index
        self.task_id = task.task_id
        self.spec: TaskSpec = task.spec
        self.created_at = self.updated_at = now
        self.attempts = self.interruptions = self.claim_number = 0
        self.status = TaskStatus.PENDING
        self.claimed_at = self.claimed_until = self.not_before = 0
        self.waiting: WaitReason | None = None
        self.waiting_since = 0
        self.worker = ""
        self.endings = 0
        self.events: list[Event] = []
        self.result: StoredBody | None = None
        self.error: Problem | None = None
        self.failure: TaskFailure | None = None

    def as_task(self, run_id: str) -> Task:
        """Return the row as readers see it."""
        claimed = self.status is TaskStatus.PROCESSING
        return Task(
            run_id=run_id,
            task_id=self.task_id,
            index=self.index,
            spec=self.spec,
            status=self.status,
            created_at=self.created_at,
            updated_at=max(self.updated_at, self.claimed_at if claimed else 0),
            attempts=self.attempts,
            interruptions=self.interruptions,
            claim_number=self.claim_number,
            claimed_until=self.claimed_until if claimed else 0,
            not_before=self.not_before,
            waiting=self.waiting,
            waiting_since=self.waiting_since,
            result=self.result,
            error=self.error,
            failure=self.failure,
            failure_group=self.failure_group,
        )

    @property
    def failure_group(self) -> str | None:
        """The group of the failure; None where there is none."""
        if self.failure is None or self.error is None:
            return None
        return failure_kind(self.failure, self.error).group_id

    def apply(self, change: TaskChange, now: int) -> None:
        """Write down what a rule decided."""
        self.status = change.status
        self.updated_at = now
        self.attempts += change.attempts
        self.interruptions += change.interruptions
        if change.not_before is not None:
            self.not_before = change.not_before
        if change.waiting is not None:
            self.waiting, self.waiting_since = change.waiting, change.waiting_since
        if change.event is not None:
            self.events.append(change.event)
        self.result, self.error, self.failure = change.result, change.error, change.failure
        self.endings += change.status in TERMINAL_TASK_STATES


class RunRows:
    """One run of a closed job: its rows by task id, its counters and its status."""

    __slots__ = (
        "changed_at",
        "counters",
        "failure_detail",
        "failure_reason",
        "hosts",
        "job",
        "moved",
        "rows",
        "run",
        "status",
    )

    def __init__(
        self, job: Job, run: Run, rows: dict[str, Row], moved: Callable[[RunRows], None]
    ) -> None:
        self.job = job
        self.run = run
        self.rows = rows
        self.moved = moved
        self.status = run.status
        self.changed_at = run.updated_at
        self.counters = RunCounters(total=len(rows), updated_at=run.updated_at)
        self.failure_reason: RunFailure | None = None
        self.failure_detail: str | None = None
        self.hosts: tuple[str, ...] = ()

    @property
    def live(self) -> bool:
        """Return whether its tasks may still be claimed."""
        return self.status in LIVE_RUN_STATES

    def dispatchable(self) -> DispatchableRun | None:
        """Return the dispatcher's view of the run, if it may have work."""
        if self.status is not RunStatus.RUNNING:
            return None
        return DispatchableRun(
            run_id=self.run.run_id,
            job_id=self.job.job_id,
            priority=self.job.priority,
            max_inflight=self.job.max_inflight,
            created_at=self.run.created_at,
            caller=self.job.caller,
            politeness=self.job.politeness,
            hosts=self.hosts,
        )

    def as_run(self) -> Run:
        """Return the run as readers see it."""
        run, counters = self.run, self.counters
        return Run(
            run_id=run.run_id,
            job_id=run.job_id,
            run_sequence=run.run_sequence,
            status=self.status,
            created_at=run.created_at,
            updated_at=counters.updated_at,
            last_batch_received=True,
            next_index=len(self.rows),
            stats=RunStats(
                total=counters.total,
                successful=counters.successful,
                failed=counters.failed,
                failure_reasons=dict(counters.failure_reasons),
                spend=Spend(counters.credits, counters.cost),
                shape=counters.shape.shape(),
            ),
            failure_reason=self.failure_reason,
            failure_detail=self.failure_detail,
        )

    def move(self, status: RunStatus, now: int) -> bool:
        """End a live run; return False if it has ended already."""
        if status not in RUN_TRANSITIONS[self.status]:
            return False
        self.status = status
        self.changed(now)
        self.moved(self)
        return True

    def add_hosts(self, hosts: Sequence[str], now: int) -> tuple[str, ...]:
        """Append hosts that are to have a queue of their own; return all of them."""
        after = tuple(dict.fromkeys([*self.hosts, *hosts]))[:MOST_HOST_QUEUES]
        if self.live and after != self.hosts:
            self.hosts = after
            self.changed(now)
        return self.hosts

    def changed(self, now: int) -> None:
        """Record a change of status at `now`, by the writer's clock."""
        self.changed_at = max(self.changed_at, now)
        self.counters.touch(now)

    def claim(
        self, task_id: str, *, worker: str, now: int, until: int, max_interruptions: int
    ) -> Claim:
        """Claim a row that is pending, or whose claim has lapsed."""
        row = self.rows.get(task_id)
        if row is None:
            return NotClaimable()
        change = claim_change(
            row, run_status=self.status, now=now, max_interruptions=max_interruptions
        )
        if change is None:
            return NotClaimable()
        if isinstance(change, NotYet):
            return ClaimedElsewhere(change.until, change.is_due_later, change.end)
        if change.event is not None:
            self._apply(row, change, now)
        if change.status is not TaskStatus.PROCESSING:
            return NotClaimable(self.status)
        row.status = TaskStatus.PROCESSING
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
                waiting_since=row.waiting_since,
            )
        )

    def release(self, task_id: str, *, worker: str) -> None:
        """Undo a claim made by `worker`."""
        row = self.rows.get(task_id)
        if row is not None and row.status is TaskStatus.PROCESSING and row.worker == worker:
            row.status = TaskStatus.PENDING
            row.claim_number -= 1

    def renew(self, task_id: str, claim_number: int, until: int) -> None:
        """Extend a claim, if it is still its holder's."""
        row = self.rows.get(task_id)
        if row is not None and is_held(row, claim_number):
            row.claimed_until = max(row.claimed_until, until)

    def settle(self, task_id: str, claim_number: int, settlement: Settlement, now: int) -> Settled:
        """Move a claimed row on, if the claim is still the caller's."""
        row = self.rows.get(task_id)
        if row is None or not is_held(row, claim_number):
            return Settled(applied=False, run_status=self.status)
        self._apply(row, settlement_change(settlement, now=now), now)
        return Settled(applied=True, run_status=self.status)

    def _apply(self, row: Row, change: TaskChange, now: int) -> None:
        row.apply(change, now)
        if change.delta is None:
            return
        self.counters.add(change.delta)
        if change.delta.ends_task:
            status = self.counters.status_after(self.status, job_closed=True, ingesting=False)
            self.move(status, now)
