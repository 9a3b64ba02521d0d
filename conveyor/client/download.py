"""Bringing result bodies into a directory, several at a time, each streamed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile

import anyio
import httpx

from conveyor.client.api import CONNECTIONS, Api
from conveyor.client.errors import ClientError
from conveyor.client.files import Names, extension, replacing
from conveyor.client.output import clean
from conveyor.client.wire import ResultRow

ATTEMPTS = 3


@dataclass(slots=True)
class Downloads:
    """What a download brought: files written, and a line for each body that did not come."""

    files: int = 0
    unsuccessful_tasks: int = 0
    problems: list[str] = field(default_factory=list)


def prepare(directory: Path) -> None:
    """Make a directory and see that files can be put into it. Raises ClientError."""
    try:
        _make(directory)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise _unwritable(directory, error) from None


async def download(
    api: Api, job_id: str, directory: Path, *, run_id: str | None = None, status: str | None = None
) -> Downloads:
    """Write the body of every successful task of a run into `directory`, which is made.

    Files are named by external id, else task id; one of the same name is replaced. Raises
    ClientError where the directory cannot be written.
    """
    run = _Downloader(api, directory)
    try:
        _make(directory)
        async with anyio.create_task_group() as group:
            async for row, _raw in api.results(job_id, run_id=run_id, status=status):
                if not row.succeeded:
                    run.done.unsuccessful_tasks += 1
                elif row.result_url is None:
                    run.done.problems.append(f"{clean(row.task_id)}: the result has expired")
                else:
                    name = run.names.claim(row.external_id or row.task_id)
                    await run.slots.acquire()
                    group.start_soon(run.fetch, name, row, row.result_url)
    except OSError as error:
        raise _unwritable(directory, error) from None
    except BaseExceptionGroup as errors:
        raise _plain(directory, errors) from None
    return run.done


class _Downloader:
    """What the transfers of one download share."""

    def __init__(self, api: Api, directory: Path) -> None:
        self.slots = anyio.Semaphore(CONNECTIONS)
        self.names = Names()
        self.done = Downloads()
        self._api = api
        self._directory = directory

    async def fetch(self, claimed: str, row: ResultRow, url: str) -> None:
        """Bring one body, trying again where the transfer broke; gives its slot back."""
        try:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    await self._transfer(claimed, row, url)
                    self.done.files += 1
                    return
                except httpx.TransportError:
                    if attempt == ATTEMPTS:
                        raise
                    await self._api.pace.sleep(0.25 * 2**attempt)
        except (ClientError, httpx.RequestError) as error:
            reason = clean(str(error)) or type(error).__name__
            self.done.problems.append(f"{clean(row.task_id)}: {reason}")
        finally:
            self.slots.release()

    async def _transfer(self, claimed: str, row: ResultRow, url: str) -> None:
        async with self._api.download(url) as response:
            suffix = extension(row.type, response.headers.get("Content-Type", ""))
            with replacing(self._directory / self.names.give(claimed, suffix)) as file:
                async for chunk in response.aiter_raw():
                    file.write(chunk)


def _make(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)


def _plain(directory: Path, errors: BaseExceptionGroup) -> BaseException:
    """The one error worth telling out of a group."""
    for error in errors.exceptions:
        if isinstance(error, ClientError):
            return error
        if isinstance(error, OSError):
            return _unwritable(directory, error)
    return errors


def _unwritable(directory: Path, error: OSError) -> ClientError:
    reason = error.strerror or type(error).__name__
    return ClientError(f"cannot write into {clean(str(directory))}: {reason}")
