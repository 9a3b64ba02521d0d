"""An attempt whose end cannot be stored, or that ends in a fault, ends all the same."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from conveyor.domain.deliveries import DeliveryStatus
from conveyor.ports.handler import UNEXPECTED_LOGGER
from conveyor.ports.webhooks import WebhookAnswer
from tests.unit.delivery_world import DeliveryWorld, Held, delivery_world
from tests.unit.wired_handlers import deliverer

URL = "http://127.0.0.1:1/hook"
ODD = "text/\udcff"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def world(tmp_path: Path, anyio_backend: str) -> AsyncIterator[DeliveryWorld]:
    async with delivery_world(tmp_path) as world:
        yield world


@pytest.fixture(autouse=True)
def _faults_are_wanted(caplog: pytest.LogCaptureFixture) -> None:
    """These tests make faults, which are logged; any other test would fail for that."""
    caplog.set_level(logging.CRITICAL, UNEXPECTED_LOGGER)


def answering(world: DeliveryWorld, answer: Callable[[str], WebhookAnswer]) -> Held:
    """Let the deliverer of a world have receivers that answer so."""
    held = Held(answer)
    held.free()
    clock, telemetry = world.api.clock, world.telemetry
    world.deliverer = deliverer(world.api.binding, clock, held, observer=telemetry)
    return held


async def test_an_answer_that_cannot_be_stored_ends_its_attempt(world: DeliveryWorld) -> None:
    held = answering(world, lambda _: WebhookAnswer(status=200, content_type=ODD))
    await world.owe(URL)
    await world.look()
    await world.look(after=100.0)

    found = await world.delivery()
    [attempt] = found.attempts
    assert (found.status, len(held.sent)) == (DeliveryStatus.DELIVERED, 1)
    assert (attempt.outcome, attempt.status, attempt.content_type) == ("delivered", 200, "")


async def test_a_failure_that_cannot_be_stored_climbs_the_ladder(world: DeliveryWorld) -> None:
    refused = WebhookAnswer(status=500, error="http_5xx:500", content_type=ODD)
    held = answering(world, lambda _: refused)
    await world.owe(URL)
    await world.look()

    found = await world.delivery()
    assert (found.status, found.failures, found.leased_until) == (DeliveryStatus.PENDING, 1, 0)
    for _ in range(20):
        await world.look(after=86_400.0)
    assert (await world.delivery()).status is DeliveryStatus.FAILED
    assert len(held.sent) <= 10


async def test_a_fault_of_an_attempt_climbs_the_ladder(world: DeliveryWorld) -> None:
    def fault(url: str) -> WebhookAnswer:
        raise RuntimeError(url)

    answering(world, fault)
    await world.owe(URL)
    await world.look()

    found = await world.delivery()
    [attempt] = found.attempts
    assert (attempt.outcome, found.failures) == ("transport_error:internal", 1)
    assert found.leased_until == 0
