"""The sweeping port on one DynamoDB table.

Indexes lag behind: they tell where to look, and what is found there is read strongly. Rows of a
newer shape are left to the sweep of a process that knows them, damaged ones to whoever mends them.
"""

from __future__ import annotations

from conveyor.aio.concurrency import side_by_side
from conveyor.domain.model import RunStatus
from conveyor.ports.sweeping import EndedRun, QuietRun
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.items import keys_of, met
from conveyor.prod.dynamodb.keys import SWEEP, Key, every
from conveyor.prod.dynamodb.recount import recount
from conveyor.prod.dynamodb.run_items import read_run_row
from conveyor.prod.dynamodb.run_records import RunRecords
from conveyor.prod.dynamodb.shapes import Unfit, readable
from conveyor.prod.dynamodb.sweeping_ends import Ends
from conveyor.prod.dynamodb.sweeping_leftovers import Leftovers
from conveyor.prod.dynamodb.sweeping_rows import due_rows, ended_keys
from conveyor.prod.dynamodb.table import BY_DISPATCH, ROW_SHAPE

CLOCKS_APART = 60_000
"""Milliseconds by which a claim may outlast one that is made now. One that lasts longer was made
before a clock was set back, and counts for nothing."""


class DynamoSweeping:
    """The sweeping port."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records
        self._table = records.table
        self._leftovers = Leftovers(records)
        self._ends = Ends(records, self._leftovers)

    async def claim_sweep(self, *, now: int, lapses_at: int) -> bool:
        """Whether the caller may sweep: one at a time, until `lapses_at`."""
        token = self._table.clock.new_id()
        try:
            await self._table.update(
                SWEEP,
                "SET shape = :shape, lapses_at = :lapses_at, claimed_by = :token",
                condition="attribute_not_exists(pk) OR lapses_at <= :now OR lapses_at > :most",
                shape=ROW_SHAPE,
                lapses_at=lapses_at,
                token=token,
                now=now,
                most=lapses_at + CLOCKS_APART,
            )
        except AwsRefused as refused:
            if not refused.is_condition:
                raise
            found = met(refused)
            # It was carried out, and its answer lost.
            return found is not None and found["claimed_by"] == token
        return True

    async def quiet_runs(self, *, before: int) -> list[QuietRun]:
        """Live runs with tasks to be worked in which nothing was written since `before`."""
        found: list[Key] = []

        async def find(partition: str) -> None:
            async for page in self._table.pages(partition, index=BY_DISPATCH):
                found.extend(keys_of(page.items))

        await side_by_side(find, every("active"))
        items = await self._table.get_many(found)
        quiet = [
            QuietRun(row.run.job_id, row.run.run_id, row.run.updated_at)
            for row in readable(read_run_row, items.values())
            if row.run.status is RunStatus.RUNNING
            and not row.run.paused
            and not row.run.ingesting
            and row.run.updated_at < before
        ]
        return sorted(quiet, key=lambda run: (run.updated_at, run.run_id))

    async def reconcile_run(self, run_id: str, *, now: int) -> RunStatus | None:
        """Set a run's counters to what its rows say, and decide again whether it is complete."""
        row = await recount(self._records, run_id, now=now)
        return None if row is None else row.run.status

    async def due_references(
        self, run_id: str, *, after: int, limit: int, now: int
    ) -> list[tuple[int, str]]:
        """(index, task_id) of rows of a live run that could be worked now, in order.

        Rows of an addition that is not complete are not a part of the run yet.
        """
        run = await self._records.read(run_id)
        if run is None or not run.live:
            return []
        found: list[tuple[int, str]] = []
        async for row in due_rows(self._table, run.place, after=after, piece=limit, now=now):
            if row.index < run.run.next_index and run.holds(row.index):
                found.append((row.index, row.task_id))
            if len(found) == limit:
                break
        return found

    async def ended_runs(self, *, before: int, after: str, limit: int) -> list[EndedRun]:
        """Terminal runs, not deleted, that ended before `before`, by run id above `after`."""
        found: list[EndedRun] = []
        async for keys in ended_keys(self._table, after=after, piece=limit):
            items = await self._table.get_many(keys)
            rows = readable(read_run_row, [items[key] for key in keys if key in items])
            found += await self._ends.of(rows, before=before)
            if len(found) >= limit:
                break
        return found[:limit]

    async def mark_swept(self, run_id: str) -> None:
        """Note that the bodies of an ended run were removed for age."""
        await self._mark(run_id, "swept")

    async def mark_queue_dropped(self, run_id: str) -> None:
        """Note that nothing is left of the queue of an ended run."""
        await self._mark(run_id, "queue_dropped")

    async def expire_run(self, run_id: str, *, now: int) -> list[str]:
        """Turn an ended run to `deleted`, and its job too where no other run of it is left."""
        try:
            return await self._ends.expire(run_id, now=now)
        except Unfit:
            return []

    async def tidy(self, *, now: int) -> int:
        """Set right what writes left behind that were cut off in the middle; how many things."""
        return await self._leftovers.tidy(now=now)

    async def _mark(self, run_id: str, attribute: str) -> None:
        place = await self._records.places.find(run_id)
        if place is None:
            return
        try:
            await self._table.update(
                place.key, f"SET {attribute} = :yes", condition="attribute_exists(pk)", yes=True
            )
        except Unfit:
            return
        except AwsRefused as refused:
            if not refused.is_condition:
                raise
