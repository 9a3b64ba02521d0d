"""Tasks whose bodies are packed: each row names its own bytes, and what no row names goes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.engine.telemetry import Telemetry
from conveyor.handlers.packs import GATHERING, LAST_PATIENCE, PATIENCE
from conveyor.handlers.retry_policy import RetryPolicy
from conveyor.handlers.task import TaskHandler
from conveyor.ports.blobs import Content
from conveyor.ports.gateway import ScrapeRequest, Success
from conveyor.ports.handler import Held, Outcome, ResultLost
from conveyor.ports.queues import Delivery, TaskMessage
from conveyor.records.packed_bodies import packed_body
from tests.disk import files_below
from tests.unit.export_world import made
from tests.unit.http_api import Api, open_api
from tests.unit.wired_handlers import task_handler


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Api]:
    async with open_api(tmp_path) as api:
        yield api


class Gateway:
    """Answers each call with its URL; `calls` counts them."""

    calls = 0

    def scrape(self, request: ScrapeRequest) -> AbstractAsyncContextManager[Success]:
        return self._answer(request)

    async def aclose(self) -> None:
        pass

    @asynccontextmanager
    async def _answer(self, request: ScrapeRequest) -> AsyncIterator[Success]:
        self.calls += 1
        yield Success(request.url.encode(), "text/plain")


class Bench:
    """A handler that packs, over the files of a development store, and a new run of its own."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.gateway, self.telemetry = Gateway(), Telemetry()
        self.away = self.hangs = False
        self.given_up_at: list[float] = []
        self.handler: TaskHandler
        self.job: dict[str, Any] = {}
        self.run_id = ""
        self.deliveries: list[Delivery] = []

    async def begin(self, tasks: int, *, packs: bool = True) -> list[Held]:
        """Submit a job, and call for its tasks."""
        api, clock = self.api, self.api.clock
        blobs = api.binding.blobs
        put = blobs.put

        async def put_or_fail(key: str, content: Content) -> int:
            if self.away:
                raise ConveyorError(ErrorCode.UNAVAILABLE, "the store is away")
            if self.hangs:
                try:
                    await anyio.sleep_forever()
                finally:
                    self.given_up_at.append(clock.monotonic())
            return await put(key, content)

        blobs.put = put_or_fail  # type: ignore[method-assign]
        self.handler = task_handler(
            dataclasses.replace(api.binding, pipeline=None),
            self.gateway,
            clock,
            retry_policy=RetryPolicy(clock, base=1.0, cap=1.0, rate_limit_deadline=1.0),
            observer=self.telemetry,
            max_interruptions=4,
            pack_bodies=packs,
        )
        self.job = await api.submit(tasks)
        self.run_id = self.job["latest_run"]["run_id"]
        held = []
        for task in await api.tasks_of(self.run_id):
            message = TaskMessage(str(self.job["job_id"]), self.run_id, task.task_id)
            delivery = Delivery("queue", message, "receipt", 1)
            self.deliveries.append(delivery)
            found = await self.handler.begin(delivery, lambda: None, None)
            assert not isinstance(found, Outcome)
            held.append(found)
        return held

    async def settle(self, held: list[Held], *, after: float) -> list[Outcome | Exception]:
        """Settle each by itself, side by side, while time passes."""
        outcomes: list[Outcome | Exception] = []

        async def settle(one: Held) -> None:
            outcomes.extend(await self.handler.settle([one]))

        async with anyio.create_task_group() as group:
            for one in held:
                group.start_soon(settle, one)
            await self.api.clock.advance(after)
        return outcomes

    def objects(self) -> list[Path]:
        """List the files of bodies."""
        return list(files_below(self.api.directory / "blobs"))


async def test_tasks_that_end_together_share_an_object_and_are_served_and_exported(
    api: Api,
) -> None:
    bench = Bench(api)
    held = await bench.begin(6)
    assert bench.handler.gathers
    await bench.settle(held, after=GATHERING)

    assert len(bench.objects()) == 1
    assert bench.telemetry.counts["packed_bodies"] == 6
    tasks = await api.tasks_of(bench.run_id)
    results = [task.result for task in tasks]
    assert {result and result.size for result in results} == {len(tasks[0].spec.url)}
    assert len({result.blob_key for result in results if result is not None}) == 6
    for task in tasks:
        path = f"/v1/jobs/{bench.job['job_id']}/runs/{bench.run_id}/tasks/{task.task_id}/content"
        answer = await api.client.get(path)
        assert (answer.status_code, answer.text) == (200, task.spec.url)
    exported = await made(api, bench.job, format="jsonl")
    lines = [json.loads(line) for line in exported.text.splitlines()]
    assert [line["body"] for line in lines] == [task.spec.url for task in tasks]


