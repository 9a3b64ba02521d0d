"""Addresses that settings take and refuse; what is taken can be used, what is refused not shown."""

from __future__ import annotations

from typing import Any

import pytest

from conveyor.bootstrap.loop import gateway_of
from conveyor.domain.errors import ConveyorError
from conveyor.prod.aws.calls import AwsOptions
from conveyor.prod.aws.opening import open_aws
from conveyor.prod.redis.server import RedisServer
from conveyor.settings import InvalidSetting, load
from conveyor.testing.clock import FakeClock

PASSWORD = "hunter2pass"
CERTIFICATES = "ssl_ca_certs=/ca.pem&ssl_certfile=/own.pem&ssl_keyfile=/own.key"
LONG = "a" * 64


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def refusal(variable: str, text: str) -> str:
    with pytest.raises(InvalidSetting) as caught:
        load({variable: text})
    return caught.value.detail


@pytest.mark.parametrize(
    ("url", "place", "database"),
    [
        ("redis://cache", "cache:6379", 0),
        ("redis://cache/", "cache:6379", 0),
        ("redis://cache_of_ours:6380/2", "cache_of_ours:6380", 2),
        (f"redis://user:{PASSWORD}%2F@127.0.0.1:1/0", "127.0.0.1:1", 0),
        ("redis://[::1]:6379/3?protocol=2&health_check_interval=30", "::1:6379", 3),
        ("rediss://cache.internal.?db=1&ssl_cert_reqs=none", "cache.internal.:6379", 1),
        (f"rediss://c/0?ssl_check_hostname=false&{CERTIFICATES}", "c:6379", 0),
        (f"unix://:{PASSWORD}@/run/redis.sock?db=4", "/run/redis.sock", 4),
        ("unix:///run/a%20b", "/run/a b", 0),
    ],
)
async def test_an_address_of_redis_that_is_taken_makes_connections(
    url: str, place: str, database: int
) -> None:
    server = RedisServer(load({"CONVEYOR_REDIS_URL": url}).redis_url, FakeClock())
    pool: Any = server._pool
    connection = pool.make_connection()

    assert (server.place, int(connection.db)) == (place, database)
    if not url.startswith("unix"):
        # A connection to a machine that went away must not wait for ever.
        assert connection.socket_keepalive
    await server.aclose()


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        (f"http://:{PASSWORD}@cache", "a redis://, rediss:// or unix:// URL"),
        (PASSWORD, "a redis://, rediss:// or unix:// URL"),
        (f"redis://:{PASSWORD}@cache\n", "a URL without spaces"),
        (f"redis://:{PASSWORD} x@cache", "a URL without spaces"),
        (f"redis://[{PASSWORD}@cache", "a URL without spaces"),
        (f"redis://{PASSWORD}/x@127.0.0.1:6379/0", "the number of a database as its path"),
        (f"redis://{PASSWORD}/0@127.0.0.1:6379/0", "the number of a database as its path"),
        (f"redis://cache/{PASSWORD}", "the number of a database as its path"),
        ("redis://cache/\u0663", "the number of a database as its path"),
        ("redis://cache/" + "9" * 5_000, "the number of a database as its path"),
        (f"redis://:{PASSWORD}/x@cache/0", "name a host"),
        (f"redis://user:{PASSWORD}/x@cache/0", "a port from 1 to 65535"),
        (f"redis://:{PASSWORD}?x@cache/0", "name a host"),
        (f"redis://cache?{PASSWORD}@cache/0", "no parameters but db, protocol"),
        (f"redis://:{PASSWORD}#x@cache/0", "no fragment"),
        (f"redis://:{PASSWORD}@", "name a host"),
        ("redis:///0", "name a host"),
        (f"redis://:{PASSWORD}@a..b/0", "name a host"),
        (f"redis://:{PASSWORD}@{LONG}/0", "name a host"),
        (f"redis://:{PASSWORD}@1.2.3/0", "name a host"),
        (f"redis://:{PASSWORD}@cache:99999999/0", "a port from 1 to 65535"),
        (f"redis://:{PASSWORD}@cache:0/0", "a port from 1 to 65535"),
        (f"redis://:{PASSWORD}@cache/0?foo={PASSWORD}", "no parameters but db, protocol"),
        ("redis://cache/0?socket_timeout=9", "no parameters but db, protocol"),
        ("redis://cache/0?ssl_cert_reqs=none", "no parameters but db, protocol"),
        ("redis://cache?health_check_interval=abc", "a whole number as its parameter health_check"),
        ("redis://cache?protocol=4", "2 or 3 as its parameter protocol"),
        ("redis://cache?db=", "a whole number as its parameter db"),
        ("redis://cache/0?db=1", "each thing once"),
        ("redis://cache?db=0&db=1", "each thing once"),
        ("rediss://cache?ssl_cert_reqs=maybe", "none, optional or required"),
        ("rediss://cache?ssl_check_hostname=off", "true or false"),
        ("rediss://cache?ssl_keyfile=/own.key", "ssl_certfile where it has ssl_keyfile"),
        ("unix://run/redis.sock", "the whole path of a socket"),
        (f"unix://:{PASSWORD}/x@/run/redis.sock", "the whole path of a socket"),
        ("unix://", "the whole path of a socket"),
    ],
)
def test_an_address_of_redis_that_is_refused_is_told_by_what_it_lacks(
    url: str, problem: str
) -> None:
    detail = refusal("CONVEYOR_REDIS_URL", url)
    with pytest.raises(ConveyorError) as caught:
        RedisServer(url, FakeClock())

    for line in (detail, caught.value.detail):
        assert problem in line
        assert PASSWORD not in line
        assert line.isprintable()
    assert detail.startswith("CONVEYOR_REDIS_URL must ")


