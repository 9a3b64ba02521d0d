"""Webhooks in a whole worker, wired as bootstrap does: from the end of a run to its receiver, and
what becomes of attempts when the worker stops."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from conveyor.bootstrap import LoopOptions, Outside, build_worker
from conveyor.domain.deliveries import DeliveryStatus
from conveyor.domain.webhooks import EventType
from conveyor.engine.worker import Worker
from conveyor.gateway.fake import FakeGateway
from conveyor.settings import Settings
from tests.unit.delivery_world import ORIGIN, PATIENCE, DeliveryWorld, Held, delivery_world

URL = "https://hooks.test/"
GRACE = 2.0
INTERVAL = 5.0
LONG_INTERVAL = 600.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def world(tmp_path: Path, anyio_backend: str) -> AsyncIterator[DeliveryWorld]:
    async with delivery_world(tmp_path) as world:
        yield world


class Working:
    """A worker over the store of a world, with receivers that hold back their answers."""

    def __init__(self, world: DeliveryWorld, held: Held, interval: float) -> None:
        clock = world.api.clock
        self.held = held
        self.has_ended = False
        self._world = world
        self.worker: Worker = build_worker(
            world.api.binding,
            Outside(FakeGateway(clock), held, ORIGIN),
            Settings(outbox_interval=interval),
            clock,
            telemetry=world.telemetry,
            options=LoopOptions(logs_backlog=True),
        )

    async def run(self) -> None:
        """Work until stopped."""
        await self.worker.run(grace=GRACE)
        self.has_ended = True

    async def until(self, condition: Callable[[], bool]) -> float:
        """Let virtual time go on until something has come about; return the seconds."""
        clock = self._world.api.clock
        began = clock.monotonic()
        with anyio.fail_after(PATIENCE):
            while not condition():
                await clock.advance(0.25)
                await anyio.sleep(0.005)
        return clock.monotonic() - began


@asynccontextmanager
async def working(world: DeliveryWorld, *, interval: float = INTERVAL) -> AsyncIterator[Working]:
    """Run a worker; it has ended at the end."""
    crew = Working(world, Held(), interval)
    async with anyio.create_task_group() as group:
        group.start_soon(crew.run)
        yield crew
        crew.worker.stop()
        await crew.until(lambda: crew.has_ended)


async def test_an_end_is_told_within_some_looks(world: DeliveryWorld) -> None:
    job = await world.submit(URL)
    await world.fail(job)
    async with working(world) as crew:
        crew.held.free()
        seconds = await crew.until(lambda: world.telemetry.webhook_attempts == {"delivered": 1})

    assert seconds <= 3 * INTERVAL
    delivery = await world.delivery()
    assert delivery.status is DeliveryStatus.DELIVERED
    assert json.loads(delivery.body)["links"]["run"].startswith(f"{ORIGIN}/v1/jobs/")


async def test_an_end_in_the_same_process_is_told_before_the_next_look(
    world: DeliveryWorld,
) -> None:
    async with working(world, interval=LONG_INTERVAL) as crew:
        crew.held.free()
        await world.submit(URL)
        seconds = await crew.until(lambda: world.telemetry.webhook_attempts == {"delivered": 1})
    assert seconds < LONG_INTERVAL / 2


@pytest.mark.parametrize("command", ["stop", "close"])
async def test_an_end_by_the_api_of_the_same_process_is_told_before_the_next_look(
    world: DeliveryWorld, command: str
) -> None:
    async with working(world, interval=LONG_INTERVAL) as crew:
        crew.held.free()
        job = await world.submit(URL, events=tuple(EventType), status="open")
        await crew.until(lambda: world.telemetry.tasks == {"successful": 1})
        answer = await world.api.client.post(f"/v1/jobs/{job['job_id']}/{command}")
        assert answer.status_code == 200
        seconds = await crew.until(lambda: world.telemetry.webhook_attempts == {"delivered": 1})
    assert seconds < LONG_INTERVAL / 2


@pytest.mark.slow
async def test_a_look_waits_for_no_receiver(world: DeliveryWorld) -> None:
    async with working(world) as crew:
        await world.fail(await world.submit(URL))
        await crew.until(lambda: crew.held.sent == [URL])
        await world.fail(await world.submit("https://other.test/"))
        await crew.until(lambda: len(crew.held.sent) == 2)
        assert crew.held.under_way.total() == 2
        crew.held.free()


async def test_a_worker_that_stops_waits_for_its_attempts(world: DeliveryWorld) -> None:
    async with working(world) as crew:
        await world.fail(await world.submit(URL))
        await crew.until(lambda: crew.held.sent == [URL])
        crew.worker.stop()
        await world.api.clock.advance(GRACE / 2)
        assert not crew.has_ended
        crew.held.free()

    assert (await world.delivery()).status is DeliveryStatus.DELIVERED


@pytest.mark.slow
async def test_a_worker_that_stops_waits_for_its_attempts_no_longer_than_its_grace(
    world: DeliveryWorld,
) -> None:
    async with working(world) as crew:
        await world.fail(await world.submit(URL))
        await crew.until(lambda: crew.held.sent == [URL])
        crew.worker.stop()
        assert GRACE <= await crew.until(lambda: crew.has_ended) <= GRACE + 1

    cut = await world.delivery()
    assert (cut.status, cut.leased_until) == (DeliveryStatus.PENDING, 0)
    assert [one.outcome for one in cut.attempts] == [""]
    async with working(world) as crew:
        crew.held.free()
        await crew.until(lambda: world.telemetry.webhook_attempts == {"delivered": 1})


@pytest.mark.slow
async def test_a_worker_tells_in_each_minute_how_webhooks_get_on(
    world: DeliveryWorld, caplog: pytest.LogCaptureFixture
) -> None:
    def lines() -> list[tuple[int, int]]:
        found = [one for one in caplog.records if one.getMessage() == "webhooks"]
        return [(one.__dict__["delivered"], one.__dict__["failed"]) for one in found]

    with caplog.at_level(logging.INFO, "conveyor.engine"):
        async with working(world) as crew:
            crew.held.free()
            await world.fail(await world.submit(URL))
            assert await crew.until(lambda: len(lines()) == 3) <= 180

    assert sum(delivered for delivered, _ in lines()) == 1
    assert sum(failed for _, failed in lines()) == 0
