"""Short words for what tests do to a store: submit, claim, end a task."""

from __future__ import annotations

from collections.abc import Awaitable, Collection
from typing import Any

import pytest

from conveyor.domain import ids
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.failure_groups import FailureGroups
from conveyor.domain.model import (
    Event,
    EventKind,
    Format,
    Job,
    JobStatus,
    JobView,
    NewTask,
    Problem,
    Run,
    RunStats,
    RunStatus,
    Spend,
    StoredBody,
    Task,
    TaskFailure,
    TaskSpec,
    TaskStatus,
)
from conveyor.domain.task_rules import Failed, Retry, Settlement, Succeeded
from conveyor.ports.binding import Binding
from conveyor.ports.maintenance import EndedRun
from conveyor.ports.records import (
    Appended,
    AppendRequest,
    IdempotencyScope,
    Rerun,
    RerunRequest,
    StoredResponse,
)
from conveyor.ports.tasks import Claim, Claimed, Settled
from conveyor.testing.clock import FakeClock
from tests.conformance.bindings import Store

S, F, P, R = (
    TaskStatus.SUCCESSFUL,
    TaskStatus.FAILED,
    TaskStatus.PENDING,
    TaskStatus.PROCESSING,
)
CALLER = "caller"
PROBLEM = Problem(code="gateway_unreachable", title="Gateway unreachable", status=502, detail="é\0")
CLAIM_LENGTH = 60_000
MAX_INTERRUPTIONS = 2


async def refused(code: ErrorCode, awaitable: Awaitable[object]) -> None:
    """Check that an awaitable raises a ConveyorError of this code."""
    with pytest.raises(ConveyorError) as refusal:
        await awaitable
    assert refusal.value.code is code


