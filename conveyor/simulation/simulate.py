"""Runs one scenario from its first job to its last task, or to the end of its window."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import anyio
from anyio.abc import TaskGroup

from conveyor.domain.api_keys import NONCE_LENGTH, KeySealer
from conveyor.domain.hosts import host_and_port
from conveyor.domain.ids import task_id
from conveyor.domain.model import (
    Job,
    JobStatus,
    NewTask,
    Run,
    RunStats,
    RunStatus,
    TaskSpec,
)
from conveyor.domain.task_rules import TERMINAL_TASK_STATES
from conveyor.records.task_sending import LEAST_ROWS
from conveyor.simulation.gateway import HostPicker
from conveyor.simulation.loop import VirtualTime
from conveyor.simulation.loop import run as run_in_virtual_time
from conveyor.simulation.process import SECRET, FleetOptions, SimulatedFleet
from conveyor.simulation.report import Report
from conveyor.simulation.rows import RunRows
from conveyor.simulation.scenario import JobPlan, Scenario

COLLECT_AFTER = (50_000, 20, 100)
STALL = 3_600.0
"""Virtual seconds without the end of a task after which a simulation is given up."""


def simulate(scenario: Scenario) -> Report:
    """Run a scenario in virtual time; the same scenario gives the same report, in any process.

    Must not be called from a running event loop. Raises RuntimeError if the backend is trio and
    trio is not installed, and any unexpected error of the production code.
    """
    with _quiet(), _rare_collections():
        return run_in_virtual_time(
            lambda time: _Simulation(scenario, time).run(),
            backend=scenario.backend,
            seed=scenario.seed,
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the logs: faults are the purpose of a simulation."""
    log = logging.getLogger("conveyor")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage rarely: rows and messages live to the end, so repeated searches find
    nothing."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*COLLECT_AFTER)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


class _Simulation:
    def __init__(self, scenario: Scenario, time: VirtualTime) -> None:
        self._scenario = scenario
        self._time = time
        self._fleet = SimulatedFleet(
            time,
            scenario.world,
            FleetOptions(
                policy=scenario.policy,
                permit_store=scenario.permit_store,
                picking=scenario.picking,
                workers=scenario.workers,
                seed=scenario.seed,
                clock_skew=scenario.clock_skew,
                run_workers=scenario.run_workers,
                caller_max_inflight=scenario.caller_max_inflight,
                host_limit=scenario.host_limit,
                host_rate=scenario.host_rate,
            ),
        )
        self._hosts = HostPicker(scenario.hosts, skew=scenario.host_skew, seed=scenario.seed)
        self._fleet.run_ids = [""] * len(scenario.jobs)
        self._fleet.store.on_ended = self._run_ended
        self._sealer = KeySealer([SECRET])
        self._finished_at: dict[str, float] = {}
        self._all_ended = anyio.Event()

    async def run(self) -> Report:
        scenario, fleet = self._scenario, self._fleet
        async with anyio.create_task_group() as group:
            for place, plan in enumerate(scenario.jobs):
                if plan.arrives_at <= 0:
                    self._submit(place, plan)
                else:
                    group.start_soon(self._submit_later, place, plan)
            fleet.start_all(group)
            for fault in scenario.faults:
                group.start_soon(fault.happen, fleet)
            await self._end(group)
            finished_at = [self._finished_at.get(run_id) for run_id in fleet.run_ids]
            report = measure(scenario, fleet, finished_at=finished_at)
            fleet.end()
            group.cancel_scope.cancel()
        return report

    async def _end(self, group: TaskGroup) -> None:
        """Return when every run has ended, the window is over, or nothing moves any more."""
        group.start_soon(self._watch_for_a_stall)
        if self._scenario.window is None:
            await self._all_ended.wait()
            return
        with anyio.move_on_after(self._scenario.window):
            await self._all_ended.wait()

    async def _watch_for_a_stall(self) -> None:
        last_arrival = max(plan.arrives_at for plan in self._scenario.jobs)
        completed = -1
        while completed != self._fleet.store.completed or self._time.seconds() <= last_arrival:
            completed = self._fleet.store.completed
            await self._time.sleep(STALL)
        self._all_ended.set()

    async def _submit_later(self, place: int, plan: JobPlan) -> None:
        await self._fleet.until(plan.arrives_at)
        self._submit(place, plan)

    def _submit(self, place: int, plan: JobPlan) -> None:
        fleet = self._fleet
        clock, now = fleet.clock, fleet.clock.now()
        job_id, run_id = clock.new_id(), clock.new_id()
        job = Job(
            job_id=job_id,
            caller=plan.caller,
            status=JobStatus.CLOSED,
            created_at=now,
            updated_at=now,
            max_inflight=plan.cap,
            priority=plan.priority,
            sealed_key=self._sealer.seal(
                job_id, caller=plan.caller, nonce=clock.token(NONCE_LENGTH)
            ),
            latest_run_id=run_id,
            run_count=1,
        )
        made = Run(
            run_id=run_id,
            job_id=job_id,
            run_sequence=1,
            status=RunStatus.RUNNING,
            created_at=now,
            updated_at=now,
            last_batch_received=True,
            next_index=plan.tasks,
            stats=RunStats(total=plan.tasks),
        )
        tasks = [
            NewTask(index, task_id(run_id, index), TaskSpec(url=self._hosts.url(place, index)))
            for index in range(plan.tasks)
        ]
        latency = plan.gateway or self._scenario.world.gateway
        fleet.gateway.open(job_id, plan.cap, latency, caller=plan.caller)
        fleet.store.add(job, made, tasks)
        self._send(job_id, run_id, tasks)
        fleet.run_ids[place] = run_id
        fleet.trace.note(f"submitted {run_id}")

    def _send(self, job_id: str, run_id: str, tasks: list[NewTask]) -> None:
        """Enqueue the tasks of a run, those of its first hosts in queues of their own."""
        fleet, scenario = self._fleet, self._scenario
        hosts: list[str] = []
        lanes: tuple[str, ...] = ()
        if scenario.host_limit or scenario.host_rate:
            hosts = [host_and_port(task.spec.url) for task in tasks]
            if len(tasks) >= LEAST_ROWS:
                lanes = fleet.store.runs[run_id].add_hosts(hosts, fleet.clock.now())
        references = [(task.index, task.task_id) for task in tasks]
        fleet.queues.send_tasks(job_id, run_id, references, hosts, lanes)

    def _run_ended(self, ended: RunRows) -> None:
        self._fleet.trace.note(f"ended {ended.run.run_id} {ended.status}")
        self._finished_at[ended.run.run_id] = self._time.seconds()
        if len(self._finished_at) == len(self._scenario.jobs):
            self._all_ended.set()


