"""DynamoDB in memory, as far as tasks and counters of runs need it: with the capacity of each
partition key, with the latency of each call, and with lost answers and late duplicates.

It stands where many processes work in virtual time, which no emulator can keep up with. The suites
over the emulators hold the same adapters to the real expressions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from decimal import Decimal
from math import ceil
from random import Random
from typing import Any

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.prod.aws.calls import AwsRefused, Parameters

Tagged = dict[str, Any]
Place = tuple[str, str]

WRITE_UNITS, READ_UNITS = 1_000, 3_000
LATENCY = 0.004
TRIES = 12
_TOKEN = re.compile(r"\s*(<>|<=|>=|[()=<>,+\-]|[#:]?[\w.]+)")
_CLAUSE = re.compile(r"\b(SET|ADD|REMOVE)\b")


def value_of(tagged: Tagged) -> Any:
    """Return a value that compares as DynamoDB has it."""
    [(kind, content)] = tagged.items()
    return Decimal(content) if kind == "N" else content


class Expression:
    """One expression of a call over one item."""

    def __init__(
        self, text: str, parameters: Mapping[str, Any], item: Mapping[str, Tagged]
    ) -> None:
        self._names = parameters.get("ExpressionAttributeNames", {})
        self._values = parameters.get("ExpressionAttributeValues", {})
        self._item = item
        self._tokens = _TOKEN.findall(text)
        self._at = 0

    def holds(self) -> bool:
        """Evaluate a condition."""
        result = self._either()
        assert self._at == len(self._tokens), self._tokens[self._at :]
        return result

    def assignments(self) -> Iterator[tuple[str, Tagged]]:
        """Evaluate the assignments of SET."""
        while self._at < len(self._tokens):
            name = self._name(self._take())
            assert self._take() == "="
            value = self._operand()
            while self._peek() in ("+", "-"):
                sign = 1 if self._take() == "+" else -1
                value = _number(value_of(value) + sign * value_of(self._operand()))
            yield name, value
            if self._peek() == ",":
                self._take()

    def pairs(self) -> Iterator[tuple[str, Tagged]]:
        """Evaluate the additions of ADD."""
        while self._at < len(self._tokens):
            yield self._name(self._take()), self._operand()
            if self._peek() == ",":
                self._take()

    def names(self) -> list[str]:
        """Evaluate the names of REMOVE."""
        return [self._name(token) for token in self._tokens if token != ","]

    def _either(self) -> bool:
        result = self._both()
        while self._peek() == "OR":
            self._take()
            result = self._both() or result
        return result

    def _both(self) -> bool:
        result = self._negated()
        while self._peek() == "AND":
            self._take()
            result = self._negated() and result
        return result

    def _negated(self) -> bool:
        if self._peek() == "NOT":
            self._take()
            return not self._negated()
        if self._peek() == "(":
            self._take()
            result = self._either()
            assert self._take() == ")"
            return result
        return self._comparison()

    def _comparison(self) -> bool:
        word = self._peek()
        if word in ("attribute_exists", "attribute_not_exists"):
            [name] = self._arguments()
            return (self._name(name) in self._item) is (word == "attribute_exists")
        if word == "contains":
            whole, part = map(self._resolve, self._arguments())
            return whole is not None and part in whole["L"]
        left = self._operand_or_none()
        operator = self._take()
        if operator == "IN":
            assert self._take() == "("
            found = [self._take() for _ in iter(self._peek, ")")]
            self._take()
            options = [self._resolve(one) for one in found if one != ","]
            return left is not None and left in options
        right = self._operand_or_none()
        return _compare(left, operator, right)

    def _operand_or_none(self) -> Tagged | None:
        if self._peek() == "size":
            [name] = self._arguments()
            found = self._resolve(name)
            return None if found is None else _number(len(next(iter(found.values()))))
        return self._resolve(self._take())

    def _operand(self) -> Tagged:
        if self._peek() == "list_append":
            one, other = map(self._resolve, self._arguments())
            assert one is not None
            assert other is not None
            return {"L": [*one["L"], *other["L"]]}
        found = self._resolve(self._take())
        assert found is not None
        return found

    def _arguments(self) -> list[str]:
        self._take()
        assert self._take() == "("
        found = []
        while (token := self._take()) != ")":
            if token != ",":
                found.append(token)
        return found

    def _resolve(self, token: str) -> Tagged | None:
        if token.startswith(":"):
            found: Tagged = self._values[token]
            return found
        return self._item.get(self._name(token))

    def _name(self, token: str) -> str:
        name: str = self._names[token] if token.startswith("#") else token
        return name

    def _peek(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _take(self) -> str:
        self._at += 1
        token: str = self._tokens[self._at - 1]
        return token


def _number(value: Decimal | int) -> Tagged:
    return {"N": f"{Decimal(value).normalize() + 0:f}"}


def _compare(left: Tagged | None, operator: str, right: Tagged | None) -> bool:
    if left is None or right is None:
        return operator == "<>"
    one, other = value_of(left), value_of(right)
    match operator:
        case "=":
            return bool(one == other)
        case "<>":
            return bool(one != other)
        case "<":
            return bool(one < other)
        case "<=":
            return bool(one <= other)
        case ">":
            return bool(one > other)
        case _:
            return bool(one >= other)


def size_of(tagged: Tagged) -> int:
    """The bytes of an item or a map of tagged values, about."""
    total = 0
    for name, value in tagged.items():
        [(kind, content)] = value.items()
        total += len(name)
        if kind == "M":
            total += 3 + size_of(content)
        elif kind == "L":
            total += 3 + sum(size_of({"": one}) for one in content)
        else:
            total += len(str(content))
    return total


def updated(parameters: Parameters, old: Tagged | None) -> Tagged:
    """Return an item after an update."""
    item = {**(old or {}), **parameters["Key"]}
    clauses = _CLAUSE.split(parameters["UpdateExpression"])[1:]
    for word, text in zip(clauses[::2], clauses[1::2], strict=True):
        expression = Expression(text, parameters, old or {})
        if word == "SET":
            item |= dict(expression.assignments())
        elif word == "REMOVE":
            for name in expression.names():
                item.pop(name, None)
        else:
            for name, value in expression.pairs():
                before = value_of(item[name]) if name in item else Decimal(0)
                item[name] = _number(before + value_of(value))
    return item


class MemoryTable:
    """The one table, behind the seam of AWS calls. `units` has what each partition key has taken by
    second, `most` the highest of them by kind, `throttled` the number of tries refused for it."""

    def __init__(
        self, seconds: Callable[[], float], sleep: Callable[[float], Awaitable[None]], seed: int = 0
    ) -> None:
        self.items: dict[Place, Tagged] = {}
        self.units: Counter[tuple[str, str, int]] = Counter()
        self.throttled = 0
        self.random = Random(seed)
        self._by_partition: dict[str, set[str]] = {}
        self._sizes: dict[Place, int] = {}
        self._seconds = seconds
        self._sleep = sleep

    def most(self, kind: str, prefix: str) -> float:
        """The most units that a partition key with a prefix has given out in one second."""
        return max(
            (
                units
                for (one, key, _), units in self.units.items()
                if one == kind and key.startswith(prefix)
            ),
            default=0,
        )

    async def call(self, operation: str, parameters: Parameters) -> dict[str, Any]:
        """One call, tried again while its partition has no capacity left."""
        await self._sleep(LATENCY * (0.5 + self.random.random()))
        for tried in range(TRIES):
            taken = self._demand(operation, parameters)
            second = int(self._seconds())
            limits = {"w": WRITE_UNITS, "r": READ_UNITS}
            if all(
                self.units[kind, key, second] + units <= limits[kind]
                for (kind, key), units in taken.items()
            ):
                for (kind, key), units in taken.items():
                    self.units[kind, key, second] += units
                return self.apply(operation, parameters)
            self.throttled += 1
            await self._sleep(min(0.05 * 2**tried, 2.0) * (0.5 + self.random.random()))
        raise ConveyorError(ErrorCode.UNAVAILABLE, "throttled", retry_after=1)

    def apply(self, operation: str, parameters: Parameters) -> dict[str, Any]:
        """Carry a call out at once. Raises AwsRefused."""
        match operation:
            case "get_item":
                found = self.items.get(_place(parameters["Key"]))
                return {} if found is None else {"Item": found}
            case "batch_get_item":
                return self._get_many(parameters)
            case "query":
                return self._query(parameters)
            case "transact_write_items":
                return self._transact(parameters)
            case "put_item":
                self._check(parameters, _place(parameters["Item"]))
                self._set(_place(parameters["Item"]), parameters["Item"])
                return {}
            case "update_item":
                place = _place(parameters["Key"])
                self._check(parameters, place)
                self._set(place, updated(parameters, self.items.get(place)))
                return {"Attributes": self.items[place]}
            case _:
                raise AssertionError(operation)

    def _check(self, parameters: Parameters, place: Place) -> None:
        old = self.items.get(place)
        condition = parameters.get("ConditionExpression", "")
        if condition and not Expression(condition, parameters, old or {}).holds():
            raise AwsRefused("ConditionalCheckFailedException", "", item=old)

    def _set(self, place: Place, item: Tagged) -> None:
        # No caller changes what is in an item.
        self.items[place] = item
        self._sizes[place] = size_of(item)
        self._by_partition.setdefault(place[0], set()).add(place[1])

    def _get_many(self, parameters: Parameters) -> dict[str, Any]:
        found = {
            name: [
                self.items[place] for key in asked["Keys"] if (place := _place(key)) in self.items
            ]
            for name, asked in parameters["RequestItems"].items()
        }
        return {"Responses": found}

    def _query(self, parameters: Parameters) -> dict[str, Any]:
        values = parameters["ExpressionAttributeValues"]
        partition = values[":partition"]["S"]
        begin = values.get(":begin", {"S": ""})["S"]
        keys = sorted(self._by_partition.get(partition, ()))
        found = [self.items[partition, key] for key in keys if key.startswith(begin)]
        return {"Items": found, "ScannedCount": len(found)}

    def _transact(self, parameters: Parameters) -> dict[str, Any]:
        parts = [next(iter(part.items())) for part in parameters["TransactItems"]]
        reasons, items = [], []
        for kind, body in parts:
            place = _place(body["Item"] if kind == "Put" else body["Key"])
            try:
                self._check(body, place)
            except AwsRefused as refused:
                reasons.append("ConditionalCheckFailed")
                items.append(refused.item)
            else:
                reasons.append("None")
                items.append(None)
        if any(reason != "None" for reason in reasons):
            word = "TransactionCanceledException"
            raise AwsRefused(word, "", reasons=tuple(reasons), items=tuple(items))
        for kind, body in parts:
            if kind == "Put":
                self._set(_place(body["Item"]), body["Item"])
            elif kind == "Update":
                place = _place(body["Key"])
                self._set(place, updated(body, self.items.get(place)))
        return {}

    def _demand(self, operation: str, parameters: Parameters) -> Counter[tuple[str, str]]:
        """The units that a call takes of each partition key."""
        taken: Counter[tuple[str, str]] = Counter()
        if operation == "query":
            read = sum(self._sizes[_place(item)] for item in self._query(parameters)["Items"])
            key = parameters["ExpressionAttributeValues"][":partition"]["S"]
            taken["r", key] += max(1, ceil(read / 4_096))
        elif operation == "get_item":
            place = _place(parameters["Key"])
            taken["r", place[0]] += max(1, ceil(self._sizes.get(place, 0) / 4_096))
        elif operation == "batch_get_item":
            for asked in parameters["RequestItems"].values():
                for place in map(_place, asked["Keys"]):
                    taken["r", place[0]] += max(1, ceil(self._sizes.get(place, 0) / 4_096))
        elif operation == "transact_write_items":
            for part in parameters["TransactItems"]:
                [body] = part.values()
                self._demand_write(taken, body, 2)
        else:
            self._demand_write(taken, parameters, 1)
        return taken

    def _demand_write(self, taken: Counter[tuple[str, str]], body: Parameters, times: int) -> None:
        place = _place(body["Item"] if "Item" in body else body["Key"])
        size = max(size_of(body.get("Item", {})), self._sizes.get(place, 0))
        taken["w", place[0]] += times * max(1, ceil(size / 1_024))


def _place(key: Mapping[str, Tagged]) -> Place:
    return key["pk"]["S"], key["sk"]["S"]
