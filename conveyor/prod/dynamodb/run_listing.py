"""The runs of a job, newest first, strongly read."""

from __future__ import annotations

from collections.abc import AsyncIterator

from conveyor.prod.dynamodb.items import Table
from conveyor.prod.dynamodb.keys import run_key
from conveyor.prod.dynamodb.run_items import RunRow, read_run_row
from conveyor.prod.dynamodb.shapes import readable

PIECE = 100
"""Runs that one query asks for, unless told otherwise."""


async def runs_of(
    table: Table,
    job_id: str,
    *,
    below: int | None = None,
    limit: int = PIECE,
    known_only: bool = False,
) -> AsyncIterator[RunRow]:
    """Every run of a job, tombstones included, with a run_sequence below `below`; so many a query
    as `limit` says. Raises Unfit where one is of a newer shape, or damaged, or leaves it out."""
    first, last = run_key(job_id, 0), run_key(job_id, 10**10 - 1)
    if below is not None:
        last = run_key(job_id, max(below - 1, 0))
    async for page in table.pages(
        first.pk, between=(first.sk, last.sk), forward=False, limit=limit, known_only=known_only
    ):
        rows = readable(read_run_row, page.items) if known_only else map(read_run_row, page.items)
        for row in rows:
            yield row
