"""`python -m bench NAME [--json]`: run one scenario and print its table."""

from __future__ import annotations

import importlib
import signal
import sys

from bench.against import NoSuchCommit, commit_of, heading, run_against
from bench.command import SCENARIOS, parse
from bench.harness import (
    Machine,
    Options,
    Row,
    Scenario,
    fresh_work,
    machine,
    print_json,
    print_table,
    print_wrapped,
)
from bench.rounds import LEAST_PAIRS, NO_COUNTERS, foreign_share, read_machine
from bench.servers import MissingProgram


def load(name: str) -> Scenario:
    """Import the scenario of a name now, so that one does not need the packages of another."""
    scenario = importlib.import_module(f"bench.{name}").SCENARIO
    assert isinstance(scenario, Scenario)
    return scenario


def main() -> int:
    """Run, print, and say where the files lie."""
    # So that the servers started for a scenario end with it.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    arguments = parse(sys.argv[1:])
    if arguments is None or arguments.name not in SCENARIOS:
        print(f"scripts/bench runs {sys.argv[1]} by itself", file=sys.stderr)
        return 2
    scenario = load(arguments.name)
    revision: str | None = arguments.against
    options = Options(
        work=fresh_work(arguments.work),
        repeats=arguments.repeats or (LEAST_PAIRS if revision else scenario.repeats),
        tasks=arguments.tasks,
        only=tuple(filter(None, arguments.only.split(","))),
        speed=arguments.speed,
        minutes=arguments.minutes,
        worked=arguments.worked,
        place=arguments.on,
    )
    facts = machine(options.work)
    before = read_machine()
    try:
        if revision is None or scenario.against is None:
            question, rows = scenario.question, scenario.run(options)
        else:
            question = heading(scenario.name, commit_of(revision)[:7])
            rows = run_against(scenario.name, scenario.against, revision, options)
    except (MissingProgram, NoSuchCommit) as problem:
        print(f"bench {scenario.name}: {problem}", file=sys.stderr)
        return 1
    share = foreign_share(before, read_machine())
    others = NO_COUNTERS if share is None else f"others used {share:.1%} of a core meanwhile"
    if not rows:
        print(f"bench {scenario.name}: unknown row {arguments.only}", file=sys.stderr)
        return 2
    if arguments.json:
        print_json(scenario.name, rows, facts)
    else:
        _show(question, rows, facts, others)
    print(f"files kept in {options.work}; remove them when all runs are done", file=sys.stderr)
    return 0


def _show(question: str, rows: list[Row], facts: Machine, others: str) -> None:
    print_wrapped(question)
    print_wrapped(
        f"{facts.cpus} × {facts.cpu}, {facts.memory_gb:g} GB, Python {facts.python}, "
        f"{facts.file_system} ({facts.file_us:g} µs a file), load {facts.load:g} at the start; "
        f"{others}"
    )
    print()
    print_table(rows)


if __name__ == "__main__":
    sys.exit(main())
