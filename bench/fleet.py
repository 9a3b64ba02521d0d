"""The gate before the receive, in real time: four workers of production over emulators.

The same tasks under two permit policies: `off`, which receives and then asks whether it may, and
`reserve`, which asks first. A scripted gateway takes a second a call and counts what is in flight.
After the window whatever has not ended is left. Beside each stands what the simulation says of the
same fleet, with latencies of its own for queue and permits.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from urllib.parse import urlsplit

from bench.aws_calls import Api, services
from bench.conveyor_server import tasks_json
from bench.harness import Figure, Options, Row, Scenario
from conveyor.testing.fleet import Fleet
from conveyor.testing.simulation import REALISTIC, JobPlan, simulate
from conveyor.testing.simulation import Scenario as Simulated
from conveyor.testing.simulation.latency import Latency

POLICIES = ("off", "reserve")
WORKERS, SLOTS, CAP = 4, 10, 10
CALL_SECONDS = 1.0
WINDOW = 120.0
_POLL = 0.5
_GATEWAY = (sys.executable, "-m", "conveyor.testing.gateway_server", "--port", "0")
_COUNTER = re.compile(r"^conveyor_(deliveries|bounces|receives)_total ([\d.e+]+)$", re.MULTILINE)


@contextmanager
def gateway() -> Iterator[str]:
    """The scripted gateway as a process: its URL."""
    with subprocess.Popen(_GATEWAY, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.kill()


def measure(policy: str, options: Options) -> Row:
    """One window of a fleet."""
    with (
        gateway() as url,
        Fleet(
            services(),
            gateway=url,
            directory=options.directory("fleet"),
            inherited=os.environ,
            apis=1,
            workers=WORKERS,
            slots=SLOTS,
            permit_policy=policy,
            shutdown_grace=2,
            discovery_interval=2,
            log_level="error",
        ) as fleet,
    ):
        api = Api(fleet.api)
        urls = [f"http://fake.test/{n}?delay={CALL_SECONDS}" for n in range(options.tasks)]
        job_id = api.call("POST", "/jobs", tasks_json(urls, max_inflight=CAP))["job_id"]
        began = time.monotonic()
        while (run := api.run(job_id))["status"] == "running" and _left(began) > 0:
            time.sleep(_POLL)
        seconds = time.monotonic() - began
        counts = _counts(fleet)
        peak = json.loads(_get(f"http://{urlsplit(url).netloc}/hits"))["peak_in_flight"]
    completed = run["stats"]["completed"]
    figures: dict[str, Figure] = {
        "completed": completed,
        "of": options.tasks,
        "s": round(seconds, 1),
        "received a task": round(counts["deliveries"] / max(1, completed), 2),
        "receive calls a task": round(counts["receives"] / max(1, completed), 2),
        "bounces": round(counts["bounces"]),
        "peak in flight": peak,
        "cap": CAP,
    }
    return Row(f"{policy}, real time", figures)


def simulated(policy: str, options: Options) -> Row:
    """What the simulation says of it."""
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
            "received a task": round(report.amplification, 2),
            "receive calls a task": round(report.receive_calls_per_task, 2),
            "bounces": report.bounces,
            "peak in flight": report.peak_in_flight,
            "cap": CAP,
        },
    )


def _left(began: float) -> float:
    return WINDOW - (time.monotonic() - began)


def _counts(fleet: Fleet) -> dict[str, float]:
    """The workers' counters, added up."""
    counts = dict.fromkeys(("deliveries", "bounces", "receives"), 0.0)
    for worker in fleet.workers:
        for name, count in _COUNTER.findall(_get(f"{worker.info.metrics}/metrics")):
            counts[name] += float(count)
    return counts


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def run(options: Options) -> list[Row]:
    """Either policy, measured and simulated."""
    return [
        row
        for policy in POLICIES
        if options.wants(policy)
        for row in (measure(policy, options), simulated(policy, options))
    ]


SCENARIO = Scenario(
    name="fleet",
    question="What does a fleet receive for each task that it gets done?",
    run=run,
    tasks=1_000,
    repeats=1,
)
