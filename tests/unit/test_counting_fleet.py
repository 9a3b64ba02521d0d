"""Fleets that count one run: within the capacity of each partition key, exact under lost and late
writes, and ended once, by the process that was the last."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio
import pytest

from conveyor.domain.model import RunStatus, Spend
from conveyor.prod.dynamodb import recount as recounting
from conveyor.prod.dynamodb.counters import LATE
from conveyor.prod.dynamodb.recount import fold_items, recount_at
from conveyor.simulation.loop import VirtualTime, run
from tests.memory_table import READ_UNITS, WRITE_UNITS, MemoryTable
from tests.unit.counting_fleet import CLAIM, GATEWAY, JOB_ID, RUN_ID, Fleet, Weather

pytestmark = pytest.mark.slow

BAD = Weather(lost=0.05, away=0.02, late=0.1)
SLOTS = 5
MANY = 100
"""Processes from which on a sum takes this test too long to be read ten times a second."""


def in_virtual_time(test: Callable[[VirtualTime], Awaitable[None]]) -> None:
    """Run a test to its end."""
    run(test, backend="asyncio")


def fleet_of(time: VirtualTime, tasks: int, *, weather: Weather | None = None) -> Fleet:
    """A fleet with its run."""
    fleet = Fleet(time, MemoryTable(time.seconds, time.sleep), tasks)
    fleet.weather = weather or Weather()
    fleet.open()
    return fleet


async def drain(fleet: Fleet, processes: int) -> None:
    """Work all tasks, each process its share in SLOTS slots; then wait for the end."""
    ended = anyio.Event()

    async def process(number: int) -> None:
        tasks, _ = fleet.process(f"process-{number}")
        share = iter(range(number, fleet.tasks, processes))

        async def slot() -> None:
            for index in share:
                while not await fleet.work(tasks, f"process-{number}", index):
                    if fleet.is_ended(index):
                        break
                    await fleet.time.sleep(CLAIM / 1_000)

        await fleet.time.sleep(fleet.table.random.random())
        async with anyio.create_task_group() as group:
            for _ in range(SLOTS):
                group.start_soon(slot)

    async with anyio.create_task_group() as group:
        group.start_soon(fleet.watch, ended.is_set, 0.1 if processes < MANY else 1.0)
        async with anyio.create_task_group() as working:
            for number in range(processes):
                working.start_soon(process, number)
        for _ in range(100):
            if fleet.status() != "running":
                break
            await fleet.time.sleep(1.0)
        ended.set()


async def exact(fleet: Fleet) -> None:
    """The run has ended once, its counters are those of its rows, and none ever shrank."""
    row = await fleet.records().read_at(fleet.place)
    assert row is not None
    stats = row.run.stats
    assert row.run.status is RunStatus.COMPLETED
    assert (stats.successful, stats.failed) == fleet.rows()
    assert stats.completed == stats.total == fleet.tasks
    assert stats.spend == Spend(fleet.tasks, fleet.tasks / 4)
    assert sum(group.failed for group in row.groups.values()) == stats.failed
    assert sum(stats.shape.sizes) == sum(stats.shape.types.values()) == stats.successful
    assert fleet.seen == sorted(fleet.seen)
    # Nobody else has changed the row: its version was raised by the end, and by recounts.
    again = await fleet.records().keep_sum(fleet.place)
    assert again is not None
    assert again.run.stats == stats


def p95(waits: list[float]) -> float:
    """The wait that one of twenty exceeds."""
    return sorted(waits)[int(len(waits) * 0.95)]


async def fits(fleet: Fleet, processes: int) -> None:
    """A fleet drains its run within the capacity of each key."""
    await drain(fleet, processes)
    await exact(fleet)
    for prefix in (f"Job#{JOB_ID}", f"Count#{RUN_ID}"):
        assert fleet.table.most("w", prefix) <= WRITE_UNITS
        assert fleet.table.most("r", prefix) <= READ_UNITS
    assert p95(fleet.waits) < 1.0


@pytest.mark.parametrize(
    ("processes", "each"),
    [
        (1, 40),
        pytest.param(200, 15, marks=pytest.mark.extended),
        pytest.param(1_000, 15, marks=(pytest.mark.full, pytest.mark.timeout(900))),
    ],
)
def test_a_fleet_on_one_run_fits_into_its_partitions(processes: int, each: int) -> None:
    async def test(time: VirtualTime) -> None:
        await fits(fleet_of(time, processes * each), processes)

    in_virtual_time(test)


@pytest.mark.parametrize("processes", [1, 8])
def test_lost_answers_and_late_duplicates_of_every_write_change_nothing(processes: int) -> None:
    async def test(time: VirtualTime) -> None:
        fleet = fleet_of(time, 20 * processes, weather=Weather(lost=0.3, late=1.0, latest=20.0))
        await drain(fleet, processes)
        await time.sleep(30.0)
        fleet.deliver_late(time.seconds())
        await exact(fleet)

    in_virtual_time(test)


def test_a_process_that_is_frozen_for_ten_minutes_counts_what_it_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its item is folded meanwhile, and the run recounted."""
    monkeypatch.setattr(recounting, "MOST_ITEMS", 0)
    monkeypatch.setattr(recounting, "GONE_AFTER", 5 * 60_000)

    async def test(time: VirtualTime) -> None:
        fleet = fleet_of(time, 30)
        slow, seam = fleet.process("slow")
        quick, _ = fleet.process("quick")
        for index in range(5):
            assert await fleet.work(slow, "slow", index)
        for index in range(5, 10):
            assert await fleet.work(quick, "quick", index)
        async with anyio.create_task_group() as group:
            group.start_soon(fleet.work, slow, "slow", 10)
            await time.sleep(1.0)
            seam.frozen = anyio.Event()
            await time.sleep(600.0)
            row = await fleet.records().read_at(fleet.place)
            assert row is not None
            assert row.run.stats.completed == 10
            assert await fold_items(fleet.records(), row, now=fleet.clock.now()) == 2
            row = await fleet.records().read_at(fleet.place)
            assert row is not None
            assert (row.base.completed, row.run.stats.completed) == (10, 10)
            for index in range(11, 20):
                assert await fleet.work(quick, "quick", index)
            seam.frozen.set()
            seam.frozen = None
        # Its call outlasted its claim, yet nobody had taken the task over: its end counts.
        assert fleet.is_ended(10)
        for index in range(20, 30):
            assert await fleet.work(slow, "slow", index)
        await exact(fleet)

    in_virtual_time(test)


