"""The table as the adapters ask it: items by key, pages by partition, many writes at once.

Attribute values: plain ones here, tagged ones on the wire.

Numbers travel as text and come back as they were: a whole number as int, any other as float. What
no condition looks at is kept as one JSON text, which costs a fraction of a map of attributes.

Rows that processes of several versions share, and rows that are not what they should be.

**Within one shape** attributes, and fields of JSON texts, are only ever added, with a default: a
row that lacks one is read with the default, and who rewrites a row leaves alone what it does not
know. So rows are changed by updates that name what they set, and JSON texts by `rewritten`.

**A row of a higher shape** means something else. It is neither interpreted nor written here:
`Table` refuses it with `NewerRow` wherever it meets one, and lets no write pass over it. Lists of
many things leave it out, so that all others are still found.

**A damaged row**, of a shape that is known, lacks something or holds something else than it should.
What reads rows is marked `whole`: it raises `DamagedRow` then, and the log is told which row it is.
Lists leave it out like one of a higher shape, by `readable`.

What ends at a time of its own: found by that time, and removed by DynamoDB itself a day later,
so that the sweeper sees it first.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from decimal import Decimal
from functools import wraps
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
    PARTITION_KEY,
    ROW_SHAPE,
    SORT_KEY,
    TIME_TO_LIVE,
    Key,
    by_time,
)

Plain = str | int | float | bool | bytes | None | list[Any] | dict[str, Any]
Tagged = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Name:
    """In the place of a value: the attribute that a placeholder of another name stands for."""

    attribute: str


Given = Plain | Name
"""What a placeholder of an expression stands for: `:one` for a value, `#one` for a name."""


def tag(value: Plain) -> Tagged:
    """A plain value as DynamoDB takes it. Raises TypeError for any other."""
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
    """Plain values by name, as an item or as the values of an expression."""
    return {name: tag(value) for name, value in values.items()}


def untag(value: Tagged) -> Any:
    """The plain value of a tagged one."""
    [(kind, content)] = value.items()
    if kind == "N":
        return _number(content)
    if kind == "M":
        return untag_all(content)
    if kind == "L":
        return [untag(one) for one in content]
    return None if kind == "NULL" else content


def untag_all(item: Mapping[str, Tagged]) -> dict[str, Any]:
    """A whole item."""
    return {name: untag(value) for name, value in item.items()}


def _digits(value: float) -> str:
    """A number as the table itself writes it, so that a call and its repetition stay the same."""
    return f"{Decimal(repr(value)).normalize() + 0:f}"


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


SHAPE = "shape"
"""The attribute that holds an item's shape."""
KNOWN = "NOT shape > :known_shape"
"""The condition that an item is absent, or of a shape that this version knows."""
RETRY_AFTER = 5
"""Seconds until a caller may come to a process that knows the row."""

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("conveyor.records")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode = msgspec.json.encode


class UnreadableRow(ConveyorError):
    """A row that this process neither interprets nor writes."""


class DamagedRow(UnreadableRow):
    """A row is not what this version, or one before it, wrote."""

    def __init__(self) -> None:
        super().__init__(
            ErrorCode.INTERNAL, "a record of the server is damaged; its operator has to look at it"
        )


class NewerRow(UnreadableRow):
    """A row was written by a later version, in a shape that this one does not know."""

    def __init__(self) -> None:
        super().__init__(
            ErrorCode.UNAVAILABLE,
            "a record was written by a later version of the server; ask again",
            retry_after=RETRY_AFTER,
        )


def is_newer(item: Mapping[str, Any]) -> bool:
    """Whether an untagged item is of a shape that this version does not know."""
    shape = item.get(SHAPE, ROW_SHAPE)
    return not isinstance(shape, int) or shape > ROW_SHAPE


def refuse_newer(item: Mapping[str, Any]) -> None:
    """Raise NewerRow where this version does not know an untagged item."""
    if is_newer(item):
        raise NewerRow


def supported_fields(items: list[dict[str, Any]], *, known_only: bool) -> list[dict[str, Any]]:
    """Items of shapes that this version knows, with `known_only`; else all, or NewerRow."""
    if not any(map(is_newer, items)):
        return items
    if not known_only:
        raise NewerRow
    return [item for item in items if not is_newer(item)]


def whole(read: Callable[P, T]) -> Callable[P, T]:
    """Mark a function that makes a record of an untagged item, one of its arguments: it logs and
    raises DamagedRow where the item lacks what the record needs."""

    @wraps(read)
    def checked(*args: P.args, **named: P.kwargs) -> T:
        try:
            return read(*args, **named)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            item = next(one for one in args if isinstance(one, dict))
            _tell_damaged(item, error)
            raise DamagedRow from error

    return checked


def _tell_damaged(item: dict[str, Any], error: Exception) -> None:
    # What the row holds is nobody's business in a log.
    reason = f"no {error.args[0]}" if isinstance(error, KeyError) else type(error).__name__
    where = f"{item.get(PARTITION_KEY)} {item.get(SORT_KEY)}"
    _log.error("a row is damaged: %s: %s", where, reason)


