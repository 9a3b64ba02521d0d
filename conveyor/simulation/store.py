"""The records, tasks and blobs of a simulation: one store, and each process's ports over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from conveyor.dev.permits import MemoryWorkers
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.hosts import host_and_port
from conveyor.domain.model import (
    DispatchableRun,
    Job,
    NewTask,
    Run,
    RunFailure,
    RunStatus,
)
from conveyor.domain.run_waits import WorkerReport
from conveyor.domain.task_rules import TERMINAL_TASK_STATES, Failed, Settlement, Succeeded
from conveyor.ports.blobs import Content
from conveyor.ports.records import DispatchChange
from conveyor.ports.tasks import Claim, NotClaimable, Settled
from conveyor.simulation.link import Link
from conveyor.simulation.rows import Row, RunRows


class Store:
    """Every run and its rows.

    `on_ended` is called with each run that ends, `on_settled` with the id of each task that was
    worked to its end. `completed` counts ended tasks, `duplicates` work done for a task whose claim
    had been lost: it counts for nothing.
    """

    def __init__(self) -> None:
        self.runs: dict[str, RunRows] = {}
        self.jobs: dict[str, Job] = {}
        self.on_ended: Callable[[RunRows], None] = lambda _run: None
        self.on_settled: Callable[[str], None] = lambda _task_id: None
        self.completed = 0
        self.duplicates = 0

    def add(self, job: Job, run: Run, tasks: Sequence[NewTask]) -> None:
        """Write a closed job with its run. Raises ConveyorError(conflict) if it exists."""
        if job.job_id in self.jobs or run.run_id in self.runs:
            raise ConveyorError(ErrorCode.CONFLICT, "the job exists already")
        rows = {task.task_id: Row(task, run.created_at) for task in tasks}
        self.jobs[job.job_id] = job
        self.runs[run.run_id] = RunRows(job, run, rows, lambda ended: self.on_ended(ended))

    async def unfinished(self, run_id: str) -> list[tuple[int, str]]:
        """Return (index, task_id) of every task of a run that is not terminal."""
        run = self.runs.get(run_id)
        rows = run.rows.values() if run is not None else ()
        return [(row.index, row.task_id) for row in rows if row.status not in TERMINAL_TASK_STATES]

    async def task_hosts(self, run_id: str, tasks: Sequence[tuple[int, str]]) -> list[str]:
        """Return the host of each of these tasks, (index, task_id) each."""
        rows = self.runs[run_id].rows
        return [host_and_port(rows[task_id].spec.url) for _, task_id in tasks]


class SimulatedTasks:
    """The tasks port of one process."""

    def __init__(self, store: Store, link: Link) -> None:
        self._store = store
        self._link = link

    async def claim_task(
        self,
        run_id: str,
        task_id: str,
        *,
        worker: str,
        now: int,
        claimed_until: int,
        max_interruptions: int,
    ) -> Claim:
        link = self._link
        back = await link.go()
        run = self._store.runs.get(run_id)
        claim: Claim = NotClaimable()
        if run is not None:
            claim = run.claim(
                task_id,
                worker=worker,
                now=now,
                until=claimed_until,
                max_interruptions=max_interruptions,
            )
            self._store.completed += (
                isinstance(claim, NotClaimable) and claim.run_status is not None
            )
        link.note(f"claim {task_id} {type(claim).__name__}")
        await link.come_back(back)
        return claim

    async def release_claim(self, run_id: str, task_id: str, *, worker: str) -> None:
        back = await self._link.go()
        run = self._store.runs.get(run_id)
        if run is not None:
            run.release(task_id, worker=worker)
        self._link.note(f"release {task_id}")
        await self._link.come_back(back)

    async def renew_claims(
        self, claims: Sequence[tuple[str, str, int]], *, claimed_until: int
    ) -> None:
        """Extend claims; ignore lost ones."""
        back = await self._link.go()
        for run_id, task_id, claim_number in claims:
            run = self._store.runs.get(run_id)
            if run is not None:
                run.renew(task_id, claim_number, claimed_until)
        self._link.note(f"renew {len(claims)}")
        await self._link.come_back(back)

    async def settle_task(
        self, run_id: str, task_id: str, claim_number: int, settlement: Settlement, *, now: int
    ) -> Settled:
        link, store = self._link, self._store
        back = await link.go()
        run = store.runs.get(run_id)
        settled = Settled(applied=False, run_status=None)
        if run is not None:
            settled = run.settle(task_id, claim_number, settlement, now)
        if isinstance(settlement, Succeeded | Failed):
            store.on_settled(task_id)
            if settled.applied:
                store.completed += 1
            else:
                store.duplicates += 1
        link.note(f"settle {task_id} {type(settlement).__name__} {settled.applied}")
        await link.come_back(back)
        return settled


class SimulatedJobs:
    """The jobs of one process: closed jobs with one run."""

    def __init__(self, store: Store, link: Link) -> None:
        self._store = store
        self._link = link

    async def find_job(self, job_id: str) -> Job | None:
        back = await self._link.go()
        job = self._store.jobs.get(job_id)
        await self._link.come_back(back)
        return job


class SimulatedRuns:
    """The runs of one process."""

    def __init__(self, store: Store, link: Link) -> None:
        self._store = store
        self._link = link

    async def fail_run(self, run_id: str, *, reason: RunFailure, detail: str, now: int) -> bool:
        back = await self._link.go()
        run = self._store.runs.get(run_id)
        ended = run is not None and run.move(RunStatus.FAILED, now)
        if run is not None and ended:
            run.failure_reason, run.failure_detail = reason, detail
        await self._link.come_back(back)
        return ended

    async def add_hosts(self, run_id: str, hosts: Sequence[str], *, now: int) -> tuple[str, ...]:
        back = await self._link.go()
        run = self._store.runs.get(run_id)
        found = () if run is None else run.add_hosts(hosts, now)
        await self._link.come_back(back)
        return found

    async def dispatchable_runs(self) -> list[DispatchableRun]:
        back = await self._link.go()
        found = [run.dispatchable() for run in self._store.runs.values()]
        await self._link.come_back(back)
        return [run for run in found if run is not None]

    async def dispatch_changes(self, *, since: int) -> list[DispatchChange]:
        back = await self._link.go()
        changes = [
            DispatchChange(run_id, run.dispatchable())
            for run_id, run in self._store.runs.items()
            if run.changed_at >= since
        ]
        await self._link.come_back(back)
        return changes

    async def dispatchable_run(self, run_id: str) -> DispatchableRun | None:
        back = await self._link.go()
        run = self._store.runs.get(run_id)
        found = run.dispatchable() if run is not None else None
        await self._link.come_back(back)
        return found


class BlobService:
    """The bodies of the whole fleet: their `sizes` by key. While `down` is not 0, every put
    fails."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.down = 0


