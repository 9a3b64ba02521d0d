"""The table of an environment: made from nothing, held against its description, removed."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conveyor.clock import SystemClock
from conveyor.prod.admin.checks import MADE, clock_problem, rows_problem
from conveyor.prod.admin.resources import TableResource
from conveyor.prod.aws.calls import Answer, AwsRefused, Parameters
from conveyor.prod.aws.client import AwsClient
from conveyor.prod.aws.opening import open_aws
from conveyor.prod.dynamodb.client import Table
from conveyor.prod.dynamodb.schema import BY_DISPATCH, table_parameters
from conveyor.testing.aws_faults import FaultyAws
from tests.conformance.emulators import address, aws_options

pytestmark = pytest.mark.extended

CLOCK = SystemClock()


@pytest.fixture
async def aws() -> AsyncIterator[AwsClient]:
    options = aws_options(dynamodb_endpoint=address("CONVEYOR_TEST_DYNAMODB"))
    opened = await open_aws(options, CLOCK, "dynamodb")
    yield opened
    await opened.aclose()


@pytest.fixture
async def name(aws: AwsClient) -> AsyncIterator[str]:
    """A name for a table, which is gone after the test."""
    name = f"conveyor-admin-{secrets.token_hex(6)}"
    yield name
    await TableResource(aws, name, CLOCK).remove()


@pytest.fixture
def resource(aws: AwsClient, name: str) -> TableResource:
    return TableResource(aws, name, CLOCK)


async def create(aws: AwsClient, name: str, **changed: Any) -> None:
    await aws.call("dynamodb", "create_table", {**table_parameters(name), **changed})


async def create_without(aws: AwsClient, name: str, missing: str) -> None:
    """Make the table without one of its indexes."""
    whole = table_parameters(name)
    indexes = [i for i in whole["GlobalSecondaryIndexes"] if i["IndexName"] != missing]
    used = {key["AttributeName"] for i in (whole, *indexes) for key in i["KeySchema"]}
    attributes = [a for a in whole["AttributeDefinitions"] if a["AttributeName"] in used]
    await create(aws, name, GlobalSecondaryIndexes=indexes, AttributeDefinitions=attributes)


async def test_a_table_is_made_once_and_then_found_right(resource: TableResource) -> None:
    assert "does not exist" in str(await resource.problem())
    assert await resource.ensure() == MADE
    assert await resource.problem() is None
    assert await resource.ensure() == ""


async def test_a_table_is_removed_once(resource: TableResource) -> None:
    await resource.ensure()

    assert await resource.remove() is True
    assert "does not exist" in str(await resource.problem())
    assert await resource.remove() is False


async def test_a_missing_index_is_named_and_made(
    aws: AwsClient, name: str, resource: TableResource
) -> None:
    await create_without(aws, name, BY_DISPATCH)

    assert f"lacks the index {BY_DISPATCH}" in str(await resource.problem())
    assert await resource.ensure() == f"got its index {BY_DISPATCH}, lets items expire by ttl"
    assert await resource.problem() is None


class Repeated:
    """An `Aws` that carries a call out, and refuses it as AWS refuses the same call once more."""

    def __init__(self, aws: AwsClient, operation: str, word: str) -> None:
        self._aws = aws
        self._operation = operation
        self._word = word

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        answer = await self._aws.call(service, operation, parameters)
        if operation == self._operation:
            raise AwsRefused(self._word, "", asked=(service, operation))
        return answer

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        return self._aws.presign(operation, parameters, seconds=seconds)


@pytest.mark.parametrize(
    ("operation", "word"),
    [
        ("create_table", "ResourceInUseException"),
        ("update_table", "ResourceInUseException"),
        ("update_time_to_live", "ValidationException"),
        ("delete_table", "ResourceInUseException"),
        ("delete_table", "ResourceNotFoundException"),
    ],
)
async def test_a_table_is_made_and_removed_although_an_answer_is_lost(
    aws: AwsClient, name: str, operation: str, word: str
) -> None:
    if operation == "update_table":
        await create_without(aws, name, BY_DISPATCH)
    resource = TableResource(Repeated(aws, operation, word), name, CLOCK)
    changed = await resource.ensure()
    assert (changed == MADE) is (operation != "update_table")
    assert await resource.problem() is None
    assert await resource.remove() is True
    assert "does not exist" in str(await resource.problem())


@pytest.mark.parametrize("operation", ["update_table", "update_time_to_live"])
async def test_what_is_refused_and_was_not_done_is_told(
    aws: AwsClient, name: str, operation: str
) -> None:
    await create_without(aws, name, BY_DISPATCH)
    faulty = FaultyAws(aws)
    refusal = AwsRefused("LimitExceededException", "", asked=("dynamodb", operation))
    faulty.fail("dynamodb", operation, refusal, times=9)
    resource = TableResource(faulty, name, CLOCK)
    with pytest.raises(AwsRefused, match="LimitExceeded"):
        await resource.ensure()


async def test_a_table_that_cannot_be_removed_now_is_told(
    aws: AwsClient, name: str, resource: TableResource
) -> None:
    await resource.ensure()
    faulty = FaultyAws(aws)
    refusal = AwsRefused("ResourceInUseException", "", asked=("dynamodb", "delete_table"))
    faulty.fail("dynamodb", "delete_table", refusal)
    with pytest.raises(AwsRefused, match="ResourceInUse"):
        await TableResource(faulty, name, CLOCK).remove()


async def test_an_index_is_made_although_the_answer_is_lost(aws: AwsClient, name: str) -> None:
    await create_without(aws, name, BY_DISPATCH)
    faulty = FaultyAws(aws)
    faulty.lose_answer("dynamodb", "update_table")
    resource = TableResource(faulty, name, CLOCK)
    assert await resource.ensure() == f"got its index {BY_DISPATCH}, lets items expire by ttl"
    assert faulty.fired == 1
    assert await resource.problem() is None


async def test_an_index_of_another_shape_is_named(
    aws: AwsClient, name: str, resource: TableResource
) -> None:
    indexes = [dict(index) for index in table_parameters(name)["GlobalSecondaryIndexes"]]
    indexes[0]["Projection"] = {"ProjectionType": "KEYS_ONLY"}
    await create(aws, name, GlobalSecondaryIndexes=indexes)
    await resource.ensure()

    assert "has a wrong index gsi1" in str(await resource.problem())


async def test_a_table_without_expiry_is_told(
    aws: AwsClient, name: str, resource: TableResource
) -> None:
    await create(aws, name)

    assert "do not expire by ttl" in str(await resource.problem())


async def test_every_call_of_a_role_is_tried_and_nothing_is_left(
    aws: AwsClient, name: str, resource: TableResource
) -> None:
    await resource.ensure()
    table = Table(aws, name, CLOCK)
    assert await rows_problem(aws, table, CLOCK) is None
    left = await aws.call("dynamodb", "scan", {"TableName": name, "Select": "COUNT"})

    assert left["Count"] == 0
    tried = {operation for _, operation, outcome in aws.stats.calls if outcome == "ok"}
    assert tried >= {
        "batch_execute_statement",
        "batch_get_item",
        "batch_write_item",
        "delete_item",
        "get_item",
        "put_item",
        "query",
        "transact_write_items",
        "update_item",
    }


class SetClock(SystemClock):
    """A clock that somebody has set wrong by so many seconds."""

    def __init__(self, wrong: float) -> None:
        super().__init__()
        self._wrong = round(wrong * 1_000)

    def now(self) -> int:
        return super().now() + self._wrong


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [(0.0, None), (-20.0, None), (40.0, "ahead of that of DynamoDB"), (-40.0, "behind that of")],
)
async def test_a_clock_that_is_wrong_is_told(
    aws: AwsClient, name: str, resource: TableResource, wrong: float, problem: str | None
) -> None:
    await resource.ensure()
    clock = SetClock(wrong)
    told = await clock_problem(Table(aws, name, clock), clock)

    assert told is None if problem is None else problem in str(told)
    # By how much is told as well as the length of the call allows: a busy machine makes it long.
    seconds = re.search(r" (\d+) s ", f"{told} ")
    assert told is None or (seconds is not None and 30 < int(seconds[1]) < 50)


async def test_a_clock_cannot_be_compared_without_a_table(aws: AwsClient, name: str) -> None:
    assert "without a table" in str(await clock_problem(Table(aws, name, CLOCK), CLOCK))
