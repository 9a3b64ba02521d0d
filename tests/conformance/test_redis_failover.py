"""Redis moves to another node: what only the connections of before knew is forgotten with them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import anyio
import pytest

from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import Job, JobStatus
from conveyor.ports.permits import LeaseRequest
from conveyor.prod.redis.job_cache import CachedJobs
from conveyor.prod.redis.permits import RedisPermits
from conveyor.prod.redis.rate_limit import RedisRateLimit
from conveyor.prod.redis.server import AWAY_AFTER, AWAY_FOR, REST, RedisServer, Script
from conveyor.testing.clock import START, FakeClock
from conveyor.testing.load_balancer import LoadBalancer, load_balancer
from tests.conformance.redis_process import RedisProcess

pytestmark = pytest.mark.slow

OPEN = 6
"""Connections that are open when the failover begins."""
NOWHERE = ("127.0.0.1", "1")
PATIENCE = 60.0
WRITE = Script("return redis.call('SET', KEYS[1], ARGV[1])")


class Nodes(NamedTuple):
    """Two nodes, and what a name stands for: at first the first."""

    first: RedisProcess
    second: RedisProcess
    name: LoadBalancer
    port: int

    def move(self) -> None:
        """Let the name stand for the second node. Open connections stay where they are."""
        self.name.servers = [("127.0.0.1", self.second.port)]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Two primaries, so that either can be demoted."""
    directories = [tmp_path / "first", tmp_path / "second"]
    for directory in directories:
        directory.mkdir()
    first, second = (RedisProcess(directory) for directory in directories)
    with load_balancer([("127.0.0.1", first.port)]) as (port, name):
        yield Nodes(first, second, name, port)
    first.close()
    second.close()


@pytest.fixture
async def server(nodes: Nodes, clock: FakeClock) -> AsyncIterator[RedisServer]:
    """A client with several open connections, none of which is in use."""
    opened = RedisServer(f"redis://127.0.0.1:{nodes.port}/0", clock, timeout=PATIENCE)
    nodes.first.command("CLIENT", "PAUSE", "300", "WRITE")
    async with anyio.create_task_group() as group:
        for number in range(OPEN):
            group.start_soon(opened.run, WRITE, f"name-{number}", "value")
    yield opened
    await opened.aclose()


def demoted(nodes: Nodes) -> None:
    nodes.first.command("REPLICAOF", "127.0.0.1", str(nodes.second.port))


def demoted_and_without_its_primary(nodes: Nodes) -> None:
    nodes.first.command("CONFIG", "SET", "replica-serve-stale-data", "no")
    nodes.first.command("REPLICAOF", *NOWHERE)


def left_by_its_replicas(nodes: Nodes) -> None:
    nodes.first.command("CONFIG", "SET", "min-replicas-to-write", "1")


STATES = [demoted, demoted_and_without_its_primary, left_by_its_replicas]


@pytest.mark.parametrize("leave", STATES)
async def test_one_refused_call_is_all_that_a_failover_in_good_order_costs(
    nodes: Nodes, server: RedisServer, leave: Callable[[Nodes], None]
) -> None:
    leave(nodes)
    nodes.move()
    with pytest.raises(ConveyorError, match="redis does not answer: "):
        await server.run(WRITE, "name", "value")
    async with anyio.create_task_group() as group:
        for number in range(OPEN):
            group.start_soon(server.run, WRITE, f"later-{number}", "value")
    assert nodes.second.command("DBSIZE") == OPEN


@pytest.mark.parametrize(
    "answer",
    [
        "LOADING Redis is loading the dataset in memory",
        "CLUSTERDOWN The cluster is down",
        "MOVED 3999 127.0.0.1:6381",
        "ASK 3999 127.0.0.1:6381",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "MISCONF Redis is configured to save RDB snapshots, but it is unable to",
        "REDIRECT 127.0.0.1:6381",
        "ERR Error running script (call to f_1): @user_script:1: @user_script: 1: -READONLY You"
        " can't write against a read only replica.",
    ],
)
async def test_so_do_other_answers_of_a_node_that_takes_no_writes(
    nodes: Nodes, server: RedisServer, answer: str
) -> None:
    nodes.move()
    with pytest.raises(ConveyorError, match="redis does not answer: "):
        await server.run(Script("return redis.error_reply(ARGV[1])"), "name", answer)
    await server.put("name", b"value", seconds=60)
    assert nodes.second.command("DBSIZE") == 1


