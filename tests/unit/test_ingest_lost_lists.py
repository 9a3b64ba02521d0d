"""The ingest handler where what was staged is lost or damaged, and where it cannot go on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from conveyor.domain.model import RunFailure, RunStatus
from conveyor.handlers.ingest import HELD_PAUSE
from conveyor.ports.handler import ACKNOWLEDGE, Outcome
from conveyor.ports.ingestion import StagedRows
from conveyor.ports.queues import DEAD_LETTER_QUEUE
from conveyor.records.blob_keys import staged_key
from tests.unit.ingest_world import CHUNK, LINE, Ingestion, large_run
from tests.unit.wired_handlers import ingest_handler


@pytest.fixture
def anyio_backend() -> str:
    """The development binding belongs to asyncio."""
    return "asyncio"


@pytest.fixture
async def large(tmp_path: Path) -> AsyncIterator[Ingestion]:
    """A run of 30 tasks, staged in four chunks."""
    async with large_run(tmp_path) as ingestion:
        yield ingestion


@pytest.mark.parametrize(
    ("damage", "detail"),
    [
        (None, "a part of the staged list is missing"),
        (b'[["0000', "a part of the staged list is damaged"),
        (b"[]\n", "a part of the staged list is damaged"),
        (b'{"no": "list"}\n', "a part of the staged list is damaged"),
    ],
)
async def test_a_list_that_cannot_be_read_fails_the_run(
    large: Ingestion, damage: bytes | None, detail: str
) -> None:
    await _spoil(large, CHUNK, damage)

    assert await large.handle() == ACKNOWLEDGE

    run = await large.run()
    assert (run.status, run.failure_reason) == (RunStatus.FAILED, RunFailure.INGEST_FAILED)
    assert (run.failure_detail, run.stats.total, run.ingesting) == (detail, CHUNK, False)
    [dead] = await large.binding.queues.receive(DEAD_LETTER_QUEUE, limit=10, visibility=60)
    assert dead.message == msgspec.structs.replace(large.message, reason=detail)
    assert await large.staged() == 0


@pytest.mark.parametrize("damage", [None, b'[["0000'])
async def test_a_chunk_of_which_some_rows_are_written_is_still_needed(
    large: Ingestion, damage: bytes | None
) -> None:
    rows = StagedRows(0, LINE, large.line(0, LINE))
    await large.binding.ingestion.write_rows(large.run_id, rows, now=0)
    await _spoil(large, 0, damage)

    assert await large.handle() == ACKNOWLEDGE

    run = await large.run()
    assert (run.status, run.failure_reason) == (RunStatus.FAILED, RunFailure.INGEST_FAILED)
    assert (run.stats.total, run.ingesting) == (LINE, False)


@pytest.mark.parametrize("damage", [None, b'[["0000'])
@pytest.mark.parametrize("written", [CHUNK, 30])
async def test_a_chunk_whose_rows_are_all_written_is_needed_no_more(
    large: Ingestion, written: int, damage: bytes | None
) -> None:
    for first in range(0, written, LINE):
        end = min(first + LINE, written)
        rows = StagedRows(first, end - first, large.line(first, end))
        await large.binding.ingestion.write_rows(large.run_id, rows, now=0)
    for first in range(0, written, CHUNK):
        await _spoil(large, first, damage)

    assert await large.handle() == ACKNOWLEDGE

    run = await large.run()
    assert (run.status, run.stats.total, run.ingesting) == (RunStatus.RUNNING, 30, False)
    assert await large.indexes() == list(range(30))
    assert await large.staged() == 0


async def test_one_that_could_not_go_on_looks_again_after_a_pause(large: Ingestion) -> None:
    ingestion = large.binding.ingestion

    class Refusing:
        """The port, which takes no rows."""

        def __getattr__(self, name: str) -> object:
            return getattr(ingestion, name)

        async def write_rows(self, run_id: str, rows: StagedRows, *, now: int) -> bool:
            """Nothing is written, as if the run had done with ingesting for a moment."""
            return False

    handler = ingest_handler(large.binding, large.clock)
    handler._ingestion = Refusing()  # type: ignore[assignment]

    assert await handler.handle(large.delivery, lambda: None) == Outcome(hide_for=HELD_PAUSE)
    assert (await large.run()).ingesting


async def _spoil(large: Ingestion, first: int, damage: bytes | None) -> None:
    """Remove a staged chunk, or put something else in its place."""
    key = staged_key(large.job_id, large.run_id, first)
    await large.binding.blobs.delete(key)
    if damage is not None:
        await large.binding.blobs.put(key, damage)
