"""Acknowledgements in batches: what a batcher forgets."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any, cast

import anyio
import pytest

from conveyor.engine.delivery import LINGER, AckBatcher
from conveyor.ports.queues import MAX_BATCH, Queues
from conveyor.testing.clock import FakeClock


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Name(str):
    """The name of a queue, of which can be told whether somebody still holds it."""


class Deleted:
    """The queues port, as far as a batcher knows it."""

    def __init__(self) -> None:
        self.receipts: list[str] = []
        self.batches: list[int] = []

    async def delete(self, queue: str, receipts: Sequence[str]) -> None:
        """Keep the receipts."""
        self.receipts += receipts
        self.batches.append(len(receipts))


async def test_a_queue_that_is_done_is_forgotten() -> None:
    """A worker sees any number of runs: each would be kept for as long as it lives."""
    queues = Deleted()
    batcher = AckBatcher(cast(Queues, cast(Any, queues)), FakeClock())
    held = []
    for number in range(3):
        name = Name(f"run-{number}")
        for receipt in range(MAX_BATCH + 1):
            await batcher.add(name, f"{number}/{receipt}")
        await batcher.finish(name, f"{number}/last")
        held.append(weakref.ref(name))
        del name
    gc.collect()

    assert len(queues.receipts) == 3 * (MAX_BATCH + 2)
    assert [one() for one in held] == [None] * 3


async def test_acknowledgements_that_come_slowly_share_a_call() -> None:
    """Ten runs that share 50 slots end two tasks a second each."""
    queues, clock = Deleted(), FakeClock()
    batcher = AckBatcher(cast(Queues, cast(Any, queues)), clock)
    async with anyio.create_task_group() as group:
        group.start_soon(batcher.run)
        for receipt in range(3):
            await batcher.add("run", str(receipt))
            await clock.advance(LINGER / 4)
        assert queues.batches == []
        await clock.advance(LINGER / 4)
        assert queues.batches == [3]
        batcher.stop()


async def test_ten_slow_runs_cost_a_sixth_of_a_call_a_task() -> None:
    queues, clock = Deleted(), FakeClock()
    batcher = AckBatcher(cast(Queues, cast(Any, queues)), clock)
    async with anyio.create_task_group() as group:
        group.start_soon(batcher.run)
        for moment in range(120):
            for run in range(10):
                await batcher.add(f"run-{run}", f"{run}/{moment}")
            await clock.advance(0.5)
        batcher.stop()

    assert len(queues.receipts) == 1_200
    assert len(queues.batches) <= 1_200 / 6


async def test_a_stop_does_not_wait_for_more_acknowledgements() -> None:
    queues, clock = Deleted(), FakeClock()
    batcher = AckBatcher(cast(Queues, cast(Any, queues)), clock)
    async with anyio.create_task_group() as group:
        group.start_soon(batcher.run)
        await batcher.add("run", "first")
        await clock.advance(LINGER / 2)
        batcher.stop()

    assert queues.receipts == ["first"]
    assert clock.monotonic() < LINGER
