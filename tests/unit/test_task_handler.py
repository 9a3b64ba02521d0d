"""The task handler's use of claims: suspects run alone, and a cancelled claim is undone."""

from __future__ import annotations

import dataclasses
import errno
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.lowlevel
import msgspec
import pytest

from conveyor.aio.resilience import FIRST_PAUSE, HIDING
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import Format, Problem, TaskFailure, TaskStatus, WaitReason
from conveyor.domain.task_rules import Deferred
from conveyor.engine.telemetry import Telemetry
from conveyor.handlers.retry_policy import RetryPolicy
from conveyor.handlers.task import SUSPECT_PAUSE, TaskHandler
from conveyor.ports.blobs import BodyRefused, NoRoom
from conveyor.ports.gateway import ScrapeFailed, ScrapeRequest, Success
from conveyor.ports.handler import Outcome, ResultLost
from conveyor.ports.queues import Delivery, TaskMessage, run_queue
from conveyor.ports.tracing import is_sampled
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.aws.refusals import NotDeployed
from tests.unit.http_api import Api, open_api
from tests.unit.wired_handlers import task_handler

MAX_INTERRUPTIONS = 4


def calm() -> None:
    """The gateway refuses nothing for load here."""
    raise AssertionError("throttled")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Api]:
    async with open_api(tmp_path) as api:
        yield api


