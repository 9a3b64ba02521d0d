"""What a sweep removes once its time is over: exports, slots, bodies and rows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from conveyor.domain.model import RunStatus
from conveyor.handlers import sweep_retention
from conveyor.ports.blobs import export_key, input_key, run_prefix
from conveyor.ports.exports import Export, ExportFormat, ExportStatus
from conveyor.ports.queues import DeleteMessage, ExportMessage
from tests.unit.http_api import Api, open_api
from tests.unit.sweep_world import DAY, QUIET, ROW_DAYS, run_id_of, slot_of, sweep_over


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Api]:
    async with open_api(tmp_path) as api:
        yield api


async def _export(api: Api, job: dict[str, Any], *, expires_in: float) -> Export:
    now = api.clock.now()
    export = Export(
        export_id=api.clock.new_id(),
        job_id=job["job_id"],
        run_id=run_id_of(job),
        format=ExportFormat.ZIP,
        status=ExportStatus.PENDING,
        created_at=now,
        updated_at=now,
        expires_at=now + round(expires_in * 1_000),
    )
    await api.binding.exports.create_export(export)
    return export


async def test_an_unfinished_export_is_sent_again_and_an_expired_one_goes(api: Api) -> None:
    job = await api.submit(1)
    export = await _export(api, job, expires_in=3 * QUIET)
    key = export_key(export.job_id, export.run_id, export.export_id)
    await api.binding.blobs.put(key, b"zip")
    sweep = sweep_over(api)
    await sweep.look(after=QUIET + 1)
    await sweep.look()
    assert sweep.outbox.sent == [ExportMessage(export.job_id, export.run_id, export.export_id)]
    assert await api.binding.blobs.open(key) is not None
    await sweep.look(after=3 * QUIET)
    assert await api.binding.blobs.open(key) is None
    assert await api.binding.exports.get_export(export.export_id) is None


async def test_expired_slots_go_with_their_files_and_others_stay(api: Api) -> None:
    expired = [await slot_of(api, lives=10) for _ in range(3)]
    kept = await slot_of(api, lives=1_000)
    sweep = sweep_over(api)
    await sweep.look()
    for input_id in expired:
        assert await api.binding.inputs.get_input(input_id) is None
        assert await api.binding.blobs.open(input_key(input_id)) is None
    assert await api.binding.inputs.get_input(kept) is not None
    assert await api.binding.blobs.open(input_key(kept)) is not None


async def test_bodies_go_with_their_results_and_rows_a_retention_later(api: Api) -> None:
    job = await api.submit(3, result_ttl_days=2)
    job_id, run_id = job["job_id"], run_id_of(job)
    keys = [task.result.blob_key for task in await api.drain(job) if task.result is not None]
    late = run_prefix(job_id, run_id, 400) + "late"
    await api.binding.blobs.put(late, b"of another class")
    sweep = sweep_over(api)
    await sweep.look(after=2 * DAY - 60)
    assert await api.binding.blobs.open(keys[0]) is not None
    await sweep.look(after=sweep_retention.INTERVAL)
    assert [key for key in [*keys, late] if await api.binding.blobs.open(key) is not None] == []
    assert len(await api.tasks_of(run_id)) == 3
    [ended] = await api.binding.sweeping.ended_runs(before=api.clock.now(), after="", limit=9)
    assert ended.swept
    await sweep.look(after=ROW_DAYS * DAY - 2 * sweep_retention.INTERVAL)
    assert sweep.outbox.sent == []
    await sweep.look(after=2 * sweep_retention.INTERVAL)
    assert sweep.outbox.sent == [DeleteMessage(job_id, run_id)]
    run = await api.binding.runs.get_run(
        api.service.identify("key-of-alice").caller_id, job_id, run_id
    )
    assert run is not None
    assert run.status is RunStatus.DELETED


async def test_rows_are_kept_for_ever_where_the_setting_says_so(api: Api) -> None:
    job = await api.submit(1, result_ttl_days=1)
    await api.drain(job)
    sweep = sweep_over(api, row_days=0)
    await sweep.look(after=400 * DAY)
    await sweep.look(after=400 * DAY)
    assert sweep.outbox.sent == []
    assert len(await api.tasks_of(run_id_of(job))) == 1
