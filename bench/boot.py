"""Measures the time until the server is ready and the memory it holds, with few and many pending
tasks.

Ready means that /readyz answers 200; the time includes the interpreter's start. The pending tasks
belong to one running run, so that the server starts to work them at once; their targets never
answer, so that they stay pending.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.against import Code, Halves
from bench.conveyor_server import ConveyorServer, add_bodies
from bench.fake_targets import endless
from bench.harness import Figure, Options, Row, Scenario, judged_row, median
from bench.rounds import Half, take_rounds

SETTLE_SECONDS = 3.0
BOOTS = 4
"""Boots of each half of a pair, because the kernel counts CPU in hundredths of a second."""
ROWS = ("empty", "pending")
ARGUMENTS = ("--gateway", "fake", "--log-level", "warning")


def fill(data_dir: Path, tasks: int, code: Code | None = None) -> float:
    """Put pending tasks into a new data directory; return the seconds it took."""
    with ConveyorServer(
        data_dir, *ARGUMENTS, settings={"max_open_job_tasks": tasks}, code=code
    ) as server:
        job_id = server.paused_job()
        seconds = 0.0
        for start in range(0, tasks, 10_000):
            urls = [endless(number) for number in range(start, min(start + 10_000, tasks))]
            seconds += server.add(job_id, add_bodies(urls, last=start + 10_000 >= tasks))
        server.call("POST", f"/jobs/{job_id}/resume")
    return seconds


@dataclass(frozen=True, slots=True)
class Booted:
    """One boot: seconds until ready, and resident megabytes then, later and at most."""

    ready: float
    at_once: float
    later: float
    peak: float


def once(data_dir: Path) -> Booted:
    """Boot, and measure memory again some seconds later."""
    with ConveyorServer(data_dir, *ARGUMENTS) as server:
        at_once = server.resident_bytes() / 2**20
        time.sleep(SETTLE_SECONDS)
        later = server.resident_bytes() / 2**20
        return Booted(server.ready_seconds, at_once, later, server.child.usage().peak_rss / 2**20)


def measure(name: str, data_dir: Path, options: Options, tasks: int) -> Row:
    """Boot in several rounds on one data directory."""
    rounds = take_rounds(
        lambda: once(data_dir),
        wanted=options.repeats,
        label=name,
        describe=lambda one: f"ready after {one.ready * 1e3:.0f} ms",
    )

    def figures(quiet: Sequence[Booted]) -> dict[str, Figure]:
        return {
            "pending": tasks,
            "ms to ready": round(median([one.ready for one in quiet]) * 1e3),
            "worst ms": round(max(one.ready for one in quiet) * 1e3),
            "RSS MB when ready": round(median([one.at_once for one in quiet]), 1),
            f"{SETTLE_SECONDS:g} s later": round(median([one.later for one in quiet]), 1),
            "peak RSS MB": round(median([one.peak for one in quiet]), 1),
        }

    return judged_row(name, rounds, figures)


def prepare(name: str, options: Options, code: Code | None = None) -> Path:
    """Make the data directory of a row."""
    data_dir = options.directory("boot") / "data"
    if name == "pending":
        seconds = fill(data_dir, options.tasks, code)
        print(f"filled at {options.tasks / seconds:,.0f} tasks/s", file=sys.stderr)
    return data_dir


def run(options: Options) -> list[Row]:
    """Boot with no tasks, and with all tasks pending."""
    return [
        measure(name, prepare(name, options), options, options.tasks if name == "pending" else 0)
        for name in ROWS
        if options.wants(name)
    ]


def against(code: Code, options: Options) -> Halves:
    """Prepare one version: BOOTS boots until ready, on a data directory that it filled itself."""

    def half(data_dir: Path) -> Half:
        cpu_seconds = seconds = 0.0
        for _ in range(BOOTS):
            with ConveyorServer(data_dir, *ARGUMENTS, code=code) as server:
                cpu_seconds += server.child.usage().cpu_seconds
                seconds += server.ready_seconds
        return Half(BOOTS, cpu_seconds, seconds)

    return {
        name: partial(half, prepare(name, options, code)) for name in ROWS if options.wants(name)
    }


SCENARIO = Scenario(name="boot", run=run, against=against)
