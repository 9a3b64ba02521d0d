"""The client of the one table: `Table` reads items by key and partitions by page, and writes items
under conditions, in transactions and in batches.

Attribute values are plain Python values here and tagged ones (`{"S": ...}`) on the wire. Numbers
travel as text; a whole number comes back as int, any other as float. Fields that no condition and
no index uses are kept together as one JSON text, because a map of attributes costs far more.

The attribute `shape` of each item is the version of its form, so that processes of two versions can
share a table:

- Within one shape, attributes and JSON fields are only added, each with a default. Reads fill in
  the defaults. Updates name the attributes that they set, and `merge_json` keeps unknown JSON
  fields, so a process preserves what a later version added.
- A row of a higher shape has another meaning. `Table` neither returns nor overwrites it: reads and
  writes of it raise `NewerRow`, and lists leave it out.
- A damaged row has a known shape but lacks a field or holds a wrong type. A function marked
  `decodes_row` logs its key and raises `DamagedRow`; `decode_intact` leaves such rows out of lists.

Items with an end of their own (`expiry_attributes`) are found by that end in an index partition.
DynamoDB removes them by time to live a day later, after the sweeper has seen them. Task rows have a
time to live from their end on (`row_time_to_live`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from decimal import Decimal
from functools import lru_cache, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import msgspec

from conveyor.aio.concurrency import for_each
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
from conveyor.prod.aws.calls import Aws, AwsRefused, retry_unprocessed
from conveyor.prod.dynamodb.schema import (
    BY_DISPATCH,
    END,
    INDEXES,
    KNOWN_SHAPE,
    PARTITION_KEY,
    SORT_KEY,
    TIME_TO_LIVE,
    Key,
    by_time,
)

Plain = str | int | float | bool | bytes | None | list[Any] | dict[str, Any]
Tagged = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AttributeName:
    """A placeholder's value that stands for the name of an attribute."""

    attribute: str


PlaceholderValue = Plain | AttributeName
"""The value of a placeholder: `:one` stands for an attribute value, `#one` for a name."""


def tag(value: Plain) -> Tagged:
    """Tag a plain value for DynamoDB. Raises TypeError for any other type."""
    if isinstance(value, str):
        return {"S": value}
    if isinstance(value, bool):
        return {"BOOL": value}
    if isinstance(value, int):
        return {"N": repr(value)}
    if isinstance(value, float):
        return {"N": _digits(value)}
    if isinstance(value, bytes):
        return {"B": value}
    if value is None:
        return {"NULL": True}
    if isinstance(value, list):
        return {"L": [tag(one) for one in value]}
    if isinstance(value, dict):
        return {"M": tag_all(value)}
    raise TypeError(f"no attribute value: {type(value).__name__}")


def tag_all(values: Mapping[str, Plain]) -> dict[str, Tagged]:
    """Tag plain values by name: an item, or the values of an expression."""
    return {name: tag(value) for name, value in values.items()}


def untag(value: Tagged) -> Any:
    """Return the plain value of a tagged one."""
    [(kind, content)] = value.items()
    if kind == "N":
        return _number(content)
    if kind == "M":
        return untag_all(content)
    if kind == "L":
        return [untag(one) for one in content]
    return None if kind == "NULL" else content


def untag_all(item: Mapping[str, Tagged]) -> dict[str, Any]:
    """Return the plain values of an item."""
    return {name: untag(value) for name, value in item.items()}


def _digits(value: float) -> str:
    """Write a number as DynamoDB itself does, so that a repeated call is the same call."""
    return f"{Decimal(repr(value)).normalize() + 0:f}"


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


SHAPE = "shape"
"""The attribute that holds the version of an item's form."""
SHAPE_SUPPORTED = "NOT shape > :known_shape"
"""The condition that the item is absent, or of a shape that this version knows."""
RETRY_AFTER = 5
"""Seconds after which a caller may retry and reach a process that knows the shape."""

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("conveyor.records")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode = msgspec.json.encode


