"""The published comparison in real time: everything of conveyor-dev, the gate off and on.

The queues, the store, the files and the dispatcher are those that conveyor-dev runs; the permit
store takes half a millisecond for a call, the gateway sleeps 20 ms. Nothing is simulated, so that
no two runs give the same figures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio

from bench.dispatch_grid import LEDGER, PUBLISHED_CAP, PUBLISHED_STORE, PUBLISHED_TASKS
from bench.flight import Flight
from conveyor.bootstrap import LoopOptions, Outside, build_worker
from conveyor.clock import SystemClock
from conveyor.dev.binding import DevBinding, open_binding
from conveyor.dev.permits import MemoryPermits
from conveyor.dev.queues import MemoryQueues
from conveyor.domain.api_keys import NONCE_LENGTH, KeySealer
from conveyor.domain.ids import task_id
from conveyor.domain.model import Job, JobStatus, NewTask, Run, RunStats, RunStatus, TaskSpec
from conveyor.engine.telemetry import Telemetry
from conveyor.engine.worker import Worker
from conveyor.gateway.webhook import WebhookRules, WebhookSender
from conveyor.ports.binding import Binding
from conveyor.ports.gateway import ScrapeRequest, Success
from conveyor.ports.permits import LeaseRequest, LedgerState, Permits
from conveyor.ports.queues import DEAD_LETTER_QUEUE, Delivery, run_queue
from conveyor.ports.records import StoredResponse
from conveyor.settings import load
from conveyor.simulation import PUBLISHED
from conveyor.simulation.permits import CountThenInsertPermits, LeaseRows
from conveyor.simulation.view import Row

POLICIES = (("off", PUBLISHED_STORE), ("local", PUBLISHED_STORE), ("reserve", LEDGER))
DEADLINE = 120.0
_POLL = 0.005


class SlowLedger:
    """The ledger of conveyor-dev behind a network: each call takes `seconds`. Counts its calls."""

    def __init__(self, clock: SystemClock, seconds: float) -> None:
        self.calls = 0
        self._ledger = MemoryPermits(clock)
        self._clock = clock
        self._seconds = seconds

    async def acquire_or_renew(
        self, request: LeaseRequest, *, limit: int, lease: float
    ) -> LedgerState:
        """Pass a call on to the ledger after a delay."""
        self.calls += 1
        await self._clock.sleep(self._seconds)
        return await self._ledger.acquire_or_renew(request, limit=limit, lease=lease)


class SleepingGateway:
    """The gateway port: a coroutine that sleeps, and counts concurrent calls."""

    def __init__(self, clock: SystemClock, seconds: float, cap: int) -> None:
        self.flight = Flight(cap)
        self._clock = clock
        self._seconds = seconds

    @asynccontextmanager
    async def scrape(self, _request: ScrapeRequest) -> AsyncIterator[Success]:
        """Sleep, and succeed with an empty body."""
        with self.flight.call(time.perf_counter):
            await self._clock.sleep(self._seconds)
        yield Success(b"done", "text/plain")

    async def aclose(self) -> None:
        """Do nothing: no connection is open."""


class CountedQueues(MemoryQueues):
    """The queues of conveyor-dev; counts receives from run queues and messages hidden again."""

    def __init__(self, dev: DevBinding, clock: SystemClock, visibility: float) -> None:
        super().__init__(dev.ports.tasks.unfinished_after, clock)
        self.calls = self.empty = self.messages = self.repeated = self.bounces = 0
        self._visibility = visibility

    async def receive(
        self, queue: str, *, limit: int, visibility: float, wait: float = 0.0
    ) -> list[Delivery]:
        """Count a receive, and receive."""
        batch = await super().receive(queue, limit=limit, visibility=visibility, wait=wait)
        if queue.startswith(run_queue("")):
            self.calls += 1
            self.empty += not batch
            self.messages += len(batch)
        return batch

    async def change_visibility(
        self, queue: str, receipts: Sequence[str], *, visibility: float
    ) -> None:
        """Count a change, and make it."""
        if visibility != self._visibility:
            self.bounces += len(receipts)
        await super().change_visibility(queue, receipts, visibility=visibility)


def measure_real_time(
    work: Path, *, tasks: int = PUBLISHED_TASKS, only: Sequence[str] = ()
) -> list[Row]:
    """Measure each policy in turn, over a data directory of its own below `work`, which is kept.

    `only` names the policies to measure; empty means all.
    """
    return [
        asyncio.run(_measure(work / policy, policy, store, tasks))
        for policy, store in POLICIES
        if not only or policy in only
    ]


async def _measure(directory: Path, policy: str, store: str, tasks: int) -> Row:
    clock = SystemClock()
    settings = load({}, workers=PUBLISHED.slots)
    dev = await open_binding(directory, clock)
    queues = CountedQueues(dev, clock, settings.visibility_timeout)
    permits, permit_calls = _open_permits(store, clock, PUBLISHED.permit_latency.median)
    gateway = SleepingGateway(clock, PUBLISHED.gateway.median, PUBLISHED_CAP)
    telemetry = Telemetry()
    binding = replace(dev.ports, queues=queues, permits=permits)
    try:
        await _create_job(binding, clock, tasks)
        options = LoopOptions(policy=PUBLISHED.policy(policy), polling=PUBLISHED.polling())
        outside = Outside(gateway, WebhookSender(clock, WebhookRules()), "")
        worker = build_worker(
            binding, outside, settings, clock, telemetry=telemetry, options=options
        )
        began = time.perf_counter()
        await _work(worker, telemetry, tasks)
        seconds = time.perf_counter() - began
    finally:
        await dev.ports.aclose()
    completed = telemetry.tasks.get("successful", 0)
    flight = gateway.flight
    steady = max(flight.last_start - began, 0.001)
    return {
        "world": "real-time",
        "policy": policy,
        "permit_store": store,
        "workers": 1,
        "cap": PUBLISHED_CAP,
        "tasks": tasks,
        "window_s": None,
        "completed": completed,
        "receives": queues.messages,
        "amplification": queues.messages / completed,
        "receive_calls_per_task": queues.calls / completed,
        "empty_receives": queues.empty,
        "bounces": queues.bounces,
        "permit_calls_per_task": permit_calls() / completed,
        "elapsed_s": seconds,
        "utilisation": flight.call_seconds / (PUBLISHED_CAP * seconds),
        "utilisation_steady": flight.until_last_start / (PUBLISHED_CAP * steady),
        "peak_in_flight": flight.peak,
        "seconds_over_cap": flight.seconds_over_cap,
        "duplicates": 0,
        "dead_lettered": queues.depth(DEAD_LETTER_QUEUE),
        "seed": None,
        "trace_hash": None,
    }


def _open_permits(
    store: str, clock: SystemClock, seconds: float
) -> tuple[Permits, Callable[[], int]]:
    """Make a permit store with calls of `seconds`, and a function that counts them."""
    if store == LEDGER:
        ledger = SlowLedger(clock, seconds)
        return ledger, lambda: ledger.calls
    rows = LeaseRows(clock, partial(clock.sleep, seconds))
    return CountThenInsertPermits(rows), rows.calls.total


async def _work(worker: Worker, telemetry: Telemetry, tasks: int) -> None:
    """Run a worker until every task has ended. Raises TimeoutError."""
    with anyio.fail_after(DEADLINE):
        async with anyio.create_task_group() as group:
            group.start_soon(partial(worker.run, grace=0.0))
            while sum(telemetry.tasks.values()) < tasks:  # noqa: ASYNC110  (they call nobody)
                await anyio.sleep(_POLL)
            worker.stop()


async def _create_job(binding: Binding, clock: SystemClock, tasks: int) -> None:
    """Create a job whose run is ready to be worked."""
    now, job_id, run_id, caller = clock.now(), clock.new_id(), clock.new_id(), "caller"
    sealer = KeySealer([binding.root_secret])
    job = Job(
        job_id=job_id,
        caller=caller,
        status=JobStatus.CLOSED,
        created_at=now,
        updated_at=now,
        max_inflight=PUBLISHED_CAP,
        sealed_key=sealer.seal("benchmark", caller=caller, nonce=clock.token(NONCE_LENGTH)),
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
        next_index=tasks,
        stats=RunStats(total=tasks),
    )
    spec = TaskSpec("https://shop.example.com/products/1")
    rows = [NewTask(index, task_id(run_id, index), spec) for index in range(tasks)]
    await binding.jobs.create_job(job, run, rows, answer=StoredResponse(201, b"{}"), once=None)
