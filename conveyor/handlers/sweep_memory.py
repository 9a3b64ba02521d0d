"""What a sweeper remembers from one sweep to the next."""

from __future__ import annotations

from conveyor.ports.clock import Clock


class Recently:
    """Which things were done within the last `seconds`, so that a sweep does not do them again.

    Lost with the process: doing them twice is harmless.
    """

    def __init__(self, clock: Clock, *, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._done: dict[str, float] = {}

    def first(self, key: str) -> bool:
        """Whether a thing was not done recently; it counts as done from now on."""
        now = self._clock.monotonic()
        for old in [key for key, at in self._done.items() if now - at >= self._seconds]:
            del self._done[old]
        if key in self._done:
            return False
        self._done[key] = now
        return True
