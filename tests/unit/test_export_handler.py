"""Making exports: in portions, within the limit, one at a time, and given up in order."""

from __future__ import annotations

import csv
import io
import json
import sys
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from conveyor.domain.errors import ConveyorError
from conveyor.handlers.export import BUSY_PAUSE, TRIES
from conveyor.ports.blobs import Content
from conveyor.ports.handler import ACKNOWLEDGE
from conveyor.ports.queues import DEAD_LETTER_QUEUE, ExportMessage
from tests.unit.export_world import (
    DAY,
    GIB,
    Gated,
    blob_of,
    handler,
    made,
    manifest,
    never,
    path_of,
    received,
    start,
    state,
)
from tests.unit.http_api import PAGE, Api, open_api, problem_of


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data") as opened:
        yield opened


async def test_a_run_that_is_under_way_exports_what_has_ended(api: Api) -> None:
    job = await api.submit(3)
    run_id = job["latest_run"]["run_id"]
    first, second, _ = await api.tasks_of(run_id)
    await api.succeed(job["job_id"], run_id, first.task_id)
    await api.claim(run_id, second.task_id)

    response = await made(api, job)

    with zipfile.ZipFile(io.BytesIO(response.content)) as archive:
        assert [row["status"] for row in manifest(archive)] == [
            "successful",
            "processing",
            "pending",
        ]
        assert len(archive.namelist()) == 3


async def test_bodies_that_are_lost_or_past_their_time_are_told_as_expired(api: Api) -> None:
    job = await api.submit(2, result_ttl_days=1)
    run_id = job["latest_run"]["run_id"]
    old, lost = await api.tasks_of(run_id)
    await api.succeed(job["job_id"], run_id, old.task_id)
    await api.clock.advance(DAY)
    await api.succeed(job["job_id"], run_id, lost.task_id)
    task = await api.binding.tasks.get_task(run_id, lost.task_id)
    assert task is not None
    assert task.result is not None
    await api.binding.blobs.delete(task.result.blob_key)

    response = await made(api, job)

    with zipfile.ZipFile(io.BytesIO(response.content)) as archive:
        assert [row["status"] for row in manifest(archive)] == ["expired", "expired"]
        assert archive.namelist() == ["index.html", "manifest.jsonl"]


@pytest.mark.parametrize("format_", ["jsonl", "csv", "zip"])
async def test_no_row_holds_a_part_of_a_body(api: Api, format_: str) -> None:
    job = await api.submit(2)
    run_id = job["latest_run"]["run_id"]
    cut, whole = await api.tasks_of(run_id)
    for task in (cut, whole):
        await api.succeed(job["job_id"], run_id, task.task_id)
    row = await api.binding.tasks.get_task(run_id, cut.task_id)
    assert row is not None
    assert row.result is not None
    await api.binding.blobs.put(row.result.blob_key, PAGE[:5])

    content = (await made(api, job, format=format_)).content
    if format_ == "zip":
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            rows = manifest(archive)
            assert len(archive.namelist()) == 3
    elif format_ == "csv":
        rows = list(csv.DictReader(io.StringIO(content.decode())))
    else:
        rows = [json.loads(line) for line in content.splitlines()]
    assert [one["status"] for one in rows] == ["expired", "successful"]
    assert not rows[0].get("size")
    assert not rows[0].get("body")


async def test_an_inherited_body_expires_with_its_source(api: Api) -> None:
    job = await api.submit(2, result_ttl_days=1)
    await api.drain(job, failing=1)
    await api.clock.advance(DAY / 2)
    response = await api.client.post(f"/v1/jobs/{job['job_id']}/rerun?status=failed")
    rerun = response.json()
    await api.succeed(job["job_id"], *await retried(api, rerun))
    await api.clock.advance(DAY / 2)

    found = await made(api, rerun)

    with zipfile.ZipFile(io.BytesIO(found.content)) as archive:
        assert [row["status"] for row in manifest(archive)] == ["successful", "expired"]


