"""The writes that a task costs, by the time that the gateway takes for it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from conveyor.dev.binding import open_binding
from conveyor.domain.api_keys import KeySealer
from conveyor.domain.model import Job, JobStatus
from conveyor.engine.telemetry import Telemetry
from conveyor.handlers.retry_policy import RetryPolicy
from conveyor.handlers.task import TaskHandler
from conveyor.ports.binding import Jobs, Tasks
from conveyor.ports.gateway import ScrapeRequest, Success
from conveyor.ports.handler import ACKNOWLEDGE
from conveyor.ports.queues import Delivery, TaskMessage
from conveyor.testing.clock import START, FakeClock
from tests.conformance.dynamo_runs import TableBench, open_bench, writes
from tests.unit.wired_handlers import task_handler

AT_ONCE = 20
WAVES = 2
BEAT = 10.0
SECRET = b"a secret of the fleet"


class SlowGateway:
    """A gateway whose calls take so many seconds."""

    def __init__(self, clock: FakeClock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self.began = 0

    def scrape(self, request: ScrapeRequest) -> AbstractAsyncContextManager[Success]:
        """Answer a call."""
        return self._answer()

    async def aclose(self) -> None:
        """Nothing is open."""

    @asynccontextmanager
    async def _answer(self) -> AsyncIterator[Success]:
        self.began += 1
        await self._clock.sleep(self._seconds)
        yield Success(b"body", "text/plain")


class OneJob:
    """Jobs of one caller, which are all alike."""

    async def find_job(self, job_id: str) -> Job:
        """Return the job of this id."""
        key = KeySealer([SECRET]).seal("key", caller="caller", nonce=b"n" * 12)
        return Job(
            job_id=job_id,
            caller="caller",
            status=JobStatus.CLOSED,
            created_at=START,
            updated_at=START,
            sealed_key=key,
        )


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def bench(clock: FakeClock) -> AsyncIterator[TableBench]:
    opened = await open_bench(clock)
    yield opened
    await opened.aclose()


@asynccontextmanager
async def handler_over(
    bench: TableBench, tasks: Any, gateway: SlowGateway, directory: Path
) -> AsyncIterator[TaskHandler]:
    """Open a worker's handler whose rows are in the table, and all the rest on disk."""
    opened = (await open_binding(directory, bench.clock)).ports
    binding = dataclasses.replace(
        opened, tasks=cast(Tasks, tasks), jobs=cast(Jobs, OneJob()), root_secret=SECRET
    )
    yield task_handler(
        binding,
        gateway,
        bench.clock,
        retry_policy=RetryPolicy(bench.clock, base=1.0, cap=1.0, rate_limit_deadline=1.0),
        observer=Telemetry(),
        max_interruptions=4,
    )
    await opened.aclose()


def calm() -> None:
    """The gateway refuses nothing for load here."""
    raise AssertionError("throttled")


@pytest.mark.parametrize(("seconds", "most"), [(0.0, 2.3), (2.4, 2.3), (25.0, 3.0), (100.0, 4.3)])
async def test_a_short_call_costs_no_renewal_and_a_long_one_few(
    bench: TableBench, tmp_path: Path, seconds: float, most: float
) -> None:
    clock, world = bench.clock, bench.world(worker="worker", flush_interval=0.1)
    gateway = SlowGateway(clock, seconds)
    job_id, run_id = await world.submit(AT_ONCE * WAVES)
    messages = [TaskMessage(job_id, run_id, task.task_id) for task in await world.rows(run_id)]
    ended = []

    async with handler_over(bench, world.store.tasks, gateway, tmp_path) as handler:

        async def work(message: TaskMessage) -> None:
            delivery = Delivery("queue", message, message.task_id, 1)
            outcome = await handler.handle(delivery, calm)
            ended.append(outcome.hide_for)

        for wave in range(WAVES):
            async with anyio.create_task_group() as group:
                for message in messages[wave * AT_ONCE : (wave + 1) * AT_ONCE]:
                    group.start_soon(work, message)
                while gateway.began < (wave + 1) * AT_ONCE:
                    # Reads of the run, which follow the claims, are apart in time.
                    await clock.advance(0.02)
                    await anyio.sleep(0.01)
                for _ in range(math.floor(seconds / BEAT)):
                    await clock.advance(BEAT)
                    await handler.renew()
                while len(ended) < (wave + 1) * AT_ONCE:
                    await clock.advance(0.1)
                    await anyio.sleep(0.01)

    assert ended == [ACKNOWLEDGE.hide_for] * len(messages)
    updates = sum(writes(*call) for call in bench.seam.calls)
    assert 2.0 <= updates / len(messages) <= most
