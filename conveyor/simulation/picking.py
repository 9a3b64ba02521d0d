"""The picking rules that a simulation can compare, by name: the one in use, and two to compare it
with."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from conveyor.engine.lanes import Lane
from conveyor.engine.planner import Eligible, LeastInFlight, PickingRule
from conveyor.ports.clock import Clock

LEAST_IN_FLIGHT = "least in flight"
ROUND_ROBIN = "round robin"
RANDOM = "random"
PICKINGS = (RANDOM, ROUND_ROBIN, LEAST_IN_FLIGHT)


class RoundRobin:
    """Picks the lane that was picked longest ago, whatever its calls and its weight."""

    def __init__(self) -> None:
        self._turns = 0

    def pick(self, lanes: Iterable[Lane], eligible: Eligible) -> Lane | None:
        """Pick lanes one after the other."""
        best: Lane | None = None
        for lane in lanes:
            if (best is None or lane.turn < best.turn) and eligible(lane):
                best = lane
        if best is not None:
            self._turns += 1
            best.turn = self._turns
        return best


class Random:
    """Picks any of the lanes, all equally likely. `random` returns numbers in [0, 1)."""

    def __init__(self, random: Callable[[], float]) -> None:
        self._random = random

    def pick(self, lanes: Iterable[Lane], eligible: Eligible) -> Lane | None:
        """Draw until an eligible lane comes."""
        left = list(lanes)
        while left:
            place = int(self._random() * len(left))
            lane, left[place] = left[place], left[-1]
            left.pop()
            if eligible(lane):
                return lane
        return None


def picking(name: str, clock: Clock) -> PickingRule:
    """Make a rule for one dispatcher; randomness comes from its process's own clock."""
    if name == RANDOM:
        return Random(clock.random)
    return RoundRobin() if name == ROUND_ROBIN else LeastInFlight()
