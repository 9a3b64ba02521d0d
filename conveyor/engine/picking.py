"""Which lane a free slot serves: the rule, apart from what makes a lane eligible."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from conveyor.engine.lanes import Lane

Eligible = Callable[[Lane], bool]


class Picking(Protocol):
    """A rule that chooses among lanes. One object serves one dispatcher."""

    def pick(self, lanes: Iterable[Lane], eligible: Eligible) -> Lane | None:
        """An eligible lane, None where there is none."""
        ...


class LeastInFlight:
    """The lane with the fewest messages in hand for its weight.

    Among equals it is the one that was picked longest ago, so that with more runs than slots each
    still gets its turn.
    """

    def __init__(self) -> None:
        self._turns = 0

    def pick(self, lanes: Iterable[Lane], eligible: Eligible) -> Lane | None:
        """Looks at every lane, and asks only those that would be chosen whether they may be."""
        best: Lane | None = None
        least = 0.0
        for lane in lanes:
            load = lane.busy / lane.weight
            if best is not None and (load > least or (load == least and lane.turn > best.turn)):
                continue
            if eligible(lane):
                best, least = lane, load
        if best is not None:
            self._turns += 1
            best.turn = self._turns
        return best
