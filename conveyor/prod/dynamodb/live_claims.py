"""Which tasks of a run that has ended are still being worked, or were left in the middle."""

from __future__ import annotations

from typing import Any

from conveyor.domain.model import TaskStatus
from conveyor.prod.dynamodb.items import Table
from conveyor.prod.dynamodb.keys import task_partition, task_sort_key
from conveyor.prod.dynamodb.run_items import RunRow
from conveyor.prod.together import side_by_side

LONGEST_CALL = 3_600_000
"""Milliseconds after the end of a run in which a call of it may still be under way: a claim is not
renewed beyond the timeout of its call, which is minutes."""

_STATUS = {"#status": "status"}


class _Found(Exception):
    """A claim that stands: no further row needs to be looked at."""


async def has_live_claim(table: Table, row: RunRow, *, now: int) -> bool:
    """Whether a task of an ended run is under a claim that has not lapsed.

    Reads the run's rows, up to the first such task, only where some have not ended and the run has
    not for long.
    """
    if _all_ended(row) or now - row.ended_at > LONGEST_CALL:
        return False
    query: dict[str, Any] = {
        "filtered": "#status = :processing AND claimed_until > :now",
        "names": _STATUS,
        "keys_only": True,
        "processing": str(TaskStatus.PROCESSING),
        "now": now,
    }

    async def look(shard: int) -> None:
        partition = task_partition(row.run.job_id, row.shards, shard)
        begin = task_sort_key(row.run.run_id, "")
        async for page in table.pages(partition, begins_with=begin, **query):
            if page.items:
                raise _Found

    try:
        await side_by_side(look, range(row.shards.count))
    except _Found:
        return True
    return False


async def processing(table: Table, row: RunRow) -> int:
    """How many tasks of an ended run were left under a claim, lapsed by now."""
    if _all_ended(row):
        return 0
    counted: list[int] = []

    async def count(shard: int) -> None:
        counted.append(
            await table.count(
                task_partition(row.run.job_id, row.shards, shard),
                begins_with=task_sort_key(row.run.run_id, ""),
                filtered="#status = :processing",
                names=_STATUS,
                processing=str(TaskStatus.PROCESSING),
            )
        )

    await side_by_side(count, range(row.shards.count))
    return sum(counted)


def _all_ended(row: RunRow) -> bool:
    """An end is counted after it has happened, never before."""
    return row.run.stats.completed >= row.run.stats.total