def readable(read: Callable[[dict[str, Any]], T], items: Iterable[dict[str, Any]]) -> list[T]:
    """The records of items, in order, by what is marked `whole`; without the damaged ones."""
    found: list[T] = []
    for item in items:
        try:
            found.append(read(item))
        except DamagedRow:
            continue
    return found


def rewritten(text: str, record: msgspec.Struct) -> str:
    """The JSON text of a record that was read from `text` and has changed since. Fields of `text`
    that this version does not know stay as they are; "" is the text of a new record."""
    return _encode(_merged(text.encode(), record) if text else record).decode()


def _merged(text: bytes, record: msgspec.Struct) -> dict[str, Any]:
    old, new = _fields.decode(text), _fields.decode(_encode(record))
    merged: dict[str, Any] = {**new}
    for field, name in zip(record.__struct_fields__, record.__struct_encode_fields__, strict=True):
        value, before = getattr(record, field), bytes(old.pop(name, b""))
        if isinstance(value, msgspec.Struct) and before.startswith(b"{"):
            merged[name] = _merged(before, value)
    return {**merged, **old}


Item = dict[str, Any]
"""An item, untagged."""
MOST_GET = 100
"""Items that one BatchGetItem takes."""
MOST_DELETE = 25
"""Deletions that one BatchWriteItem takes."""
UNDONE = "dynamodb leaves a part of each batch undone"

_NAME = re.compile(r"#\w+")


class RowFilter(NamedTuple):
    """A condition on the items that a query returns, and the values of its placeholders."""

    expression: str
    values: Mapping[str, Given]


ALL_ITEMS = RowFilter("", {})


@dataclass(frozen=True, slots=True)
class Query:
    """A query of one partition, of the table or of an index.

    `between` takes both its ends, `below` does not take its own. `limit` bounds the items touched,
    not those returned; `start` goes on after an earlier page. `keys_only` returns partition and
    sort key alone, `projection` beside them the attributes that it lists (and costs as much).
    `known_only` leaves out items of a shape that this version does not know; an index
    does not tell shapes, nor do keys.
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

    Whatever reads or writes single items, or a partition, raises NewerRow where it meets an item
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
        await for_each(get, _pieces([*dict.fromkeys(keys)], MOST_GET))
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

    async def page(self, query: Query) -> Page:
        """Make one query, strongly read where it is of the table itself."""
        where = query.where
        pk, sk = (PARTITION_KEY, SORT_KEY) if query.index is None else INDEXES[query.index][:2]
        condition, bounds = _sorted(sk, query)
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
            {"ConsistentRead": True} if query.index is None else {"IndexName": query.index}
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
        items = supported_fields(
            [untag_all(item) for item in answer["Items"]], known_only=query.known_only
        )
        return Page(items, answer["ScannedCount"], answer.get("LastEvaluatedKey"))

    async def pages(self, query: Query) -> AsyncIterator[Page]:
        """Yield every page of a query."""
        while True:
            page = await self.page(query)
            yield page
            if page.last is None:
                return
            query = replace(query, start=page.last)

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

        await for_each(delete, _pieces(keys, MOST_DELETE))

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
        await retry_unprocessed(call, entries, self.clock, complaint=UNDONE)


def keys_of(items: Sequence[Item]) -> list[Key]:
    """The keys of items."""
    return [Key(item[PARTITION_KEY], item[SORT_KEY]) for item in items]


def condition_met(refused: AwsRefused) -> Item | None:
    """The item that a condition met, untagged; None where there was none."""
    return None if not refused.item else untag_all(refused.item)


def changed_too_often() -> ConveyorError:
    """What is raised where an optimistic write lost every race."""
    return ConveyorError(ErrorCode.UNAVAILABLE, "the record is changing too fast", retry_after=1)


def _pieces(keys: Sequence[Key], size: int) -> list[Sequence[Key]]:
    return [keys[start : start + size] for start in range(0, len(keys), size)]


def _key(key: Key) -> dict[str, Tagged]:
    return {PARTITION_KEY: tag(key.pk), SORT_KEY: tag(key.sk)}


def _sorted(key: str, query: Query) -> tuple[str, dict[str, Plain]]:
    """What bounds a sort key, to stand behind the condition on its partition; and its values."""
    if query.between is not None:
        low, high = query.between
        return f" AND {key} BETWEEN :low AND :high", {"low": low, "high": high}
    if query.below:
        return f" AND {key} < :below", {"below": query.below}
    if query.begins_with:
        return f" AND begins_with({key}, :begin)", {"begin": query.begins_with}
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
    """Raise NewerRow where one of the items that a refusal returned is of such a shape."""
    for item in items:
        if item and SHAPE in item:
            refuse_newer({SHAPE: untag(item[SHAPE])})


GRACE = 86_400
"""Seconds that an item stays behind its end."""


def ends_at(partition: str, name: str, expires_at: int) -> Item:
    """The attributes of an item that ends then, by which it is found in an index partition."""
    return {
        "gsi2pk": partition,
        "gsi2sk": by_time(expires_at, name),
        TIME_TO_LIVE: expires_at // 1_000 + GRACE,
    }


async def ended(table: Table, partition: str, *, now: int, limit: int) -> list[Item]:
    """Items whose time has come, as far as the index knows, the first ended first; those that this
    version does not know left out."""
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
