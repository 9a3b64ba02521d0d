"""The simulated store against the development binding's: the same calls, the same answers."""

from __future__ import annotations

import random
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from conveyor.dev.sqlite import open_store
from conveyor.dev.sqlite.store import SqliteStore
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.ids import task_id
from conveyor.domain.model import (
    Event,
    EventKind,
    Format,
    Job,
    JobStatus,
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
    WaitReason,
)
from conveyor.domain.task_rules import Deferred, Failed, Released, Retry, Settlement, Succeeded
from conveyor.ports.records import StoredResponse, WorkerRuns
from conveyor.ports.tasks import NotClaimable, TaskClaims
from conveyor.simulation.latency import Latency, stream
from conveyor.simulation.link import Gate, Link, Trace
from conveyor.simulation.rows import Row
from conveyor.simulation.store import (
    BlobService,
    SimulatedBlobs,
    SimulatedJobs,
    SimulatedRuns,
    SimulatedTasks,
    Store,
)
from conveyor.testing.clock import START

CALLER = "caller"
PROBLEM = Problem(code="timeout", title="Timeout", status=504)
TASKS = 4
MAX_INTERRUPTIONS = 2
RUNS = ("RUN0", "RUN1")


@pytest.fixture
def anyio_backend() -> str:
    """The development store belongs to asyncio."""
    return "asyncio"


class Reads(Protocol):
    """The figures by which the two stores are compared."""

    async def get_task(self, run_id: str, task_id: str) -> Task | None: ...

    async def task_history(self, run_id: str, task_id: str) -> list[Event] | None: ...

    async def unfinished(self, run_id: str) -> list[tuple[int, str]]: ...

    async def get_run(self, job_id: str, run_id: str) -> Run | None: ...

    async def create(self, job: Job, run: Run, tasks: list[NewTask]) -> None: ...

    async def stop(self, job_id: str, run_id: str, now: int) -> None: ...


@dataclass
class Ports:
    """One store: the roles that a worker uses, and what the comparison reads and writes."""

    runs: WorkerRuns
    tasks: TaskClaims
    store: Reads


class RealStore:
    """The development binding's store."""

    def __init__(self, opened: SqliteStore) -> None:
        self._opened = opened

    async def get_task(self, run_id: str, task_id: str) -> Task | None:
        return await self._opened.tasks.get_task(run_id, task_id)

    async def task_history(self, run_id: str, task_id: str) -> list[Event] | None:
        return await self._opened.tasks.task_history(run_id, task_id)

    async def unfinished(self, run_id: str) -> list[tuple[int, str]]:
        return await self._opened.tasks.unfinished_after(run_id, -1, TASKS)

    async def get_run(self, job_id: str, run_id: str) -> Run | None:
        return await self._opened.runs.get_run(CALLER, job_id, run_id)

    async def create(self, job: Job, run: Run, tasks: list[NewTask]) -> None:
        answer = StoredResponse(201, b"{}")
        await self._opened.jobs.create_job(job, run, tasks, answer=answer, once=None)

    async def stop(self, job_id: str, run_id: str, now: int) -> None:
        await self._opened.runs.stop_run(CALLER, job_id, now=now)


