"""Calls in flight over time: the maximum, the time above a cap, the mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Flight:
    """Counts calls against a cap. Times are in seconds of the clock passed in."""

    def __init__(self, cap: int) -> None:
        self.peak = 0
        self.seconds_over_cap = 0.0
        self.call_seconds = 0.0
        self.until_last_start = 0.0
        self.last_start = 0.0
        self._cap = cap
        self._now = 0
        self._changed_at = 0.0

    @contextmanager
    def call(self, clock: Callable[[], float]) -> Iterator[None]:
        """Count one call, from its start to its end."""
        self.last_start = clock()
        self._change(1, self.last_start)
        self.until_last_start = self.call_seconds
        try:
            yield
        finally:
            self._change(-1, clock())

    def _change(self, by: int, moment: float) -> None:
        passed = moment - self._changed_at if self._now else 0.0
        self.call_seconds += self._now * passed
        if self._now > self._cap:
            self.seconds_over_cap += passed
        self._now += by
        self.peak = max(self.peak, self._now)
        self._changed_at = moment
