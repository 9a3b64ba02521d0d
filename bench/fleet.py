"""The gate before the receive, in real time: four workers of production over emulators.

The same tasks under two permit policies: `off`, which receives and then requests a permit, and
`reserve`, which requests it first. A scripted gateway takes a second for a call and counts
concurrent calls. The window cuts a run off: messages in its workers' hands at that moment were
received and have not ended, and are counted apart from those received more than once. The
simulation of the same fleet, with its own latencies for queue and permits, stands beside each.
"""

from __future__ import annotations

import time
from dataclasses import replace

from bench.aws_fleet import Used, Watched, watched
from bench.aws_job import used
from bench.harness import Figure, Options, Row, Scenario
from conveyor.cli.simulate import policy_of
from conveyor.simulation import REALISTIC, JobPlan, simulate
from conveyor.simulation import Scenario as Simulated
from conveyor.simulation.latency import Latency

POLICIES = ("off", "reserve")
WORKERS, SLOTS, CAP = 4, 10, 10
CALL_SECONDS = 1.0
WINDOW = 120.0
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


def _seconds_left(began: float) -> float:
    return WINDOW - (time.monotonic() - began)


def run(options: Options) -> list[Row]:
    """Measure either policy with either ledger, and simulate both."""
    wanted = [policy_of(word) or word for word in options.only]
    return [
        row
        for policy in POLICIES
        if not wanted or policy in wanted
        for row in (
            measure(policy, options),
            measure(policy, options, redis=False),
            simulated(policy, options),
        )
    ]


SCENARIO = Scenario(name="fleet", run=run)
