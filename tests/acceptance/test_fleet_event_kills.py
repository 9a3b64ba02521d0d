"""Processes of a fleet killed around the ends of runs: each run that ended has one event, delivered
at least once."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from conveyor.testing.fleet import RoleFleet
from tests.acceptance.support_event_kills import (
    SlowReceiver,
    all_delivered,
    assert_one_event_a_run,
    jobs_to_tell,
    logged,
    slow_receiver,
)
from tests.acceptance.support_fleet import fleet
from tests.acceptance.support_fleet_runs import QUICK, ended, insisting, waiting_for
from tests.acceptance.support_wire import Wire

pytestmark = [pytest.mark.server, pytest.mark.extended, pytest.mark.timeout(600)]


@pytest.fixture
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleFleet]:
    """A fleet that posts events to this machine too, as no other is at hand."""
    with fleet(
        tmp_path_factory.mktemp("fleet"),
        apis=2,
        workers=3,
        trouble=lambda _role, _number: ("--loopback",),
        outbox_interval=0.5,
        **QUICK,
    ) as started:
        yield started


def submit(wire: Wire, receiver: SlowReceiver, name: str) -> list[str]:
    """Submit jobs whose runs end soon, whatever is killed meanwhile, and stop the last one."""
    made: list[str] = []
    for number, body in enumerate(jobs_to_tell(receiver, name)):
        key = f"{name}-{number}"
        made.append(insisting(partial(wire.send, "POST", "/jobs", body=body, key=key))["job_id"])
    insisting(partial(wire.send, "POST", f"/jobs/{made[-1]}/stop"))
    return made


@pytest.mark.guarantee("G20")
@pytest.mark.parametrize(
    ("kills", "seed"),
    [
        (8, 1),
        pytest.param(40, 2, marks=(pytest.mark.full, pytest.mark.timeout(1_800)), id="full"),
    ],
)
def test_each_run_has_one_event_whatever_is_killed(
    running: RoleFleet, kills: int, seed: int
) -> None:
    draw = random.Random(seed)
    jobs: list[str] = []
    with slow_receiver(seed) as receiver, Wire(running.api) as wire:
        for number in range(kills):
            jobs += submit(wire, receiver, f"kill-{seed}-{number}")
            time.sleep(draw.random() * 1.5)  # the moment is what the test varies
            is_api = number % 4 == 3
            victim = draw.choice(running.apis if is_api else running.workers)
            victim.kill()
            if is_api:
                running.restart(victim)
            else:
                victim.start()  # not waited for: it may be killed again while it boots
        runs: list[dict[str, Any]] = [ended(wire, job_id) for job_id in jobs]
        waiting_for(lambda: all_delivered(wire, len(jobs)), "each end is told")
        deliveries = logged(wire)
        for process in running.workers:
            process.ready()
    assert_one_event_a_run(receiver, runs, deliveries)
