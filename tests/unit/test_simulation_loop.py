"""Virtual time on asyncio and trio: exact, repeatable, and loud where it cannot go on."""

from __future__ import annotations

import asyncio
import sys

import anyio
import anyio.lowlevel
import pytest

from conveyor.simulation import loop as loops
from conveyor.simulation.loop import Deadlock, VirtualLoop, VirtualTime, run, virtual_time

both = pytest.mark.parametrize("backend", loops.BACKENDS)


@both
def test_sleepers_wake_in_order_at_the_very_moment(backend: str) -> None:
    woken: list[tuple[float, str]] = []

    async def main(time: VirtualTime) -> None:
        async def sleeper(name: str, seconds: float) -> None:
            await time.sleep(seconds)
            woken.append((time.seconds(), name))

        async with anyio.create_task_group() as group:
            for name, seconds in (("hour", 3_600.0), ("tick", 0.25), ("none", 0.0)):
                group.start_soon(sleeper, name, seconds)

    run(main, backend=backend)
    assert woken == [(0.0, "none"), (0.25, "tick"), (3_600.0, "hour")]


@both
def test_time_is_exact_after_months(backend: str) -> None:
    """A tolerance of a nanosecond, as asyncio's own loop has, would be lost in the rounding of such
    times, and the loop would never get past them."""

    async def main(time: VirtualTime) -> tuple[float, float]:
        await time.sleep(2.0**24)
        before = time.seconds()
        for _ in range(1_000):
            await time.sleep(2.0**-10)
        with anyio.move_on_after(2.0**-10):
            await time.sleep(1.0)
        return before, time.seconds()

    before, after = run(main, backend=backend)
    assert (before, after) == (2.0**24, 2.0**24 + 1_001 * 2.0**-10)


@pytest.mark.slow
@both
def test_sleeps_that_are_cancelled_move_no_time(backend: str) -> None:
    async def main(time: VirtualTime) -> float:
        for _ in range(500):
            async with anyio.create_task_group() as group:
                group.start_soon(_sleep, time, 1_000.0)
                group.start_soon(_deadline, 1_000.0)
                await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
        await time.sleep(1.0)
        return time.seconds()

    assert run(main, backend=backend) == 1.0


async def _sleep(time: VirtualTime, seconds: float) -> None:
    await time.sleep(seconds)


async def _deadline(seconds: float) -> None:
    with anyio.move_on_after(seconds):
        await anyio.sleep_forever()


def test_waiting_for_nothing_is_told() -> None:
    async def main(time: VirtualTime) -> None:
        await anyio.Event().wait()

    with pytest.raises(Deadlock):
        run(main, backend="asyncio")


def _race(backend: str, seed: int) -> list[int]:
    """The order in which fifty tasks come by that are all due at the same moment."""
    order: list[int] = []

    async def main(time: VirtualTime) -> None:
        async def racer(number: int) -> None:
            for _ in range(3):
                await time.sleep(1.0)
                order.append(number)

        async with anyio.create_task_group() as group:
            for number in range(50):
                group.start_soon(racer, number)

    run(main, backend=backend, seed=seed)
    return order


@both
def test_the_same_seed_gives_the_same_order(backend: str) -> None:
    """Trio shuffles its tasks by chance unless it is told otherwise, by names of its own."""
    assert _race(backend, 1) == _race(backend, 1)


def test_on_trio_another_seed_gives_another_order_and_chance_comes_back() -> None:
    assert _race("trio", 1) != _race("trio", 2)
    scheduler = sys.modules["trio._core._run"]
    before = scheduler._r.getstate()
    _race("trio", 3)
    assert scheduler._r.getstate() == before


def test_cancelled_tasks_wake_in_the_order_of_their_making() -> None:
    """Cancel scopes keep tasks, and one another, in sets, whose order is that of addresses."""
    woken: list[int] = []

    async def main(time: VirtualTime) -> None:
        async def waiter(number: int) -> None:
            try:
                if number % 2:
                    with anyio.CancelScope():
                        await anyio.sleep_forever()
                else:
                    await anyio.sleep_forever()
            finally:
                woken.append(number)

        async with anyio.create_task_group() as group:
            for number in range(100):
                group.start_soon(waiter, number)
            await time.sleep(1.0)
            group.cancel_scope.cancel()

    run(main, backend="asyncio")
    assert woken == list(range(100))


def test_a_loop_without_the_names_that_this_builds_on_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loops, "_PRIVATE", ("_ready", "_renamed"))
    with pytest.raises(RuntimeError, match="no _renamed"):
        VirtualLoop()


def test_a_trio_without_the_names_that_this_builds_on_is_refused() -> None:
    with pytest.raises(RuntimeError, match="no _ALLOW_DETERMINISTIC_SCHEDULING"):
        loops._in_order(asyncio, 0).__enter__()


def test_a_missing_trio_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trio", None)

    async def main(time: VirtualTime) -> None:
        """Never reached."""

    with pytest.raises(RuntimeError, match="-m pip install trio"):
        run(main, backend="trio")


def test_an_unknown_backend_is_refused() -> None:
    async def main(time: VirtualTime) -> None:
        """Never reached."""

    with pytest.raises(ValueError, match="curio"):
        run(main, backend="curio")


def test_real_time_is_not_taken_for_virtual_time() -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="real time"):
            virtual_time()

    asyncio.run(main())
