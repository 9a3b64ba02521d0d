"""The table as the adapters ask it: items by key, pages by partition, many writes at once."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from conveyor.aio.concurrency import side_by_side
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
from conveyor.prod.aws.calls import Aws, AwsRefused
from conveyor.prod.aws.leftovers import to_the_last
from conveyor.prod.dynamodb.keys import Key
from conveyor.prod.dynamodb.shapes import KNOWN, SHAPE, is_newer, known, refuse_newer
from conveyor.prod.dynamodb.table import INDEXES, PARTITION_KEY, ROW_SHAPE, SORT_KEY
from conveyor.prod.dynamodb.values import Given, Name, Plain, Tagged, tag, tag_all, untag, untag_all

Item = dict[str, Any]
"""An item, untagged."""
MOST_GET = 100
"""Items that one BatchGetItem takes."""
MOST_DELETE = 25
"""Deletions that one BatchWriteItem takes."""
UNDONE = "dynamodb leaves a part of each batch undone"

_NAME = re.compile(r"#\w+")


class Page(NamedTuple):
    """Items of one query, and from where the next one goes on (None: there is nothing more).

    `read` counts the items that the query touched, returned or filtered away.
    """

    items: list[Item]
    read: int
    last: dict[str, Tagged] | None


class Table:
    """One table behind the seam.

    Expressions write `:one` for a value that is given as `one`, and `#one` for the attribute of
    that name, as where it is a word of DynamoDB's own; for another attribute where `one` is given
    as a `Name`.

    Whatever reads or writes single items, or a partition, raises NewerShape where it meets an item
    of a shape that this version does not know: see `shapes`.
    """

    def __init__(self, aws: Aws, name: str, clock: Clock) -> None:
        self.name = name
        self.clock = clock
        self._aws = aws

    async def call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        """Any call of DynamoDB on this table."""
        return await self._aws.call("dynamodb", operation, {"TableName": self.name, **parameters})

    async def get(self, key: Key, *, consistent: bool = True) -> Item | None:
        """One item."""
        answer = await self.call("get_item", Key=_key(key), ConsistentRead=consistent)
        if "Item" not in answer:
            return None
        item = untag_all(answer["Item"])
        refuse_newer(item)
        return item

    async def get_many(self, keys: Sequence[Key]) -> dict[Key, Item]:
        """Those of the items that exist and that this version knows, strongly read; any number of
        keys, of which some may be the same."""
        found: dict[Key, Item] = {}

        async def get(some: Sequence[Key]) -> None:
            await self._to_the_last(call, [_key(key) for key in some])

        async def call(left: list[dict[str, Tagged]]) -> list[dict[str, Tagged]]:
            request = {self.name: {"Keys": left, "ConsistentRead": True}}
            answer = await self._aws.call("dynamodb", "batch_get_item", {"RequestItems": request})
            for tagged in answer["Responses"].get(self.name, []):
                item = untag_all(tagged)
                if not is_newer(item):
                    found[Key(item[PARTITION_KEY], item[SORT_KEY])] = item
            undone: list[dict[str, Tagged]] = (
                answer.get("UnprocessedKeys", {}).get(self.name, {}).get("Keys", [])
            )
            return undone

        # What moves within an index while that is read is found twice, and a batch takes it once.
        await side_by_side(get, _pieces([*dict.fromkeys(keys)], MOST_GET))
        return found

    async def put(
        self,
        key: Key,
        item: Mapping[str, Plain],
        *,
        condition: str = "",
        **values: Given,
    ) -> None:
        """Write a whole item. Raises AwsRefused, with the item that the condition met."""
        body: dict[str, Any] = {"Item": {**_key(key), **tag_all(item)}}
        await self._write("put_item", **_conditional(body, condition, values))

    async def update(
        self,
        key: Key,
        update: str,
        *,
        condition: str,
        **values: Given,
    ) -> Item:
        """Change one item; the whole of it afterwards.

        Raises AwsRefused, with the item that the condition met (untag it before use).
        """
        body = {"Key": _key(key), "UpdateExpression": update, "ReturnValues": "ALL_NEW"}
        answer = await self._write("update_item", **_conditional(body, condition, values))
        return untag_all(answer["Attributes"])

    async def delete(
        self,
        key: Key,
        *,
        condition: str = "",
        **values: Given,
    ) -> None:
        """Remove one item, where there is one. Raises AwsRefused."""
        body: dict[str, Any] = {"Key": _key(key)}
        await self._write("delete_item", **_conditional(body, condition, values))

    async def transact(self, parts: Sequence[Mapping[str, Any]], *, token: str) -> None:
        """Up to 100 parts, made by `put_part`, `update_part`, `delete_part`, `check_part`: all or
        nothing. The same `token` (at most 36 characters) within ten minutes does nothing twice.

        Raises AwsRefused with the parts' reasons, and their items where conditions were not met.
        """
        try:
            await self._aws.call(
                "dynamodb",
                "transact_write_items",
                {"TransactItems": list(parts), "ClientRequestToken": token},
            )
        except AwsRefused as refused:
            _refuse_newer(*refused.items)
            raise

    def put_part(
        self,
        key: Key,
        item: Mapping[str, Plain],
        *,
        condition: str = "",
        **values: Given,
    ) -> dict[str, Any]:
        """A put within a transaction."""
        body: dict[str, Any] = {"TableName": self.name, "Item": {**_key(key), **tag_all(item)}}
        return {"Put": _conditional(body, condition, values)}

    def update_part(
        self,
        key: Key,
        update: str,
        *,
        condition: str,
        **values: Given,
    ) -> dict[str, Any]:
        """An update within a transaction."""
        body = {"TableName": self.name, "Key": _key(key), "UpdateExpression": update}
        return {"Update": _conditional(body, condition, values)}

    def delete_part(
        self,
        key: Key,
        *,
        condition: str = "",
        **values: Given,
    ) -> dict[str, Any]:
        """A deletion within a transaction."""
        body = {"TableName": self.name, "Key": _key(key)}
        return {"Delete": _conditional(body, condition, values)}

    def check_part(
        self,
        key: Key,
        *,
        condition: str,
        **values: Given,
    ) -> dict[str, Any]:
        """A condition within a transaction, on an item that it does not write."""
        body = {"TableName": self.name, "Key": _key(key)}
        return {"ConditionCheck": _conditional(body, condition, values)}

    async def page(
        self,
        partition: str,
        *,
        index: str | None = None,
        begins_with: str = "",
        between: tuple[str, str] | None = None,
        below: str = "",
        filtered: str = "",
        limit: int | None = None,
        start: dict[str, Tagged] | None = None,
        forward: bool = True,
        keys_only: bool = False,
        projection: str = "",
        known_only: bool = False,
        **values: Given,
    ) -> Page:
        """One query of a partition of the table or of an index, strongly read from the table.

        `between` takes both its ends, `below` does not take its own. `limit` bounds the items
        touched, not those returned. `keys_only` returns partition and sort key alone, `projection`
        beside them the attributes that it lists (and costs as much). `known_only` leaves out items
        of a shape that this version does not know. Indexes do not tell shapes, nor do keys.
        """
        pk, sk = (PARTITION_KEY, SORT_KEY) if index is None else INDEXES[index][:2]
        condition, bounds = _sorted(sk, between=between, below=below, begins_with=begins_with)
        parameters: dict[str, Any] = {
            "KeyConditionExpression": f"{pk} = :partition{condition}",
            "ScanIndexForward": forward,
            **_placeholders({**values, **bounds, "partition": partition}, filtered, projection),
        }
        parameters |= {"ConsistentRead": True} if index is None else {"IndexName": index}
        if filtered:
            parameters["FilterExpression"] = filtered
        if limit is not None:
            parameters["Limit"] = limit
        if start is not None:
            parameters["ExclusiveStartKey"] = start
        if keys_only:
            parameters["ProjectionExpression"] = f"{PARTITION_KEY}, {SORT_KEY}"
        elif projection:
            keys = f"{PARTITION_KEY}, {SORT_KEY}"
            parameters["ProjectionExpression"] = f"{keys}, {projection}, {SHAPE}"
        answer = await self.call("query", **parameters)
        items = known([untag_all(item) for item in answer["Items"]], known_only=known_only)
        return Page(items, answer["ScannedCount"], answer.get("LastEvaluatedKey"))

    async def pages(self, partition: str, **query: Any) -> AsyncIterator[Page]:
        """Every page of a query; arguments as of `page`."""
        start: dict[str, Tagged] | None = None
        while True:
            page = await self.page(partition, start=start, **query)
            yield page
            start = page.last
            if start is None:
                return

    async def count(self, partition: str, *, begins_with: str) -> int:
        """How many items a partition has, strongly read, without fetching them."""
        parameters: dict[str, Any] = {
            "KeyConditionExpression": f"{PARTITION_KEY} = :partition "
            f"AND begins_with({SORT_KEY}, :begin)",
            "ConsistentRead": True,
            **_placeholders({"partition": partition, "begin": begins_with}),
            "Select": "COUNT",
        }
        total = 0
        while True:
            answer = await self.call("query", **parameters)
            total += int(answer["Count"])
            if "LastEvaluatedKey" not in answer:
                return total
            parameters["ExclusiveStartKey"] = answer["LastEvaluatedKey"]

    async def execute_batch(self, statements: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Up to 25 PartiQL statements, each for itself; their answers in order, each with an
        `Error` of `Code` and `Message` where it failed."""
        answer = await self._aws.call(
            "dynamodb", "batch_execute_statement", {"Statements": list(statements)}
        )
        responses: list[dict[str, Any]] = answer["Responses"]
        return responses

    async def delete_many(self, keys: Sequence[Key]) -> None:
        """Remove items, whatever they are by now, of any shape; any number, 25 a call, calls side
        by side."""

        async def delete(some: Sequence[Key]) -> None:
            await self._to_the_last(call, [{"DeleteRequest": {"Key": _key(key)}} for key in some])

        async def call(left: list[dict[str, Any]]) -> list[dict[str, Any]]:
            answer = await self._aws.call(
                "dynamodb", "batch_write_item", {"RequestItems": {self.name: left}}
            )
            undone: list[dict[str, Any]] = answer.get("UnprocessedItems", {}).get(self.name, [])
            return undone

        await side_by_side(delete, _pieces(keys, MOST_DELETE))

    async def _write(self, operation: str, **parameters: Any) -> dict[str, Any]:
        """A conditional write. A refusal by an item of a newer shape says nothing else of it."""
        try:
            return await self.call(operation, **parameters)
        except AwsRefused as refused:
            _refuse_newer(refused.item)
            raise

    async def _to_the_last(
        self,
        call: Callable[[list[dict[str, Any]]], Awaitable[list[dict[str, Any]]]],
        entries: list[dict[str, Any]],
    ) -> None:
        await to_the_last(call, entries, self.clock, complaint=UNDONE)


