"""Prices the calls of a task at a gateway of 2.4 s and bodies of 8 KB, with bodies packed and not.

One worker, one run or ten side by side. What was counted is multiplied with the list prices of
us-east-1. What no count shows (storage, logs, the way out of the network) stands in
docs/operations-prices.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.aws_fleet import Used, Watched, watched
from bench.aws_job import used
from bench.harness import Figure, Options, Row, wait_until

ROUNDS, MOST_TASKS = 10, 1_000
"""Tasks of a workload: so many for each slot, but not more than these."""
SECONDS = 2.4
BODY = 8_192
SLOTS = (50, 200)
RUNS = (1, 10)
MOST_SECONDS = 900.0
WRITE, READ, RECEIVE, PUT, SLOT_HOUR = 0.625, 0.125, 0.40, 5.00, 0.0494
"""Dollars: of a million write units, read units, calls of SQS and puts, and of a vCPU with 2 GB for
an hour."""


def measure(options: Options) -> list[Row]:
    """Measure each workload both ways. An environment is used for all workloads of its settings: a
    new one grants no permits at first."""
    rows = []
    for slots in SLOTS:
        if not (options.wants("prices") or options.wants(f"{slots}-slots")):
            continue
        apart = _measured(options, slots, packs=False)
        packed = _measured(options, slots, packs=True)
        for runs in RUNS:
            columns = {"a body an object": apart[runs], "packed": packed[runs]}
            name = f"{slots} slots, {runs} run{'s' if runs > 1 else ''}"
            for what in ("puts", "write units", "read units", "calls of SQS", "$ a million"):
                figures: dict[str, Figure] = {where: one[what] for where, one in columns.items()}
                rows.append(Row(f"{name}: {what}", figures))
    return rows


def _measured(options: Options, slots: int, *, packs: bool) -> dict[int, dict[str, float]]:
    """Return what a task took, by the number of runs side by side."""
    settings = {"workers": slots, "pack_bodies": packs}
    found: dict[int, dict[str, float]] = {}
    with watched(options.directory("aws_prices"), workers=1, settings=settings) as fleet:
        everyone = [*fleet.apis, *fleet.workers]
        for runs in RUNS:
            tasks = min(ROUNDS * slots, MOST_TASKS, options.tasks) // runs * runs
            used(everyone)
            _work(fleet, runs, tasks)
            found[runs] = _prices(used(everyone), slots, tasks)
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
    return {"tasks": [{"url": url} for url in urls], "max_inflight": 1_000}


def _prices(counts: Used, slots: int, tasks: int) -> dict[str, float]:
    """Return what a task took, and the dollars of a million such tasks."""
    puts = _calls(counts, "s3 put_object") / tasks
    reads = counts.reads / tasks
    writes = counts.units / tasks - reads
    queues = _calls(counts, "sqs ") / tasks
    hours = SECONDS * 1_000_000 / slots / 3_600
    dollars = puts * PUT + writes * WRITE + reads * READ + queues * RECEIVE + hours * SLOT_HOUR
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
