"""Exponential backoff: how long to wait before trying again. Randomness is passed in."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_EXPONENT = 32


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays in seconds: `base` first, times `factor` with each further attempt, at most `cap`.

    `attempt` counts the attempts that have failed, from 1. `jitter` is a random number in [0, 1).
    """

    base: float
    cap: float = math.inf
    factor: float = 2.0

    def delay(self, attempt: int) -> float:
        """Return the delay without jitter."""
        exponent = min(max(attempt, 1) - 1, MAX_EXPONENT)
        return min(self.cap, self.base * self.factor**exponent)

    def spread(self, attempt: int, jitter: float) -> float:
        """Return the delay times a factor between a half and one and a half."""
        return self.delay(attempt) * (0.5 + jitter)

    def full_jitter(self, attempt: int, jitter: float) -> float:
        """Return any time up to the delay."""
        return self.delay(attempt) * jitter
