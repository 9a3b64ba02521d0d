"""The clock port: time, sleep, ids and randomness."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Where every instant, delay, id and random number comes from."""

    def now(self) -> int:
        """Milliseconds since the epoch, UTC. May jump with the machine's clock."""
        ...

    def monotonic(self) -> float:
        """Seconds from an arbitrary origin; never goes back. For measuring and for deadlines."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`; at the next turn of the loop where that is not positive."""
        ...

    def new_id(self) -> str:
        """A new ULID for the present instant."""
        ...

    def random(self) -> float:
        """A number in [0, 1)."""
        ...

    def token(self, length: int) -> bytes:
        """Unpredictable bytes, for keys and nonces."""
        ...
