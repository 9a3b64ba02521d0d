"""The table: made from its description, held against it, removed."""

from __future__ import annotations

from typing import Any

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
from conveyor.prod.admin.finding import MADE
from conveyor.prod.aws.calls import Aws, AwsRefused, Parameters
from conveyor.prod.dynamodb.table import TIME_TO_LIVE, description

PATIENCE = 600.0
"""Seconds that a table or an index may take to come or to go."""
POLL = 2.0

ABSENT = "ResourceNotFoundException"
BUSY = "ResourceInUseException"


class TableResource:
    """One table by name."""

    def __init__(self, aws: Aws, name: str, clock: Clock) -> None:
        self.what = f"table {name}"
        self._aws = aws
        self._name = name
        self._clock = clock

    async def ensure(self) -> str:
        """Make it, its indexes and its time to live, where any of them is missing: MADE, or what
        was changed of a table that was there; empty: nothing.

        Raises AwsRefused; ConveyorError where it does not become usable.
        """
        changes: list[str] = []
        made = ""
        if await self._describe() is None:
            try:
                await self._call("create_table", **_without_name(description(self._name)))
                made = MADE
            except AwsRefused as refused:
                if refused.word != BUSY:
                    raise
        table = await self._active()
        for index in _missing(table):
            await self._call(
                "update_table",
                AttributeDefinitions=description(self._name)["AttributeDefinitions"],
                GlobalSecondaryIndexUpdates=[{"Create": index}],
            )
            changes.append(f"got its index {index['IndexName']}")
            await self._active()
        if not await self._expires():
            await self._call(
                "update_time_to_live",
                TimeToLiveSpecification={"Enabled": True, "AttributeName": TIME_TO_LIVE},
            )
            changes.append(f"lets items expire by {TIME_TO_LIVE}")
        return made or ", ".join(changes)

    async def problem(self) -> str | None:
        """What is wrong with it. Raises AwsRefused."""
        table = await self._describe()
        if table is None:
            return "does not exist (conveyor admin init makes it)"
        if table["TableStatus"] not in ("ACTIVE", "UPDATING"):
            return f"is {table['TableStatus'].lower()}"
        wanted = description(self._name)
        if _keys(table) != _keys(wanted):
            return "has other keys than it should have"
        if missing := _missing(table):
            names = ", ".join(index["IndexName"] for index in missing)
            return f"lacks the index {names} (conveyor admin init makes it)"
        for index in table["GlobalSecondaryIndexes"]:
            if index.get("IndexStatus", "ACTIVE") != "ACTIVE":
                return f"its index {index['IndexName']} is {index['IndexStatus'].lower()}"
        if wrong := _different(table, wanted):
            return f"its index {wrong} is another than it should be"
        if not await self._expires():
            return f"items do not expire by {TIME_TO_LIVE} (conveyor admin init sees to it)"
        return None

    async def remove(self) -> bool:
        """Remove it with everything in it; whether it was there. Raises AwsRefused."""
        try:
            await self._call("delete_table")
        except AwsRefused as refused:
            if refused.word != ABSENT:
                raise
            return False
        deadline = self._clock.monotonic() + PATIENCE
        while await self._describe() is not None:
            await self._wait(deadline)
        return True

    async def _active(self) -> dict[str, Any]:
        deadline = self._clock.monotonic() + PATIENCE
        while True:
            table = await self._describe()
            if table is not None and _is_usable(table):
                return table
            await self._wait(deadline)

    async def _wait(self, deadline: float) -> None:
        if self._clock.monotonic() > deadline:
            raise ConveyorError(
                ErrorCode.UNAVAILABLE, f"{self.what} is not ready after {PATIENCE:g} s"
            )
        await self._clock.sleep(POLL)

    async def _describe(self) -> dict[str, Any] | None:
        try:
            answer = await self._call("describe_table")
        except AwsRefused as refused:
            if refused.word != ABSENT:
                raise
            return None
        table: dict[str, Any] = answer["Table"]
        return table

    async def _expires(self) -> bool:
        answer = await self._call("describe_time_to_live")
        stated = answer["TimeToLiveDescription"]
        return (
            stated.get("TimeToLiveStatus") in ("ENABLED", "ENABLING")
            and stated.get("AttributeName") == TIME_TO_LIVE
        )

    async def _call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        return await self._aws.call("dynamodb", operation, {"TableName": self._name, **parameters})


def _without_name(parameters: Parameters) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if name != "TableName"}


def _is_usable(table: dict[str, Any]) -> bool:
    return table["TableStatus"] == "ACTIVE" and all(
        index.get("IndexStatus", "ACTIVE") == "ACTIVE"
        for index in table.get("GlobalSecondaryIndexes", [])
    )


def _keys(table: Parameters) -> set[tuple[str, str]]:
    return {(key["AttributeName"], key["KeyType"]) for key in table["KeySchema"]}


def _missing(table: dict[str, Any]) -> list[dict[str, Any]]:
    there = {index["IndexName"] for index in table.get("GlobalSecondaryIndexes", [])}
    wanted: list[dict[str, Any]] = description(table["TableName"])["GlobalSecondaryIndexes"]
    return [index for index in wanted if index["IndexName"] not in there]


def _different(table: dict[str, Any], wanted: Parameters) -> str | None:
    there = {index["IndexName"]: index for index in table["GlobalSecondaryIndexes"]}
    for index in wanted["GlobalSecondaryIndexes"]:
        found = there[index["IndexName"]]
        if _keys(found) != _keys(index) or _carried(found) < _carried(index):
            name: str = index["IndexName"]
            return name
    return None


def _carried(index: dict[str, Any]) -> frozenset[str]:
    return frozenset(index["Projection"].get("NonKeyAttributes", ()))
