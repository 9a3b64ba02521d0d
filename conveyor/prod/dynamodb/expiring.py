"""The ports of records that expire: file inputs and exports.

A file input is one item, with the slot as one JSON text and the size of its upload. An export is
one item too, with a mark beside its job. Every write of an export is a transaction that also checks
the run's row, so no export of a deleted run begins or ends. The mark lets a strong read find all
exports of a run that is being removed.
"""

from __future__ import annotations

from typing import Any

import msgspec

from conveyor.domain.errors import not_found
from conveyor.domain.model import RunStatus
from conveyor.ports.exports import Export, ExportStatus
from conveyor.ports.inputs import JobInput
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import (
    Item,
    Query,
    RowFilter,
    Table,
    contention_error,
    decode_intact,
    decodes_row,
    expired_items,
    expiry_attributes,
    keys_of,
    merge_json,
)
from conveyor.prod.dynamodb.run_rows import TRIES, DynamoRunRows, RunPlace
from conveyor.prod.dynamodb.schema import (
    BY_DISPATCH,
    EXPORTS,
    INPUTS,
    PARTITION_KEY,
    ROW_SHAPE,
    TIME_TO_LIVE,
    Key,
    export_item_key,
    export_mark_key,
    input_item_key,
)

UNFINISHED = (ExportStatus.PENDING, ExportStatus.RUNNING)

_slot = msgspec.json.Decoder(JobInput)
_export = msgspec.json.Decoder(Export)


class DynamoInputs:
    """The inputs port."""

    def __init__(self, table: Table) -> None:
        self._table = table

    async def create_input(self, job_input: JobInput) -> None:
        input_id = job_input.input_id
        item: Item = {
            "shape": ROW_SHAPE,
            "slot": msgspec.json.encode(job_input).decode(),
            "size": job_input.size,
            **expiry_attributes(INPUTS, input_id, job_input.expires_at),
        }
        try:
            await self._table.put(
                input_item_key(input_id), item, condition="attribute_not_exists(pk)"
            )
        except AwsRefused as refused:
            # An earlier try wrote the slot, and its answer was lost. It keeps an upload's size.
            if not refused.is_condition:
                raise

    async def get_input(self, input_id: str) -> JobInput | None:
        item = await self._table.get(input_item_key(input_id))
        return None if item is None else _read_input(item)

    async def input_uploaded(self, input_id: str, *, size: int) -> bool:
        try:
            await self._table.update(
                input_item_key(input_id),
                "SET #size = :size",
                condition="attribute_exists(pk)",
                size=size,
            )
        except AwsRefused as refused:
            if not refused.is_condition:
                raise
            return False
        return True

    async def expired_inputs(self, *, now: int, limit: int) -> list[str]:
        items = await expired_items(self._table, INPUTS, now=now, limit=limit)
        ids = [item[PARTITION_KEY].partition("#")[2] for item in items]
        # Skip items under other keys: dropping them has no effect, so each sweep would find them.
        return [
            input_id
            for input_id, item in zip(ids, items, strict=True)
            if input_item_key(input_id).pk == item[PARTITION_KEY]
        ]

    async def drop_input(self, input_id: str) -> None:
        await self._table.delete(input_item_key(input_id))


@decodes_row
def _read_input(item: Item) -> JobInput:
    return msgspec.structs.replace(_slot.decode(item["slot"]), size=item["size"])


