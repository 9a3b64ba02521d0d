"""The files that a killed process left in the blob store are found and removed at the next boot."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from conveyor.dev.binding import open_binding
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import Ingest, IngestStatus, Job, JobStatus, Run, RunStats, RunStatus
from conveyor.ports.binding import Binding
from conveyor.ports.exports import Export, ExportFormat, ExportStatus
from conveyor.ports.handler import ACKNOWLEDGE
from conveyor.ports.inputs import InputType, JobInput
from conveyor.ports.queues import CONTROL_QUEUE, DeleteMessage, Delivery, IngestMessage, Message
from conveyor.ports.records import StoredResponse
from conveyor.records.blob_keys import export_key, input_key, result_key, staged_key
from conveyor.testing.clock import FakeClock
from tests.conformance.world import World
from tests.disk import body_files
from tests.unit.wired_handlers import delete_handler


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


async def _work_off(binding: Binding, clock: FakeClock, messages: list[Message]) -> None:
    handler = delete_handler(binding, clock, visibility=60.0)
    for message in messages:
        delivery = Delivery(CONTROL_QUEUE, message, "receipt", 1)
        assert await handler.handle(delivery, lambda: None) == ACKNOWLEDGE


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
    assert len(body_files(tmp_path)) == len(runs)
    await _work_off(second, clock, messages)
    assert body_files(tmp_path) == []
    await second.aclose()


async def test_files_that_are_not_of_this_program_are_left_alone(tmp_path: Path) -> None:
    clock = FakeClock()
    first = await open_binding(tmp_path, clock)
    await first.ports.aclose()
    strange = ("results/30/a job/a run", "staged/a/b", "exports/a/b/c", "inputs/note here.txt")
    for name in strange:
        path = tmp_path / "blobs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("somebody's own")
    second, messages = await _reopened(tmp_path, clock)
    assert (messages, len(body_files(tmp_path))) == ([], len(strange))
    await second.aclose()


async def test_the_body_of_a_call_that_was_never_settled_is_removed(tmp_path: Path) -> None:
    clock = FakeClock()
    first = await open_binding(tmp_path, clock)
    world = World(first.store, clock)
    job_id, run_id = await world.submit(2, result_ttl_days=31)
    stored = [await world.claimed(run_id, index) for index in range(2)]
    keys = [result_key(job_id, run_id, task.task_id, task.claim_number, 90) for task in stored]
    for key in keys:
        await first.ports.blobs.put(key, b"a body")
    await world.settle(stored[0], world.success(stored[0]))
    await first.ports.aclose()

    second, messages = await _reopened(tmp_path, clock)
    assert messages == []
    assert await second.blobs.size(keys[0]) == len(b"a body")
    assert await second.blobs.size(keys[1]) is None
    await second.aclose()


async def test_an_export_without_a_record_is_removed(tmp_path: Path) -> None:
    clock = FakeClock()
    first = await open_binding(tmp_path, clock)
    job_id, run_id = await World(first.store, clock).submit(1)
    now = clock.now()
    kept, gone = (
        Export(
            export_id=clock.new_id(),
            job_id=job_id,
            run_id=run_id,
            format=ExportFormat.ZIP,
            status=ExportStatus.PENDING,
            created_at=now,
            updated_at=now,
            expires_at=now + 1_000,
        )
        for _ in range(2)
    )
    await first.ports.exports.create_export(kept)
    for export in (kept, gone):
        await first.ports.blobs.put(export_key(job_id, run_id, export.export_id), b"rows")
    await first.ports.aclose()

    second, _ = await _reopened(tmp_path, clock)
    assert [path.name for path in body_files(tmp_path)] == [kept.export_id]
    await second.aclose()


@pytest.mark.parametrize("loss", ["missing", "empty", "empty beside its log", "without a table"])
@pytest.mark.parametrize("kind", ["results", "staged", "inputs", "exports"])
async def test_bodies_without_their_database_are_refused_and_kept(
    tmp_path: Path, loss: str, kind: str
) -> None:
    clock = FakeClock()
    first = await open_binding(tmp_path, clock)
    await first.ports.aclose()
    body = tmp_path / "blobs" / kind / "anything"
    body.parent.mkdir(parents=True, exist_ok=True)
    database, log = tmp_path / "conveyor.db", tmp_path / "conveyor.db-wal"
    database.unlink()
    if loss == "without a table":
        with closing(sqlite3.connect(database)) as connection:
            connection.execute("VACUUM")
            connection.execute("PRAGMA application_id = 1")
    elif loss != "missing":
        database.touch()
    if loss == "empty beside its log":
        log.write_bytes(b"all that is left")
    body.write_bytes(b"precious")

    for _ in range(2):
        with pytest.raises(ConveyorError) as refused:
            await open_binding(tmp_path, clock)
        assert refused.value.code is ErrorCode.UNAVAILABLE
        assert "\n" not in refused.value.detail
        for word in (str(tmp_path), "conveyor.db", "put conveyor.db back", "move the directory"):
            assert word in refused.value.detail
    assert body.read_bytes() == b"precious"
    assert log.exists() is (loss == "empty beside its log")


async def test_a_log_without_its_database_is_refused_and_kept(tmp_path: Path) -> None:
    """SQLite would remove it, and with it what a killed process had committed."""
    clock = FakeClock()
    first = await open_binding(tmp_path, clock)
    await first.ports.aclose()
    (tmp_path / "conveyor.db").unlink()
    log = tmp_path / "conveyor.db-wal"
    log.write_bytes(b"all that is left")
    with pytest.raises(ConveyorError, match="put conveyor.db back"):
        await open_binding(tmp_path, clock)
    assert log.read_bytes() == b"all that is left"


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
