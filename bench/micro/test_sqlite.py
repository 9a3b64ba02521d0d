"""Measures a task's cost to the development store: a claim and a settlement, from fifty workers at
once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from pytest_benchmark.fixture import BenchmarkFixture

from conveyor.clock import SystemClock
from conveyor.dev.binding import open_binding
from conveyor.domain.ids import task_id
from conveyor.domain.model import (
    Event,
    EventKind,
    Format,
    Job,
    JobStatus,
    NewTask,
    Run,
    RunStats,
    RunStatus,
    StoredBody,
    TaskSpec,
)
from conveyor.domain.task_rules import Succeeded
from conveyor.ports.binding import Binding
from conveyor.ports.records import StoredResponse
from conveyor.ports.tasks import Claimed

TASKS = 2_000
WORKERS = 50
ROUNDS = 5


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    """Make an event loop as the server has it."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        yield runner


async def create_run(binding: Binding, clock: SystemClock) -> str:
    """Create a job whose run has TASKS pending tasks; return the run's id."""
    now, job_id, run_id = clock.now(), clock.new_id(), clock.new_id()
    job = Job(
        job_id=job_id,
        caller="caller",
        status=JobStatus.CLOSED,
        created_at=now,
        updated_at=now,
        latest_run_id=run_id,
        run_count=1,
    )
    run = Run(
        run_id=run_id,
        job_id=job_id,
        run_sequence=1,
        status=RunStatus.RUNNING,
        created_at=now,
        updated_at=now,
        last_batch_received=True,
        next_index=TASKS,
        stats=RunStats(total=TASKS),
    )
    spec = TaskSpec("https://shop.example.com/products/1")
    tasks = [NewTask(index, task_id(run_id, index), spec) for index in range(TASKS)]
    await binding.jobs.create_job(job, run, tasks, answer=StoredResponse(201, b"{}"), once=None)
    return run_id


async def close(binding: Binding) -> None:
    """Flush and close."""
    await binding.aclose()


async def work_run(binding: Binding, clock: SystemClock, run_id: str) -> int:
    """Claim and settle every task; return the number of applied settlements."""
    numbers = itertools.count()
    result = StoredBody("results/30/a/b/c", 4_096, "text/html", Format.HTML)

    async def worker() -> int:
        applied = 0
        while (index := next(numbers)) < TASKS:
            now = clock.now()
            claim = await binding.tasks.claim_task(
                run_id,
                task_id(run_id, index),
                worker="worker",
                now=now,
                claimed_until=now + 60_000,
                max_interruptions=10,
            )
            assert isinstance(claim, Claimed)
            task = claim.task
            event = Event(kind=EventKind.ATTEMPT, attempt=1, started_at=now, ended_at=now)
            settled = await binding.tasks.settle_task(
                run_id, task.task_id, task.claim_number, Succeeded(event, result), now=now
            )
            applied += settled.applied
        return applied

    return sum(await asyncio.gather(*(worker() for _ in range(WORKERS))))


def test_claim_and_settle(
    benchmark: BenchmarkFixture, tmp_path: Path, runner: asyncio.Runner
) -> None:
    clock = SystemClock()
    binding = runner.run(open_binding(tmp_path / "data", clock)).ports
    try:
        applied = benchmark.pedantic(  # type: ignore[no-untyped-call]  # the library has no types here
            lambda run_id: runner.run(work_run(binding, clock, run_id)),
            setup=lambda: ((runner.run(create_run(binding, clock)),), {}),
            rounds=ROUNDS,
        )
    finally:
        runner.run(close(binding))
    assert applied == TASKS
