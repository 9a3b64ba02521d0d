"""The job on dramatiq: redis, urllib3, threads; retries its only middleware, no result backend.

The worker runs as `dramatiq bench.peers.dramatiq_peer`; enqueueing as
`python -m bench.peers.dramatiq_peer FIRST COUNT BASE_URL`, which prints the seconds it took.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import dramatiq
import urllib3
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Retries

from bench.peers.store import Store, open_store

broker = RedisBroker(url=os.environ["BENCH_REDIS_URL"], middleware=[Retries()])
dramatiq.set_broker(broker)

pool = urllib3.PoolManager(maxsize=int(os.environ["BENCH_THREADS"]), retries=False)


class Worker:
    """The store of one worker process, opened at the first task: there is no start hook."""

    opening = threading.Lock()
    store: Store | None = None


def store() -> Store:
    """Return the store of this process. Its threads begin at once, and one of them opens it."""
    if Worker.store is None:
        with Worker.opening:
            if Worker.store is None:
                Worker.store = open_store()
    return Worker.store


def fetch(url: str) -> None:
    """Fetch one URL and record the answer."""
    response = pool.request("GET", url)
    store().record(url, response.status, response.data)


fetch_task = dramatiq.actor(fetch, max_retries=3)


def enqueue(urls: list[str]) -> float:
    """Send every URL; return the seconds it took."""
    started = time.perf_counter()
    for url in urls:
        fetch_task.send(url)
    return time.perf_counter() - started


if __name__ == "__main__":
    first, count, base_url = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    print(enqueue([f"{base_url}/{number}" for number in range(first, first + count)]))
