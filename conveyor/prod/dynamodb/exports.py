"""Exports of runs, an item each. Whatever is written of one goes together with a look at its run's
row: nothing begins or ends of a run that is deleted."""

from __future__ import annotations

from typing import Any

import msgspec

from conveyor.domain.errors import not_found
from conveyor.domain.model import RunStatus
from conveyor.ports.exports import Export, ExportStatus
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import (
    Item,
    Query,
    RowFilter,
    changed_too_often,
    ended,
    ends_at,
    keys_of,
    readable,
    rewritten,
    whole,
)
from conveyor.prod.dynamodb.run_rows import TRIES, DynamoRunRows, RunPlace
from conveyor.prod.dynamodb.schema import (
    BY_DISPATCH,
    EXPORTS,
    ROW_SHAPE,
    TIME_TO_LIVE,
    Key,
    export_item_key,
    exported_key,
)

UNFINISHED = (ExportStatus.PENDING, ExportStatus.RUNNING)

_export = msgspec.json.Decoder(Export)


class DynamoExports:
    """The exports port. A run's exports are removed with it: see `deleting`."""

    def __init__(self, records: DynamoRunRows) -> None:
        self._table = records.table
        self._places = records.places

    async def create_export(self, export: Export) -> None:
        """Write a new export. Raises ConveyorError(not_found) where its run is deleted or gone."""
        place = await self._places.find(export.run_id)
        if place is None or place.job_id != export.job_id:
            raise not_found("run")
        new = self._table.put_part(
            export_item_key(export.export_id),
            _item(export),
            condition="attribute_not_exists(pk)",
        )
        mark = self._table.put_part(
            exported_key(export.job_id, export.run_id, export.export_id), _mark(export)
        )
        try:
            await self._table.transact(
                [self._run_stands(place), new, mark], token=self._table.clock.new_id()
            )
        except AwsRefused as refused:
            if not refused.is_condition:
                raise
            if _is_run_gone(refused):
                raise not_found("run") from None
            # It was written before, by a call that was not answered.

    async def get_export(self, export_id: str) -> Export | None:
        """An export by its id, expired ones included."""
        item = await self._table.get(export_item_key(export_id))
        return None if item is None else _read(item)

    async def begin_export(self, export_id: str, *, now: int) -> Export | None:
        """Mark it running; None where it has ended, expired, or its run is deleted or gone."""
        return await self._move(export_id, now=now, status=ExportStatus.RUNNING)

    async def touch_export(self, export_id: str, *, now: int) -> None:
        """Note that it waits for its turn."""
        await self._move(export_id, now=now)

    async def end_export(
        self, export_id: str, *, size: int | None, error: str | None, now: int
    ) -> bool:
        """Complete it with a size, or fail it with an error; False where it is too late."""
        status = ExportStatus.COMPLETED if error is None else ExportStatus.FAILED
        moved = await self._move(export_id, now=now, status=status, size=size, error=error)
        return moved is not None

    async def unfinished_exports(self, *, before: int) -> list[Export]:
        """Exports that have not ended and were last touched before `before`, by export id."""
        keys: list[Key] = []
        async for page in self._table.pages(
            Query(
                EXPORTS,
                index=BY_DISPATCH,
                where=RowFilter(
                    "#status IN (:pending, :running)",
                    {"pending": str(ExportStatus.PENDING), "running": str(ExportStatus.RUNNING)},
                ),
            )
        ):
            keys += keys_of(page.items)
        # An index may know of others still.
        items = await self._table.get_many(keys)
        found = readable(_read, items.values())
        due = [one for one in found if one.status in UNFINISHED and one.updated_at < before]
        return sorted(due, key=lambda export: export.export_id)

    async def expired_exports(self, *, now: int, limit: int) -> list[Export]:
        """Exports past their time, those first whose time ended first."""
        items = await ended(self._table, EXPORTS, now=now, limit=limit)
        return readable(_read, items)

    async def drop_export(self, export_id: str) -> None:
        """Remove an export. Without effect where it is gone."""
        export = await self.get_export(export_id)
        if export is not None:
            # Cut off between the two, a mark is left that ends by itself.
            await self._table.delete(export_item_key(export_id))
            await self._table.delete(exported_key(export.job_id, export.run_id, export_id))

    async def _move(self, export_id: str, *, now: int, **fields: Any) -> Export | None:
        """An export with other fields; None where it does not go on."""
        for _ in range(TRIES):
            item = await self._table.get(export_item_key(export_id))
            if item is None:
                return None
            known = _read(item)
            if known.status not in UNFINISHED or known.expires_at <= now:
                return None
            place = await self._places.find(known.run_id)
            if place is None:
                return None
            after = msgspec.structs.replace(known, updated_at=max(known.updated_at, now), **fields)
            changed = self._table.update_part(
                export_item_key(export_id),
                "SET #export = :export, #status = :status, updated_at = :updated_at",
                condition="#status = :known_status AND updated_at = :known_at",
                export=rewritten(item["export"], after),
                status=str(after.status),
                updated_at=after.updated_at,
                known_status=str(known.status),
                known_at=known.updated_at,
            )
            try:
                await self._table.transact(
                    [self._run_stands(place), changed], token=self._table.clock.new_id()
                )
            except AwsRefused as refused:
                if not refused.is_condition:
                    raise
                if _is_run_gone(refused):
                    return None
                continue
            return after
        raise changed_too_often()

    def _run_stands(self, place: RunPlace) -> dict[str, Any]:
        """The condition that a run is neither deleted nor gone."""
        return self._table.check_part(
            place.key,
            condition="run_id = :run_id AND #status <> :deleted",
            run_id=place.run_id,
            deleted=str(RunStatus.DELETED),
        )


def _is_run_gone(refused: AwsRefused) -> bool:
    return refused.reasons[0] == "ConditionalCheckFailed"


@whole
def _read(item: Item) -> Export:
    return _export.decode(item["export"])


def _mark(export: Export) -> Item:
    """What lies beside the job for it. It is found by its key, and in no index."""
    ends = ends_at(EXPORTS, export.export_id, export.expires_at)
    return {"shape": ROW_SHAPE, TIME_TO_LIVE: ends[TIME_TO_LIVE]}


def _item(export: Export) -> Item:
    return {
        "shape": ROW_SHAPE,
        "export": msgspec.json.encode(export).decode(),
        "status": str(export.status),
        "updated_at": export.updated_at,
        "job_id": export.job_id,
        "run_id": export.run_id,
        **ends_at(EXPORTS, export.export_id, export.expires_at),
    }
