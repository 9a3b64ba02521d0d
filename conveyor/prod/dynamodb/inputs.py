"""The inputs port: one item a file input, with the slot as one JSON text and the size of its
upload."""

from __future__ import annotations

import msgspec

from conveyor.ports.inputs import JobInput
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import Item, Table, decodes_row, expired_items, expiry_attributes
from conveyor.prod.dynamodb.schema import INPUTS, PARTITION_KEY, ROW_SHAPE, input_item_key

_slot = msgspec.json.Decoder(JobInput)


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
        return None if item is None else _read(item)

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
def _read(item: Item) -> JobInput:
    return msgspec.structs.replace(_slot.decode(item["slot"]), size=item["size"])
