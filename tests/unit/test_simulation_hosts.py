"""The limits of hosts, over a simulated fleet with faults: never more than a limit at a time, never
more starts than the rate, and no message more than twice for its host."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner, Result

from conveyor.cli.simulate import simulate as simulate_command
from conveyor.simulation import (
    REALISTIC,
    HostRefuses,
    JobPlan,
    Kill,
    Latency,
    PermitsDown,
    PermitsRestartEmpty,
    Report,
    Scenario,
    World,
    simulate,
)

LIMIT, RATE, HOSTS = 3, 8.0, 20


SHORT = replace(REALISTIC, gateway=Latency(0.2, 0.6))
"""Calls so short that a host has room for more of them than its rate lets start."""


def fleet(
    seed: int,
    *,
    tasks: int = 200,
    rate: float = RATE,
    hosts: int = HOSTS,
    world: World = REALISTIC,
    faulty: bool = True,
) -> Report:
    faults = (
        Kill(worker=1, at=6.0, back_after=3.0),
        PermitsRestartEmpty(at=9.0),
        PermitsDown(at=14.0, seconds=4.0),
        Kill(worker=2, at=20.0, back_after=1.0),
    )
    return simulate(
        Scenario(
            world=world,
            policy="reserve",
            jobs=(JobPlan(tasks=tasks, cap=60), JobPlan(tasks=tasks, cap=60)),
            workers=4,
            hosts=hosts,
            host_limit=LIMIT,
            host_rate=rate,
            clock_skew=30.0 if faulty else 0.0,
            faults=faults if faulty else (),
            seed=seed,
        )
    )


def assert_within_limits(report: Report, *, rate: float = RATE) -> None:
    assert report.completed == report.tasks
    assert report.host_peak <= LIMIT
    assert report.host_starts <= rate


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.extended) for seed in (1, 2))]
)
def test_no_host_gets_more_than_its_limits_in_spite_of_faults(seed: int) -> None:
    assert_within_limits(fleet(seed))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "tasks"), [(0, 400), pytest.param(1, 1_000, marks=pytest.mark.extended)]
)
def test_no_host_gets_more_starts_than_its_rate_in_spite_of_faults(seed: int, tasks: int) -> None:
    report = short(seed, tasks)
    assert_within_limits(report)
    assert report.host_starts == RATE, "the rate is reached"


def short(seed: int, tasks: int) -> Report:
    """A fleet of short calls to few hosts, at work until after the last fault."""
    return fleet(seed, tasks=tasks, hosts=5, world=SHORT)


@pytest.mark.slow
def test_a_message_comes_twice_at_most_for_its_host() -> None:
    report = fleet(0, faulty=False)
    assert_within_limits(report)
    assert report.host_peak == LIMIT, "the limit is reached"
    assert report.most_received == 2
    assert 1.0 < report.amplification <= 2.0


def test_a_host_of_short_calls_is_busy_from_the_first_on() -> None:
    report = simulate(
        Scenario(
            world=replace(REALISTIC, gateway=Latency(0.1, 0.0)),
            policy="reserve",
            jobs=(JobPlan(tasks=100, cap=60),),
            workers=1,
            host_limit=2,
        )
    )
    assert (report.completed, report.host_peak) == (100, 2)
    assert report.most_received <= 2
    assert report.elapsed_s <= 1.25 * 100 * 0.1 / 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(3, marks=pytest.mark.extended)])
def test_workers_whose_messages_wait_no_more_take_no_permit_from_others(seed: int) -> None:
    report = simulate(
        Scenario(
            world=replace(REALISTIC, gateway=Latency(0.2, 0.0)),
            policy="reserve",
            jobs=(JobPlan(tasks=140, cap=100),),
            workers=4,
            host_limit=LIMIT,
            seed=seed,
        )
    )
    assert (report.completed, report.host_peak) == (140, LIMIT)
    assert report.elapsed_s <= 1.5 * 140 * 0.2 / LIMIT


def lanes(*, tasks: int, hosts: int, skew: float = 0.0, cap: int = 400) -> Report:
    """A run that is large enough for its first hosts to have queues of their own."""
    report = simulate(
        Scenario(
            world=REALISTIC,
            policy="reserve",
            jobs=(JobPlan(tasks=tasks, cap=cap),),
            workers=4,
            hosts=hosts,
            host_limit=LIMIT,
            host_rate=RATE,
            host_skew=skew,
        )
    )
    assert_within_limits(report)
    return report


@pytest.mark.slow
@pytest.mark.extended
def test_hosts_with_queues_of_their_own_are_received_once_and_use_their_limits() -> None:
    report = lanes(tasks=1_000, hosts=8)
    assert (report.amplification, report.most_received, report.bounces) == (1.0, 1, 0)
    assert report.host_use >= 0.95


@pytest.mark.slow
@pytest.mark.extended
def test_few_messages_of_very_many_hosts_come_twice() -> None:
    report = lanes(tasks=1_000, hosts=10_000, skew=1.0, cap=60)
    assert report.amplification <= 1.1
    assert report.most_received <= 2


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.timeout(1_200)
def test_ten_thousand_tasks_are_received_as_often_as_they_should() -> None:
    assert lanes(tasks=10_000, hosts=63).amplification == 1.0
    many = lanes(tasks=10_000, hosts=10_000, skew=1.0)
    assert many.amplification <= 1.1
    assert many.most_received <= 2


@pytest.mark.slow
def test_a_rate_below_one_a_second_is_kept() -> None:
    report = fleet(1, tasks=60, rate=0.5, faulty=False)
    assert_within_limits(report, rate=1.0)
    # Three starts of each host fit before two intervals of two seconds have passed, not six.
    assert report.elapsed_s >= 10.0


@pytest.mark.slow
def test_no_worker_calls_a_host_that_has_refused() -> None:
    report = simulate(
        Scenario(
            world=REALISTIC,
            policy="reserve",
            jobs=(JobPlan(tasks=150, cap=60),),
            workers=4,
            hosts=5,
            host_limit=LIMIT,
            host_rate=RATE,
            faults=(HostRefuses(0, at=1.0, seconds=9.0), HostRefuses(1, at=3.0, seconds=30.0)),
        )
    )
    assert_within_limits(report)
    assert report.uninvited == 0
    assert report.elapsed_s >= 33.0


@pytest.mark.slow
@pytest.mark.parametrize("is_silent", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_a_host_that_refuses_slows_no_other(is_silent: bool) -> None:
    def ends(*faults: HostRefuses, jobs: int, seed: int) -> float:
        report = simulate(
            Scenario(
                world=REALISTIC,
                policy="reserve",
                jobs=(JobPlan(tasks=60, cap=60),) * jobs,
                workers=4,
                host_limit=LIMIT,
                faults=faults,
                seed=seed,
            )
        )
        assert report.completed == report.tasks
        ended = report.finished_at[0]
        assert ended is not None
        return ended

    # The last long call decides when so few tasks are done: one seed alone would say little.
    seeds = range(3)
    alone = sum(ends(jobs=1, seed=seed) for seed in seeds)
    refuses = HostRefuses(1, at=1.0, seconds=60.0, is_silent=is_silent)
    assert sum(ends(refuses, jobs=2, seed=seed) for seed in seeds) <= 1.05 * alone


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_two_hundred_fleets_stay_within_the_limits_of_hosts(first: int) -> None:
    for seed in range(first, first + 20):
        tasks = 400 if seed % 5 else 1_000
        assert_within_limits(fleet(seed, tasks=tasks))
        assert_within_limits(short(seed, tasks))


def test_without_limits_hosts_cost_nothing() -> None:
    plain = simulate(
        Scenario(world=REALISTIC, policy="reserve", jobs=(JobPlan(tasks=100, cap=50),), workers=2)
    )
    assert (plain.amplification, plain.bounces) == (1.0, 0)


def asked(*flags: str) -> Result:
    return CliRunner().invoke(simulate_command, ["--policy", "reserve", "--json", *flags])


@pytest.mark.slow
def test_the_command_tells_of_the_busiest_host() -> None:
    given = asked("--tasks", "200", "--hosts", "20", "--host-limit", "4", "--host-rate", "2")
    row = json.loads(given.stdout)
    assert (row["completed"], row["host_peak"] <= 4, row["host_starts"] <= 2) == (200, True, True)
    assert "host_peak" not in json.loads(asked("--tasks", "50").stdout)


def test_policies_that_keep_no_limits_of_hosts_are_refused_in_words() -> None:
    given = asked("--policy", "local", "--host-limit", "3")
    assert given.exit_code == 2
    assert "limits of hosts are kept by reserve and reserve-strict alone" in given.stderr


def test_a_rate_that_cannot_be_kept_is_refused_in_words() -> None:
    given = asked("--host-rate", "0.001")
    assert given.exit_code == 2
    assert "must be 0, or from 0.01 to 1,000" in given.stderr
