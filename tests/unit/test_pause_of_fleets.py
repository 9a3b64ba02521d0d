"""A fleet that an operator paused: nothing new starts, what runs ends, and everybody is told."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from conveyor.domain.model import Run, RunStats, RunStatus
from conveyor.domain.run_waits import FLEET_PAUSED, Crew, RunWaitReason, WorkerReport, run_wait
from conveyor.engine.lanes import Lanes
from conveyor.engine.planner import Polling
from conveyor.engine.telemetry import Backlog
from conveyor.http.pages.session import SessionOptions
from conveyor.ports.queues import CONTROL_QUEUE, DeleteMessage, run_queue
from conveyor.ports.workers import FleetPause
from tests.unit.dispatch_world import World
from tests.unit.http_api import Api, open_api
from tests.unit.test_deploy_operation import SevenMessages
from tests.unit.test_worker_reports import reporter


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.slow
async def test_nothing_new_starts_and_what_runs_ends() -> None:
    world = World(slots=4, workers=2, duration=lambda _delivery: 10.0)
    async with world.running():
        await world.submit("a", 100)
        await world.clock.advance(15)
        world.pause.hear(world.clock.now())
        under_way = world.tasks.in_flight.total()
        done, received = len(world.tasks.done), world.received()
        await world.clock.advance(300)

        assert (under_way, world.tasks.in_flight.total(), world.tasks.cancelled) == (8, 0, 0)
        assert len(world.tasks.done) == done + under_way
        assert world.received() - received <= under_way  # those whose receive was under way
        assert world.queues.depth(run_queue("a")) + len(world.tasks.done) == 100

        world.pause.hear(None)
        await world.clock.advance(300)
    assert len(world.tasks.done) == 100


async def test_messages_in_hand_are_given_back_and_none_is_waited_for() -> None:
    world = World(slots=1, duration=lambda _delivery: 5.0, polling=Polling(wait=60.0))
    async with world.running():
        await world.submit("a", 50)
        await world.clock.advance(1)
        world.pause.hear(world.clock.now())
        await world.clock.advance(20)

        assert len(world.tasks.done) == 1
        assert world.queues.depth(run_queue("a")) == 49
        await world.queues.send(CONTROL_QUEUE, DeleteMessage("J", "R"))
        await world.clock.advance(120)
        assert world.control.done == []
        world.pause.hear(None)
        await world.clock.advance(5)
        assert world.control.done == ["control"]


async def test_a_worker_that_starts_in_a_paused_fleet_starts_nothing() -> None:
    world = World(slots=4, duration=lambda _delivery: 1.0)
    world.pause.hear(1)
    async with world.running():
        await world.submit("a", 8)
        await world.clock.advance(60)
        assert (world.received(), world.tasks.done) == (0, [])
        world.pause.hear(None)
        await world.clock.advance(60)
    assert len(world.tasks.done) == 8


async def test_each_order_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "conveyor.engine")
    world = World(slots=1, duration=lambda _delivery: 1.0)
    async with world.running():
        await world.clock.advance(1)
        for since in (5, 5, None, None):
            world.pause.hear(since)
            await world.clock.advance(1)

    assert [one.getMessage() for one in caplog.records if "fleet" in one.getMessage()] == [
        "the fleet is paused by an operator: nothing new starts",
        "the fleet is resumed: work goes on",
    ]


async def test_every_run_waits_because_the_fleet_is_paused() -> None:
    world = World(slots=1, duration=lambda _delivery: 1.0)
    world.pause.hear(world.clock.now() - 7_000)
    report = reporter(world).report()
    now = world.clock.now()
    run = Run(
        run_id="R",
        job_id="J",
        run_sequence=1,
        status=RunStatus.RUNNING,
        created_at=now,
        updated_at=now,
        paused=True,
        stats=RunStats(total=3),
    )
    wait = run_wait(run, Crew([report], heard_at=now, heartbeat=10.0), now)

    assert wait is not None
    assert (wait.reason, wait.detail) == (RunWaitReason.PAUSED, FLEET_PAUSED)
    assert wait.since == now - 7_000


async def test_a_paused_fleet_asks_for_no_more_workers() -> None:
    pause = FleetPause()
    backlog = Backlog(Lanes(control_limit=1), SevenMessages(), pause)
    await backlog.count()
    assert backlog.runnable() == 7
    pause.hear(1)
    assert backlog.runnable() == 0


@pytest.fixture
async def api(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data", sessions=SessionOptions(on_loopback=True)) as opened:
        yield opened


async def test_pages_say_that_the_fleet_is_paused(api: Api) -> None:
    now = api.clock.now()
    report = WorkerReport(
        worker_id="W",
        version="1",
        started_at=now,
        said_at=now,
        heartbeat=10.0,
        slots=4,
        in_use=0,
        paused_since=now,
    )
    await api.binding.workers.say(report)
    record = (await api.bare.get("/dashboard.json")).json()

    assert [(one["kind"], one["detail"]) for one in record["troubles"]] == [
        ("fleet_paused", FLEET_PAUSED)
    ]
    assert FLEET_PAUSED in (await api.bare.get("/dashboard")).text
