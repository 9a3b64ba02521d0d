"""The gate before the receive, in real time: four workers of production over emulators.

The same tasks under two permit policies: `off`, which receives and then requests a permit, and
`reserve`, which requests it first. A scripted gateway takes a second for a call and counts
concurrent calls. The window cuts a run off: messages in its workers' hands at that moment were
received and have not ended, and are counted apart from those received more than once. The
simulation of the same fleet, with its own latencies for queue and permits, stands beside each.

The scale: the same tasks drained by one worker and by two, with calls long enough that the
emulators are not the bound, and larger fleets simulated.
"""

from __future__ import annotations

import time
from dataclasses import replace

from bench.aws_fleet import Used, Watched, watched
from bench.aws_job import used
from bench.harness import Figure, Options, Ratio, Row, Scenario
from conveyor.cli.simulate import policy_of
from conveyor.simulation import REALISTIC, JobPlan, simulate
from conveyor.simulation import Scenario as Simulated
from conveyor.simulation.latency import Latency

POLICIES = ("off", "reserve")
SCALE = "scale"
WORKERS, SLOTS, CAP = 4, 10, 10
CALL_SECONDS = 1.0
WINDOW = 120.0
SCALE_WORKERS = (1, 2)
SCALE_SIMULATED = (10, 100, 1_000)
SCALE_SLOTS, SCALE_CALL_SECONDS = 25, 2.4
"""A worker of the scale ends ten tasks a second, so that the emulators are not the bound."""
SCALE_CALLS_A_SLOT = 12
"""Calls of each slot of the larger fleet; the smaller ones work as many tasks."""
_POLL = 0.5


def measure(policy: str, options: Options, *, redis: bool = True) -> Row:
    """Measure one window of a fleet."""
    settings = {"slots": SLOTS, "discovery_interval": 2}
    directory = options.directory("fleet")
    with watched(
        directory, workers=WORKERS, settings=settings, redis=redis, policy=policy
    ) as fleet:
        _open_ledger(fleet)
        used(fleet.workers)
        began = time.monotonic()
        tasks = [
            {"url": f"http://fake.test/{n}?delay={CALL_SECONDS}"} for n in range(options.tasks)
        ]
        body = {"tasks": tasks, "max_inflight": CAP}
        job_id: str = fleet.api.call("POST", "/jobs", body)["job_id"]
        while fleet.api.run(job_id)["status"] == "running" and _seconds_left(began) > 0:
            time.sleep(_POLL)
        seconds = time.monotonic() - began
        workers = used(fleet.workers)
        completed: int = fleet.api.run(job_id)["stats"]["completed"]
        peak = fleet.peak_in_flight()
    ledger = "" if redis else ", permits in DynamoDB"
    return Row(
        f"{policy}, real time{ledger}",
        {
            "completed": completed,
            "of": options.tasks,
            "s": round(seconds, 1),
            **received(workers, completed),
            "peak in flight": peak,
            "cap": CAP,
        },
    )


def _open_ledger(fleet: Watched) -> None:
    """Work one task: the ledger of a new fleet on Redis gives no permits for one lease, which a job
    of a running fleet would not have to wait for."""
    document = {"tasks": [{"url": "http://fake.test/first"}]}
    job_id: str = fleet.api.call("POST", "/jobs", document)["job_id"]
    began = time.monotonic()
    while fleet.api.run(job_id)["status"] != "completed":
        if _seconds_left(began) < 0:
            raise RuntimeError("the first task was not worked: is the fleet alive?")
        time.sleep(_POLL)


def received(workers: Used, completed: int) -> dict[str, Figure]:
    """Count the receives of messages, and their calls.

    A message received for the first time may not have ended when the window does: it is being
    worked, kept at hand, or put off.
    """
    first = workers.messages - workers.again
    receives = workers.calls["sqs receive_message (tasks)"]
    permits = sum(count for call, count in workers.calls.items() if "(permits)" in call)
    return {
        "received a task": round(workers.messages / max(1, first), 3),
        "came again": workers.again,
        "received, not ended": max(0, first - completed),
        "receive calls a task": round(receives / max(1, completed), 2),
        "permit calls a task": round(permits / max(1, completed), 2),
    }