async def test_an_answer_about_the_call_alone_closes_no_connection(
    nodes: Nodes, server: RedisServer
) -> None:
    nodes.move()
    with pytest.raises(ConveyorError):
        await server.run(Script("return redis.call('GET')"), "name")
    await server.put("name", b"value", seconds=60)
    assert nodes.second.command("DBSIZE") == 0


async def test_a_connection_in_use_at_that_moment_is_closed_after_its_call(
    nodes: Nodes, server: RedisServer
) -> None:
    nodes.first.command("SET", "name", "old")
    demoted_and_without_its_primary(nodes)
    nodes.first.command("CONFIG", "SET", "replica-serve-stale-data", "yes")
    nodes.first.command("CLIENT", "PAUSE", "300", "ALL")
    nodes.move()
    async with anyio.create_task_group() as group:
        for _ in range(OPEN - 1):
            group.start_soon(server.get, "name")
        with pytest.raises(ConveyorError):
            await server.run(WRITE, "name", "new")
    assert [await server.get("name") for _ in range(OPEN)] == [None] * OPEN


async def test_a_node_that_hangs_costs_one_wait(nodes: Nodes, server: RedisServer) -> None:
    nodes.first.pause()
    nodes.move()
    server._timeout = 0.2
    with pytest.raises(ConveyorError):
        await server.ping()
    server._timeout = PATIENCE
    await server.ping()
    nodes.first.go_on()


def job() -> Job:
    return Job(
        job_id="JOB", caller="caller", status=JobStatus.OPEN, created_at=START, updated_at=START
    )


class StoredJob:
    """A store of one job."""

    async def find_job(self, job_id: str) -> Job | None:
        return job() if job_id == "JOB" else None


async def hold(server: RedisServer) -> None:
    """Ask for a permit."""
    request = LeaseRequest(job_id="JOB", holder="a", count=0, before=0, sequence=1)
    permits = RedisPermits(server, environment="failover")
    with contextlib.suppress(ConveyorError):
        await permits.acquire_or_renew(request, limit=1, lease=1.0)


async def take(server: RedisServer) -> None:
    """Ask the rate limit."""
    limit = RedisRateLimit(server, environment="failover", rate=0.001, burst=1)
    assert await limit.take("caller") == 0.0


async def find(server: RedisServer) -> None:
    """Ask for a cached job."""
    assert await CachedJobs(StoredJob(), server, environment="failover").find_job("JOB") == job()


@pytest.mark.parametrize("use", [hold, take, find])
async def test_permits_limit_and_cache_go_on_at_the_new_primary(
    nodes: Nodes,
    server: RedisServer,
    clock: FakeClock,
    use: Callable[[RedisServer], Awaitable[None]],
) -> None:
    demoted(nodes)
    nodes.move()
    for _ in range(2):
        assert nodes.second.command("DBSIZE") == 0
        await use(server)
        await clock.advance(REST)
    assert nodes.second.command("DBSIZE") != 0


def away(server: RedisServer) -> bool:
    """Ask anew: the clock has gone on."""
    return server.away


async def test_it_counts_as_away_after_several_failures_until_it_answers(
    nodes: Nodes, server: RedisServer, clock: FakeClock
) -> None:
    demoted(nodes)
    for _ in range(AWAY_AFTER):
        assert away(server) is False
        with pytest.raises(ConveyorError):
            await server.put("name", b"value", seconds=60)
    assert away(server)
    await clock.advance(AWAY_FOR + 1)
    assert away(server) is False
    with pytest.raises(ConveyorError):
        await server.put("name", b"value", seconds=60)
    assert away(server)
    nodes.move()
    await server.put("name", b"value", seconds=60)
    assert away(server) is False
