"""A clock that is moved by hand: it waits for open work, stops where something is due, and passes
over loops that only look."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
import uvloop

from conveyor.clock import LAST_INSTANT, ManualClock, WorkCounter
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
from conveyor.ports.idle import Due, counted, turn

START = 1_800_000_000_000
DAY = 86_400.0


@pytest.fixture
def anyio_backend() -> str:
    """Run on asyncio's own loop, the only one on which such a clock runs."""
    return "asyncio"


class Looker:
    """A loop that looks each `every` seconds."""

    def __init__(self, clock: Clock, every: float) -> None:
        self.looks: list[float] = []
        self._clock = clock
        self._every = every

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self._clock.sleep(self._every)
            self.looks.append(self._clock.monotonic())


@asynccontextmanager
async def _running(*lookers: Looker) -> AsyncIterator[None]:
    async with anyio.create_task_group() as group:
        for looker in lookers:
            group.start_soon(looker.run)
        await anyio.lowlevel.checkpoint()
        yield
        group.cancel_scope.cancel()


async def test_a_sleeper_is_woken_at_its_instant() -> None:
    clock = ManualClock(start=START)
    worked = Looker(clock, 600.0)
    async with _running(worked):
        await clock.advance(3_600)
    assert worked.looks == [600.0 * step for step in range(1, 7)]
    assert clock.now() == START + 3_600_000


async def test_forty_days_without_anything_due_wake_each_looking_loop_once() -> None:
    clock = ManualClock(start=START)
    lookers = [Looker(clock.looks, every) for every in (0.25, 5.0, 60.0)]
    async with _running(*lookers):
        await clock.advance(40 * DAY)
        assert [looker.looks for looker in lookers] == [[40 * DAY]] * 3
    assert clock.wakes == 3


async def test_a_looking_loop_finds_what_is_due_in_its_usual_time() -> None:
    clock = ManualClock(start=START)
    done: list[float] = []

    async def due() -> Sequence[Due]:
        return [] if done else [Due(DAY - clock.monotonic(), "thing", is_work=True)]

    async def look() -> None:
        while True:
            await clock.looks.sleep(5.0)
            # It ticks twice before it does what it finds.
            if clock.monotonic() >= DAY + 5.0 and not done:
                done.append(clock.monotonic())

    clock.watch(due)
    async with anyio.create_task_group() as group:
        group.start_soon(look)
        await clock.advance(2 * DAY)
        group.cancel_scope.cancel()
    assert done == [DAY + 5.0]
    assert clock.wakes <= 4


async def test_an_advance_waits_for_work_in_threads() -> None:
    clock = ManualClock(start=START)
    release, ended = threading.Event(), False

    async def work() -> None:
        nonlocal ended
        with counted(clock.work, "exports"):
            await anyio.to_thread.run_sync(release.wait)
        ended = True

    async with anyio.create_task_group() as group:
        group.start_soon(work)
        await anyio.lowlevel.checkpoint()
        timer = threading.Timer(0.05, release.set)
        timer.start()
        await clock.advance(10)
        assert ended
    timer.join()


async def test_a_clock_that_does_not_come_to_rest_says_what_keeps_it() -> None:
    clock = ManualClock(start=START, rest_within=0.3)
    with counted(clock.work, "calls of the gateway"), pytest.raises(ConveyorError) as caught:
        await clock.advance(10)
    assert caught.value.code is ErrorCode.CONFLICT
    assert "calls of the gateway (1)" in caught.value.detail
    await clock.advance(10)
    assert clock.monotonic() == 10.0


async def test_a_task_that_never_waits_is_told_apart_from_open_work() -> None:
    clock = ManualClock(start=START, rest_within=0.3)

    async def spin() -> None:
        while True:
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(spin)
        with pytest.raises(ConveyorError, match="tasks of the server go on running"):
            await clock.advance(10)
        group.cancel_scope.cancel()


@pytest.mark.parametrize("seconds", [-0.001, -3_600.0, 400 * DAY + 1, float("inf"), float("nan")])
async def test_a_move_beyond_its_bounds_is_refused(seconds: float) -> None:
    clock = ManualClock(start=START)
    with pytest.raises(ConveyorError) as caught:
        await clock.advance(seconds)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert clock.now() == START


async def test_the_wall_clock_alone_is_shifted() -> None:
    clock = ManualClock(start=START)
    await clock.shift_wall(-3_600)
    assert (clock.now(), clock.monotonic()) == (START - 3_600_000, 0.0)
    with pytest.raises(ConveyorError):
        await clock.shift_wall(401 * DAY)
    with pytest.raises(ConveyorError, match="past"):
        await clock.advance_to(clock.now() - 1)


