"""Measures the tasks per second of everything but the network: queue, claims, files, counters.

The gateway is the in-process fake, which answers at once. The run is paused while its tasks are
added, so the figures leave adding out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

from bench.against import Code, Halves
from bench.conveyor_server import ConveyorServer, add_bodies
from bench.fake_targets import failing, missing, small
from bench.harness import Figure, Options, Row, Scenario, judged_row, median, wait_until
from bench.rounds import Half, take_rounds

WARM_UP = 500
_ALONE = nullcontext()
DRAIN_SECONDS = 300.0
KINDS: dict[str, Callable[[int], str]] = {
    "a body each": small,
    "no body (404)": missing,
    "failures of 50 kinds": failing,
}


@dataclass(frozen=True, slots=True)
class Drained:
    """One run worked to its end: seconds of wall and of CPU, and peak resident bytes."""

    job_id: str
    seconds: float
    cpu_seconds: float
    peak_rss: int


def drain(
    server: ConveyorServer,
    urls: Sequence[str],
    beside: AbstractContextManager[None] = _ALONE,
) -> Drained:
    """Work all URLs as one run, enqueued beforehand; `beside` is entered for the work alone."""
    job_id = server.paused_job()
    server.add(job_id, add_bodies(urls))
    with beside:
        before = server.child.usage()
        started = time.perf_counter()
        server.call("POST", f"/jobs/{job_id}/resume")
        ended = wait_until(lambda: server.is_completed(job_id), seconds=DRAIN_SECONDS)
        after = server.child.usage()
    stats = server.latest_run(job_id)["stats"]
    assert stats["completed"] == len(urls), stats
    cpu_seconds = after.cpu_seconds - before.cpu_seconds
    return Drained(job_id, ended - started, cpu_seconds, after.peak_rss)


ARGUMENTS = ("--gateway", "fake", "--workers", "50", "--log-level", "warning")


def once(name: str, options: Options, code: Code | None = None) -> Drained:
    """Drain the tasks once, on a server and in a directory of its own."""
    urls = [KINDS[name](number) for number in range(options.tasks + WARM_UP)]
    data_dir = options.directory("accounting") / "data"
    with ConveyorServer(data_dir, *ARGUMENTS, code=code) as server:
        drain(server, urls[:WARM_UP])
        return drain(server, urls[WARM_UP:])


def measure(name: str, options: Options) -> Row:
    """Drain the same tasks in several rounds."""
    tasks = options.tasks
    rounds = take_rounds(
        lambda: once(name, options),
        wanted=options.repeats,
        label=name,
        describe=lambda drained: f"{tasks / drained.seconds:,.0f} tasks/s",
    )

    def figures(quiet: Sequence[Drained]) -> dict[str, Figure]:
        return {
            "tasks/s": round(median([tasks / one.seconds for one in quiet])),
            "best": round(max(tasks / one.seconds for one in quiet)),
            "µs CPU/task": round(median([one.cpu_seconds / tasks * 1e6 for one in quiet]), 1),
            "peak RSS MB": round(median([one.peak_rss / 2**20 for one in quiet])),
        }

    return judged_row(name, rounds, figures)


def run(options: Options) -> list[Row]:
    """Drain tasks with a body to store, without one, and such as fail in many ways."""
    return [measure(name, options) for name in KINDS if options.wants(name)]


def against(code: Code, options: Options) -> Halves:
    """Prepare one version: tasks worked on a server of its own."""

    def half(name: str) -> Half:
        drained = once(name, options, code)
        return Half(options.tasks, drained.cpu_seconds, drained.seconds)

    return {name: partial(half, name) for name in KINDS if options.wants(name)}


SCENARIO = Scenario(name="accounting", run=run, against=against)
