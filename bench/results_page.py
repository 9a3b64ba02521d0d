"""Measures the time of a page of results, and the speed of a walk over all pages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.accounting import drain
from bench.against import Code, Halves
from bench.conveyor_server import ConveyorServer
from bench.fake_targets import small
from bench.harness import Figure, Options, Row, Scenario, judged_row, median
from bench.rounds import Half, take_rounds

WALKS = {100: 10, 1_000: 20}
"""Walks of one round, by the rows of a page: rounds of some seconds."""


def walk(server: ConveyorServer, job_id: str, limit: int) -> tuple[list[float], int]:
    """Read every page of a job; return the seconds of each, and the number of rows seen."""
    seconds, rows, cursor = [], 0, ""
    while True:
        started = time.perf_counter()
        page = server.call("GET", f"/jobs/{job_id}/results?limit={limit}{cursor}")
        seconds.append(time.perf_counter() - started)
        rows += len(page["results"])
        if not page.get("next_cursor"):
            return seconds, rows
        cursor = f"&cursor={page['next_cursor']}"


@dataclass(frozen=True, slots=True)
class Walked:
    """One round: the seconds of each page, and the CPU seconds of the server."""

    seconds: tuple[float, ...]
    cpu_seconds: float


def walks(server: ConveyorServer, job_id: str, limit: int, tasks: int) -> Walked:
    """Walk the job WALKS times with one page size, after once to warm up."""
    walk(server, job_id, limit)
    seconds: list[float] = []
    before = server.child.usage().cpu_seconds
    for _ in range(WALKS[limit]):
        pages, rows = walk(server, job_id, limit)
        assert rows == tasks, rows
        seconds += pages
    return Walked(tuple(seconds), server.child.usage().cpu_seconds - before)


def measure(server: ConveyorServer, job_id: str, limit: int, options: Options) -> Row:
    """Walk the job in several rounds."""
    name = f"limit {limit}"
    rounds = take_rounds(
        lambda: walks(server, job_id, limit, options.tasks),
        wanted=options.repeats,
        label=name,
        describe=lambda one: f"{median(one.seconds) * 1e3:.2f} ms a page",
    )

    def figures(quiet: Sequence[Walked]) -> dict[str, Figure]:
        seconds = sorted(took for one in quiet for took in one.seconds)
        return {
            "pages": len(seconds),
            "median ms": round(median(seconds) * 1e3, 2),
            "p95 ms": round(seconds[int(len(seconds) * 0.95)] * 1e3, 2),
            "rows/s": round(options.tasks * WALKS[limit] * len(quiet) / sum(seconds)),
            "µs CPU/page": round(sum(one.cpu_seconds for one in quiet) / len(seconds) * 1e6, 1),
        }

    return judged_row(name, rounds, figures)


def fill(data_dir: Path, options: Options, code: Code | None = None) -> str:
    """Put a finished job of successful tasks into a new data directory; return its id."""
    with ConveyorServer(data_dir, "--gateway", "fake", code=code) as server:
        return drain(server, [small(number) for number in range(options.tasks)]).job_id


def run(options: Options) -> list[Row]:
    """Read a finished job with every page size."""
    data_dir = options.directory("results") / "data"
    job_id = fill(data_dir, options)
    with ConveyorServer(data_dir, "--gateway", "fake") as server:
        return [
            measure(server, job_id, limit, options)
            for limit in WALKS
            if options.wants(f"limit {limit}")
        ]


def against(code: Code, options: Options) -> Halves:
    """Prepare one version: pages of a job that it worked itself, on a server that starts for each
    half."""
    data_dir = options.directory("results") / "data"
    job_id = fill(data_dir, options, code)

    def half(limit: int) -> Half:
        with ConveyorServer(data_dir, "--gateway", "fake", code=code) as server:
            walked = walks(server, job_id, limit, options.tasks)
        return Half(len(walked.seconds), walked.cpu_seconds, sum(walked.seconds))

    return {
        f"limit {limit}": partial(half, limit) for limit in WALKS if options.wants(f"limit {limit}")
    }


SCENARIO = Scenario(name="results_page", run=run, against=against)
