"""A webhook that asks for other events by now: those under way that it no more names are
dropped."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from conveyor.domain.deliveries import DeliveryStatus
from conveyor.domain.delivery_places import MOST_OF_A_CALLER
from conveyor.domain.webhooks import EventType, Webhook
from tests.unit.delivery_world import DeliveryWorld, Held, delivery_world, receiving, until
from tests.unit.wired_handlers import deliverer


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def world(tmp_path: Path, anyio_backend: str) -> AsyncIterator[DeliveryWorld]:
    async with delivery_world(tmp_path) as world:
        yield world


async def test_an_event_that_is_not_asked_for_any_more_is_dropped(world: DeliveryWorld) -> None:
    async with receiving("500 no") as receiver:
        job = await world.owe(receiver.url)
        await world.look()
        await world.set_webhook(job, Webhook(receiver.url, False, (EventType.COMPLETED,)))
        await world.look(after=10.0)

    found = await world.delivery()
    assert (found.status, found.attempt_count) == (DeliveryStatus.DROPPED, 1)
    assert len(receiver.requests) == 1


async def test_so_is_one_that_waits_for_a_place(world: DeliveryWorld) -> None:
    held = Held()
    clock, telemetry = world.api.clock, world.telemetry
    world.deliverer = deliverer(world.api.binding, clock, held, observer=telemetry)
    url = "https://hooks.test/"
    jobs = [await world.owe(url) for _ in range(MOST_OF_A_CALLER + 2)]
    async with anyio.create_task_group() as attempts:
        await world.deliverer.look(attempts)
        await until(lambda: len(held.sent) == MOST_OF_A_CALLER)
        for job in jobs:
            await world.set_webhook(job, Webhook(url, False, (EventType.COMPLETED,)))
        held.free()

    statuses = [one.status for one in await world.deliveries()]
    assert statuses.count(DeliveryStatus.DELIVERED) == MOST_OF_A_CALLER
    assert statuses.count(DeliveryStatus.DROPPED) == 2
