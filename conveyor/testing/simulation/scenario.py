"""What is simulated: a world, a policy, jobs, a fleet, and what goes wrong."""

from __future__ import annotations

from dataclasses import dataclass

from conveyor.testing.simulation.faults import Fault
from conveyor.testing.simulation.latency import Latency
from conveyor.testing.simulation.loop import BACKENDS
from conveyor.testing.simulation.permits import LEDGER, PERMIT_STORES
from conveyor.testing.simulation.picking import LEAST_IN_FLIGHT, PICKINGS
from conveyor.testing.simulation.world import World

POLICIES = ("reserve", "reserve-strict", "local-exact", "local", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """A closed job that is submitted at `arrives_at`, in virtual seconds.

    `cap` is its most gateway calls in flight; `gateway` the time of its calls, where it is not the
    world's.
    """

    tasks: int
    cap: int
    priority: int = 5
    arrives_at: float = 0.0
    gateway: Latency | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One simulation. Raises ValueError for words that it does not know.

    `window`: virtual seconds after which it is cut off, None to run to its end. `clock_skew`: most
    seconds that a worker's wall clock is off, either way.
    """

    world: World
    policy: str
    jobs: tuple[JobPlan, ...]
    workers: int
    permit_store: str = LEDGER
    picking: str = LEAST_IN_FLIGHT
    window: float | None = None
    seed: int = 0
    backend: str = "asyncio"
    faults: tuple[Fault, ...] = ()
    clock_skew: float = 0.0

    def __post_init__(self) -> None:
        for word, known in (
            (self.policy, POLICIES),
            (self.permit_store, PERMIT_STORES),
            (self.picking, PICKINGS),
            (self.backend, BACKENDS),
        ):
            if word not in known:
                raise ValueError(f"{word} is none of {', '.join(known)}")
        if not self.jobs or self.workers < 1:
            raise ValueError("a simulation needs a job and a worker")
