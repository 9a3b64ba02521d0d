"""Measures whether one giant run starves small ones: fifty runs of 20 tasks, alone and beside a run
of 100,000.

A task takes a lognormal time (median 2 s, sigma 0.6) given in its URL, so that every case does the
same work. The server has 100 workers, which the giant run alone would fill. The server reports a
small run's time: from its creation to its completion. `--speed 4` shrinks every delay and the time
between two arrivals to a quarter.
"""

from __future__ import annotations

import random
import sys
import time
from datetime import datetime
from typing import Any

from bench.conveyor_server import ConveyorServer, add_bodies, tasks_json
from bench.fake_targets import delayed
from bench.harness import Options, Row, Scenario, wait_until

RUNS = 50
TASKS_PER_RUN = 20
ARRIVAL_SECONDS = 2.0
WORKERS = 100
MEDIAN_LOG, SIGMA = 0.693, 0.6
FINISH_SECONDS = 900.0
SEED = 7


def urls(first: int, count: int, speed: float) -> list[str]:
    """Return targets with their delays; the same number always gets the same delay."""
    found = []
    for number in range(first, first + count):
        seconds = random.Random(SEED * 1_000_003 + number).lognormvariate(MEDIAN_LOG, SIGMA)
        found.append(delayed(number, seconds / speed))
    return found


def seconds_taken(run: Any) -> float:
    """Return the seconds from a run's creation to its last change."""
    moments = [datetime.fromisoformat(run[field]) for field in ("created_at", "updated_at")]
    return (moments[1] - moments[0]).total_seconds()


def start_giant(server: ConveyorServer, tasks: int, speed: float) -> str:
    """Submit the giant run and let it fill the workers."""
    job_id = server.paused_job()
    for start in range(0, tasks, 10_000):
        batch = urls(1_000_000 + start, min(10_000, tasks - start), speed)
        server.add(job_id, add_bodies(batch, last=start + 10_000 >= tasks))
    server.call("POST", f"/jobs/{job_id}/resume")
    time.sleep(5.0 / speed)
    return job_id


def small_runs(server: ConveyorServer, *, pause: float, speed: float) -> list[float]:
    """Submit the small runs, `pause` seconds apart; return the seconds of each."""
    bodies = [
        tasks_json(urls(number * TASKS_PER_RUN, TASKS_PER_RUN, speed), type="regular")
        for number in range(RUNS)
    ]
    jobs = []
    started = time.perf_counter()
    for number, body in enumerate(bodies):
        time.sleep(max(0.0, started + number * pause - time.perf_counter()))
        jobs.append(server.call("POST", "/jobs", body)["job_id"])
    finished: dict[str, float] = {}

    def all_finished() -> bool:
        for job_id in jobs:
            if job_id not in finished:
                run = server.latest_run(job_id)
                if run["status"] != "completed":
                    return False
                finished[job_id] = seconds_taken(run)
        return True

    wait_until(all_finished, seconds=FINISH_SECONDS, pause=0.2)
    return list(finished.values())


def measure(options: Options, *, pause: float, giant: int) -> tuple[list[float], float]:
    """Measure one case on a server of its own; return the small runs' seconds, and the giant's
    tasks a second."""
    arguments = ["--gateway", "fake", "--workers", str(WORKERS), "--log-level", "warning"]
    settings = {"max_open_job_tasks": max(giant, 1)}
    data_dir = options.directory("fairness") / "data"
    with ConveyorServer(data_dir, *arguments, settings=settings) as server:
        job_id = start_giant(server, giant, options.speed) if giant else ""
        before = server.latest_run(job_id)["stats"]["completed"] if giant else 0
        started = time.perf_counter()
        seconds = small_runs(server, pause=pause / options.speed, speed=options.speed)
        elapsed = time.perf_counter() - started
        after = server.latest_run(job_id)["stats"]["completed"] if giant else 0
    return seconds, (after - before) / elapsed


def run(options: Options) -> list[Row]:
    """Measure arrivals one by one and all at once, each alone and beside the giant."""
    rows = []
    cases = {"one every 2 s": ARRIVAL_SECONDS, "all at once": 0.0}
    for arrival, pause in cases.items():
        if not options.wants(arrival):
            continue
        alone = 0.0
        for company, giant in {"alone": 0, "beside the giant": options.tasks}.items():
            print(f"{arrival}, {company} …", file=sys.stderr)
            seconds, rate = measure(options, pause=pause, giant=giant)
            seconds.sort()
            mean = sum(seconds) / len(seconds)
            alone = alone or mean
            figures: dict[str, float | int | str] = {
                "mean s": round(mean, 2),
                "p90 s": round(seconds[int(len(seconds) * 0.9) - 1], 2),
                "max s": round(seconds[-1], 2),
                "× alone": round(mean / alone, 3),
                "giant tasks/s": round(rate, 1),
            }
            rows.append(Row(f"{arrival}, {company}", figures))
    return rows


SCENARIO = Scenario(name="fairness", run=run)