class GatedGateway:
    """A gateway whose every call waits for `gate`; `calls` are those that began."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.gate = anyio.Event()

    def scrape(self, request: ScrapeRequest) -> AbstractAsyncContextManager[Success]:
        return self._answer(request)

    async def aclose(self) -> None:
        pass

    @asynccontextmanager
    async def _answer(self, request: ScrapeRequest) -> AsyncIterator[Success]:
        self.calls.append(request.url)
        await self.gate.wait()
        yield Success(b"body", "text/plain")


def handler_over(
    api: Api, gateway: GatedGateway, telemetry: Telemetry | None = None
) -> TaskHandler:
    binding, clock = api.binding, api.clock
    return task_handler(
        binding,
        gateway,
        clock,
        retry_policy=RetryPolicy(clock, base=1.0, cap=1.0, rate_limit_deadline=1.0),
        observer=telemetry or Telemetry(),
        max_interruptions=MAX_INTERRUPTIONS,
    )


async def interrupted(api: Api, tasks: int, *, times: int) -> list[Delivery]:
    """Messages of the tasks of a new job, each of which was claimed so often in vain."""
    job = await api.submit(tasks)
    run_id = job["latest_run"]["run_id"]
    deliveries = []
    for task in await api.tasks_of(run_id):
        for _ in range(times):
            await api.claim(run_id, task.task_id, seconds=1.0)
            api.clock.shift(1.0)
        message = TaskMessage(job["job_id"], run_id, task.task_id)
        deliveries.append(Delivery("queue", message, "receipt", 1))
    return deliveries


async def handle_all(
    handler: TaskHandler, gateway: GatedGateway, deliveries: list[Delivery], *, calls: int
) -> list[Outcome]:
    """Handle messages all at once, and open the gate when so many calls have begun."""
    outcomes: dict[int, Outcome] = {}

    async def handle(number: int) -> None:
        outcomes[number] = await handler.handle(deliveries[number], calm)

    deadline = anyio.current_time() + 60
    async with anyio.create_task_group() as group:
        for number in range(len(deliveries)):
            group.start_soon(handle, number)
        while len(gateway.calls) < calls or len(outcomes) < len(deliveries) - calls:
            assert anyio.current_time() < deadline
            assert len(gateway.calls) <= calls
            await anyio.sleep(0.001)
        gateway.gate.set()
    return [outcomes[number] for number in range(len(deliveries))]


async def test_tasks_whose_claims_lapsed_often_are_worked_one_at_a_time(api: Api) -> None:
    deliveries = await interrupted(api, 3, times=MAX_INTERRUPTIONS // 2)
    gateway = GatedGateway()
    handler = handler_over(api, gateway)

    outcomes = await handle_all(handler, gateway, deliveries, calls=1)

    assert len(gateway.calls) == 1
    hidden = [outcome.hide_for for outcome in outcomes]
    assert sorted(hidden, key=repr) == [SUSPECT_PAUSE, SUSPECT_PAUSE, None]
    tasks = await api.tasks_of(deliveries[0].message.run_id)
    assert sorted(task.status for task in tasks) == [
        TaskStatus.PENDING,
        TaskStatus.PENDING,
        TaskStatus.SUCCESSFUL,
    ]
    assert {task.interruptions for task in tasks} == {MAX_INTERRUPTIONS // 2}
    for delivery, outcome in zip(deliveries, outcomes, strict=True):
        if outcome.hide_for is not None:
            again = await handler.handle(delivery, calm)
            assert again.hide_for is None
    assert again.drop_queue is not None
    assert len(gateway.calls) == 3


async def test_tasks_interrupted_less_often_are_worked_together(api: Api) -> None:
    deliveries = await interrupted(api, 3, times=MAX_INTERRUPTIONS // 2 - 1)
    gateway = GatedGateway()

    outcomes = await handle_all(handler_over(api, gateway), gateway, deliveries, calls=3)

    assert [outcome.hide_for for outcome in outcomes] == [None] * 3
    assert [outcome.drop_queue is None for outcome in outcomes].count(False) == 1


async def test_a_claim_made_while_being_cancelled_is_undone(api: Api) -> None:
    [delivery] = await interrupted(api, 1, times=0)
    gateway = GatedGateway()
    handler = handler_over(api, gateway)

    async with anyio.create_task_group() as group:
        group.start_soon(handler.handle, delivery, calm)
        await anyio.lowlevel.checkpoint()  # the claim is on its way to the store
        group.cancel_scope.cancel()

    assert gateway.calls == []
    [task] = await api.tasks_of(delivery.message.run_id)
    assert task.status is TaskStatus.PENDING
    assert task.interruptions == 0


async def test_a_claim_that_failed_undoes_no_other_of_the_same_worker(api: Api) -> None:
    [delivery] = await interrupted(api, 1, times=0)
    gateway = GatedGateway()
    handler = handler_over(api, gateway)

    async with anyio.create_task_group() as group:
        group.start_soon(handler.handle, delivery, calm)
        while not gateway.calls:
            await anyio.lowlevel.checkpoint()
        async with anyio.create_task_group() as twin:
            # The same message once more, cut off while its claim is on its way.
            twin.start_soon(handler.handle, delivery, calm)
            await anyio.lowlevel.checkpoint()
            twin.cancel_scope.cancel()
        [task] = await api.tasks_of(delivery.message.run_id)
        assert task.status is TaskStatus.PROCESSING
        gateway.gate.set()

    [task] = await api.tasks_of(delivery.message.run_id)
    assert task.status is TaskStatus.SUCCESSFUL
    assert task.result is not None
    assert await api.binding.blobs.open(task.result.blob_key) is not None
    assert len(gateway.calls) == 1


async def test_a_task_that_its_claims_end_is_counted_and_its_run_is_over(api: Api) -> None:
    [delivery] = await interrupted(api, 1, times=MAX_INTERRUPTIONS + 1)
    gateway, telemetry = GatedGateway(), Telemetry()
    handler = handler_over(api, gateway, telemetry)
    queue = run_queue(delivery.message.run_id)
    assert await api.binding.queues.receive(queue, limit=1, visibility=60.0)

    outcome = await handler.handle(delivery, calm)

    assert telemetry.tasks == {"failed": 1}
    assert gateway.calls == []
    assert api.binding.queues.depth(queue) == 1
    assert outcome.hide_for is None
    assert outcome.drop_queue is not None
    await outcome.drop_queue()
    assert api.binding.queues.depth(queue) == 0


async def test_a_body_is_of_the_form_that_its_own_params_ask_for(api: Api) -> None:
    tasks = [
        {"url": "https://site.test/0"},
        {"url": "https://site.test/1", "zenrows_params": {"response_type": "markdown"}},
    ]
    document = {"tasks": tasks, "zenrows_params": {"response_type": "plaintext"}}
    job = (await api.client.post("/v1/jobs", json=document)).json()
    run_id = job["latest_run"]["run_id"]
    gateway = GatedGateway()
    gateway.gate.set()
    handler = handler_over(api, gateway)
    for task in await api.tasks_of(run_id):
        message = TaskMessage(job["job_id"], run_id, task.task_id)
        await handler.handle(Delivery("queue", message, "receipt", 1), calm)

    results = [task.result for task in await api.tasks_of(run_id)]
    assert [result and result.format for result in results] == [Format.PLAINTEXT, Format.MARKDOWN]


class Unkept:
    """The blobs port, as far as a task needs it: no body can be kept."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def put(self, _key: str, _content: object) -> int:
        raise self._error


async def work_unkept(api: Api, error: Exception) -> tuple[GatedGateway, TaskHandler, Delivery]:
    """A handler whose bodies meet this error, its open gateway, and a message of a new job."""
    [delivery] = await interrupted(api, 1, times=0)
    gateway = GatedGateway()
    gateway.gate.set()
    unkept = dataclasses.replace(api.binding, blobs=cast(Any, Unkept(error)))
    return gateway, handler_over(dataclasses.replace(api, binding=unkept), gateway), delivery


