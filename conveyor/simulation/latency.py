"""How long things take in a simulation, and the seeded streams that say so.

Every stream is derived from the seed and a name by hashing, so that who draws how often from one
never changes what another gives, and two processes draw the same."""

from __future__ import annotations

import hashlib
import math
import random  # noqa: TID251  (seeded: a simulation is repeatable)
from dataclasses import dataclass

from conveyor.simulation.checks import check_number, check_time

MOST_SIGMA = 10.0
"""The widest spread; far wider than any, and its draws are finite."""


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
        """The mean, in seconds."""
        return self.median * math.exp(self.sigma * self.sigma / 2)

    def draw(self, stream: random.Random) -> float:
        """The next value from a stream, in seconds."""
        if not self.sigma:
            return self.median
        return self.median * math.exp(self.sigma * stream.gauss(0.0, 1.0))

    def draw_for(self, seed: int, name: str) -> float:
        """The value that belongs to a name, in seconds, whoever asks and in whatever order."""
        if not self.sigma:
            return self.median
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        first = ((int.from_bytes(digest[:8], "big") >> 12) + 1) / 2.0**_BITS
        second = (int.from_bytes(digest[8:16], "big") >> 12) / 2.0**_BITS
        normal = math.sqrt(-2.0 * math.log(first)) * math.cos(_TURN * second)
        return self.median * math.exp(self.sigma * normal)


def stream(seed: int, name: str) -> random.Random:
    """A stream of random numbers of its own for a name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))
