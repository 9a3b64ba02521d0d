"""Histograms of durations: how many lasted how long, for metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

CALL = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 180.0)
"""Upper bounds, in seconds, for calls of a gateway."""
WAIT = (0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3_600.0, 14_400.0, 86_400.0)
"""For waits in a queue, which may last a day."""
STORE = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0)
"""For calls of stores, and what is made of them."""
ANSWER = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""For answers to requests."""


@dataclass(slots=True)
class Buckets:
    """The durations with the same labels: the count in each bucket, the last one without an upper
    bound, and their sum. `traces` has the id and the duration of the latest traced one, by
    bucket."""

    counts: list[int]
    sum: float = 0.0
    traces: dict[int, tuple[str, float]] = field(default_factory=dict)


class Histogram:
    """Counts of durations by labels, whose values the callers take from a bounded set."""

    __slots__ = ("_buckets", "bounds")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self._buckets: dict[tuple[str, ...], Buckets] = {}

    def observe(self, seconds: float, *labels: str, traceparent: str = "") -> None:
        """Count one duration; a clock that was set back makes none negative. The W3C `traceparent`
        names its trace, if it has one."""
        buckets = self._buckets.get(labels)
        if buckets is None:
            buckets = self._buckets[labels] = Buckets([0] * (len(self.bounds) + 1))
        at = bisect_left(self.bounds, seconds)
        buckets.counts[at] += 1
        if seconds > 0:
            buckets.sum += seconds
        if traceparent:
            seconds = max(seconds, 0.0)
            buckets.traces[at] = traceparent.split("-")[1], seconds

    def counts(self) -> list[int]:
        """Return the count in each bucket, whatever the labels."""
        empty = [0] * (len(self.bounds) + 1)
        return [sum(column) for column in zip(empty, *self._counts(), strict=True)]

    def _counts(self) -> Iterator[list[int]]:
        return (buckets.counts for buckets in self._buckets.values())

    def within(self, share: float, counts: Sequence[int]) -> float | None:
        """Return the bound within which so large a share of `counts` lies, the last one if it is
        beyond; None of no counts."""
        left = share * sum(counts)
        if not left:
            return None
        for bound, count in zip(self.bounds, counts, strict=False):
            left -= count
            if left <= 0:
                return bound
        return self.bounds[-1]

    def read(self) -> Iterator[tuple[tuple[str, ...], Buckets]]:
        """Yield the labels and their buckets, in the order of the labels."""
        yield from sorted(self._buckets.items())