async def retried(api: Api, rerun: dict[str, Any]) -> tuple[str, str]:
    """The run of a rerun, and its one task that is worked again."""
    run_id = rerun["latest_run"]["run_id"]
    return run_id, (await api.tasks_of(run_id))[0].task_id


@pytest.mark.parametrize("limit", [3 * len(PAGE), 2 * len(PAGE)])
async def test_results_over_the_limit_fail_with_a_stable_error(api: Api, limit: int) -> None:
    job = await api.submit(3)
    await api.drain(job)
    export_id = await start(api, job)
    assert await handler(api, max_bytes=limit).handle(await received(api), never) == ACKNOWLEDGE

    export = await state(api, job, export_id)

    if limit == 3 * len(PAGE):
        assert export.status.value == "completed"
        return
    assert (export.status.value, export.error) == ("failed", "results are larger than 0 gb")
    assert export.download_url is None
    assert await blob_of(api, job, export_id) is None


async def test_the_limit_is_told_in_whole_gibibytes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conveyor.handlers.export._body_size", lambda task: 2 * GIB)
    job = await api.submit(2)
    await api.drain(job)
    export_id = await start(api, job)
    await handler(api, max_bytes=3 * GIB + 5).handle(await received(api), never)
    assert (await state(api, job, export_id)).error == "results are larger than 3 gb"