class UnreadableRow(ConveyorError):
    """A row that this process can neither interpret nor write."""


class DamagedRow(UnreadableRow):
    """A row of a known shape lacks a field, or holds a wrong type."""

    def __init__(self) -> None:
        super().__init__(
            ErrorCode.INTERNAL, "a record of the server is damaged; its operator has to look at it"
        )


class NewerRow(UnreadableRow):
    """A later version wrote the row, in a shape that this version does not know."""

    def __init__(self) -> None:
        super().__init__(
            ErrorCode.UNAVAILABLE,
            "a record was written by a later version of the server; ask again",
            retry_after=RETRY_AFTER,
        )


def is_newer(item: Mapping[str, Any]) -> bool:
    """Return whether an untagged item has a shape that this version does not know."""
    shape = item.get(SHAPE, KNOWN_SHAPE)
    return not isinstance(shape, int) or shape > KNOWN_SHAPE


def refuse_newer(item: Mapping[str, Any]) -> None:
    """Raise NewerRow if an untagged item has a shape that this version does not know."""
    if is_newer(item):
        raise NewerRow


def items_of_known_shape(items: list[dict[str, Any]], *, known_only: bool) -> list[dict[str, Any]]:
    """Leave out items of an unknown shape if `known_only`; else raise NewerRow for the first
    one."""
    if not any(map(is_newer, items)):
        return items
    if not known_only:
        raise NewerRow
    return [item for item in items if not is_newer(item)]


def decodes_row(read: Callable[P, T]) -> Callable[P, T]:
    """Mark a function that decodes an untagged item, one of its arguments, into a record. If the
    item lacks a field or holds a wrong type, log the item's key and raise DamagedRow."""

    @wraps(read)
    def checked(*args: P.args, **named: P.kwargs) -> T:
        try:
            return read(*args, **named)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            item = next(one for one in args if isinstance(one, dict))
            _log_damaged(item, error)
            raise DamagedRow from error

    return checked


def _log_damaged(item: dict[str, Any], error: Exception) -> None:
    # The log names the key only: values may be a caller's data.
    reason = f"no {error.args[0]}" if isinstance(error, KeyError) else type(error).__name__
    where = f"{item.get(PARTITION_KEY)} {item.get(SORT_KEY)}"
    _log.error("a row is damaged: %s: %s", where, reason)


def decode_intact(read: Callable[[dict[str, Any]], T], items: Iterable[dict[str, Any]]) -> list[T]:
    """Decode items in order with a function marked `decodes_row`; leave out damaged ones."""
    found: list[T] = []
    for item in items:
        try:
            found.append(read(item))
        except DamagedRow:
            continue
    return found


def merge_json(text: str, record: msgspec.Struct) -> str:
    """Encode a record that was read from the JSON `text` and changed since; keep the fields of
    `text` that this version does not know. An empty text stands for a new record."""
    return _encode(_merge(text.encode(), record) if text else record).decode()


def _merge(text: bytes, record: msgspec.Struct) -> dict[str, Any]:
    old, new = _fields.decode(text), _fields.decode(_encode(record))
    merged: dict[str, Any] = {**new}
    for field, name in zip(record.__struct_fields__, record.__struct_encode_fields__, strict=True):
        value, before = getattr(record, field), bytes(old.pop(name, b""))
        if isinstance(value, msgspec.Struct) and before.startswith(b"{"):
            merged[name] = _merge(before, value)
    return {**merged, **old}


Item = dict[str, Any]
"""An untagged item."""
BATCH_GET_LIMIT = 100
"""Keys per BatchGetItem."""
BATCH_WRITE_LIMIT = 25
"""Deletions per BatchWriteItem."""
UNPROCESSED = "dynamodb left items of every batch unprocessed"

_NAME = re.compile(r"#\w+")


