"""An archive is made beside the event loop, bit by bit, and given up when nobody wants it."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Generator, Iterable

import anyio
import pytest

from conveyor.domain.export_rows import Exported
from conveyor.handlers.export_writers import BLOCK, archive
from tests.unit.test_export_formats import row

PORTIONS = 6


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Broken(Exception):
    """The error that a source raises."""


class Source:
    """Portions of two rows; `given` counts them, `gate` holds up those after the first."""

    def __init__(self, *, error: Exception | None = None) -> None:
        self.given = 0
        self.gate = anyio.Event()
        self.error = error

    async def portions(self) -> AsyncIterator[list[Exported]]:
        for number in range(PORTIONS):
            if number:
                await self.gate.wait()
                if self.error is not None:
                    raise self.error
            self.given += 1
            yield [row(2 * number, b"a"), row(2 * number + 1, b"b")]


class Writer:
    """A block for each row; notes the threads it runs on, and that it was closed."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.closed = False

    def __call__(self, rows: Iterable[Exported]) -> Generator[bytes, None, None]:
        try:
            for _ in rows:
                self.threads.add(threading.get_ident())
                yield bytes(BLOCK)
        finally:
            self.closed = True


async def test_rows_become_blocks_on_another_thread_as_they_come() -> None:
    source, writer = Source(), Writer()
    blocks = archive(writer, source.portions())

    assert len(await anext(blocks)) == len(await anext(blocks)) == BLOCK
    assert source.given == 1
    source.gate.set()
    assert [len(block) async for block in blocks] == [BLOCK] * (2 * PORTIONS - 2)
    assert source.given == PORTIONS
    assert threading.get_ident() not in writer.threads
    assert writer.closed


async def test_what_the_source_raises_ends_the_archive() -> None:
    source, writer = Source(error=Broken()), Writer()
    source.gate.set()
    with pytest.raises(Broken):
        [block async for block in archive(writer, source.portions())]
    assert writer.closed


async def test_an_archive_that_waits_for_rows_can_be_cancelled() -> None:
    source, writer = Source(), Writer()
    blocks = archive(writer, source.portions())
    await anext(blocks)
    await anext(blocks)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(anext, blocks)
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
    assert scope.cancelled_caught
    await blocks.aclose()
    assert writer.closed
    assert source.given == 1
