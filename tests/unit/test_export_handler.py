"""Making exports: in portions, within the limit, given up in order, and over HTTP to the end."""

from __future__ import annotations

import io
import json
import sys
import zipfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx
import pytest
from zenrows.batch.models import Export as ClientExport
from zenrows.batch.models import StartExportResponse

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.handlers.export import BUSY_PAUSE, TRIES, ExportHandler
from conveyor.ports.binding import Binding
from conveyor.ports.blobs import Blobs, Content, export_key
from conveyor.ports.queues import CONTROL_QUEUE, DEAD_LETTER_QUEUE, Delivery, ExportMessage
from conveyor.ports.work import ACKNOWLEDGE
from tests.unit.http_api import PAGE, Api, open_api, problem_of

GIB = 1 << 30
DAY = 86_400.0
NOWHERE = "01ARZ3NDEKTSV4RRFFQ69G5FAV"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data") as opened:
        yield opened


class Gated:
    """The blobs of a binding: opens of bodies wait for `gate`, and break where that is asked."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self.gate = anyio.Event()
        self.reached = anyio.Event()
        self.broken = False

    async def open(self, key: str) -> AsyncIterator[bytes] | None:
        """A body, once the gate is open."""
        self.reached.set()
        await self.gate.wait()
        if self.broken:
            raise ConveyorError(ErrorCode.UNAVAILABLE, "result store: no")
        return await self._blobs.open(key)

    async def put(self, key: str, content: Content) -> int:
        """As it is."""
        return await self._blobs.put(key, content)

    async def delete(self, key: str) -> None:
        """As it is."""
        await self._blobs.delete(key)

    async def delete_prefix(self, prefix: str, *, limit: int | None = None) -> int:
        """As it is."""
        return await self._blobs.delete_prefix(prefix, limit=limit)

    async def size(self, key: str) -> int | None:
        """As it is."""
        return await self._blobs.size(key)

    async def upload_link(self, key: str, *, content_type: str, seconds: int) -> str | None:
        """As it is."""
        return await self._blobs.upload_link(key, content_type=content_type, seconds=seconds)

    async def download_link(self, key: str, *, seconds: int, file_name: str) -> str | None:
        """As it is."""
        return await self._blobs.download_link(key, seconds=seconds, file_name=file_name)


def handler(api: Api, *, max_bytes: int = 100 * GIB, blobs: Gated | None = None) -> ExportHandler:
    """A handler over an API's binding."""
    binding: Binding = api.binding if blobs is None else replace(api.binding, blobs=blobs)
    return ExportHandler(binding, api.clock, max_bytes=max_bytes)


def never() -> None:
    """Nothing is throttled here."""
    raise AssertionError("throttled")


async def received(api: Api) -> Delivery:
    """The next control message."""
    [delivery] = await api.binding.queues.receive(CONTROL_QUEUE, limit=1, visibility=60)
    assert isinstance(delivery.message, ExportMessage)
    return delivery


def path_of(job: dict[str, Any]) -> str:
    """Where exports of a job's latest run are asked for."""
    return f"/v1/jobs/{job['job_id']}/runs/{job['latest_run']['run_id']}/exports"


async def start(api: Api, job: dict[str, Any], **params: str) -> str:
    """Ask for an export; its id."""
    response = await api.client.post(path_of(job), params=params)
    assert response.status_code == 202, response.text
    started = StartExportResponse.model_validate(response.json())
    assert started.status.value == "pending"
    return started.export_id


async def state(api: Api, job: dict[str, Any], export_id: str) -> ClientExport:
    """How far an export is."""
    response = await api.client.get(f"{path_of(job)}/{export_id}")
    assert response.status_code == 200, response.text
    return ClientExport.model_validate(response.json())


async def made(api: Api, job: dict[str, Any], **params: str) -> httpx.Response:
    """An export, asked for, made and fetched by whoever holds its link."""
    export_id = await start(api, job, **params)
    assert await handler(api).handle(await received(api), never) == ACKNOWLEDGE
    export = await state(api, job, export_id)
    assert (export.status.value, export.error) == ("completed", None)
    response = await api.bare.get(str(export.download_url))
    assert response.status_code == 200, response.text
    return response


def manifest(archive: zipfile.ZipFile) -> list[dict[str, Any]]:
    """The rows that an archive tells of."""
    return [json.loads(line) for line in archive.read("manifest.jsonl").splitlines()]


async def test_an_export_is_asked_for_made_and_fetched(api: Api) -> None:
    job = await api.submit(300)
    await api.drain(job, failing=2)

    response = await made(api, job)

    headers = response.headers
    assert headers["Content-Type"] == "application/zip"
    assert headers["Content-Length"] == str(len(response.content))
    run_id = job["latest_run"]["run_id"]
    assert headers["Content-Disposition"] == f'attachment; filename="{run_id}.zip"'
    assert headers["X-Content-Type-Options"] == "nosniff"
    with zipfile.ZipFile(io.BytesIO(response.content)) as archive:
        rows = manifest(archive)
        assert [row["status"] for row in rows] == ["failed"] * 2 + ["successful"] * 298
        assert {archive.read(row["file"]) for row in rows[2:]} == {PAGE}


