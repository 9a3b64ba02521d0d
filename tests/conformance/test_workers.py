"""Reports of workers, over every adapter that keeps them."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import redis

from conveyor.dev.permits import MemoryWorkers
from conveyor.domain.run_waits import (
    LaneReport,
    RunWaitReason,
    WorkerReport,
    decode_report,
    encode_report,
)
from conveyor.ports.workers import MOST_BYTES, Workers
from conveyor.prod.dynamodb.client import Table
from conveyor.prod.dynamodb.permits import DynamoWorkers
from conveyor.prod.dynamodb.schema import Key, worker_key
from conveyor.prod.redis.permits import RedisWorkers, workers_key
from conveyor.prod.redis.server import RedisServer
from conveyor.testing.clock import START, FakeClock
from tests.conformance.emulators import address
from tests.conformance.permit_servers import permits_table

HEARTBEAT = 10.0


@dataclass
class Bench:
    """Reports, the clock that they age by, and what puts a foreign report in their place."""

    workers: Workers
    clock: FakeClock
    garble: Callable[[], Awaitable[None]]

    def report(self, worker_id: str, *lanes: LaneReport) -> WorkerReport:
        now = self.clock.now()
        return WorkerReport(
            worker_id=worker_id,
            version="1.2.3",
            started_at=now - 5,
            said_at=now,
            heartbeat=HEARTBEAT,
            slots=4,
            in_use=2,
            claim_seconds=45.0,
            away=("gateway",),
            lanes=lanes,
            lanes_left_out=3,
        )

    async def names(self) -> list[str]:
        return [report.worker_id for report in await self.workers.all()]


async def _memory() -> AsyncIterator[Bench]:
    clock = FakeClock()

    async def garble() -> None:
        """Nothing else writes into this memory."""

    yield Bench(MemoryWorkers(clock), clock, garble)


async def _redis() -> AsyncIterator[Bench]:
    clock = FakeClock()
    url = address("CONVEYOR_TEST_REDIS")
    environment = f"test-{secrets.token_hex(6)}"
    server = RedisServer(url, clock, timeout=60.0)
    workers = RedisWorkers(
        server,
        environment=environment,
        instant=lambda: START + round(clock.monotonic() * 1_000),
    )

    async def garble() -> None:
        with redis.Redis.from_url(url) as client:
            pack = "return redis.call('HSET', KEYS[1], 'X', cmsgpack.pack({9e15, 'no report'}))"
            client.eval(pack, 1, workers_key(environment))

    yield Bench(workers, clock, garble)
    with redis.Redis.from_url(url) as client:
        client.delete(workers_key(environment))
    await server.aclose()


async def _dynamodb() -> AsyncIterator[Bench]:
    clock = FakeClock()
    table = permits_table(clock)
    await _empty(table)

    async def garble() -> None:
        for number, report in enumerate((b"no report", "no bytes")):
            item: dict[str, Any] = {"shape": 1, "report": report, "ends_at": 1 << 50}
            await table.put(worker_key(f"X{number}"), item)
        await table.put(worker_key("X2"), {"shape": 99})

    yield Bench(DynamoWorkers(table, clock), clock, garble)
    await _empty(table)


async def _empty(table: Table) -> None:
    """Remove what another test left in the shared partition."""
    answer = await table.call(
        "query",
        KeyConditionExpression="pk = :pk",
        ExpressionAttributeValues={":pk": {"S": worker_key("").pk}},
    )
    await table.delete_many([Key(item["pk"]["S"], item["sk"]["S"]) for item in answer["Items"]])


@pytest.fixture(params=[_memory, _redis, _dynamodb], ids=["memory", "redis", "dynamodb"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    async for opened in request.param():
        yield opened


async def test_reports_come_back_as_they_were_said_by_name(bench: Bench) -> None:
    lane = LaneReport(
        run_id="R",
        in_flight=1,
        put_off=2,
        limit=9,
        ceiling=3,
        reason=RunWaitReason.RETRY_BACKOFF,
        since=7,
        until=8,
    )
    said = [bench.report("B", lane), bench.report("A")]
    for report in said:
        await bench.workers.say(report)
    assert list(await bench.workers.all()) == said[::-1]


async def test_a_later_word_replaces_an_earlier_one(bench: Bench) -> None:
    await bench.workers.say(bench.report("A"))
    await bench.clock.advance(HEARTBEAT)
    later = bench.report("A")
    await bench.workers.say(later)
    assert list(await bench.workers.all()) == [later]


async def test_a_worker_that_leaves_is_gone_at_once_and_again(bench: Bench) -> None:
    await bench.workers.say(bench.report("A"))
    await bench.workers.say(bench.report("B"))
    await bench.workers.leave("A")
    await bench.workers.leave("A")
    assert await bench.names() == ["B"]


async def test_a_silent_worker_is_kept_for_a_while_and_then_goes(bench: Bench) -> None:
    report = bench.report("A")
    await bench.workers.say(report)
    await bench.clock.advance(report.kept_for - 1.0)
    assert await bench.names() == ["A"]
    await bench.workers.say(bench.report("B"))
    await bench.clock.advance(2.0)
    assert await bench.names() == ["B"]


async def test_the_largest_reports_of_many_workers_are_kept(bench: Bench) -> None:
    lanes = tuple(LaneReport(run_id=f"{number:026}", in_flight=9) for number in range(790))
    report = bench.report("0", *lanes)
    assert 0.9 * MOST_BYTES < len(encode_report(report)) <= MOST_BYTES
    for number in range(40):
        await bench.workers.say(msgspec.structs.replace(report, worker_id=f"{number:02}"))
    assert await bench.names() == [f"{number:02}" for number in range(40)]


async def test_what_is_no_report_is_left_out(bench: Bench) -> None:
    await bench.workers.say(bench.report("A"))
    await bench.garble()
    assert await bench.names() == ["A"]


@pytest.mark.parametrize("encoded", [b"", b"\xff", b"\x80", b'{"worker_id":"A"}'])
def test_foreign_bytes_are_no_report(encoded: bytes) -> None:
    assert decode_report(encoded) is None
