"""Exports of a run's results: requested here, made by a worker, fetched through a signed link."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator

import msgspec

from conveyor.domain.errors import ConveyorError, ErrorCode, not_found
from conveyor.ports.exports import Export, ExportFormat, ExportStatus
from conveyor.records.blob_keys import export_key
from conveyor.service.context import Context
from conveyor.service.links import ExportLinks, ExportTarget
from conveyor.service.notifier import WorkNotifier
from conveyor.service.schemas import (
    ExportBody,
    StartExportBody,
    export_body,
    start_export_body,
)

EXPORTS_SHOWN = 10
"""Exports that the page of a run lists: the newest."""


class Download(msgspec.Struct, frozen=True):
    """A finished export to send: its pieces, its size in bytes, its format and its name."""

    pieces: AsyncIterator[bytes]
    size: int
    format: ExportFormat
    filename: str


class RunExports:
    """Starts exports, reports their progress, and opens finished ones."""

    def __init__(self, context: Context, links: ExportLinks, notifier: WorkNotifier) -> None:
        self._context = context
        self._notifier = notifier
        self._exports = context.exports
        self._links = links

    async def start(
        self, caller_id: str, job_id: str, run_id: str, *, export_format: ExportFormat
    ) -> StartExportBody:
        """Request an export of the tasks that have ended by the time it is made.

        Raises ConveyorError: not_found; invalid_argument for a format that is not installed.
        """
        await self._context.live_run(caller_id, job_id, run_id)
        if export_format is ExportFormat.PARQUET and importlib.util.find_spec("pyarrow") is None:
            raise ConveyorError(
                ErrorCode.INVALID_ARGUMENT,
                "format: parquet needs the extra parquet where the server runs: "
                "pip install 'conveyor-batch[parquet]'",
            )
        now = self._context.clock.now()
        export = Export(
            export_id=self._context.clock.new_id(),
            job_id=job_id,
            run_id=run_id,
            format=export_format,
            status=ExportStatus.PENDING,
            created_at=now,
            updated_at=now,
            expires_at=now + round(self._context.options.export_ttl * 1_000),
        )
        await self._exports.create_export(export)
        await self._notifier.export_due(job_id, run_id, export.export_id)
        return start_export_body(export)

    async def get(self, caller_id: str, job_id: str, run_id: str, export_id: str) -> ExportBody:
        """Return the progress of an export, with a fresh link if it is complete.

        Raises ConveyorError(not_found), also for an expired one.
        """
        target = ExportTarget(job_id, run_id, export_id)
        export = await self._find(caller_id, target)
        link = None
        if export.status is ExportStatus.COMPLETED:
            link = await self._link(target, export)
        return export_body(export, download_url=link)

    async def latest(self, job_id: str, run_id: str) -> list[ExportBody]:
        """Return the newest exports of a run that may be shown, without links to their files."""
        found = await self._exports.latest_exports(job_id, run_id, limit=EXPORTS_SHOWN)
        now = self._context.clock.now()
        return [export_body(one, download_url=None) for one in found if one.expires_at > now]

    async def download(self, target: ExportTarget, *, expires: str, signature: str) -> Download:
        """Open the export of a signed link.

        Raises ConveyorError: permission_denied for a link that is not ours or has expired;
        not_found; result_expired where its bytes are lost.
        """
        now = self._context.clock.now()
        self._links.check(target, expires=expires, signature=signature, now=now)
        # The signature was given to the owner: it stands for them here.
        job = await self._context.jobs.find_job(target.job_id)
        if job is None:
            raise not_found("export")
        export = await self._find(job.caller, target)
        key = export_key(export.job_id, export.run_id, export.export_id)
        if export.size is None:
            raise not_found("export")
        pieces = await self._context.blobs.open(key, size=export.size)
        if pieces is None:
            raise ConveyorError(
                ErrorCode.RESULT_EXPIRED, "the file of the export is missing, or lost some bytes"
            )
        return Download(pieces, export.size, export.format, _file_name(export))

    async def _link(self, target: ExportTarget, export: Export) -> str:
        """Make a fresh link, the store's or ours, that ends with the export at the latest."""
        now = self._context.clock.now()
        ttl = round(self._context.options.result_url_ttl * 1_000)
        link_end = min(now + ttl, export.expires_at)
        own = await self._context.blobs.download_link(
            export_key(export.job_id, export.run_id, export.export_id),
            seconds=max(1, (link_end - now) // 1_000),
            file_name=_file_name(export),
        )
        return own or self._links.link(target, expires_at=link_end)

    async def _find(self, caller_id: str, target: ExportTarget) -> Export:
        await self._context.live_run(caller_id, target.job_id, target.run_id)
        export = await self._exports.get_export(target.export_id)
        if (
            export is None
            or (export.job_id, export.run_id) != (target.job_id, target.run_id)
            or export.expires_at <= self._context.clock.now()
        ):
            raise not_found("export")
        return export


def _file_name(export: Export) -> str:
    return f"{export.run_id}.{export.format.value}"
