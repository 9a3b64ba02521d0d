"""Measures the AWS and permit ledger calls of a task, and their CPU.

One api and one worker over emulators. A job takes the path of large ones: a file, a 202, rows in
eight partitions, all of them written while its run is paused. Then its first tasks are worked, with
a gateway on loopback, until `--worked` of them have ended: all of a million would take an emulator
hours, and later tasks cost no more. The same at a thousand, ten thousand, a hundred thousand and a
million tasks, up to `--tasks`, side by side.

Calls are counted at the transport that each of them goes through. The emulators are slow, and share
the cores: seconds mean nothing here. Calls, capacity units and the CPU of Conveyor's own processes
do. `sizes`, one of them by its number, `permits`, `carriers` (the CPU of calls over both), `delays`
(calls a task while the gateway takes its time), `prices`, or those of `50-slots` and `200-slots`,
`profile`, `writes` and `bodies` can be measured alone (`--only`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench import aws_bodies, aws_carriers, aws_prices, aws_profile, aws_writes
from bench.aws_fleet import Used, Watched, watched
from bench.aws_job import LIMITS, LargeJob
from bench.harness import Figure, Options, Row, Scenario

SIZES = (1_000, 10_000, 100_000, 1_000_000)
DELAYS = ((0.0, 400, "boto"), (0.0, 400, "http"), (2.4, 200, "http"), (25.0, 50, "http"))
"""Seconds of a call of the gateway, tasks to be worked then, and the carrier of calls to AWS."""


class Costs(NamedTuple):
    """The costs of one job: for its rows, by api and worker, and for its worked tasks."""

    column: str
    size: int
    api: Used
    ingest: Used
    worked: int
    work: Used


def measure(options: Options, size: int, *, redis: bool = True, column: str = "") -> Costs:
    """Measure one job of one size, in an environment of its own."""
    directory = options.directory("aws_calls")
    with watched(directory, workers=1, redis=redis, settings=LIMITS) as fleet:
        return take(fleet, directory, size, worked=options.worked, column=column or f"{size:,}")


def take(
    fleet: Watched, directory: Path, size: int, *, worked: int, column: str, delay: float = 0.0
) -> Costs:
    """Submit, write, work."""
    job = LargeJob(fleet, directory, size, delay=delay)
    if job.worked_early:
        raise RuntimeError("tasks were worked before their run was paused: measure again")
    seconds = job.written - job.accepted
    print(f"{size:,} rows written in {seconds:.0f} s ({size / seconds:.0f}/s)", file=sys.stderr)
    done = job.work(worked)
    return Costs(column, size, job.submit, job.ingest, done.tasks, done.used)


def measure_delays(options: Options) -> list[Costs]:
    """Measure jobs whose calls of the gateway take a while, and one without over boto3."""
    measured = []
    for delay, worked, carrier in DELAYS:
        directory = options.directory("aws_delays")
        settings = {**LIMITS, "aws_carrier": carrier}
        column = f"{delay:g} s, {carrier}"
        with watched(directory, workers=1, settings=settings) as fleet:
            size = min(SIZES[0], options.tasks)
            measured.append(take(fleet, directory, size, worked=worked, column=column, delay=delay))
    return measured


def table(measured: Sequence[Costs]) -> list[Row]:
    """Build one column for each job; calls per task, the most frequent of the last job first."""
    rows = [
        _row("tasks of the job", {one.column: one.size for one in measured}),
        _row("tasks worked of it", {one.column: one.worked for one in measured}),
    ]
    rows += _phase("ingest", [(one.column, one.api + one.ingest, one.size) for one in measured])
    rows.append(
        _row(
            "ingest: ms CPU of the api alone",
            {one.column: round(1_000 * one.api.cpu / one.size, 4) for one in measured},
        )
    )
    return rows + _phase("work", [(one.column, one.work, one.worked) for one in measured])


def _phase(name: str, columns: Sequence[tuple[str, Used, int]]) -> list[Row]:
    def row(what: str, figures: Sequence[float]) -> Row:
        named = zip(columns, figures, strict=True)
        return _row(
            f"{name}: {what}",
            {column: round(figure / tasks, 4) for (column, _, tasks), figure in named},
        )

    last = columns[-1][1].calls
    calls = sorted({call for _, one, _ in columns for call in one.calls}, key=lambda c: -last[c])
    return [
        row("all calls", [one.calls.total() for _, one, _ in columns]),
        *[row(call, [one.calls[call] for _, one, _ in columns]) for call in calls],
        row("capacity units", [one.units for _, one, _ in columns]),
        row("ms CPU", [1_000 * one.cpu for _, one, _ in columns]),
    ]


def _row(name: str, figures: dict[str, Figure]) -> Row:
    return Row(name, figures)


def run(options: Options) -> list[Row]:
    """Measure everything, or the parts that `--only` names."""
    rows: list[Row] = []
    measured: list[Costs] = []
    sizes = [size for size in SIZES if options.wants("sizes") or options.wants(str(size))]
    measured += [measure(options, size) for size in sizes if size <= options.tasks]
    if options.wants("permits"):
        size = min(SIZES[0], options.tasks)
        measured.append(measure(options, size, redis=False, column="permits in DynamoDB"))
    if measured:
        rows += table(measured)
    if options.wants("carriers"):
        rows += aws_carriers.measure(options)
    if options.wants("delays"):
        rows += table(measure_delays(options))
    if options.wants("profile"):
        rows += aws_profile.measure(options)
    rows += aws_prices.measure(options)
    if options.wants("writes"):
        rows += aws_writes.measure(options)
    if options.wants("bodies"):
        rows += aws_bodies.measure(options)
    return rows


SCENARIO = Scenario(name="aws_calls", run=run)
