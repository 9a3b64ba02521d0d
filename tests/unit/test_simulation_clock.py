"""The clock of a simulated process, and the gate that holds the process up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest

from conveyor.domain.ids import is_ulid
from conveyor.simulation.latency import Latency, stream
from conveyor.simulation.link import Gate, ProcessKilled
from conveyor.simulation.loop import VirtualTime, run
from conveyor.simulation.process import SimulatedClock
from conveyor.testing.clock import START


def _in_time(main: Callable[[VirtualTime], Awaitable[None]]) -> None:
    run(main, backend="asyncio")


def test_processes_agree_on_how_long_things_take_and_on_nothing_else() -> None:
    async def main(time: VirtualTime) -> None:
        one = SimulatedClock(time, Gate(), seed=1, process="w1", skew=30.0)
        other = SimulatedClock(time, Gate(), seed=1, process="w2", skew=-29.5)
        before = one.monotonic(), other.monotonic()
        assert before[0] != before[1]
        assert (one.now(), other.now()) == (START + 30_000, START - 29_500)
        await one.sleep(7_200)
        assert (one.monotonic() - before[0], other.monotonic() - before[1]) == (7_200, 7_200)
        assert one.now() == START + 7_230_000

    _in_time(main)


def test_the_same_seed_and_process_give_the_same_ids_and_numbers() -> None:
    async def main(time: VirtualTime) -> None:
        def drawn(seed: int, process: str) -> list[object]:
            clock = SimulatedClock(time, Gate(), seed=seed, process=process)
            return [clock.new_id(), clock.random(), clock.token(8), clock.new_id()]

        assert drawn(1, "w1") == drawn(1, "w1")
        assert drawn(1, "w1") != drawn(1, "w2")
        assert drawn(1, "w1") != drawn(2, "w1")
        clock = SimulatedClock(time, Gate(), seed=0, process="w1")
        ids = [clock.new_id() for _ in range(100)]
        assert ids == sorted(set(ids))
        assert all(map(is_ulid, ids))

    _in_time(main)


def test_streams_do_not_depend_on_who_hashes() -> None:
    """Fixed numbers: `hash` would give others in every process."""
    assert stream(7, "queues").random() == 0.42814502124996634
    assert Latency(2.0, 0.6).draw_for(7, "a task 1") == pytest.approx(2.751841743, abs=1e-9)


def test_latencies_have_their_median_and_mean() -> None:
    latency, draw = Latency(2.0, 0.6), stream(0, "latency")
    for values in (
        sorted(latency.draw(draw) for _ in range(20_000)),
        sorted(latency.draw_for(0, str(number)) for number in range(20_000)),
    ):
        assert values[10_000] == pytest.approx(2.0, rel=0.03)
        assert sum(values) / 20_000 == pytest.approx(latency.mean, rel=0.03)
    assert (Latency(0.5).draw(draw), Latency(0.5).draw_for(0, "any")) == (0.5, 0.5)


def test_a_paused_process_wakes_when_it_is_resumed() -> None:
    async def main(time: VirtualTime) -> None:
        gate = Gate()
        clock = SimulatedClock(time, gate, seed=0, process="w1")
        woken: list[float] = []

        async def sleeper() -> None:
            await clock.sleep(1.0)
            woken.append(time.seconds())
            await clock.sleep(1.0)
            woken.append(time.seconds())

        async with anyio.create_task_group() as group:
            group.start_soon(sleeper)
            await time.sleep(0.5)
            gate.pause()
            await time.sleep(100)
            assert woken == []
            gate.resume()
        assert woken == [100.5, 101.5]

    _in_time(main)


def test_a_process_paused_again_before_it_has_run_stays_paused() -> None:
    async def main(time: VirtualTime) -> None:
        gate = Gate()
        passed: list[float] = []

        async def passer() -> None:
            await gate.passed()
            passed.append(time.seconds())

        gate.pause()
        async with anyio.create_task_group() as group:
            group.start_soon(passer)
            await time.sleep(1.0)
            gate.resume()
            gate.pause()
            await time.sleep(1.0)
            gate.resume()
        assert passed == [2.0]

    _in_time(main)


@pytest.mark.parametrize("paused_before", [False, True])
def test_a_killed_process_never_wakes(paused_before: bool) -> None:
    async def main(time: VirtualTime) -> None:
        gate = Gate()
        clock = SimulatedClock(time, gate, seed=0, process="w1")
        if paused_before:
            gate.pause()
        ended: list[BaseException] = []

        async def sleeper() -> None:
            try:
                await clock.sleep(1.0)
            except ProcessKilled as killed:
                ended.append(killed)

        async with anyio.create_task_group() as group:
            group.start_soon(sleeper)
            await time.sleep(0.5)
            gate.kill()
            gate.resume()
        assert len(ended) == 1
        with pytest.raises(ProcessKilled):
            await clock.sleep(0)

    _in_time(main)
