"""Fleets with faults: the faults, their times, and the guarantees that hold all the same.

The start of a fault is drawn from the seed, so that fifty seeds meet the fleet in fifty places.
Each fault says how a report shows its effect: one without effect proves nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import pytest

from conveyor.simulation import (
    REALISTIC,
    Duplicates,
    Fault,
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
    Report,
    RollingRestart,
    Scenario,
    random_faults,
    simulate,
)

WORLD = replace(REALISTIC, name="small workers", slots=20)
WORKERS, CAP, TASKS = 4, 40, 170
SKEW = 30.0
"""Most seconds that a worker's wall clock is off, either way, in every scenario here."""
LEASE = WORLD.permit_lease
CALLS = Latency(7.0, 0.6)
"""Long enough that a job outlasts a lease: it takes about 36 s at best."""
LONG_CALLS = Latency(20.0, 0.4)
"""So long that calls outlast the lease of a worker that is stopped in the middle of them."""
JOBS = (JobPlan(tasks=TASKS, cap=CAP, gateway=CALLS),)
SEVERAL_JOBS = (
    JobPlan(tasks=120, cap=24, gateway=CALLS),
    JobPlan(tasks=100, cap=10, priority=9, arrives_at=6.0),
    JobPlan(tasks=40, cap=3, arrives_at=12.0),
)


def always(_report: Report) -> bool:
    """Nothing in the report has to show it."""
    return True


@dataclass(frozen=True, slots=True)
class Trouble:
    """`faults` are what goes wrong when it begins at that second; `felt` is how a report shows
    it."""

    faults: Callable[[float], Iterable[Fault]]
    felt: Callable[[Report], bool] = always
    gateway: Latency = CALLS

    def jobs(self) -> tuple[JobPlan, ...]:
        """One job, whose calls take as long as it needs for the trouble to be felt."""
        return (replace(JOBS[0], gateway=self.gateway),)


def received_again(report: Report) -> bool:
    """Some message was received more than once."""
    return report.receives > report.tasks


def killed_at_work(report: Report) -> bool:
    """Some call was lost with its process and made again, or permits that had just been granted lay
    idle until their lease was over."""
    return report.gateway_calls > report.tasks or report.utilisation_steady < 0.9


def cut_off(report: Report) -> bool:
    """Some call went on, or would have, when its permit could be somebody else's."""
    return report.abandoned > 0 or report.fenced > 0