class World:
    """One store, one clock, one caller."""

    def __init__(self, store: Store, clock: FakeClock) -> None:
        self.store = store
        self.clock = clock

    @property
    def now(self) -> int:
        """The clock's time."""
        return self.clock.now()

    def draft(
        self, count: int, *, closed: bool = True, **fields: Any
    ) -> tuple[Job, Run, list[NewTask]]:
        """A job with a first run of `count` tasks, not written yet."""
        job_id, run_id = self.clock.new_id(), self.clock.new_id()
        fields = {"caller": CALLER} | fields
        job = Job(
            job_id=job_id,
            status=JobStatus.CLOSED if closed else JobStatus.OPEN,
            created_at=self.now,
            updated_at=self.now,
            latest_run_id=run_id,
            run_count=1,
            **fields,
        )
        run = Run(
            run_id=run_id,
            job_id=job_id,
            run_sequence=1,
            status=RunStatus.RUNNING if count else RunStatus.PENDING,
            created_at=self.now,
            updated_at=self.now,
            last_batch_received=closed,
            next_index=count,
            stats=RunStats(total=count),
        )
        specs = [spec(index) for index in range(count)]
        tasks = [NewTask(index, ids.task_id(run_id, index), one) for index, one in enumerate(specs)]
        return job, run, tasks

    async def submit(
        self,
        count: int,
        *,
        closed: bool = True,
        once: IdempotencyScope | None = None,
        **fields: Any,
    ) -> tuple[str, str]:
        """Write a job with a first run of `count` tasks; (job_id, run_id)."""
        job, run, tasks = self.draft(count, closed=closed, **fields)
        await self.store.jobs.create_job(
            job, run, tasks, answer=StoredResponse(201, b"{}"), once=once
        )
        return job.job_id, run.run_id

    async def view(self, job_id: str) -> JobView:
        """The job and its latest run."""
        view = await self.store.jobs.get_job(CALLER, job_id)
        assert view is not None
        return view

    async def run(self, job_id: str, run_id: str | None = None) -> Run:
        """Return a run; by default the latest."""
        run = await self.store.runs.get_run(CALLER, job_id, run_id)
        assert run is not None
        return run

    async def rows(self, run_id: str, shards: int = 1) -> list[Task]:
        """Every task of a run, in order."""
        found: list[Task] = []
        for shard in range(shards):
            page = await self.store.tasks.page_tasks(
                run_id, shard=shard, statuses=None, after=None, limit=10_000
            )
            found += page.tasks
        return sorted(found, key=lambda task: task.index)

    async def append(
        self,
        job_id: str,
        count: int,
        *,
        last_batch: bool = False,
        max_tasks: int = 1_000,
        once: IdempotencyScope | None = None,
    ) -> StoredResponse:
        """Add tasks; the answer says where the first one went."""
        return await self.store.jobs.append_tasks(
            AppendRequest(
                caller=CALLER,
                job_id=job_id,
                specs=[spec(index) for index in range(count)],
                last_batch=last_batch,
                max_tasks=max_tasks,
                now=self.now,
            ),
            answer=_appended,
            once=once,
        )

    async def rerun(
        self,
        job_id: str,
        *statuses: TaskStatus,
        run_id: str | None = None,
        window_start: int = 0,
        large_from: int = 10_000,
        once: IdempotencyScope | None = None,
        groups: Collection[str] | None = None,
    ) -> tuple[str, str]:
        """Rerun in full, or those in the statuses, or in the failure groups; the new run and
        "retried inherited source"."""
        new_id = run_id or self.clock.new_id()
        answer = await self.store.runs.rerun(
            RerunRequest(
                caller=CALLER,
                job_id=job_id,
                run_id=new_id,
                statuses=frozenset(statuses) or None if groups is None else frozenset({F}),
                groups=None if groups is None else frozenset(groups),
                window_start=window_start,
                large_from=large_from,
                now=self.now,
            ),
            answer=_rerun,
            once=once,
        )
        return new_id, answer.body.decode()

    async def claim(self, run_id: str, index: int, *, task_id: str | None = None) -> Claim:
        """Try to claim the task at an index."""
        return await self.store.tasks.claim_task(
            run_id,
            task_id or ids.task_id(run_id, index),
            worker="worker",
            now=self.now,
            claimed_until=self.now + CLAIM_LENGTH,
            max_interruptions=MAX_INTERRUPTIONS,
        )

    async def claimed(self, run_id: str, index: int, *, task_id: str | None = None) -> Task:
        """Claim the task at an index."""
        claim = await self.claim(run_id, index, task_id=task_id)
        assert isinstance(claim, Claimed), claim
        return claim.task

    async def settle(self, task: Task, settlement: Settlement) -> Settled:
        """Settle a claim."""
        return await self.store.tasks.settle_task(
            task.run_id, task.task_id, task.claim_number, settlement, now=self.now
        )

    async def succeed(self, run_id: str, index: int) -> Settled:
        """Take a task from pending to successful."""
        task = await self.claimed(run_id, index)
        return await self.settle(task, self.success(task))

    async def fail(
        self,
        run_id: str,
        index: int,
        failure: TaskFailure = TaskFailure.TIMEOUT,
        problem: Problem = PROBLEM,
    ) -> Settled:
        """Take a task from pending to failed."""
        task = await self.claimed(run_id, index)
        return await self.settle(task, Failed(self.attempt(task, problem), problem, failure))

    async def groups(self, run_id: str) -> FailureGroups:
        """The failure groups of a run, which add up to its failed tasks."""
        groups = await self.store.tasks.failure_groups(run_id)
        assert groups is not None
        assert groups.other >= 0
        return groups

    def attempt(self, task: Task, error: Problem | None = None) -> Event:
        """An attempt at a claimed task, ended now, that cost a credit and a quarter."""
        return Event(
            kind=EventKind.ATTEMPT,
            attempt=task.attempts + 1,
            started_at=task.updated_at,
            ended_at=self.now,
            error=error,
            spend=Spend(1, 0.25),
        )

    def success(self, task: Task) -> Succeeded:
        """A successful end."""
        body = StoredBody(f"{task.run_id}/{task.task_id}", 42, "text/html; charset=x", Format.HTML)
        return Succeeded(self.attempt(task), body)

    def retry(self, task: Task, *, after: int = 0, burns_attempt: bool = True) -> Retry:
        """Another try, `after` milliseconds from now."""
        return Retry(self.attempt(task, PROBLEM), self.now + after, burns_attempt=burns_attempt)


async def all_ended(store: Store | Binding, now: int) -> list[EndedRun]:
    """Return all ended runs by id: in ten years something is due for each."""
    found = await store.sweeping.ended_runs(
        now=now + 3_650 * 86_400_000, row_days=1, after=None, limit=100
    )
    return sorted(found, key=lambda run: run.run_id)


def spec(index: int) -> TaskSpec:
    """A task whose text needs care: quotes, a backslash, a percent sign, other alphabets."""
    return TaskSpec(
        url=f"https://example.com/{index}?q=\"%s%20'\\\\é",
        external_id=f"item-{index}",
        metadata={"key": "ключ \n,[]{}"},
    )


def _appended(made: Appended) -> StoredResponse:
    assert made.view.latest_run is not None
    return StoredResponse(200, f"{made.accepted} {made.first_index}".encode())


def _rerun(made: Rerun) -> StoredResponse:
    assert made.view.latest_run is not None
    return StoredResponse(201, f"{made.retried} {made.inherited} {made.rerun_of}".encode())