@pytest.mark.extended
def test_recounts_and_folds_that_cross_flushes_and_reads_lose_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recounting, "MOST_ITEMS", 0)
    monkeypatch.setattr(recounting, "GONE_AFTER", 1)

    async def test(time: VirtualTime) -> None:
        fleet = fleet_of(time, 60, weather=BAD)
        folded, recounted = [0], [0]

        async def meddle() -> None:
            records, chance = fleet.records(), fleet.table.random.random
            while fleet.status() == "running":
                await time.sleep(chance())
                row = await records.read_at(fleet.place)
                assert row is not None
                if chance() < 0.7:
                    folded[0] += await fold_items(records, row, now=fleet.clock.now())
                else:
                    # As if all claims had lapsed: it counts while rows move.
                    later = fleet.clock.now() + 2 * CLAIM
                    recounted[0] += (await recount_at(records, fleet.place, now=later)).done

        async with anyio.create_task_group() as group:
            group.start_soon(meddle)
            await drain(fleet, 8)
        assert folded[0] > 0
        assert recounted[0] > 0
        await time.sleep(60.0)
        await exact(fleet)

    in_virtual_time(test)


@dataclass(frozen=True, slots=True)
class Steady:
    """The course of a run in one process that works it in so many slots at all times: the units
    that its counters took a task, the longest that an ended row was not counted, and the seconds
    from the last row's end to that of the run."""

    units: float
    lag: float
    end: float