async def test_parquet_without_its_extra_is_refused_by_name(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await api.submit(1)
    export_id = await start(api, job, format="parquet")
    delivery = await received(api)
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "conveyor.handlers.export_parquet", raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    response = await api.client.post(path_of(job), params={"format": "parquet"})
    detail = problem_of(response, status=400, code="invalid_argument")["detail"]
    install = "pip install 'conveyor-batch[parquet]'"
    assert detail == f"format: parquet needs the extra parquet where the server runs: {install}"
    assert await handler(api).handle(delivery, never) == ACKNOWLEDGE
    export = await state(api, job, export_id)
    assert export.error == f"parquet needs the extra parquet where the worker runs: {install}"


async def test_one_export_is_made_at_a_time_and_none_twice(api: Api) -> None:
    job = await api.submit(2)
    await api.drain(job)
    blobs = Gated(api.binding.blobs)
    making = handler(api, blobs=blobs)
    first = await start(api, job)
    delivery = await received(api)
    second = await start(api, job)
    waiting = await received(api)

    async with anyio.create_task_group() as group:
        group.start_soon(making.handle, delivery, never)
        await blobs.reached.wait()
        await api.clock.advance(1)
        await making.renew()
        assert await making.handle(delivery, never) == ACKNOWLEDGE
        assert await making.handle(waiting, never) == ACKNOWLEDGE
        assert (await state(api, job, first)).status.value == "running"
        blobs.gate.set()

    assert (await state(api, job, first)).status.value == "completed"
    assert await making.handle(delivery, never) == ACKNOWLEDGE
    assert await blob_of(api, job, first) is not None
    assert (await state(api, job, second)).status.value == "pending"
    stood_back_at = api.clock.now()
    assert await api.binding.exports.unfinished_exports(before=stood_back_at) == []
    await api.clock.advance(BUSY_PAUSE)
    assert await making.handle(await received(api), never) == ACKNOWLEDGE
    assert (await state(api, job, second)).status.value == "completed"


@pytest.mark.parametrize("told_by", ["heartbeat", "end"])
async def test_an_export_of_a_deleted_run_stops_and_leaves_nothing(api: Api, told_by: str) -> None:
    job = await api.submit(2)
    await api.drain(job)
    blobs = Gated(api.binding.blobs)
    making = handler(api, blobs=blobs)
    export_id = await start(api, job)
    delivery = await received(api)

    async with anyio.create_task_group() as group:
        group.start_soon(making.handle, delivery, never)
        await blobs.reached.wait()
        await api.client.delete(f"/v1/jobs/{job['job_id']}")
        if told_by == "heartbeat":
            await making.renew()
        else:
            blobs.gate.set()

    assert await blob_of(api, job, export_id) is None
    assert list((api.directory / "blobs" / "tmp").iterdir()) == []
    problem_of(await api.client.post(path_of(job)), status=404, code="not_found")


async def test_an_export_whose_bytes_were_written_before_the_run_went_leaves_nothing(
    api: Api,
) -> None:
    """The heartbeat hears of it between the last byte and the end of the write."""
    job = await api.submit(1)
    await api.drain(job)
    export_id = await start(api, job)
    written = anyio.Event()

    class Slow(Gated):
        async def put(self, key: str, content: Content) -> int:
            """Store the bytes, and do not come back."""
            size = await super().put(key, content)
            written.set()
            await anyio.sleep_forever()
            return size

    slow = Slow(api.binding.blobs)
    slow.gate.set()
    making = handler(api, blobs=slow)
    delivery = await received(api)
    async with anyio.create_task_group() as group:
        group.start_soon(making.handle, delivery, never)
        with anyio.fail_after(30):
            await written.wait()
        assert await blob_of(api, job, export_id) is not None
        await api.client.delete(f"/v1/jobs/{job['job_id']}")
        await making.renew()

    assert await blob_of(api, job, export_id) is None


async def test_a_heartbeat_tells_that_an_export_is_being_made(api: Api) -> None:
    job = await api.submit(1)
    await api.drain(job)
    blobs = Gated(api.binding.blobs)
    making = handler(api, blobs=blobs)
    await start(api, job)
    delivery = await received(api)
    async with anyio.create_task_group() as group:
        group.start_soon(making.handle, delivery, never)
        await blobs.reached.wait()
        await api.clock.advance(100)
        before = api.clock.now()
        assert len(await api.binding.exports.unfinished_exports(before=before)) == 1
        await making.renew()
        assert await api.binding.exports.unfinished_exports(before=before) == []
        blobs.gate.set()


async def test_an_export_that_is_cancelled_can_be_made_again(api: Api) -> None:
    job = await api.submit(200)
    await api.drain(job)
    blobs = Gated(api.binding.blobs)
    making = handler(api, blobs=blobs)
    export_id = await start(api, job)
    delivery = await received(api)
    async with anyio.create_task_group() as group:
        group.start_soon(making.handle, delivery, never)
        await blobs.reached.wait()
        group.cancel_scope.cancel()
    assert (await state(api, job, export_id)).status.value == "running"
    assert list((api.directory / "blobs" / "tmp").iterdir()) == []

    blobs.gate.set()
    assert await making.handle(delivery, never) == ACKNOWLEDGE
    assert (await state(api, job, export_id)).status.value == "completed"


async def test_an_export_that_keeps_failing_is_given_up(api: Api) -> None:
    job = await api.submit(1)
    await api.drain(job)
    blobs = Gated(api.binding.blobs)
    blobs.gate.set()
    blobs.broken = True
    making = handler(api, blobs=blobs)
    export_id = await start(api, job)
    delivery = await received(api)

    for _ in range(TRIES - 1):
        with pytest.raises(ConveyorError):
            await making.handle(delivery, never)
        assert (await state(api, job, export_id)).status.value == "running"
    assert await making.handle(delivery, never) == ACKNOWLEDGE

    export = await state(api, job, export_id)
    reason = "result store: no"
    assert (export.status.value, export.error) == (
        "failed",
        f"the export could not be made: {reason}",
    )
    [letter] = await api.binding.queues.receive(DEAD_LETTER_QUEUE, limit=1, visibility=60)
    run_id = job["latest_run"]["run_id"]
    assert letter.message == ExportMessage(job["job_id"], run_id, export_id, reason=reason)
