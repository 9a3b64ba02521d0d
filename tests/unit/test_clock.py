"""The fake clock: time moves only when advanced, in order, the same for the same seed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import uvloop

from conveyor.clock import SystemClock
from conveyor.domain.ids import is_ulid
from conveyor.ports.clock import Clock
from conveyor.testing.clock import START, FakeClock


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {}), id="asyncio"),
        pytest.param(("asyncio", {"loop_factory": uvloop.new_event_loop}), id="uvloop"),
        pytest.param(("trio", {}), id="trio"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


async def _note(clock: Clock, seconds: float, seen: list[tuple[float, float]]) -> None:
    await clock.sleep(seconds)
    seen.append((seconds, clock.monotonic()))


@pytest.mark.parametrize("make", [FakeClock, SystemClock])
def test_both_clocks_are_clocks(make: Callable[[], Clock]) -> None:
    clock = make()
    assert is_ulid(clock.new_id())
    assert clock.now() >= START
    assert 0 <= clock.random() < 1
    assert len(clock.token(32)) == 32
    assert clock.monotonic() >= 0


async def test_sleepers_wake_in_the_order_of_their_instants() -> None:
    clock = FakeClock()
    seen: list[tuple[float, float]] = []
    async with anyio.create_task_group() as group:
        for seconds in (3.0, 1.0, 2.0, 60.0):
            group.start_soon(_note, clock, seconds, seen)
        await clock.advance(10)
        assert seen == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]
        assert (clock.pending, clock.monotonic(), clock.now()) == (1, 10.0, START + 10_000)
        await clock.advance(50)
    assert seen[-1] == (60.0, 60.0)
    assert clock.pending == 0


async def test_a_sleeper_that_sleeps_again_is_woken_at_each_instant_on_the_way() -> None:
    clock = FakeClock()
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            await clock.sleep(0.25)
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            ticks.append(clock.monotonic())

    async with anyio.create_task_group() as group:
        group.start_soon(tick)
        await clock.advance(2)
        group.cancel_scope.cancel()
    assert ticks == [0.25 * number for number in range(1, 9)]


async def test_without_advance_nobody_wakes() -> None:
    clock = FakeClock()
    seen: list[tuple[float, float]] = []
    async with anyio.create_task_group() as group:
        group.start_soon(_note, clock, 0.001, seen)
        for _ in range(50):
            await anyio.lowlevel.checkpoint()
        assert (seen, clock.pending, clock.now()) == ([], 1, START)
        group.cancel_scope.cancel()
    assert clock.pending == 0


async def test_no_sleep_at_all_still_yields() -> None:
    clock = FakeClock()
    seen: list[tuple[float, float]] = []
    async with anyio.create_task_group() as group:
        group.start_soon(_note, clock, 0, seen)
        group.start_soon(_note, clock, -1, seen)
        await clock.advance(0)
        assert sorted(seen) == [(-1, 0.0), (0, 0.0)]


async def test_cancelled_sleeps_leave_nothing_behind() -> None:
    clock = FakeClock()
    for _ in range(1_000):
        with anyio.CancelScope() as scope:
            scope.cancel()
            await clock.sleep(1_000)
    assert clock.pending == 0
    assert len(clock._timers) < 100


async def test_advance_while_stops_once_the_condition_is_met() -> None:
    clock = FakeClock()
    seen: list[tuple[float, float]] = []
    async with anyio.create_task_group() as group:
        for seconds in (3.0, 1.0, 2.0):
            group.start_soon(_note, clock, seconds, seen)
        await clock.advance_while(lambda: len(seen) < 2, limit=100)
        assert clock.monotonic() == 2.0
        await clock.advance_while(lambda: len(seen) < 9, limit=100)
        assert clock.monotonic() == 102.0


async def test_a_thread_at_work_does_not_hold_up_time() -> None:
    clock = FakeClock()
    gate = threading.Event()

    async def wait() -> None:
        await anyio.to_thread.run_sync(gate.wait)

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await clock.advance(3_600)
        assert clock.monotonic() == 3_600.0
        gate.set()


async def test_a_task_that_never_waits_does_not_hang_advance(anyio_backend_name: str) -> None:
    if anyio_backend_name == "trio":
        pytest.skip("trio's own settling waits for such a task")
    clock = FakeClock()

    async def spin() -> None:
        while True:
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(spin)
        await clock.advance(1)
        assert clock.monotonic() == 1.0
        group.cancel_scope.cancel()


async def test_grace_lets_a_thread_answer_before_time_moves() -> None:
    clock = FakeClock(grace=0.05)
    answered: list[float] = []

    async def work() -> None:
        await clock.sleep(1)
        await anyio.to_thread.run_sync(lambda: None)
        answered.append(clock.monotonic())

    async with anyio.create_task_group() as group:
        group.start_soon(work)
        await clock.advance(10)
        assert answered == [1.0]


def test_the_same_seed_gives_the_same_numbers() -> None:
    one, same, other = FakeClock(seed=7), FakeClock(seed=7), FakeClock(seed=8)
    draws = [
        ([clock.random(), clock.random()], clock.token(8), clock.new_id())
        for clock in (one, same, other)
    ]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]


async def test_ids_grow_also_within_a_millisecond_and_when_the_wall_clock_goes_back() -> None:
    clock = FakeClock()
    ids = [clock.new_id() for _ in range(1_000)]
    clock.shift(-60)
    ids += [clock.new_id() for _ in range(10)]
    await clock.advance(120)
    ids.append(clock.new_id())
    assert ids == sorted(set(ids))
    assert all(is_ulid(text) for text in ids)
    assert ids[-1][:10] > ids[0][:10]


async def test_a_shift_moves_the_wall_clock_alone() -> None:
    clock = FakeClock()
    await clock.advance(5)
    clock.shift(-3_600)
    assert clock.now() == START + 5_000 - 3_600_000
    assert clock.monotonic() == 5.0
