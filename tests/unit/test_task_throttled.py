"""A gateway that refuses for load: the task waits with its permit in hand, and not for ever."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import pytest

from conveyor.domain.model import Problem, TaskFailure, TaskStatus
from conveyor.engine.telemetry import Telemetry
from conveyor.handlers.retry_policy import RetryPolicy
from conveyor.handlers.task import PATIENCE, TaskHandler
from conveyor.ports.gateway import ScrapeFailed, ScrapeRequest, Success
from conveyor.ports.handler import ACKNOWLEDGE, Outcome
from conveyor.ports.queues import Delivery, TaskMessage
from tests.unit.http_api import Api, open_api
from tests.unit.wired_handlers import task_handler

DEADLINE = 3_600.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Api]:
    async with open_api(tmp_path) as api:
        yield api


@dataclass
class RefusingGateway:
    """Refuses its first calls for load, asking for a pause of `retry_after` seconds."""

    refusals: int
    retry_after: float = 0.0
    called_at: list[float] = field(default_factory=list)

    def scrape(self, request: ScrapeRequest) -> AbstractAsyncContextManager[Success]:
        return self._answer()

    async def aclose(self) -> None:
        pass

    @asynccontextmanager
    async def _answer(self) -> AsyncIterator[Success]:
        self.called_at.append(0.0)
        if len(self.called_at) <= self.refusals:
            problem = Problem(code="rate_limited", title="Too many requests", status=429)
            raise ScrapeFailed(
                problem,
                TaskFailure.RATE_LIMITED,
                retryable=True,
                retry_after=self.retry_after,
                burns_attempt=False,
            )
        yield Success(b"body", "text/plain")


@dataclass
class Work:
    """One task of a job of its own, handled while virtual time moves on."""

    api: Api
    gateway: RefusingGateway
    throttled: int = 0
    telemetry: Telemetry = field(default_factory=Telemetry)

    async def begin(self) -> None:
        job = await self.api.submit(1)
        self.job_id = job["job_id"]
        self.run_id = job["latest_run"]["run_id"]
        [task] = await self.api.tasks_of(self.run_id)
        message = TaskMessage(self.job_id, self.run_id, task.task_id)
        self.delivery = Delivery("queue", message, "receipt", 1)

    def handler(self) -> TaskHandler:
        binding, clock = self.api.binding, self.api.clock
        return task_handler(
            binding,
            self.gateway,
            clock,
            retry_policy=RetryPolicy(clock, base=0.1, cap=1.0, rate_limit_deadline=DEADLINE),
            observer=self.telemetry,
            max_interruptions=10,
        )

    def throttle(self) -> None:
        self.throttled += 1

    async def handle(self) -> Outcome:
        outcomes: list[Outcome] = []

        async def run() -> None:
            outcomes.append(await self.handler().handle(self.delivery, self.throttle))

        give_up = anyio.current_time() + 60
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            while not outcomes:
                assert anyio.current_time() < give_up
                await anyio.sleep(0.001)
                await self.api.clock.advance(0.1)
        return outcomes[0]

    async def status(self) -> TaskStatus:
        [task] = await self.api.tasks_of(self.run_id)
        return task.status


async def test_a_refusal_is_waited_out_with_the_message_in_hand(api: Api) -> None:
    work = Work(api, RefusingGateway(refusals=3))
    await work.begin()
    outcome = await work.handle()
    assert outcome.hide_for is None
    assert await work.status() is TaskStatus.SUCCESSFUL
    assert len(work.gateway.called_at) == 4
    assert work.throttled == 3
    assert work.telemetry.gateway_calls == {"retry": 3, "successful": 1}
    [task] = await api.tasks_of(work.run_id)
    assert task.attempts == 1


async def test_patience_ends_and_the_message_is_hidden(api: Api) -> None:
    work = Work(api, RefusingGateway(refusals=100))
    await work.begin()
    outcome = await work.handle()
    assert outcome.hide_for is not None
    assert len(work.gateway.called_at) == PATIENCE
    assert work.throttled == PATIENCE
    assert await work.status() is TaskStatus.PENDING
    [task] = await api.tasks_of(work.run_id)
    assert task.attempts == 0


async def test_a_long_pause_is_not_waited_out_with_a_permit_in_hand(api: Api) -> None:
    work = Work(api, RefusingGateway(refusals=1, retry_after=60.0))
    await work.begin()
    outcome = await work.handle()
    assert outcome.hide_for == pytest.approx(60.0, abs=1.0)
    assert len(work.gateway.called_at) == 1


async def test_no_call_is_made_for_a_run_that_was_stopped_meanwhile(api: Api) -> None:
    work = Work(api, RefusingGateway(refusals=100, retry_after=2.0))
    await work.begin()
    outcomes: list[Outcome] = []

    async def run() -> None:
        outcomes.append(await work.handler().handle(work.delivery, work.throttle))

    give_up = anyio.current_time() + 60
    async with anyio.create_task_group() as group:
        group.start_soon(run)
        while not work.gateway.called_at:
            assert anyio.current_time() < give_up
            await anyio.sleep(0.001)
        response = await api.client.post(f"/v1/jobs/{work.job_id}/stop")
        assert response.status_code == 200, response.text
        while not outcomes:
            assert anyio.current_time() < give_up
            await api.clock.advance(0.1)
            await anyio.sleep(0.001)
    assert outcomes == [ACKNOWLEDGE]
    assert len(work.gateway.called_at) == 1
