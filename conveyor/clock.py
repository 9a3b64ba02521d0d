"""The system clock: the only module that reads time, randomness and ids."""

from __future__ import annotations

import os
import random
import time

import anyio
from ulid import ULID


class SystemClock:
    """Implements the clock port over the machine's clocks."""

    def __init__(self) -> None:
        self._random = random.SystemRandom()

    def now(self) -> int:
        """Return milliseconds since the epoch, UTC."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """Return seconds from an arbitrary origin; never goes back."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""
        await anyio.sleep(max(seconds, 0.0))

    def new_id(self) -> str:
        """Return a new ULID for the present instant."""
        return str(ULID())

    def random(self) -> float:
        """Return a number in [0, 1)."""
        return self._random.random()

    def token(self, length: int) -> bytes:
        """Return unpredictable bytes."""
        return os.urandom(length)
