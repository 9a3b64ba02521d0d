"""Reading runs, and moving them under their version."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from conveyor.domain.model import RunStatus
from conveyor.domain.states import LIVE_RUN_STATES, live_run_status
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.items import Table, changed_too_often, met
from conveyor.prod.dynamodb.notice_items import hasten
from conveyor.prod.dynamodb.places import Place, Places
from conveyor.prod.dynamodb.run_items import RunRow, index_keys, read_run_row
from conveyor.prod.dynamodb.values import Given, Plain

TRIES = 20
"""Times that a change is decided anew, because the row moved meanwhile."""


_CUT_SHORT = (RunStatus.STOPPED, RunStatus.FAILED)


class RunMoved(Exception):
    """The row was changed by another since it was read: read it, and decide again."""


class Change(NamedTuple):
    """One change of a run's row under its version: what is set, added and removed.

    `status`, `paused`, `ingesting` and `unsettled` bring the index keys, times and the end with
    them; a run that is cut short becomes unsettled by it. Counters are never set here, except by
    who raises `counter_epoch` too. An entry of `removes` that begins with "#" is a path of
    placeholders; what these, and those of the condition, stand for is in `values`.
    """

    status: RunStatus | None = None
    paused: bool | None = None
    ingesting: bool | None = None
    unsettled: bool | None = None
    sets: Mapping[str, Plain] = {}
    adds: Mapping[str, int] = {}
    removes: Sequence[str] = ()
    condition: str = ""
    values: Mapping[str, Given] = {}


class Expression(NamedTuple):
    """A change as DynamoDB takes it."""

    update: str
    condition: str
    values: dict[str, Given]


class RunRecords:
    """The rows of runs."""

    def __init__(self, table: Table, places: Places) -> None:
        self.table = table
        self.places = places

    async def read(self, run_id: str) -> RunRow | None:
        """A run by its id, strongly read; None where there is none (any more)."""
        place = await self.places.find(run_id)
        return None if place is None else await self.read_at(place)

    async def read_at(self, place: Place) -> RunRow | None:
        """A run by its place, strongly read."""
        item = await self.table.get(place.key)
        return None if item is None else read_run_row(item)

    async def change(self, row: RunRow, change: Change, *, now: int) -> RunRow:
        """Make a change; the row afterwards. Raises RunMoved."""
        token = self.table.clock.new_id()
        update, condition, values = self.expression(row, change, now=now, token=token)
        try:
            item = await self.table.update(row.place.key, update, condition=condition, **values)
        except AwsRefused as refused:
            if not refused.is_condition:
                raise
            found = met(refused)
            if found is None or found.get("moved_by") != token:
                raise RunMoved from None
            # It was carried out, and its answer lost.
            item = found
        after = read_run_row(item)
        if row.live:
            await self.tell_end(after)
        return after

    async def tell_end(self, row: RunRow) -> None:
        """Make the notice of a run due, if it has one and has ended: to be called with the row
        after whatever may have ended it. `change` does; who uses `part` has to."""
        if row.calls_back and not row.live:
            run = row.run
            await hasten(self.table, run.run_id, ended_as=run.status, ended_at=row.ended_at)

    def part(self, row: RunRow, change: Change, *, now: int) -> dict[str, Any]:
        """A change as a part of a transaction."""
        token = self.table.clock.new_id()
        update, condition, values = self.expression(row, change, now=now, token=token)
        return self.table.update_part(row.place.key, update, condition=condition, **values)

    def expression(self, row: RunRow, change: Change, *, now: int, token: str) -> Expression:
        """What a change is on the wire."""
        at = max(row.run.updated_at, now)
        sets: dict[str, Plain] = {
            **change.sets,
            "updated_at": at,
            "version": row.run.version + 1,
            "moved_by": token,
        }
        removes = list(change.removes)
        if (change.status, change.paused, change.ingesting, change.unsettled) != (None,) * 4:
            _state(row, change, at, sets, removes)
        values: dict[str, Given] = {**change.values, "known_version": row.run.version}
        values |= {f"set_{name}": value for name, value in sets.items()}
        values |= {f"add_{name}": value for name, value in change.adds.items()}
        update = "SET " + ", ".join(f"#{name} = :set_{name}" for name in sets)
        if change.adds:
            update += " ADD " + ", ".join(f"#{name} :add_{name}" for name in change.adds)
        if removes:
            update += " REMOVE " + ", ".join(f"#{name.lstrip('#')}" for name in removes)
        condition = "#version = :known_version"
        if change.condition:
            condition += f" AND ({change.condition})"
        return Expression(update, condition, values)

    async def decide(
        self, row: RunRow, decision: Callable[[RunRow], Change | None], *, now: int
    ) -> RunRow | None:
        """Make the change that `decision` makes of a row, of the latest one where it has moved; the
        row afterwards. None, and nothing written, where it decides for none, or the run is gone."""
        known: RunRow | None = row
        for _ in range(TRIES):
            change = None if known is None else decision(known)
            if known is None or change is None:
                return None
            try:
                return await self.change(known, change, now=now)
            except RunMoved:
                known = await self.read_at(row.place)
        raise changed_too_often()

    async def settle_status(self, row: RunRow, *, now: int) -> RunRow:
        """Let a live run's status follow the counters of the row that a write returned; the row
        afterwards. Every writer that can be the last one calls this with what it got back."""
        for _ in range(TRIES):
            run = row.run
            if run.status not in LIVE_RUN_STATES:
                return row
            status = live_run_status(
                run.stats, job_closed=run.last_batch_received, ingesting=run.ingesting
            )
            if status is run.status:
                return row
            try:
                return await self.change(row, Change(status=status), now=now)
            except RunMoved:
                again = await self.read_at(row.place)
                if again is None:
                    return row
                row = again
        raise changed_too_often()

    async def shown(self, row: RunRow) -> RunRow:
        """A row as a reader may see it. Its status follows the last addition to the counters in a
        write of its own: a reader who comes between the two, or after a crash there, makes it."""
        return await self.settle_status(row, now=row.run.updated_at)


def _state(
    row: RunRow, change: Change, at: int, sets: dict[str, Plain], removes: list[str]
) -> None:
    """What comes along with a change of state."""
    run = row.run
    status = change.status or run.status
    paused = run.paused if change.paused is None else change.paused
    ingesting = run.ingesting if change.ingesting is None else change.ingesting
    unsettled = _is_unsettled(row, change)
    sets |= {"status": str(status), "paused": paused, "ingesting": ingesting}
    if unsettled is not row.unsettled:
        sets["unsettled"] = unsettled
    sets["dispatch_changed_at"] = at
    if status not in LIVE_RUN_STATES and not row.ended_at:
        sets["ended_at"] = at
    keys = index_keys(
        run.run_id,
        status,
        paused=paused,
        ingesting=ingesting,
        unsettled=unsettled,
        changed_at=at,
    )
    for name, value in keys.items():
        if value is None:
            removes.append(name)
        else:
            sets[name] = value


def _is_unsettled(row: RunRow, change: Change) -> bool:
    """Whether a run is, after a change. Calls in flight of one that is cut short still end, and
    whoever makes them may be lost between a row's end and its addition to the counters."""
    if change.unsettled is not None:
        return change.unsettled
    cut_short = change.status in _CUT_SHORT and row.run.stats.completed < row.run.stats.total
    return row.unsettled or cut_short
