"""How many tasks a second does the API take in, below the border of the asynchronous path?

One connection, one request at a time, bodies encoded beforehand; from the first byte sent to the
last byte of the 201, by which time every task row is committed. The workers hold calls that do not
end meanwhile, and the job is stopped between two submits, so nothing else runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from bench.conveyor_server import ConveyorServer
from bench.fake_targets import endless
from bench.harness import Options, Row, Scenario, median

TASKS = 9_999


def plain(number: int) -> dict[str, object]:
    """A task with a URL alone."""
    return {"url": endless(number)}


def labelled(number: int) -> dict[str, object]:
    """A task with an external id and metadata."""
    return plain(number) | {
        "external_id": f"sku-{number}",
        "metadata": {"batch": "spring", "shelf": str(number % 97)},
    }


KINDS: dict[str, Callable[[int], dict[str, object]]] = {
    "url alone": plain,
    "external id, metadata": labelled,
}


def measure(name: str, options: Options) -> Row:
    """Submit the same job several times on one server."""
    tasks = [KINDS[name](number) for number in range(options.tasks)]
    body = json.dumps({"type": "regular", "tasks": tasks}).encode()
    seconds = []
    with ConveyorServer(options.directory("submit") / "data", "--gateway", "fake") as server:
        before = server.child.usage().cpu_seconds
        for _ in range(options.repeats):
            started = time.perf_counter()
            job = server.call("POST", "/jobs", body)
            seconds.append(time.perf_counter() - started)
            assert job["accepted_tasks"] == options.tasks
            server.call("POST", f"/jobs/{job['job_id']}/stop")
        used = server.child.usage()
    figures: dict[str, float | int | str] = {
        "tasks/s": round(options.tasks / median(seconds)),
        "best": round(options.tasks / min(seconds)),
        "worst": round(options.tasks / max(seconds)),
        "ms a submit": round(median(seconds) * 1e3, 1),
        "µs CPU/task": round(
            (used.cpu_seconds - before) / options.repeats / options.tasks * 1e6, 1
        ),
        "peak RSS MB": round(used.peak_rss / 2**20),
        "body MB": round(len(body) / 2**20, 2),
    }
    return Row(name, figures)


def run(options: Options) -> list[Row]:
    """Every kind of task."""
    return [measure(name, options) for name in KINDS if options.wants(name)]


SCENARIO = Scenario(
    name="submit",
    question="How many tasks a second does the API take in?",
    run=run,
    tasks=TASKS,
    repeats=10,
)
