"""A clock that a test advances, with seeded randomness: hours pass in milliseconds, and the same
seed gives the same ids."""

from __future__ import annotations

import asyncio
import heapq
import math
import random  # noqa: TID251  (seeded: this is the clock of tests)
from collections.abc import Callable, Sized
from dataclasses import dataclass

import anyio
import anyio.lowlevel
from ulid import ULID

START = 1_767_225_600_000
"""The default start of virtual time: 2026-01-01T00:00:00Z."""

_NANOSECONDS = 1_000_000_000
_FOREVER = 1e9
_MAX_TURNS = 2_000


@dataclass(slots=True)
class _Timer:
    due: int
    order: int
    fired: anyio.Event
    live: bool = True

    def __lt__(self, other: _Timer) -> bool:
        return (self.due, self.order) < (other.due, other.order)


class FakeClock:
    """The clock port over virtual time.

    `start` is the first `now()` in milliseconds. `grace` is in real seconds: each step of `advance`
    gives threads and sockets so long to come back before time moves on; 0 if there are none.
    Belongs to one event loop; no other thread may call it.
    """

    def __init__(self, *, start: int = START, seed: int = 0, grace: float = 0.0) -> None:
        self._start = start
        self._elapsed = 0
        self._shift = 0
        self._random = random.Random(seed)
        self._timers: list[_Timer] = []
        self._order = 0
        self._pending = 0
        self._last_id = 0
        self._grace = grace

    @property
    def pending(self) -> int:
        """Return the number of sleeps that wait for time to move."""
        return self._pending

    def now(self) -> int:
        """Return virtual milliseconds since the epoch."""
        return self._start + self._shift + self._elapsed // 1_000_000

    def monotonic(self) -> float:
        """Return virtual seconds since the clock was made."""
        return self._elapsed / _NANOSECONDS

    def random(self) -> float:
        """Return a number in [0, 1), by the seed."""
        return self._random.random()

    def token(self, length: int) -> bytes:
        """Return bytes by the seed: predictable, as tests want them."""
        return self._random.randbytes(length)

    def new_id(self) -> str:
        """Return a ULID of virtual time and seeded randomness; each is greater than the one
        before."""
        fresh = self.now() << 80 | self._random.getrandbits(79)
        self._last_id = max(fresh, self._last_id + 1)
        return str(ULID.from_bytes(self._last_id.to_bytes(16, "big")))

    def shift(self, seconds: float) -> None:
        """Set the wall clock forward or back, as an administrator would; monotonic time stays."""
        self._shift += round(seconds * 1_000)

    async def sleep(self, seconds: float) -> None:
        """Wait until time has been advanced by `seconds`."""
        if seconds <= 0:
            await anyio.lowlevel.checkpoint()
            return
        self._order += 1
        due = self._elapsed + math.ceil(min(seconds, _FOREVER) * _NANOSECONDS)
        timer = _Timer(due, self._order, anyio.Event())
        heapq.heappush(self._timers, timer)
        self._pending += 1
        try:
            await timer.fired.wait()
        finally:
            if timer.live:
                self._retire(timer)

    async def advance(self, seconds: float) -> None:
        """Move time on, stopping at each due sleep and letting every task settle."""
        await self._advance_to(self._elapsed + math.ceil(seconds * _NANOSECONDS))

    async def advance_while(self, condition: Callable[[], bool], *, limit: float) -> None:
        """Move time on from sleep to sleep while the condition holds, `limit` seconds at most."""
        end = self._elapsed + math.ceil(limit * _NANOSECONDS)
        await self._settle()
        while condition() and self._elapsed < end:
            timer = self._next_timer()
            await self._advance_to(end if timer is None else min(timer.due, end))

    async def _advance_to(self, target: int) -> None:
        await self._settle()
        while (timer := self._next_timer()) is not None and timer.due <= target:
            heapq.heappop(self._timers)
            self._elapsed = max(self._elapsed, timer.due)
            self._retire(timer)
            timer.fired.set()
            await self._settle()
        self._elapsed = max(self._elapsed, target)

    def _next_timer(self) -> _Timer | None:
        while self._timers and not self._timers[0].live:
            heapq.heappop(self._timers)
        return self._timers[0] if self._timers else None

    def _retire(self, timer: _Timer) -> None:
        timer.live = False
        self._pending -= 1
        if len(self._timers) > 2 * self._pending + 64:
            self._timers = [timer for timer in self._timers if timer.live]
            heapq.heapify(self._timers)

    async def _settle(self) -> None:
        await _all_blocked()
        if self._grace:
            await anyio.sleep(self._grace)  # noqa: TID251  (real threads need real time)
            await _all_blocked()


async def _all_blocked() -> None:
    """Let the other tasks run until each waits for something.

    anyio's own function sleeps a tenth of a real second if it finds a runnable task, so on asyncio
    this checks the loop itself. A task that never waits holds it up for a bounded number of turns.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # trio
        await anyio.wait_all_tasks_blocked()
        return
    ready: Sized | None = getattr(loop, "_ready", None)
    for _ in range(_MAX_TURNS):
        await asyncio.sleep(0)  # noqa: TID251  (a turn of the loop, no time)
        if not (_any_runnable() if ready is None else len(ready)):
            return


def _any_runnable() -> bool:
    """Return whether some task can run, on a loop that hides its queue."""
    present = asyncio.current_task()
    for task in asyncio.all_tasks():
        waiter = getattr(task, "_fut_waiter", None)
        if task is not present and (waiter is None or waiter.done()):
            return True
    return False
