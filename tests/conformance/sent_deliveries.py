"""Deliveries of tests, and the steps of their lives."""

from __future__ import annotations

from typing import Any

from conveyor.domain.deliveries import (
    AttemptResult,
    EventDelivery,
    begin_attempt,
    end_attempt,
    event_id,
)
from tests.conformance.world import CALLER, World

LEASE = 60_000
BODY = '{"event":"ключ \\n\\u0000"}\x00'.encode() + b"\xff\xfe"
"""The bytes of an event: whatever they are, they are kept."""
DELIVERED = AttemptResult(
    milliseconds=12, host="example.com", status=200, content_type="text/plain", length=2
)
REFUSED = AttemptResult(error="http_5xx:500", milliseconds=7, host="example.com", status=500)


def new_delivery(world: World, **fields: Any) -> EventDelivery:
    """A delivery that is due now, of a run of its own unless fields name one."""
    run_id = fields.get("run_id", world.clock.new_id())
    usual: dict[str, Any] = {
        "delivery_id": event_id(run_id, "run.completed", ended_at=world.now),
        "caller": CALLER,
        "job_id": "a job",
        "run_id": run_id,
        "event_type": "run.completed",
        "body": BODY,
        "created_at": world.now,
        "updated_at": world.now,
        "due_at": world.now,
    }
    return EventDelivery(**(usual | fields))


async def owe(world: World, **fields: Any) -> EventDelivery:
    """Write a delivery that is due now."""
    delivery = new_delivery(world, **fields)
    assert await world.store.deliveries.create_delivery(delivery)
    return delivery


async def change(world: World, before: EventDelivery, after: EventDelivery) -> EventDelivery:
    """Write the next version of a delivery."""
    assert await world.store.deliveries.change_delivery(before, after)
    return after


async def begin(world: World, delivery: EventDelivery, *, lease: int = LEASE) -> EventDelivery:
    """Lease a delivery for an attempt."""
    begun = begin_attempt(delivery, now=world.now, lapses_at=world.now + lease)
    return await change(world, delivery, begun)


async def attempt(world: World, delivery: EventDelivery, result: AttemptResult) -> EventDelivery:
    """Make an attempt that ends at once with a result."""
    begun = await begin(world, delivery)
    ended = end_attempt(begun, begun.attempt_count, begun.ladder, result, now=world.now, random=0.0)
    return await change(world, begun, ended)
