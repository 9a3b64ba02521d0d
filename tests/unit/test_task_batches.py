"""Many tasks in one operation: bodies under their own names, claims and settlements, each as if it
were alone; and the stages of the task handler over them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import pytest

from conveyor.clock import SystemClock
from conveyor.dev.binding import open_binding
from conveyor.dev.call_table import read_begun
from conveyor.dev.files import FileBlobs
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import TaskStatus
from conveyor.domain.task_rules import Released
from conveyor.engine.telemetry import Telemetry
from conveyor.handlers.retry_policy import RetryPolicy
from conveyor.handlers.task import TaskHandler
from conveyor.ports.blobs import BodyRefused
from conveyor.ports.gateway import ScrapeRequest, Success
from conveyor.ports.handler import Held, Outcome, ResultLost
from conveyor.ports.pipeline import Pipeline
from conveyor.ports.queues import Delivery, TaskMessage
from conveyor.ports.tasks import (
    Claimed,
    ClaimedElsewhere,
    ClaimRequest,
    NotClaimable,
    Settled,
    SettleRequest,
)
from tests.disk import files_below
from tests.unit.http_api import Api, open_api
from tests.unit.wired_handlers import task_handler

MAX_INTERRUPTIONS = 4


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Api]:
    async with open_api(tmp_path) as api:
        yield api


def pipeline_of(api: Api) -> Pipeline:
    pipeline = api.binding.pipeline
    assert pipeline is not None
    return pipeline


# -- bodies --


async def read(blobs: FileBlobs, key: str) -> bytes | None:
    pieces = await blobs.open(key)
    return None if pieces is None else b"".join([piece async for piece in pieces])


async def test_new_bodies_of_no_run_are_written_under_their_own_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def renamed(*_: object) -> None:
        raise AssertionError("renamed")

    monkeypatch.setattr(os, "rename", renamed)
    blobs = FileBlobs(tmp_path)
    bodies = [(f"exports/J/R/0000{number % 3}/{number}", b"%d" % number) for number in range(50)]
    assert await blobs.put_new(bodies) == [key for key, _ in bodies]
    for key, body in bodies:
        assert await read(blobs, key) == body
        assert (tmp_path / key).stat().st_mode & 0o777 == 0o600
    assert await blobs.put_new([(bodies[0][0], b"")]) == [bodies[0][0]]
    assert await read(blobs, bodies[0][0]) == b""
    await blobs.aclose()
    [late] = await blobs.put_new([("late", b"x")])
    assert isinstance(late, ConveyorError)


async def test_a_new_body_that_fails_harms_no_other_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def full(descriptor: int, body: bytes) -> int:
        if bytes(body).startswith(b"full"):
            raise OSError(28, "No space left on device", "a path")
        return write(descriptor, bytes(body)[:3])

    blobs = FileBlobs(tmp_path)
    monkeypatch.setattr(os, "write", full)
    first, taken, second, third = await blobs.put_new(
        [("a/1", b"whole one"), ("a/1/below", b"x"), ("a/2", b"full"), ("a/3", b"whole three")]
    )
    monkeypatch.undo()
    assert (first, third) == ("a/1", "a/3")
    for error in (taken, second):
        assert isinstance(error, ConveyorError)
        assert error.code is ErrorCode.UNAVAILABLE
        assert str(tmp_path) not in str(error)
    assert await read(blobs, "a/1") == b"whole one"
    assert await read(blobs, "a/3") == b"whole three"
    assert {path.name for path in files_below(tmp_path)} == {"1", "3"}
    await blobs.aclose()


# -- claims and settlements --


async def requests_of(api: Api, tasks: int) -> list[ClaimRequest]:
    run_id = (await api.submit(tasks))["latest_run"]["run_id"]
    now = api.clock.now()
    return [
        ClaimRequest(run_id, task.task_id, "w/1", now, now + 60_000, MAX_INTERRUPTIONS)
        for task in await api.tasks_of(run_id)
    ]


async def test_claims_and_settlements_of_a_batch_are_as_if_each_were_alone(api: Api) -> None:
    batches = pipeline_of(api).tasks
    requests = await requests_of(api, 3)
    unknown = msgspec.structs.replace(requests[0], task_id="0" * 26)
    foreign = msgspec.structs.replace(requests[0], run_id="no run")
    claims = await batches.claim_tasks([*requests, requests[1], unknown, foreign])
    assert [type(claim) for claim in claims] == [
        Claimed,
        Claimed,
        Claimed,
        ClaimedElsewhere,
        NotClaimable,
        NotClaimable,
    ]
    settled = await batches.settle_tasks(
        [
            SettleRequest(one.run_id, one.task_id, number, Released(), api.clock.now())
            for one, number in zip(requests, (1, 1, 7), strict=True)
        ]
    )
    assert [one.applied for one in settled if isinstance(one, Settled)] == [True, True, False]
    tasks = await api.tasks_of(requests[0].run_id)
    assert [task.status for task in tasks] == [
        TaskStatus.PENDING,
        TaskStatus.PENDING,
        TaskStatus.PROCESSING,
    ]


async def test_one_operation_of_many_is_one_item_of_the_writers_queue(tmp_path: Path) -> None:
    async with open_api(tmp_path / "one") as api:
        requests = await requests_of(api, 40)
    dev = await open_binding(tmp_path / "one", api.clock)
    before = dev.store.groups, dev.store.operations
    await dev.store.tasks.claim_tasks(requests)
    assert (dev.store.groups, dev.store.operations) == (before[0] + 1, before[1] + 40)
    await dev.ports.aclose()


async def test_an_item_that_breaks_its_batch_fails_alone(tmp_path: Path) -> None:
    dev = await open_binding(tmp_path, SystemClock())

    def double(_connection: object, items: Sequence[int]) -> list[int]:
        if 3 in items:
            raise RuntimeError("broken")
        return [2 * item for item in items]

    results = await dev.store.database.write_many(double, [1, 2, 3, 4])
    assert [result for result in results if isinstance(result, int)] == [2, 4, 8]
    assert isinstance(results[2], RuntimeError)
    await dev.ports.aclose()


# -- the stages of the handler --


class Gateway:
    """Answers at once; `calls` are the URLs asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @asynccontextmanager
    async def scrape(self, request: ScrapeRequest) -> AsyncIterator[Success]:
        self.calls.append(request.url)
        yield Success(b"body", "text/plain")

    async def aclose(self) -> None:
        pass


