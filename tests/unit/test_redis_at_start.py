"""A role's log at start about a Redis that does not answer, and the roles that it concerns."""

from __future__ import annotations

import logging

import pytest

from conveyor.domain.errors import ConveyorError
from conveyor.prod.aws.calls import AwsOptions
from conveyor.prod.options import ProdOptions
from conveyor.prod.redis.server import AWAY_AFTER, AWAY_FOR, RedisServer
from conveyor.prod.startup_checks import check_redis
from conveyor.testing.clock import FakeClock

PASSWORD = "a-word-that-nobody-may-see"
NOWHERE = f"redis://:{PASSWORD}@127.0.0.1:1/0"
PERMITS = "(127.0.0.1:1): no permits can be acquired until it does"
RATES = "(127.0.0.1:1): requests are not rate-limited until it does"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize(
    ("works", "ledger", "rate_limit", "told"),
    [
        (True, "redis", 0.0, [PERMITS]),
        (True, "redis", 5.0, [PERMITS]),
        (True, "dynamodb", 5.0, []),
        (False, "dynamodb", 5.0, [RATES]),
        (False, "redis", 0.0, []),
    ],
)
async def test_who_needs_redis_says_at_the_start_that_it_is_away(
    caplog: pytest.LogCaptureFixture, works: bool, ledger: str, rate_limit: float, told: list[str]
) -> None:
    server = RedisServer(NOWHERE, FakeClock())
    options = ProdOptions(
        aws=AwsOptions(),
        root_secret=b"",
        environment="e",
        table="t",
        bucket="b",
        ledger=ledger,
        redis_url=NOWHERE,
        rate_limit=rate_limit,
    )
    with caplog.at_level(logging.WARNING, "conveyor.permits"):
        await check_redis(server, options, works=works)
    await server.aclose()

    lines = [record.getMessage() for record in caplog.records]
    assert [line[line.index("(127") :] for line in lines] == told
    assert all(line.startswith("redis does not answer: ") for line in lines)
    assert PASSWORD not in caplog.text


async def test_a_server_is_away_once_it_has_failed_a_few_times_and_not_before() -> None:
    clock = FakeClock()
    server = RedisServer(NOWHERE, clock)
    seen = [server.away]
    for _ in range(AWAY_AFTER):
        with pytest.raises(ConveyorError):
            await server.ping()
        seen.append(server.away)
    await clock.advance(AWAY_FOR + 1)
    seen.append(server.away)
    await server.aclose()

    assert seen == [*([False] * AWAY_AFTER), True, False]


@pytest.mark.parametrize(
    ("url", "place"),
    [
        (NOWHERE, "127.0.0.1:1"),
        (f"rediss://user:{PASSWORD}@cache.internal", "cache.internal:6379"),
        (f"unix://:{PASSWORD}@/run/redis.sock", "/run/redis.sock"),
    ],
)
async def test_the_place_of_a_server_is_its_address_without_password(url: str, place: str) -> None:
    server = RedisServer(url, FakeClock())

    assert server.place == place
    await server.aclose()
