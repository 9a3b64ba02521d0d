"""The scenario of a simulation: a world, a policy, jobs, a fleet, and faults."""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType

from conveyor.domain.hosts import MOST_LIMIT, is_rate
from conveyor.simulation.checks import (
    INSTANT,
    check_count,
    check_kind,
    check_number,
    check_place,
    check_time,
    check_word,
)
from conveyor.simulation.faults import Fault, HostRefuses, Kill, Pause, PermitsCutOff, QueueLost
from conveyor.simulation.latency import Latency
from conveyor.simulation.loop import BACKENDS
from conveyor.simulation.permits import LEDGER, PERMIT_STORES
from conveyor.simulation.policies import LEAST_IN_FLIGHT, PICKINGS, POLICIES
from conveyor.simulation.world import World

MOST_PRIORITY = 9
MOST_SKEW = 10.0
"""The largest exponent by which tasks are spread unevenly."""
CALLER = "simulation"
"""The caller of jobs that name none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """A closed job that is submitted at `arrives_at`, in virtual seconds.

    `cap` is its maximum of gateway calls in flight, `priority` is from 0 to 9; `gateway` is the
    latency of its calls, if not the world's; `caller` is whose it is. Raises ValueError for a field
    out of its bounds.
    """

    tasks: int
    cap: int
    priority: int = 5
    arrives_at: float = 0.0
    gateway: Latency | None = None
    caller: str = CALLER

    def __post_init__(self) -> None:
        check_count("JobPlan.tasks", self.tasks)
        check_count("JobPlan.cap", self.cap)
        check_count("JobPlan.priority", self.priority, least=0, most=MOST_PRIORITY)
        check_time("JobPlan.arrives_at", self.arrives_at)
        check_kind("JobPlan.gateway", self.gateway, (Latency, NoneType), "a Latency or None")
        check_kind("JobPlan.caller", self.caller, str, "a word")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One simulation.

    Raises ValueError for unknown words, for numbers out of bounds, and for faults of workers or
    jobs that do not exist. `window`: virtual seconds after which it is cut off, None to run to its
    end. `clock_skew`: maximum seconds that a worker's wall clock is off, either way.
    `run_workers`, `caller_max_inflight`, `host_limit`, `host_rate`: the settings of these names.
    The tasks of each job are spread over `hosts`, evenly, or by Zipf's law with the exponent
    `host_skew`.
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
    run_workers: int = 0
    caller_max_inflight: int = 0
    hosts: int = 1
    host_limit: int = 0
    host_rate: float = 0.0
    host_skew: float = 0.0

    def __post_init__(self) -> None:
        check_kind("Scenario.world", self.world, World, "a World")
        check_word("Scenario.policy", self.policy, POLICIES)
        check_word("Scenario.permit_store", self.permit_store, PERMIT_STORES)
        check_word("Scenario.picking", self.picking, PICKINGS)
        check_word("Scenario.backend", self.backend, BACKENDS)
        check_count("Scenario.workers", self.workers)
        check_count("Scenario.seed", self.seed, least=0)
        if self.window is not None:
            check_time("Scenario.window", self.window, least=INSTANT)
        check_time("Scenario.clock_skew", self.clock_skew)
        check_count("Scenario.run_workers", self.run_workers, least=0)
        check_count("Scenario.caller_max_inflight", self.caller_max_inflight, least=0)
        check_count("Scenario.hosts", self.hosts)
        check_count("Scenario.host_limit", self.host_limit, least=0, most=MOST_LIMIT)
        if isinstance(self.host_rate, bool | str | NoneType) or not is_rate(self.host_rate):
            words = "must be 0, or from 0.01 to 1,000"
            raise ValueError(f"Scenario.host_rate {words}, not {self.host_rate!r:.60}")
        check_number("Scenario.host_skew", self.host_skew, most=MOST_SKEW)
        if not self.jobs:
            raise ValueError("Scenario.jobs must hold a job")
        for number, plan in enumerate(self.jobs):
            check_kind(f"Scenario.jobs[{number}]", plan, JobPlan, "a JobPlan")
        for number, fault in enumerate(self.faults):
            if not callable(getattr(fault, "happen", None)):
                raise ValueError(f"Scenario.faults[{number}] must be a fault, not {fault!r:.60}")
            self._check_aim(fault)

    def _check_aim(self, fault: Fault) -> None:
        name = type(fault).__name__
        if isinstance(fault, Kill | Pause | PermitsCutOff):
            check_place(f"{name}.worker", fault.worker, among=self.workers, noun="worker")
        if isinstance(fault, HostRefuses):
            check_place(
                f"{name}.host", fault.host, among=max(self.hosts, len(self.jobs)), noun="host"
            )
        if isinstance(fault, QueueLost):
            check_place(f"{name}.job", fault.job, among=len(self.jobs), noun="job")
