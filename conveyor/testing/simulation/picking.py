"""The picking rules that a simulation can compare, by name."""

from __future__ import annotations

from conveyor.engine.picking import LeastInFlight, Picking, Random, RoundRobin
from conveyor.ports.clock import Clock

LEAST_IN_FLIGHT = "least in flight"
ROUND_ROBIN = "round robin"
RANDOM = "random"
PICKINGS = (RANDOM, ROUND_ROBIN, LEAST_IN_FLIGHT)


def picking(name: str, clock: Clock) -> Picking:
    """A rule for one dispatcher; chance comes from its process's own clock."""
    if name == RANDOM:
        return Random(clock.random)
    return RoundRobin() if name == ROUND_ROBIN else LeastInFlight()
