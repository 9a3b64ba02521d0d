"""The clock port: time, sleep, ids and randomness."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """The source of every instant, delay, id and random number."""

    def now(self) -> int:
        """Return milliseconds since the epoch, UTC. They may jump with the machine's clock."""
        ...

    def monotonic(self) -> float:
        """Return seconds from an arbitrary origin, which never go back, to measure durations and
        keep deadlines."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds`; if that is not positive, until the next turn of the event loop."""
        ...

    def new_id(self) -> str:
        """Return a new ULID for the present instant."""
        ...

    def random(self) -> float:
        """Return a random number in [0, 1)."""
        ...

    def token(self, length: int) -> bytes:
        """Return `length` unpredictable bytes, for keys and nonces."""
        ...
