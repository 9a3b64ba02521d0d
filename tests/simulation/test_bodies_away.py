"""An hour in which no body can be kept: hardly a call of the gateway is paid for in vain, however
many tasks and jobs wait, and no attempt is used up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conveyor.aio.resilience import FIRST_PAUSE, LONGEST_PAUSE
from conveyor.simulation import REALISTIC, BodiesDown, JobPlan, Scenario, simulate

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]

HOUR = 3_600.0
WORKERS = 2
SLOTS = 20
DOUBLINGS = 6
"""Trials until their pause is the longest."""
WORLD = replace(REALISTIC, name="bodies", slots=SLOTS)


def test_an_hour_without_the_store_of_bodies_costs_few_calls_and_no_task() -> None:
    assert FIRST_PAUSE * 2**DOUBLINGS > LONGEST_PAUSE
    report = simulate(
        Scenario(
            world=WORLD,
            policy="reserve",
            jobs=(JobPlan(tasks=600, cap=40), JobPlan(tasks=400, cap=40)),
            workers=WORKERS,
            faults=(BodiesDown(1.0, HOUR),),
        )
    )
    assert (report.completed, report.lost) == (report.tasks, 0)
    assert (report.counted_twice, report.dead_lettered) == (0, 0)
    assert report.elapsed_s > HOUR
    in_vain = report.gateway_calls - report.tasks
    assert 0 < in_vain <= WORKERS * (SLOTS + HOUR / LONGEST_PAUSE + DOUBLINGS)