def keys_of(items: Sequence[Item]) -> list[Key]:
    """The keys of items."""
    return [Key(item[PARTITION_KEY], item[SORT_KEY]) for item in items]


def met(refused: AwsRefused) -> Item | None:
    """The item that a condition met, untagged; None where there was none."""
    return None if not refused.item else untag_all(refused.item)


def changed_too_often() -> ConveyorError:
    """What is raised where an optimistic write lost every race."""
    return ConveyorError(ErrorCode.UNAVAILABLE, "the record is changing too fast", retry_after=1)


def _pieces(keys: Sequence[Key], size: int) -> list[Sequence[Key]]:
    return [keys[start : start + size] for start in range(0, len(keys), size)]


def _key(key: Key) -> dict[str, Tagged]:
    return {PARTITION_KEY: tag(key.pk), SORT_KEY: tag(key.sk)}


def _sorted(
    key: str, *, between: tuple[str, str] | None, below: str, begins_with: str
) -> tuple[str, dict[str, Plain]]:
    """What bounds a sort key, to stand behind the condition on its partition; and its values."""
    if between is not None:
        low, high = between
        return f" AND {key} BETWEEN :low AND :high", {"low": low, "high": high}
    if below:
        return f" AND {key} < :below", {"below": below}
    if begins_with:
        return f" AND begins_with({key}, :begin)", {"begin": begins_with}
    return "", {}