class SimulatedStore:
    """The store of a simulation."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def _row(self, run_id: str, task_id: str) -> Row | None:
        run = self._store.runs.get(run_id)
        return run.rows.get(task_id) if run is not None else None

    async def get_task(self, run_id: str, task_id: str) -> Task | None:
        row = self._row(run_id, task_id)
        return row.as_task(run_id) if row is not None else None

    async def task_history(self, run_id: str, task_id: str) -> list[Event] | None:
        row = self._row(run_id, task_id)
        return list(row.events) if row is not None else None

    async def unfinished(self, run_id: str) -> list[tuple[int, str]]:
        return await self._store.unfinished(run_id)

    async def get_run(self, job_id: str, run_id: str) -> Run | None:
        run = self._store.runs.get(run_id)
        return run.as_run() if run is not None else None

    async def create(self, job: Job, run: Run, tasks: list[NewTask]) -> None:
        self._store.add(job, run, tasks)

    async def stop(self, job_id: str, run_id: str, now: int) -> None:
        self._store.runs[run_id].move(RunStatus.STOPPED, now)


async def _no_sleep(_seconds: float) -> None:
    """Nothing takes time here."""


def _link() -> Link:
    return Link(
        process="w",
        gate=Gate(),
        trace=Trace(lambda: 0.0),
        seconds=lambda: 0.0,
        sleep=_no_sleep,
        latency=Latency(0.0),
        stream=stream(0, "w"),
    )


def _real(opened: SqliteStore) -> Ports:
    return Ports(opened.runs, opened.tasks, RealStore(opened))


def _simulated(store: Store) -> Ports:
    link = _link()
    return Ports(SimulatedRuns(store, link), SimulatedTasks(store, link), SimulatedStore(store))


async def _submit(ports: Ports, run_id: str) -> None:
    job = Job(
        job_id=f"JOB-{run_id}",
        caller=CALLER,
        status=JobStatus.CLOSED,
        created_at=START,
        updated_at=START,
        latest_run_id=run_id,
        run_count=1,
    )
    run = Run(
        run_id=run_id,
        job_id=job.job_id,
        run_sequence=1,
        status=RunStatus.RUNNING,
        created_at=START,
        updated_at=START,
        last_batch_received=True,
        next_index=TASKS,
        stats=RunStats(total=TASKS),
    )
    tasks = [
        NewTask(index, task_id(run_id, index), TaskSpec(url=f"https://a.example/{index}"))
        for index in range(TASKS)
    ]
    await ports.store.create(job, run, tasks)


class Script:
    """Random calls, made of both stores; what each answers is kept side by side."""

    def __init__(self, seed: int, real: Ports, simulated: Ports) -> None:
        self.draw = random.Random(seed)
        self.both = (real, simulated)
        self.now = START

    async def same(self, *calls: Awaitable[Any]) -> Any:
        """The answer, which must be the same."""
        answers = []
        for call in calls:
            try:
                answers.append(await call)
            except ConveyorError as error:
                answers.append((error.code, error.detail))
        assert answers[0] == answers[1]
        return answers[1]

    async def step(self) -> None:
        """One call."""
        draw, now = self.draw, self.now
        self.now += draw.choice((0, 1, 5_000, 40_000))
        run_id = draw.choice((*RUNS, *RUNS, "GONE"))
        name = task_id(run_id, draw.randrange(TASKS))
        number = draw.randint(1, 4)
        worker = draw.choice(("a", "b"))
        kind = draw.choice(("claim",) * 6 + ("settle",) * 6 + ("release", "renew", "renew"))
        tasks = [ports.tasks for ports in self.both]
        if kind == "claim":
            await self.claim(run_id, name, now, worker=worker)
        elif kind == "settle":
            settlement = self._settlement(name)
            await self.same(
                *(port.settle_task(run_id, name, number, settlement, now=now) for port in tasks)
            )
        elif kind == "release":
            await self.same(*(port.release_claim(run_id, name, worker=worker) for port in tasks))
        else:
            claims, until = [(run_id, name, number)], now + draw.choice((10_000, 50_000))
            await self.same(*(port.renew_claims(claims, claimed_until=until) for port in tasks))

    async def claim(self, run_id: str, name: str, now: int, *, worker: str = "a") -> Any:
        """Claim a task of both."""
        return await self.same(
            *(
                ports.tasks.claim_task(
                    run_id,
                    name,
                    worker=worker,
                    now=now,
                    claimed_until=now + 30_000,
                    max_interruptions=MAX_INTERRUPTIONS,
                )
                for ports in self.both
            )
        )

    def _settlement(self, name: str) -> Settlement:
        event = Event(
            kind=EventKind.ATTEMPT,
            attempt=1,
            started_at=self.now,
            ended_at=self.now,
            spend=Spend(1, 0.25),
        )
        body = StoredBody(f"blob/{name}", 3, "text/html", Format.HTML)
        return self.draw.choice(
            (
                Succeeded(event, body),
                Failed(event, PROBLEM, TaskFailure.TIMEOUT),
                Retry(event, self.now + 10_000, burns_attempt=self.draw.random() < 0.5),
                Retry(event, self.now),
                Released(),
                Deferred(self.now + 10_000, WaitReason.OUTAGE),
            )
        )

    async def compare(self) -> None:
        """Everything that can be read."""
        for run_id in (*RUNS, "GONE"):
            job_id = f"JOB-{run_id}"
            for index in range(TASKS):
                name = task_id(run_id, index)
                await self.same(*(ports.store.get_task(run_id, name) for ports in self.both))
                await self.same(*(ports.store.task_history(run_id, name) for ports in self.both))
            await self.same(*(ports.store.unfinished(run_id) for ports in self.both))
            await self.same(*(ports.runs.dispatchable_run(run_id) for ports in self.both))
            run = [await ports.store.get_run(job_id, run_id) for ports in self.both]
            assert [one and (one.status, one.stats, one.updated_at) for one in run[:1]] == [
                one and (one.status, one.stats, one.updated_at) for one in run[1:]
            ]
        await self.same(*(ports.runs.dispatchable_runs() for ports in self.both))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
async def test_random_calls_are_answered_as_by_the_development_store(
    seed: int, tmp_path: Path
) -> None:
    opened = await open_store(tmp_path / "conveyor.db", now=START)
    try:
        script = Script(seed, _real(opened), _simulated(Store()))
        for run_id in RUNS:
            for ports in script.both:
                await _submit(ports, run_id)
        for _ in range(150):
            await script.step()
        await script.compare()
    finally:
        await opened.aclose()


async def test_stopping_and_failing_are_as_in_the_development_store(tmp_path: Path) -> None:
    opened = await open_store(tmp_path / "conveyor.db", now=START)
    try:
        script = Script(0, _real(opened), _simulated(Store()))
        for run_id in RUNS:
            for ports in script.both:
                await _submit(ports, run_id)
        both = [ports.runs for ports in script.both]
        for ports in script.both:
            await ports.store.stop(f"JOB-{RUNS[0]}", RUNS[0], START + 2)
        await script.compare()
        reason = RunFailure.INSUFFICIENT_CREDITS
        for expected in (True, False):
            ended = await script.same(
                *(port.fail_run(RUNS[1], reason=reason, detail="x", now=START) for port in both)
            )
            assert ended is expected
        await script.compare()
        for since in (START, START + 1, START + 2, START + 3):
            changes = [await port.dispatch_changes(since=since) for port in both]
            assert sorted(changes[0], key=lambda one: one.run_id) == sorted(
                changes[1], key=lambda one: one.run_id
            )
        for run_id in RUNS:
            assert await script.claim(run_id, task_id(run_id, 0), START + 3) == NotClaimable()
    finally:
        await opened.aclose()


async def test_a_job_is_found_by_its_id_and_written_once() -> None:
    store = Store()
    await _submit(_simulated(store), RUNS[0])
    jobs = SimulatedJobs(store, _link())
    found = await jobs.find_job(f"JOB-{RUNS[0]}")
    assert found is not None
    assert found.latest_run_id == RUNS[0]
    assert await jobs.find_job("JOB") is None
    with pytest.raises(ConveyorError) as refused:
        await _submit(_simulated(store), RUNS[0])
    assert refused.value.code is ErrorCode.CONFLICT


async def test_an_ending_is_counted_once_and_work_in_vain_apart() -> None:
    store = Store()
    ports = _simulated(store)
    await _submit(ports, RUNS[0])
    ended: list[str] = []
    store.on_ended = lambda run: ended.append(run.run.run_id)
    script = Script(0, ports, ports)
    name = task_id(RUNS[0], 0)
    for number, now in ((1, START), (2, START + 60_000)):
        await ports.tasks.claim_task(
            RUNS[0],
            name,
            worker=str(number),
            now=now,
            claimed_until=now + 30_000,
            max_interruptions=MAX_INTERRUPTIONS,
        )
    success = Succeeded(
        Event(kind=EventKind.ATTEMPT, attempt=1, started_at=START, ended_at=START),
        StoredBody("key", 1, "text/html", Format.HTML),
    )
    for number in (1, 2, 2):
        await ports.tasks.settle_task(RUNS[0], name, number, success, now=script.now)
    assert (store.completed, store.duplicates, ended) == (1, 2, [])
    assert [row.endings for row in store.runs[RUNS[0]].rows.values()] == [1, 0, 0, 0]


async def test_blobs_keep_their_sizes() -> None:
    service = BlobService()
    blobs = SimulatedBlobs(service, _link())

    async def pieces() -> Any:
        yield b"abc"
        yield b"de"

    assert await blobs.put("run/a", pieces()) == 5
    assert await blobs.put("run/b", b"x") == 1
    assert service.sizes == {"run/a": 5, "run/b": 1}
    await blobs.delete("run/b")
    assert service.sizes == {"run/a": 5}