class TroubledBodies:
    """Bodies of which some fail, by the order in which they come."""

    def __init__(self, errors: dict[int, Exception]) -> None:
        self.errors = errors
        self.count = 0

    async def put_new(self, bodies: Sequence[tuple[str, bytes]]) -> list[str | Exception]:
        found = [self.errors.get(self.count + n, key) for n, (key, _) in enumerate(bodies)]
        self.count += len(bodies)
        return found


@dataclasses.dataclass
class Bench:
    """A handler in stages over a development store, and the messages of a new run."""

    api: Api
    gateway: Gateway
    handler: TaskHandler
    telemetry: Telemetry
    run_id: str
    deliveries: list[Delivery]

    async def claimed(self) -> list[Held]:
        """Claim all tasks."""
        claims = await self.handler.claim(self.deliveries)
        held = [one for one in claims if one is not None and not isinstance(one, Outcome)]
        assert len(held) == len(claims)
        return held

    async def begin(self, number: int, held: Held | None) -> Held | Outcome:
        """Call for a task."""
        return await self.handler.begin(self.deliveries[number], lambda: None, held)

    async def answered(self) -> list[Held]:
        """Claim all tasks, and call for each."""
        results = [await self.begin(*one) for one in enumerate(await self.claimed())]
        held = [one for one in results if not isinstance(one, Outcome)]
        assert len(held) == len(results)
        return held

    async def statuses(self) -> list[str]:
        return [task.status.value for task in await self.api.tasks_of(self.run_id)]


async def bench_over(api: Api, tasks: int, errors: dict[int, Exception] | None = None) -> Bench:
    binding, clock = api.binding, api.clock
    if errors is not None:
        bodies = TroubledBodies(errors)
        pipeline = dataclasses.replace(pipeline_of(api), bodies=bodies)
        binding = dataclasses.replace(binding, pipeline=pipeline)
    gateway, telemetry = Gateway(), Telemetry()
    handler = task_handler(
        binding,
        gateway,
        clock,
        retry_policy=RetryPolicy(clock, base=1.0, cap=1.0, rate_limit_deadline=1.0),
        observer=telemetry,
        max_interruptions=MAX_INTERRUPTIONS,
        pipeline=binding.pipeline,
    )
    job = await api.submit(tasks)
    run_id = job["latest_run"]["run_id"]
    deliveries = [
        Delivery("queue", TaskMessage(job["job_id"], run_id, task.task_id), "receipt", 1)
        for task in await api.tasks_of(run_id)
    ]
    return Bench(api, gateway, handler, telemetry, run_id, deliveries)


