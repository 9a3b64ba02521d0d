"""Fleets of which a subset serves each run, in simulation: their lanes, caps, shares and kills."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import cast

import pytest

from conveyor.engine.subset import PATIENCE, REPORT_EVERY
from conveyor.simulation import REALISTIC, Fault, JobPlan, Report, Scenario, World, simulate
from conveyor.simulation.process import SimulatedFleet

LEAST = 8
WORLD = replace(REALISTIC, name="small workers", slots=10, heartbeat=5.0)
ARRIVAL = 30.0
"""Virtual seconds in which the workers of a new fleet hear of each other."""


def scenario(
    workers: int,
    *jobs: JobPlan,
    world: World = WORLD,
    window: float | None = None,
    faults: tuple[Fault, ...] = (),
    least: int = LEAST,
) -> Scenario:
    return Scenario(
        world=world,
        policy="reserve",
        jobs=jobs,
        workers=workers,
        window=window,
        faults=faults,
        run_workers=least,
    )


def whole(report: Report) -> None:
    assert (report.completed, report.lost, report.counted_twice) == (report.tasks, 0, 0)
    assert (report.seconds_over_cap, report.granted_over) == (0.0, 0)


@dataclass
class KillSubset:
    """SIGKILL for all workers that serve the first job, once; `taken_over` is when others did."""

    at: float
    killed: list[int] = field(default_factory=list)
    taken_over: float = 0.0

    async def happen(self, fleet: SimulatedFleet) -> None:
        await fleet.until(self.at)
        run_id = fleet.run_ids[0]
        for number, worker in enumerate(fleet.workers):
            if run_id in worker.serving():
                self.killed.append(number)
                worker.kill()
        while not any(run_id in worker.serving() for worker in fleet.workers):
            await fleet.time.sleep(0.5)
        self.taken_over = fleet.time.seconds()


@pytest.mark.slow
def test_a_small_fleet_serves_every_run_with_every_worker() -> None:
    job = JobPlan(tasks=1_000, cap=20)
    report = simulate(scenario(4, job, window=25.0))
    alone = simulate(scenario(4, job, window=25.0, least=0))

    assert report.lanes == alone.lanes == (1, 1, 1, 1)
    assert report.utilisation_steady == pytest.approx(alone.utilisation_steady, abs=0.02)
    assert report.permit_calls_per_task == pytest.approx(alone.permit_calls_per_task, rel=0.2)


def crowd(workers: int, *, jobs: int, seconds: float) -> Scenario:
    """A fleet with runs of half of its slots in all, at most 50 each."""
    cap = min(50, workers * WORLD.slots // (2 * jobs))
    plans = tuple(
        JobPlan(tasks=round(cap * seconds), cap=cap, arrives_at=ARRIVAL) for _ in range(jobs)
    )
    return scenario(workers, *plans, window=ARRIVAL + seconds)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", [10, pytest.param(100, marks=pytest.mark.extended)])
def test_a_subset_uses_the_cap_as_a_whole_fleet_does(workers: int) -> None:
    made = crowd(workers, jobs=workers // 10 + 1, seconds=30.0)
    some, every = simulate(made), simulate(replace(made, run_workers=0))

    jobs = len(made.jobs)
    assert every.lanes == (jobs,) * workers
    assert sum(some.lanes) == jobs * some_workers(made)
    assert some.utilisation_steady > every.utilisation_steady - 0.02
    assert some.permit_calls_per_task < every.permit_calls_per_task
    assert (some.seconds_over_cap, some.granted_over) == (0.0, 0)


def some_workers(made: Scenario) -> int:
    """The workers that the cap needs: its slots twice over, and the least number."""
    return max(LEAST, -(-2 * made.jobs[0].cap // WORLD.slots))


@pytest.mark.full
@pytest.mark.timeout(1_200)
def test_a_thousand_workers_open_few_lanes_each() -> None:
    made = crowd(1_000, jobs=10, seconds=10.0)
    report = simulate(made)

    assert sum(report.lanes) == 10 * some_workers(made)
    assert max(report.lanes) <= 5
    assert report.utilisation_steady > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("workers", [20, pytest.param(100, marks=pytest.mark.extended)])
def test_another_subset_takes_over_within_ten_seconds_and_a_discovery(workers: int) -> None:
    fault = KillSubset(at=ARRIVAL + 20.0)
    job = JobPlan(tasks=600, cap=20, arrives_at=ARRIVAL)
    report = simulate(scenario(workers, job, faults=(cast(Fault, fault),)))

    assert len(fault.killed) == LEAST
    whole(report)
    assert fault.taken_over - fault.at <= PATIENCE + WORLD.discovery_interval + 1.0
    assert fault.taken_over > fault.at
    assert REPORT_EVERY < PATIENCE
    # What the dead hold lapses meanwhile: their permits, then their claims.
    assert report.elapsed_s < 20.0 + 600 * 2.4 / 20 + 2 * WORLD.permit_lease + WORLD.visibility


@pytest.mark.slow
@pytest.mark.extended
def test_runs_on_the_same_workers_share_them_and_the_free_ones_join() -> None:
    """Ten runs could use twice the slots of the fleet: each gets its part, and no slot is idle."""
    plans = tuple(JobPlan(tasks=2_000, cap=40, arrives_at=ARRIVAL) for _ in range(10))
    some = simulate(scenario(20, *plans, window=ARRIVAL + 60.0))

    assert some.utilisation_steady * 400 > 0.93 * 200
    assert min(some.peaks) >= 8


@pytest.mark.slow
@pytest.mark.extended
def test_a_caller_with_many_runs_has_one_share_in_subsets_too() -> None:
    plans = (
        *(JobPlan(tasks=500, cap=20, caller="A", arrives_at=ARRIVAL) for _ in range(20)),
        JobPlan(tasks=350, cap=60, caller="B", arrives_at=ARRIVAL),
    )
    report = simulate(scenario(12, *plans, window=ARRIVAL + 60.0))

    ended = report.finished_at[-1]
    assert ended is not None
    assert report.peaks[-1] > 30
