"""Runs that have ended: when that counts, as long as others draw on them, and how they expire."""

from __future__ import annotations

from collections.abc import Sequence

from conveyor.aio.concurrency import side_by_side
from conveyor.domain.model import RunStatus
from conveyor.ports.sweeping import EndedRun
from conveyor.prod.dynamodb.deleting import delete_ended
from conveyor.prod.dynamodb.items import changed_too_often
from conveyor.prod.dynamodb.keys import pin_key
from conveyor.prod.dynamodb.run_items import RunRow
from conveyor.prod.dynamodb.run_records import TRIES, RunMoved, RunRecords
from conveyor.prod.dynamodb.shapes import Unfit
from conveyor.prod.dynamodb.sweeping_leftovers import Leftovers
from conveyor.prod.dynamodb.sweeping_rows import dependants


class Ends:
    """Looks at the ends of runs. What it finds left behind, it tells `leftovers`."""

    def __init__(self, records: RunRecords, leftovers: Leftovers) -> None:
        self._records = records
        self._leftovers = leftovers

    async def of(self, rows: Sequence[RunRow], *, before: int) -> list[EndedRun]:
        """Those of the runs that ended before an instant, they and all that draw on them."""
        ends: dict[str, EndedRun] = {}

        async def look(row: RunRow) -> None:
            ended_at = row.run.updated_at
            try:
                drawing = await self._drawing(row)
            except Unfit:
                return
            for other in drawing:
                if not _has_ended(other):
                    return
                ended_at = max(ended_at, other.run.updated_at)
            if ended_at < before:
                ends[row.run.run_id] = EndedRun(
                    row.run.job_id,
                    row.run.run_id,
                    ended_at,
                    row.result_ttl_days,
                    row.swept,
                    row.queue_dropped,
                )

        for row in rows:
            if row.reserved or row.given_up:
                self._leftovers.run_with_additions(row.place.key)
        await side_by_side(
            look,
            [
                row
                for row in rows
                if _has_ended(row)
                and row.run.status is not RunStatus.DELETED
                and row.run.updated_at < before
            ],
        )
        return [ends[row.run.run_id] for row in rows if row.run.run_id in ends]

    async def expire(self, run_id: str, *, now: int) -> list[str]:
        """Turn an ended run to `deleted`; see `Sweeping.expire_run`."""
        for _ in range(TRIES):
            row = await self._records.read(run_id)
            if row is None or not _has_ended(row):
                return []
            if not all(map(_has_ended, await self._drawing(row))):
                return []
            if row.run.status is RunStatus.DELETED:
                return [run_id]
            try:
                await delete_ended(self._records, row, now=now)
            except RunMoved:
                continue
            return [run_id]
        raise changed_too_often()

    async def _drawing(self, row: RunRow) -> list[RunRow]:
        """The runs that draw on a run, but for those that are deleted."""
        job_id, run_id = row.run.job_id, row.run.run_id
        found: list[RunRow] = []
        for other_id in await dependants(self._records.table, job_id, run_id):
            other = await self._records.read(other_id)
            if other is None:
                self._leftovers.pin_of_gone_run(pin_key(job_id, run_id, other_id))
            elif other.run.status is not RunStatus.DELETED:
                found.append(other)
        return found


def _has_ended(row: RunRow) -> bool:
    return not row.live and not row.run.ingesting