_INSTANT = 1e-9


def measure(
    scenario: Scenario, fleet: SimulatedFleet, *, finished_at: Sequence[float | None]
) -> Report:
    """Compute the figures as they stand. `finished_at` are the ends of the runs."""
    queues, gateway, permits, store = fleet.queues, fleet.gateway, fleet.permits, fleet.store
    cap, tasks = _asked(scenario)
    use = _use(scenario, fleet, tasks=tasks, cap=cap)
    each = max(store.completed, 1)
    return Report(
        world=scenario.world.name,
        policy=scenario.policy,
        permit_store=scenario.permit_store,
        workers=scenario.workers,
        cap=cap,
        tasks=tasks,
        window_s=scenario.window if None in finished_at else None,
        completed=store.completed,
        receives=queues.received,
        amplification=queues.received / each,
        receive_calls_per_task=queues.calls / each,
        empty_receives=queues.empties,
        bounces=fleet.counted("bounces"),
        permit_calls_per_task=permits.calls / each,
        elapsed_s=use.elapsed,
        utilisation=use.mean,
        utilisation_steady=use.steady,
        peak_in_flight=gateway.peak,
        seconds_over_cap=gateway.seconds_over_cap(),
        duplicates=store.duplicates,
        dead_lettered=queues.dead_lettered,
        seed=scenario.seed,
        trace_hash=fleet.trace.digest(),
        lost=_count_lost(fleet),
        counted_twice=_counted_twice(fleet),
        in_hand=queues.on_hand,
        peak_received=queues.peak_on_hand,
        peak_granted=permits.peak_granted,
        granted_over=max(permits.most_over, 0),
        permit_calls=permits.calls,
        receive_calls=queues.calls,
        fenced=fleet.counted("fenced"),
        peaks=_peaks(fleet),
        **_of_calls(scenario, fleet),
        lanes=tuple(len(worker.serving()) for worker in fleet.workers),
        finished_at=tuple(finished_at),
        events=fleet.trace.events,
    )


def _of_calls(scenario: Scenario, fleet: SimulatedFleet) -> dict[str, Any]:
    """Compute the figures of the gateway and of hosts, by their names in a report."""
    gateway, hosts = fleet.gateway, fleet.gateway.hosts
    return {
        "gateway_calls": gateway.calls,
        "throttled": gateway.throttled,
        "unreached": gateway.unreached,
        "abandoned": gateway.abandoned,
        "host_peak": hosts.peak,
        "host_starts": hosts.most_starts,
        "host_use": hosts.use(scenario.host_limit, scenario.host_rate),
        "uninvited": hosts.uninvited,
        "most_received": fleet.queues.most_received,
    }


def _asked(scenario: Scenario) -> tuple[int, int]:
    """Add up the caps and the tasks of all jobs."""
    return sum(plan.cap for plan in scenario.jobs), sum(plan.tasks for plan in scenario.jobs)


@dataclass(frozen=True, slots=True)
class _Use:
    elapsed: float
    mean: float
    steady: float


def _use(scenario: Scenario, fleet: SimulatedFleet, *, tasks: int, cap: int) -> _Use:
    """Compute the use of the caps from the first job on; steady up to the last first start."""
    gateway = fleet.gateway
    began = min(plan.arrives_at for plan in scenario.jobs)
    now, spent = fleet.time.seconds(), gateway.call_seconds()
    until, spent_until = gateway.steady if len(gateway.attempts) == tasks else (now, spent)
    elapsed = max(now - began, _INSTANT)
    steady = spent_until / max(until - began, _INSTANT)
    return _Use(elapsed, spent / elapsed / cap, steady / cap)


def _peaks(fleet: SimulatedFleet) -> tuple[int, ...]:
    """Return the peaks in order of the plans, not of arrival; 0 for a job that has not arrived."""
    runs = [fleet.store.runs.get(run_id) for run_id in fleet.run_ids]
    return tuple(fleet.gateway.loads[run.run.job_id].peak if run else 0 for run in runs)


def _count_lost(fleet: SimulatedFleet) -> int:
    """Count the tasks that have not ended and that no message names."""
    lost = 0
    for run_id, run in fleet.store.runs.items():
        named = fleet.queues.holds(run_id)
        lost += sum(
            row.status not in TERMINAL_TASK_STATES and row.task_id not in named
            for row in run.rows.values()
        )
    return lost


def _counted_twice(fleet: SimulatedFleet) -> int:
    return sum(row.endings > 1 for run in fleet.store.runs.values() for row in run.rows.values())
