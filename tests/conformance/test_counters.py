"""Counters against rows, under random sequences of everything that moves a task or a run.

Task rows are the truth and the counters a cache of them: after every step, whatever it was, the
two agree, no ended task has changed, and a run's status is what its counters say.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from msgspec import structs

from conveyor.domain.errors import ConveyorError
from conveyor.domain.failure_groups import FailureGroups, failure_kind
from conveyor.domain.model import (
    Event,
    EventKind,
    Job,
    JobStatus,
    Run,
    RunFailure,
    RunStatus,
    Spend,
    Task,
    TaskFailure,
    TaskStatus,
)
from conveyor.domain.result_shape import ResultShape, ShapeCounter
from conveyor.domain.states import LIVE_RUN_STATES, live_run_status
from conveyor.domain.task_rules import TERMINAL_TASK_STATES, Failed, Released
from conveyor.ports.tasks import Claim, Claimed
from conveyor.testing.clock import FakeClock
from tests.conformance.bindings import BindingKind
from tests.conformance.world import CALLER, CLAIM_LENGTH, MAX_INTERRUPTIONS, PROBLEM, World

T = TypeVar("T")

INDEXES = st.lists(st.integers(0, 7), min_size=1, max_size=6)
STATUSES = st.sets(st.sampled_from(list(TaskStatus)))
SETTLEMENTS = st.lists(
    st.tuples(st.integers(0, 7), st.sampled_from(["success", "failure", "retry", "undone"])),
    min_size=1,
    max_size=6,
)


class Machine(RuleBasedStateMachine):
    """One job and everything that may happen to it. `kind` is set by the test."""

    kind: BindingKind

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.runner = asyncio.Runner()
        self.clock = FakeClock()
        self.held: list[Task] = []
        self.current: dict[tuple[str, int], int] = {}
        self.ended: dict[tuple[str, int], Task] = {}
        self.histories: dict[str, tuple[Task, Sequence[Event]]] = {}
        self.statuses: dict[str, RunStatus] = {}
        store = self.do(self.kind.open(Path(self.directory.name), self.clock.now()))
        self.world = World(store, self.clock)
        self.job_id, _ = self.do(self.world.submit(4, closed=False))

    def teardown(self) -> None:
        """Look at every history once more, then close the store and remove it."""
        try:
            self.histories.clear()
            self.counters_agree_with_rows()
        finally:
            self.do(self.world.store.aclose())
            self.runner.close()
            self.directory.cleanup()

    def do(self, work: Awaitable[T]) -> T:
        """Run something on the machine's own loop."""

        async def wait() -> T:
            return await work

        return self.runner.run(wait())

    def attempt(self, work: Awaitable[object]) -> None:
        """Run something that may be refused."""
        with suppress(ConveyorError):
            self.do(work)

    def latest(self) -> Run | None:
        """The latest run that is not deleted."""
        return self.do(self.world.store.runs.get_run(CALLER, self.job_id, None))

    def revive(self) -> None:
        """Have a run that works, so that what follows finds something to move."""
        run = self.latest()
        if run is None:
            self.begin_anew(0)
        elif run.status not in LIVE_RUN_STATES:
            self.wait(CLAIM_LENGTH / 1_000)
            self.attempt(self.world.rerun(self.job_id))

    @rule(indexes=INDEXES)
    def claim(self, indexes: list[int]) -> None:
        run = self.latest()
        if run is None:
            return
        rows = {row.index: row.task_id for row in self.do(self.world.rows(run.run_id))}

        async def claim_all() -> list[Claim]:
            return await asyncio.gather(
                *(self.world.claim(run.run_id, index, task_id=rows.get(index)) for index in indexes)
            )

        for claim in self.do(claim_all()):
            if isinstance(claim, Claimed):
                assert run.status in LIVE_RUN_STATES
                self.held.append(claim.task)
                self.current[claim.task.run_id, claim.task.index] = claim.task.claim_number

    @rule(choices=SETTLEMENTS)
    def settle(self, choices: list[tuple[int, str]]) -> None:
        """Settle claims, late ones and lost ones too, latest first."""

        async def settle_all() -> None:
            await asyncio.gather(
                *(self.settle_one(self.held[-1 - back], choice) for back, choice in choices)
            )

        choices = [(back % len(self.held), choice) for back, choice in choices if self.held]
        self.do(settle_all())

    async def settle_one(self, task: Task, choice: str) -> None:
        world = self.world
        if choice == "success":
            settled = await world.settle(task, world.success(task))
        elif choice == "failure":
            failure = list(TaskFailure)[task.index % len(TaskFailure)]
            words = "".join(chr(ord("a") + int(digit)) for digit in str(len(self.held) % 10))
            problem = structs.replace(PROBLEM, detail=f"{words} after {len(self.held)} ms")
            failed = Failed(world.attempt(task, problem), problem, failure)
            settled = await world.settle(task, failed)
        elif choice == "retry":
            retry = world.retry(task, burns_attempt=task.index % 2 == 0)
            settled = await world.settle(task, retry)
        else:
            settled = await world.settle(task, Released())
        if settled.applied:
            assert self.current.pop((task.run_id, task.index), None) == task.claim_number

    @rule(indexes=INDEXES, choice=st.sampled_from(["success", "success", "failure", "retry"]))
    def work(self, indexes: list[int], choice: str) -> None:
        self.revive()
        self.claim(indexes)
        self.settle([(back, choice) for back in range(len(indexes))])

    @rule(indexes=INDEXES)
    def abandon(self, indexes: list[int]) -> None:
        """Lose the claims, and whoever takes them over, until the store gives the tasks up."""
        self.revive()
        for _ in range(MAX_INTERRUPTIONS + 2):
            self.claim(indexes)
            self.wait(CLAIM_LENGTH / 1_000)

    @rule(indexes=INDEXES, lost=st.booleans(), choices=SETTLEMENTS)
    def settle_late(self, indexes: list[int], lost: bool, choices: list[tuple[int, str]]) -> None:
        """Settle after somebody else has taken over, or the run has been stopped."""
        self.revive()
        self.claim(indexes)
        late = self.held[-len(indexes) :]
        if lost:
            self.wait(CLAIM_LENGTH / 1_000)
            self.claim(indexes)
        else:
            self.stop()
        self.counters_agree_with_rows()
        for back, choice in choices if late else []:
            self.do(self.settle_one(late[back % len(late)], choice))

    @rule(indexes=INDEXES, failed=INDEXES, statuses=STATUSES)
    def rerun_in_part(
        self, indexes: list[int], failed: list[int], statuses: set[TaskStatus]
    ) -> None:
        """Rerun a stopped run with rows of every kind."""
        self.work(indexes, "success")
        self.work(failed, "failure")
        self.rerun(statuses, stop_first=True)

    @rule(seconds=st.sampled_from([0.001, CLAIM_LENGTH / 1_000]))
    def wait(self, seconds: float) -> None:
        self.do(self.clock.advance(seconds))

    @rule(count=st.integers(0, 3), last_batch=st.booleans())
    def append(self, count: int, last_batch: bool) -> None:
        self.attempt(self.world.append(self.job_id, count, last_batch=last_batch, max_tasks=8))

    @rule()
    def close(self) -> None:
        self.attempt(self.world.store.jobs.close_job(CALLER, self.job_id, now=self.clock.now()))

    @rule()
    def stop(self) -> None:
        self.attempt(self.world.store.runs.stop_run(CALLER, self.job_id, now=self.clock.now()))

    @rule(chance=st.integers(0, 2))
    def fail(self, chance: int) -> None:
        run = self.latest()
        if run is not None and not chance:
            reason, now = RunFailure.INSUFFICIENT_CREDITS, self.clock.now()
            self.do(self.world.store.runs.fail_run(run.run_id, reason=reason, detail="", now=now))

    @rule(statuses=STATUSES, stop_first=st.booleans())
    def rerun(self, statuses: set[TaskStatus], stop_first: bool) -> None:
        if stop_first:
            self.stop()
            self.wait(CLAIM_LENGTH / 1_000)
        self.attempt(self.world.rerun(self.job_id, *statuses))

    @rule(indexes=INDEXES, failed=INDEXES, choice=st.sets(st.integers(0, 9), min_size=1))
    def rerun_groups(self, indexes: list[int], failed: list[int], choice: set[int]) -> None:
        """Rerun some of the groups of a stopped run."""
        self.work(indexes, "success")
        self.work(failed, "failure")
        self.stop()
        self.wait(CLAIM_LENGTH / 1_000)
        run = self.latest()
        kept = () if run is None else self.do(self.world.groups(run.run_id)).groups
        if kept:
            chosen = {kept[number % len(kept)].group_id for number in choice}
            self.attempt(self.world.rerun(self.job_id, groups=chosen))

    @rule(back=st.integers(0, 5))
    def delete_run(self, back: int) -> None:
        runs = self.do(self.world.store.runs.list_runs(CALLER, self.job_id, before=None, limit=10))
        if back < len(runs):
            self.attempt(
                self.world.store.runs.delete_run(
                    CALLER, self.job_id, runs[back].run_id, now=self.clock.now()
                )
            )

    @rule(chance=st.integers(0, 4))
    def begin_anew(self, chance: int) -> None:
        if chance:
            return
        now = self.clock.now()
        for run_id in self.do(self.world.store.jobs.delete_job(CALLER, self.job_id, now=now)):
            while self.do(self.world.store.tasks.scrub_tasks(run_id, 3)):
                pass
            assert self.do(self.world.rows(run_id)) == []
            self.do(self.world.store.runs.purge_run(run_id))
            self.ended = {key: row for key, row in self.ended.items() if key[0] != run_id}
        self.do(self.world.store.jobs.purge_job(self.job_id))
        assert self.do(self.world.store.jobs.get_job(CALLER, self.job_id)) is None
        self.job_id, _ = self.do(self.world.submit(4, closed=False))

    @invariant()
    def counters_agree_with_rows(self) -> None:
        view = self.do(self.world.view(self.job_id))
        runs = self.do(self.world.store.runs.list_runs(CALLER, self.job_id, before=None, limit=10))
        assert view.latest_run == (runs[0] if runs else None)
        for run in runs:
            rows = self.do(self.world.rows(run.run_id))
            check_counters(run, rows)
            check_groups(run, rows, self.do(self.world.groups(run.run_id)))
            check_shape(run, rows)
            check_status(view.job, run)
            self.check_histories(run, rows)
            self.check_ends(run, rows)

    def check_histories(self, run: Run, rows: list[Task]) -> None:
        spend = Spend()
        for row in rows:
            if row.source_run_id is not None:
                continue
            events = self.history(run, row)
            kinds = Counter(event.kind for event in events)
            assert kinds[EventKind.INTERRUPTION] == row.interruptions
            assert kinds[EventKind.ATTEMPT] >= row.attempts
            for event in events:
                spend += event.spend
        assert run.stats.spend == spend

    def history(self, run: Run, row: Task) -> Sequence[Event]:
        """The events of a task, read again only where its row has changed: each call over a
        network takes milliseconds."""
        known = self.histories.get(row.task_id)
        if known is None or known[0] != row:
            events = self.do(self.world.store.tasks.task_history(run.run_id, row.task_id))
            assert events is not None
            known = self.histories[row.task_id] = row, events
        return known[1]

    def check_ends(self, run: Run, rows: list[Task]) -> None:
        for row in rows:
            if row.status in TERMINAL_TASK_STATES:
                assert self.ended.setdefault((run.run_id, row.index), row) == row
        still = {row.index for row in rows if row.status in TERMINAL_TASK_STATES}
        assert {index for run_id, index in self.ended if run_id == run.run_id} == still
        before = self.statuses.get(run.run_id, RunStatus.RUNNING)
        assert before in LIVE_RUN_STATES or before is run.status
        self.statuses[run.run_id] = run.status


