"""How long does a page of results take, and how fast is a walk over all of them?"""

from __future__ import annotations

import statistics
import time

from bench.accounting import drain
from bench.conveyor_server import ConveyorServer
from bench.fake_targets import small
from bench.harness import Options, Row, Scenario

LIMITS = (100, 1_000)


def walk(server: ConveyorServer, job_id: str, limit: int) -> tuple[list[float], int]:
    """Every page of a job: the seconds that each took, and the rows seen."""
    seconds, rows, cursor = [], 0, ""
    while True:
        started = time.perf_counter()
        page = server.call("GET", f"/jobs/{job_id}/results?limit={limit}{cursor}")
        seconds.append(time.perf_counter() - started)
        rows += len(page["results"])
        if not page.get("next_cursor"):
            return seconds, rows
        cursor = f"&cursor={page['next_cursor']}"


def measure(server: ConveyorServer, job_id: str, limit: int, options: Options) -> Row:
    """Walk the job several times with one page size."""
    seconds: list[float] = []
    for _ in range(options.repeats):
        pages, rows = walk(server, job_id, limit)
        assert rows == options.tasks, rows
        seconds += pages
    milliseconds = sorted(second * 1e3 for second in seconds)
    figures: dict[str, float | int | str] = {
        "pages": len(milliseconds),
        "median ms": round(statistics.median(milliseconds), 2),
        "p95 ms": round(milliseconds[int(len(milliseconds) * 0.95)], 2),
        "rows/s": round(options.tasks * options.repeats / sum(seconds)),
    }
    return Row(f"limit {limit}", figures)


def run(options: Options) -> list[Row]:
    """A finished job of successful tasks, read with every page size."""
    with ConveyorServer(options.directory("results") / "data", "--gateway", "fake") as server:
        job_id = drain(server, [small(number) for number in range(options.tasks)]).job_id
        return [measure(server, job_id, limit, options) for limit in LIMITS]


SCENARIO = Scenario(
    name="results_page", question="How long does a page of results take?", run=run, repeats=5
)
