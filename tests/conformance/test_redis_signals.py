"""Hints about runs over a real Redis: heard by every worker, and nothing depends on them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest

from conveyor.clock import SystemClock
from conveyor.prod import signals as timing
from conveyor.prod.redis import server as redis_timing
from conveyor.prod.redis.server import RedisServer
from conveyor.prod.signals import RedisSignals, hints_channel
from tests.conformance.redis_process import RedisProcess

pytestmark = pytest.mark.slow

ENVIRONMENT = "test"
MOST = 20.0
"""Seconds after which a test gives up."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    """A server of the test's own."""
    process = RedisProcess(tmp_path)
    yield process
    process.close()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + MOST
    while not condition():
        assert time.monotonic() < deadline, "it never comes true"
        await asyncio.sleep(0.01)


class Fleet:
    """Processes over one server."""

    def __init__(self, redis: RedisProcess) -> None:
        self.redis = redis
        self.clock = SystemClock()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._stack.aclose()

    def process(self) -> RedisSignals:
        """Return the signals of one more process."""
        server = RedisServer(self.redis.url, self.clock)
        self._stack.push_async_callback(server.aclose)
        signals = RedisSignals(server, self.clock, environment=ENVIRONMENT)
        self._stack.push_async_callback(signals.aclose)
        return signals

    async def worker(self, count: int = 1) -> RedisSignals:
        """Return a process that listens by now, as the `count`th one."""
        signals = self.process()
        waiting = asyncio.create_task(signals.wait())
        await self.listeners(count)
        waiting.cancel()
        return signals

    async def listeners(self, count: int) -> None:
        """Wait until so many processes listen."""
        channel = hints_channel(ENVIRONMENT)
        wanted = [channel.encode(), count]
        await until(lambda: self.redis.command("PUBSUB", "NUMSUB", channel) == wanted)

    def say(self, text: str) -> None:
        """Publish something by hand."""
        self.redis.command("PUBLISH", hints_channel(ENVIRONMENT), text)


@pytest.fixture
async def fleet(redis: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    monkeypatch.setattr(timing, "AGAIN", 0.05)
    monkeypatch.setattr(timing, "SILENT_FOR", 0.0)
    async with Fleet(redis) as opened:
        yield opened


def run_id(number: int) -> str:
    """An id of a run."""
    return f"01KDVDNA00{number:016}"


async def heard(signals: RedisSignals) -> set[str]:
    """Return the next hints."""
    async with asyncio.timeout(MOST):
        return await signals.wait()


async def test_each_worker_hears_of_a_run_that_another_process_changed(fleet: Fleet) -> None:
    first, second = await fleet.worker(1), await fleet.worker(2)
    api = fleet.process()
    api.run_changed(run_id(1))
    assert await heard(first) == await heard(second) == {run_id(1)}
    second.run_changed(run_id(2))
    assert await heard(first) == await heard(second) == {run_id(2)}


async def test_a_run_that_changes_often_is_told_of_once_and_once_more_at_the_end(
    fleet: Fleet,
) -> None:
    worker, api = await fleet.worker(), fleet.process()
    for _ in range(100):
        api.run_changed(run_id(1))
    assert await heard(worker) == {run_id(1)}
    for _ in range(100):
        api.run_changed(run_id(1))
    assert await heard(worker) == {run_id(1)}
    assert calls_of(fleet.redis) == 2


def calls_of(redis: RedisProcess) -> int:
    """Messages that were published by scripts: each sets the key, too."""
    with_statistics = redis.command("INFO", "commandstats")
    assert isinstance(with_statistics, dict)
    return int(with_statistics["cmdstat_set"]["calls"])


async def test_what_nobody_could_have_said_is_left_alone(fleet: Fleet) -> None:
    worker = await fleet.worker()
    for text in ("", "x" * 1_000_000, run_id(1).lower(), f"{run_id(1)}\n", "ключ", "*"):
        fleet.say(text)
    fleet.say(run_id(2))
    assert await heard(worker) == {run_id(2)}


def was_said(caplog: pytest.LogCaptureFixture, words: str) -> bool:
    """Tell whether a line of the log holds the words."""
    return any(words in text for text in caplog.messages)


async def test_hints_are_heard_again_after_the_server_was_away(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    worker, api = await fleet.worker(), fleet.process()
    with caplog.at_level(logging.WARNING, "conveyor.engine"):
        fleet.redis.kill()
        for number in range(3):
            api.run_changed(run_id(number))
        for words in ("no hints about runs are heard", "no hints about runs are published"):
            await until(partial(was_said, caplog, words))
    fleet.redis.start()
    await fleet.listeners(1)
    api.run_changed(run_id(9))
    assert await heard(worker) == {run_id(9)}


async def test_a_server_that_hangs_is_noticed(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(redis_timing, "LISTEN", 0.1)
    worker = await fleet.worker()
    with caplog.at_level(logging.WARNING, "conveyor.engine"):
        fleet.redis.pause()
        await until(lambda: bool(caplog.records))
    fleet.redis.go_on()
    hinted = asyncio.create_task(heard(worker))
    while not hinted.done():
        # The server may still count the connection that was given up.
        fleet.say(run_id(1))
        await asyncio.wait([hinted], timeout=0.05)
    assert await hinted == {run_id(1)}


async def test_an_end_is_told_in_its_own_process_alone(fleet: Fleet) -> None:
    worker, other = await fleet.worker(), fleet.process()
    told: list[str] = []
    worker.on_end(lambda: told.append("worker"))
    other.on_end(lambda: told.append("other"))
    other.run_ended(run_id(1))
    fleet.say(run_id(2))
    assert await heard(worker) == {run_id(2)}
    assert told == ["other"]
