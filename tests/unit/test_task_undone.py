"""Claims that could not be undone at once: neither their notes nor their bodies stay."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from conveyor.dev.call_table import read_begun
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import TaskStatus
from conveyor.engine.telemetry import Telemetry
from conveyor.handlers.retry_policy import RetryPolicy
from conveyor.handlers.task import ClaimedTask, TaskHandler
from conveyor.ports.binding import Tasks
from conveyor.ports.gateway import ScrapeRequest, Success
from conveyor.ports.handler import Held
from conveyor.ports.queues import Delivery, TaskMessage
from tests.disk import body_files
from tests.unit.http_api import Api, open_api
from tests.unit.wired_handlers import task_handler

LARGE = 300_000
"""Bytes of a body that is stored as it arrives."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Api]:
    async with open_api(tmp_path) as api:
        yield api


class Settling:
    """The tasks of a binding, whose settlements fail while `away`, written or not."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks: Any = tasks
        self.away = False
        self.writes_first = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tasks, name)

    async def settle_task(self, *args: Any, **kwargs: Any) -> Any:
        """Settle one, and lose the answer where that is asked."""
        if self.away and self.writes_first:
            self.writes_first = False
            await self._tasks.settle_task(*args, **kwargs)
        self._fail()
        return await self._tasks.settle_task(*args, **kwargs)

    async def settle_tasks(self, requests: Any) -> Any:
        """Settle many."""
        self._fail()
        return await self._tasks.settle_tasks(requests)

    def _fail(self) -> None:
        if self.away:
            raise ConveyorError(ErrorCode.UNAVAILABLE, "the disk is full")


class Pages:
    """A gateway with a body for each page; large ones come in pieces, and break off behind the last
    one where that is asked."""

    def __init__(self, *, large: bool = False, broken: bool = False) -> None:
        self._large = large
        self._broken = broken

    def scrape(self, request: ScrapeRequest) -> AbstractAsyncContextManager[Success]:
        """Answer a call."""
        return self._answer()

    async def aclose(self) -> None:
        """Nothing is open."""

    @asynccontextmanager
    async def _answer(self) -> AsyncIterator[Success]:
        yield Success(self._pieces() if self._large else b"body", "text/plain")
        if self._broken:
            raise RuntimeError("broken behind the body")

    async def _pieces(self) -> AsyncIterator[bytes]:
        yield bytes(LARGE)


@dataclasses.dataclass(frozen=True)
class Bench:
    """A handler over a binding whose settlements may fail."""

    api: Api
    tasks: Settling
    handler: TaskHandler
    run_id: str

    def noted(self) -> int:
        """Count the calls that the ledger takes for unsettled."""
        begun = read_begun(self.api.directory / "calls")
        assert begun is not None
        return len(begun.claims)

    def bodies(self) -> int:
        """Count the files of bodies."""
        return len(body_files(self.api.directory))

    async def statuses(self) -> set[TaskStatus]:
        """The states of the tasks."""
        return {task.status for task in await self.api.tasks_of(self.run_id)}


def calm() -> None:
    """The gateway refuses nothing for load here."""
    raise AssertionError("throttled")


async def answered(api: Api, *, tasks: int, pages: Pages | None = None) -> tuple[Bench, list[Held]]:
    """Tasks whose calls were answered, and are to be settled."""
    job = await api.submit(tasks)
    run_id = job["latest_run"]["run_id"]
    settling = Settling(api.binding.tasks)
    pipeline = api.binding.pipeline
    assert pipeline is not None
    handler = task_handler(
        dataclasses.replace(api.binding, tasks=cast(Tasks, settling)),
        pages or Pages(),
        api.clock,
        retry_policy=RetryPolicy(api.clock, base=1.0, cap=1.0, rate_limit_deadline=1.0),
        observer=Telemetry(),
        max_interruptions=4,
        pipeline=dataclasses.replace(pipeline, tasks=settling),
    )
    held = []
    for task in await api.tasks_of(run_id):
        message = TaskMessage(job["job_id"], run_id, task.task_id)
        delivery = Delivery("queue", message, "receipt", 1)
        [claimed] = await handler.claim([delivery])
        assert isinstance(claimed, ClaimedTask)
        begun = await handler.begin(delivery, calm, claimed)
        assert isinstance(begun, ClaimedTask)
        held.append(begun)
    return Bench(api, settling, handler, run_id), cast(list[Held], held)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("tasks", [1, 3])
async def test_a_claim_that_could_not_be_undone_is_undone_once_the_store_answers(
    api: Api, tasks: int, large: bool
) -> None:
    bench, held = await answered(api, tasks=tasks, pages=Pages(large=large))
    bench.tasks.away = True
    for outcome in await bench.handler.settle(held):
        assert isinstance(outcome, ConveyorError)
    for _ in range(2):
        await bench.handler.renew()
        assert (bench.noted(), bench.bodies()) == (tasks, tasks)
        assert await bench.statuses() == {TaskStatus.PROCESSING}
    bench.tasks.away = False
    await bench.handler.renew()
    assert (bench.noted(), bench.bodies()) == (0, 0)
    assert await bench.statuses() == {TaskStatus.PENDING}


async def test_a_claim_that_lapsed_meanwhile_keeps_no_note(api: Api) -> None:
    bench, held = await answered(api, tasks=1)
    bench.tasks.away = True
    await bench.handler.settle(held)
    bench.tasks.away = False
    await api.clock.advance(61.0)
    [task] = await api.tasks_of(bench.run_id)
    later = await api.claim(bench.run_id, task.task_id)
    await bench.handler.renew()
    assert bench.noted() == 0
    [task] = await api.tasks_of(bench.run_id)
    assert (task.status, task.claim_number) == (TaskStatus.PROCESSING, later.claim_number)


async def test_a_body_stays_if_its_settlement_was_written_and_the_answer_lost(api: Api) -> None:
    bench, held = await answered(api, tasks=1)
    bench.tasks.away = bench.tasks.writes_first = True
    await bench.handler.settle(held)
    bench.tasks.away = False
    await bench.handler.renew()
    assert (bench.noted(), bench.bodies()) == (0, 1)
    assert await bench.statuses() == {TaskStatus.SUCCESSFUL}


async def test_a_body_is_removed_if_its_attempt_failed_behind_it(api: Api) -> None:
    bench, held = await answered(api, tasks=1, pages=Pages(large=True, broken=True))
    assert bench.bodies() == 1
    await bench.handler.settle(held)
    assert (bench.noted(), bench.bodies()) == (0, 0)
    assert await bench.statuses() == {TaskStatus.PENDING}