class SimulatedBlobs:
    """The blobs port: bodies are read to their end, and only their sizes are kept."""

    def __init__(self, service: BlobService, link: Link) -> None:
        self._service = service
        self._sizes = service.sizes
        self._link = link

    async def put(self, key: str, content: Content) -> int:
        """Take a body; return its size."""
        back = await self._link.go()
        if isinstance(content, bytes):
            size = len(content)
        else:
            size = sum([len(piece) async for piece in content])
        if self._service.down:
            raise ConveyorError(ErrorCode.UNAVAILABLE, "no body can be kept")
        self._sizes[key] = size
        await self._link.come_back(back)
        return size

    async def delete(self, key: str) -> None:
        back = await self._link.go()
        self._sizes.pop(key, None)
        await self._link.come_back(back)


class SimulatedWorkers:
    """The workers port of one process: its way to the reports of all."""

    def __init__(self, reports: MemoryWorkers, link: Link) -> None:
        self._reports = reports
        self._link = link

    async def say(self, report: WorkerReport) -> None:
        back = await self._link.go()
        await self._reports.say(report)
        await self._link.come_back(back)

    async def leave(self, worker_id: str) -> None:
        back = await self._link.go()
        await self._reports.leave(worker_id)
        await self._link.come_back(back)

    async def all(self) -> Sequence[WorkerReport]:
        back = await self._link.go()
        found = await self._reports.all()
        await self._link.come_back(back)
        return found
