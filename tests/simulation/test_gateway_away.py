"""A gateway that nobody can reach for a time: no task is lost or counted for it, and each worker
tries no more than once a second."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conveyor.simulation import REALISTIC, GatewayDown, JobPlan, Scenario, simulate

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]

WORKERS = 2
SLOTS = 20
WORLD = replace(REALISTIC, name="gateway", slots=SLOTS)


@pytest.mark.parametrize("seconds", [7.0, 60.0, pytest.param(3_600.0, marks=pytest.mark.full)])
def test_a_fleet_waits_for_its_gateway(seconds: float) -> None:
    report = simulate(
        Scenario(
            world=WORLD,
            policy="reserve",
            jobs=(JobPlan(tasks=300, cap=40), JobPlan(tasks=200, cap=40)),
            workers=WORKERS,
            faults=(GatewayDown(5.0, seconds),),
        )
    )
    assert (report.completed, report.lost) == (report.tasks, 0)
    assert (report.counted_twice, report.dead_lettered) == (0, 0)
    assert report.elapsed_s > seconds
    # Those in hand as it went away meet it, and one a second of each worker afterwards.
    assert 0 < report.unreached <= WORKERS * (2 * SLOTS + seconds + 1)
    assert report.gateway_calls - report.tasks <= WORKERS * SLOTS