async def steady(fleet: Fleet, slots: int) -> Steady:
    """Work a run in one process and watch how its counters follow its rows."""
    tasks, _ = fleet.process("one")
    share, lags, ends = iter(range(fleet.tasks)), [0.0], [0.0]
    records, time = fleet.records(), fleet.time
    history: deque[tuple[float, int]] = deque()

    async def slot() -> None:
        await time.sleep(GATEWAY * fleet.table.random.random())
        for index in share:
            assert await fleet.work(tasks, "one", index)

    async def watch() -> None:
        while fleet.status() == "running":
            history.append((time.seconds(), sum(fleet.rows())))
            row = await records.read_at(fleet.place)
            assert row is not None
            while history and history[0][1] <= row.run.stats.completed:
                history.popleft()
            if history:
                lags.append(time.seconds() - history[0][0])
                ends[0] = time.seconds() if history[-1][1] < fleet.tasks else ends[0]
            await time.sleep(0.1)
        ends.append(time.seconds())

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        for _ in range(slots):
            group.start_soon(slot)
    written = sum(
        units
        for (kind, key, _), units in fleet.table.units.items()
        if kind == "w" and key.startswith(f"Count#{RUN_ID}")
    )
    return Steady(written / fleet.tasks, max(lags), ends[-1] - ends[0])


@pytest.mark.parametrize(("slots", "tasks", "most"), [(5, 300, 0.2), (50, 1_500, 0.06)])
def test_a_process_that_ends_few_tasks_of_a_run_a_second_seldom_counts_them(
    slots: int, tasks: int, most: float
) -> None:
    """Nor does a settlement wait for that, and the end of the run comes at once."""

    async def test(time: VirtualTime) -> None:
        fleet = fleet_of(time, tasks)
        course = await steady(fleet, slots)
        await exact(fleet)
        assert course.units <= most
        assert course.lag <= LATE + 0.3
        assert course.end <= 0.5
        assert max(fleet.waits) < 0.5

    in_virtual_time(test)


def test_a_stop_counts_at_once_what_was_put_off() -> None:
    async def test(time: VirtualTime) -> None:
        fleet = fleet_of(time, 12)
        tasks, _ = fleet.process("one")
        async with anyio.create_task_group() as group:
            for index in range(12):
                group.start_soon(fleet.work, tasks, "one", index)
            while sum(fleet.rows()) < 6:
                await time.sleep(0.01)
            row = await fleet.records().read_at(fleet.place)
            assert row is not None
            assert row.run.stats.completed < 6
            began, ended = time.seconds(), sum(fleet.rows())
            await tasks.aclose()
            assert time.seconds() - began < 0.1
            row = await fleet.records().read_at(fleet.place)
            assert row is not None
            assert row.run.stats.completed >= ended

    in_virtual_time(test)


def test_what_a_process_had_put_off_when_it_was_killed_is_counted_by_a_recount() -> None:
    async def test(time: VirtualTime) -> None:
        fleet = fleet_of(time, 12)
        dead, seam = fleet.process("dead")
        one, _ = fleet.process("one")
        async with anyio.create_task_group() as group:
            for index in range(6):
                group.start_soon(fleet.work, dead, "dead", index)
            while sum(fleet.rows()) < 4:
                await time.sleep(0.01)
            # Answered, and so acknowledged: no message tells of them any more.
            assert len(fleet.waits) >= 3
            seam.frozen = anyio.Event()
            group.cancel_scope.cancel()
        await time.sleep(CLAIM / 1_000 + 1)
        for index in range(12):
            if not fleet.is_ended(index):
                assert await fleet.work(one, "one", index)
        row = await fleet.records().read_at(fleet.place)
        assert row is not None
        assert row.run.stats.completed < 12 == sum(fleet.rows())
        assert row.run.status is RunStatus.RUNNING
        assert (await recount_at(fleet.records(), fleet.place, now=fleet.clock.now())).done
        await exact(fleet)

    in_virtual_time(test)