class DynamoExports:
    """The exports port. `Deletion.purge_run` removes a run's exports."""

    def __init__(self, records: DynamoRunRows) -> None:
        self._table = records.table
        self._places = records.places

    async def create_export(self, export: Export) -> None:
        place = await self._places.find(export.run_id)
        if place is None or place.job_id != export.job_id:
            raise not_found("run")
        new = self._table.put_part(
            export_item_key(export.export_id),
            _item(export),
            condition="attribute_not_exists(pk)",
        )
        mark = self._table.put_part(
            export_mark_key(export.job_id, export.run_id, export.export_id), _mark(export)
        )
        try:
            await self._table.transact(
                [self._run_exists_part(place), new, mark], token=self._table.clock.new_id()
            )
        except AwsRefused as refused:
            if not refused.is_condition:
                raise
            if _is_run_gone(refused):
                raise not_found("run") from None
            # An earlier try wrote it, and its answer was lost.

    async def get_export(self, export_id: str) -> Export | None:
        item = await self._table.get(export_item_key(export_id))
        return None if item is None else _read_export(item)

    async def latest_exports(self, job_id: str, run_id: str, *, limit: int) -> list[Export]:
        mark = export_mark_key(job_id, run_id, "")
        found: list[Key] = []
        marks = Query(mark.pk, begins_with=mark.sk, keys_only=True, forward=False, limit=limit)
        async for page in self._table.pages(marks):
            found += [export_item_key(key.sk.rpartition("#")[2]) for key in keys_of(page.items)]
            if len(found) >= limit:
                break
        items = await self._table.get_many(found[:limit])
        exports = decode_intact(_read_export, items.values())
        return sorted(exports, key=lambda export: export.export_id, reverse=True)

    async def begin_export(self, export_id: str, *, now: int) -> Export | None:
        return await self._move(export_id, now=now, status=ExportStatus.RUNNING)

    async def touch_export(self, export_id: str, *, now: int) -> None:
        await self._move(export_id, now=now)

    async def end_export(
        self, export_id: str, *, size: int | None, error: str | None, now: int
    ) -> bool:
        status = ExportStatus.COMPLETED if error is None else ExportStatus.FAILED
        moved = await self._move(export_id, now=now, status=status, size=size, error=error)
        return moved is not None

    async def unfinished_exports(self, *, before: int) -> list[Export]:
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
        # The index lags: check status and time on the items.
        items = await self._table.get_many(keys)
        found = decode_intact(_read_export, items.values())
        due = [one for one in found if one.status in UNFINISHED and one.updated_at < before]
        return sorted(due, key=lambda export: export.export_id)

    async def expired_exports(self, *, now: int, limit: int) -> list[Export]:
        items = await expired_items(self._table, EXPORTS, now=now, limit=limit)
        return decode_intact(_read_export, items)

    async def drop_export(self, export_id: str) -> None:
        export = await self.get_export(export_id)
        if export is not None:
            # A crash between the two leaves a mark, which expires by itself.
            await self._table.delete(export_item_key(export_id))
            await self._table.delete(export_mark_key(export.job_id, export.run_id, export_id))

    async def _move(self, export_id: str, *, now: int, **fields: Any) -> Export | None:
        """Write other fields of an unfinished export; return None if it has ended, expired, or its
        run is gone."""
        for _ in range(TRIES):
            item = await self._table.get(export_item_key(export_id))
            if item is None:
                return None
            known = _read_export(item)
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
                export=merge_json(item["export"], after),
                status=str(after.status),
                updated_at=after.updated_at,
                known_status=str(known.status),
                known_at=known.updated_at,
            )
            try:
                await self._table.transact(
                    [self._run_exists_part(place), changed], token=self._table.clock.new_id()
                )
            except AwsRefused as refused:
                if not refused.is_condition:
                    raise
                if _is_run_gone(refused):
                    return None
                continue
            return after
        raise contention_error()

    def _run_exists_part(self, place: RunPlace) -> dict[str, Any]:
        """Describe the condition that a run exists and is not deleted."""
        return self._table.check_part(
            place.key,
            condition="run_id = :run_id AND #status <> :deleted",
            run_id=place.run_id,
            deleted=str(RunStatus.DELETED),
        )


def _is_run_gone(refused: AwsRefused) -> bool:
    return refused.reasons[0] == "ConditionalCheckFailed"


@decodes_row
def _read_export(item: Item) -> Export:
    return _export.decode(item["export"])


def _mark(export: Export) -> Item:
    """Make the mark beside the job. It is found by its key and lies in no index."""
    ends = expiry_attributes(EXPORTS, export.export_id, export.expires_at)
    return {"shape": ROW_SHAPE, TIME_TO_LIVE: ends[TIME_TO_LIVE]}


def _item(export: Export) -> Item:
    return {
        "shape": ROW_SHAPE,
        "export": msgspec.json.encode(export).decode(),
        "status": str(export.status),
        "updated_at": export.updated_at,
        "job_id": export.job_id,
        "run_id": export.run_id,
        **expiry_attributes(EXPORTS, export.export_id, export.expires_at),
    }
