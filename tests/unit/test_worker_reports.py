"""A worker reports what keeps it from calling more for each of its runs."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import anyio
import msgspec
import pytest

from conveyor.aio.outages import Outages
from conveyor.dev.permits import MemoryPermits, MemoryWorkers
from conveyor.dev.queues import LocalSignals
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import (
    DispatchableRun,
    Problem,
    Run,
    RunStats,
    RunStatus,
    TaskFailure,
    WaitReason,
)
from conveyor.domain.run_waits import (
    Crew,
    LaneReport,
    RunWaitReason,
    WorkerReport,
    encode_report,
    run_wait,
)
from conveyor.engine.discovery import Discovery, DiscoveryOptions
from conveyor.engine.lanes import EXACT_INSTANTS, LOST_FOR, MOST_INSTANTS, PutOffRows
from conveyor.engine.reporter import Reported, ReporterOptions, WorkerReporter
from conveyor.engine.worker import Beside, Worker
from conveyor.ports.gateway import Absence, ScrapeFailed, Shared
from conveyor.ports.handler import Outcome
from conveyor.ports.queues import Delivery
from conveyor.ports.workers import MOST_BYTES, MOST_LANES
from conveyor.testing.clock import FakeClock
from tests.unit.dispatch_world import NoRuns, World

R = RunWaitReason
HEARTBEAT = 10.0


def reporter(
    world: World, *, workers: MemoryWorkers | None = None, outages: Outages | None = None
) -> WorkerReporter:
    member = world.members[0]
    options = ReporterOptions(
        worker_id="W", version="1", heartbeat=HEARTBEAT, every=HEARTBEAT, slots=4,
        claim_seconds=60.0,
    )  # fmt: skip
    return WorkerReporter(
        Reported(member.dispatcher, member.policy, outages or Outages(world.clock)),
        workers or MemoryWorkers(world.clock),
        world.clock,
        options,
    )


def seen(report: WorkerReport, run_id: str) -> LaneReport:
    (lane,) = [lane for lane in report.lanes if lane.run_id == run_id]
    return lane


def lasting(seconds: float = 3_600.0) -> Callable[[Delivery], float]:
    return lambda _delivery: seconds


async def test_a_run_at_its_cap_and_one_without_a_slot() -> None:
    world = World(slots=4, duration=lasting())
    async with world.running():
        teller = reporter(world)
        await world.submit("capped", 50, limit=2)
        await world.clock.advance(0.1)
        await world.submit("wide", 50, limit=100)
        await world.clock.advance(1.0)
        began = world.clock.now()
        report = teller.report()
        assert (report.slots, report.in_use, report.lanes_left_out) == (4, 4, 0)
        capped, wide = seen(report, "capped"), seen(report, "wide")
        assert (capped.reason, capped.in_flight, capped.limit) == (R.MAX_INFLIGHT, 2, 2)
        assert (wide.reason, wide.in_flight, wide.limit) == (R.SLOTS, 2, 100)
        assert (capped.calling, wide.calling) == (2, 2)
        await world.clock.advance(30.0)
        assert seen(teller.report(), "wide").since == began


async def test_a_worker_that_stops_says_so() -> None:
    world = World(slots=4, duration=lasting(5.0))
    async with world.running():
        await world.submit("small", 3)
        await world.clock.advance(1.0)
        assert not reporter(world).report().stopping
        world.members[0].dispatcher.stop()
        assert reporter(world).report().stopping


async def test_a_run_with_all_it_wants_waits_for_nothing() -> None:
    world = World(slots=4, duration=lasting())
    async with world.running():
        await world.submit("small", 3)
        await world.clock.advance(3.0)
        lane = seen(reporter(world).report(), "small")
        assert (lane.reason, lane.in_flight) == (None, 3)


async def test_a_run_that_this_worker_takes_no_more_of_waits_for_nothing_here() -> None:
    """Though calls of it are under way, and at its cap."""
    world = World(slots=4, duration=lasting())
    async with world.running():
        await world.submit("capped", 50, limit=2)
        await world.clock.advance(1.0)
        assert seen(reporter(world).report(), "capped").reason is R.MAX_INFLIGHT
        await world.dispatcher.close_lane("capped")
        lane = seen(reporter(world).report(), "capped")
        assert (lane.reason, lane.in_flight) == (None, 2)


async def test_a_cap_that_other_workers_use_up_is_in_use_here_too() -> None:
    world = World(slots=4, duration=lasting())
    assert await world.take("shared", 10, limit=10)
    async with world.running():
        await world.submit("shared", 50, limit=10)
        await world.clock.advance(1.0)
        lane = seen(reporter(world).report(), "shared")
        assert (lane.reason, lane.in_flight, lane.permits) == (R.MAX_INFLIGHT, 0, 0)


async def test_a_ledger_that_is_closed_is_told_until_it_opens() -> None:
    def closed(_permits: object, clock: FakeClock) -> MemoryPermits:
        return MemoryPermits(clock, closed_for=30.0)

    world = World(slots=4, duration=lasting(), ledger=closed)
    opens = world.clock.now() + 30_000
    async with world.running():
        await world.submit("run", 50)
        await world.clock.advance(1.0)
        lane = seen(reporter(world).report(), "run")
        assert (lane.reason, lane.until) == (R.PERMITS_CLOSED, opens)
        await world.clock.advance(60.0)
        assert seen(reporter(world).report(), "run").reason is R.SLOTS


async def test_a_missing_queue_is_told_since_it_was_missed() -> None:
    world = World(slots=4, duration=lasting())
    async with world.running():
        run = await world.submit("run", 50)
        await world.queues.drop_run("run")
        await world.clock.advance(2.5)
        lost = seen(reporter(world).report(), "run")
        assert lost.reason is R.QUEUE_LOST
        assert world.clock.now() - lost.since >= 2_000
        await world.queues.remake_run(run.job_id, "run")
        await world.clock.advance(2.0)
        assert seen(reporter(world).report(), "run").reason is R.SLOTS


async def test_a_queue_that_came_back_empty_is_lost_for_a_while_and_then_no_more() -> None:
    world = World(slots=4, duration=lasting())
    async with world.running():
        run = await world.submit("run", 0)
        await world.queues.drop_run("run")
        await world.clock.advance(2.5)
        await world.queues.open_run(run.job_id, "run")
        await world.clock.advance(5.0)
        assert seen(reporter(world).report(), "run").reason is R.QUEUE_LOST
        await world.clock.advance(LOST_FOR)
        assert seen(reporter(world).report(), "run").reason is None


@pytest.mark.parametrize(
    ("why", "told"),
    [
        ([WaitReason.BACKOFF], R.RETRY_BACKOFF),
        ([WaitReason.HOST_RETRY_AFTER, WaitReason.RETRY_AFTER], R.HOST_CLOSED),
        ([WaitReason.HOST_RETRY_AFTER, WaitReason.BACKOFF], R.RETRY_BACKOFF),
        ([WaitReason.RETRY_AFTER], R.RETRY_BACKOFF),
        ([WaitReason.LOAD_REFUSAL], R.GATEWAY_THROTTLED),
        ([None], R.CLAIMS_HELD),
    ],
    ids=["backoff", "one host", "hosts and others", "asked once", "load", "claimed"],
)
async def test_rows_that_all_wait(why: list[WaitReason | None], told: RunWaitReason) -> None:
    world = World(slots=4, duration=lasting(0.1))
    kinds = iter(why * 2)

    def put_off(_delivery: Delivery) -> Outcome:
        kind = next(kinds)
        return Outcome(hide_for=40.0, waiting=kind, is_claimed=kind is None)

    world.tasks.outcome = put_off
    async with world.running():
        await world.submit("run", len(why))
        await world.clock.advance(2.0)
        lane = seen(reporter(world).report(), "run")
        assert (lane.reason, lane.put_off, lane.in_flight) == (told, len(why), 0)
        if told is not R.GATEWAY_THROTTLED:
            assert lane.until is not None
            assert 0 <= lane.until - world.clock.now() <= 40_000


async def test_rows_that_wait_are_told_of_after_their_lane_was_let_go() -> None:
    world = World(slots=4, duration=lasting(0.1))
    world.tasks.outcome = lambda _delivery: Outcome(hide_for=90.0, waiting=WaitReason.BACKOFF)
    async with world.running():
        teller = reporter(world)
        await world.submit("run", 1)
        await world.clock.advance(2.0)
        await world.dispatcher.close_lane("run")
        lane = seen(teller.report(), "run")
        assert (lane.reason, lane.put_off) == (R.RETRY_BACKOFF, 1)
        await world.clock.advance(120.0)
        assert teller.report().lanes == ()
        assert not world.dispatcher.lanes.put_off


async def test_rows_that_always_fail_are_counted_once_each_and_told_at_every_look() -> None:
    world = World(slots=20, duration=lasting(0.05))
    delays = itertools.cycle([0.4, 0.9, 1.7, 3.2, 2.3, 0.6, 4.1])
    world.tasks.outcome = lambda _delivery: Outcome(
        hide_for=next(delays), waiting=WaitReason.BACKOFF
    )
    shown = Run(
        run_id="R", job_id="J", run_sequence=1, created_at=0, updated_at=0,
        status=RunStatus.RUNNING, stats=RunStats(total=5),
    )  # fmt: skip
    looks = 0
    async with world.running():
        teller = reporter(world)
        await world.submit("R", 5)
        await world.clock.advance(1.4)
        for _ in range(30):
            report = teller.report()
            lane = seen(report, "R")
            assert lane.put_off + lane.in_flight <= 5
            while world.clock.now() < report.said_at + 1_000:
                now = world.clock.now()
                wait = run_wait(shown, Crew([report], heard_at=now, heartbeat=HEARTBEAT), now)
                if lane.put_off == 5:
                    assert wait is not None
                    assert wait.reason is R.RETRY_BACKOFF
                    assert wait.until is None or wait.until > now
                    looks += 1
                await world.clock.advance(0.25)
    assert looks > 60


async def test_a_message_that_something_broke_is_no_row_that_waits() -> None:
    world = World(slots=4, duration=lasting(0.1))
    world.tasks.outcome = lambda _delivery: Outcome(hide_for=40.0)
    async with world.running():
        await world.submit("run", 1)
        await world.clock.advance(2.0)
        lane = seen(reporter(world).report(), "run")
        assert (lane.reason, lane.put_off) == (None, 0)


async def test_a_gateway_that_refuses_for_load_is_told_with_its_ceiling() -> None:
    world = World(slots=20, duration=lasting(2.0))
    refusing = True
    world.tasks.refuses = lambda _delivery: refusing
    async with world.running():
        await world.submit("run", 500, limit=10)
        await world.clock.advance(5.0)
        lane = seen(reporter(world).report(), "run")
        assert lane.reason is R.GATEWAY_THROTTLED
        assert lane.ceiling < lane.limit == 10
        refusing = False
        await world.clock.advance(60.0)
        recovered = seen(reporter(world).report(), "run")
        assert (recovered.reason, recovered.ceiling) == (R.MAX_INFLIGHT, 10)


def absent(shared: Shared) -> ScrapeFailed:
    failed = ScrapeFailed(Problem("c", "t", 503), TaskFailure.GATEWAY_ERROR, retryable=True)
    failed.absence = Absence(shared)
    return failed


async def test_an_outage_holds_every_lane_since_it_began() -> None:
    world = World(slots=4, duration=lasting())
    outages = Outages(world.clock)
    async with world.running():
        await world.submit("run", 50)
        await world.clock.advance(1.0)
        began = world.clock.now()
        outages.judge(absent(Shared.NETWORK))
        await world.clock.advance(5.0)
        report = reporter(world, outages=outages).report()
        lane = seen(report, "run")
        assert (lane.reason, lane.since) == (R.GATEWAY_THROTTLED, began)
        assert report.away == ("network",)


async def test_the_first_of_several_reasons_is_told() -> None:
    world = World(slots=4, duration=lasting())
    outages = Outages(world.clock)
    outages.judge(absent(Shared.GATEWAY))
    async with world.running():
        await world.submit("run", 50, limit=2)
        await world.queues.drop_run("run")
        await world.clock.advance(1.0)
        assert seen(reporter(world, outages=outages).report(), "run").reason is R.QUEUE_LOST


async def test_a_report_is_bounded_and_leaves_idle_lanes_out_first() -> None:
    world = World(slots=4, duration=lasting())
    async with world.running():
        await world.submit("zz-busy", 50, limit=2)
        await world.clock.advance(1.0)
        for number in range(700):
            world.dispatcher.lanes.open(idle(f"idle-{number:03}"))
        report = reporter(world).report()
        assert report.lanes[0].run_id == "zz-busy"
        assert len(report.lanes) == MOST_LANES
        assert report.lanes_left_out == 701 - MOST_LANES
        for number in range(400):
            world.dispatcher.lanes.open(idle(f"{number:03}" + 97 * "x"))
        long = reporter(world).report()
        size = len(encode_report(long))
        assert 0.9 * MOST_BYTES < size <= MOST_BYTES
        assert (long.lanes[0].run_id, len(long.lanes) + long.lanes_left_out) == ("zz-busy", 1_101)
        for lane in list(world.dispatcher.lanes):
            if lane.run_id != "zz-busy":
                world.dispatcher.lanes.forget(lane.run_id)


async def test_a_report_tells_of_calls_by_host_while_there_is_room() -> None:
    world = World(slots=4, duration=lasting())
    async with world.running():
        lanes = world.dispatcher.lanes
        lanes.open(msgspec.structs.replace(idle("polite"), hosts=("a.test:80", "b.test:80")))
        calling = next(lane for lane in lanes if lane.host == "b.test:80")
        calling.scopes.update({anyio.CancelScope(), anyio.CancelScope()})
        assert seen(reporter(world).report(), "polite").hosts == {"b.test:80": 2}
        for number in range(400):
            lanes.open(idle(f"{number:03}" + 97 * "x"))
        long = reporter(world).report()
        assert all(not lane.hosts for lane in long.lanes)
        calling.scopes.clear()
        for run_id in {lane.run_id for lane in lanes}:
            lanes.forget(run_id)


def idle(run_id: str) -> DispatchableRun:
    return DispatchableRun(run_id=run_id, job_id=run_id, priority=5, max_inflight=100, created_at=0)


class BrokenWorkers(MemoryWorkers):
    fails = True

    async def say(self, report: WorkerReport) -> None:
        if self.fails:
            raise ConveyorError(ErrorCode.UNAVAILABLE, "away")
        await super().say(report)


async def test_a_report_comes_at_the_start_and_with_each_heartbeat_whatever_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(slots=4, duration=lasting())
    workers = BrokenWorkers(world.clock)
    teller = reporter(world, workers=workers)
    async with anyio.create_task_group() as group:
        group.start_soon(teller.run)
        with caplog.at_level(logging.WARNING):
            await world.clock.advance(0.1)
        assert caplog.messages == ["the report of this worker failed: unavailable: away"]
        workers.fails = False
        await world.clock.advance(HEARTBEAT)
        (first,) = await workers.all()
        await world.clock.advance(HEARTBEAT)
        (second,) = await workers.all()
        assert second.said_at - first.said_at == HEARTBEAT * 1_000
        assert second.started_at == first.started_at
        group.cancel_scope.cancel()
    await teller.leave()
    assert await workers.all() == []


async def test_a_worker_that_ends_in_order_takes_its_word_back() -> None:
    world = World(slots=4, duration=lasting(1.0))
    workers = MemoryWorkers(world.clock)
    discovery = Discovery(
        world.dispatcher, NoRuns(), world.queues, LocalSignals(), world.clock,
        DiscoveryOptions(interval=3.0, resync=10.0, evict_after=600.0),
    )  # fmt: skip
    beside = Beside(reporter=reporter(world, workers=workers))
    worker = Worker(world.dispatcher, discovery, world.clock, heartbeat=HEARTBEAT, beside=beside)

    async def work() -> None:
        await worker.run(grace=1.0)

    async with anyio.create_task_group() as group:
        group.start_soon(work)
        await world.clock.advance(1.0)
        assert [report.worker_id for report in await workers.all()] == ["W"]
        worker.stop()
        await world.clock.advance(5.0)
    assert await workers.all() == []


async def test_what_is_told_again_is_told_in_the_same_words() -> None:
    world = World(slots=4, duration=lasting(0.1))
    world.tasks.outcome = lambda _delivery: Outcome(hide_for=90.0, waiting=WaitReason.BACKOFF)
    async with world.running():
        teller = reporter(world)
        await world.submit("run", 1)
        await world.clock.advance(2.0)
        first = seen(teller.report(), "run")
        for _ in range(20):
            await world.clock.advance(1.0003)
            assert seen(teller.report(), "run") == first


def test_rows_beyond_so_many_seconds_are_counted_to_the_last_one() -> None:
    rows = PutOffRows()
    for second in range(MOST_INSTANTS + 500):
        rows.add(0.0, float(second + 1), WaitReason.BACKOFF)
    assert rows.by_reason().total() == MOST_INSTANTS + 500
    assert rows.first_due == 1
    rows.forget_due(float(MOST_INSTANTS - 1))
    assert rows.by_reason() == {WaitReason.BACKOFF: 501}
    rows.forget_due(float(MOST_INSTANTS))
    assert rows.first_due is None


def test_rows_are_counted_until_they_are_due_and_not_after() -> None:
    rows = PutOffRows()
    for number in range(EXACT_INSTANTS + 3):
        rows.add(0.0, 2.25 + number / 10_000, WaitReason.BACKOFF)
    rows.forget_due(2.25)
    assert rows.by_reason().total() == EXACT_INSTANTS - 1
    assert rows.first_due == pytest.approx(2.2501)
    rows.forget_due(2.25 + EXACT_INSTANTS / 10_000)
    assert rows.first_due is None


def options(**fields: Any) -> WorkerReport:
    values = {"heartbeat": 10.0, "claim_seconds": 60.0, **fields}
    return WorkerReport(
        worker_id="W", version="1", started_at=0, said_at=0, slots=1, in_use=0, **values
    )


def test_a_report_is_kept_until_the_claims_of_its_worker_have_lapsed() -> None:
    assert options().kept_for == 70.0
    assert options(claim_seconds=20.0).kept_for == 60.0
