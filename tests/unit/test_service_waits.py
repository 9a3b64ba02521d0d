"""The service reads the reports of workers together and not too often."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import anyio
import msgspec
import pytest

from conveyor.dev.permits import MemoryWorkers
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import Run, RunStats, RunStatus
from conveyor.domain.run_waits import LaneReport, RunWaitReason, WorkerReport
from conveyor.service.waiting import AFTER_FAILURE, READ_EVERY, RunWaits
from conveyor.testing.clock import FakeClock

HEARTBEAT = 10.0


class CountedWorkers(MemoryWorkers):
    """Counts its reads, each of which takes `seconds`, and may fail."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.clock = clock
        self.reads = 0
        self.seconds = 0.0
        self.fails = False

    async def all(self) -> Sequence[WorkerReport]:
        self.reads += 1
        await self.clock.sleep(self.seconds)
        if self.fails:
            raise ConveyorError(ErrorCode.UNAVAILABLE, "redis does not answer")
        return await super().all()


def report(clock: FakeClock, *lanes: LaneReport) -> WorkerReport:
    now = clock.now()
    return WorkerReport(
        worker_id="W", version="1", started_at=now, said_at=now, heartbeat=HEARTBEAT, slots=1,
        in_use=0, lanes=lanes,
    )  # fmt: skip


def run(clock: FakeClock) -> Run:
    return Run(
        run_id="R", job_id="J", run_sequence=1, status=RunStatus.RUNNING, created_at=clock.now(),
        updated_at=clock.now(), stats=RunStats(total=2),
    )  # fmt: skip


def opened(clock: FakeClock) -> tuple[CountedWorkers, RunWaits]:
    workers = CountedWorkers(clock)
    return workers, RunWaits(workers, clock, heartbeat=HEARTBEAT)


async def reason(waits: RunWaits, clock: FakeClock) -> RunWaitReason | None:
    wait = (await waits.look())(run(clock))
    return None if wait is None else wait.reason


async def test_reports_are_read_at_most_once_a_second() -> None:
    clock = FakeClock()
    workers, waits = opened(clock)
    for _ in range(50):
        await waits.look()
    assert workers.reads == 1
    await workers.say(report(clock, LaneReport(run_id="R", reason=RunWaitReason.QUEUE_LOST)))
    assert await reason(waits, clock) is None
    await clock.advance(READ_EVERY)
    assert await reason(waits, clock) is RunWaitReason.QUEUE_LOST
    assert workers.reads == 2


async def test_the_reports_of_a_large_fleet_are_read_less_often() -> None:
    clock = FakeClock()
    workers, waits = opened(clock)
    for number in range(1_000):
        name = f"W{number}"
        await workers.say(msgspec.structs.replace(report(clock), worker_id=name))
    for _ in range(10):
        await waits.look()
        await clock.advance(READ_EVERY)
    assert workers.reads == 2


async def test_a_slow_read_is_waited_for_by_its_own_request_alone() -> None:
    clock = FakeClock()
    workers, waits = opened(clock)
    await waits.look()
    await clock.advance(READ_EVERY)
    workers.seconds = 60.0
    async with anyio.create_task_group() as group:
        group.start_soon(waits.look)
        await clock.advance(0)
        for _ in range(20):
            await waits.look()
        assert workers.reads == 2
        await clock.advance(60.0)


async def test_a_server_that_never_heard_a_worker_waits_three_heartbeats_to_say_so() -> None:
    clock = FakeClock()
    _, waits = opened(clock)
    await clock.advance(3 * HEARTBEAT)
    assert await reason(waits, clock) is None
    await clock.advance(READ_EVERY)
    assert await reason(waits, clock) is RunWaitReason.NO_WORKER


async def test_since_when_there_is_no_worker_is_its_last_word_also_once_that_is_gone() -> None:
    clock = FakeClock()
    workers, waits = opened(clock)
    await clock.advance(100.0)
    said_at = clock.now()
    await workers.say(report(clock))
    assert await reason(waits, clock) is None
    await clock.advance(600.0)
    wait = (await waits.look())(run(clock))
    assert wait is not None
    assert (wait.reason, wait.since) == (RunWaitReason.NO_WORKER, said_at)


async def test_reports_that_cannot_be_read_are_no_silence(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    workers, waits = opened(clock)
    await workers.say(report(clock, LaneReport(run_id="R", reason=RunWaitReason.QUEUE_LOST)))
    workers.fails = True
    with caplog.at_level(logging.WARNING):
        await clock.advance(600.0)
        assert await reason(waits, clock) is None
    assert caplog.messages == [
        "the reports of workers could not be read: unavailable: redis does not answer"
    ]
    await clock.advance(AFTER_FAILURE - 0.1)
    assert (await reason(waits, clock), workers.reads) == (None, 1)
    workers.fails = False
    await clock.advance(0.1)
    assert await reason(waits, clock) is None
    await clock.advance(3 * HEARTBEAT + READ_EVERY)
    assert await reason(waits, clock) is RunWaitReason.NO_WORKER