class RowFilter(NamedTuple):
    """A condition on the items that a query returns, and the values of its placeholders."""

    expression: str
    values: Mapping[str, PlaceholderValue]


ALL_ITEMS = RowFilter("", {})


@dataclass(frozen=True, slots=True)
class Query:
    """A query of one partition of the table or of an index.

    `between` includes both its bounds, `below` excludes its own. `limit` bounds the items that
    DynamoDB reads, before the filter. `start` continues after an earlier page. `keys_only` returns
    partition and sort key alone. `projection` adds the attributes it lists; a query with it costs
    as much as one without. `known_only` drops items of an unknown shape; it has no effect on an
    index or on keys, because neither carries the shape. A read of the table that need not be
    `consistent` costs half.
    """

    partition: str
    _: KW_ONLY
    index: str | None = None
    begins_with: str = ""
    between: tuple[str, str] | None = None
    below: str = ""
    where: RowFilter = ALL_ITEMS
    limit: int | None = None
    start: dict[str, Tagged] | None = None
    forward: bool = True
    keys_only: bool = False
    projection: str = ""
    known_only: bool = False
    consistent: bool = True


class Page(NamedTuple):
    """Items of one query, and the key to continue after; None at the end.

    `read` counts the items that the query read, returned or filtered away.
    """

    items: list[Item]
    read: int
    last: dict[str, Tagged] | None


ROW_RETENTION_DAYS = 30
"""Days that task rows stay past their results, by default."""


