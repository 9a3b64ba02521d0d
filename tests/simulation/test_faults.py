"""Fleets in trouble, seed after seed: no task lost or counted twice, and never a call over the cap.

Each test prints, where it fails, the command that replays its scenario. Two seeds of every kind
of trouble and fifty of troubles by chance run each time; `-m full` runs fifty and thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from conveyor.testing.simulation import (
    REALISTIC,
    Duplicates,
    Fault,
    GatewayLimit,
    GatewaySlow,
    JobPlan,
    Kill,
    LostAcks,
    Pause,
    PermitsDown,
    PermitsRestartEmpty,
    QueueLost,
    Report,
    RollingRestart,
    Scenario,
    random_faults,
    simulate,
)

WORLD = replace(REALISTIC, name="small workers", slots=20)
WORKERS, CAP, TASKS = 4, 40, 400
SKEW = 30.0

TROUBLES: dict[str, tuple[Fault, ...]] = {
    "one killed": (Kill(worker=1, at=6.0),),
    "three killed": (Kill(worker=0, at=5.0), Kill(worker=1, at=6.0), Kill(worker=2, at=7.0)),
    "killed and back": tuple(Kill(worker=w, at=5.0 + w, back_after=10.0) for w in range(3)),
    "stopped beyond the lease": (Pause(worker=0, at=5.0, seconds=50.0),),
    "stopped for a moment": (Pause(worker=0, at=5.0, seconds=8.0),),
    "permits away for 15 s": (PermitsDown(at=5.0, seconds=15.0),),
    "permits away for 60 s": (PermitsDown(at=5.0, seconds=60.0),),
    "permits come back empty": (PermitsRestartEmpty(at=8.0),),
    "gateway slow": (GatewaySlow(at=5.0, seconds=60.0, factor=8.0),),
    "gateway admits less": (GatewayLimit(limit=24),),
    "acknowledgements lost": (LostAcks(share=0.2),),
    "messages doubled": (Duplicates(share=0.3),),
    "queue lost": (QueueLost(at=8.0),),
    "restarted hard": (RollingRestart(at=5.0, every=8.0, graceful=False),),
    "restarted gently": (RollingRestart(at=5.0, every=8.0, graceful=True),),
}


def run(faults: Sequence[Fault], seed: int, policy: str = "reserve") -> Report:
    """A job worked by a fleet whose clocks disagree, in trouble."""
    return simulate(
        Scenario(
            world=WORLD,
            policy=policy,
            jobs=(JobPlan(tasks=TASKS, cap=CAP),),
            workers=WORKERS,
            seed=seed,
            faults=tuple(faults),
            clock_skew=SKEW,
        )
    )


def check(report: Report, request: pytest.FixtureRequest) -> None:
    """What holds whatever happens."""
    again = f'replay: .venv/bin/python -m pytest "{request.node.nodeid}" -m "full or not full"'
    assert report.completed == TASKS, again
    assert (report.lost, report.counted_twice, report.dead_lettered) == (0, 0, 0), again
    assert report.peak_in_flight <= CAP, again
    assert report.seconds_over_cap == 0.0, again
    assert report.granted_over == 0, again


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("seed", range(2))
def test_trouble_of_every_kind(trouble: str, seed: int, request: pytest.FixtureRequest) -> None:
    check(run(TROUBLES[trouble], seed), request)


@pytest.mark.parametrize("trouble", TROUBLES)
def test_trouble_of_every_kind_without_a_buffer(
    trouble: str, request: pytest.FixtureRequest
) -> None:
    report = run(TROUBLES[trouble], 7, policy="reserve-strict")
    check(report, request)


@pytest.mark.parametrize("seed", range(50))
def test_troubles_by_chance(seed: int, request: pytest.FixtureRequest) -> None:
    check(run(random_faults(seed, workers=WORKERS, duration=60.0, cap=CAP), seed), request)


@pytest.mark.full
@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("seed", range(2, 52))
def test_trouble_of_every_kind_often(
    trouble: str, seed: int, request: pytest.FixtureRequest
) -> None:
    check(run(TROUBLES[trouble], seed), request)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(50, 2_050))
def test_troubles_by_chance_often(seed: int, request: pytest.FixtureRequest) -> None:
    check(run(random_faults(seed, workers=WORKERS, duration=60.0, cap=CAP), seed), request)
