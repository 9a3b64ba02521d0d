"""Summarises the rows of the dispatch benchmark: tables, sentences and a plot."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

from bench.dispatch_grid import FLEET_CAPS, FLEET_WORKERS, POLICIES, RESERVING
from bench.harness import cpu_model, cpus, memory_gb
from bench.plot import Panel, Plot
from conveyor.cli.simulate import LEGEND
from conveyor.simulation.view import (
    CAP,
    FIGURES,
    PERMITS,
    POLICY,
    WORKERS,
    Column,
    Group,
    Row,
    groups,
    numbers,
    spread,
)

PUBLISHED_FIGURES = {"off": 4.79, "local": 1.59}
"""Messages received per task in the published run."""

Section = tuple[str, list[list[Row]], tuple[Column, ...]]
"""A title, its lines, and its columns."""

_TITLES = {
    "published": "The published comparison",
    "realistic": "A fleet beside one job",
    "realistic-cool": "The same, with a pause after each refusal and a growing bounce",
    "real-time": "The published comparison on the machine's own clock",
}


def machine_line() -> str:
    """Describe the machine: real seconds depend on it, virtual ones do not."""
    return (
        f"{cpus()} × {cpu_model()}, {memory_gb():g} GB, Python {platform.python_version()}, "
        f"load {os.getloadavg()[0]:.2g} at the start"
    )


def split(rows: Sequence[Row]) -> list[Section]:
    """Make a section for each world, in the order of the rows."""
    sections: list[Section] = []
    for world in dict.fromkeys(row["world"] for row in rows):
        shown = groups(row for row in rows if row["world"] == world)
        seeds = max(len(group) for group in shown)
        first = shown[0][0]
        name = str(world)
        title = f"{_TITLES.get(name, name)}: world {name}, {first['tasks']:,} tasks"
        if seeds > 1:
            title += f", minimum / mean / maximum of {seeds} seeds"
        same = len({(group[0]["cap"], group[0]["workers"]) for group in shown}) == 1
        if same:
            title += f", cap {first['cap']}, workers {first['workers']}"
        head = (POLICY, PERMITS) if same else (CAP, WORKERS, POLICY)
        sections.append((title, shown, (*head, *FIGURES)))
    return sections


def findings(rows: Sequence[Row]) -> list[str]:
    """Write the conclusions that these rows support."""
    return [*_reproduction(rows), *_reserving(rows), *_equal_traces(rows)]


def _reproduction(rows: Sequence[Row]) -> list[str]:
    sentences = []
    for policy, published in PUBLISHED_FIGURES.items():
        found = [
            row
            for row in rows
            if row["world"] == "published"
            and row["policy"] == policy
            and row["permit_store"] == "count-then-insert"
        ]
        if found:
            amplification = spread(numbers(found, "amplification"), "{:.2f}".format)
            sentences.append(f"{policy}: {amplification} messages a task; published: {published}")
    return sentences


def _reserving(rows: Sequence[Row]) -> list[str]:
    """Summarise the reserving policies; messages in hand at the end of a window were received and
    are not done, so only runs to the end count as in vain."""
    found = [row for row in rows if row["policy"] in RESERVING]
    if not found:
        return []
    bounces, over = (sum(numbers(found, name)) for name in ("bounces", "seconds_over_cap"))
    ended = [row for row in found if row["window_s"] is None]
    spare = sum(numbers(ended, "receives")) - sum(numbers(ended, "completed"))
    return [
        f"reserve and reserve-strict, {len(found)} simulations: {bounces:,.0f} bounces, "
        f"{over:g} s over the cap; where run to the end {spare:,.0f} messages received in vain"
    ]


def _equal_traces(rows: Sequence[Row]) -> list[str]:
    """Name the cases in which the local gate changed nothing, event for event."""
    traces: dict[tuple[object, ...], dict[object, object]] = {}
    for row in rows:
        case = tuple(row[name] for name in ("world", "permit_store", "cap", "workers", "seed"))
        if row["trace_hash"] is not None:
            traces.setdefault(case, {})[row["policy"]] = row["trace_hash"]
    equal: dict[str, dict[str, None]] = {}
    for (world, _store, cap, workers, _seed), hashes in traces.items():
        if "off" in hashes and hashes["off"] == hashes.get("local"):
            equal.setdefault(f"{world} at a cap of {cap}", {})[str(workers)] = None
    return [
        f"local did exactly what off did (same trace) in {place}: workers {', '.join(fleets)}"
        for place, fleets in equal.items()
    ]


def plot_of(rows: Sequence[Row]) -> Plot:
    """Plot amplification by workers and policy, a panel for each cap, in the realistic world."""
    fleets = [row for row in rows if row["world"] == "realistic"]
    return Plot(
        title="Messages received for each task done",
        subtitle="One job, workers of 50 slots, simulated; 1 means that none was received in vain",
        x_label="workers",
        y_label="messages received a task (logarithmic)",
        series=POLICIES,
        panels=[
            Panel(
                title=f"cap {cap}",
                groups=[str(workers) for workers in FLEET_WORKERS],
                values=[
                    [_amplification(fleets, cap, workers, policy) for policy in POLICIES]
                    for workers in FLEET_WORKERS
                ],
            )
            for cap in FLEET_CAPS
        ],
    )


def _amplification(rows: Sequence[Row], cap: int, workers: int, policy: str) -> float | None:
    found = [
        row for row in rows if (row["cap"], row["workers"], row["policy"]) == (cap, workers, policy)
    ]
    values = numbers(found, "amplification")
    return sum(values) / len(values) if values else None


def markdown(rows: Sequence[Row], line: str) -> str:
    """Format the tables and the findings, which scripts/bench dispatch writes beside the plot."""
    parts = ["# Dispatch, as measured", "", line, "", LEGEND, ""]
    for title, shown, columns in split(rows):
        parts += [f"## {title}", "", *_markdown_table(shown, columns), ""]
    parts += [f"- {finding}" for finding in findings(rows)]
    return "\n".join([*parts, ""])


def _markdown_table(shown: Sequence[Group], columns: Sequence[Column]) -> list[str]:
    titles = [" ".join(column.title.split()) for column in columns]
    return [
        f"| {' | '.join(titles)} |",
        "|---" * len(columns) + "|",
        *(f"| {' | '.join(column.show(group) for column in columns)} |" for group in shown),
    ]