class Table:
    """One table behind the AWS transport.

    In expressions `:one` stands for the value given as `one`, and `#one` for the attribute `one`,
    as for a reserved word of DynamoDB; if `one` is given as an `AttributeName`, `#one` stands for
    the attribute named there.

    Reads and writes of single items and of partitions raise NewerRow for an item of an unknown
    shape.

    `records_read` counts items of jobs, runs and failure groups; their readers add to it. Task rows
    stay `row_days` past their results, for ever if that is 0.
    """

    def __init__(
        self, aws: Aws, name: str, clock: Clock, *, row_days: int = ROW_RETENTION_DAYS
    ) -> None:
        self.records_read = 0
        self.row_days = row_days
        self.name = name
        self.clock = clock
        self._aws = aws

    async def call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        """Call any operation of DynamoDB on this table."""
        return await self._aws.call("dynamodb", operation, {"TableName": self.name, **parameters})

    async def get(self, key: Key, *, consistent: bool = True) -> Item | None:
        """Read one item."""
        answer = await self.call("get_item", Key=_key(key), ConsistentRead=consistent)
        if "Item" not in answer:
            return None
        item = untag_all(answer["Item"])
        refuse_newer(item)
        return item

    async def get_many(
        self, keys: Sequence[Key], *, names: tuple[str, ...] = ()
    ) -> dict[Key, Item]:
        """Read any number of items strongly, in batches of 100; leave out missing ones and those of
        an unknown shape. Keys may repeat. With `names`, only these attributes and the keys come,
        at the same price in capacity."""
        found: dict[Key, Item] = {}
        of_table = {"ConsistentRead": True, **_only(names)}

        async def get(some: Sequence[Key]) -> None:
            await self._retry_unprocessed(call, [_key(key) for key in some])

        async def call(left: list[dict[str, Tagged]]) -> list[dict[str, Tagged]]:
            request = {self.name: {"Keys": left, **of_table}}
            answer = await self._aws.call("dynamodb", "batch_get_item", {"RequestItems": request})
            for tagged in answer["Responses"].get(self.name, []):
                item = untag_all(tagged)
                if not is_newer(item):
                    found[Key(item[PARTITION_KEY], item[SORT_KEY])] = item
            undone: list[dict[str, Tagged]] = (
                answer.get("UnprocessedKeys", {}).get(self.name, {}).get("Keys", [])
            )
            return undone

        # An entry that moves while its index is read is found twice; a batch must not repeat a key.
        await for_each(get, _batches([*dict.fromkeys(keys)], BATCH_GET_LIMIT))
        return found

    async def put(
        self,
        key: Key,
        item: Mapping[str, Plain],
        *,
        condition: str = "",
        **values: PlaceholderValue,
    ) -> None:
        """Write a whole item. Raises AwsRefused with the item that failed the condition."""
        body: dict[str, Any] = {"Item": {**_key(key), **tag_all(item)}}
        await self._write("put_item", **_conditional(body, condition, values))

    async def update(
        self,
        key: Key,
        update: str,
        *,
        condition: str,
        **values: PlaceholderValue,
    ) -> Item:
        """Change one item and return all of it afterwards.

        Raises AwsRefused with the item that failed the condition, still tagged.
        """
        body = {"Key": _key(key), "UpdateExpression": update, "ReturnValues": "ALL_NEW"}
        answer = await self._write("update_item", **_conditional(body, condition, values))
        return untag_all(answer["Attributes"])

    async def delete(
        self,
        key: Key,
        *,
        condition: str = "",
        **values: PlaceholderValue,
    ) -> None:
        """Remove one item if it exists. Raises AwsRefused."""
        body: dict[str, Any] = {"Key": _key(key)}
        await self._write("delete_item", **_conditional(body, condition, values))

    async def transact(self, parts: Sequence[Mapping[str, Any]], *, token: str) -> None:
        """Write up to 100 parts, made by `put_part`, `update_part`, `delete_part` and `check_part`,
        all or nothing. DynamoDB ignores a repetition of the same `token` (at most 36 characters)
        within ten minutes.

        Raises AwsRefused with a reason for each part, and the items that failed their conditions.
        """
        try:
            await self._aws.call(
                "dynamodb",
                "transact_write_items",
                {"TransactItems": list(parts), "ClientRequestToken": token},
            )
        except AwsRefused as refused:
            _refuse_newer_found(*refused.items)
            raise

    def put_part(
        self,
        key: Key,
        item: Mapping[str, Plain],
        *,
        condition: str = "",
        **values: PlaceholderValue,
    ) -> dict[str, Any]:
        """Describe a put within a transaction."""
        body: dict[str, Any] = {"TableName": self.name, "Item": {**_key(key), **tag_all(item)}}
        return {"Put": _conditional(body, condition, values)}

    def update_part(
        self,
        key: Key,
        update: str,
        *,
        condition: str,
        **values: PlaceholderValue,
    ) -> dict[str, Any]:
        """Describe an update within a transaction."""
        body = {"TableName": self.name, "Key": _key(key), "UpdateExpression": update}
        return {"Update": _conditional(body, condition, values)}

    def delete_part(
        self,
        key: Key,
        *,
        condition: str = "",
        **values: PlaceholderValue,
    ) -> dict[str, Any]:
        """Describe a deletion within a transaction."""
        body = {"TableName": self.name, "Key": _key(key)}
        return {"Delete": _conditional(body, condition, values)}

    def check_part(
        self,
        key: Key,
        *,
        condition: str,
        **values: PlaceholderValue,
    ) -> dict[str, Any]:
        """Describe a condition on an item that the transaction does not write."""
        body = {"TableName": self.name, "Key": _key(key)}
        return {"ConditionCheck": _conditional(body, condition, values)}

    async def page(self, query: Query) -> Page:
        """Run one query; a read of an index is never strongly consistent."""
        where = query.where
        pk, sk = (PARTITION_KEY, SORT_KEY) if query.index is None else INDEXES[query.index][:2]
        condition, bounds = _sort_key_bounds(sk, query)
        parameters: dict[str, Any] = {
            "KeyConditionExpression": f"{pk} = :partition{condition}",
            "ScanIndexForward": query.forward,
            **_placeholders(
                {**where.values, **bounds, "partition": query.partition},
                where.expression,
                query.projection,
            ),
        }
        parameters |= (
            {"ConsistentRead": query.consistent}
            if query.index is None
            else {"IndexName": query.index}
        )
        if where.expression:
            parameters["FilterExpression"] = where.expression
        if query.limit is not None:
            parameters["Limit"] = query.limit
        if query.start is not None:
            parameters["ExclusiveStartKey"] = query.start
        if query.keys_only:
            parameters["ProjectionExpression"] = f"{PARTITION_KEY}, {SORT_KEY}"
        elif query.projection:
            keys = f"{PARTITION_KEY}, {SORT_KEY}"
            parameters["ProjectionExpression"] = f"{keys}, {query.projection}, {SHAPE}"
        answer = await self.call("query", **parameters)
        items = items_of_known_shape(
            [untag_all(item) for item in answer["Items"]], known_only=query.known_only
        )
        return Page(items, answer["ScannedCount"], answer.get("LastEvaluatedKey"))

    async def pages(self, query: Query) -> AsyncIterator[Page]:
        """Run a query to its end, page by page."""
        while True:
            page = await self.page(query)
            yield page
            if page.last is None:
                return
            query = replace(query, start=page.last)

    async def count(self, partition: str, *, begins_with: str) -> int:
        """Count the items of a partition, strongly read, without fetching them."""
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
        """Run up to 25 independent PartiQL statements; return their responses in order. The
        response of a failed one has an `Error` with `Code` and `Message`."""
        answer = await self._aws.call(
            "dynamodb", "batch_execute_statement", {"Statements": list(statements)}
        )
        responses: list[dict[str, Any]] = answer["Responses"]
        return responses

    async def delete_many(self, keys: Sequence[Key]) -> None:
        """Remove items of any shape without a condition: any number, 25 a call, calls
        concurrently."""

        async def delete(some: Sequence[Key]) -> None:
            await self._retry_unprocessed(
                call, [{"DeleteRequest": {"Key": _key(key)}} for key in some]
            )

        async def call(left: list[dict[str, Any]]) -> list[dict[str, Any]]:
            answer = await self._aws.call(
                "dynamodb", "batch_write_item", {"RequestItems": {self.name: left}}
            )
            undone: list[dict[str, Any]] = answer.get("UnprocessedItems", {}).get(self.name, [])
            return undone

        await for_each(delete, _batches(keys, BATCH_WRITE_LIMIT))

    async def _write(self, operation: str, **parameters: Any) -> dict[str, Any]:
        """Make a conditional write. Raise NewerRow if an item of an unknown shape failed the
        condition."""
        try:
            return await self.call(operation, **parameters)
        except AwsRefused as refused:
            _refuse_newer_found(refused.item)
            raise

    async def _retry_unprocessed(
        self,
        call: Callable[[list[dict[str, Any]]], Awaitable[list[dict[str, Any]]]],
        entries: list[dict[str, Any]],
    ) -> None:
        await retry_unprocessed(call, entries, self.clock, complaint=UNPROCESSED)