@pytest.mark.parametrize("error", [BodyRefused("not permitted"), RuntimeError("a bug")])
async def test_a_body_that_is_refused_uses_up_attempts_until_its_task_fails(
    api: Api, error: Exception
) -> None:
    gateway, handler, delivery = await work_unkept(api, error)
    for _ in range(9):
        api.clock.shift(5.0)
        await handler.handle(delivery, calm)
    assert len(gateway.calls) == 3
    assert isinstance(delivery.message, TaskMessage)
    [task] = await api.tasks_of(delivery.message.run_id)
    assert (task.status, task.attempts) == (TaskStatus.FAILED, 3)


class BareGateway(GatedGateway):
    """A gateway that finds no descriptor left, where nobody expected that."""

    is_bare = True

    @asynccontextmanager
    async def _answer(self, request: ScrapeRequest) -> AsyncIterator[Success]:
        self.calls.append(request.url)
        if self.is_bare:
            raise OSError(errno.EMFILE, "Too many open files")
        yield Success(b"", "")


async def test_a_call_without_a_descriptor_is_not_charged_to_its_task(api: Api) -> None:
    deliveries = await interrupted(api, 2, times=0)
    gateway = BareGateway()
    handler = handler_over(api, gateway)
    for delivery in deliveries:
        assert (await handler.handle(delivery, calm)).hide_for is not None
    # The second was not called: it is no trial.
    assert len(gateway.calls) == 1
    assert isinstance(deliveries[0].message, TaskMessage)
    tasks = await api.tasks_of(deliveries[0].message.run_id)
    assert {(task.status, task.attempts) for task in tasks} == {(TaskStatus.PENDING, 0)}


async def test_a_body_without_room_fails_its_task_and_says_so(api: Api) -> None:
    gateway, handler, delivery = await work_unkept(api, NoRoom())
    for _ in range(3):
        api.clock.shift(5.0)
        await handler.handle(delivery, calm)
    assert len(gateway.calls) == 3
    assert isinstance(delivery.message, TaskMessage)
    [task] = await api.tasks_of(delivery.message.run_id)
    assert task.status is TaskStatus.FAILED
    assert task.error is not None
    assert (task.error.code, task.error.status) == ("no_room", 507)
    assert "no room for a body of this size" in task.error.title


UNKEPT = [
    ConveyorError(ErrorCode.UNAVAILABLE, "s3 does not answer", retry_after=5),
    NotDeployed("bucket bodies: put_object: not permitted"),
    AwsRefused("RequestTimeTooSkewed", "by an hour"),
]


@pytest.mark.parametrize("away", UNKEPT, ids=["silent", "not deployed", "refused"])
async def test_a_body_that_cannot_be_kept_costs_one_call_and_no_attempt(
    api: Api, away: ConveyorError
) -> None:
    gateway, handler, delivery = await work_unkept(api, away)
    with pytest.raises(ResultLost):
        await handler.handle(delivery, calm)
    for _ in range(9):
        with pytest.raises(ConveyorError) as caught:
            await handler.handle(delivery, calm)
        assert caught.value.code is ErrorCode.UNAVAILABLE
        assert not isinstance(caught.value, ResultLost)
    assert len(gateway.calls) == 1
    assert isinstance(delivery.message, TaskMessage)
    [task] = await api.tasks_of(delivery.message.run_id)
    assert (task.status, task.attempts, task.claim_number) == (TaskStatus.PENDING, 0, 1)
    assert task.wait_at(api.clock.now()) is WaitReason.OUTAGE
    hidden_for = HIDING.delay(delivery.receive_count)
    assert task.not_before == api.clock.now() + round(hidden_for * 1_000)


async def test_a_call_that_was_answered_ends_the_refusals_though_its_body_was_lost(
    api: Api,
) -> None:
    _, handler, delivery = await work_unkept(api, UNKEPT[0])
    assert isinstance(delivery.message, TaskMessage)
    run_id, task_id = delivery.message.run_id, delivery.message.task_id
    since = api.clock.now()
    refused = Deferred(since + 1, WaitReason.HOST_RETRY_AFTER, since)
    await api.settle(await api.claim(run_id, task_id), refused)
    await api.clock.advance(1.0)

    with pytest.raises(ResultLost):
        await handler.handle(delivery, calm)

    [task] = await api.tasks_of(run_id)
    assert (task.waiting, task.waiting_since) == (WaitReason.OUTAGE, 0)


