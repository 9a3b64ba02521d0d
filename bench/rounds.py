"""Rounds of a measurement; only those that other programs did not disturb count.

The CPU time of other programs is the busy time of the whole machine, less that of this process and
its descendants. `Meter` reads both from /proc before and after a round. A round in which others
used too much is disturbed: it is printed, repeated, and not judged.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from bench.processes import CLOCK_TICKS, cpu_seconds, tree

T = TypeVar("T")

MOST_FOREIGN = 0.05
"""The share of one core, over a round, that others may use in a quiet round.

A program that computes takes a whole core; the daemons of an idle machine wake for moments. A
twentieth lets the daemons pass and the program not. It is also more than the error of counting in
ticks: in a round of five seconds it is 25 ticks of a hundredth of a second.
"""
SHORTEST = 0.5
"""The shortest round, in seconds, that can be judged. The kernel counts the machine's time in ticks
of a hundredth of a second, so that two or three stray ticks would decide over a shorter one."""
TRIES = 3
"""Maximum rounds measured for each one wanted, before the rest is given up."""

QUIET, DISTURBED, UNJUDGED = "quiet", "disturbed", "unjudged"
NO_COUNTERS = "this system has no /proc/stat, so rounds cannot be judged"


@dataclass(frozen=True, slots=True)
class Reading:
    """Seconds so far: on the clock, busy CPUs of the whole machine, CPU of this benchmark.

    `busy` is None if the system does not report it.
    """

    clock: float
    busy: float | None
    own: float


class Meter(Protocol):
    """Takes a reading."""

    def __call__(self) -> Reading: ...


def busy_ticks(stat: str) -> int | None:
    """Return the busy ticks in the text of /proc/stat; None if it counts nothing.

    Busy are user, nice and system time, and the time that a hypervisor gave to others (steal).
    Interrupts are left out: most of them serve the benchmark's own sockets and files, and the
    kernel charges them to no process. Time of guests is part of user time.
    """
    for line in stat.splitlines():
        name, _, fields = line.partition(" ")
        if name == "cpu":
            ticks = [int(field) for field in fields.split()]
            steal = ticks[7] if len(ticks) > 7 else 0
            return ticks[0] + ticks[1] + ticks[2] + steal if any(ticks) else None
    return None


def read_machine() -> Reading:
    """Read the use of the machine and of this process with its descendants so far."""
    try:
        ticks = busy_ticks(Path("/proc/stat").read_text())
    except OSError:
        ticks = None
    if ticks is None:
        return Reading(time.perf_counter(), None, 0.0)
    return Reading(time.perf_counter(), ticks / CLOCK_TICKS, cpu_seconds(tree(os.getpid())))


def foreign_share(before: Reading, after: Reading) -> float | None:
    """Return the share of one core that others used between two readings; None if unknown."""
    seconds = after.clock - before.clock
    if before.busy is None or after.busy is None or seconds <= 0:
        return None
    foreign = (after.busy - before.busy) - (after.own - before.own)
    return max(foreign, 0.0) / seconds


def classify(before: Reading, after: Reading) -> str:
    """Classify a round between two readings: quiet, disturbed, or unjudged."""
    share = foreign_share(before, after)
    if share is None or after.clock - before.clock < SHORTEST:
        return UNJUDGED
    return QUIET if share <= MOST_FOREIGN else DISTURBED


@dataclass(frozen=True, slots=True)
class Round(Generic[T]):
    """One round: its measurement, its class, and the share of one core that others used."""

    value: T
    kind: str
    foreign: float | None
    seconds: float

    def __str__(self) -> str:
        share = "?" if self.foreign is None else f"{self.foreign:.1%}"
        return f"{self.kind}, {self.seconds:.1f} s, others used {share} of a core"


@dataclass(frozen=True, slots=True)
class Rounds(Generic[T]):
    """All rounds of one measurement, and the number of quiet ones wanted."""

    every: Sequence[Round[T]]
    wanted: int

    @property
    def quiet(self) -> list[T]:
        """Return the measurements of the quiet rounds."""
        return [taken.value for taken in self.every if taken.kind == QUIET]

    @property
    def judged(self) -> bool:
        """Return whether there were as many quiet rounds as wanted."""
        return len(self.quiet) >= self.wanted

    @property
    def counted(self) -> str:
        """Return how many rounds of how many were quiet, to show beside the figures of a table."""
        return f"{len(self.quiet)} of {len(self.every)}"


def take_rounds(
    measure: Callable[[], T],
    *,
    wanted: int,
    label: str,
    describe: Callable[[T], str],
    meter: Meter = read_machine,
    say: Callable[[str], None] | None = None,
) -> Rounds[T]:
    """Measure until `wanted` rounds were quiet, at most TRIES times as many; print every round.

    If no round can be judged, measure only as many as wanted.
    """
    say = say or _say
    every: list[Round[T]] = []
    while sum(taken.kind == QUIET for taken in every) < wanted and len(every) < TRIES * wanted:
        before = meter()
        value = measure()
        after = meter()
        taken = Round(
            value,
            classify(before, after),
            foreign_share(before, after),
            after.clock - before.clock,
        )
        every.append(taken)
        say(f"{label}, round {len(every)}: {describe(value)} ({taken})")
        if len(every) == wanted and all(done.kind == UNJUDGED for done in every):
            break
    rounds = Rounds(every, wanted)
    if not rounds.judged:
        say(f"{label}: not judged, {why_not(rounds)}")
    return rounds


def why_not(rounds: Rounds[T]) -> str:
    """Say why a measurement is not judged."""
    if all(taken.foreign is None for taken in rounds.every):
        return NO_COUNTERS
    if all(taken.kind == UNJUDGED for taken in rounds.every):
        return (
            f"the rounds were shorter than {SHORTEST:g} s or used less than {LEAST_CPU:g} s of CPU"
        )
    return f"{rounds.counted} rounds were quiet and {rounds.wanted} were wanted"


@dataclass(frozen=True, slots=True)
class Half:
    """One side of a pair: the number of operations, and their seconds of CPU and of the clock."""

    operations: int
    cpu_seconds: float
    seconds: float

    @property
    def cost(self) -> float:
        """Return the microseconds of CPU for an operation."""
        return self.cpu_seconds / self.operations * 1e6

    @property
    def rate(self) -> float:
        """Return the operations in a second of the clock."""
        return self.operations / self.seconds


@dataclass(frozen=True, slots=True)
class Pair:
    """The same work by two versions, one right after the other."""

    base: Half
    this: Half

    @property
    def ratio(self) -> float:
        """Return this version's CPU as a multiple of the base's; not a number if the base used too
        little to be counted."""
        return self.this.cost / self.base.cost if self.base.cost else math.nan

    @property
    def speed(self) -> float:
        """Return this version's rate as a multiple of the base's."""
        return self.this.rate / self.base.rate


LEAST_CPU = 0.5
"""The least seconds of CPU of a half that can be judged: the kernel counts them in hundredths,
which is two percent of this."""


def classify_half(half: Half, before: Reading, after: Reading) -> str:
    """Return the class of one side of a pair; it is also unjudged if it used hardly any CPU."""
    kind = classify(before, after)
    return UNJUDGED if kind == QUIET and half.cpu_seconds < LEAST_CPU else kind


def worst(kinds: Sequence[str]) -> str:
    """Return the class of a pair by those of its halves: quiet only if both are."""
    if DISTURBED in kinds:
        return DISTURBED
    return UNJUDGED if UNJUDGED in kinds else QUIET


def take_pairs(
    base: Callable[[], Half],
    this: Callable[[], Half],
    *,
    wanted: int,
    label: str,
    meter: Meter = read_machine,
    say: Callable[[str], None] | None = None,
) -> Rounds[Pair]:
    """Measure both in turn until `wanted` pairs were quiet, at most TRIES times as many."""
    say = say or _say
    every: list[Round[Pair]] = []
    while sum(taken.kind == QUIET for taken in every) < wanted and len(every) < TRIES * wanted:
        halves, kinds, shares, seconds = [], [], [], 0.0
        for side in (base, this):
            before = meter()
            halves.append(side())
            after = meter()
            kinds.append(classify_half(halves[-1], before, after))
            shares.append(foreign_share(before, after))
            seconds += after.clock - before.clock
        known = [share for share in shares if share is not None]
        pair = Pair(halves[0], halves[1])
        taken = Round(pair, worst(kinds), max(known) if len(known) == 2 else None, seconds)
        every.append(taken)
        say(
            f"{label}, pair {len(every)}: {pair.base.cost:,.1f} and {pair.this.cost:,.1f} "
            f"µs CPU each, ratio {pair.ratio:.3f}; {pair.base.rate:,.0f} and {pair.this.rate:,.0f} "
            f"a second ({taken})"
        )
        if len(every) == wanted and all(done.kind == UNJUDGED for done in every):
            break
    return Rounds(every, wanted)


LEAST_PAIRS = 5
"""The least number of quiet pairs for a claim."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of the quiet pairs: CPU an operation, its ratios, and those of the rates."""

    base_cost: float
    this_cost: float
    ratio_of_medians: float
    median_ratio: float
    least: float
    most: float
    speed: float
    least_speed: float
    most_speed: float

    @property
    def verdict(self) -> str:
        """Return the verdict: one version is cheaper only if every pair says so."""
        if self.most < 1:
            return "costs less"
        if self.least > 1:
            return "costs more"
        return "undecided"


def compare(pairs: Rounds[Pair]) -> Comparison | None:
    """Compare by the quiet pairs; None if there are too few to judge."""
    quiet = pairs.quiet
    if len(quiet) < max(pairs.wanted, LEAST_PAIRS):
        return None
    base = statistics.median(pair.base.cost for pair in quiet)
    this = statistics.median(pair.this.cost for pair in quiet)
    ratios = [pair.ratio for pair in quiet]
    speeds = [pair.speed for pair in quiet]
    return Comparison(
        base,
        this,
        this / base,
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        statistics.median(speeds),
        min(speeds),
        max(speeds),
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
