"""How many messages does a worker receive to get one task done, and does it keep the cap?

`scripts/bench dispatch` simulates the five permit policies in virtual time: the published
comparison on one worker, and fleets of one, four and ten. `--real-time` makes the published
comparison on the machine's own clock, `--simulator-speed` tells how fast the simulator is.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.dispatch_fairness import cases, compare, fairness_markdown, fairness_rows
from bench.dispatch_grid import FLEET_TASKS, Cell, fleet, head_to_head, measure, measure_all
from bench.dispatch_summary import findings, machine_line, markdown, plot_of, split
from bench.harness import DEFAULT_WORK, ROOT, fresh_work
from bench.plot import svg
from bench.realtime import measure_real_time
from conveyor.simulation.view import Column, Group, Row, table, width_of

SEEDS = 5
QUICK_TASKS = 2_000
QUICK_SHRINK = 5.0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/bench dispatch", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a row, no files")
    parser.add_argument("--seeds", type=_count, default=SEEDS, help="of the published comparison")
    parser.add_argument("--grid-seeds", type=_count, default=1, help="of the fleets")
    parser.add_argument(
        "--quick", action="store_true", help="fleets of a tenth of the work; files go to build/"
    )
    parser.add_argument("--processes", type=_count, help="simulations at a time [one a CPU]")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--real-time", action="store_true", help="on the machine's own clock")
    other.add_argument("--simulator-speed", action="store_true", help="tasks a real second")
    other.add_argument("--fairness", action="store_true", help="small runs beside a giant one")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the plot and the summary."""
    options = parse(arguments)
    line = machine_line()
    if options.simulator_speed:
        return _simulator_speed(line)
    if options.fairness:
        return _fairness(line, processes=options.processes, as_json=options.json)
    if options.real_time:
        return _real_time(line, as_json=options.json)
    cells = head_to_head(options.seeds)
    cells += (
        fleet(options.grid_seeds, tasks=QUICK_TASKS, shrink=QUICK_SHRINK)
        if options.quick
        else fleet(options.grid_seeds)
    )
    began = time.perf_counter()
    rows = measure_all(cells, processes=options.processes)
    took = f"{len(cells)} simulations took {time.perf_counter() - began:.0f} s"
    if options.json:
        _print_json(rows)
        print(f"{line}; {took}", file=sys.stderr)
        return 0
    print(f"{line}; {took}")
    if options.quick:
        print("--quick: windows are short, so that rows of off and local tell little")
    for title, shown, columns in split(rows):
        _print_table(title, shown, columns)
    print("\n".join(["", *findings(rows)]))
    _write(rows, line, DEFAULT_WORK if options.quick else ROOT / "bench")
    return 0


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _write(rows: Sequence[Row], line: str, directory: Path) -> None:
    """The plot and the tables, for bench/README.md."""
    directory.mkdir(parents=True, exist_ok=True)
    drawing, summary = directory / "dispatch.svg", directory / "dispatch.md"
    drawing.write_text(svg(plot_of(rows)), encoding="utf-8")
    summary.write_text(markdown(rows, line), encoding="utf-8")
    print(f"\nwrote {drawing} and {summary}", file=sys.stderr)


def _real_time(line: str, *, as_json: bool) -> int:
    rows = measure_real_time(fresh_work(DEFAULT_WORK))
    if as_json:
        _print_json(rows)
        print(line, file=sys.stderr)
        return 0
    print(line)
    for title, shown, columns in split(rows):
        _print_table(title, shown, columns)
    return 0


def _simulator_speed(line: str) -> int:
    """One process, one core, the default policy in its usual fleet."""
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
    print(
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
        print(f"{line}\n\n{fairness_markdown(rows)}")
    return 0


def _print_json(rows: Sequence[Row]) -> None:
    for row in rows:
        print(json.dumps(row))


def _print_table(title: str, shown: Sequence[Group], columns: Sequence[Column]) -> None:
    made = table(shown, columns)
    console = Console(highlight=False)
    console.width = max(width_of(made), len(title))
    print(f"\n{title}\n")
    console.print(made)


if __name__ == "__main__":
    sys.exit(main())
