"""Workers' reports of the backlog, which autoscaling uses: all waiting tasks, whichever worker
reports."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from conveyor.bootstrap.loop import BACKLOG_INTERVAL
from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import DispatchableRun
from conveyor.engine.lanes import Lanes
from conveyor.engine.telemetry import MOST, SIDE_BY_SIDE, Backlog
from conveyor.engine.worker import JITTER
from conveyor.ports.queues import CONTROL_QUEUE, run_queue
from tests.unit.backlog_world import ASKING, BacklogWorld

MINUTE = 60.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, "conveyor.engine"):
        yield


def told(caplog: pytest.LogCaptureFixture) -> list[int]:
    """The figures of the backlog that were logged since it was asked last."""
    found = [vars(one)["tasks"] for one in caplog.records if one.getMessage() == "backlog"]
    caplog.clear()
    return found


async def test_the_backlog_is_told_while_every_slot_sits_in_a_long_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody receives for three minutes; what waits is as much as before."""
    world = BacklogWorld(runs=1, tasks=500, seconds=180.0, slots=50)

    async with world.at_work():
        for _ in range(3):
            await world.clock.advance(MINUTE - 0.5)
            figures = told(caplog)
            assert figures
            assert set(figures) == {500}


@pytest.mark.slow
async def test_the_backlog_of_runs_that_wait_for_their_turn_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two workers get round to a part of the queues a minute; each says what waits in all."""
    world = BacklogWorld(runs=200, tasks=20, seconds=10.0, slots=5)

    async with world.at_work(2):
        for _ in range(4):
            before = world.sqs.depth
            await world.clock.advance(MINUTE)
            figures = told(caplog)
            assert len(figures) >= 2
            assert all(world.sqs.depth <= figure <= before for figure in figures), figures


@pytest.mark.slow
async def test_each_worker_speaks_in_every_minute(caplog: pytest.LogCaptureFixture) -> None:
    """A minute without a figure would be one without data: the number of workers would stand."""
    assert BACKLOG_INTERVAL * (1.0 + JITTER) < MINUTE
    world = BacklogWorld(runs=3, tasks=2_000, seconds=10.0, slots=1)

    async with world.at_work():
        for _ in range(30):
            await world.clock.advance(MINUTE)
            assert told(caplog)


async def test_a_worker_that_cannot_ask_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """An old figure, or 0, would take workers away from a fleet that needs them."""
    world = BacklogWorld(runs=5, tasks=100, seconds=180.0, slots=2)

    async with world.at_work():
        await world.clock.advance(MINUTE)
        assert told(caplog) == [500]
        world.sqs.answers = False
        await world.clock.advance(5 * MINUTE)
        said = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
        assert told(caplog) == []
        assert said
        assert set(said) == {"counting the backlog failed: unavailable: sqs is away"}
        world.sqs.answers = True
        await world.clock.advance(MINUTE)
        assert told(caplog)


def lanes_of(runs: range, lanes: Lanes | None = None) -> Lanes:
    lanes = lanes or Lanes(control_limit=1)
    for number in runs:
        lanes.open(
            DispatchableRun(
                run_id=str(number), job_id="job", priority=5, max_inflight=1, created_at=0
            )
        )
    return lanes


class Counts:
    """Queues that hold one message each; `asked` are they, in order."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def count(self, queue: str) -> int:
        self.asked.append(queue)
        return 1


async def test_each_queue_is_asked_once_some_side_by_side() -> None:
    world = BacklogWorld(runs=100, tasks=3, seconds=180.0, slots=1)
    lanes = Lanes(control_limit=1)
    for run in world.runs:
        lanes.open(run)
    counted: list[int] = []

    async def count() -> None:
        counted.append(await Backlog(lanes, world.queues()).count())

    await world.meanwhile(count, MINUTE)
    assert counted == [300]
    assert (world.sqs.calls[ASKING], world.sqs.most) == (101, SIDE_BY_SIDE)


async def test_a_queue_that_cannot_be_asked_ends_the_asking() -> None:
    world = BacklogWorld(runs=100, tasks=3, seconds=180.0, slots=1)
    world.sqs.answers = False
    lanes = Lanes(control_limit=1)
    for run in world.runs:
        lanes.open(run)

    async def count() -> None:
        with pytest.raises(ConveyorError, match="sqs is away"):
            await Backlog(lanes, world.queues()).count()

    await world.meanwhile(count, MINUTE)
    assert world.sqs.calls[ASKING] == SIDE_BY_SIDE


async def test_more_queues_than_are_asked_at_a_time_are_asked_in_turns() -> None:
    queues, lanes = Counts(), lanes_of(range(2 * MOST))
    backlog = Backlog(lanes, queues)

    assert [await backlog.count() for _ in range(3)] == [MOST, 2 * MOST, 2 * MOST + 1]
    assert len(queues.asked) == 3 * MOST
    assert set(queues.asked) == {CONTROL_QUEUE, *(run_queue(str(one)) for one in range(2 * MOST))}


class Waiting(Counts):
    """Queues with so many messages each."""

    def __init__(self, **waiting: int) -> None:
        super().__init__()
        self._waiting = waiting

    async def count(self, queue: str) -> int:
        return self._waiting.get(queue.removeprefix("run-"), 0)


async def test_a_job_calls_for_no_more_workers_than_its_limit_keeps_busy() -> None:
    """A million tasks of a job that may make a hundred calls need one worker, not ten. Two runs of
    a job share its limit; another job's tasks count by themselves."""
    lanes = Lanes(control_limit=1)
    for run, job, limit in (
        ("a", "large", 100),
        ("b", "large", 100),
        ("c", "small", 100),
        ("d", "wide", 2_000),
    ):
        lanes.open(
            DispatchableRun(run_id=run, job_id=job, priority=5, max_inflight=limit, created_at=0)
        )
    backlog = Backlog(lanes, Waiting(a=1_000_000, b=70, c=30, d=5_000, control=3))

    assert await backlog.count() == 1_005_103
    assert backlog.runnable() == 100 + 30 + 2_000 + 3
    lanes.close("d")
    assert await backlog.count() == 1_000_103
    assert backlog.runnable() == 100 + 30 + 3


async def test_a_queue_that_is_polled_no_more_does_not_count() -> None:
    queues, lanes = Counts(), lanes_of(range(3))
    backlog = Backlog(lanes, queues)

    assert await backlog.count() == 4
    lanes.close("1")
    assert await backlog.count() == 3
    assert queues.asked[4:] == [CONTROL_QUEUE, run_queue("0"), run_queue("2")]
