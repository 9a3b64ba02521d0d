"""Measures whether deleting a large run slows another one down, and the time until the run is gone.

Two runs stand ready: a large one, of which the first BODIES tasks have bodies, and one whose tasks
are worked over the in-process fake gateway. The second is drained for a while before the deletion
begins and on through it, so that both rates come from one server in one hour. It has to last longer
than the deletion; the rest of it is thrown away.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from bench.conveyor_server import ConveyorServer, add_bodies
from bench.fake_targets import delayed, missing, small
from bench.harness import Options, Row, Scenario, median, wait_until

BODIES = 100_000
BEFORE_SECONDS = 10.0
SAMPLE_SECONDS = 1.0
DELETE_SECONDS = 3_600.0
VISIBILITY = 5
OTHER_TASKS = 1_500_000
"""Tasks of the other run: more than are worked while the large one is deleted."""
SIZES = (100_000, 1_000_000)
KINDS: dict[str, Callable[[int], str]] = {"a body each": small, "no body (404)": missing}
"""The results of the other run's tasks."""


@dataclass(frozen=True, slots=True)
class Deleted:
    """One deletion: tasks a second of the other run before and meanwhile, and its seconds."""

    before: float
    meanwhile: float
    seconds: float


class Victim:
    """The run to delete: a part of its tasks drained, the others waiting.

    The waiting tasks are slow, so that hardly any is worked before the run is stopped, but not
    endless: a stop lets running calls end, and they hold the worker's slots until then.
    """

    def __init__(self, server: ConveyorServer, tasks: int) -> None:
        self._server = server
        self._blobs = server.data_dir / "blobs" / "results"
        self.job_id = server.paused_job()
        bodies = min(BODIES, tasks)
        urls = [small(number) for number in range(bodies)]
        urls += [delayed(number, SAMPLE_SECONDS / 2) for number in range(tasks - bodies)]
        for start in range(0, tasks, 10_000):
            last = start + 10_000 >= tasks
            server.add(self.job_id, add_bodies(urls[start : start + 10_000], last=last))
        server.call("POST", f"/jobs/{self.job_id}/resume")
        wait_until(lambda: self._completed() >= bodies, seconds=DELETE_SECONDS, pause=0.2)
        if bodies < tasks:
            server.call("POST", f"/jobs/{self.job_id}/stop")
        self._prefix = self._run_directory()

    def delete(self) -> None:
        """Request its deletion."""
        status, answer = self._server.send("DELETE", f"/v1/jobs/{self.job_id}")
        if status != 202:
            raise RuntimeError(f"the deletion was answered {status}: {answer[:300]!r}")

    def is_gone(self) -> bool:
        """Return whether every row and file of it is gone."""
        return self._server.send("GET", f"/v1/jobs/{self.job_id}")[0] == 404 and not os.path.exists(
            self._prefix
        )

    def _completed(self) -> int:
        completed: int = self._server.latest_run(self.job_id)["stats"]["completed"]
        return completed

    def _run_directory(self) -> Path:
        [found] = self._blobs.glob(f"*/{self.job_id}/*")
        return found


class Other:
    """The run that is drained beside it, with its progress as the API reports it."""

    def __init__(self, server: ConveyorServer, tasks: int, target: Callable[[int], str]) -> None:
        self._server = server
        self._job_id = server.paused_job()
        for start in range(0, tasks, 10_000):
            urls = [target(BODIES + number) for number in range(start, start + 10_000)]
            server.add(self._job_id, add_bodies(urls, last=start + 10_000 >= tasks))
        server.call("POST", f"/jobs/{self._job_id}/resume")

    def completed(self) -> int:
        """Return the number of ended tasks."""
        stats = self._server.latest_run(self._job_id)["stats"]
        if stats["completed"] >= stats["total"]:
            raise RuntimeError("the other run ended before the deletion: give it more tasks")
        completed: int = stats["completed"]
        return completed


def measure(tasks: int, kind: str, options: Options) -> Deleted:
    """Delete one run beside another, on a server and in a directory of its own."""
    arguments = ["--gateway", "fake", "--workers", "50", "--log-level", "warning"]
    settings = {"max_open_job_tasks": 10_000_000, "visibility_timeout": VISIBILITY}
    data_dir = options.directory("delete") / "data"
    with ConveyorServer(data_dir, *arguments, settings=settings) as server:
        victim = Victim(server, tasks)
        other = Other(server, OTHER_TASKS, KINDS[kind])
        time.sleep(SAMPLE_SECONDS)
        before = _rate(other, lambda: time.sleep(BEFORE_SECONDS))
        started = time.perf_counter()
        victim.delete()

        def until_gone() -> None:
            wait_until(victim.is_gone, seconds=DELETE_SECONDS, pause=SAMPLE_SECONDS)

        meanwhile = _rate(other, until_gone)
        seconds = time.perf_counter() - started
        _assert_nothing_left(data_dir, victim.job_id)
    return Deleted(before, meanwhile, seconds)


def _rate(other: Other, wait: Callable[[], None]) -> float:
    first, started = other.completed(), time.perf_counter()
    wait()
    return (other.completed() - first) / (time.perf_counter() - started)


def _assert_nothing_left(data_dir: Path, job_id: str) -> None:
    """Check that only the other run is left, and that all rows are its own."""
    with closing(sqlite3.connect(f"file:{data_dir}/conveyor.db?mode=ro", uri=True)) as database:
        [(run_no, job)] = database.execute("SELECT run_no, job_id FROM runs").fetchall()
        (first,) = database.execute("SELECT min(task_key) >> 35 FROM tasks").fetchone()
    if job == job_id or first < run_no:
        raise RuntimeError("rows of the deleted run remain")


def run(options: Options) -> list[Row]:
    """Measure every size; medians."""
    sizes = sorted({min(size, options.tasks) for size in SIZES})
    rows = []
    for tasks, kind in itertools.product(sizes, KINDS):
        name = f"{tasks} beside {kind}"
        if options.wants(name):
            rows.append(_row(name, tasks, kind, options))
    return rows


def _row(name: str, tasks: int, kind: str, options: Options) -> Row:
    results = []
    for repeat in range(options.repeats):
        results.append(measure(tasks, kind, options))
        print(f"{name} {repeat + 1}/{options.repeats}: {results[-1]}", file=sys.stderr)
    figures: dict[str, float | int | str] = {
        "bodies": min(BODIES, tasks),
        "other run alone/s": round(median([one.before for one in results])),
        "beside it/s": round(median([one.meanwhile for one in results])),
        "× alone": round(median([one.meanwhile / one.before for one in results]), 2),
        "s to nothing left": round(median([one.seconds for one in results])),
    }
    return Row(name, figures)


SCENARIO = Scenario(name="delete", run=run)
