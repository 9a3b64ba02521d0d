"""Fetch the bodies of a run into a directory: many through one export, few one by one."""

from __future__ import annotations

import tempfile
import zipfile
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

import anyio
import httpx
import msgspec
from anyio import to_thread
from anyio.lowlevel import checkpoint
from tenacity import retry_if_exception_type

from conveyor.client.api import CONNECTIONS, Api, retrying
from conveyor.client.directory import (
    Destination,
    ManifestRow,
    ResultDirectory,
    extension,
    unwritable,
    writing_into,
)
from conveyor.client.errors import ClientError, ServerUnreachable
from conveyor.client.output import clean, mask_credentials, printable
from conveyor.client.progress import TransferView
from conveyor.client.watch import GROWTH, PATIENCE
from conveyor.client.wire import FETCHED, ExportReply, ProblemReply, ResultRow, RunReply
from conveyor.domain.export_rows import MANIFEST, ExportRow
from conveyor.domain.model import Problem

ATTEMPTS = 3
FIRST_INTERVAL = 0.1
LAST_INTERVAL = 2.0
EXPORTED_FILES = 500
"""As many missing files come through an export, whose one transfer is faster by far."""
EXPORT_START = 30.0
"""Seconds that such an export may wait for another one."""
ROWS_AT_A_TIME = 64
PIECE_BYTES = 1 << 20
"""The bytes that are taken out of an export before the event loop gets a turn, which costs as much
as a small file."""


@dataclass(slots=True)
class Downloads:
    """Counts the files that are there. Holds a line for each body that could not be downloaded, and
    for whatever else the user should know."""

    files: int = 0
    unsuccessful_tasks: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


async def download(
    api: Api,
    run: RunReply,
    destination: Destination,
    meter: TransferView,
    *,
    status: str | None = None,
) -> Downloads:
    """Bring a directory up to date with an ended run: the body of every successful task, a
    manifest and an index. Files of this run that are there already are not fetched again.

    Raises ClientError if the directory holds other results, or cannot be written.
    """
    with ResultDirectory(destination, run.job_id) as directory:
        work = _Download(api, run, directory, meter, status)
        missing = run.stats.successful - directory.count_of(run.run_id)
        if status in ("failed", "processing") or missing < EXPORTED_FILES:
            await work.fetch_each()
        else:
            async with work.exported(destination.path) as archive:
                await (work.fetch_each() if archive is None else work.unpack(archive))
        work.done.notes.extend(directory.moved)
    return work.done


