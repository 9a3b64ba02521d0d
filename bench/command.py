"""The command line of scripts/bench: the benchmarks, and the options of each.

Uses only the standard library, not even this package: scripts/bench runs this file with the
system's Python to print help and to refuse a mistake before anything is installed.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

WIDTH = 100
DEFAULT_WORK = Path(os.path.abspath(__file__)).parent.parent / "build" / "bench"
MOST_ROUNDS = 1_000


class Entry(NamedTuple):
    """One benchmark: the question it answers, its sizes, and its options."""

    question: str
    repeats: int = 0
    """Measurements of each row; 0 if the benchmark takes no --repeats."""
    tasks: int = 0
    """The size; 0 if it has none."""
    rows: tuple[str, ...] = ()
    """The names that --only takes."""
    extra: tuple[str, ...] = ()
    """Further options by name: against, minutes, on, speed, worked."""


SCENARIOS = {
    "drain": Entry(
        "How fast is the whole job, against two other task queues?",
        repeats=5,
        tasks=10_000,
        rows=("conveyor", "watched", "taskiq", "dramatiq"),
        extra=("against", "on"),
    ),
    "submit": Entry(
        "How many tasks a second does the API take in?",
        repeats=3,
        tasks=9_999,
        rows=("url alone", "id and metadata"),
        extra=("against",),
    ),
    "intake": Entry(
        "How many rows a second does the child process check and stage?",
        repeats=5,
        tasks=1_000_000,
        rows=("csv", "csv quoted", "jsonl", "jsonl metadata", "urls", "document"),
    ),
    "ingest": Entry(
        "What does a job of many tasks cost, and how does the cost grow?",
        tasks=1_000_000,
        rows=("file", "inline", "work"),
    ),
    "accounting": Entry(
        "What does everything but the network take?",
        repeats=5,
        tasks=20_000,
        rows=("a body each", "no body (404)", "failures of 50 kinds"),
        extra=("against",),
    ),
    "traces": Entry(
        "What do traces cost a task?",
        repeats=7,
        tasks=20_000,
        rows=("not installed", "installed but off", "a ratio of 0.01"),
    ),
    "results_page": Entry(
        "How long does a page of results take?",
        repeats=5,
        tasks=10_000,
        rows=("limit 100", "limit 1000"),
        extra=("against",),
    ),
    "reads": Entry(
        "How many rows are read for each row that a list gives?",
        repeats=3,
        tasks=1_000_000,
        rows=("enumeration", "length"),
    ),
    "boot": Entry(
        "How long until the server is ready?",
        repeats=5,
        tasks=1_000_000,
        rows=("empty", "pending"),
        extra=("against",),
    ),
    "plugin": Entry(
        "What do setup and teardown of a test cost: a server of its own, or a shared one?",
        repeats=5,
        tasks=20,
        rows=("a server a test", "shared and emptied"),
    ),
    "fairness": Entry(
        "Does one giant run starve small ones?",
        tasks=100_000,
        rows=("one every 2 s", "all at once"),
        extra=("speed",),
    ),
    "idle": Entry(
        "What does a server use whose tasks wait behind a cap of 5?",
        repeats=5,
        tasks=10_000,
        rows=("nothing queued", "calls of 60 s", "calls of 1 s", "calls of 0.2 s"),
    ),
    "soak": Entry(
        "Where does resident memory settle under a steady mix of all that callers do?",
        tasks=200,
        rows=("as it is", "two arenas"),
        extra=("minutes",),
    ),
    "gateway_engine": Entry(
        "What does an HTTP client cost, plain and over TLS, against aiohttp?",
        repeats=5,
        tasks=10_000,
        rows=("aiohttp", "conveyor", "direct gateway", "httpx", "pyreqwest"),
    ),
    "delete": Entry(
        "Does deleting a large run slow another one down?",
        repeats=1,
        tasks=1_000_000,
        rows=(
            "100000 beside a body each",
            "100000 beside no body (404)",
            "1000000 beside a body each",
            "1000000 beside no body (404)",
        ),
    ),
    "aws_calls": Entry(
        "What does a task cost in calls of AWS?",
        tasks=100_000,
        rows=(
            "sizes",
            "permits",
            "carriers",
            "delays",
            "prices",
            "profile",
            "writes",
            "bodies",
            "1000",
            "10000",
            "100000",
            "1000000",
        ),
        extra=("worked",),
    ),
    "permits": Entry(
        "What does a call of the permit ledger cost its Redis, among many holders?",
        repeats=5,
        tasks=5_000,
        rows=("alone", "10 holders", "100 holders", "1000 holders"),
    ),
    "fleet": Entry(
        "What does a fleet receive for each task that it gets done?",
        tasks=1_000,
        rows=("gate off", "gate on", "scale"),
    ),
}
"""The scenarios of `python -m bench NAME`."""

OTHERS = {
    "flame": "Where does the CPU of a task go, by part? (a flame graph, by py-spy)",
    "dispatch": "How many messages are received to get one task done? (simulated)",
    "micro": "What do ids, a run's queue, the store and a permit cost? (pytest-benchmark)",
    "wire": "Which JSON decoder reads 100,000 tasks?",
}
"""The benchmarks that scripts/bench runs by itself."""

FLAMES = ("drain", "accounting")
"""The scenarios whose server `scripts/bench flame` samples."""

GATE_WORDS = '"gate on" is reserve and "gate off" is off'


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError("must be a whole number of at least 1")
    return number


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help that fits the width of the tables, wherever it is printed."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=WIDTH)


def _parser(name: str, question: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"scripts/bench {name}",
        description=question,
        epilog="bench/README.md says how rounds are judged.",
        formatter_class=_Help,
        allow_abbrev=False,
    )


def scenario_parser(name: str) -> argparse.ArgumentParser:
    """Build the options of one scenario, and no others."""
    entry = SCENARIOS[name]
    parser = _parser(name, entry.question)
    parser.set_defaults(
        name=name,
        repeats=None,
        tasks=entry.tasks,
        only="",
        against=None,
        speed=1.0,
        minutes=10.0,
        worked=2_000,
        on="",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a row")
    if entry.repeats:
        parser.add_argument(
            "--repeats",
            type=positive,
            metavar="N",
            help=f"quiet rounds to judge each row by [{entry.repeats}]",
        )
    if entry.tasks:
        parser.add_argument(
            "--tasks", type=positive, metavar="N", default=entry.tasks, help="size [%(default)s]"
        )
    if entry.rows:
        parser.add_argument(
            "--only",
            metavar="ROWS",
            default="",
            help=f"measure these rows alone, comma separated: {', '.join(entry.rows)}",
        )
    _add_extra(parser, entry.extra)
    parser.add_argument(
        "--work",
        type=Path,
        metavar="DIRECTORY",
        default=DEFAULT_WORK,
        help="where files are written [build/bench]",
    )
    return parser


def _add_extra(parser: argparse.ArgumentParser, extra: tuple[str, ...]) -> None:
    if "against" in extra:
        parser.add_argument(
            "--against",
            metavar="REV",
            help="compare CPU with a commit: its code and this one's in turn, pair by pair "
            "(here --repeats is the number of quiet pairs, at least 5 to judge [5])",
        )
    if "on" in extra:
        parser.add_argument(
            "--on",
            choices=("tmpfs", "tree"),
            default="",
            help="measure on one file system alone: a tmpfs, or that of --work [both]",
        )
    if "speed" in extra:
        parser.add_argument(
            "--speed", type=float, metavar="X", default=1.0, help="divide all delays by X [1]"
        )
    if "minutes" in extra:
        parser.add_argument(
            "--minutes", type=float, metavar="M", default=10.0, help="how long to soak [10]"
        )
    if "worked" in extra:
        parser.add_argument(
            "--worked",
            type=positive,
            metavar="N",
            default=2_000,
            help="tasks of a job to work [%(default)s]",
        )


def dispatch_parser() -> argparse.ArgumentParser:
    """Build the options of the dispatch benchmark."""
    parser = _parser("dispatch", OTHERS["dispatch"])
    parser.add_argument("--json", action="store_true", help="print one JSON object a row, no files")
    parser.add_argument(
        "--policy",
        action="append",
        metavar="POLICY",
        help="simulate this permit policy alone; may be repeated; writes no files. "
        f"{GATE_WORDS}, also written gate-on and gate-off",
    )
    parser.add_argument(
        "--seeds", type=positive, metavar="N", default=5, help="of the published comparison [5]"
    )
    parser.add_argument(
        "--grid-seeds", type=positive, metavar="N", default=1, help="of the fleets [1]"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fleets of a tenth of the work; files go to build/"
    )
    parser.add_argument(
        "--processes", type=positive, metavar="N", help="simulations at a time [one a CPU]"
    )
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--real-time", action="store_true", help="on the machine's own clock")
    other.add_argument(
        "--simulator-speed", action="store_true", help="how many tasks a real second it simulates"
    )
    other.add_argument("--fairness", action="store_true", help="small runs beside a giant one")
    return parser


def flame_parser() -> argparse.ArgumentParser:
    """Build the options of the flame graphs."""
    parser = _parser("flame", OTHERS["flame"])
    parser.add_argument("job", choices=FLAMES, help="the scenario whose server is sampled")
    parser.add_argument("--json", action="store_true", help="print one JSON object a row")
    parser.add_argument(
        "--repeats", type=positive, metavar="N", default=5, help="quiet rounds to add up [5]"
    )
    parser.add_argument(
        "--tasks", type=positive, metavar="N", default=40_000, help="size [%(default)s]"
    )
    parser.add_argument(
        "--against", metavar="REV", help="sample that commit's code too, in turn with this one's"
    )
    parser.add_argument(
        "--quick", action="store_true", help="draw into --work, whatever the rounds were like"
    )
    parser.add_argument(
        "--work",
        type=Path,
        metavar="DIRECTORY",
        default=DEFAULT_WORK,
        help="where files are written [build/bench]",
    )
    return parser


def overview() -> str:
    """Return the text of `scripts/bench --help`."""
    questions = {**{name: entry.question for name, entry in SCENARIOS.items()}, **OTHERS}
    room = max(map(len, questions))
    lines = [
        "usage: scripts/bench NAME [options]",
        "",
        "Each benchmark answers one question:",
        "",
        *(f"  {name:<{room}}  {question}" for name, question in questions.items()),
        "",
    ]
    lines += textwrap.wrap(
        "scripts/bench NAME --help lists the options of one. Nothing is installed for help; the "
        "first run installs what the benchmarks need, about 700 MB. bench/README.md says what each "
        "measures and how rounds are judged.",
        WIDTH,
    )
    return "\n".join(lines)


def parse(arguments: list[str]) -> argparse.Namespace | None:
    """Parse the options of the benchmark that is named first; None if it parses its own.

    Prints help or an error, and raises SystemExit.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        raise SystemExit(0)
    name, *rest = arguments
    if name in SCENARIOS:
        return scenario_parser(name).parse_args(rest)
    if name == "dispatch":
        return dispatch_parser().parse_args(rest)
    if name == "flame":
        return flame_parser().parse_args(rest)
    if name == "wire":
        return _parser(name, OTHERS[name]).parse_args(rest)
    if name == "micro":
        if "-h" in rest or "--help" in rest:
            parser = _parser(name, OTHERS[name])
            parser.usage = "scripts/bench micro [-h] [arguments for pytest]"
            parser.print_help()
            raise SystemExit(0)
        return None
    names = ", ".join([*SCENARIOS, *OTHERS])
    print(f"scripts/bench: unknown benchmark {name}; choose from {names}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    parse(sys.argv[1:])
