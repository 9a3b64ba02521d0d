"""The job on taskiq: a redis stream, aiohttp, uvloop, orjson, no result backend.

The worker runs as `taskiq worker bench.peers.taskiq_peer:broker`; enqueueing as
`python -m bench.peers.taskiq_peer FIRST COUNT BASE_URL`, which prints the seconds it took.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

import aiohttp
import uvloop
from taskiq import TaskiqEvents, TaskiqState
from taskiq.serializers import ORJSONSerializer
from taskiq_redis import RedisStreamBroker

from bench.peers.store import Store, open_store

ENQUEUE_AT_A_TIME = 50

broker = RedisStreamBroker(
    os.environ["BENCH_REDIS_URL"],
    max_connection_pool_size=100,
    xread_count=100,
    consumer_id="0",
    socket_timeout=None,  # a read must survive a worker that is stopped while tasks are sent
).with_serializer(ORJSONSerializer())


class Worker:
    """The resources of one worker process between its start and its end."""

    session: aiohttp.ClientSession
    store: Store


async def start(_state: TaskiqState) -> None:
    """Open the connection pool and the store of this process."""
    Worker.session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), auto_decompress=False
    )
    Worker.store = open_store()


async def stop(_state: TaskiqState) -> None:
    """Close the connection pool."""
    await Worker.session.close()


async def fetch(url: str) -> None:
    """Fetch one URL and record the answer."""
    async with Worker.session.get(url) as response:
        Worker.store.record(url, response.status, await response.read())


broker.add_event_handler(TaskiqEvents.WORKER_STARTUP, start)
broker.add_event_handler(TaskiqEvents.WORKER_SHUTDOWN, stop)
fetch_task = broker.register_task(fetch, task_name="fetch")


async def enqueue(urls: list[str]) -> float:
    """Send every URL, several at a time; return the seconds it took."""
    await broker.startup()
    waiting = iter(urls)

    async def send() -> None:
        for url in waiting:
            await fetch_task.kiq(url)

    started = time.perf_counter()
    await asyncio.gather(*(send() for _ in range(ENQUEUE_AT_A_TIME)))
    elapsed = time.perf_counter() - started
    await broker.shutdown()
    return elapsed


if __name__ == "__main__":
    first, count, base_url = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    addresses = [f"{base_url}/{number}" for number in range(first, first + count)]
    print(uvloop.run(enqueue(addresses)))
