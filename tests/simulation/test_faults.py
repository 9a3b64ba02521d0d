"""Fleets in trouble, seed after seed: no task lost or counted twice, never a call over the cap.

`./scripts/test` runs one seed of every kind of trouble and some of troubles by chance, `--all`
fifty of each, `--full` thousands. A failure prints its seed and the command that replays it.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulation.troubles import SEVERAL_JOBS, TROUBLES, by_chance, scenario, survive


def seeds(quick: int, count: int) -> list[Any]:
    """Return the seeds from 0 on; those after the first few are left to `./scripts/test --all`."""
    extended = (pytest.param(seed, marks=pytest.mark.extended) for seed in range(quick, count))
    return [*range(quick), *extended]


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("seed", seeds(1, 50))
def test_trouble_of_every_kind(trouble: str, seed: int, request: pytest.FixtureRequest) -> None:
    report = survive(scenario(trouble, seed), request)
    assert TROUBLES[trouble].felt(report)


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("seed", seeds(0, 2))
def test_trouble_of_every_kind_without_a_buffer(
    trouble: str, seed: int, request: pytest.FixtureRequest
) -> None:
    survive(scenario(trouble, seed, policy="reserve-strict"), request)


@pytest.mark.parametrize("seed", seeds(5, 50))
def test_troubles_by_chance(seed: int, request: pytest.FixtureRequest) -> None:
    survive(by_chance(seed), request)


@pytest.mark.parametrize("seed", seeds(2, 10))
def test_troubles_by_chance_of_several_jobs(seed: int, request: pytest.FixtureRequest) -> None:
    survive(by_chance(seed, jobs=SEVERAL_JOBS), request)


@pytest.mark.parametrize("seed", seeds(1, 3))
def test_troubles_by_chance_on_trio(seed: int, request: pytest.FixtureRequest) -> None:
    survive(by_chance(seed, backend="trio"), request)


@pytest.mark.full
@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("seed", range(50, 200))
def test_trouble_of_every_kind_often(
    trouble: str, seed: int, request: pytest.FixtureRequest
) -> None:
    report = survive(scenario(trouble, seed), request)
    assert TROUBLES[trouble].felt(report)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(50, 2_050))
def test_troubles_by_chance_often(seed: int, request: pytest.FixtureRequest) -> None:
    survive(by_chance(seed), request)


@pytest.mark.full
@pytest.mark.parametrize("policy", ["reserve", "reserve-strict"])
@pytest.mark.parametrize("seed", range(10, 310))
def test_troubles_by_chance_of_several_jobs_often(
    policy: str, seed: int, request: pytest.FixtureRequest
) -> None:
    survive(by_chance(seed, jobs=SEVERAL_JOBS, policy=policy), request)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3, 53))
def test_troubles_by_chance_on_trio_often(seed: int, request: pytest.FixtureRequest) -> None:
    survive(by_chance(seed, backend="trio"), request)
