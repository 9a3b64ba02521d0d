"""Messages that are received again and again without being worked: bounced, or given back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from conveyor.simulation import (
    REALISTIC,
    Fault,
    JobPlan,
    LostAcks,
    PermitsDown,
    Report,
    Scenario,
    simulate,
)

pytestmark = pytest.mark.extended

LIMIT = 20
"""Receives after which the queue gives a message up."""
TASKS = 25
WORLD = replace(REALISTIC, name="worn", max_receives=LIMIT, bounce=1.0, bounce_cap=1.0, slots=20)
RECEIVE_FIRST = ("off", "local", "local-exact")


def run(policy: str, seed: int, faults: Sequence[Fault] = (), store: str = "ledger") -> Report:
    """A job of which one call at a time may be made, so that nearly every receive is in vain."""
    return simulate(
        Scenario(
            world=WORLD,
            policy=policy,
            jobs=(JobPlan(tasks=TASKS, cap=1),),
            workers=2,
            permit_store=store,
            seed=seed,
            faults=tuple(faults),
        )
    )


def check(report: Report) -> None:
    """No message was given up, and the cap was kept."""
    assert (report.completed, report.lost, report.dead_lettered) == (TASKS, 0, 0)
    assert report.counted_twice == 0
    assert report.seconds_over_cap == 0.0


@pytest.mark.parametrize("policy", RECEIVE_FIRST)
@pytest.mark.parametrize("store", ["ledger", "atomic-rows"])
def test_bouncing_uses_no_receives_up(policy: str, store: str) -> None:
    report = run(policy, 1, store=store)
    check(report)
    assert report.bounces > LIMIT * TASKS / 2


@pytest.mark.parametrize("policy", RECEIVE_FIRST)
def test_bouncing_with_lost_answers_uses_no_receives_up(policy: str) -> None:
    report = run(policy, 2, [LostAcks(0.2)])
    check(report)
    assert report.bounces > LIMIT * TASKS / 4


@pytest.mark.parametrize("policy", RECEIVE_FIRST)
@pytest.mark.parametrize("seconds", [60.0, 200.0])
def test_what_is_given_back_while_permits_are_away_is_not_given_up(
    policy: str, seconds: float
) -> None:
    """A message whose permit nobody can grant goes back at once, and comes again at once."""
    report = run(policy, 3, [PermitsDown(5.0, seconds)])
    check(report)
    assert report.elapsed_s > seconds


def test_permits_first_needs_no_second_receive() -> None:
    report = run("reserve", 4)
    check(report)
    assert report.receives == TASKS
