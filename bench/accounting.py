"""How many tasks a second does everything but the network take: queue, claims, files, counters?

The gateway is the in-process fake, which answers at once. The run is paused while its tasks are
added, so adding counts for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.conveyor_server import ConveyorServer, add_bodies
from bench.fake_targets import missing, small
from bench.harness import Options, Row, Scenario, median, wait_until

WARM_UP = 500
DRAIN_SECONDS = 300.0
KINDS: dict[str, Callable[[int], str]] = {"a body each": small, "no body (404)": missing}


@dataclass(frozen=True, slots=True)
class Drained:
    """One run worked to its end: seconds of wall and of CPU, and peak resident bytes."""

    job_id: str
    seconds: float
    cpu_seconds: float
    peak_rss: int


def drain(server: ConveyorServer, urls: Sequence[str]) -> Drained:
    """Work all URLs as one run, enqueued beforehand."""
    job_id = server.paused_job()
    server.add(job_id, add_bodies(urls))
    before = server.child.usage()
    started = time.perf_counter()
    server.call("POST", f"/jobs/{job_id}/resume")
    ended = wait_until(lambda: server.is_completed(job_id), seconds=DRAIN_SECONDS)
    after = server.child.usage()
    stats = server.latest_run(job_id)["stats"]
    assert stats["completed"] == len(urls), stats
    cpu_seconds = after.cpu_seconds - before.cpu_seconds
    return Drained(job_id, ended - started, cpu_seconds, after.peak_rss)


def measure(name: str, options: Options) -> Row:
    """Drain the same tasks several times, each time on a server and in a directory of its own."""
    rates, costs, peaks = [], [], []
    urls = [KINDS[name](number) for number in range(options.tasks + WARM_UP)]
    for _ in range(options.repeats):
        arguments = ["--gateway", "fake", "--workers", "50", "--log-level", "warning"]
        with ConveyorServer(options.directory("accounting") / "data", *arguments) as server:
            drain(server, urls[:WARM_UP])
            drained = drain(server, urls[WARM_UP:])
        rates.append(options.tasks / drained.seconds)
        costs.append(drained.cpu_seconds / options.tasks * 1e6)
        peaks.append(drained.peak_rss / 2**20)
    figures: dict[str, float | int | str] = {
        "tasks/s": round(median(rates)),
        "best": round(max(rates)),
        "µs CPU/task": round(median(costs), 1),
        "peak RSS MB": round(median(peaks)),
    }
    return Row(name, figures)


def run(options: Options) -> list[Row]:
    """With a body to store, and without."""
    return [measure(name, options) for name in KINDS if options.wants(name)]


SCENARIO = Scenario(
    name="accounting",
    question="What does everything but the network take?",
    run=run,
    tasks=20_000,
)
