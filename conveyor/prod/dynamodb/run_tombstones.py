"""Tombstones: the rows of deleted runs, and since when nobody is at work on their scrub."""

from __future__ import annotations

from conveyor.domain.model import RunStatus
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.dispatch import read_all
from conveyor.prod.dynamodb.items import Item, keys_of
from conveyor.prod.dynamodb.keys import every
from conveyor.prod.dynamodb.run_items import read_run_row
from conveyor.prod.dynamodb.run_records import RunRecords
from conveyor.prod.dynamodb.shapes import readable, whole
from conveyor.prod.dynamodb.table import BY_OWNER


class Tombstones:
    """The rows of deleted runs."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records
        self._table = records.table

    async def all(self, *, before: int | None) -> list[tuple[str, str]]:
        """(job_id, run_id) by run id; see `Runs.deleted_runs`. No index knows when one was touched:
        that is read from the rows."""
        items = await read_all(self._table, every("deleted"), index=BY_OWNER)
        if before is None:
            found = dict(readable(_of_index, items))
        else:
            rows = await self._table.get_many(list(dict.fromkeys(keys_of(items))))
            found = {
                row.run.run_id: row.run.job_id
                for row in readable(read_run_row, rows.values())
                if row.run.status is RunStatus.DELETED and row.run.updated_at < before
            }
        return [(found[run_id], run_id) for run_id in sorted(found)]

    async def touch(self, run_id: str, *, now: int) -> None:
        """Note that a scrub is under way; see `Runs.touch_tombstone`. Leaves the row's version
        alone: no decision hangs on when one was touched."""
        place = await self._records.places.find(run_id)
        if place is None:
            return
        try:
            await self._table.update(
                place.key,
                "SET updated_at = :now",
                condition="#status = :deleted AND updated_at < :now",
                deleted=str(RunStatus.DELETED),
                now=now,
            )
        except AwsRefused as refused:
            if not refused.is_condition:
                raise


@whole
def _of_index(item: Item) -> tuple[str, str]:
    return str(item["run_id"]), str(item["job_id"])