async def test_a_run_until_idle_leaves_the_calendar_to_its_time() -> None:
    clock = ManualClock(start=START)
    done: list[str] = []

    async def due() -> Sequence[Due]:
        later = Due(10 * DAY - clock.monotonic(), "schedules", is_work=False)
        work = Due(DAY - clock.monotonic(), "tasks", is_work=True)
        return [later] if done else [later, work]

    async def look() -> None:
        while True:
            await clock.looks.sleep(5.0)
            if clock.monotonic() >= DAY:
                done.append("work")

    clock.watch(due)
    async with anyio.create_task_group() as group:
        group.start_soon(look)
        await clock.run_until_idle()
        group.cancel_scope.cancel()
    assert done == ["work"]
    assert clock.monotonic() == DAY


async def test_work_that_never_ends_is_told() -> None:
    clock = ManualClock(start=START)

    async def due() -> Sequence[Due]:
        return [Due(DAY, "heartbeats", is_work=True)]

    clock.watch(due)
    with pytest.raises(ConveyorError, match="heartbeats") as caught:
        await clock.run_until_idle()
    assert caught.value.code is ErrorCode.CONFLICT


async def test_turns_come_one_at_a_time_in_the_order_in_which_they_were_asked_for() -> None:
    work = WorkCounter()
    order: list[str] = []

    async def call(name: str, seconds: float) -> None:
        async with turn(work, "operations"):
            order.append(f"{name} begins")
            await anyio.to_thread.run_sync(threading.Event().wait, seconds)
        order.append(f"{name} ends")

    async with anyio.create_task_group() as group:
        for name, seconds in (("slow", 0.03), ("quick", 0.0), ("third", 0.01)):
            group.start_soon(call, name, seconds)
        await anyio.lowlevel.checkpoint()
        assert work.count == 3
    assert order == [
        f"{name} {what}" for name in ("slow", "quick", "third") for what in ("begins", "ends")
    ]
    assert work.count == 0


async def test_a_turn_that_is_cancelled_lets_the_next_one_in() -> None:
    work = WorkCounter()
    async with turn(work, "operations"):
        with anyio.move_on_after(0) as scope:
            await work.take_turn("operations")
        assert scope.cancelled_caught
        assert work.count == 1
    async with turn(work, "operations"):
        assert work.count == 1
    assert work.count == 0


async def test_a_restart_goes_on_from_the_instant_and_the_ids(tmp_path: Path) -> None:
    clock = ManualClock(start=START)
    clock.keep_in(tmp_path / "clock")
    ids = [clock.new_id() for _ in range(3)]
    await clock.advance(DAY)
    ids += [clock.new_id(), clock.requests.new_id()]
    clock.save()
    again = ManualClock(start=START)
    again.keep_in(tmp_path / "clock")
    assert again.now() == START + 86_400_000
    ids.append(again.new_id())
    assert len(set(ids)) == len(ids)
    assert ids[-1] > max(ids[:-1])


async def test_a_clock_that_was_killed_in_a_move_goes_back_to_nothing_that_was_stored(
    tmp_path: Path,
) -> None:
    clock = ManualClock(start=START)
    clock.keep_in(tmp_path / "clock")
    reached: list[int] = []

    async def note() -> None:
        await clock.sleep(DAY)
        killed = ManualClock(start=START)
        killed.keep_in(tmp_path / "clock")
        reached.extend((clock.now(), killed.now()))

    async with anyio.create_task_group() as group:
        group.start_soon(note)
        await clock.advance(2 * DAY)
    assert reached[1] >= reached[0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        '{"now": "x", "last_id": "0", "boots": 0}',
        '{"now": 1e999, "last_id": "0", "boots": 0}',
        '{"now": -5, "last_id": "0", "boots": 0}',
        '{"now": 999999999999999, "last_id": "0", "boots": 0}',
        '{"now": 5, "last_id": "-1", "boots": 0}',
    ],
)
async def test_a_damaged_file_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "clock").write_text(text)
    with pytest.raises(ConveyorError, match="damaged"):
        ManualClock(start=START).keep_in(tmp_path / "clock")


def test_a_loop_that_hides_what_can_run_is_refused(tmp_path: Path) -> None:
    async def keep() -> None:
        ManualClock(start=START).keep_in(tmp_path / "clock")

    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        pytest.raises(ConveyorError, match="event loop"),
    ):
        runner.run(keep())


