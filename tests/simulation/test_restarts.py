"""The cost of restarts and kills."""

from __future__ import annotations

import pytest

from conveyor.engine.leases import REFUSAL_CAP, REFUSAL_CAP_PER_WORKER
from conveyor.simulation import REALISTIC, JobPlan, Kill, Report, RollingRestart, Scenario, simulate
from conveyor.simulation.faults import Fault

WORKERS, CAP, TASKS = 4, 100, 4_000
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.extended) for seed in (1, 2))]
COOLDOWN = 1.5 * max(REFUSAL_CAP, REFUSAL_CAP_PER_WORKER * WORKERS)
"""Most seconds, jitter included, that a worker leaves a full ledger alone."""


def run(seed: int, *faults: Fault) -> Report:
    """A job that takes about 100 s, worked by four workers."""
    return simulate(
        Scenario(
            world=REALISTIC,
            policy="reserve",
            jobs=(JobPlan(tasks=TASKS, cap=CAP),),
            workers=WORKERS,
            seed=seed,
            faults=faults,
        )
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rolling_restart_that_drains_costs_no_utilisation(seed: int) -> None:
    report = run(seed, RollingRestart(at=20.0, every=15.0))
    assert report.completed == TASKS
    assert report.gateway_calls == TASKS
    assert report.seconds_over_cap == 0.0
    assert report.utilisation_steady >= 0.99


@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_worker_costs_its_share_for_one_expiry_at_most(seed: int) -> None:
    """The call-seconds that are missing at the last first start are no more than the permits that
    the worker used, for its lease and the longest pause after which the others look again."""
    undisturbed, killed = run(seed), run(seed, Kill(worker=1, at=20.0))
    share = killed.gateway_calls - TASKS
    less = undisturbed.utilisation_steady - killed.utilisation_steady
    assert killed.completed == TASKS
    assert killed.seconds_over_cap == 0.0
    assert 0 < share <= CAP / 2
    assert 0.0 < less * CAP * killed.elapsed_s <= share * (REALISTIC.permit_lease + COOLDOWN)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3, 33))
def test_a_killed_worker_costs_its_share_for_one_expiry_at_most_often(seed: int) -> None:
    test_a_killed_worker_costs_its_share_for_one_expiry_at_most(seed)