class _Download:
    """The state of one download."""

    def __init__(
        self,
        api: Api,
        run: RunReply,
        directory: ResultDirectory,
        meter: TransferView,
        status: str | None,
    ) -> None:
        self.done = Downloads()
        self._api = api
        self._run = run
        self._directory = directory
        self._meter = meter
        self._status = status
        self._slots = anyio.Semaphore(CONNECTIONS)
        self._from_store = True

    async def fetch_each(self) -> None:
        """Fetch each body by its link, several at a time."""
        self._meter.begin("fetching", self._run.stats.successful, unit="files")
        path = self._directory.path
        try:
            async with anyio.create_task_group() as group:
                async for reply, _raw in self._api.results(
                    self._run.job_id, run_id=self._run.run_id, status=self._status
                ):
                    row = self._row(reply)
                    runs = (self._run.run_id, reply.source_run_id)
                    if reply.succeeded and self._kept(row, *runs):
                        continue
                    if reply.result_url is None:
                        self._list_without_body(row)
                        continue
                    claimed = self._directory.claim(row.external_id, row.task_id)
                    await self._slots.acquire()
                    group.start_soon(self._fetch, claimed, row, reply.result_url)
        except OSError as error:
            raise unwritable(path, error) from None
        except BaseExceptionGroup as errors:
            raise _plain(path, errors) from None

    @asynccontextmanager
    async def exported(self, path: Path) -> AsyncIterator[zipfile.ZipFile | None]:
        """Fetch the run as one archive; None where there is none to be had."""
        with tempfile.TemporaryFile(dir=path) as file:
            archive = None
            try:
                export = await export_run(
                    self._api, self._run, "zip", self._meter, start_within=EXPORT_START
                )
                await transfer_export(
                    self._api, self._run, export, partial(_emptied, file), self._meter
                )
                archive = await to_thread.run_sync(zipfile.ZipFile, file)
            except ServerUnreachable:
                raise
            except (ClientError, OSError, zipfile.BadZipFile) as error:
                reason = clean(str(error))
                self.done.notes.append(f"no export to be had, so one by one: {reason}")
            yield archive

    async def unpack(self, archive: zipfile.ZipFile) -> None:
        """Take each body out of the archive."""
        self._meter.begin("writing", self._run.stats.successful, unit="files")
        with writing_into(self._directory.path), archive.open(MANIFEST) as lines:
            for number, line in enumerate(lines):
                if number % ROWS_AT_A_TIME == 0:
                    await checkpoint()
                exported = _export_rows.decode(line)
                row = self._listed(exported)
                if self._status == "successful" and row.status not in FETCHED:
                    continue
                if row.status in FETCHED and self._kept(row, self._run.run_id):
                    continue
                if exported.file is None:
                    self._list_without_body(row)
                    continue
                try:
                    await self._extract(archive, exported.file, row)
                except (KeyError, zipfile.BadZipFile, zlib.error, EOFError):
                    self._list_without_body(row, "the export is damaged")

    async def _extract(self, archive: zipfile.ZipFile, member: str, row: ManifestRow) -> None:
        claimed = self._directory.claim(row.external_id, row.task_id)
        suffix = extension(row.type, row.content_type or "")
        with (
            archive.open(member) as pieces,
            self._directory.body(claimed, suffix, row.task_id) as new,
        ):
            while piece := pieces.read(PIECE_BYTES):
                new.file.write(piece)
                if len(piece) == PIECE_BYTES:
                    await checkpoint()
        self._add(row, new.name, row.size or 0, row.content_type)

    async def _fetch(self, claimed: str, row: ManifestRow, url: str) -> None:
        """Download one body, retrying a broken transfer; release the slot at the end."""
        broken = retry_if_exception_type(httpx.TransportError)
        try:
            await retrying(self._api.pace, ATTEMPTS, broken)(self._transfer, claimed, row, url)
        except (ClientError, httpx.RequestError) as error:
            reason = clean(str(error)) or type(error).__name__
            self._list_without_body(row, reason)
        finally:
            self._slots.release()

    async def _transfer(self, claimed: str, row: ManifestRow, url: str) -> None:
        """Download one body from the store, where the server has one that can be reached from here;
        else from the server, which also says why there is none."""
        tries_store = self._from_store and "?" in url
        if tries_store:
            with suppress(ClientError):
                link = await self._receive_or_link(claimed, row, url)
                if link is None:
                    return
                with suppress(httpx.TransportError):
                    await self._receive(claimed, row, link)
                    return
        await self._receive(claimed, row, url)
        if tries_store:
            # The server has what its store did not give. The next body would take as long.
            self._from_store = False

    async def _receive_or_link(self, claimed: str, row: ManifestRow, url: str) -> str | None:
        """Download one body from the server, unless it names its store: return that link then."""
        async with self._api.download_or_link(url) as found:
            if isinstance(found, str):
                return found
            await self._write(claimed, row, found)
            return None

    async def _receive(self, claimed: str, row: ManifestRow, url: str) -> None:
        async with self._api.download(url) as response:
            await self._write(claimed, row, response)

    async def _write(self, claimed: str, row: ManifestRow, response: httpx.Response) -> None:
        size = 0
        content_type = response.headers.get("Content-Type", "")
        suffix = extension(row.type, content_type)
        with self._directory.body(claimed, suffix, row.task_id) as new:
            async for chunk in response.aiter_raw():
                new.file.write(chunk)
                size += len(chunk)
        self._add(row, new.name, size, content_type)

    def _kept(self, row: ManifestRow, *run_ids: str | None) -> bool:
        """List a row whose file is there; return whether it is."""
        held = self._directory.held(row.task_id, *run_ids)
        if held is None:
            return False
        # Past its retention at the server, but not here.
        row = msgspec.structs.replace(row, status="successful")
        self._add(row, held.name, held.size, held.content_type)
        return True

    def _list_without_body(self, row: ManifestRow, problem: str | None = None) -> None:
        """List a row that brought no body now; a file of an earlier run stays, with that run."""
        if row.status not in FETCHED:
            self.done.unsuccessful_tasks += 1
        else:
            reason = problem or "the result has expired"
            self.done.problems.append(f"{clean(row.task_id)}: {reason}")
        held = self._directory.held(row.task_id)
        if held is not None:
            row = msgspec.structs.replace(
                row,
                run_id=held.run_id,
                file=held.name,
                size=held.size,
                content_type=held.content_type,
            )
        self._directory.add(row)

    def _add(self, row: ManifestRow, name: str, size: int, content_type: str | None) -> None:
        self._directory.add(
            msgspec.structs.replace(row, file=name, size=size, content_type=content_type)
        )
        self.done.files += 1
        self._meter.move(self.done.files)

    def _row(self, reply: ResultRow) -> ManifestRow:
        return ManifestRow(
            job_id=self._run.job_id,
            run_id=self._run.run_id,
            task_id=reply.task_id,
            external_id=reply.external_id,
            url=mask_credentials(reply.url),
            status=reply.status,
            type=reply.type,
            error=_problem(reply.error),
            metadata=reply.metadata,
        )

    def _listed(self, row: ExportRow) -> ManifestRow:
        fields = msgspec.structs.asdict(row)
        fields.update(url=mask_credentials(row.url), file=None, error=_problem(row.error))
        return ManifestRow(job_id=self._run.job_id, run_id=self._run.run_id, **fields)


