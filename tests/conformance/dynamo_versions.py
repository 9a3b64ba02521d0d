"""A table with a process of this version on it, an older one, and a newer one.

The older one leaves out what has a default; the newer one adds an attribute to every item, and a
field to every JSON text, that no other version knows.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio.to_thread

from conveyor.clock import SystemClock
from conveyor.ports.exports import Export, ExportFormat, ExportStatus
from conveyor.prod.aws.calls import Answer, Aws, Parameters
from conveyor.prod.aws.client import AwsClient
from conveyor.prod.aws.opening import over_clients
from conveyor.prod.dynamodb.client import SHAPE, Item, Table, Tagged, tag, untag_all
from conveyor.prod.dynamodb.schema import (
    KNOWN_SHAPE,
    PARTITION_KEY,
    SORT_KEY,
    Key,
    table_parameters,
)
from conveyor.prod.dynamodb.store import open_store
from conveyor.testing.clock import FakeClock
from tests.conformance.production_store import account, dynamodb, new_name
from tests.conformance.world import CALLER, World

LATER = "added_later"
"""An attribute and a field that only the newer process knows."""
_NOT_YET = ("shard_scheme", "external_id", "max_attempts", "result_ttl_days")
"""Fields that the older process does not know, and that have a default."""

Tagging = dict[str, Tagged]


def _with_later_field(text: str) -> str:
    return json.dumps({**json.loads(text), LATER: [1, {"deep": None}]})


def _without_new_fields(text: str) -> str:
    fields = json.loads(text)
    return json.dumps({name: value for name, value in fields.items() if name not in _NOT_YET})


def _texts(values: Tagging, change: Callable[[str], str]) -> Tagging:
    """Values with every JSON text of a record changed, those in lists too."""

    def changed(value: Tagged) -> Tagged:
        if "L" in value:
            return {"L": [changed(one) for one in value["L"]]}
        return {"S": change(value["S"])} if value.get("S", "").startswith("{") else value

    return {name: changed(value) for name, value in values.items()}


class _OtherVersion:
    """A transport that writes items as another version does."""

    def __init__(self, aws: Aws, change: Callable[[str], str], more: Tagging) -> None:
        self._aws = aws
        self._change = change
        self._more = more

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        return await self._aws.call(service, operation, self._rewritten(operation, parameters))

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        return self._aws.presign(operation, parameters, seconds=seconds)

    def _rewritten(self, operation: str, parameters: Parameters) -> Parameters:
        match operation:
            case "put_item" | "update_item":
                return self._write(parameters)
            case "transact_write_items":
                parts = [
                    {kind: self._write(body) for kind, body in part.items()}
                    for part in parameters["TransactItems"]
                ]
                return {**parameters, "TransactItems": parts}
            case "batch_execute_statement":
                return {"Statements": [self._insert(one) for one in parameters["Statements"]]}
        return parameters

    def _write(self, body: Parameters) -> Parameters:
        changed = dict(body)
        if "Item" in body:
            changed["Item"] = {**_texts(body["Item"], self._change), **self._more}
        elif "UpdateExpression" in body:
            values = body["ExpressionAttributeValues"]
            changed["ExpressionAttributeValues"] = _texts(values, self._change)
        return changed

    def _insert(self, statement: Parameters) -> Parameters:
        names = "".join(f",'{name}':?" for name in self._more)
        given = dict(enumerate(statement["Parameters"]))
        values = _texts({str(number): value for number, value in given.items()}, self._change)
        return {
            "Statement": statement["Statement"].replace("}", f"{names}}}"),
            "Parameters": [*values.values(), *self._more.values()],
        }


@dataclass(frozen=True, slots=True)
class Versions:
    """One table, and three processes on it."""

    table: Table
    older: World
    today: World
    newer: World
    aws: AwsClient

    async def item(self, key: Key) -> Item:
        """An item as it lies there, of any shape."""
        answer = await self.aws.call(
            "dynamodb",
            "get_item",
            {"TableName": self.table.name, "Key": _tagged(key), "ConsistentRead": True},
        )
        return untag_all(answer["Item"])

    async def raise_shape(self, key: Key) -> Item:
        """Let an item be of the next shape; the whole of it."""
        answer = await self.aws.call(
            "dynamodb",
            "update_item",
            {
                "TableName": self.table.name,
                "Key": _tagged(key),
                "UpdateExpression": f"SET {SHAPE} = :next",
                "ConditionExpression": "attribute_exists(pk)",
                "ExpressionAttributeValues": {":next": tag(KNOWN_SHAPE + 1)},
                "ReturnValues": "ALL_NEW",
            },
        )
        return untag_all(answer["Attributes"])

    async def items(self) -> list[Item]:
        """Everything that lies there."""
        answer = await self.table.call("scan", ConsistentRead=True)
        return [untag_all(item) for item in answer["Items"]]


def _tagged(key: Key) -> Tagging:
    return {PARTITION_KEY: tag(key.pk), SORT_KEY: tag(key.sk)}


def what_later_versions_wrote(item: Item) -> dict[str, Any]:
    """The attribute and the fields of an item that only the newer process knows, by name."""
    found = {LATER: item[LATER]} if LATER in item else {}
    texts = {name: text for name, text in item.items() if _is_record(text)}
    texts |= {f"event {number}": text for number, text in enumerate(item.get("events", []))}
    fields = {name: json.loads(text).get(LATER) for name, text in texts.items()}
    return found | {name: field for name, field in fields.items() if field is not None}


def _is_record(value: object) -> bool:
    return isinstance(value, str) and value.startswith("{")


@asynccontextmanager
async def open_versions(clock: FakeClock) -> AsyncIterator[Versions]:
    """An empty table, removed in the end."""
    client, options = await anyio.to_thread.run_sync(dynamodb)
    system = SystemClock()
    aws = over_clients({"dynamodb": client}, options, system, credentials=account())
    name = new_name()
    await aws.call("dynamodb", "create_table", table_parameters(name))
    seams: list[Aws] = [
        _OtherVersion(aws, _without_new_fields, {}),
        aws,
        _OtherVersion(aws, _with_later_field, {LATER: tag("kept")}),
    ]
    stores = [
        await open_store(
            seam, table=name, clock=system, worker=secrets.token_hex(6), flush_interval=0
        )
        for seam in seams
    ]
    older, today, newer = (World(store, clock) for store in stores)
    yield Versions(Table(aws, name, system), older, today, newer, aws)
    for store in stores:
        await store.aclose()
    await aws.call("dynamodb", "delete_table", {"TableName": name})
    await aws.aclose()


def export_of(world: World, job_id: str, run_id: str) -> Export:
    """An export of a run, to be made; it lives for an hour."""
    return Export(
        export_id=world.clock.new_id(),
        job_id=job_id,
        run_id=run_id,
        format=ExportFormat.ZIP,
        status=ExportStatus.PENDING,
        created_at=world.now,
        updated_at=world.now,
        expires_at=world.now + 3_600_000,
    )


async def pause(world: World, job_id: str, *, paused: bool) -> None:
    """Pause the latest run of a job, or let it go on."""
    await world.store.runs.pause_run(CALLER, job_id, paused=paused, now=world.now)