def check_counters(run: Run, rows: list[Task]) -> None:
    """A run's counters are what its rows say."""
    statuses = Counter(row.status for row in rows)
    assert run.stats.total == len(rows)
    assert run.stats.successful == statuses[TaskStatus.SUCCESSFUL]
    assert run.stats.failed == statuses[TaskStatus.FAILED]
    assert run.stats.failure_reasons == Counter(
        row.failure for row in rows if row.failure is not None
    )
    assert [row.index for row in rows] == sorted({row.index for row in rows})
    assert run.next_index == (rows[-1].index + 1 if rows else 0)


def check_groups(run: Run, rows: list[Task], groups: FailureGroups) -> None:
    """Each failed row is in the group of its problem, and the groups count them all."""
    failed = [row for row in rows if row.failure is not None and row.error is not None]
    for row in failed:
        assert row.failure is not None
        assert row.error is not None
        assert row.failure_group == failure_kind(row.failure, row.error).group_id
    assert groups.failed == run.stats.failed == len(failed)
    assert {group.group_id: group.count for group in groups.groups} == Counter(
        row.failure_group for row in failed
    )
    task_ids = {row.task_id for row in rows}
    for group in groups.groups:
        assert group.first_at <= group.last_at
        assert task_ids.issuperset(group.task_ids)


