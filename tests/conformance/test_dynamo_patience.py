"""A task's result is kept at hand while DynamoDB is away, and counted once it is back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import RunStatus
from conveyor.domain.task_rules import Released
from conveyor.ports.tasks import Settled
from conveyor.testing.clock import FakeClock
from tests.conformance.dynamo_runs import TableBench, check, open_bench, settles, writes

pytestmark = pytest.mark.extended

PATIENCE = 60.0


@pytest.fixture
async def bench(clock: FakeClock) -> AsyncIterator[TableBench]:
    opened = await open_bench(clock)
    yield opened
    await opened.aclose()


async def passed(bench: TableBench, doing: asyncio.Task[Settled]) -> None:
    """Let time pass until a call is done, but not while an answer is on its way."""
    while not doing.done():
        await (bench.clock.advance(1.0) if bench.clock.pending else asyncio.sleep(0.01))


@pytest.mark.parametrize("carried_out", [True, False])
async def test_a_settlement_is_made_as_soon_as_the_table_is_back(
    bench: TableBench, carried_out: bool
) -> None:
    world = bench.world(worker="one", patience=PATIENCE)
    _, run_id = await world.submit(1)
    task = await world.claimed(run_id, 0)
    bench.seam.be_away(settles, carried_out=carried_out, count=15)
    settling = asyncio.create_task(world.settle(task, world.success(task)))
    await passed(bench, settling)
    assert await settling == Settled(applied=True, run_status=RunStatus.COMPLETED)
    assert (await bench.row(run_id)).run.stats.successful == 1
    await check(bench, run_id)


async def test_a_claim_that_another_took_meanwhile_is_not_settled(bench: TableBench) -> None:
    world, other = bench.world(worker="one", patience=PATIENCE), bench.observer()
    _, run_id = await world.submit(1)
    task = await world.claimed(run_id, 0)
    away = bench.seam.acquire_or_renew(settles)
    settling = asyncio.create_task(world.settle(task, world.success(task)))
    await away.met.wait()
    assert (await other.settle(task, Released())).applied
    assert (await other.succeed(run_id, 0)).applied
    away.gate.set()
    assert await settling == Settled(applied=False, run_status=RunStatus.COMPLETED)
    await check(bench, run_id)


async def test_patience_ends_and_who_only_undoes_has_none(bench: TableBench) -> None:
    world = bench.world(worker="one", patience=PATIENCE)
    _, run_id = await world.submit(1)
    task = await world.claimed(run_id, 0)
    bench.seam.be_away(writes, carried_out=False)
    with pytest.raises(ConveyorError):
        await world.settle(task, Released())
    bench.seam.be_away(settles, carried_out=False, count=1_000)
    settling = asyncio.create_task(world.settle(task, world.success(task)))
    await passed(bench, settling)
    with pytest.raises(ConveyorError):
        await settling
