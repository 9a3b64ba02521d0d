"""Removal by a sweep after the retention: exports, slots, bodies and rows."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import RunStatus
from conveyor.domain.scheduling import FireRecord
from conveyor.handlers import sweep as sweep_retention
from conveyor.ports.deliveries import DeliveryFilter
from conveyor.ports.exports import Export, ExportFormat, ExportStatus
from conveyor.ports.queues import DeleteMessage, ExportMessage
from conveyor.records.blob_keys import export_key, input_key, run_prefix
from tests.conformance.bindings import Store
from tests.conformance.scheduled_jobs import note, note_fires, read_job, schedule_job
from tests.conformance.sent_deliveries import DELIVERED, attempt, owe
from tests.conformance.world import CALLER, World, all_ended
from tests.unit.http_api import Api, open_api
from tests.unit.sweep_world import (
    DAY,
    DELIVERY_DAYS,
    FIRE_DAYS,
    INTERVAL,
    QUIET,
    ROW_DAYS,
    run_id_of,
    slot_of,
    sweep_over,
)


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


@pytest.mark.guarantee("G19")
async def test_an_unfinished_export_is_sent_again_and_an_expired_one_goes(api: Api) -> None:
    job = await api.submit(1)
    export = await _export(api, job, expires_in=3 * QUIET)
    key = export_key(export.job_id, export.run_id, export.export_id)
    await api.binding.blobs.put(key, b"zip")
    sweep, another = sweep_over(api), sweep_over(api)
    await sweep.look(after=QUIET + 1)
    await another.look()
    await sweep.look()
    message = ExportMessage(export.job_id, export.run_id, export.export_id)
    assert (sweep.outbox.sent, another.outbox.sent) == ([message], [])
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


async def test_what_expires_right_after_a_look_goes_within_an_hour_of_sweeps(api: Api) -> None:
    job = await api.submit(1, result_ttl_days=2)
    [task] = await api.drain(job)
    assert task.result is not None
    sweep = sweep_over(api)
    await sweep.look(after=2 * DAY - 60)
    sweeps = 0
    while await api.binding.blobs.open(task.result.blob_key) is not None:
        await sweep.look()
        sweeps += 1
        assert sweeps * INTERVAL <= 3_600 + 60


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
    [ended] = await all_ended(api.binding, api.clock.now())
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


async def test_a_queue_that_outlived_its_run_goes_once(api: Api) -> None:
    ended, stopped, paused, live = [await api.submit(1, result_ttl_days=9) for _ in range(4)]
    await api.drain(ended)
    await api.client.post(f"/v1/jobs/{stopped['job_id']}/stop")
    await api.client.post(f"/v1/jobs/{paused['job_id']}/pause")
    workers = [sweep_over(api, row_days=0) for _ in range(2)]
    await workers[0].look(after=3_600 - INTERVAL)  # an hour after the end
    assert workers[0].outbox.dropped == []
    for _ in range(3):
        for worker in workers:
            await worker.look(after=sweep_retention.INTERVAL)
    assert workers[0].outbox.dropped == [run_id_of(ended), run_id_of(stopped)]
    assert workers[1].outbox.dropped == []
    for job in (paused, live):
        run = await api.run_of(job["job_id"])
        assert run is not None
        assert run.status is RunStatus.RUNNING


async def test_a_queue_that_cannot_be_dropped_stops_nothing_and_is_tried_again(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = [await api.submit(1, result_ttl_days=1) for _ in range(2)]
    keys = [task.result.blob_key for job in jobs for task in await api.drain(job) if task.result]
    runs = [run_id_of(job) for job in jobs]
    sweep = sweep_over(api)
    sweep.outbox.away = True
    await sweep.look(after=2 * DAY)
    assert sweep.outbox.dropped == runs
    assert [key for key in keys if await api.binding.blobs.open(key) is not None] == []
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage() for record in warnings] == [
        "dropping the queue of an ended run failed: unavailable: away"
    ] * 2
    sweep.outbox.away = False
    for _ in range(2):
        await sweep.look(after=sweep_retention.INTERVAL)
    assert sweep.outbox.dropped == runs * 2


async def _kept(api: Api) -> set[str]:
    found = await api.binding.deliveries.list_deliveries(DeliveryFilter(caller=CALLER), limit=1_000)
    return {delivery.delivery_id for delivery in found}


async def test_old_deliveries_go_unless_they_are_pending(api: Api) -> None:
    world = World(cast(Store, api.binding), api.clock)
    pending = await owe(world)
    for _ in range(sweep_retention.PAGE + 1):
        await attempt(world, await owe(world), DELIVERED)
    sweep = sweep_over(api)
    await sweep.look(after=DELIVERY_DAYS * DAY)
    young = await attempt(world, await owe(world), DELIVERED)
    assert len(await _kept(api)) == sweep_retention.PAGE + 3  # they are not older than that
    await sweep.look()
    assert await _kept(api) == {pending.delivery_id, young.delivery_id}


async def test_old_fires_go_and_their_job_stays(api: Api) -> None:
    world = World(cast(Store, api.binding), api.clock)
    job = await schedule_job(world)
    await note_fires(world, job.job_id, *[note(world) for _ in range(sweep_retention.PAGE + 1)])

    async def kept() -> list[FireRecord]:
        return await api.binding.schedules.list_fires(job.job_id, before=None, limit=1_000)

    sweep = sweep_over(api)
    await sweep.look(after=FIRE_DAYS * DAY)
    young = note(world)
    await note_fires(world, job.job_id, young)
    assert len(await kept()) == sweep_retention.PAGE + 2
    await sweep.look()
    assert await kept() == [young]
    assert (await read_job(world, job.job_id)).scheduling is not None


async def test_old_deliveries_that_take_long_are_left_to_the_next_sweep(api: Api) -> None:
    world = World(cast(Store, api.binding), api.clock)
    for _ in range(2 * sweep_retention.PAGE):
        await attempt(world, await owe(world), DELIVERED)

    class Slow:
        async def drop_old_deliveries(self, *, before: int, limit: int) -> int:
            await api.clock.advance(INTERVAL)
            return await api.binding.deliveries.drop_old_deliveries(before=before, limit=limit)

    sweep = sweep_over(api, deliveries=Slow())
    await sweep.look(after=DELIVERY_DAYS * DAY + 1)
    assert len(await _kept(api)) == sweep_retention.PAGE
    await sweep.look()
    assert await _kept(api) == set()


async def test_deliveries_that_cannot_be_removed_hold_up_nothing(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(cast(Store, api.binding), api.clock)
    job = await schedule_job(world)
    await note_fires(world, job.job_id, note(world))

    class Away:
        async def drop_old_deliveries(self, *, before: int, limit: int) -> int:
            raise ConveyorError(ErrorCode.UNAVAILABLE, "away")

    await sweep_over(api, deliveries=Away()).look(after=FIRE_DAYS * DAY + 1)
    assert "sweeping old deliveries failed: unavailable: away" in caplog.text
    assert await api.binding.schedules.list_fires(job.job_id, before=None, limit=10) == []
