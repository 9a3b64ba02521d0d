"""The pacing port in memory, for the workers of one process."""

from __future__ import annotations

from conveyor.ports.clock import Clock
from conveyor.ports.pacing import HORIZON, IDLE, Pacing

_SLACK = 64


class MemoryPacing(Pacing):
    """The next start and the end of the line of each host, by name. Hosts that are idle are
    forgotten now and then. One that may have lost bookings books nothing for `closed_for`
    seconds."""

    def __init__(self, clock: Clock, *, closed_for: float = 0.0) -> None:
        self._clock = clock
        self._opens_at = clock.monotonic() + closed_for
        self._next: dict[str, float] = {}
        self._line: dict[str, float] = {}
        self._sweep_at = _SLACK

    async def book(self, host: str, interval: float) -> float | None:
        now = self._clock.monotonic()
        start = max(now, self._opens_at, self._next.get(host, now))
        if start - now > HORIZON:
            return None
        self._sweep(now)
        self._next[host] = start + interval
        return start - now

    async def line_up(self, host: str, interval: float) -> float:
        now = self._clock.monotonic()
        self._sweep(now)
        following = self._next.setdefault(host, now)
        place = self._line.get(host, now)
        if following < now - IDLE:
            place = self._next[host] = now
        self._line[host] = max(now, following, place) + interval
        return self._line[host] - now

    def clear(self) -> None:
        """Forget all hosts."""
        self._next.clear()
        self._line.clear()

    def _sweep(self, now: float) -> None:
        if len(self._next) < self._sweep_at:
            return
        for host, following in list(self._next.items()):
            if following < now - IDLE:
                del self._next[host]
                self._line.pop(host, None)
        self._sweep_at = 2 * len(self._next) + _SLACK
