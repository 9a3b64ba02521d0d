"""Measures the tasks per second that the API takes in, below the threshold of the asynchronous
path.

One connection, one request at a time, bodies encoded beforehand; from the first byte sent to the
last byte of the 201, by which time every task row is committed. The workers hold calls that do not
end meanwhile, and the job is stopped between two submits, so nothing else runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from bench.against import Code, Halves
from bench.conveyor_server import ConveyorServer
from bench.fake_targets import endless
from bench.harness import Figure, Options, Row, Scenario, judged_row, median
from bench.rounds import Half, take_rounds

SUBMITS = 10
"""Submits of one round."""


def plain(number: int) -> dict[str, object]:
    """Return a task with only a URL."""
    return {"url": endless(number)}


def labelled(number: int) -> dict[str, object]:
    """Return a task with an external id and metadata."""
    return plain(number) | {
        "external_id": f"sku-{number}",
        "metadata": {"batch": "spring", "shelf": str(number % 97)},
    }


KINDS: dict[str, Callable[[int], dict[str, object]]] = {
    "url alone": plain,
    "id and metadata": labelled,
}


@dataclass(frozen=True, slots=True)
class Submitted:
    """One round: the seconds of each submit, CPU seconds of the server, its peak resident bytes."""

    seconds: tuple[float, ...]
    cpu_seconds: float
    peak_rss: int


def encoded(name: str, options: Options) -> bytes:
    """Encode the body of the job."""
    tasks = [KINDS[name](number) for number in range(options.tasks)]
    return json.dumps({"type": "regular", "tasks": tasks}).encode()


def once(body: bytes, options: Options, code: Code | None = None) -> Submitted:
    """Submit the same job SUBMITS times on a new server, after once to warm up."""
    data_dir = options.directory("submit") / "data"
    with ConveyorServer(data_dir, "--gateway", "fake", code=code) as server:
        submit(server, body, options.tasks)
        before = server.child.usage().cpu_seconds
        seconds = tuple(submit(server, body, options.tasks) for _ in range(SUBMITS))
        used = server.child.usage()
    return Submitted(seconds, used.cpu_seconds - before, used.peak_rss)


def submit(server: ConveyorServer, body: bytes, tasks: int) -> float:
    """Submit a job and stop it; return the seconds until the answer."""
    started = time.perf_counter()
    job = server.call("POST", "/jobs", body)
    seconds = time.perf_counter() - started
    assert job["accepted_tasks"] == tasks
    server.call("POST", f"/jobs/{job['job_id']}/stop")
    return seconds


def measure(name: str, options: Options) -> Row:
    """Submit the same job in several rounds."""
    body, tasks = encoded(name, options), options.tasks
    rounds = take_rounds(
        lambda: once(body, options),
        wanted=options.repeats,
        label=name,
        describe=lambda one: f"{tasks / median(one.seconds):,.0f} tasks/s",
    )

    def figures(quiet: Sequence[Submitted]) -> dict[str, Figure]:
        seconds = [took for one in quiet for took in one.seconds]
        return {
            "tasks/s": round(tasks / median(seconds)),
            "best": round(tasks / min(seconds)),
            "worst": round(tasks / max(seconds)),
            "ms a submit": round(median(seconds) * 1e3, 1),
            "µs CPU/task": round(
                median([one.cpu_seconds for one in quiet]) / SUBMITS / tasks * 1e6, 1
            ),
            "peak RSS MB": round(max(one.peak_rss for one in quiet) / 2**20),
            "body MB": round(len(body) / 2**20, 2),
        }

    return judged_row(name, rounds, figures)


def run(options: Options) -> list[Row]:
    """Measure every kind of task."""
    return [measure(name, options) for name in KINDS if options.wants(name)]


def against(code: Code, options: Options) -> Halves:
    """Prepare one version: SUBMITS submits on a server of its own."""

    def half(body: bytes) -> Half:
        submitted = once(body, options, code)
        return Half(SUBMITS * options.tasks, submitted.cpu_seconds, sum(submitted.seconds))

    return {name: partial(half, encoded(name, options)) for name in KINDS if options.wants(name)}


SCENARIO = Scenario(name="submit", run=run, against=against)
