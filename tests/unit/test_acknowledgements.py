"""Acknowledgements in batches: what a batcher forgets."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any, cast

import pytest

from conveyor.engine.delivery import AckBatcher
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

    async def delete(self, queue: str, receipts: Sequence[str]) -> None:
        """Keep the receipts."""
        self.receipts += receipts


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
