"""Simulates small runs beside a giant one, for each rule of picking a run, to show whether it holds
them up.

Small runs alone, and the same ones with the same arrivals beside a giant that would fill the fleet
by itself. A case ends when its small runs have had time to end, not with the giant.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from bench.harness import cpus
from conveyor.simulation import PICKINGS, REALISTIC, JobPlan, Report, Scenario, simulate
from conveyor.simulation.view import Row, numbers, spread

SMALL_RUNS = 50
TASKS_PER_RUN = 20
GIANT_TASKS = 100_000
WORLD = replace(REALISTIC, name="realistic-hinted", discovery_interval=0.1)
"""Workers learn of a run at once. Otherwise up to ten seconds of waiting for that would be part of
the time of every small run, alone or not, and hide the cost of the giant."""
WORKERS = 2
CAP = 100
HEAD_START = 10.0
"""Seconds in which the giant takes the fleet before the first small run comes."""
ARRIVALS = {"one every 2 s": 2.0, "all at once": 0.0}
LIMITS = {"one every 2 s": 1.15, "all at once": 1.25}
"""The limits of a small run's average time, as a multiple of its time alone."""
_TIME_TO_END = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Small runs of `TASKS_PER_RUN` tasks, `every` seconds; `giant`: tasks of the run beside them,
    or 0."""

    picking: str
    arrival: str
    small_runs: int
    giant: int
    seed: int = 0

    def scenario(self) -> Scenario:
        """Make the scenario: the small runs first, so that they are the same runs in every case."""
        every = ARRIVALS[self.arrival]
        jobs = [
            JobPlan(tasks=TASKS_PER_RUN, cap=CAP, arrives_at=HEAD_START + number * every)
            for number in range(self.small_runs)
        ]
        if self.giant:
            jobs.append(JobPlan(tasks=self.giant, cap=CAP))
        return Scenario(
            world=WORLD,
            policy="reserve",
            jobs=tuple(jobs),
            workers=WORKERS,
            picking=self.picking,
            window=HEAD_START + self.small_runs * every + _TIME_TO_END,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The seconds of each small run, sorted, and the giant's completed tasks meanwhile."""

    case: Case
    seconds: tuple[float, ...]
    report: Report

    @property
    def mean(self) -> float:
        """Return the mean seconds of a small run."""
        return sum(self.seconds) / len(self.seconds)


def cases(
    *, small_runs: int = SMALL_RUNS, giant: int = GIANT_TASKS, pickings: Sequence[str] = PICKINGS
) -> list[Case]:
    """Make every rule's cases, with both arrivals, alone and beside the giant."""
    return [
        Case(picking=picking, arrival=arrival, small_runs=small_runs, giant=beside)
        for arrival in ARRIVALS
        for picking in pickings
        for beside in (0, giant)
    ]


def outcome(case: Case) -> Outcome:
    """Simulate one case. Raises RuntimeError if a small run has not ended in time."""
    scenario = case.scenario()
    report = simulate(scenario)
    small = list(zip(scenario.jobs, report.finished_at, strict=True))[: case.small_runs]
    seconds = [ended - plan.arrives_at for plan, ended in small if ended is not None]
    if len(seconds) < case.small_runs:
        raise RuntimeError(f"{case.small_runs - len(seconds)} small runs have not ended")
    return Outcome(case=case, seconds=tuple(sorted(seconds)), report=report)


def compare(wanted: Sequence[Case], *, processes: int | None = None) -> list[Outcome]:
    """Simulate all cases, by default with one process for each CPU."""
    processes = processes or cpus()
    if processes == 1:
        return [outcome(case) for case in wanted]
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=fresh) as pool:
        return list(pool.map(outcome, wanted))


def fairness_rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """Make one row for each case, with a small run's time as a multiple of its time alone."""
    alone = {
        (found.case.picking, found.case.arrival): found.mean
        for found in outcomes
        if not found.case.giant
    }
    return [
        {
            "arrival": found.case.arrival,
            "picking": found.case.picking,
            "giant": found.case.giant,
            "mean_s": found.mean,
            "p90_s": found.seconds[int(len(found.seconds) * 0.9) - 1],
            "max_s": found.seconds[-1],
            "times_alone": found.mean / alone[found.case.picking, found.case.arrival],
            "receive_calls_per_task": found.report.receive_calls_per_task,
            "permit_calls_per_task": found.report.permit_calls_per_task,
            "bounces": found.report.bounces,
            "seed": found.case.seed,
        }
        for found in outcomes
    ]


def fairness_markdown(rows: Sequence[Row]) -> str:
    """Format a table with a line for each case."""
    lines = [
        "| small runs arrive | picking | beside | mean s | p90 s | max s | × alone |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = " | ".join(
            spread(numbers([row], name), "{:.2f}".format)
            for name in ("mean_s", "p90_s", "max_s", "times_alone")
        )
        beside = f"{row['giant']:,}" if row["giant"] else "nothing"
        lines.append(f"| {row['arrival']} | {row['picking']} | {beside} | {times} |")
    return "\n".join(lines)
