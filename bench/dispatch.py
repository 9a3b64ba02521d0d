"""Measures the messages that a worker receives to get one task done, and whether it keeps the cap.

`scripts/bench dispatch` simulates the five permit policies in virtual time: the published
comparison on one worker, and fleets of one, four and ten. `--real-time` makes the published
comparison on the machine's own clock, `--simulator-speed` measures the speed of the simulator.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.command import dispatch_parser
from bench.dispatch_fairness import cases, compare, fairness_markdown, fairness_rows
from bench.dispatch_grid import FLEET_TASKS, Cell, fleet, head_to_head, measure, measure_all
from bench.dispatch_summary import findings, machine_line, markdown, plot_of, split
from bench.harness import DEFAULT_WORK, ROOT, WIDTH, fresh_work, print_wrapped
from bench.plot import svg
from bench.realtime import measure_real_time
from conveyor.cli.simulate import LEGEND, POLICIES, policy_of
from conveyor.simulation.view import Row, tables, width_of

QUICK_TASKS = 2_000
QUICK_SHRINK = 5.0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = dispatch_parser()
    options = parser.parse_args(arguments)
    policies = []
    for word in options.policy or ():
        policy = policy_of(word)
        if policy is None:
            names = ", ".join([*POLICIES, "gate-on", "gate-off"])
            parser.error(f"unknown policy {word}; choose from {names}")
        policies.append(policy)
    if policies and (options.simulator_speed or options.fairness):
        parser.error("--simulator-speed and --fairness measure reserve alone: leave --policy out")
    options.policy = policies
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the plot and the summary."""
    options = parse(arguments)
    line = machine_line()
    if options.simulator_speed:
        return _simulator_speed(line)
    if options.fairness:
        return _fairness(line, processes=options.processes, as_json=options.json)
    if options.real_time:
        return _real_time(line, policies=options.policy, as_json=options.json)
    cells = head_to_head(options.seeds)
    cells += (
        fleet(options.grid_seeds, tasks=QUICK_TASKS, shrink=QUICK_SHRINK)
        if options.quick
        else fleet(options.grid_seeds)
    )
    cells = [cell for cell in cells if not options.policy or cell.policy in options.policy]
    began = time.perf_counter()
    rows = measure_all(cells, processes=options.processes)
    took = f"{len(cells)} simulations took {time.perf_counter() - began:.0f} s"
    if options.json:
        _print_json(rows)
        print(f"{line}; {took}", file=sys.stderr)
        return 0
    print_wrapped(f"{line}; {took}")
    if options.quick:
        print("--quick: windows are short, so rows of off and local say little")
    _print_tables(rows)
    print()
    for finding in findings(rows):
        print_wrapped(finding)
    if not options.policy:
        _write(rows, line, DEFAULT_WORK if options.quick else ROOT / "bench")
    return 0


def _write(rows: Sequence[Row], line: str, directory: Path) -> None:
    """Write the plot and the tables for bench/README.md."""
    directory.mkdir(parents=True, exist_ok=True)
    drawing, summary = directory / "dispatch.svg", directory / "dispatch.md"
    drawing.write_text(svg(plot_of(rows)), encoding="utf-8")
    summary.write_text(markdown(rows, line), encoding="utf-8")
    print(f"\nwrote {drawing} and {summary}", file=sys.stderr)


def _real_time(line: str, *, policies: Sequence[str], as_json: bool) -> int:
    rows = measure_real_time(fresh_work(DEFAULT_WORK), only=policies)
    if as_json:
        _print_json(rows)
        print(line, file=sys.stderr)
        return 0
    print_wrapped(line)
    _print_tables(rows)
    return 0


def _simulator_speed(line: str) -> int:
    """Measure one process on one core: the default policy in its usual fleet."""
    cell = Cell(
        world="realistic",
        policy="reserve",
        permit_store="ledger",
        workers=4,
        cap=100,
        tasks=FLEET_TASKS,
        seed=0,
    )
    began = time.perf_counter()
    row = measure(cell)
    seconds = time.perf_counter() - began
    assert row["completed"] == cell.tasks
    print_wrapped(
        f"{cell.tasks / seconds:,.0f} tasks a real second: {cell.tasks:,} tasks on 4 workers, "
        f"cap 100, reserve, in {seconds:.1f} s  ({line})"
    )
    return 0


def _fairness(line: str, *, processes: int | None, as_json: bool) -> int:
    rows = fairness_rows(compare(cases(), processes=processes))
    if as_json:
        _print_json(rows)
        print(line, file=sys.stderr)
    else:
        print_wrapped(line)
        print(f"\n{fairness_markdown(rows)}")
    return 0


def _print_json(rows: Sequence[Row]) -> None:
    for row in rows:
        print(json.dumps(row))


def _print_tables(rows: Sequence[Row]) -> None:
    """Print a table for each world, in lines of at most WIDTH characters."""
    console = Console(highlight=False)
    for title, shown, columns in split(rows):
        print()
        print_wrapped(title)
        for made in tables(shown, columns, WIDTH):
            console.width = min(width_of(made), WIDTH)
            print()
            console.print(made)
    print(f"\n{LEGEND}")


if __name__ == "__main__":
    sys.exit(main())
