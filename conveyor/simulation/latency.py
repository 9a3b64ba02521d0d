"""The latencies of a simulation, and the seeded streams that they are drawn from.

A stream is derived from the seed and a name by hashing. Draws from one stream never change the
values of another, and two processes draw the same.
"""

from __future__ import annotations

import hashlib
import math
import random  # noqa: TID251  (seeded: a simulation is repeatable)
from dataclasses import dataclass

from conveyor.simulation.checks import check_number, check_time

MOST_SIGMA = 10.0
"""The widest spread; wider than any real one, and its draws are still finite."""


_BITS = 52


_TURN = 2.0 * math.pi


@dataclass(frozen=True, slots=True)
class Latency:
    """A time in seconds: lognormal with this median; constant where `sigma` is 0.

    Its mean is median × exp(sigma² / 2). Raises ValueError for a median that is not from 0 to 1e9,
    or a sigma that is not from 0 to 10.
    """

    median: float
    sigma: float = 0.0

    def __post_init__(self) -> None:
        check_time("Latency.median", self.median)
        check_number("Latency.sigma", self.sigma, most=MOST_SIGMA)

    @property
    def mean(self) -> float:
        """Return the mean, in seconds."""
        return self.median * math.exp(self.sigma * self.sigma / 2)

    def draw(self, stream: random.Random) -> float:
        """Draw the next value from a stream, in seconds."""
        if not self.sigma:
            return self.median
        return self.median * math.exp(self.sigma * stream.gauss(0.0, 1.0))

    def draw_for(self, seed: int, name: str) -> float:
        """Return the value that belongs to a name, in seconds, independent of caller and order."""
        if not self.sigma:
            return self.median
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        first = ((int.from_bytes(digest[:8], "big") >> 12) + 1) / 2.0**_BITS
        second = (int.from_bytes(digest[8:16], "big") >> 12) / 2.0**_BITS
        normal = math.sqrt(-2.0 * math.log(first)) * math.cos(_TURN * second)
        return self.median * math.exp(self.sigma * normal)


def stream(seed: int, name: str) -> random.Random:
    """Return the stream of random numbers that belongs to a name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))
