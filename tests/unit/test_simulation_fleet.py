"""Whole simulations: the production worker in them, repeatable, with faults that really happen."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from conveyor.simulation import (
    PUBLISHED,
    REALISTIC,
    Duplicates,
    Fault,
    GatewayLimit,
    GatewaySlow,
    JobPlan,
    Kill,
    Latency,
    LostAcks,
    Pause,
    PermitsCutOff,
    PermitsDown,
    PermitsRestartEmpty,
    QueueLost,
    Report,
    RollingRestart,
    Scenario,
    World,
    YoungQueues,
    random_faults,
    simulate,
)
from conveyor.simulation.loop import BACKENDS
from conveyor.simulation.report import ROW

FLEET = replace(REALISTIC, name="small", slots=10)
"""Two of its workers reach a cap of 15 with slots to spare."""


def _scenario(
    *faults: Fault,
    tasks: int = 150,
    cap: int = 15,
    policy: str = "reserve",
    world: World = FLEET,
    workers: int = 2,
    seed: int = 0,
    store: str = "ledger",
    window: float | None = None,
) -> Scenario:
    return Scenario(
        world=world,
        policy=policy,
        jobs=(JobPlan(tasks=tasks, cap=cap),),
        workers=workers,
        permit_store=store,
        faults=faults,
        seed=seed,
        window=window,
    )


def _whole(report: Report) -> None:
    """Check the guarantees that hold under any fault, as long as permits come first."""
    assert (report.completed, report.lost, report.counted_twice) == (report.tasks, 0, 0)
    assert (report.seconds_over_cap, report.granted_over, report.dead_lettered) == (0.0, 0, 0)
    assert report.peak_in_flight <= report.cap


def test_undisturbed_every_message_is_received_once_and_the_cap_is_used_and_kept() -> None:
    report = simulate(_scenario(tasks=300))
    _whole(report)
    assert (report.receives, report.bounces, report.gateway_calls) == (300, 0, 300)
    assert (report.peak_in_flight, report.peak_granted, report.peaks) == (15, 15, (15,))
    assert report.peak_received <= 15 + 2 * 12
    assert report.utilisation_steady > 0.95
    assert report.utilisation < report.utilisation_steady
    assert report.finished_at == (report.elapsed_s,)
    assert report.in_hand == 0


def test_a_row_has_the_figures_in_the_order_that_is_published() -> None:
    row = simulate(_scenario(tasks=5)).row()
    assert tuple(row) == ROW
    assert (row["world"], row["policy"], row["window_s"], row["amplification"]) == (
        "small",
        "reserve",
        None,
        1.0,
    )
    assert json.loads(json.dumps(row)) == row


def test_a_window_cuts_off_and_what_is_in_hand_then_is_told() -> None:
    report = simulate(_scenario(tasks=2_000, window=20.0))
    assert report.elapsed_s == 20.0
    assert 0 < report.completed < 2_000
    assert report.receives == report.completed + report.in_hand
    assert (report.finished_at, report.lost) == ((None,), 0)


@pytest.mark.slow
def test_policies_that_receive_first_bounce_and_counting_first_breaks_the_cap() -> None:
    report = simulate(
        _scenario(world=PUBLISHED, tasks=200, cap=5, policy="off", store="count-then-insert")
    )
    assert report.amplification > 2
    assert report.bounces == report.receives - 200
    assert report.peak_in_flight > 5
    assert report.granted_over == report.peak_granted - 5 > 0
    assert report.seconds_over_cap > 0
    assert (report.completed, report.lost, report.counted_twice) == (200, 0, 0)
    kept = simulate(_scenario(world=PUBLISHED, tasks=200, cap=5, policy="off", store="atomic-rows"))
    assert (kept.peak_in_flight, kept.seconds_over_cap, kept.granted_over) == (5, 0.0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_the_published_figures_are_reproduced(seed: int) -> None:
    """One worker of 50 slots, cap 5, 500 tasks: 4.79 receives a task without the gate, 1.59 with
    it."""
    amplification = {}
    for policy in ("off", "local"):
        report = simulate(
            _scenario(
                world=PUBLISHED,
                tasks=500,
                cap=5,
                workers=1,
                policy=policy,
                store="count-then-insert",
                seed=seed,
            )
        )
        assert (report.completed, report.dead_lettered) == (500, 0)
        amplification[policy] = report.amplification
    assert 4.0 <= amplification["off"] <= 5.5
    assert 1.45 <= amplification["local"] <= 1.8


@pytest.mark.slow
def test_a_local_gate_that_never_closes_changes_nothing_at_all() -> None:
    reports = [
        simulate(_scenario(cap=15, policy=policy, store="count-then-insert", window=10.0))
        for policy in ("off", "local", "local-exact")
    ]
    assert reports[0].trace_hash == reports[1].trace_hash
    assert reports[0].events == reports[1].events > 500


@pytest.mark.slow
def test_every_policy_works_the_same_tasks() -> None:
    """The seconds spent in calls are those of the tasks, whatever the order they are worked in."""
    spent = [
        round(report.utilisation * report.cap * report.elapsed_s, 6)
        for policy in ("reserve", "reserve-strict", "off")
        for report in [simulate(_scenario(policy=policy, store="ledger"))]
        if report.gateway_calls == report.tasks
    ]
    assert len(spent) == 3
    assert len(set(spent)) == 1


_REPLAY = """
import sys
from conveyor.simulation import *
report = simulate(Scenario(
    world=REALISTIC, policy="reserve", workers=4, seed=5, backend=sys.argv[1], clock_skew=30.0,
    jobs=(JobPlan(tasks=250, cap=40), JobPlan(tasks=60, cap=10, arrives_at=3.0)),
    faults=(YoungQueues(2.0), Kill(0, 4.0, 5.0), Pause(1, 6.0, 40.0), RollingRestart(9.0, 2.0),
            PermitsDown(12.0, 35.0), LostAcks(0.1), Duplicates(0.2), QueueLost(70.0)),
))
print(report.trace_hash, report.events, report.fenced > 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["asyncio", pytest.param("trio", marks=pytest.mark.extended)])
def test_the_same_seed_gives_the_same_events_in_another_process(backend: str) -> None:
    """However strings hash there, and wherever objects lie in memory."""
    prints = {
        subprocess.run(
            [sys.executable, "-c", _REPLAY, backend],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for hash_seed in ("0", "1", "77")
    }
    assert len(prints) == 1
    assert prints.pop().endswith("True\n")


def test_another_seed_gives_other_events() -> None:
    hashes = {simulate(_scenario(tasks=20, seed=seed)).trace_hash for seed in (1, 1, 2)}
    assert len(hashes) == 2


@pytest.mark.slow
def test_backends_agree_on_what_matters() -> None:
    reports = [
        simulate(replace(_scenario(tasks=300), backend=backend, seed=3)) for backend in BACKENDS
    ]
    for report in reports:
        _whole(report)
    assert reports[0].elapsed_s == pytest.approx(reports[1].elapsed_s, rel=0.1)


def test_killed_workers_cost_their_permits_for_a_lease_and_no_task() -> None:
    whole = simulate(_scenario())
    report = simulate(_scenario(Kill(0, 5.0)))
    _whole(report)
    assert report.gateway_calls > 150
    assert report.receives > 150
    assert report.elapsed_s > whole.elapsed_s
    back = simulate(_scenario(Kill(0, 5.0, back_after=1.0), Kill(1, 5.0, back_after=1.0)))
    _whole(back)


def test_nothing_of_a_killed_worker_reaches_the_outside() -> None:
    """Its claims stand and its messages stay hidden until they lapse: nobody could say sooner that
    it is gone."""
    killed_at = 4.0
    report = simulate(_scenario(Kill(0, killed_at, back_after=0.1), workers=1, cap=10, tasks=10))
    _whole(report)
    assert report.receives > 10
    assert report.elapsed_s >= 30.0


def test_a_worker_paused_beyond_its_lease_uses_no_permit_that_is_not_its_own() -> None:
    slow = replace(FLEET, gateway=Latency(40.0, 0.3))
    report = simulate(_scenario(Pause(0, 12.0, 60.0), world=slow, tasks=60))
    _whole(report)
    assert report.abandoned > 0
    assert report.fenced > 0


def test_a_rolling_restart_with_a_drain_repeats_no_call() -> None:
    report = simulate(_scenario(RollingRestart(5.0, 3.0)))
    _whole(report)
    assert report.gateway_calls == 150
    hard = simulate(_scenario(RollingRestart(5.0, 3.0, graceful=False)))
    _whole(hard)
    assert hard.gateway_calls > 150


def test_a_permit_store_away_for_less_than_a_lease_is_not_noticed() -> None:
    whole = simulate(_scenario())
    short = simulate(_scenario(PermitsDown(3.0, 10.0)))
    _whole(short)
    assert short.fenced == 0
    assert short.elapsed_s < 1.5 * whole.elapsed_s


@pytest.mark.slow
def test_a_permit_store_away_for_longer_stops_all_calls_in_time() -> None:
    report = simulate(_scenario(PermitsDown(3.0, 50.0), tasks=600))
    _whole(report)
    assert report.elapsed_s > 53.0


def test_a_permit_store_that_comes_back_empty_gives_nothing_away_twice() -> None:
    report = simulate(_scenario(PermitsRestartEmpty(5.0, 2.0), tasks=300))
    _whole(report)


@pytest.mark.slow
def test_a_slow_gateway_takes_longer_and_a_refusing_one_is_asked_again() -> None:
    whole = simulate(_scenario())
    slow = simulate(_scenario(GatewaySlow(0.0, 30.0, 8.0)))
    _whole(slow)
    assert slow.elapsed_s > 2 * whole.elapsed_s
    refusing = simulate(_scenario(GatewayLimit(9)))
    _whole(refusing)
    assert 0 < refusing.throttled == refusing.gateway_calls - 150


def test_lost_answers_and_doubled_messages_change_nothing_but_the_receives() -> None:
    report = simulate(_scenario(LostAcks(0.5), Duplicates(0.5)))
    _whole(report)
    assert report.receives > 200
    assert report.gateway_calls == 150


@pytest.mark.slow
def test_a_lost_queue_is_made_again_and_a_young_one_waited_for() -> None:
    slow = replace(FLEET, gateway=Latency(10.0, 0.3))
    _whole(simulate(_scenario(QueueLost(70.0), world=slow)))
    _whole(simulate(_scenario(YoungQueues(3.0))))


@pytest.mark.slow
def test_a_worker_that_boots_after_a_queue_was_lost_does_not_leave_it_empty() -> None:
    """A queue that is only opened again is there, and empty, for ever."""
    slow = replace(FLEET, gateway=Latency(10.0, 0.3))
    faults = (QueueLost(5.0), Kill(0, 6.0, back_after=1.0))
    _whole(simulate(_scenario(*faults, world=slow)))


def test_jobs_that_arrive_later_are_found_and_measured_apart() -> None:
    report = simulate(
        Scenario(
            world=FLEET,
            policy="reserve",
            jobs=(
                JobPlan(tasks=100, cap=15),
                JobPlan(tasks=10, cap=5, arrives_at=7.0, gateway=Latency(0.5)),
            ),
            workers=2,
        )
    )
    _whole(report)
    assert len(report.peaks) == 2
    assert report.peaks[1] <= 5
    first, second = report.finished_at
    assert first is not None
    assert second is not None
    assert second >= 7.5


def test_figures_of_jobs_are_in_order_of_the_plans_whichever_arrives_first() -> None:
    plans = (
        JobPlan(tasks=20, cap=2, arrives_at=5.0),
        JobPlan(tasks=60, cap=20),
        JobPlan(tasks=1, cap=9, arrives_at=1e6),
    )
    report = simulate(
        Scenario(world=REALISTIC, policy="reserve", jobs=plans, workers=1, window=120.0)
    )
    assert report.peaks == (2, 20, 0)
    first, second, never = report.finished_at
    assert first is not None
    assert second is not None
    assert second < first
    assert never is None


@pytest.mark.slow
def test_a_worker_cut_off_from_permits_stops_in_time_and_the_others_go_on() -> None:
    slow = replace(FLEET, gateway=Latency(20.0, 0.3))
    whole = simulate(_scenario(world=slow))
    report = simulate(_scenario(PermitsCutOff(0, 5.0, 60.0), world=slow))
    _whole(report)
    assert (whole.fenced, whole.receives) == (0, 150)
    assert 0 < report.fenced < 15
    assert report.receives > 150
    assert whole.elapsed_s < report.elapsed_s < whole.elapsed_s + 60.0
    alone = simulate(_scenario(PermitsCutOff(0, 0.0, 60.0), workers=1, cap=10, tasks=10))
    _whole(alone)
    assert alone.elapsed_s > 60.0


def test_a_process_that_takes_the_place_of_one_cut_off_is_cut_off_too() -> None:
    faults = (PermitsCutOff(0, 0.0, 60.0), Kill(0, 3.0, back_after=1.0))
    report = simulate(_scenario(*faults, workers=1, cap=10, tasks=10))
    _whole(report)
    assert report.elapsed_s > 60.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_bad_days_by_chance(seed: int) -> None:
    faults = random_faults(seed, workers=2, duration=30.0, cap=15)
    assert faults == random_faults(seed, workers=2, duration=30.0, cap=15)
    assert faults != random_faults(seed + 1, workers=2, duration=30.0, cap=15)
    _whole(simulate(replace(_scenario(*faults, seed=seed), clock_skew=30.0)))


def test_a_fleet_that_is_gone_ends_the_simulation_and_loses_nothing() -> None:
    report = simulate(_scenario(Kill(0, 2.0), Kill(1, 2.0)))
    assert 0 < report.completed < 150
    assert report.lost == 0


def test_messages_that_are_nowhere_are_told_as_lost() -> None:
    """No queue is made again while nobody asks for it."""
    report = simulate(_scenario(Kill(0, 2.0), Kill(1, 2.0), QueueLost(3.0)))
    assert report.lost == 150 - report.completed > 0


def test_what_goes_wrong_in_production_code_is_not_swallowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("conveyor.engine.dispatcher.Dispatcher.tend", broken)
    with pytest.raises(ExceptionGroup) as raised:
        simulate(_scenario())
    assert raised.group_contains(ZeroDivisionError)


def test_logs_are_quiet_and_loud_again_afterwards(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("conveyor")
    log.setLevel(logging.INFO)
    simulate(_scenario(PermitsDown(1.0, 40.0), tasks=50))
    assert caplog.records == []
    assert log.level == logging.INFO
    log.setLevel(logging.NOTSET)
