"""Which runs may have work: what workers discover, through an index by the time of change.

On AWS an index lags behind its table, by milliseconds as a rule. A reader looks again and again,
and begins each look a margin before the last one; a single run is read from its own row.
"""

from __future__ import annotations

from typing import Any

from conveyor.domain.model import DispatchableRun, RunStatus
from conveyor.ports.records import DispatchChange
from conveyor.prod.dynamodb.items import Item, Table
from conveyor.prod.dynamodb.keys import by_time, every
from conveyor.prod.dynamodb.run_items import RunRow
from conveyor.prod.dynamodb.run_records import RunRecords
from conveyor.prod.dynamodb.table import BY_DISPATCH
from conveyor.prod.together import side_by_side

END = "~"
"""Sorts behind every time."""


class Dispatch:
    """The discovering part of the runs port."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records

    async def dispatchable_runs(self) -> list[DispatchableRun]:
        """Every run that is running and not paused, as far as the index knows, by run id."""
        items = await read_all(self._records.table, every("active"), index=BY_DISPATCH)
        found = {item["run_id"]: _run(item) for item in items if _works(item)}
        return [found[run_id] for run_id in sorted(found)]

    async def dispatch_changes(self, *, since: int) -> list[DispatchChange]:
        """Runs whose status or pause was changed at or after `since`, as far as the index knows, in
        the order of the changes."""
        items = await read_all(
            self._records.table,
            [*every("active"), *every("idle")],
            index=BY_DISPATCH,
            between=(by_time(since, ""), END),
        )
        # A run on its way from one partition to another may be found in both.
        items.sort(key=lambda item: str(item["gsi2sk"]))
        latest = {item["run_id"]: item for item in items}
        return [
            DispatchChange(run_id, _run(item) if _works(item) else None)
            for run_id, item in latest.items()
        ]

    async def dispatchable_run(self, run_id: str) -> DispatchableRun | None:
        """One run, if it is running and not paused, strongly read."""
        row = await self._records.read(run_id)
        if row is None or row.run.status is not RunStatus.RUNNING or row.run.paused:
            return None
        return _dispatchable(row)


async def read_all(table: Table, partitions: list[str], **query: Any) -> list[Item]:
    """The items of several partitions of an index, all at once; arguments as of `Table.page`."""
    found: list[Item] = []

    async def read(partition: str) -> None:
        async for page in table.pages(partition, **query):
            found.extend(page.items)

    await side_by_side(read, partitions)
    return found


def _works(item: Item) -> bool:
    return bool(item["status"] == RunStatus.RUNNING and not item["paused"])


def _run(item: Item) -> DispatchableRun:
    return DispatchableRun(
        run_id=item["run_id"],
        job_id=item["job_id"],
        priority=item["priority"],
        max_inflight=item["max_inflight"],
        created_at=item["created_at"],
    )


def _dispatchable(row: RunRow) -> DispatchableRun:
    return DispatchableRun(
        run_id=row.run.run_id,
        job_id=row.run.job_id,
        priority=row.priority,
        max_inflight=row.max_inflight,
        created_at=row.run.created_at,
    )
