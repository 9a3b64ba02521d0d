"""Prices the calls of a task at a gateway of 2.4 s and bodies of 8 KB, with bodies packed and not.

One worker, one run or ten side by side. What was counted is multiplied with the list prices of
us-east-1. What no count shows (storage, logs, the way out of the network) stands in
docs/operations-prices.md. A run ends in minutes, so that what each costs by itself is shared out
among hundreds of tasks, and the slots are in use for nearly all of the time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from bench.aws_fleet import Used, Watched, watched
from bench.aws_job import used
from bench.harness import Figure, Options, Row, wait_until

SECONDS = 2.4
BODY = 8_192
SLOTS = (50, 200)
RUNS = (1, 10)
TASKS = {50: 4_000, 200: 8_000}
"""Tasks of a workload, by the slots: for some 200 s, and for 100 s."""
SIZES = {50: (0.25, 1.0), 200: (0.5, 1.0)}
"""The vCPUs and GB of a worker, by its slots: `quarter` and `half` of the template's sizes."""
MAX_INFLIGHT = 500
"""More than there are slots. The counters of a run above that lie in several partitions."""
MOST_SECONDS = 900.0
WRITE, READ, RECEIVE, PUT, VCPU_HOUR, GB_HOUR = 0.625, 0.125, 0.40, 5.00, 0.04048, 0.004445
"""Dollars: of a million write units, read units, calls of SQS and puts, and of an hour of a vCPU
and of a GB on Fargate."""
FIGURES = ("puts", "write units", "read units", "calls of SQS", "$ a million", "slots in use")


def measure(options: Options) -> list[Row]:
    """Measure each workload both ways, each way in an environment of its own."""
    rows = []
    for slots in SLOTS:
        if not (options.wants("prices") or options.wants(f"{slots}-slots")):
            continue
        apart = _measured(options, slots, packs=False)
        packed = _measured(options, slots, packs=True)
        for runs in RUNS:
            columns = {"a body an object": apart[runs], "packed": packed[runs]}
            name = f"{slots} slots, {runs} run{'s' if runs > 1 else ''}"
            for what in FIGURES:
                figures: dict[str, Figure] = {where: one[what] for where, one in columns.items()}
                rows.append(Row(f"{name}: {what}", figures))
    return rows


def _measured(options: Options, slots: int, *, packs: bool) -> dict[int, dict[str, float]]:
    """Return what a task took, by the number of runs side by side."""
    settings = {"workers": slots, "pack_bodies": packs}
    found: dict[int, dict[str, float]] = {}
    with watched(options.directory("aws_prices"), workers=1, settings=settings) as fleet:
        everyone = [*fleet.apis, *fleet.workers]
        # A new environment grants no permits at first.
        _work(fleet, 1, slots)
        for runs in RUNS:
            tasks = min(TASKS[slots], options.tasks) // runs * runs
            used(everyone)
            began = time.monotonic()
            _work(fleet, runs, tasks)
            seconds = time.monotonic() - began
            found[runs] = _prices(used(everyone), slots, tasks)
            found[runs]["slots in use"] = round(tasks * SECONDS / slots / seconds, 2)
            print(f"{slots} slots, {runs} run(s), packs {packs}: {found[runs]}", file=sys.stderr)
    return found


def _work(fleet: Watched, runs: int, tasks: int) -> None:
    """Work all tasks, as jobs of one size that come together."""
    jobs = [
        fleet.api.call("POST", "/jobs", _job(number, tasks // runs))["job_id"]
        for number in range(runs)
    ]

    def ended() -> bool:
        return all(fleet.api.run(job)["status"] == "completed" for job in jobs)

    wait_until(ended, seconds=MOST_SECONDS, pause=2.0)


def _job(number: int, tasks: int) -> dict[str, object]:
    query = f"delay={SECONDS}&size={BODY}"
    urls: Sequence[str] = [f"http://fake.test/{number}/{index}?{query}" for index in range(tasks)]
    return {"tasks": [{"url": url} for url in urls], "max_inflight": MAX_INFLIGHT}


def _prices(counts: Used, slots: int, tasks: int) -> dict[str, float]:
    """Return what a task took, and the dollars of a million such tasks."""
    puts = _calls(counts, "s3 put_object") / tasks
    reads = counts.reads / tasks
    writes = counts.units / tasks - reads
    queues = _calls(counts, "sqs ") / tasks
    hours = SECONDS * 1_000_000 / slots / 3_600
    vcpus, memory = SIZES[slots]
    hour = vcpus * VCPU_HOUR + memory * GB_HOUR
    dollars = puts * PUT + writes * WRITE + reads * READ + queues * RECEIVE + hours * hour
    return {
        "puts": round(puts, 3),
        "write units": round(writes, 2),
        "read units": round(reads, 2),
        "calls of SQS": round(queues, 2),
        "$ a million": round(dollars, 2),
    }


def _calls(counts: Used, beginning: str) -> int:
    """Count the calls whose names begin so, whatever they were for."""
    return sum(n for name, n in counts.calls.items() if name.startswith(beginning))
