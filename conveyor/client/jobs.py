"""The jobs of a server: list them, and find the one that an abbreviation names."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from conveyor.client.api import Api
from conveyor.client.errors import ClientError
from conveyor.client.output import printable
from conveyor.client.wire import JobReply

NEWEST = "last"
"""Names the newest job in place of an id."""
PAGE_JOBS = 100
SEARCHED_JOBS = 1_000
"""Newest jobs among which the beginning of an id is looked for."""
NAMED_JOBS = 3
"""Jobs that the error about an ambiguous beginning names."""

_BEGINNING = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{0,24}", re.IGNORECASE)


async def newest_jobs(
    api: Api, limit: int, *, status: str | None = None, kind: str | None = None
) -> AsyncGenerator[JobReply, None]:
    """Yield up to `limit` jobs, newest first; `kind` is regular or scheduled. Whoever leaves early
    closes it."""
    cursor = None
    while limit > 0:
        page = await api.jobs(limit=min(limit, PAGE_JOBS), status=status, cursor=cursor, kind=kind)
        for job in page.jobs[:limit]:
            yield job
        limit -= len(page.jobs)
        cursor = page.next_cursor
        if not cursor:
            return


async def find_job(api: Api, text: str) -> str:
    """Return the id of the job that a text names: an id, the beginning of one, or `last`.

    A text that can be neither comes back as it is, for the server to refuse. Raises ClientError if
    no job, or more than one, begins like that among the newest.
    """
    if text == NEWEST:
        newest = (await api.jobs(limit=1, status=None, cursor=None)).jobs
        if not newest:
            raise ClientError("no jobs yet: conveyor submit URL")
        return newest[0].job_id
    if _BEGINNING.fullmatch(text) is None:
        return text
    found, is_cut_short = await _beginning_with(api, text.upper())
    if not found and is_cut_short:
        raise ClientError(
            f"none of the newest {SEARCHED_JOBS:,} jobs begins with {text}: give the whole id"
        )
    if not found:
        raise ClientError(f"no such job: {text}")
    if len(found) > 1:
        more = ", …" if len(found) > NAMED_JOBS else ""
        names = ", ".join(map(printable, found[:NAMED_JOBS]))
        raise ClientError(f"{text} begins the ids of several jobs: {names}{more}")
    return found[0]


async def find_jobs(api: Api, texts: Sequence[str]) -> list[str]:
    """Return the ids of the jobs that the texts name, before anything is done to one of them."""
    return [await find_job(api, text) for text in texts]


async def _beginning_with(api: Api, letters: str) -> tuple[list[str], bool]:
    """Return the first few ids that begin with these letters, and whether older jobs were not
    read."""
    found: list[str] = []
    searched = 0
    async with aclosing(newest_jobs(api, SEARCHED_JOBS)) as jobs:
        async for job in jobs:
            searched += 1
            start = job.job_id[: len(letters)]
            if start == letters:
                found.append(job.job_id)
            # Newest first is by falling ids: no later one begins like this.
            if start < letters or len(found) > NAMED_JOBS:
                return found, False
    return found, searched == SEARCHED_JOBS
