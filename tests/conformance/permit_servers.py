"""The permit ledgers of production, over real servers: a key and rows of their own each time."""

from __future__ import annotations

import atexit
import math
import secrets
from functools import cache
from typing import Any

import boto3
import redis
from botocore.config import Config

from conveyor.ports.permits import LeaseRequest, LedgerState, Permits
from conveyor.prod.aws.calls import AwsOptions
from conveyor.prod.aws.opening import over_clients
from conveyor.prod.dynamodb.client import Table
from conveyor.prod.dynamodb.permits import DynamoPermits
from conveyor.prod.dynamodb.schema import table_parameters
from conveyor.prod.redis.permits import HOLD, RedisPermits, ledger_key
from conveyor.prod.redis.server import RedisServer
from conveyor.testing.clock import START, FakeClock
from tests.conformance.emulators import REGION, address, aws_options

LONG_AGO = 3_600.0


class VirtualRedis:
    """A ledger key of its own on a shared server, on virtual time."""

    def __init__(self, clock: FakeClock, *, lease: float) -> None:
        self._clock = clock
        self._lease = lease
        self._url = address("CONVEYOR_TEST_REDIS")
        self.environment = f"test-{secrets.token_hex(6)}"
        self._server = RedisServer(self._url, clock, timeout=60.0)
        self.permits = RedisPermits(
            self._server, environment=self.environment, instant=self.instant
        )
        self.begin(-LONG_AGO)

    def instant(self, after: float = 0.0) -> int:
        """Virtual milliseconds; clocks that are set do not move them."""
        return START + round((self._clock.monotonic() + after) * 1_000)

    def begin(self, after: float, *, lease: float | None = None) -> None:
        """Let the ledger have been found empty so many seconds from now, by a call under a lease of
        its own or one that names another."""
        key = ledger_key(self.environment)
        named = math.ceil((self._lease if lease is None else lease) * 1_000)
        with redis.Redis.from_url(self._url) as client:
            keys = HOLD.keys(key)
            client.delete(*keys)
            call = ("X", "x", 0, 0, 1, 0, 0, named, self.instant(after))
            client.eval(HOLD.text, len(keys), *keys, *call)

    def come_back_empty(self, *, lease: float | None = None) -> Permits:
        """Lose everything; somebody calls at once, as of `begin`."""
        self.begin(0.0, lease=lease)
        return self.permits

    async def aclose(self) -> None:
        """Leave nothing behind."""
        with redis.Redis.from_url(self._url) as client:
            client.delete(*HOLD.keys(ledger_key(self.environment)))
        await self._server.aclose()


class OwnJobs:
    """A ledger whose job ids are prefixed, so that tests can share a table."""

    def __init__(self, permits: Permits, prefix: str) -> None:
        self._permits = permits
        self._prefix = prefix

    async def acquire_or_renew(
        self, request: LeaseRequest, *, limit: int, lease: float
    ) -> LedgerState:
        """One call for one's own job of that name."""
        own = LeaseRequest(
            job_id=self._prefix + request.job_id,
            holder=request.holder,
            count=request.count,
            before=request.before,
            sequence=request.sequence,
            wants=request.wants,
        )
        return await self._permits.acquire_or_renew(own, limit=limit, lease=lease)


@cache
def dynamodb() -> tuple[Any, str, AwsOptions]:
    """A client, the name of a table that lives as long as the tests do, and where it is."""
    endpoint = address("CONVEYOR_TEST_DYNAMODB")
    client = boto3.client(
        "dynamodb",
        region_name=REGION,
        endpoint_url=endpoint or None,
        config=Config(retries={"total_max_attempts": 1}, max_pool_connections=16),
    )
    name = f"conveyor-permits-{secrets.token_hex(6)}"
    client.create_table(**table_parameters(name))
    client.get_waiter("table_exists").wait(TableName=name)

    def remove() -> None:
        client.delete_table(TableName=name)
        client.close()

    atexit.register(remove)
    # Through boto3, for nobody closes what a test opens here.
    return client, name, aws_options(dynamodb_endpoint=endpoint, carrier="boto")


def permits_table(clock: FakeClock) -> Table:
    """Open the shared table, over a transport that belongs to the running loop."""
    client, name, options = dynamodb()
    return Table(over_clients({"dynamodb": client}, options, clock, credentials=None), name, clock)


def dynamo_permits(clock: FakeClock, prefix: str = "") -> Permits:
    """A ledger on the shared table, with jobs of its own, or of all that have the prefix."""
    return OwnJobs(DynamoPermits(permits_table(clock), clock), prefix or secrets.token_hex(6))
