"""`python -m bench NAME [--json]`: run one scenario and print its table."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from pathlib import Path

from bench.harness import (
    DEFAULT_WORK,
    Options,
    Scenario,
    fresh_work,
    machine,
    print_json,
    print_table,
)
from bench.servers import MissingProgram

NAMES = (
    "drain",
    "submit",
    "intake",
    "ingest",
    "accounting",
    "results_page",
    "reads",
    "boot",
    "fairness",
    "gateway_engine",
    "delete",
    "aws_calls",
    "fleet",
)


def load(name: str) -> Scenario:
    """The scenario of a name; imported only now, so that one needs nothing that another needs."""
    scenario = importlib.import_module(f"bench.{name}").SCENARIO
    assert isinstance(scenario, Scenario)
    return scenario


ELSEWHERE = ("dispatch", "micro", "wire")
"""What scripts/bench runs by itself."""


def _scenario(name: str) -> str:
    if name not in NAMES:
        names = ", ".join((*NAMES, *ELSEWHERE))
        raise argparse.ArgumentTypeError(f"there is no {name}; there is {names}")
    return name


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description=__doc__,
        epilog="scripts/bench also runs dispatch, micro and wire, which have options of their own.",
    )
    parser.add_argument("name", type=_scenario, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--repeats", type=int, help="measurements a row (the median is shown)")
    parser.add_argument("--tasks", type=int, help="size, where the scenario has one")
    parser.add_argument("--only", default="", help="rows to measure, comma separated")
    parser.add_argument("--speed", type=float, default=1.0, help="fairness: shrink all delays")
    parser.add_argument(
        "--worked", type=int, default=2_000, help="aws_calls: tasks to work of a job"
    )
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, help="where files are written")
    return parser.parse_args()


def main() -> int:
    """Run, print, and say where the files lie."""
    # So that whatever was started for a scenario ends with it.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    arguments = parse()
    scenario = load(arguments.name)
    options = Options(
        work=fresh_work(arguments.work),
        repeats=arguments.repeats or scenario.repeats,
        tasks=arguments.tasks or scenario.tasks,
        only=tuple(filter(None, arguments.only.split(","))),
        speed=arguments.speed,
        worked=arguments.worked,
    )
    facts = machine(options.work)
    try:
        rows = scenario.run(options)
    except MissingProgram as missing:
        print(f"bench {scenario.name}: {missing}", file=sys.stderr)
        return 1
    if arguments.json:
        print_json(scenario.name, rows, facts)
    else:
        print(
            f"{scenario.question}  {facts.cpus} × {facts.cpu}, {facts.memory_gb:g} GB, "
            f"Python {facts.python}, {facts.file_system} ({facts.file_us:g} µs a file), "
            f"load {facts.load:g} at the start"
        )
        print_table(rows)
    print(f"files kept in {options.work}; remove them when all runs are done", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