TROUBLES: dict[str, Trouble] = {
    "clocks apart": Trouble(lambda _at: ()),
    "one killed": Trouble(lambda at: [Kill(1, at)], killed_at_work),
    "three killed": Trouble(lambda at: [Kill(w, at + w) for w in range(3)], killed_at_work),
    "killed and back": Trouble(
        lambda at: [Kill(w, at + w, back_after=10.0) for w in range(3)], killed_at_work
    ),
    "stopped for a moment": Trouble(lambda at: [Pause(0, at, 8.0)]),
    "stopped beyond the lease": Trouble(lambda at: [Pause(0, at, LEASE + 20.0)], received_again),
    "stopped amid long calls": Trouble(
        lambda at: [Pause(w, at + 2.0 * w, LEASE + 5.0 * w) for w in range(3)],
        cut_off,
        LONG_CALLS,
    ),
    "permits away for 15 s": Trouble(
        lambda at: [PermitsDown(at, 15.0)], lambda report: report.fenced == 0
    ),
    "permits away for 60 s": Trouble(
        lambda at: [PermitsDown(at, 60.0)], lambda report: report.fenced > 0
    ),
    "cut off from permits": Trouble(
        lambda at: [PermitsCutOff(w, at + 2.0 * w, LEASE + 20.0) for w in range(3)],
        lambda report: report.fenced > 0,
        LONG_CALLS,
    ),
    "cut off from permits and killed": Trouble(
        lambda at: [
            *(PermitsCutOff(w, at, LEASE + 20.0) for w in range(3)),
            *(Kill(w, at + 5.0 + w, back_after=5.0) for w in range(3)),
        ],
        killed_at_work,
        LONG_CALLS,
    ),
    "permits come back empty": Trouble(lambda at: [PermitsRestartEmpty(at)]),
    "permits come back empty to a stopped worker": Trouble(
        lambda at: [
            *(Pause(w, at, LEASE + 6.0 + 3.0 * w) for w in range(3)),
            PermitsRestartEmpty(at + LEASE),
        ],
        cut_off,
        LONG_CALLS,
    ),
    "gateway slow": Trouble(
        lambda at: [GatewaySlow(0.3 * at, 60.0, 8.0)],
        lambda report: report.elapsed_s > 30.0,
        REALISTIC.gateway,
    ),
    "gateway admits less": Trouble(
        lambda at: [GatewayLimit(CAP * 60 // 100, at - 10.0)], lambda report: report.throttled > 0
    ),
    "acknowledgements lost": Trouble(lambda _at: [LostAcks(0.5)], received_again),
    "messages doubled": Trouble(lambda _at: [Duplicates(0.3)], received_again),
    "queue lost": Trouble(lambda at: [QueueLost(at - 9.0)], lambda report: report.elapsed_s > 60.0),
    "restarted hard": Trouble(lambda at: [RollingRestart(at, 8.0, graceful=False)], killed_at_work),
    "restarted gently": Trouble(lambda at: [RollingRestart(at, 8.0)]),
}


def begins_at(seed: int) -> float:
    """The second at which a trouble begins: when the workers share the permits, and well before a
    job is done."""
    return 10.0 + 10.0 * random.Random(seed).random()


def scenario(name: str, seed: int, *, policy: str = "reserve") -> Scenario:
    """A fleet of small workers whose clocks disagree, in a trouble of that name."""
    trouble = TROUBLES[name]
    return Scenario(
        world=WORLD,
        policy=policy,
        jobs=trouble.jobs(),
        workers=WORKERS,
        seed=seed,
        faults=tuple(trouble.faults(begins_at(seed))),
        clock_skew=SKEW,
    )


def by_chance(
    seed: int,
    *,
    jobs: tuple[JobPlan, ...] = JOBS,
    policy: str = "reserve",
    backend: str = "asyncio",
) -> Scenario:
    """The same fleet on a bad day."""
    cap = sum(plan.cap for plan in jobs)
    return Scenario(
        world=WORLD,
        policy=policy,
        jobs=jobs,
        workers=WORKERS,
        seed=seed,
        backend=backend,
        faults=random_faults(seed, workers=WORKERS, duration=60.0, cap=cap, lease=LEASE),
        clock_skew=SKEW,
    )


def survive(it: Scenario, request: pytest.FixtureRequest) -> Report:
    """Run a scenario; fail with its seed and the command that replays it unless every task ended,
    once, and never more calls were in flight, or permits granted, than a job's cap allows."""
    replay = f'.venv/bin/python -m pytest -m "full or not full" "{request.node.nodeid}"'
    try:
        report = simulate(it)
    except BaseException as error:
        error.add_note(f"seed {it.seed}; replay: {replay}")
        raise
    caps = tuple(plan.cap for plan in it.jobs)
    broken = {
        "tasks that did not end": report.tasks - report.completed,
        "tasks lost": report.lost,
        "tasks counted twice": report.counted_twice,
        "dead letters": report.dead_lettered,
        "calls above the cap": max(0, *(a - b for a, b in zip(report.peaks, caps, strict=True))),
        "seconds above the cap": report.seconds_over_cap,
        "permits granted above the cap": max(report.granted_over, report.peak_granted - max(caps)),
    }
    broken = {what: much for what, much in broken.items() if much > 0}
    assert not broken, f"{broken} with seed {it.seed}; replay: {replay}"
    assert report.completed == report.tasks, f"seed {it.seed}; replay: {replay}"
    return report
