"""Opening a data directory takes up the work of an earlier process."""

from __future__ import annotations

from pathlib import Path

import pytest

from conveyor.dev.binding import open_binding
from conveyor.domain.errors import ConveyorError
from conveyor.ports.queues import CONTROL_QUEUE, DeleteMessage
from conveyor.records.blob_keys import result_key
from conveyor.testing.clock import FakeClock


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_bodies_of_no_run_are_scrubbed_after_a_restart(tmp_path: Path) -> None:
    clock = FakeClock()
    job_id, run_id, task_id = clock.new_id(), clock.new_id(), "0" * 26
    first = await open_binding(tmp_path, clock)
    await first.ports.blobs.put(result_key(job_id, run_id, task_id, 1, 30), b"left behind")
    await first.ports.aclose()

    second = await open_binding(tmp_path, clock)
    [delivery] = await second.queues.receive(CONTROL_QUEUE, limit=10, visibility=1.0)
    assert delivery.message == DeleteMessage(job_id, run_id)
    await second.ports.aclose()


async def test_a_damaged_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "conveyor.db").write_bytes(b"no database at all" * 500)
    with pytest.raises(ConveyorError, match=str(tmp_path)):
        await open_binding(tmp_path, FakeClock())
    # The directory is free again.
    (tmp_path / "conveyor.db").unlink()
    again = await open_binding(tmp_path, FakeClock())
    await again.ports.aclose()
