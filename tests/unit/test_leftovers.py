"""The files that a killed process left in the blob store are found and removed at the next boot."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from conveyor.dev.binding import open_binding
from conveyor.domain.model import Ingest, IngestStatus, Job, JobStatus, Run, RunStats, RunStatus
from conveyor.ports.binding import Binding
from conveyor.ports.inputs import InputType, JobInput
from conveyor.ports.queues import CONTROL_QUEUE, DeleteMessage, IngestMessage, Message
from conveyor.ports.records import StoredResponse
from conveyor.records.blob_keys import export_key, input_key, result_key, staged_key
from conveyor.testing.clock import FakeClock


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def _reopened(directory: Path, clock: FakeClock) -> tuple[Binding, list[Message]]:
    """The binding of the next boot, and the control messages that it sent itself."""
    dev = await open_binding(directory, clock)
    found = await dev.queues.receive(CONTROL_QUEUE, limit=10, visibility=1.0)
    return dev.ports, [delivery.message for delivery in found]


async def _large_job(binding: Binding, clock: FakeClock, *, status: IngestStatus) -> Run:
    now = clock.now()
    job = Job(
        job_id=clock.new_id(),
        caller="caller",
        status=JobStatus.CLOSED,
        created_at=now,
        updated_at=now,
        run_count=1,
    )
    run = Run(
        run_id=clock.new_id(),
        job_id=job.job_id,
        run_sequence=1,
        status=RunStatus.RUNNING,
        created_at=now,
        updated_at=now,
        next_index=1,
        stats=RunStats(total=1),
        ingest=Ingest(status=status, end=1, chunks=(0,)),
    )
    job = msgspec.structs.replace(job, latest_run_id=run.run_id)
    await binding.jobs.create_job(job, run, [], answer=StoredResponse(202, b"{}"), once=None)
    await binding.blobs.put(staged_key(run.job_id, run.run_id, 0), b"[]\n")
    return run


async def test_whatever_lies_under_a_run_that_does_not_exist_is_scrubbed(tmp_path: Path) -> None:
    clock = FakeClock()
    first = await open_binding(tmp_path, clock)
    runs = [(clock.new_id(), clock.new_id()) for _ in range(3)]
    results, staged, exported = runs
    blobs = first.ports.blobs
    await blobs.put(result_key(*results, "0" * 26, 1, 30), b"left behind")
    await blobs.put(staged_key(*staged, 0), b"left behind")
    await blobs.put(export_key(*exported, clock.new_id()), b"left behind")
    await first.ports.aclose()

    second, messages = await _reopened(tmp_path, clock)
    assert messages == [DeleteMessage(job_id, run_id) for job_id, run_id in runs]
    await second.aclose()


@pytest.mark.parametrize("clock_set_back", [0, 3_600])
async def test_a_staged_list_stays_until_it_is_ingested(
    tmp_path: Path, clock_set_back: int
) -> None:
    clock = FakeClock()
    first = await open_binding(tmp_path, clock)
    waiting = await _large_job(first.ports, clock, status=IngestStatus.PENDING)
    used_up = await _large_job(first.ports, clock, status=IngestStatus.DONE)
    await first.ports.aclose()

    clock.shift(-clock_set_back)
    second, messages = await _reopened(tmp_path, clock)
    assert not any(isinstance(message, DeleteMessage) for message in messages)
    if not clock_set_back:
        assert messages == [IngestMessage(waiting.job_id, waiting.run_id)]
    assert await second.blobs.open(staged_key(waiting.job_id, waiting.run_id, 0)) is not None
    assert await second.blobs.open(staged_key(used_up.job_id, used_up.run_id, 0)) is None
    await second.aclose()


async def test_an_upload_without_a_slot_is_removed(tmp_path: Path) -> None:
    clock = FakeClock()
    first = await open_binding(tmp_path, clock)
    now = clock.now()
    slot = JobInput(
        input_id=clock.new_id(),
        caller="caller",
        type=InputType.URLS,
        content_type="text/plain",
        created_at=now,
        upload_until=now + 1,
        expires_at=now + 1,
    )
    await first.ports.inputs.create_input(slot)
    nobodys = clock.new_id()
    for input_id in (slot.input_id, nobodys):
        await first.ports.blobs.put(input_key(input_id), b"https://site.test/")
    await first.ports.aclose()

    second, _ = await _reopened(tmp_path, clock)
    assert await second.blobs.open(input_key(slot.input_id)) is not None
    assert await second.blobs.open(input_key(nobodys)) is None
    await second.aclose()
