"""How long until the server is ready, and how much memory does it hold, however much is pending?

Ready means that /readyz answers 200; the time includes the interpreter's start. The pending tasks
belong to one running run, so that the server starts to work them at once; their targets never
answer, so that they stay pending.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from bench.conveyor_server import ConveyorServer, add_bodies
from bench.fake_targets import endless
from bench.harness import Options, Row, Scenario, median

SETTLE_SECONDS = 3.0
ARGUMENTS = ("--gateway", "fake", "--log-level", "warning")


def fill(data_dir: Path, tasks: int) -> float:
    """Put pending tasks into a new data directory; the seconds it took."""
    with ConveyorServer(data_dir, *ARGUMENTS, max_open_job_tasks=tasks) as server:
        job_id = server.paused_job()
        seconds = 0.0
        for start in range(0, tasks, 10_000):
            urls = [endless(number) for number in range(start, min(start + 10_000, tasks))]
            seconds += server.add(job_id, add_bodies(urls, last=start + 10_000 >= tasks))
        server.call("POST", f"/jobs/{job_id}/resume")
    return seconds


def measure(name: str, data_dir: Path, options: Options, tasks: int) -> Row:
    """Boot several times on one data directory."""
    ready, at_once, later, peaks = [], [], [], []
    for _ in range(options.repeats):
        with ConveyorServer(data_dir, *ARGUMENTS) as server:
            ready.append(server.ready_seconds)
            at_once.append(server.resident_bytes() / 2**20)
            time.sleep(SETTLE_SECONDS)
            later.append(server.resident_bytes() / 2**20)
            peaks.append(server.child.usage().peak_rss / 2**20)
    figures: dict[str, float | int | str] = {
        "pending": tasks,
        "ms to ready": round(median(ready) * 1e3),
        "worst ms": round(max(ready) * 1e3),
        "RSS MB when ready": round(median(at_once), 1),
        f"RSS MB {SETTLE_SECONDS:g} s later": round(median(later), 1),
        "peak RSS MB": round(median(peaks), 1),
    }
    return Row(name, figures)


def run(options: Options) -> list[Row]:
    """Empty, and with everything pending."""
    rows = []
    if options.wants("empty"):
        rows.append(measure("empty", options.directory("boot") / "data", options, 0))
    if options.wants("pending"):
        data_dir = options.directory("boot") / "data"
        seconds = fill(data_dir, options.tasks)
        print(f"filled at {options.tasks / seconds:,.0f} tasks/s", file=sys.stderr)
        rows.append(measure("pending", data_dir, options, options.tasks))
    return rows


SCENARIO = Scenario(
    name="boot",
    question="How long until the server is ready?",
    run=run,
    tasks=1_000_000,
    repeats=5,
)
