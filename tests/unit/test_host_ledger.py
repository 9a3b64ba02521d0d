"""The starts of hosts over DynamoDB's ledger, by workers whose clocks have nothing in common: never
closer than their interval, and nearly all of them used."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import anyio
import pytest

from conveyor.dev.permits import MemoryPermits
from conveyor.domain.hosts import HostRules
from conveyor.ports.pacing import Pacing
from conveyor.prod.aws.calls import Parameters
from conveyor.prod.dynamodb.client import Table
from conveyor.prod.dynamodb.pacing import DynamoPacing
from conveyor.testing.clock import FakeClock
from tests.memory_table import MemoryTable
from tests.unit.dispatch_world import World

A, B = "a.example:443", "b.example:443"


class OwnClock:
    """The clock of one machine: its monotonic seconds and its wall clock begin anywhere."""

    def __init__(self, clock: FakeClock, begins: float, apart: float) -> None:
        self._clock = clock
        self._begins = begins
        self._apart = round(apart * 1_000)
        self.new_id, self.random = clock.new_id, clock.random
        self.token, self.sleep = clock.token, clock.sleep

    def stand_still(self, seconds: float) -> None:
        """Have missed some seconds, as a machine that was asleep; its wall clock goes on."""
        self._begins -= seconds

    def now(self) -> int:
        """Return milliseconds by a wall clock that is off."""
        return self._clock.now() + self._apart

    def monotonic(self) -> float:
        """Return seconds since this machine was started."""
        return self._clock.monotonic() + self._begins


class Calls:
    """The transport to a table in memory, whose calls and answers take their time."""

    def __init__(self, table: MemoryTable, clock: FakeClock) -> None:
        self._table = table
        self._clock = clock

    async def call(self, _service: str, operation: str, parameters: Parameters) -> dict[str, Any]:
        """One call of DynamoDB."""
        answer = await self._table.call(operation, parameters)
        await self._clock.sleep(0.004)
        return answer

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        """Not asked for here."""
        raise AssertionError(operation)


Views = Callable[[], tuple[Pacing, OwnClock]]


def views(clock: FakeClock) -> Views:
    """Make the views of workers on one table, with the clock that each of them has."""
    table = MemoryTable(clock.monotonic, clock.sleep)
    permits = MemoryPermits(clock)

    def view() -> tuple[Pacing, OwnClock]:
        own = OwnClock(clock, 1e6 * clock.random(), 60 * (clock.random() - 0.5))
        return DynamoPacing(permits, Table(Calls(table, clock), "t", own), own), own

    return view


def pacings(clock: FakeClock) -> Callable[[], Pacing]:
    """Make the pacings of workers that share a table."""
    view = views(clock)
    return lambda: view()[0]


LATER = pytest.mark.extended


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [(A, B), ()])
@pytest.mark.parametrize(
    ("workers", "rate"),
    [
        (2, 8.0),
        pytest.param(4, 8.0, marks=LATER),
        pytest.param(2, 0.5, marks=LATER),
        pytest.param(4, 0.5, marks=LATER),
    ],
)
async def test_workers_that_share_a_host_use_its_starts(
    workers: int, rate: float, lanes: tuple[str, ...]
) -> None:
    bench = World(
        slots=20,
        duration=lambda _: 0.2,
        workers=workers,
        limits=HostRules(rate=rate),
        pacing=pacings,
    )
    bench.queues._window = 10_000
    seconds = 30.0 if rate > 1 else 240.0
    async with bench.running():
        await bench.submit("a", int(4 * rate * seconds), hosts=(A, B), lanes=lanes)
        await bench.clock.advance(10.0)
        before = len(bench.starts)
        await bench.clock.advance(seconds)
        made = len(bench.starts) - before
    for host in (A, B):
        starts = sorted(moment for moment, url in bench.starts if host in url)
        assert min(later - earlier for earlier, later in pairwise(starts)) >= 1 / rate - 1e-6
    assert made >= 0.95 * 2 * rate * seconds


async def booked_in_turn(
    clock: FakeClock, workers: list[Pacing], interval: float, *, seconds: float, count: int = 1
) -> list[float]:
    """Let workers book in turn, each half an interval after the other, as if they did so by chance;
    return the starts."""
    end, starts = clock.monotonic() + seconds, list[float]()

    async def book(worker: Pacing, after: float) -> None:
        await clock.sleep(after)
        mine = clock.monotonic()
        while clock.monotonic() < end:
            if mine < clock.monotonic() + 2 * count * interval:
                for start in (await worker.book("h", interval, count)).starts:
                    mine = clock.monotonic() + start
                    starts.append(mine)
            await clock.sleep(count * interval / 4)

    async with anyio.create_task_group() as group:
        for number, worker in enumerate(workers):
            group.start_soon(book, worker, number * count * interval / len(workers))
        await clock.advance(seconds + 1.0)
        group.cancel_scope.cancel()
    return sorted(starts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("interval", "count"), [pytest.param(2.0, 1, marks=pytest.mark.extended), (0.125, 8)]
)
async def test_little_is_lost_however_unluckily_workers_take_turns(
    interval: float, count: int
) -> None:
    clock = FakeClock(seed=1)
    view = pacings(clock)
    workers = [view(), view()]
    seconds = 1_800.0 if interval > 1 else 300.0
    starts = await booked_in_turn(clock, workers, interval, seconds=seconds, count=count)
    assert min(later - earlier for earlier, later in pairwise(starts)) >= interval - 1e-6
    assert sum(start < seconds for start in starts) >= 0.95 * seconds / interval


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "count", "share"),
    [(3, 1, 0.95), pytest.param(4, 2, 0.95, marks=LATER), pytest.param(6, 1, 0.9, marks=LATER)],
)
async def test_workers_that_come_round_in_one_order_relay_how_far_their_clocks_are_apart(
    number: int, count: int, share: float
) -> None:
    """Each of them sees soon only the rows of the one behind it, and takes its starts behind those
    of another."""
    clock = FakeClock(seed=1)
    view = pacings(clock)
    starts = await booked_in_turn(
        clock, [view() for _ in range(number)], 0.5, seconds=300.0, count=count
    )
    assert min(later - earlier for earlier, later in pairwise(starts)) >= 0.5 - 1e-6
    assert sum(60 < start < 300 for start in starts) >= share * 240 / 0.5


@pytest.mark.slow
async def test_a_clock_that_stood_still_is_compared_anew() -> None:
    clock = FakeClock(seed=2)
    view = views(clock)
    one, of_one = view()
    other, _ = view()
    starts = await booked_in_turn(clock, [one, other], 0.5, seconds=90.0)
    of_one.stand_still(5.0)
    starts += await booked_in_turn(clock, [one, other], 0.5, seconds=90.0)
    starts = sorted(start for start in starts if start > 100.0)
    assert min(later - earlier for earlier, later in pairwise(starts)) >= 0.5 - 1e-6


async def test_who_dies_holds_nobody_up_for_longer_than_it_had_starts() -> None:
    clock = FakeClock(seed=3)
    view = views(clock)
    one, other, late = (view()[0] for _ in range(3))
    await booked_in_turn(clock, [one, other], 0.5, seconds=20.0)
    had = clock.monotonic() + 2.0
    starts = await booked_in_turn(clock, [other, late], 0.5, seconds=10.0)
    assert starts[0] <= had + 0.5
