"""What writes of several steps leave behind when they are cut off between two of them.

A job whose rows were written and whose run never was: an intent tells. Tasks being added that never
became a part of their run: a reservation on the run tells. Pins of runs that are gone: seen when
ended runs are looked at. Rows of ended runs that nobody counted: the run is unsettled. Each gets 15
minutes, which no call takes. And what processes that are gone have left on the row of a run that
goes on for long.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Mapping

from conveyor.aio.concurrency import side_by_side
from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import RunStatus
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.dispatch import read_all
from conveyor.prod.dynamodb.items import keys_of
from conveyor.prod.dynamodb.keys import BEGIN, INTENTS, Key, by_time, every
from conveyor.prod.dynamodb.places import read_place
from conveyor.prod.dynamodb.recount import is_crowded, recount_at
from conveyor.prod.dynamodb.reservations import Reservation, forget, give_back
from conveyor.prod.dynamodb.run_items import RunRow, read_run_row
from conveyor.prod.dynamodb.run_records import Change, RunMoved, RunRecords
from conveyor.prod.dynamodb.shapes import Unfit, readable
from conveyor.prod.dynamodb.sweeping_rows import remove_rows
from conveyor.prod.dynamodb.table import BY_DISPATCH, BY_OWNER

PATIENCE = 15 * 60_000
"""Milliseconds after which a write that is not complete counts as cut off."""

_log = logging.getLogger("conveyor.records")


class Leftovers:
    """Finds what was left behind and removes it."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records
        self._table = records.table
        self._looked_at: int | None = None
        self._added_since: dict[tuple[Key, str], int] = {}
        self._pins: dict[Key, int] = {}
        self._runs: set[Key] = set()

    def pin_of_gone_run(self, pin: Key) -> None:
        """Tell of a pin whose run was not found."""
        self._pins.setdefault(pin, self._table.clock.now())

    def run_with_additions(self, run: Key) -> None:
        """Tell of an ended run with additions that are not complete."""
        self._runs.add(run)

    async def tidy(self, *, now: int) -> int:
        """Remove what is old enough; how many things. What can only be seen to grow old is looked
        at every 15 minutes."""
        done = await self._end_intents(now)
        if self._looked_at is None or not 0 <= now - self._looked_at < PATIENCE:
            self._looked_at = now
            done += await self._look_at_runs(now)
            done += await self._remove_pins(now)
            await self._settle_runs(now)
        return done

    async def _end_intents(self, now: int) -> int:
        done = 0
        until = by_time(now - PATIENCE, "")
        async for page in self._table.pages(INTENTS, index=BY_OWNER, between=(BEGIN, until)):
            for key in keys_of(page.items):
                done += await _alone(f"ending the intent {key.sk}", self._end_intent(key))
        return done

    async def _end_intent(self, key: Key) -> bool:
        """Whoever still writes under the intent cannot make the run any more; then its rows go."""
        try:
            item = await self._table.update(
                key, "SET abandoned = :yes", condition="attribute_exists(pk)", yes=True
            )
        except AwsRefused as refused:
            if not refused.is_condition:
                raise
            return False
        place = read_place(item)
        run = await self._table.get(place.key)
        if run is None or read_run_row(run).place.run_id != place.run_id:
            await remove_rows(self._table, place)
        await self._table.delete(key)
        return True

    async def _look_at_runs(self, now: int) -> int:
        """Look at the rows of runs that go on, and of those that were told of; how many additions
        were taken back."""
        keys = {*self._runs, *await self._live_runs()}
        self._runs.clear()
        done, since = 0, self._added_since
        self._added_since = {}
        items = await self._table.get_many(list(keys))
        for row in readable(read_run_row, items.values()):
            done += await self._end_additions(row, since, now)
            # One that does not wait for tasks is counted once it is quiet.
            if row.run.status is RunStatus.PENDING and is_crowded(row):
                what = f"forgetting who has counted in run {row.place.run_id}"
                await _alone(what, self._recount(row, now))
        return done

    async def _end_additions(
        self, row: RunRow, since: Mapping[tuple[Key, str], int], now: int
    ) -> int:
        """An addition carries no time: it counts from when it was first seen here."""
        key, done = row.place.key, 0
        for start in {**row.reserved, **row.given_up}:
            first_seen = since.get((key, start), now)
            if now - first_seen >= PATIENCE:
                what = f"taking back an addition to run {row.place.run_id}"
                done += await _alone(what, self._take_back(row, start, now))
            else:
                self._added_since[key, start] = first_seen
        return done

    async def _recount(self, row: RunRow, now: int) -> bool:
        return (await recount_at(self._records, row.place, now=now)).done

    async def _take_back(self, row: RunRow, start: str, now: int) -> bool:
        """Take back one addition, or go on where that was cut off."""
        if start in row.reserved:
            reservation = Reservation(int(start), row.reserved[start])
            return await give_back(self._records, row.place, reservation, now=now)
        reservation = Reservation(int(start), row.given_up[start])
        await forget(self._records, row.place, reservation)
        return True

    async def _settle_runs(self, now: int) -> None:
        """Count what came after the end of runs that were cut short. Where something is still
        under way it is left to the next look."""
        found = await read_all(self._table, every("unsettled"), index=BY_OWNER, keys_only=True)
        items = await self._table.get_many(keys_of(found))
        for row in readable(read_run_row, items.values()):
            if row.unsettled and now - row.dispatch_changed_at >= PATIENCE:
                what = f"counting what came after the end of run {row.place.run_id}"
                await _alone(what, self._settle_run(row, now))

    async def _settle_run(self, row: RunRow, now: int) -> bool:
        counted, done = await recount_at(self._records, row.place, now=now)
        if counted is None or not done or counted.run.status is RunStatus.DELETED:
            return False
        try:
            # Nothing of the run itself has moved: it keeps its time.
            at = counted.run.updated_at
            await self._records.change(counted, Change(unsettled=False), now=at)
        except RunMoved:
            return False
        return True

    async def _remove_pins(self, now: int) -> int:
        """Of runs that are still not there, a while after that was seen."""
        done = 0
        for pin in [pin for pin, first in self._pins.items() if now - first >= PATIENCE]:
            del self._pins[pin]
            done += await _alone(f"removing the pin {pin.sk}", self._remove_pin(pin))
        return done

    async def _remove_pin(self, pin: Key) -> bool:
        run_id = pin.sk.rpartition("#")[2]
        if await self._records.read(run_id) is not None:
            return False
        await self._table.delete(pin)
        return True

    async def _live_runs(self) -> list[Key]:
        found: list[Key] = []

        async def find(partition: str) -> None:
            async for page in self._table.pages(
                partition,
                index=BY_DISPATCH,
                filtered="#status IN (:running, :pending)",
                running=str(RunStatus.RUNNING),
                pending=str(RunStatus.PENDING),
            ):
                found.extend(keys_of(page.items))

        await side_by_side(find, [*every("active"), *every("idle")])
        return found


async def _alone(what: str, step: Awaitable[bool]) -> bool:
    """What a step did; nothing where it failed, which is told in one line and left to a later look.
    A row that is not for this process stays as it is, and was told where it was met."""
    try:
        return await step
    except Unfit:
        return False
    except ConveyorError as error:
        _log.warning("%s failed: %s", what, error)
        return False