ENDPOINTS = ("DYNAMODB", "SQS", "S3", "STEPFUNCTIONS", "KMS")
NOT_WEB = [
    "localhost:8000",
    "ftp://host",
    "http://",
    "http://host:port/",
    "http://host:0/",
    "http://host:65536/",
    "http://host\n",
    " http://host",
    "http://ho st/",
    "http://a..b/",
    f"http://{LONG}/",
    "http://-host/",
    "http://999.1.1.1/",
    "http://1.2.3.4.5/",
    "http://host.7/",
    "http://[fe80::1%25eth0]/",
    "http://ho%73t/",
]
NOT_BARE = [
    f"http://user:{PASSWORD}@host/",
    "http://host/?a=b",
    "http://host/#part",
    "http://m\u00fcnchen.test/",
]


@pytest.mark.parametrize("text", NOT_WEB + NOT_BARE)
@pytest.mark.parametrize("name", ["PUBLIC_URL", *(f"{part}_ENDPOINT" for part in ENDPOINTS)])
def test_what_is_no_plain_web_address_is_refused_by_name(name: str, text: str) -> None:
    detail = refusal(f"CONVEYOR_{name}", text)

    assert detail.startswith(f"CONVEYOR_{name} must be an http(s) URL")
    assert PASSWORD not in detail
    assert detail.isprintable()


@pytest.mark.parametrize("text", NOT_WEB)
def test_what_is_no_web_address_is_no_gateway(text: str) -> None:
    assert refusal("CONVEYOR_GATEWAY", text).startswith("CONVEYOR_GATEWAY must be direct, fake,")


@pytest.mark.parametrize("text", [*NOT_BARE, "http://a_b/v1", "http://[::1]:8/", "HTTPS://host"])
async def test_a_gateway_that_is_taken_can_be_opened(text: str) -> None:
    await gateway_of(load({"CONVEYOR_GATEWAY": text}), FakeClock()).aclose()


def test_a_gateway_that_its_reader_refuses_is_named_too() -> None:
    with pytest.raises(InvalidSetting, match="CONVEYOR_GATEWAY must be a URL that can be called"):
        gateway_of(load({"CONVEYOR_GATEWAY": "http://xn--a/"}), FakeClock())


def test_an_endpoint_has_no_underscore_in_its_name() -> None:
    assert "underscore" in refusal("CONVEYOR_SQS_ENDPOINT", "http://local_queues:9324")
    assert load({"CONVEYOR_PUBLIC_URL": "https://our_api"}).public_url


@pytest.mark.slow
@pytest.mark.parametrize(
    ("endpoint", "region"),
    [
        ("http://127.0.0.1:1", "us-gov-west-1"),
        ("http://[::1]:8000/", "elasticmq"),
        ("https://queues.example.com./path", "eusc-de-east-1"),
    ],
)
async def test_endpoints_and_regions_that_are_taken_make_clients(
    endpoint: str, region: str
) -> None:
    given = {"CONVEYOR_SQS_ENDPOINT": endpoint, "CONVEYOR_REGION": region}
    settings = load(given)
    options = AwsOptions(region=settings.region, sqs_endpoint=settings.sqs_endpoint)
    aws = await open_aws(options, FakeClock(), "sqs")
    await aws.aclose()


@pytest.mark.parametrize(
    "text",
    [
        "us east 1",
        "us-east-1\n",
        "-east",
        "east-",
        "us--east",
        "123",
        "US-EAST-1",
        "r" * 64,
        "\u00e4",
    ],
)
def test_what_cannot_be_a_region_is_refused_by_the_variable_that_was_set(text: str) -> None:
    for variable in ("CONVEYOR_REGION", "AWS_REGION"):
        detail = refusal(variable, text)
        assert detail == f"{variable} must be the name of a region, such as eu-west-1"