def _problem(error: Problem | ProblemReply | None) -> Problem | None:
    if error is None:
        return None
    return Problem(error.code, error.title, error.status, detail=error.detail)


_export_rows = msgspec.json.Decoder(ExportRow)


@contextmanager
def _emptied(file: IO[bytes]) -> Iterator[IO[bytes]]:
    file.seek(0)
    file.truncate()
    yield file


def _plain(directory: Path, errors: BaseExceptionGroup) -> BaseException:
    """Pick the one error of a group to report."""
    for error in errors.exceptions:
        if isinstance(error, ClientError):
            return error
        if isinstance(error, OSError):
            return unwritable(directory, error)
    return errors


async def export_run(
    api: Api, run: RunReply, form: str, meter: TransferView, *, start_within: float | None = None
) -> ExportReply:
    """Start an export and wait until it is completed.

    Raises ClientError with the server's reason if it fails, or does not begin in time.
    """
    export = await api.start_export(run.job_id, run.run_id, form=form)
    meter.begin("making the export")
    interval = FIRST_INTERVAL
    asked_at = answered_at = api.pace.monotonic()
    while export.live:
        late = start_within is not None and api.pace.monotonic() - asked_at > start_within
        if late and export.status == "pending":
            raise ClientError("the server is busy with other exports")
        await api.pace.sleep(interval)
        interval = min(interval * GROWTH, LAST_INTERVAL)
        meter.move()
        try:
            export = await api.export(run.job_id, run.run_id, export.export_id)
        except ServerUnreachable:
            if api.pace.monotonic() - answered_at > PATIENCE:
                raise
            continue
        answered_at = api.pace.monotonic()
    if export.status != "completed":
        raise ClientError(f"the export failed: {printable(export.error or export.status)}")
    return export


async def transfer_export(
    api: Api,
    run: RunReply,
    export: ExportReply,
    opened: Callable[[], AbstractContextManager[IO[bytes]]],
    meter: TransferView,
    *,
    attempts: int = ATTEMPTS,
) -> int:
    """Download a completed export into the file that each call of `opened` gives empty; return the
    number of bytes.

    A broken transfer starts again. Raises ClientError if the download fails.
    """

    async def attempt() -> int:
        # The link expires before the export; each look gives a fresh one.
        fresh = await api.export(run.job_id, run.run_id, export.export_id)
        if fresh.download_url is None:
            raise ClientError("the export is completed, but has no link")
        with opened() as file:
            return await _copy(api, fresh.download_url, file, meter)

    try:
        done: int = await retrying(api.pace, attempts, retry_if_exception_type(httpx.RequestError))(
            attempt
        )
    except httpx.RequestError as error:
        reason = clean(str(error)) or type(error).__name__
        raise ClientError(f"export download failed: {reason}") from None
    return done


async def _copy(api: Api, url: str, file: IO[bytes], meter: TransferView) -> int:
    done = 0
    async with api.download(url) as response:
        length = response.headers.get("Content-Length", "")
        meter.begin("downloading", int(length) if length.isdecimal() else None)
        async for chunk in response.aiter_raw():
            file.write(chunk)
            done += len(chunk)
            meter.move(done)
    return done