async def test_secrets_come_from_the_operating_system() -> None:
    tokens = {clock.token(16) for clock in (ManualClock(start=START), ManualClock(start=START))}
    assert len(tokens) == 2
    ids = {ManualClock(start=START).new_id() for _ in range(2)}
    assert len(ids) == 1


async def _is_followed() -> bool:
    return True


async def test_a_clock_that_moves_by_itself_leaves_the_end_of_what_is_kept_to_its_time() -> None:
    clock = ManualClock(start=START, mode="auto")
    items = [Due(30 * DAY, "results", is_work=False, is_expiry=True)]

    async def due() -> Sequence[Due]:
        return items

    clock.watch(due)
    await clock.move_on(_is_followed)
    assert clock.monotonic() == 0.0
    items.append(Due(DAY, "schedules", is_work=False))
    await clock.move_on(_is_followed)
    assert clock.monotonic() == DAY


async def test_a_clock_that_moves_by_itself_waits_for_open_work() -> None:
    clock = ManualClock(start=START, mode="auto", rest_within=0.0)
    worked = Looker(clock, 600.0)
    async with _running(worked):
        with counted(clock.work, "calls of the gateway"):
            await clock.move_on(_is_followed)
        assert worked.looks == []
        await clock.move_on(_is_followed)
        assert worked.looks == [600.0]


async def test_a_move_that_is_cut_by_the_end_of_the_server_is_told_and_kept_as_far_as_it_came(
    tmp_path: Path,
) -> None:
    clock = ManualClock(start=START)
    clock.keep_in(tmp_path / "clock")

    async def stop() -> None:
        await clock.sleep(DAY)
        group.start_soon(clock.run_out)

    async with anyio.create_task_group() as group:
        group.start_soon(stop)
        with pytest.raises(ConveyorError, match="stopping") as caught:
            await clock.advance(300 * DAY)
        assert caught.value.code is ErrorCode.UNAVAILABLE
        group.cancel_scope.cancel()
    again = ManualClock(start=START)
    again.keep_in(tmp_path / "clock")
    assert START + 86_400_000 <= again.now() < START + 2 * 86_400_000


async def test_a_move_that_was_refused_is_none_after_a_kill(tmp_path: Path) -> None:
    clock = ManualClock(start=START, rest_within=0.0)
    clock.keep_in(tmp_path / "clock")
    with counted(clock.work, "calls of the gateway"), pytest.raises(ConveyorError):
        await clock.advance(300 * DAY)
    again = ManualClock(start=START)
    again.keep_in(tmp_path / "clock")
    assert again.now() == START


async def test_a_move_that_takes_too_long_says_what_keeps_it() -> None:
    clock = ManualClock(start=START, move_within=0.0)

    async def due() -> Sequence[Due]:
        return [Due(10.0, "tasks", is_work=True)]

    clock.watch(due)
    with pytest.raises(ConveyorError, match="tasks") as caught:
        await clock.advance(DAY)
    assert caught.value.code is ErrorCode.CONFLICT


async def test_a_clock_goes_on_from_the_newest_instant_that_is_stored(tmp_path: Path) -> None:
    clock = ManualClock(start=START)
    stored = ManualClock(start=START + 5).new_id()
    clock.keep_in(tmp_path / "clock", newest=START + 5)
    assert clock.now() == START + 6
    assert clock.new_id() > stored
    again = ManualClock(start=0)
    again.keep_in(tmp_path / "clock", newest=START)
    assert again.now() == START + 6


async def test_ids_differ_after_a_restart_on_a_clock_that_was_set_back(tmp_path: Path) -> None:
    clock = ManualClock(start=START)
    clock.keep_in(tmp_path / "clock")
    before = clock.new_id()
    await clock.shift_wall(-3_600)
    again = ManualClock(start=START)
    again.keep_in(tmp_path / "clock")
    after = [again.new_id(), again.requests.new_id(), again.new_id(), again.requests.new_id()]
    assert len(set(after)) == 4
    assert min(after) > before


async def test_no_move_leads_beyond_what_can_be_written() -> None:
    clock = ManualClock(start=LAST_INSTANT - 1_000)
    for move in (clock.advance, clock.shift_wall):
        with pytest.raises(ConveyorError, match="9999-12-01") as caught:
            await move(1.001)
        assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    await clock.advance(1.0)
    assert clock.now() == LAST_INSTANT


async def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    clock = ManualClock(start=START)
    (tmp_path / "data").mkdir()
    clock.keep_in(tmp_path / "data" / "clock")
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(ConveyorError, match="cannot be kept") as caught:
        await clock.advance(1.0)
    assert caught.value.code is ErrorCode.UNAVAILABLE