def simulated(policy: str, options: Options) -> Row:
    """Simulate the same fleet."""
    report = simulate(
        Simulated(
            world=replace(REALISTIC, slots=SLOTS, gateway=Latency(CALL_SECONDS)),
            policy=policy,
            jobs=(JobPlan(tasks=options.tasks, cap=CAP),),
            workers=WORKERS,
            window=WINDOW,
        )
    )
    return Row(
        f"{policy}, simulated",
        {
            "completed": report.completed,
            "of": options.tasks,
            "s": round(report.elapsed_s, 1),
            "received a task": round(report.amplification, 3),
            "came again": report.receives - report.completed - report.in_hand,
            "received, not ended": report.in_hand,
            "receive calls a task": round(report.receive_calls_per_task, 2),
            "permit calls a task": round(report.permit_calls_per_task, 2),
            "peak in flight": report.peak_in_flight,
            "cap": CAP,
        },
    )


def scaled(options: Options) -> list[Row]:
    """Drain the same tasks by one worker and by two, and simulate larger fleets."""
    tasks = max(SCALE_WORKERS) * SCALE_SLOTS * SCALE_CALLS_A_SLOT
    rates = {workers: _drained(workers, tasks, options) for workers in SCALE_WORKERS}
    alone = rates[min(SCALE_WORKERS)]
    real = [
        Row(f"{workers} × {SCALE_SLOTS} slots, real time", _scale(workers, rate, alone))
        for workers, rate in rates.items()
    ]
    return [*real, *(_simulated_scale(workers) for workers in SCALE_SIMULATED)]


def _scale(workers: int, rate: float, alone: float) -> dict[str, Figure]:
    """Return the figures of a fleet that ends `rate` tasks a second; `alone` is that of one worker,
    or what its slots allow."""
    ideal = workers * SCALE_SLOTS / SCALE_CALL_SECONDS
    return {
        "tasks/s": round(rate, 1),
        "of its slots": f"{rate / ideal:.0%}",
        "× one worker": Ratio(rate / alone),
    }


def _drained(workers: int, tasks: int, options: Options) -> float:
    """Return the tasks a second that a fleet ends, from the first tenth to the last."""
    settings = {"slots": SCALE_SLOTS, "discovery_interval": 2}
    with watched(options.directory("fleet"), workers=workers, settings=settings) as fleet:
        _open_ledger(fleet)
        urls = [f"http://fake.test/{n}?delay={SCALE_CALL_SECONDS}" for n in range(tasks)]
        body = {"tasks": [{"url": url} for url in urls], "max_inflight": workers * SCALE_SLOTS}
        job_id: str = fleet.api.call("POST", "/jobs", body)["job_id"]
        ended: list[tuple[float, int]] = []
        began = time.monotonic()
        while not ended or ended[-1][1] < 0.9 * tasks:
            if _seconds_left(began) < 0:
                raise RuntimeError(f"{workers} workers did not end {tasks} tasks in {WINDOW} s")
            time.sleep(_POLL)
            completed: int = fleet.api.run(job_id)["stats"]["completed"]
            if completed >= 0.1 * tasks:
                ended.append((time.monotonic(), completed))
    (first, before), (last, after) = ended[0], ended[-1]
    return (after - before) / (last - first)


def _simulated_scale(workers: int) -> Row:
    cap = workers * SCALE_SLOTS
    report = simulate(
        Simulated(
            world=replace(REALISTIC, slots=SCALE_SLOTS, gateway=Latency(SCALE_CALL_SECONDS)),
            policy="reserve",
            jobs=(JobPlan(tasks=cap * SCALE_CALLS_A_SLOT, cap=cap),),
            workers=workers,
        )
    )
    ideal = SCALE_SLOTS / SCALE_CALL_SECONDS
    figures = _scale(workers, report.completed / report.elapsed_s, ideal)
    return Row(
        f"{workers:,} × {SCALE_SLOTS} slots, simulated",
        {
            **figures,
            "received a task": round(report.amplification, 3),
            "peak in flight": report.peak_in_flight,
            "cap": cap,
        },
    )


def _seconds_left(began: float) -> float:
    return WINDOW - (time.monotonic() - began)


def run(options: Options) -> list[Row]:
    """Measure either policy with either ledger, and simulate both."""
    wanted = [policy_of(word) or word for word in options.only]
    gates = [
        row
        for policy in POLICIES
        if not wanted or policy in wanted
        for row in (
            measure(policy, options),
            measure(policy, options, redis=False),
            simulated(policy, options),
        )
    ]
    return [*gates, *(scaled(options) if options.wants(SCALE) else [])]


SCENARIO = Scenario(name="fleet", run=run)
