"""The signals port where API and workers are separate processes.

Discovery over the records finds every run by itself; hints only make it sooner. With a Redis each
process publishes the runs that it has changed, and workers listen. A hint that is lost, late,
repeated or forged does no harm: a worker looks at the run that it names, as discovery would.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

import anyio
from cachetools import LRUCache

from conveyor.domain.errors import ConveyorError
from conveyor.domain.ids import is_ulid
from conveyor.ports.clock import Clock
from conveyor.prod.redis.server import RedisServer, Script

HINT = Script("""
redis.call('SET', KEYS[1], ARGV[1], 'EX', 60)
return redis.call('PUBLISH', KEYS[1], ARGV[1])
""")
"""The write is there for its refusal: a node that is no primary any more would take hints, though
nobody listens there."""

APART = 1.0
"""Seconds between two hints about a run by one process; what changes meanwhile is told after
them."""
GATHERED = 0.5
"""Seconds between two answers to a worker that waits; hints are gathered meanwhile."""
AGAIN = 5.0
"""Seconds after which a worker that could not listen tries again."""
SILENT_FOR = 30.0
"""Seconds for which nothing is published after a failure: no call waits for a hint."""
MOST_HINTS = 10_000
"""Runs that a worker was hinted at and has not looked at; further ones are left to discovery."""

_log = logging.getLogger("conveyor.engine")


class EndSignals:
    """Signals without a Redis: only the ends that a worker itself brings about are hinted at."""

    def __init__(self) -> None:
        self._on_end: list[Callable[[], None]] = []

    def run_changed(self, run_id: str) -> None:
        """Ignore the hint."""

    def run_ended(self, run_id: str) -> None:
        """Call the functions of `on_end`."""
        for tell in self._on_end:
            tell()

    def on_end(self, tell: Callable[[], None]) -> None:
        """Call a function at each hint that a run has ended."""
        self._on_end.append(tell)

    def run_halted(self, run_id: str) -> None:
        """Do nothing: each task is called for as soon as it is claimed."""

    def on_halt(self, give_up: Callable[[str], None]) -> None:
        """Never call the function."""

    async def wait(self) -> set[str]:
        """Wait until cancelled."""
        await anyio.sleep_forever()
        return set()


class RedisSignals(EndSignals):
    """Signals by publish and subscribe on one channel of an environment. Belongs to one event loop.

    A process listens from its first wait on.
    """

    def __init__(self, server: RedisServer, clock: Clock, *, environment: str) -> None:
        super().__init__()
        self._server = server
        self._clock = clock
        self._channel = hints_channel(environment)
        self._tasks: set[asyncio.Task[None]] = set()
        self._due: set[str] = set()
        self._told_at: LRUCache[str, float] = LRUCache(MOST_HINTS)
        self._silent_until = float("-inf")
        self._listens = False
        self._hints: set[str] = set()
        self._hinted = anyio.Event()
        self._answered_at = float("-inf")

    def run_changed(self, run_id: str) -> None:
        """Publish the hint soon, unless the server failed lately. Raises nothing."""
        if run_id in self._due or self._clock.monotonic() < self._silent_until:
            return
        self._due.add(run_id)
        self._start(self._publish(run_id))

    async def wait(self) -> set[str]:
        """Wait for a hint of any process; see `Signals.wait`."""
        if not self._listens:
            self._listens = True
            self._start(self._listen())
        await self._hinted.wait()
        rest = self._answered_at + GATHERED - self._clock.monotonic()
        if rest > 0:
            await self._clock.sleep(rest)
        self._answered_at = self._clock.monotonic()
        self._hinted = anyio.Event()
        hints, self._hints = self._hints, set()
        return hints

    async def aclose(self) -> None:
        """Listen and publish no more."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _publish(self, run_id: str) -> None:
        rest = self._told_at.get(run_id, float("-inf")) + APART - self._clock.monotonic()
        if rest > 0:
            await self._clock.sleep(rest)
        self._due.discard(run_id)
        self._told_at[run_id] = self._clock.monotonic()
        try:
            await self._server.run(HINT, self._channel, run_id)
        except ConveyorError as error:
            self._silent_until = self._clock.monotonic() + SILENT_FOR
            _log.warning("no hints about runs are published for a while: %s", error.detail)

    async def _listen(self) -> None:
        """Gather hints until cancelled; after a failure, listen anew."""
        deaf = False
        while True:
            try:
                async for text in self._server.listen(self._channel):
                    if deaf:
                        _log.info("hints about runs are heard again")
                    deaf = False
                    self._hear(text)
            except ConveyorError as error:
                if not deaf:
                    _log.warning("no hints about runs are heard: %s", error.detail)
                deaf = True
                await self._clock.sleep(AGAIN)

    def _hear(self, text: bytes) -> None:
        """Take in what was published; anything but the id of a run is left alone."""
        run_id = text.decode("ascii", "replace")
        if is_ulid(run_id) and len(self._hints) < MOST_HINTS:
            self._hints.add(run_id)
            self._hinted.set()


def hints_channel(environment: str) -> str:
    """Return the channel of a fleet's hints, and the key of the last one."""
    return f"conveyor:{environment}:runs"
