"""Discovery: the runs that have lanes, and the handling of an empty or missing queue."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from conveyor.dev.queues import LocalSignals
from conveyor.domain.ids import task_id
from conveyor.domain.model import DispatchableRun
from conveyor.engine.discovery import CHANGES_MARGIN, YOUNG_QUEUE, Discovery, DiscoveryOptions
from conveyor.ports.handler import ACKNOWLEDGE, Outcome
from conveyor.ports.queues import host_queue
from conveyor.ports.records import DispatchChange
from tests.unit.dispatch_world import World

INTERVAL, RESYNC, EVICT_AFTER = 10.0, 600.0, 600.0


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


class Catalogue:
    """The store that discovery reads: the dispatchable runs, and the times of changes. A look at
    many of them takes `answer_time` seconds from its snapshot to its answer."""

    def __init__(self, world: World) -> None:
        self._clock = world.clock
        self.runs: dict[str, DispatchableRun] = {}
        self.changed_at: dict[str, int] = {}
        self.scans = 0
        self.answer_time = 0.0

    def put(self, run: DispatchableRun, *, told: bool = True) -> None:
        """Make a run dispatchable; unless `told`, no change reports it."""
        self.runs[run.run_id] = run
        if told:
            self.changed_at[run.run_id] = self._clock.now()

    def drop(self, run_id: str, *, told: bool = True) -> None:
        """A run is not dispatchable any more."""
        del self.runs[run_id]
        if told:
            self.changed_at[run_id] = self._clock.now()

    async def dispatchable_runs(self) -> list[DispatchableRun]:
        self.scans += 1
        found = list(self.runs.values())
        await self._clock.sleep(self.answer_time)
        return found

    async def dispatchable_run(self, run_id: str) -> DispatchableRun | None:
        return self.runs.get(run_id)

    async def dispatch_changes(self, *, since: int) -> list[DispatchChange]:
        changed = [run for run, moment in self.changed_at.items() if moment >= since]
        changes = [DispatchChange(run, self.runs.get(run)) for run in changed]
        await self._clock.sleep(self.answer_time)
        return changes


class Discovering:
    """One worker whose lanes are opened and closed by discovery alone."""

    def __init__(self, *, duration: Callable[[Any], float] = lambda _delivery: 0.5) -> None:
        self.world = World(slots=10, duration=duration)
        self.catalogue = Catalogue(self.world)
        self.signals = LocalSignals()
        self.discovery = Discovery(
            self.world.dispatcher,
            self.catalogue,
            self.world.queues,
            self.signals,
            self.world.clock,
            DiscoveryOptions(interval=INTERVAL, resync=RESYNC, evict_after=EVICT_AFTER),
        )

    async def submit(self, name: str, count: int, *, told: bool = True) -> DispatchableRun:
        """A run with messages in its queue that no lane knows of yet."""
        run = DispatchableRun(
            run_id=name,
            job_id=f"job-{name}",
            priority=5,
            max_inflight=100,
            created_at=self.world.clock.now(),
        )
        self.world.rows[name] = [(index, task_id(name, index)) for index in range(count)]
        await self.world.queues.open_run(run.job_id, name)
        await self.world.queues.send_tasks(run.job_id, name, self.world.rows[name])
        self.catalogue.put(run, told=told)
        return run

    def lane_is_open(self, name: str) -> bool:
        lane = self.world.dispatcher.lanes.get(name)
        return lane is not None and not lane.closed

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as group, self.world.running():
            group.start_soon(self.discovery.run)
            yield
            self.discovery.stop()
            group.cancel_scope.cancel()


async def test_runs_that_are_there_at_the_start_are_worked_at_once() -> None:
    it = Discovering()
    await it.submit("old", 5, told=False)
    async with it.running():
        await it.world.clock.advance(2)
        assert len(it.world.tasks.done) == 5


async def test_a_change_is_found_within_an_interval_without_any_hint() -> None:
    it = Discovering()
    async with it.running():
        await it.world.clock.advance(INTERVAL / 2)
        await it.submit("new", 5)
        await it.world.clock.advance(INTERVAL)
        assert len(it.world.tasks.done) == 5
        assert it.catalogue.scans == 1


@pytest.mark.slow
async def test_a_run_that_no_change_tells_of_is_found_by_the_next_scan() -> None:
    it = Discovering()
    async with it.running():
        await it.world.clock.advance(INTERVAL / 2)
        await it.submit("quiet", 5, told=False)
        await it.world.clock.advance(RESYNC / 2)
        assert it.world.tasks.done == []
        await it.world.clock.advance(RESYNC / 2 + 2 * INTERVAL)
        assert len(it.world.tasks.done) == 5


@pytest.mark.slow
async def test_a_run_that_ended_leaves_by_a_change_or_by_the_next_scan() -> None:
    it = Discovering(duration=lambda _delivery: 1_000.0)
    async with it.running():
        await it.submit("told", 50)
        await it.submit("untold", 50)
        await it.world.clock.advance(CHANGES_MARGIN / 1_000 + 2 * INTERVAL)
        assert it.lane_is_open("told")
        assert it.lane_is_open("untold")
        it.catalogue.drop("told")
        it.catalogue.drop("untold", told=False)
        await it.world.clock.advance(2 * INTERVAL)
        assert not it.lane_is_open("told")
        assert it.lane_is_open("untold")
        await it.world.clock.advance(RESYNC)
        assert not it.lane_is_open("untold")


async def test_a_hint_opens_and_closes_a_lane_within_a_second() -> None:
    it = Discovering(duration=lambda _delivery: 1_000.0)
    async with it.running():
        await it.world.clock.advance(INTERVAL / 2)
        await it.submit("hinted", 50)
        it.signals.run_changed("hinted")
        await it.world.clock.advance(1)
        assert it.lane_is_open("hinted")
        it.catalogue.drop("hinted")
        it.signals.run_changed("hinted")
        await it.world.clock.advance(1)
        assert not it.lane_is_open("hinted")


@pytest.mark.parametrize("look", ["scan", "changes"])
async def test_a_look_that_began_before_a_hint_does_not_reopen_what_it_closed(look: str) -> None:
    """For the mistake of believing the answer that comes last, not the read that began last."""
    it = Discovering(duration=lambda _delivery: 1.0)
    it.catalogue.answer_time = 0.5
    if look == "scan":
        await it.submit("a", 500)
    async with it.running():
        if look == "changes":
            await it.world.clock.advance(INTERVAL)
            await it.submit("a", 500)
            await it.world.clock.advance(0.5)  # the look behind the first scan begins
        it.signals.run_changed("a")
        await it.world.clock.advance(0.1)
        assert it.lane_is_open("a")
        it.catalogue.drop("a")
        it.signals.run_changed("a")
        await it.world.clock.advance(0.1)
        assert not it.lane_is_open("a")
        received = it.world.received()
        for _ in range(8):
            await it.world.clock.advance(1)
            assert not it.lane_is_open("a")
        assert it.world.received() == received


async def test_a_look_that_began_before_a_hint_does_not_close_what_it_opened() -> None:
    it = Discovering(duration=lambda _delivery: 1_000.0)
    async with it.running():
        run = await it.submit("a", 500)
        await it.world.clock.advance(2 * INTERVAL - 1)
        it.catalogue.drop("a")
        it.catalogue.answer_time = 0.5
        await it.world.clock.advance(1.1)
        it.catalogue.put(run)
        it.signals.run_changed("a")
        for _ in range(8):
            await it.world.clock.advance(1)
            assert it.lane_is_open("a")


async def test_a_lane_closed_while_its_queue_is_made_ready_stays_closed() -> None:
    """For the mistake of looking who was first before the queue is made ready, and not after."""
    it = Discovering(duration=lambda _delivery: 1.0)
    async with it.running():
        await it.world.clock.advance(1)
        await it.submit("a", 500)
        it.world.queues.open_time = 0.5
        await it.world.clock.advance(INTERVAL - 0.9)  # a look found it, and its queue is opened
        it.catalogue.drop("a")
        it.signals.run_changed("a")
        for _ in range(8):
            await it.world.clock.advance(1)
            assert not it.lane_is_open("a")
        assert it.world.received() == 0


async def test_a_clock_set_back_hides_no_change() -> None:
    it = Discovering()
    async with it.running():
        await it.world.clock.advance(INTERVAL / 2)
        it.world.clock.shift(-30)
        await it.submit("new", 5)
        await it.world.clock.advance(INTERVAL)
        assert len(it.world.tasks.done) == 5


@pytest.mark.slow
async def test_an_empty_queue_is_left_alone_after_a_while_and_comes_back_with_work() -> None:
    it = Discovering()
    async with it.running():
        run = await it.submit("a", 1)
        await it.world.clock.advance(INTERVAL + 1)
        del it.catalogue.changed_at["a"]
        await it.world.clock.advance(EVICT_AFTER - 2 * INTERVAL)
        assert it.lane_is_open("a")
        del it.catalogue.runs["a"]
        it.catalogue.runs["other"] = run
        await it.world.clock.advance(3 * INTERVAL)
        assert it.world.dispatcher.lanes.get("a") is None
        assert it.world.granted("a") == 0


@pytest.mark.slow
async def test_a_queue_that_only_hides_its_messages_is_not_left_alone() -> None:
    it = Discovering()
    it.world.tasks.outcome = lambda delivery: (
        Outcome(hide_for=1.5 * EVICT_AFTER) if delivery.receive_count == 1 else ACKNOWLEDGE
    )
    async with it.running():
        await it.submit("a", 1)
        await it.world.clock.advance(INTERVAL + 1)
        del it.catalogue.changed_at["a"]
        await it.world.clock.advance(1.5 * EVICT_AFTER - 10)
        assert it.lane_is_open("a")
        await it.world.clock.advance(20)
        assert len(it.world.tasks.done) == 1


async def test_a_missing_queue_ends_only_the_lane_of_a_run_that_has_ended() -> None:
    it = Discovering()
    async with it.running():
        await it.submit("ended", 1)
        await it.submit("live", 1)
        await it.world.clock.advance(INTERVAL + 1)
        it.catalogue.drop("ended", told=False)
        await it.world.queues.drop_run("ended")
        await it.world.queues.drop_run("live")
        await it.world.clock.advance(10)
        assert not it.lane_is_open("ended")
        assert it.lane_is_open("live")


async def test_the_queue_of_a_host_is_young_when_its_run_is_not() -> None:
    it = Discovering()
    it.world.hosts = ("a.example:80",)
    queue = host_queue("a", 0)
    async with it.running():
        run = await it.submit("a", 0)
        await it.world.clock.advance(2 * YOUNG_QUEUE / 1_000)
        it.world.rows["a"] = [(index, task_id("a", index)) for index in range(5)]
        it.catalogue.put(replace(run, hosts=it.world.hosts))
        await it.world.clock.advance(INTERVAL + 1)
        # As it is where one part of the service does not know of it yet.
        it.world.queues._runs.pop(queue)
        await it.world.clock.advance(YOUNG_QUEUE / 1_000 - INTERVAL - 5)
        assert queue not in it.world.queues._runs
        await it.world.clock.advance(20)
        assert queue in it.world.queues._runs


async def test_a_missing_queue_is_retried_while_it_is_young_and_made_again_later() -> None:
    it = Discovering()
    async with it.running():
        await it.submit("a", 0)
        await it.world.clock.advance(INTERVAL + 1)
        await it.world.queues.drop_run("a")
        it.world.rows["a"] = [(index, task_id("a", index)) for index in range(5)]
        await it.world.clock.advance(YOUNG_QUEUE / 1_000 - INTERVAL - 5)
        assert it.world.tasks.done == []
        await it.world.clock.advance(20)
        assert sorted(it.world.tasks.done) == [task for _, task in it.world.rows["a"]]