def _conditional(
    body: dict[str, Any], condition: str, values: Mapping[str, Given]
) -> dict[str, Any]:
    if " OR " in condition:
        condition = f"({condition})"
    condition = f"{condition} AND {KNOWN}" if condition else KNOWN
    body["ConditionExpression"] = condition
    body["ReturnValuesOnConditionCheckFailure"] = "ALL_OLD"
    given = {**values, "known_shape": ROW_SHAPE}
    return body | _placeholders(given, body.get("UpdateExpression", ""), condition)


def _placeholders(given: Mapping[str, Given], *expressions: str) -> dict[str, Any]:
    """The parameters that say what the placeholders of expressions stand for: just those that
    there are, since DynamoDB takes no others."""
    names = {mark: mark[1:] for mark in _NAME.findall(" ".join(expressions))}
    values: dict[str, Tagged] = {}
    for one, thing in given.items():
        if isinstance(thing, Name):
            names[f"#{one}"] = thing.attribute
        else:
            values[f":{one}"] = tag(thing)
    told: dict[str, Any] = {"ExpressionAttributeValues": values}
    return told | {"ExpressionAttributeNames": names} if names else told


def _refuse_newer(*items: Mapping[str, Tagged] | None) -> None:
    """Raise NewerShape where one of the items that a refusal returned is of such a shape."""
    for item in items:
        if item and SHAPE in item:
            refuse_newer({SHAPE: untag(item[SHAPE])})
