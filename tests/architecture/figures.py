"""Measure the package: the figures of docs/architecture.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tests.architecture.graph import (
    LONELY_LINES,
    Lonely,
    cycles,
    lonely_modules,
    read_layers,
    upward_arrows,
)
from tests.architecture.rules import (
    MOST_PARAMETERS,
    handlers_with_binding,
    long_signatures,
    shared_names,
)
from tests.architecture.source import import_graph, read_modules

DYNAMODB = "conveyor/prod/dynamodb/"

# Each bound may be tightened. Only a new subject of the product raises the bounds on files, by the
# files that it needs (webhooks, signing keys and schedules did, then pages, streams and traces,
# then what operators of a large fleet need, rules, recordings, copies and keys for developers, then
# politeness towards hosts): what keeps fragments out is the least mean. One URL passes more files
# since calls are timed and carried by a transport of our own, and since hosts may have limits.
MOST_FILES = 424
LEAST_MEAN_LINES = 120
MOST_LINES = 700
MOST_LONELY = 25
MOST_CYCLES = 0
MOST_UPWARD = 0
# Times to live of task rows, counters in items of a process, and the pacing of hosts took modules
# of their own.
MOST_DYNAMODB = 31
MOST_PASSED = 92
MOST_SHARED = 0
MOST_LONG_SIGNATURES = 0
MOST_WITH_BINDING = 0


@dataclass(frozen=True)
class Figures:
    """The measured figures."""

    lines: Sequence[int]
    """Lines of code of every file, sorted."""
    dynamodb: int
    lonely: Sequence[Lonely]
    cycles: Sequence[Sequence[str]]
    upward: Sequence[str]
    passed: Sequence[str]
    """The files that one URL passes."""
    shared: Sequence[str]
    """The names that several public types have."""
    long_signatures: Sequence[str]
    with_binding: Sequence[str]
    """The handlers that take a whole binding."""

    @property
    def files(self) -> int:
        """Count the source files."""
        return len(self.lines)

    @property
    def mean(self) -> float:
        """Return the mean lines of code of a file."""
        return statistics.fmean(self.lines)

    @property
    def percentile_90(self) -> int:
        """Return the lines of code that nine files of ten do not exceed."""
        return self.lines[-(-9 * self.files // 10) - 1]

    def table(self) -> str:
        """Render the figures as a table in Markdown."""
        lonely = f"modules under {LONELY_LINES} lines with one importer"
        long_signatures = f"functions with more than {MOST_PARAMETERS} parameters"
        with_binding = "handlers that take a whole `Binding`"
        rows = [
            ("source files", self.files, most(MOST_FILES)),
            ("lines of code", sum(self.lines), ""),
            ("lines of code a file, mean", round(self.mean), f"at least {LEAST_MEAN_LINES}"),
            ("lines of code a file, median", round(statistics.median(self.lines)), ""),
            ("lines of code a file, 90th percentile", self.percentile_90, ""),
            ("lines of code a file, most", self.lines[-1], most(MOST_LINES)),
            (lonely, len(self.lonely), most(MOST_LONELY)),
            ("import cycles", len(self.cycles), most(MOST_CYCLES)),
            ("upward arrows", len(self.upward), most(MOST_UPWARD)),
            ("files of `conveyor/prod/dynamodb`", self.dynamodb, most(MOST_DYNAMODB)),
            ("files that one URL passes", len(self.passed), most(MOST_PASSED)),
            ("names that public types share", len(self.shared), most(MOST_SHARED)),
            (long_signatures, len(self.long_signatures), most(MOST_LONG_SIGNATURES)),
            (with_binding, len(self.with_binding), most(MOST_WITH_BINDING)),
        ]
        body = [f"| {name} | {value:,} | {bound} |" for name, value, bound in rows]
        return "\n".join(["| Figure | Today | Bound |", "|---|---:|---:|", *body])


def most(bound: int) -> str:
    """Write an upper bound; a bound of 0 is an exact one."""
    return f"at most {bound}" if bound else "0"


def measure(passed: Sequence[str]) -> Figures:
    """Measure the package; `passed` are the files that one URL passes."""
    modules = read_modules()
    graph = import_graph(modules)
    return Figures(
        lines=sorted(module.code_lines for module in modules.values()),
        dynamodb=sum(module.path.startswith(DYNAMODB) for module in modules.values()),
        lonely=lonely_modules(modules, graph),
        cycles=cycles(graph),
        upward=upward_arrows(modules, graph, read_layers()),
        passed=passed,
        shared=list(shared_names(modules)),
        long_signatures=long_signatures(modules),
        with_binding=handlers_with_binding(modules),
    )