@pytest.mark.parametrize(
    ("word", "media_type", "start_of_file"),
    [
        ("zip", "application/zip", b"PK\x03\x04"),
        ("jsonl", "application/x-ndjson", b'{"task_id":"'),
        ("csv", "text/csv; charset=utf-8", b"task_id,"),
        ("parquet", "application/vnd.apache.parquet", b"PAR1"),
    ],
)
async def test_every_format_is_made(
    api: Api, word: str, media_type: str, start_of_file: bytes
) -> None:
    job = await api.submit(3)
    await api.drain(job)
    response = await made(api, job, format=word)
    assert response.headers["Content-Type"] == media_type
    assert response.content.startswith(start_of_file)


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
        assert len(archive.namelist()) == 2


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
        assert archive.namelist() == ["manifest.jsonl"]


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
    monkeypatch.setattr("conveyor.handlers.export_source._body_size", lambda task: 2 * GIB)
    job = await api.submit(2)
    await api.drain(job)
    export_id = await start(api, job)
    await handler(api, max_bytes=3 * GIB + 5).handle(await received(api), never)
    assert (await state(api, job, export_id)).error == "results are larger than 3 gb"


async def blob_of(api: Api, job: dict[str, Any], export_id: str) -> AsyncIterator[bytes] | None:
    """The bytes of an export."""
    key = export_key(job["job_id"], job["latest_run"]["run_id"], export_id)
    return await api.binding.blobs.open(key)


async def test_a_link_opens_its_export_alone_and_for_its_time(api: Api) -> None:
    job = await api.submit(1)
    await api.drain(job)
    await made(api, job)
    first = await start(api, job)
    await handler(api).handle(await received(api), never)
    link = str((await state(api, job, first)).download_url)
    other = await start(api, job)

    for wrong in (link[:-1] + ("0" if link[-1] != "0" else "1"), link.replace(first, other)):
        problem_of(await api.bare.get(wrong), status=403, code="permission_denied")
    url = urlsplit(link)
    problem_of(await api.bare.get(url.path), status=403, code="permission_denied")
    problem_of(await api.bare.get("/v1/exports/x/y/z"), status=404, code="not_found")
    head = await api.bare.head(link)
    assert (head.status_code, head.content) == (200, b"")
    assert int(head.headers["Content-Length"]) > 0
    await api.clock.advance(7_201)
    problem_of(await api.bare.get(link), status=403, code="permission_denied")
    fresh = str((await state(api, job, first)).download_url)
    assert fresh != link
    assert (await api.bare.get(fresh)).status_code == 200


async def test_an_export_is_not_found_after_its_time(api: Api) -> None:
    job = await api.submit(1)
    await api.drain(job)
    export_id = await start(api, job)
    await handler(api).handle(await received(api), never)
    await api.clock.advance(43_199)
    link = str((await state(api, job, export_id)).download_url)
    assert (await api.bare.get(link)).status_code == 200
    await api.clock.advance(1)
    gone = await api.client.get(f"{path_of(job)}/{export_id}")
    problem_of(gone, status=404, code="not_found")
    assert (await api.bare.get(link)).status_code in (403, 404)


async def test_what_is_asked_wrongly_is_refused(api: Api) -> None:
    job = await api.submit(1)
    path = path_of(job)
    problem_of(await api.client.post(f"{path}?format=tar"), status=400, code="invalid_argument")
    problem_of(await api.client.post(path, json={"a": 1}), status=400, code="invalid_argument")
    assert (await api.client.post(path, json={})).status_code == 202
    problem_of(await api.foreign.post(path), status=404, code="not_found")
    elsewhere = f"/v1/jobs/{job['job_id']}/runs/{NOWHERE}/exports"
    problem_of(await api.client.post(elsewhere), status=404, code="not_found")
    for missing in (NOWHERE, "x"):
        problem_of(await api.client.get(f"{path}/{missing}"), status=404, code="not_found")
    export_id = await start(api, job)
    problem_of(await api.foreign.get(f"{path}/{export_id}"), status=404, code="not_found")
    other = await api.submit(1)
    problem_of(await api.client.get(f"{path_of(other)}/{export_id}"), status=404, code="not_found")


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
    assert detail == "format: parquet needs the extra conveyor-batch[parquet] on the server"
    assert await handler(api).handle(delivery, never) == ACKNOWLEDGE
    export = await state(api, job, export_id)
    assert export.error == "parquet needs the extra conveyor-batch[parquet]"


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
        assert await making.handle(delivery, never) == ACKNOWLEDGE
        assert await making.handle(waiting, never) == ACKNOWLEDGE
        assert (await state(api, job, first)).status.value == "running"
        blobs.gate.set()

    assert (await state(api, job, first)).status.value == "completed"
    assert await making.handle(delivery, never) == ACKNOWLEDGE
    assert await blob_of(api, job, first) is not None
    assert (await state(api, job, second)).status.value == "pending"
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
