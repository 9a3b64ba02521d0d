"""Simulates a fleet in virtual time: the production worker over simulated queues, stores and
gateway.

`simulate(Scenario(world=REALISTIC, policy="reserve", jobs=(JobPlan(tasks=1_000, cap=100),),
workers=4))` runs hours of a fleet in seconds. The same scenario gives the same report.
"""

from conveyor.simulation.faults import (
    BodiesDown,
    Duplicates,
    Fault,
    GatewayDown,
    GatewayLimit,
    GatewaySlow,
    HostRefuses,
    Kill,
    LostAcks,
    Pause,
    PermitsCutOff,
    PermitsDown,
    PermitsRestartEmpty,
    QueueLost,
    RollingRestart,
    YoungQueues,
    random_faults,
)
from conveyor.simulation.latency import Latency
from conveyor.simulation.policies import PICKINGS, POLICIES
from conveyor.simulation.report import Report
from conveyor.simulation.scenario import JobPlan, Scenario
from conveyor.simulation.simulate import simulate
from conveyor.simulation.world import PUBLISHED, REALISTIC, REALISTIC_COOL, WORLDS, World

__all__ = [
    "PICKINGS",
    "POLICIES",
    "PUBLISHED",
    "REALISTIC",
    "REALISTIC_COOL",
    "WORLDS",
    "BodiesDown",
    "Duplicates",
    "Fault",
    "HostRefuses",
    "GatewayDown",
    "GatewayLimit",
    "GatewaySlow",
    "JobPlan",
    "Kill",
    "Latency",
    "LostAcks",
    "Pause",
    "PermitsCutOff",
    "PermitsDown",
    "PermitsRestartEmpty",
    "QueueLost",
    "Report",
    "RollingRestart",
    "Scenario",
    "World",
    "YoungQueues",
    "random_faults",
    "simulate",
]
