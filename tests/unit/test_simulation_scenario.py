"""Refusals of a simulation, each one sentence that names the field, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

from conveyor.settings import SETTINGS
from conveyor.simulation import (
    REALISTIC,
    WORLDS,
    BodiesDown,
    Duplicates,
    Fault,
    GatewayDown,
    GatewayLimit,
    GatewaySlow,
    JobPlan,
    Kill,
    Latency,
    LostAcks,
    Pause,
    PermitsCutOff,
    PermitsDown,
    PermitsRestartEmpty,
    QueueLost,
    RollingRestart,
    Scenario,
    World,
    YoungQueues,
    random_faults,
)
from conveyor.simulation.world import SHORTEST

PLAN = JobPlan(tasks=10, cap=5)
SCENARIO = Scenario(world=REALISTIC, policy="reserve", jobs=(PLAN,), workers=2)
FAULTS: tuple[Fault, ...] = (
    Kill(0, 1.0, back_after=1.0),
    Pause(0, 1.0, 1.0),
    RollingRestart(1.0, 1.0),
    PermitsDown(1.0, 1.0),
    PermitsCutOff(0, 1.0, 1.0),
    PermitsRestartEmpty(1.0),
    GatewaySlow(1.0, 1.0, 2.0),
    GatewayLimit(1, 1.0, 1.0),
    GatewayDown(1.0, 1.0),
    BodiesDown(1.0, 1.0),
    LostAcks(0.5),
    Duplicates(0.5),
    QueueLost(1.0),
    YoungQueues(1.0),
)
BAD = (math.nan, math.inf, -math.inf, -1, "1", True, 1e10)
ZERO_IS_SOMETHING = {
    *("at", "every", "back_after", "down", "share", "worker", "job", "limit"),
    *("arrives_at", "priority", "clock_skew", "seed", "median", "sigma"),
    *("run_workers", "caller_max_inflight", "host_limit", "host_rate", "host_skew"),
    *("probe_wait", "cooldown", "grace"),
}


def _numbers(record: Any) -> list[str]:
    """The fields of a record that are numbers, by its annotations."""
    return [
        field.name for field in fields(record) if str(field.type).split(" ")[0] in ("int", "float")
    ]


@pytest.mark.parametrize(
    "record",
    [Latency(1.0, 0.5), PLAN, REALISTIC, SCENARIO, *FAULTS],
    ids=lambda record: type(record).__name__,
)
def test_a_number_out_of_bounds_is_refused_by_its_field(record: Any) -> None:
    kind = type(record).__name__
    for name in _numbers(record):
        values: list[Any] = [bad for bad in BAD if not (name == "seed" and bad == -1)]
        if name not in ZERO_IS_SOMETHING and not isinstance(record, YoungQueues):
            values.append(0)
        for value in values:
            with pytest.raises(ValueError, match=rf"^{kind}\.{name} .*, not [^\n]+$"):
                replace(record, **{name: value})


def test_every_field_that_is_a_number_is_looked_at() -> None:
    """Else the test above proves nothing of a field that has another annotation."""
    told = {name for record in (PLAN, REALISTIC, SCENARIO, *FAULTS) for name in _numbers(record)}
    assert {"window", "back_after", "partitions_asked", "permit_lease", "seconds"} <= told
    assert len(_numbers(REALISTIC)) == len(fields(World)) - len({"name"}) - 4


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: replace(SCENARIO, policy="best"), "Scenario.policy must be one of reserve, "),
        (lambda: replace(SCENARIO, permit_store="redis"), "Scenario.permit_store must be one of"),
        (lambda: replace(SCENARIO, picking=""), "Scenario.picking must be one of random, "),
        (lambda: replace(SCENARIO, backend="curio"), "Scenario.backend must be one of asyncio"),
        (lambda: replace(SCENARIO, jobs=()), "Scenario.jobs must hold a job"),
        (lambda: replace(SCENARIO, jobs=(5,)), "Scenario.jobs[0] must be a JobPlan, not 5"),  # type: ignore[arg-type]
        (lambda: replace(SCENARIO, faults=(5,)), "Scenario.faults[0] must be a fault, not 5"),  # type: ignore[arg-type]
        (lambda: replace(SCENARIO, world="big"), "Scenario.world must be a World, not 'big'"),  # type: ignore[arg-type]
        (lambda: replace(PLAN, gateway=2.0), "JobPlan.gateway must be a Latency or None, not 2"),  # type: ignore[arg-type]
        (lambda: replace(REALISTIC, gateway=2.0), "World.gateway must be a Latency, not 2.0"),  # type: ignore[arg-type]
        (lambda: replace(REALISTIC, batch=11), "World.batch must be a whole number from 1 to 10"),
        (lambda: replace(REALISTIC, partitions_asked=5), "World.partitions_asked must be a whole"),
        (lambda: replace(PLAN, priority=10), "JobPlan.priority must be a whole number from 0 to 9"),
        (lambda: replace(PLAN, cap=1.5), "JobPlan.cap must be a whole number from 1 up, not 1.5"),  # type: ignore[arg-type]
        (lambda: Latency(1.0, 11.0), "Latency.sigma must be a number from 0 to 10, not 11.0"),
        (lambda: LostAcks(1.5), "LostAcks.share must be a number from 0 to 1, not 1.5"),
        (lambda: random_faults(0, workers=0, duration=1.0, cap=1), "workers must be a whole"),
        (lambda: random_faults(0, workers=1, duration=math.nan, cap=1), "duration must be a"),
        (lambda: random_faults(0, workers=1, duration=1.0, cap=0), "cap must be a whole number"),
        (lambda: random_faults(0, workers=1, duration=1.0, cap=1, lease=0.0), "lease must be a"),
    ],
)
def test_what_is_wrong_is_said(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011  (what it says is looked at below)
        make()
    assert str(raised.value).startswith(said)


@pytest.mark.parametrize("fault", [Kill(2, 1.0), Pause(2, 1.0, 1.0), PermitsCutOff(2, 1.0, 1.0)])
def test_a_fault_of_a_worker_that_there_is_not_is_refused(fault: Fault) -> None:
    said = r"\.worker counts from 0 and there are 2 workers, so it cannot be 2$"
    with pytest.raises(ValueError, match=said):
        replace(SCENARIO, faults=(fault,))
    assert replace(SCENARIO, faults=(fault,), workers=3).faults == (fault,)


def test_a_fault_of_a_job_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^QueueLost\.job counts from 0 and there is 1 job, so"):
        replace(SCENARIO, faults=(QueueLost(1.0, job=1),))
    replace(SCENARIO, faults=(QueueLost(1.0, job=1),), jobs=(PLAN, PLAN))


def test_times_of_workers_are_as_short_as_their_settings_may_be() -> None:
    checks = {setting.name: setting.check for setting in SETTINGS}
    names = {"visibility": "visibility_timeout"}
    for name, least in SHORTEST.items():
        check = checks[names.get(name, name)]
        assert check(least) is None
        assert check(0.99 * least) is not None
    assert all(
        getattr(world, name) >= SHORTEST[name] for world in WORLDS.values() for name in SHORTEST
    )
