"""Callers' keys under KMS: one data key for a fleet, whichever process asks first, and never stored
in the clear."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import pytest

from conveyor.aio.concurrency import for_each
from conveyor.clock import SystemClock
from conveyor.domain.api_keys import KEY_LENGTH
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.prod.admin.resources import TableResource
from conveyor.prod.aws.client import AwsClient
from conveyor.prod.aws.opening import open_aws
from conveyor.prod.dynamodb.client import Table
from conveyor.prod.dynamodb.schema import DATA_KEY
from conveyor.prod.sealing import open_data_key
from tests.conformance.emulators import address, aws_options

CLOCK = SystemClock()


@pytest.fixture
async def aws() -> AsyncIterator[AwsClient]:
    options = aws_options(
        dynamodb_endpoint=address("CONVEYOR_TEST_DYNAMODB"),
        kms_endpoint=address("CONVEYOR_TEST_KMS"),
    )
    opened = await open_aws(options, CLOCK, "dynamodb", "kms")
    yield opened
    await opened.aclose()


@pytest.fixture
async def table(aws: AwsClient) -> AsyncIterator[Table]:
    resource = TableResource(aws, name := f"conveyor-sealing-{secrets.token_hex(6)}", CLOCK)
    await resource.ensure()
    yield Table(aws, name, CLOCK)
    await resource.remove()


async def kms_key(aws: AwsClient) -> str:
    made = await aws.call("kms", "create_key", {})
    return str(made["KeyMetadata"]["KeyId"])


async def opened(aws: AwsClient, table: Table, key: str, environment: str = "test") -> bytes:
    return await open_data_key(aws, table, kms_key=key, environment=environment)


async def test_every_process_gets_the_same_key(aws: AwsClient, table: Table) -> None:
    key = await kms_key(aws)
    found: list[bytes] = []

    async def ask(_number: int) -> None:
        found.append(await opened(aws, table, key))

    await for_each(ask, range(6))
    assert len(found) == 6
    assert len(set(found)) == 1
    assert len(found[0]) == KEY_LENGTH


async def test_the_table_holds_it_encrypted(aws: AwsClient, table: Table) -> None:
    key = await opened(aws, table, await kms_key(aws))
    item = await table.get(DATA_KEY)

    assert item is not None
    assert set(item) == {"pk", "sk", "shape", "kms_key", "sealed"}
    assert key not in item["sealed"]


async def test_another_environment_cannot_open_it(aws: AwsClient, table: Table) -> None:
    key = await kms_key(aws)
    await opened(aws, table, key)

    with pytest.raises(ConveyorError) as caught:
        await opened(aws, table, key, environment="other")
    assert caught.value.code is ErrorCode.UNAVAILABLE


async def test_another_kms_key_wraps_the_same_data_key(aws: AwsClient, table: Table) -> None:
    old, new = await kms_key(aws), await kms_key(aws)
    before = await opened(aws, table, old)
    after = await opened(aws, table, new)
    item = await table.get(DATA_KEY)

    assert after == before
    assert item is not None
    assert item["kms_key"] == new
    assert await opened(aws, table, new) == before


async def test_an_unknown_kms_key_is_told(aws: AwsClient, table: Table) -> None:
    with pytest.raises(ConveyorError, match="data key cannot be opened"):
        await opened(aws, table, "00000000-0000-0000-0000-000000000000")
    assert await table.get(DATA_KEY) is None
