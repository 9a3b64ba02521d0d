"""The jobs of a server: list them, and find the one, or another thing with an id, that an
abbreviation names."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import NamedTuple

from conveyor.client.api import Api
from conveyor.client.errors import ClientError
from conveyor.client.output import printable
from conveyor.client.wire import JobReply

NEWEST = "last"
"""Names the newest job in place of an id."""
PAGE_JOBS = 100
SEARCHED = 1_000
"""Newest ids among which the beginning of one is looked for."""
NAMED = 3
"""Ids that the error about an ambiguous beginning names."""

_WHOLE = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}", re.IGNORECASE)
_BEGINNING = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{0,24}", re.IGNORECASE)


class Nouns(NamedTuple):
    """The words for something that has an id."""

    one: str
    several: str


def is_id(text: str) -> bool:
    """Tell whether a text is a whole id."""
    return _WHOLE.fullmatch(text) is not None


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

    Raises ClientError as `find_by_beginning` does, and if `last` names none.
    """
    if text == NEWEST:
        newest = (await api.jobs(limit=1, status=None, cursor=None)).jobs
        if not newest:
            raise ClientError("no jobs yet: conveyor submit URL")
        return newest[0].job_id

    async def ids() -> AsyncGenerator[str, None]:
        async with aclosing(newest_jobs(api, SEARCHED)) as jobs:
            async for job in jobs:
                yield job.job_id

    return await find_by_beginning(text, ids, Nouns("job", "jobs"))


async def find_jobs(api: Api, texts: Sequence[str]) -> list[str]:
    """Return the ids of the jobs that the texts name, before anything is done to one of them."""
    return [await find_job(api, text) for text in texts]


async def find_by_beginning(
    text: str, newest: Callable[[], AsyncGenerator[str, None]], nouns: Nouns
) -> str:
    """Return the id that a text is, or begins, in either case, among those that `newest` yields.

    A text that can be neither comes back as it is, for the server to refuse. Raises ClientError if
    no id, or more than one, begins like that.
    """
    if is_id(text):
        return text.upper()
    if _BEGINNING.fullmatch(text) is None:
        return text
    found, is_cut_short = await _beginning_with(newest(), text.upper())
    if not found and is_cut_short:
        raise ClientError(
            f"none of the newest {SEARCHED:,} {nouns.several} begins with {text}: give the whole id"
        )
    if not found:
        raise ClientError(f"no such {nouns.one}: {text}")
    if len(found) > 1:
        more = ", …" if len(found) > NAMED else ""
        names = ", ".join(map(printable, found[:NAMED]))
        raise ClientError(f"{text} begins the ids of several {nouns.several}: {names}{more}")
    return found[0]


async def _beginning_with(
    newest: AsyncGenerator[str, None], letters: str
) -> tuple[list[str], bool]:
    """Return the first few ids that begin with these letters, and whether older ones were not
    read."""
    found: list[str] = []
    searched = 0
    async with aclosing(newest) as ids:
        async for one in ids:
            searched += 1
            start = one[: len(letters)]
            if start == letters:
                found.append(one)
            # Newest first is by falling ids: no later one begins like this.
            if start < letters or len(found) > NAMED:
                return found, False
    return found, searched == SEARCHED
