"""Slots for uploaded files of tasks, an item each: the slot as one text, and its size, which
changes."""

from __future__ import annotations

import msgspec

from conveyor.ports.inputs import JobInput
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import Item, Table, ended, ends_at, whole
from conveyor.prod.dynamodb.schema import INPUTS, PARTITION_KEY, ROW_SHAPE, input_item_key

_slot = msgspec.json.Decoder(JobInput)


class DynamoInputs:
    """The inputs port."""

    def __init__(self, table: Table) -> None:
        self._table = table

    async def create_input(self, job_input: JobInput) -> None:
        """Write a new slot; one that is there already stays, with the size of its upload."""
        input_id = job_input.input_id
        item: Item = {
            "shape": ROW_SHAPE,
            "slot": msgspec.json.encode(job_input).decode(),
            "size": job_input.size,
            **ends_at(INPUTS, input_id, job_input.expires_at),
        }
        try:
            await self._table.put(
                input_item_key(input_id), item, condition="attribute_not_exists(pk)"
            )
        except AwsRefused as refused:
            # The answer of the write before this one was lost.
            if not refused.is_condition:
                raise

    async def get_input(self, input_id: str) -> JobInput | None:
        """A slot by its id, expired ones included."""
        item = await self._table.get(input_item_key(input_id))
        return None if item is None else _read(item)

    async def input_uploaded(self, input_id: str, *, size: int) -> bool:
        """Note a complete upload; False where the slot is gone."""
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
        """Ids of slots past their time, those first whose time ended first."""
        items = await ended(self._table, INPUTS, now=now, limit=limit)
        ids = [item[PARTITION_KEY].partition("#")[2] for item in items]
        # What is none lies under another key, and would be found again for ever.
        return [
            input_id
            for input_id, item in zip(ids, items, strict=True)
            if input_item_key(input_id).pk == item[PARTITION_KEY]
        ]

    async def drop_input(self, input_id: str) -> None:
        """Remove a slot."""
        await self._table.delete(input_item_key(input_id))


@whole
def _read(item: Item) -> JobInput:
    return msgspec.structs.replace(_slot.decode(item["slot"]), size=item["size"])