async def test_a_trial_is_made_now_and_then_and_a_body_that_is_kept_ends_it(api: Api) -> None:
    gateway, handler, delivery = await work_unkept(api, UNKEPT[0])
    for calls in (1, 2):
        with pytest.raises(ResultLost):
            await handler.handle(delivery, calm)
        assert len(gateway.calls) == calls
        await api.clock.advance(FIRST_PAUSE * 2 ** (calls - 1))
    handler._blobs.put = api.binding.blobs.put  # type: ignore[method-assign]
    outcome = await handler.handle(delivery, calm)
    assert outcome.hide_for is None
    assert len(gateway.calls) == 3


async def test_a_store_that_refuses_one_body_alone_keeps_others(api: Api) -> None:
    gateway, handler, delivery = await work_unkept(api, UNKEPT[0])
    unkept = cast(Any, handler._blobs)._blobs
    with pytest.raises(ResultLost):
        await handler.handle(delivery, calm)
    await api.clock.advance(FIRST_PAUSE)
    unkept._error = BodyRefused("too large")
    await handler.handle(delivery, calm)
    await api.clock.advance(5.0)
    unkept._error = UNKEPT[0]
    for calls in (3, 4):
        with pytest.raises(ResultLost):
            await handler.handle(delivery, calm)
        assert len(gateway.calls) == calls
        await api.clock.advance(FIRST_PAUSE)


async def test_the_end_of_a_task_is_logged_with_its_url_and_without_its_secrets(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "conveyor.tasks")
    gateway = GatedGateway()
    gateway.gate.set()
    within = (
        "https://u:hunter4@b.test/?u=https%3A%2F%2Fu:hunter5%40c.test/&v=http://hunter6@d.test/"
    )
    url = f"https://user:hunter2@a.test/{within}?api_key=hunter3&page=2"
    made = await api.client.post("/v1/jobs", json={"tasks": [{"url": url}]})
    job = made.json()
    [task] = await api.tasks_of(job["latest_run"]["run_id"])
    message = TaskMessage(job["job_id"], task.run_id, task.task_id)

    await handler_over(api, gateway).handle(Delivery("queue", message, "receipt", 1), calm)

    [record] = [one for one in caplog.records if one.getMessage() == "task ended"]
    fields = record.__dict__
    masked = "https://***@b.test/?u=https%3A%2F%2F***@c.test/&v=http://***@d.test/"
    assert fields["url"] == f"https://***@a.test/{masked}?api_key=***&page=2"
    assert (fields["state"], fields["attempt"], fields["reason"]) == ("successful", 1, None)
    assert fields["ms"] >= 0
    assert (fields["task_id"], fields["run_id"]) == (task.task_id, task.run_id)
    assert (fields["job_id"], fields["bytes"]) == (job["job_id"], len(b"body"))


async def ended_lines(
    api: Api, caplog: pytest.LogCaptureFixture, gateway: Any, **options: Any
) -> list[logging.LogRecord]:
    """The lines of the ends of twenty tasks, under other options of the handler."""
    caplog.set_level(logging.INFO, "conveyor.tasks")
    caplog.clear()
    job = await api.submit(20)
    run_id = job["latest_run"]["run_id"]
    handler = handler_over(api, gateway)
    handler._options = msgspec.structs.replace(handler._options, **options)
    for task in await api.tasks_of(run_id):
        message = TaskMessage(job["job_id"], run_id, task.task_id)
        await handler.handle(Delivery("queue", message, "receipt", 1), calm)
    return [one for one in caplog.records if one.getMessage() == "task ended"]


async def test_a_share_of_the_ends_is_logged_by_the_ids_of_the_tasks(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = GatedGateway()
    gateway.gate.set()
    lines = await ended_lines(api, caplog, gateway, log_ratio=0.5)
    ids = [one.__dict__["task_id"] for one in lines]

    assert 0 < len(ids) < 20
    assert all(is_sampled(task_id, 0.5) for task_id in ids)
    assert not await ended_lines(api, caplog, gateway, log_ratio=0.0)


def refuse() -> None:
    problem = Problem(code="RESP001", title="Not there", status=404)
    raise ScrapeFailed(problem, TaskFailure.BAD_TARGET, retryable=False)


class RefusingGateway(GatedGateway):
    """A gateway that refuses every page for good."""

    @asynccontextmanager
    async def _answer(self, request: ScrapeRequest) -> AsyncIterator[Success]:
        refuse()
        yield Success(b"", "text/plain")


async def test_each_failure_is_logged_and_no_url_where_none_may_be(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    lines = await ended_lines(api, caplog, RefusingGateway(), log_ratio=0.0, logs_urls=False)

    assert len(lines) == 20
    for line in lines:
        fields = line.__dict__
        assert (fields["state"], fields["attempt"], fields["url"]) == ("failed", 1, None)
        assert fields["reason"].endswith(": RESP001")
        assert "site.test" not in repr(fields)