async def test_a_batch_is_claimed_called_for_and_settled(api: Api) -> None:
    bench = await bench_over(api, 5)
    outcomes = await bench.handler.settle(await bench.answered())
    ends = [isinstance(outcome, Outcome) and bool(outcome.drop_queue) for outcome in outcomes]
    assert ends == [False] * 4 + [True]
    assert await bench.statuses() == ["successful"] * 5
    assert bench.telemetry.tasks == {"successful": 5}
    for task in await api.tasks_of(bench.run_id):
        assert task.result is not None
        assert await api.binding.blobs.size(task.result.blob_key) == 4


async def test_bodies_that_are_refused_or_lost_harm_no_other_of_their_batch(api: Api) -> None:
    away = ConveyorError(ErrorCode.UNAVAILABLE, "away")
    bench = await bench_over(api, 4, {1: BodyRefused("too large"), 2: away})
    outcomes = await bench.handler.settle(await bench.answered())
    assert [type(outcome) for outcome in outcomes] == [Outcome, Outcome, ResultLost, Outcome]
    assert await bench.statuses() == ["successful", "pending", "pending", "successful"]
    _, refused, lost, _ = await api.tasks_of(bench.run_id)
    assert (refused.attempts, lost.attempts) == (1, 0)
    events = await api.binding.tasks.task_history(bench.run_id, refused.task_id)
    assert events is not None
    assert [event.error and event.error.code for event in events] == ["internal"]


async def test_a_store_that_is_away_is_tried_by_one_call_at_a_time(api: Api) -> None:
    away = ConveyorError(ErrorCode.UNAVAILABLE, "away")
    bench = await bench_over(api, 3, dict.fromkeys(range(3), away))
    first, second, third = await bench.claimed()
    answer = await bench.begin(0, first)
    assert not isinstance(answer, Outcome)
    [lost] = await bench.handler.settle([answer])
    assert isinstance(lost, ResultLost)
    # What was claimed before is not called for any more, and nothing is claimed ahead.
    with pytest.raises(ConveyorError, match="unavailable"):
        await bench.begin(1, second)
    assert await bench.handler.claim(bench.deliveries[:1]) == [None]
    assert len(bench.gateway.calls) == 1
    assert await bench.statuses() == ["pending", "pending", "processing"]
    await api.clock.advance(2.0)
    assert isinstance(await bench.begin(1, None), Outcome)
    assert len(bench.gateway.calls) == 2
    await bench.handler.undo([third])
    assert await bench.statuses() == ["pending", "successful", "pending"]


async def test_the_body_of_a_settlement_that_did_not_apply_is_deleted(api: Api) -> None:
    bench = await bench_over(api, 3)
    answered = await bench.answered()
    job_id = bench.deliveries[0].message.job_id
    response = await api.client.delete(f"/v1/jobs/{job_id}")
    assert response.status_code == 202
    outcomes = await bench.handler.settle(answered)
    assert all(isinstance(outcome, Outcome) for outcome in outcomes)
    assert list(files_below(api.directory / "blobs")) == []


async def test_a_note_stands_from_the_call_to_the_settlement(api: Api) -> None:
    def noted() -> int:
        found = read_begun(api.directory / "calls")
        assert found is not None
        return len(found.claims)

    bench = await bench_over(api, 3)
    claimed = await bench.claimed()
    assert noted() == 0
    answers = [await bench.begin(*one) for one in enumerate(claimed)]
    assert noted() == 3
    answered = [one for one in answers if not isinstance(one, Outcome)]
    await bench.handler.settle(answered[:2])
    assert noted() == 1
    await bench.handler.undo(answered[2:])
    assert noted() == 0


async def test_a_batch_of_claims_that_is_cancelled_is_undone(api: Api) -> None:
    bench = await bench_over(api, 100)  # more than are claimed without waiting
    async with anyio.create_task_group() as group:
        group.start_soon(bench.handler.claim, bench.deliveries)
        await anyio.lowlevel.checkpoint()  # the claims are on their way to the store
        group.cancel_scope.cancel()
    assert await bench.statuses() == ["pending"] * 100


async def test_a_suspect_of_a_batch_is_worked_to_its_end_by_its_slot(api: Api) -> None:
    bench = await bench_over(api, 2)
    for _ in range(MAX_INTERRUPTIONS // 2):
        await api.claim(bench.run_id, (await api.tasks_of(bench.run_id))[0].task_id, seconds=1.0)
        api.clock.shift(1.0)
    suspect, other = await bench.claimed()
    assert isinstance(await bench.begin(0, suspect), Outcome)
    assert (await bench.statuses())[0] == "successful"
    answer = await bench.begin(1, other)
    assert not isinstance(answer, Outcome)
    await bench.handler.settle([answer])
    assert await bench.statuses() == ["successful"] * 2
