"""The production store on a table of its own, which goes when it is closed.

Virtual time may lie in the past of a real clock, so these tables remove nothing by time to live.
"""

from __future__ import annotations

import atexit
import secrets
from collections.abc import Awaitable, Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import anyio.to_thread
from botocore.config import Config
from botocore.credentials import Credentials

from conveyor.clock import SystemClock
from conveyor.prod.aws.boto import open_session
from conveyor.prod.aws.calls import AwsOptions
from conveyor.prod.aws.client import AwsClient
from conveyor.prod.aws.opening import over_clients
from conveyor.prod.dynamodb.client import Table
from conveyor.prod.dynamodb.schema import PARTITION_KEY, SORT_KEY, Key, table_parameters
from conveyor.prod.dynamodb.store import DynamoStore, StoreTerms, open_store
from tests.conformance.emulators import REGION, address, aws_options, on_aws

THREADS = 16


class OwnStore:
    """A store, and what is to be done once it is closed."""

    def __init__(
        self, store: DynamoStore, aws: AwsClient, release: Callable[[], Awaitable[None]]
    ) -> None:
        self.jobs = store.jobs
        self.runs = store.runs
        self.idempotency = store.idempotency
        self.tasks = store.tasks
        self.ingestion = store.ingestion
        self.inputs = store.inputs
        self.exports = store.exports
        self.sweeping = store.sweeping
        self.outbox = store.outbox
        self.signing_keys = store.signing_keys
        self.deliveries = store.deliveries
        self.schedules = store.schedules
        self._store = store
        self._aws = aws
        self._release = release

    @property
    def rows_read(self) -> int:
        """Rows read, as the store counts them."""
        return self._store.rows_read

    @property
    def rows_returned(self) -> int:
        """Rows returned, as the store counts them."""
        return self._store.rows_returned

    async def aclose(self) -> None:
        """Close the store, then let go of its table."""
        await self._store.aclose()
        await self._release()
        await self._aws.aclose()


async def open_production(_path: Path, _now: int, *, daily_tasks: int = 0) -> OwnStore:
    """An empty store.

    Its own clock is a real one: virtual clocks make the same ids in each test, and a transaction
    that comes with a token known from another test would not be carried out.
    """
    client, options = await anyio.to_thread.run_sync(dynamodb)
    # Belongs to the running loop, unlike the client, which takes a while to make.
    aws = over_clients({"dynamodb": client}, options, SystemClock(), credentials=account())
    name, release = await (_shared_table(aws) if on_aws() else _fresh_table(aws))
    store = await open_store(
        aws,
        table=name,
        clock=SystemClock(),
        worker=f"worker-{secrets.token_hex(6)}",
        flush_interval=0.0,
        terms=StoreTerms(daily_tasks=daily_tasks),
    )
    return OwnStore(store, aws, release)


@cache
def dynamodb() -> tuple[Any, AwsOptions]:
    """A client, made once, and where it asks."""
    endpoint = address("CONVEYOR_TEST_DYNAMODB")
    client = open_session(REGION).client(
        "dynamodb",
        endpoint_url=endpoint or None,
        config=Config(retries={"total_max_attempts": 1}, max_pool_connections=THREADS),
    )
    atexit.register(client.close)
    return client, aws_options(dynamodb_endpoint=endpoint, threads=THREADS)


@cache
def account() -> Credentials:
    """The credentials of this process."""
    return open_session(REGION).get_credentials()


async def _fresh_table(aws: AwsClient) -> tuple[str, Callable[[], Awaitable[None]]]:
    """A table for one test: an emulator makes it in a few milliseconds."""
    name = new_name()
    await aws.call("dynamodb", "create_table", table_parameters(name))

    async def release() -> None:
        await aws.call("dynamodb", "delete_table", {"TableName": name})

    return name, release


async def _shared_table(aws: AwsClient) -> tuple[str, Callable[[], Awaitable[None]]]:
    """The one table of all tests, emptied after each: AWS takes half a minute to make one."""
    name = await anyio.to_thread.run_sync(_made_once)
    return name, partial(_empty, Table(aws, name, SystemClock()))


@cache
def _made_once() -> str:
    client, _ = dynamodb()
    name = new_name()
    client.create_table(**table_parameters(name))
    atexit.register(client.delete_table, TableName=name)
    client.get_waiter("table_exists").wait(TableName=name)
    return name


async def _empty(table: Table) -> None:
    start: dict[str, Any] = {}
    while True:
        answer = await table.call(
            "scan",
            ConsistentRead=True,
            ProjectionExpression=f"{PARTITION_KEY}, {SORT_KEY}",
            **start,
        )
        keys = [Key(item[PARTITION_KEY]["S"], item[SORT_KEY]["S"]) for item in answer["Items"]]
        await table.delete_many(keys)
        if "LastEvaluatedKey" not in answer:
            return
        start = {"ExclusiveStartKey": answer["LastEvaluatedKey"]}


def new_name() -> str:
    """A name that no other run of the tests takes."""
    return f"conveyor-test-{secrets.token_hex(6)}"
