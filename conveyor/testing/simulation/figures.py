"""From what the services of a fleet have counted to a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conveyor.testing.simulation.fleet import Fleet
from conveyor.testing.simulation.report import Report
from conveyor.testing.simulation.scenario import Scenario

_INSTANT = 1e-9


def measure(scenario: Scenario, fleet: Fleet, *, finished_at: Sequence[float | None]) -> Report:
    """The figures as they stand now. `finished_at`: when each run ended, in order of the plans."""
    queues, gateway, permits, store = fleet.queues, fleet.gateway, fleet.permits, fleet.store
    cap = sum(plan.cap for plan in scenario.jobs)
    tasks = sum(plan.tasks for plan in scenario.jobs)
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
        lost=_lost(fleet),
        counted_twice=_counted_twice(fleet),
        in_hand=queues.on_hand,
        peak_received=queues.peak_on_hand,
        peak_granted=permits.peak_granted,
        granted_over=max(permits.most_over, 0),
        permit_calls=permits.calls,
        receive_calls=queues.calls,
        gateway_calls=gateway.calls,
        throttled=gateway.throttled,
        abandoned=gateway.abandoned,
        fenced=fleet.counted("fenced"),
        peaks=_peaks(fleet),
        finished_at=tuple(finished_at),
        events=fleet.trace.events,
    )


@dataclass(frozen=True, slots=True)
class _Use:
    elapsed: float
    mean: float
    steady: float


def _use(scenario: Scenario, fleet: Fleet, *, tasks: int, cap: int) -> _Use:
    """How much of the caps was used from the first job on; steady up to the last first start."""
    gateway = fleet.gateway
    began = min(plan.arrives_at for plan in scenario.jobs)
    now, spent = fleet.time.seconds(), gateway.call_seconds()
    until, spent_until = gateway.steady if len(gateway.attempts) == tasks else (now, spent)
    elapsed = max(now - began, _INSTANT)
    steady = spent_until / max(until - began, _INSTANT)
    return _Use(elapsed, spent / elapsed / cap, steady / cap)


def _peaks(fleet: Fleet) -> tuple[int, ...]:
    """In order of the plans, whichever arrived first; 0 for a job that has not arrived."""
    runs = [fleet.store.runs.get(run_id) for run_id in fleet.run_ids]
    return tuple(fleet.gateway.loads[run.run.job_id].peak if run else 0 for run in runs)


def _lost(fleet: Fleet) -> int:
    """Tasks that have not ended, of which no message is left."""
    lost = 0
    for run_id, run in fleet.store.runs.items():
        named = fleet.queues.holds(run_id)
        lost += sum(row.ended is None and row.task_id not in named for row in run.rows.values())
    return lost


def _counted_twice(fleet: Fleet) -> int:
    return sum(row.endings > 1 for run in fleet.store.runs.values() for row in run.rows.values())
