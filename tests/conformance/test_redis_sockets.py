"""A Redis that listens at a socket of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from conveyor.clock import SystemClock
from conveyor.domain.errors import ConveyorError
from conveyor.ports.permits import LeaseRequest
from conveyor.prod.redis.permits import RedisPermits
from conveyor.prod.redis.server import RedisServer
from tests.conformance.redis_process import RedisProcess

PASSWORD = "a-word-that-nobody-may-see"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Return the path of a server's socket."""
    path = tmp_path / "redis.sock"
    process = RedisProcess(tmp_path, password=PASSWORD, socket_path=path)
    yield path
    process.close()


async def test_all_is_done_by_a_socket_that_is_done_by_an_address(place: Path) -> None:
    server = RedisServer(f"unix://:{PASSWORD}@{place}", SystemClock())
    permits = RedisPermits(server, environment="socket")
    try:
        await server.ping()
        await server.put("name", b"value", seconds=60)
        assert await server.get("name") == b"value"
        request = LeaseRequest(job_id="JOB", holder="a", count=0, before=0, sequence=1)
        await permits.acquire_or_renew(request, limit=1, lease=1.0)
    finally:
        await server.aclose()
    assert server.place == str(place)


async def test_the_number_of_the_database_is_a_parameter_there(place: Path) -> None:
    servers = [
        RedisServer(f"unix://:{PASSWORD}@{place}?db={number}", SystemClock()) for number in (0, 1)
    ]
    try:
        await servers[1].put("name", b"value", seconds=60)
        assert [await server.get("name") for server in servers] == [None, b"value"]
    finally:
        for server in servers:
            await server.aclose()


async def test_a_socket_that_is_not_there_is_a_redis_that_is_away(place: Path) -> None:
    server = RedisServer(f"unix://:{PASSWORD}@{place}.other", SystemClock())
    with pytest.raises(ConveyorError, match="redis does not answer: ") as caught:
        await server.ping()
    await server.aclose()

    assert PASSWORD not in str(caught.value)
