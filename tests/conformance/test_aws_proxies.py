"""A proxy that answers for a service: an existing thing is never taken to be gone."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from conveyor.clock import SystemClock
from conveyor.domain.errors import ErrorCode
from conveyor.prod.aws.client import AwsClient
from conveyor.prod.dynamodb.client import Query, Table
from conveyor.prod.dynamodb.schema import Key, table_parameters
from conveyor.prod.dynamodb.store import open_store
from conveyor.prod.s3.blobs import S3Blobs
from conveyor.testing.clock import FakeClock
from tests.conformance.aws_answers import Proxy, bare, open_at, proxy
from tests.conformance.emulators import address
from tests.conformance.production_store import new_name
from tests.conformance.s3_bucket import empty_bucket
from tests.conformance.world import CALLER, World, refused

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]

NOBODYS = [
    bare(b"<garbage>"),
    bare(b""),
    bare(b"{}"),
    bare(b"", status=204),
    bare(b"<html><body>Not Found</body></html>", status=404),
    bare(b'{"Item":{"sk":{"S":"meta"}},"Attributes":{},"Items":[],"Count":0}'),
    bare(b"", b"Last-Modified: Thu, 01 Jan 1970 00:00:00 GMT", b'ETag: "one"'),
]


@dataclass(frozen=True, slots=True)
class Bench:
    """A table or bucket behind a `proxy`, through which `aws` asks."""

    proxy: Proxy
    aws: AwsClient
    name: str


@asynccontextmanager
async def behind(service: str) -> AsyncIterator[tuple[Proxy, AwsClient]]:
    async with proxy(address(f"CONVEYOR_TEST_{service.upper()}")) as somebody:
        aws = await open_at(somebody.url, service)
        try:
            yield somebody, aws
        finally:
            await aws.aclose()


@pytest.fixture
async def table() -> AsyncIterator[Bench]:
    async with behind("dynamodb") as (somebody, aws):
        name = new_name()
        await aws.call("dynamodb", "create_table", table_parameters(name))
        yield Bench(somebody, aws, name)
        somebody.says = None
        await aws.call("dynamodb", "delete_table", {"TableName": name})


async def test_a_job_is_unavailable_while_somebody_speaks_for_the_table(
    table: Bench, clock: FakeClock
) -> None:
    store = await open_store(
        table.aws, table=table.name, clock=SystemClock(), worker="w", flush_interval=0.0
    )
    world = World(store, clock)
    job_id, run_id = await world.submit(2)
    rows = Table(table.aws, table.name, clock)
    key = Key(secrets.token_hex(4), "one")
    await rows.put(key, {"count": 1})
    for said in NOBODYS:
        table.proxy.says = said
        await refused(ErrorCode.UNAVAILABLE, store.jobs.get_job(CALLER, job_id))
        await refused(ErrorCode.UNAVAILABLE, store.runs.get_run(CALLER, job_id, run_id))
        await refused(ErrorCode.UNAVAILABLE, rows.get(key))
        await refused(ErrorCode.UNAVAILABLE, rows.get_many([key]))
        await refused(ErrorCode.UNAVAILABLE, rows.count(key.pk, begins_with=""))
        await refused(ErrorCode.UNAVAILABLE, rows.page(Query(key.pk)))
        await refused(ErrorCode.UNAVAILABLE, rows.delete_many([key]))
        await refused(
            ErrorCode.UNAVAILABLE, rows.update(key, "ADD #count :one", condition="", one=1)
        )
    assert table.proxy.spoke
    table.proxy.says = None
    assert await store.jobs.get_job(CALLER, job_id)
    assert await store.runs.get_run(CALLER, job_id, run_id)
    assert (await rows.get(key) or {})["count"] == 1
    await store.aclose()


async def test_a_body_is_unavailable_while_somebody_speaks_for_the_bucket(
    clock: FakeClock,
) -> None:
    async with empty_bucket() as (_, bucket), behind("s3") as (somebody, aws):
        blobs = S3Blobs(aws, bucket=bucket, clock=clock)
        await blobs.put("one/body", b"content")
        for said in NOBODYS:
            somebody.says = said
            await refused(ErrorCode.UNAVAILABLE, blobs.open("one/body"))
            await refused(ErrorCode.UNAVAILABLE, blobs.size("one/body"))
            await refused(ErrorCode.UNAVAILABLE, blobs.put("one/body", b"other"))
            await refused(ErrorCode.UNAVAILABLE, blobs.delete("one/body"))
            await refused(ErrorCode.UNAVAILABLE, blobs.delete_prefix("one/"))
        somebody.says = None
        found = await blobs.open("one/body")
        assert found is not None
        assert [piece async for piece in found] == [b"content"]
