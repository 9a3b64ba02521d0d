"""Which task of a run that has ended is still being worked."""

from __future__ import annotations

from typing import Any

from conveyor.aio.concurrency import side_by_side
from conveyor.domain.errors import CallInFlight
from conveyor.domain.model import TaskStatus
from conveyor.prod.dynamodb.items import Item, Table
from conveyor.prod.dynamodb.keys import task_partition, task_sort_key
from conveyor.prod.dynamodb.run_items import RunRow
from conveyor.prod.dynamodb.shapes import whole
from conveyor.prod.dynamodb.table import SORT_KEY

LONGEST_CALL = 3_600_000
"""Milliseconds after the end of a run in which a call of it may still be under way: a claim is not
renewed beyond the timeout of its call, which is minutes."""


async def refuse_live_claims(table: Table, row: RunRow, *, now: int) -> None:
    """Raise CallInFlight where a task of an ended run is under a claim that has not lapsed.

    Reads all of the run's rows, up to the first such task, but only where some have not ended and
    the run has not for long.
    """
    # An end is counted after it has happened, never before.
    all_ended = row.run.stats.completed >= row.run.stats.total
    if all_ended or now - row.ended_at > LONGEST_CALL:
        return
    query: dict[str, Any] = {
        "filtered": "#status = :processing AND claimed_until > :now",
        "keys_only": True,
        "processing": str(TaskStatus.PROCESSING),
        "now": now,
    }

    async def look(shard: int) -> None:
        partition = task_partition(row.run.job_id, row.shards, shard)
        begin = task_sort_key(row.run.run_id, "")
        async for page in table.pages(partition, begins_with=begin, **query):
            for item in page.items:
                raise CallInFlight(row.run.run_id, item[SORT_KEY].removeprefix(begin))

    await side_by_side(look, range(row.shards.count))


@whole
def is_held(item: Item, now: int) -> bool:
    """Whether a task's item, of which `status` and `claimed_until` were read, is under a claim that
    has not lapsed. Raises Damaged."""
    if item["status"] != TaskStatus.PROCESSING:
        return False
    until: int = item["claimed_until"]
    return until > now