@pytest.mark.guarantee("G10")
async def test_the_pack_of_a_run_that_was_deleted_meanwhile_is_removed(api: Api) -> None:
    bench = Bench(api)
    held = await bench.begin(3)
    response = await api.client.delete(f"/v1/jobs/{bench.job['job_id']}")
    assert response.status_code == 202
    outcomes = await bench.settle(held, after=GATHERING)
    assert all(isinstance(outcome, Outcome) for outcome in outcomes)
    assert bench.objects() == []


async def test_a_body_whose_claim_was_lost_stays_unreachable_beside_the_others(api: Api) -> None:
    bench = Bench(api)
    held = await bench.begin(3)
    lost = (await api.tasks_of(bench.run_id))[0]
    # Its claim lapses, and another worker claims the task.
    api.clock.shift(61.0)
    await api.claim(bench.run_id, lost.task_id, seconds=60.0)
    await bench.settle(held, after=GATHERING)
    assert len(bench.objects()) == 1
    first, *others = await api.tasks_of(bench.run_id)
    assert first.result is None
    for task in others:
        assert task.result is not None
        place = packed_body(task.result.blob_key)
        assert place is not None
        assert place.checked(bench.objects()[0].read_bytes()[place.offset : place.end])


async def test_an_outage_of_less_than_a_minute_costs_no_call(api: Api) -> None:
    bench = Bench(api)
    held = await bench.begin(3)
    bench.away = True

    async def end_the_outage() -> None:
        await api.clock.sleep(PATIENCE - 5)
        # Nothing is called for meanwhile, not even as a trial: the bodies at hand are the trial.
        with pytest.raises(ConveyorError, match="wait for the result store"):
            await bench.handler.handle(bench.deliveries[0], lambda: None)
        bench.away = False

    async with anyio.create_task_group() as group:
        group.start_soon(end_the_outage)
        outcomes = await bench.settle(held, after=PATIENCE + 2)
    assert all(isinstance(outcome, Outcome) for outcome in outcomes)
    assert bench.gateway.calls == 3
    statuses = {task.status.value for task in await api.tasks_of(bench.run_id)}
    assert statuses == {"successful"}


async def test_a_longer_outage_loses_the_calls_and_uses_up_no_attempt(api: Api) -> None:
    bench = Bench(api)
    held = await bench.begin(3)
    bench.away = True
    outcomes = await bench.settle(held, after=PATIENCE + 2)
    assert [type(outcome) for outcome in outcomes] == [ResultLost] * 3
    tasks = await api.tasks_of(bench.run_id)
    assert {(task.status.value, task.attempts) for task in tasks} == {("pending", 0)}
    assert bench.objects() == []


async def test_a_stop_settles_at_once(api: Api) -> None:
    bench = Bench(api)
    held = await bench.begin(3)
    bench.handler.hurry()
    outcomes = await bench.settle(held, after=0.0)
    assert len(outcomes) == 3
    assert bench.telemetry.tasks == {"successful": 3}


@pytest.mark.parametrize("packs", [True, False])
async def test_a_store_that_hangs_holds_a_worker_that_stops_for_ten_seconds(
    api: Api, packs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(api)
    held = await bench.begin(3, packs=packs)
    bench.hangs = True

    async def settle(one: Held) -> None:
        [outcome] = await bench.handler.settle([one])
        assert isinstance(outcome, ResultLost)

    async with anyio.create_task_group() as group:
        for one in held[:2]:
            group.start_soon(settle, one)
        await api.clock.advance(100.0)
        bench.handler.hurry()
        stopped_at = api.clock.monotonic()
        await api.clock.advance(1.0)
        group.start_soon(settle, held[2])
        await api.clock.advance(LAST_PATIENCE + 0.1)
    # What is under way at the stop may begin anew.
    given_up = {round(at - stopped_at, 3) for at in bench.given_up_at} - {0.0}
    assert given_up == {LAST_PATIENCE, LAST_PATIENCE + 1}
    tasks = await api.tasks_of(bench.run_id)
    assert {(task.status.value, task.attempts) for task in tasks} == {("pending", 0)}
    objects = 2 if packs else 3
    assert sum("its call is made again" in line for line in caplog.messages) == objects


async def test_a_body_on_its_way_at_a_stop_is_stored(api: Api) -> None:
    bench = Bench(api)
    held = await bench.begin(1, packs=False)
    bench.hangs = True

    async def stop() -> None:
        await api.clock.sleep(1.0)
        bench.hangs = False
        bench.handler.hurry()

    async with anyio.create_task_group() as group:
        group.start_soon(stop)
        [outcome] = await bench.settle(held, after=2.0)
    assert isinstance(outcome, Outcome)
    assert len(bench.objects()) == 1