def check_shape(run: Run, rows: list[Task]) -> None:
    """The shape of the results counts every body, and the inherited rows are counted."""
    shape = ShapeCounter.of(ResultShape())
    for row in rows:
        if row.result is not None:
            shape.add(row.result.size, row.result.content_type)
    assert run.stats.shape == shape.shape()
    assert run.stats.inherited == sum(row.source_run_id is not None for row in rows)


def check_status(job: Job, run: Run) -> None:
    """A live run's status is what its counters say."""
    if run.status in LIVE_RUN_STATES | {RunStatus.COMPLETED}:
        closed = job.status is not JobStatus.OPEN
        assert run.status is live_run_status(run.stats, job_closed=closed)


@pytest.mark.guarantee("G3")
@pytest.mark.timeout(900)  # each step reads every row again, and an emulator is slow at that
@pytest.mark.parametrize("examples", [10, pytest.param(30, marks=pytest.mark.full)])
def test_counters_agree_with_rows_after_every_step(
    binding_kind: BindingKind, examples: int
) -> None:
    machine = type("BoundMachine", (Machine,), {"kind": binding_kind})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=round(examples * binding_kind.effort),
            stateful_step_count=25,
            suppress_health_check=list(HealthCheck),
            database=None,
            derandomize=True,
        ),
    )