@lru_cache(maxsize=16)
def _only(names: tuple[str, ...]) -> Mapping[str, Any]:
    """Return the parameters that have a batch of reads bring these attributes alone."""
    if not names:
        return {}
    marks = {f"#{number}": name for number, name in enumerate(names)}
    projection = ", ".join([PARTITION_KEY, SORT_KEY, SHAPE, *marks])
    return {"ProjectionExpression": projection, "ExpressionAttributeNames": marks}


def keys_of(items: Sequence[Item]) -> list[Key]:
    """Return the keys of items."""
    return [Key(item[PARTITION_KEY], item[SORT_KEY]) for item in items]


def conflicting_item(refused: AwsRefused) -> Item | None:
    """Return the item that failed the condition, untagged; None if there was no item."""
    return None if not refused.item else untag_all(refused.item)


def contention_error() -> ConveyorError:
    """Return the error of an optimistic write that lost every race."""
    return ConveyorError(ErrorCode.UNAVAILABLE, "the record is changing too fast", retry_after=1)


def _batches(keys: Sequence[Key], size: int) -> list[Sequence[Key]]:
    return [keys[start : start + size] for start in range(0, len(keys), size)]


def _key(key: Key) -> dict[str, Tagged]:
    return {PARTITION_KEY: tag(key.pk), SORT_KEY: tag(key.sk)}


