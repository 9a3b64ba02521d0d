"""Which runs may have work: what workers discover, through an index by the time of change.

On AWS an index lags behind its table, by milliseconds as a rule. A reader looks again and again,
and begins each look a margin before the last one; a single run is read from its own row.
"""

from __future__ import annotations

from typing import Any

import msgspec

from conveyor.aio.concurrency import side_by_side
from conveyor.domain.model import DispatchableRun, RunStatus
from conveyor.ports.records import DispatchChange
from conveyor.prod.dynamodb.items import Item, Table
from conveyor.prod.dynamodb.keys import END, by_time, every
from conveyor.prod.dynamodb.run_items import RunRow
from conveyor.prod.dynamodb.run_records import RunRecords
from conveyor.prod.dynamodb.shapes import Unfit, readable, whole
from conveyor.prod.dynamodb.table import BY_DISPATCH


class Dispatch:
    """The discovering part of the runs port."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records

    async def dispatchable_runs(self) -> list[DispatchableRun]:
        """Every run that is running and not paused, as far as the index knows, by run id."""
        items = await read_all(self._records.table, every("active"), index=BY_DISPATCH)
        found = {change.run_id: change.run for change in readable(_change, items)}
        return [run for _, run in sorted(found.items()) if run is not None]

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
        return list({change.run_id: change for change in readable(_change, items)}.values())

    async def dispatchable_run(self, run_id: str) -> DispatchableRun | None:
        """One run, if it is running and not paused, strongly read. One of a newer shape, or a
        damaged one, is none of this process's."""
        try:
            row = await self._records.read(run_id)
        except Unfit:
            return None
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


@whole
def _change(item: Item) -> DispatchChange:
    """What the index says of a run. It holds the whole row, so that nothing is read twice."""
    works = RunStatus(item["status"]) is RunStatus.RUNNING and not item["paused"]
    run = {name: item[name] for name in DispatchableRun.__struct_fields__}
    # One that is not what it should be is found here, not by whoever shares out slots.
    read = msgspec.convert(run, DispatchableRun)
    return DispatchChange(read.run_id, read if works else None)


def _dispatchable(row: RunRow) -> DispatchableRun:
    return DispatchableRun(
        run_id=row.run.run_id,
        job_id=row.run.job_id,
        priority=row.priority,
        max_inflight=row.max_inflight,
        created_at=row.run.created_at,
    )
