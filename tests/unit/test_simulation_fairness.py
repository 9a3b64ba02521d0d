"""Runs beside each other, in simulation: a giant does not starve small ones, and priorities weigh.

The sizes that the acceptance list states are marked full; `scripts/bench dispatch --fairness`
prints the same comparison for three picking rules.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from bench.dispatch_fairness import (
    CAP,
    GIANT_TASKS,
    LIMITS,
    SMALL_RUNS,
    WORKERS,
    WORLD,
    cases,
    compare,
    fairness_markdown,
    fairness_rows,
)
from conveyor.simulation import PICKINGS, JobPlan, Latency, Scenario, simulate
from conveyor.simulation.view import numbers

LEAST_IN_FLIGHT = "least in flight"
ENOUGH_FOR_THE_WINDOW = 9_000
"""Tasks that the fleet cannot get done before the small runs have."""


def assert_within_limits(
    *, small_runs: int, giant: int, pickings: tuple[str, ...], seeds: int
) -> None:
    times: dict[str, list[float]] = {}
    for seed in range(seeds):
        drawn = cases(small_runs=small_runs, giant=giant, pickings=pickings)
        outcomes = compare([replace(case, seed=seed) for case in drawn], processes=1)
        for found in outcomes:
            assert max(found.report.peaks) <= CAP
            assert found.report.bounces == 0
            if found.case.giant:
                assert found.report.finished_at[-1] is None, "the giant was no giant"
        for row in fairness_rows(outcomes):
            if row["picking"] == LEAST_IN_FLIGHT:
                times.setdefault(str(row["arrival"]), []).extend(numbers([row], "times_alone"))
    assert times.keys() == LIMITS.keys()
    for arrival, found_times in times.items():
        assert fmean(found_times) <= LIMITS[arrival], (arrival, found_times)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.extended
def test_a_giant_does_not_starve_small_runs() -> None:
    """So few runs tell little by themselves: the mean of some seeds does."""
    assert_within_limits(
        small_runs=15, giant=ENOUGH_FOR_THE_WINDOW, pickings=(LEAST_IN_FLIGHT,), seeds=4
    )


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_giant_of_100_000_tasks_does_not_starve_fifty_runs_of_20() -> None:
    assert_within_limits(small_runs=SMALL_RUNS, giant=GIANT_TASKS, pickings=PICKINGS, seeds=1)


@pytest.mark.slow
def test_long_tasks_of_a_giant_tell_the_rules_apart() -> None:
    """Taking turns leaves the small runs too few slots if the giant's calls are long."""
    small = tuple(JobPlan(tasks=20, cap=CAP, arrives_at=10.0 + 2 * number) for number in range(8))
    giant = JobPlan(tasks=1_500, cap=CAP, gateway=Latency(30.0, 0.6))
    means = {}
    for picking in PICKINGS:
        report = simulate(
            Scenario(
                world=WORLD,
                policy="reserve",
                jobs=(*small, giant),
                workers=WORKERS,
                picking=picking,
                window=150.0,
            )
        )
        ended = [at for at in report.finished_at[:-1] if at is not None]
        assert len(ended) == len(small)
        taken = [at - plan.arrives_at for at, plan in zip(ended, small, strict=True)]
        means[picking] = sum(taken) / len(taken)

    assert means[LEAST_IN_FLIGHT] < means["round robin"]
    assert means[LEAST_IN_FLIGHT] < means["random"]


@pytest.mark.slow
def test_the_highest_priority_goes_first_and_the_lowest_progresses() -> None:
    """Same work, same arrival: shares of the slots are as 2 to the power of half the distance."""
    report = simulate(
        Scenario(
            world=WORLD,
            policy="reserve",
            jobs=tuple(
                JobPlan(tasks=tasks, cap=CAP, priority=priority)
                for tasks, priority in ((1_000, 9), (1_000, 0))
            ),
            workers=WORKERS,
        )
    )
    first, last = report.finished_at
    assert first is not None
    assert last is not None
    assert first < 0.7 * last
    assert report.completed == 2_000


@pytest.mark.slow
def test_the_lowest_priority_is_served_while_higher_ones_have_work() -> None:
    plans = (JobPlan(tasks=20_000, cap=CAP, priority=9), JobPlan(tasks=40, cap=CAP, priority=0))
    report = simulate(
        Scenario(world=WORLD, policy="reserve", jobs=plans, workers=WORKERS, window=90.0)
    )

    assert report.finished_at[0] is None
    assert report.finished_at[1] is not None


@pytest.mark.slow
def test_a_caller_with_fifty_runs_has_the_share_of_one() -> None:
    """One run of B beside fifty of A gets half of the slots, not a fifty-first part of them."""
    plans = (
        *(JobPlan(tasks=200, cap=CAP, caller="A") for _ in range(50)),
        JobPlan(tasks=700, cap=CAP, caller="B"),
    )
    report = simulate(
        Scenario(world=WORLD, policy="reserve", jobs=plans, workers=WORKERS, window=60.0)
    )

    ended = report.finished_at[-1]
    assert ended is not None
    # 700 tasks of 2.4 s in half of 100 slots take 34 s, and their tail.
    assert ended < 45.0
    assert report.peaks[-1] <= 65
    assert all(at is None for at in report.finished_at[1:-1])


@pytest.mark.slow
def test_rules_are_shown_in_a_table() -> None:
    table = fairness_markdown(fairness_rows(compare(cases(small_runs=2, giant=200), processes=1)))

    lines = table.splitlines()
    assert len(lines) == 2 + 2 * len(PICKINGS) * 2
    assert sum("| 1.00 |" in line for line in lines) >= 2 * len(PICKINGS)
    assert all(f"| {name} | 200 |" in table for name in PICKINGS)