def _sort_key_bounds(key: str, query: Query) -> tuple[str, dict[str, Plain]]:
    """Return the bounds of a sort key, to be appended to the condition on the partition, and their
    values."""
    if query.between is not None:
        low, high = query.between
        return f" AND {key} BETWEEN :low AND :high", {"low": low, "high": high}
    if query.below:
        return f" AND {key} < :below", {"below": query.below}
    if query.begins_with:
        return f" AND begins_with({key}, :begin)", {"begin": query.begins_with}
    return "", {}


def _conditional(
    body: dict[str, Any], condition: str, values: Mapping[str, PlaceholderValue]
) -> dict[str, Any]:
    if " OR " in condition:
        condition = f"({condition})"
    condition = f"{condition} AND {SHAPE_SUPPORTED}" if condition else SHAPE_SUPPORTED
    body["ConditionExpression"] = condition
    body["ReturnValuesOnConditionCheckFailure"] = "ALL_OLD"
    given = {**values, "known_shape": KNOWN_SHAPE}
    return body | _placeholders(given, body.get("UpdateExpression", ""), condition)


def _placeholders(given: Mapping[str, PlaceholderValue], *expressions: str) -> dict[str, Any]:
    """Return the parameters that define the placeholders of expressions; DynamoDB rejects unused
    ones."""
    names = {mark: mark[1:] for mark in _NAME.findall(" ".join(expressions))}
    values: dict[str, Tagged] = {}
    for name, value in given.items():
        if isinstance(value, AttributeName):
            names[f"#{name}"] = value.attribute
        else:
            values[f":{name}"] = tag(value)
    defined: dict[str, Any] = {"ExpressionAttributeValues": values}
    return defined | {"ExpressionAttributeNames": names} if names else defined


def _refuse_newer_found(*items: Mapping[str, Tagged] | None) -> None:
    """Raise NewerRow if one of the tagged items that a refusal returned has an unknown shape."""
    for item in items:
        if item and SHAPE in item:
            refuse_newer({SHAPE: untag(item[SHAPE])})


SPARE_DAYS = 32
"""Days that a task row stays beyond all that its run is kept for, counted from its own end. Rows of
a run that lasts longer are stamped anew before."""


def row_time_to_live(table: Table, result_days: int, *, now: int) -> int | None:
    """Return the time to live of a task row that ends now, in a run whose results stay
    `result_days`; None if rows are kept for ever."""
    if not table.row_days:
        return None
    return now // 1_000 + (result_days + table.row_days + SPARE_DAYS) * 86_400


EXPIRY_GRACE = 86_400
"""Seconds that an item stays after its end."""


def expiry_attributes(partition: str, name: str, expires_at: int) -> Item:
    """Return the attributes of an item that expires: its time to live, and its entry in an index
    partition, sorted by its end."""
    return {
        "gsi2pk": partition,
        "gsi2sk": by_time(expires_at, name),
        TIME_TO_LIVE: expires_at // 1_000 + EXPIRY_GRACE,
    }


async def expired_items(table: Table, partition: str, *, now: int, limit: int) -> list[Item]:
    """Return expired items of an index partition, earliest end first; leave out unknown shapes.

    The index may lag; the items themselves are read strongly.
    """
    found: list[Item] = []
    async for page in table.pages(
        Query(
            partition,
            index=BY_DISPATCH,
            between=(by_time(0, ""), by_time(now, END)),
            limit=limit,
            keys_only=True,
        )
    ):
        keys = keys_of(page.items)
        items = await table.get_many(keys)
        found += [items[key] for key in keys if key in items]
        if len(found) >= limit:
            break
    return found[:limit]
