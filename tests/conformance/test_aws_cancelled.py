"""A call that is cancelled on its way: whatever undoes it comes after it, over either carrier."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from conveyor.clock import SystemClock
from conveyor.domain.model import TaskStatus
from conveyor.prod.aws.opening import open_aws
from conveyor.prod.dynamodb.schema import table_parameters
from conveyor.prod.dynamodb.store import open_store
from conveyor.testing.clock import FakeClock
from tests.conformance.aws_answers import Proxy, proxy
from tests.conformance.emulators import address, aws_options
from tests.conformance.production_store import new_name
from tests.conformance.world import World

PATIENCE = 0.3
"""Seconds in which a release that does not wait for its claim would overtake it."""

pytestmark = pytest.mark.slow


@asynccontextmanager
async def worker(clock: FakeClock, carrier: str) -> AsyncIterator[tuple[World, Proxy]]:
    """A store on a table of its own, behind a proxy that can hold a request."""
    async with proxy(address("CONVEYOR_TEST_DYNAMODB")) as between:
        options = aws_options(dynamodb_endpoint=between.url, carrier=carrier)
        aws = await open_aws(options, SystemClock(), "dynamodb")
        name = new_name()
        await aws.call("dynamodb", "create_table", table_parameters(name))
        store = await open_store(
            aws, table=name, clock=SystemClock(), worker="w", flush_interval=0.0
        )
        yield World(store, clock), between
        await store.aclose()
        await aws.call("dynamodb", "delete_table", {"TableName": name})
        await aws.aclose()


@pytest.mark.parametrize("carrier", ["http", "boto"])
async def test_a_claim_that_is_cancelled_in_flight_is_undone_by_its_release(
    clock: FakeClock, carrier: str
) -> None:
    async with worker(clock, carrier) as (world, between):
        _, run_id = await world.submit(1)
        [(_, task_id)] = await world.store.tasks.unfinished_after(run_id, -1, 1)
        between.holds = held = asyncio.Event()
        released = asyncio.Event()

        async def work() -> None:
            try:
                await world.claim(run_id, 0, task_id=task_id)
            finally:
                with anyio.CancelScope(shield=True):
                    await world.store.tasks.release_claim(run_id, task_id, worker="worker")
                    released.set()

        async with anyio.create_task_group() as group:
            group.start_soon(work)
            await between.has_one.wait()
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                with anyio.move_on_after(PATIENCE):
                    await released.wait()
                held.set()
        assert released.is_set()
        task = await world.store.tasks.get_task(run_id, task_id)
        assert task is not None
        assert task.status is TaskStatus.PENDING
