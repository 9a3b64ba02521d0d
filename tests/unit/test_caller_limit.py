"""A limit on the calls in flight of one caller, over all of its jobs and the fleet."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from conveyor.domain.run_waits import RunWaitReason
from conveyor.engine.reserve import CALLER_KEY, ReservePolicy
from conveyor.ports.permits import Permits
from conveyor.simulation import (
    REALISTIC,
    Fault,
    JobPlan,
    Kill,
    Pause,
    PermitsDown,
    Report,
    RollingRestart,
    Scenario,
    simulate,
)
from conveyor.testing.clock import FakeClock
from tests.unit.dispatch_world import BrokenLedger, World


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


def ledger(permits: Permits, clock: FakeClock) -> Permits:
    return BrokenLedger(permits, clock)


def world(*, limit: int, workers: int = 2, slots: int = 20) -> World:
    return World(
        slots=slots,
        workers=workers,
        duration=lambda _delivery: 1.0,
        caller_max_inflight=limit,
        ledger=ledger,
    )


async def test_all_runs_of_a_caller_stay_within_its_limit_and_reach_it() -> None:
    it = world(limit=12)
    async with it.running():
        for number in range(4):
            await it.submit(f"r{number}", 60, limit=10, caller="A")
        most, of_caller = 0, 0
        for _ in range(80):
            await it.clock.advance(0.25)
            most = max(most, sum(it.tasks.in_flight.values()))
            of_caller = max(of_caller, it.permits.total(f"{CALLER_KEY}A"))
        assert (most, of_caller) == (12, 12)
        await it.clock.advance(30)
        assert len(it.tasks.done) == 240
        assert it.bounced() == 0


async def test_another_caller_has_a_limit_of_its_own() -> None:
    it = world(limit=5)
    async with it.running():
        await it.submit("a", 200, caller="A")
        await it.submit("b", 200, caller="B")
        peaks: Counter[str] = Counter()
        for _ in range(40):
            await it.clock.advance(0.25)
            for queue, count in it.tasks.in_flight.items():
                peaks[queue] = max(peaks[queue], count)
        assert sorted(peaks.values()) == [5, 5]


async def test_a_run_of_no_known_caller_and_a_limit_of_zero_ask_for_no_permit_of_a_caller() -> None:
    for limit, caller in ((0, "A"), (5, "")):
        it = world(limit=limit)
        async with it.running():
            await it.submit("r", 30, caller=caller)
            await it.clock.advance(3)
            assert {request.job_id for request in it.broken.asked} == {"job-r"}


async def test_a_worker_tells_which_cap_is_reached() -> None:
    it = world(limit=5, workers=1)
    policy = it.members[0].policy
    assert isinstance(policy, ReservePolicy)
    async with it.running():
        await it.submit("first", 100, limit=3, caller="A")
        await it.clock.advance(2)
        first = it.dispatcher.lanes.get("first")
        assert first is not None
        state = policy.state(first, it.clock.monotonic())
        assert (state.reason, state.caller_limit) == (RunWaitReason.MAX_INFLIGHT, 0)

        await it.submit("second", 100, limit=50, caller="A")
        await it.clock.advance(4)
        second = it.dispatcher.lanes.get("second")
        assert second is not None
        state = policy.state(second, it.clock.monotonic())
        assert (state.reason, state.caller_limit) == (RunWaitReason.MAX_INFLIGHT, 5)
        assert policy.held >= 5, "the permits of callers are not counted beside those of jobs"
        assert policy.held <= 3 + 50


async def test_permits_of_a_caller_are_given_back_with_its_last_run() -> None:
    it = world(limit=6)
    async with it.running():
        await it.submit("a", 20, caller="A")
        await it.clock.advance(8)
        assert len(it.tasks.done) == 20
        for member in it.members:
            await member.dispatcher.close_lane("a")
        await it.clock.advance(8)
        assert it.permits.total(f"{CALLER_KEY}A") == 0


FLEET = replace(REALISTIC, name="small", slots=10)


def limited(*faults: Fault, seed: int = 0) -> Report:
    plans = tuple(JobPlan(tasks=60, cap=15) for _ in range(3))
    return simulate(
        Scenario(
            world=FLEET,
            policy="reserve",
            jobs=plans,
            workers=3,
            faults=faults,
            seed=seed,
            caller_max_inflight=12,
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        (),
        (Kill(0, 5.0, 2.0), Kill(1, 9.0)),
        (Pause(0, 6.0, 50.0), PermitsDown(12.0, 35.0)),
        (RollingRestart(4.0, 2.0),),
    ],
    ids=["undisturbed", "kills", "a pause beyond the lease", "a rolling restart"],
)
def test_whatever_happens_a_fleet_keeps_the_limit_and_ends_all_runs(
    faults: tuple[Fault, ...],
) -> None:
    report = limited(*faults)

    assert (report.completed, report.lost, report.counted_twice) == (180, 0, 0)
    assert report.peak_in_flight <= 12
    assert report.granted_over == 0
    if not faults:
        assert report.peak_in_flight == 12
        assert report.bounces == 0
        assert report.utilisation_steady * report.cap > 0.85 * 12
