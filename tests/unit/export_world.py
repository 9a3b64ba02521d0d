"""Exports over HTTP and the handler that makes them, and the few steps that most tests take."""

from __future__ import annotations

import json
import zipfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import anyio
import httpx
from zenrows.batch.models import Export as ClientExport
from zenrows.batch.models import StartExportResponse

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.handlers.export import ExportHandler
from conveyor.ports.binding import Binding
from conveyor.ports.blobs import Blobs, Content
from conveyor.ports.handler import ACKNOWLEDGE
from conveyor.ports.queues import CONTROL_QUEUE, Delivery, ExportMessage
from conveyor.records.blob_keys import export_key
from tests.unit.http_api import Api
from tests.unit.wired_handlers import export_handler

GIB = 1 << 30
DAY = 86_400.0


class Gated:
    """The blobs of a binding: opens of bodies wait for `gate`, and break where that is asked."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self.gate = anyio.Event()
        self.reached = anyio.Event()
        self.broken = False

    async def open(self, key: str, *, size: int | None = None) -> AsyncIterator[bytes] | None:
        """A body, once the gate is open."""
        await self._pass_gate()
        return await self._blobs.open(key, size=size)

    async def read_neighbours(self, keys: Sequence[str]) -> list[bytes | None]:
        """Bodies, once the gate is open."""
        await self._pass_gate()
        return await self._blobs.read_neighbours(keys)

    async def _pass_gate(self) -> None:
        self.reached.set()
        await self.gate.wait()
        if self.broken:
            raise ConveyorError(ErrorCode.UNAVAILABLE, "result store: no")

    async def put(self, key: str, content: Content) -> int:
        """Pass the call on."""
        return await self._blobs.put(key, content)

    async def delete(self, key: str) -> None:
        """Pass the call on."""
        await self._blobs.delete(key)

    async def delete_prefix(self, prefix: str, *, limit: int | None = None) -> int:
        """Pass the call on."""
        return await self._blobs.delete_prefix(prefix, limit=limit)

    async def list_keys(self, prefix: str, *, after: str, limit: int) -> list[str]:
        """Pass the call on."""
        return await self._blobs.list_keys(prefix, after=after, limit=limit)

    async def size(self, key: str) -> int | None:
        """Pass the call on."""
        return await self._blobs.size(key)

    async def upload_link(self, key: str, *, content_type: str, seconds: int) -> str | None:
        """Pass the call on."""
        return await self._blobs.upload_link(key, content_type=content_type, seconds=seconds)

    async def download_link(
        self, key: str, *, seconds: int, file_name: str, content_type: str = ""
    ) -> str | None:
        """Pass the call on."""
        return await self._blobs.download_link(key, seconds=seconds, file_name=file_name)


def handler(api: Api, *, max_bytes: int = 100 * GIB, blobs: Gated | None = None) -> ExportHandler:
    """A handler over an API's binding."""
    binding: Binding = api.binding if blobs is None else replace(api.binding, blobs=blobs)
    return export_handler(binding, api.clock, max_bytes=max_bytes)


def never() -> None:
    """Nothing is throttled here."""
    raise AssertionError("throttled")


async def received(api: Api) -> Delivery:
    """The next control message."""
    [delivery] = await api.binding.queues.receive(CONTROL_QUEUE, limit=1, visibility=60)
    assert isinstance(delivery.message, ExportMessage)
    return delivery


def path_of(job: dict[str, Any]) -> str:
    """Return the path to request exports of a job's latest run."""
    return f"/v1/jobs/{job['job_id']}/runs/{job['latest_run']['run_id']}/exports"


async def start(api: Api, job: dict[str, Any], **params: str) -> str:
    """Ask for an export; its id."""
    response = await api.client.post(path_of(job), params=params)
    assert response.status_code == 202, response.text
    started = StartExportResponse.model_validate(response.json())
    assert started.status.value == "pending"
    return started.export_id


async def state(api: Api, job: dict[str, Any], export_id: str) -> ClientExport:
    """Return the progress of an export."""
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
    """Return the rows in the manifest of an archive."""
    return [json.loads(line) for line in archive.read("manifest.jsonl").splitlines()]


async def blob_of(api: Api, job: dict[str, Any], export_id: str) -> AsyncIterator[bytes] | None:
    """The bytes of an export."""
    key = export_key(job["job_id"], job["latest_run"]["run_id"], export_id)
    return await api.binding.blobs.open(key)
