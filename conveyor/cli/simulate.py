"""`conveyor simulate`: compare the permit policies for a fleet and a job of your own.

The command imports the simulation when it runs. `gate on` and `gate off` are the names that a
published comparison gives to two of the policies.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from conveyor.client.output import count, duration, printable, shorten

if TYPE_CHECKING:
    from conveyor.simulation.planner import Question
    from conveyor.simulation.view import Row

POLICIES = ("reserve", "reserve-strict", "local-exact", "local", "off")
WORDS = {"gate on": "reserve", "gate off": "off"}
"""With the gate on a worker takes a permit before it receives a message; with it off, after."""
LEGEND = '"gate on" is reserve, "gate off" is off.'
"""Explanation below each table."""


def policy_of(text: str) -> str | None:
    """Find the policy by its name, or by gate on, gate-on, GATE OFF …; None for other words."""
    word = " ".join(text.lower().replace("-", " ").split())
    names = {policy.replace("-", " "): policy for policy in POLICIES}
    return {**names, **WORDS}.get(word)


_SHOWN = ("reserve", "local", "off")
_KEEPING = ("reserve", "reserve-strict")
"""Policies that keep limits of hosts."""
_PLOT_WIDTH = 72


class _Number(click.ParamType[float]):
    """A number within bounds; NaN is refused."""

    def __init__(self, least: float, most: float, *, whole: bool = True, unit: str = "") -> None:
        self.name = "integer" if whole else "float"
        self._least = least
        self._most = most
        self._whole = whole
        self._words = f"must be {'a whole number' if whole else 'a number'}{unit} from"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            number = int(value) if self._whole else float(value)
        except ValueError:
            number = math.nan
        if not self._least <= number <= self._most:
            given = shorten(printable(str(value)), 40)
            self.fail(f"{self._words} {self._least:,} to {self._most:,}, not {given}", param, ctx)
        return number


class _Policy(click.ParamType[str]):
    """A permit policy, or its name in the published comparison."""

    name = "policy"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        policy = policy_of(str(value))
        if policy is None:
            given = shorten(printable(str(value)), 40)
            choices = ", ".join(POLICIES)
            self.fail(f"must be one of {choices}, gate-on, gate-off; not {given}", param, ctx)
        return policy


class _Explained(click.Command):
    """A command with an explanation of the table's columns in its help."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from conveyor.simulation.view import FIGURES, POLICY

        with formatter.section("Columns"):
            formatter.write_dl(
                [(" ".join(column.title.split()), column.meaning) for column in (POLICY, *FIGURES)]
            )


@click.command(cls=_Explained)
@click.option(
    "--tasks",
    type=_Number(1, 1_000_000),
    default=2_000,
    show_default=True,
    metavar="N",
    help="Tasks of the job.",
)
@click.option(
    "--cap",
    type=_Number(1, 100_000),
    default=100,
    show_default=True,
    metavar="N",
    help="Maximum number of gateway calls at a time, over all workers.",
)
@click.option(
    "--workers",
    type=_Number(1, 100),
    default=4,
    show_default=True,
    metavar="N",
    help="Worker processes.",
)
@click.option(
    "--slots",
    type=_Number(1, 1_000),
    default=50,
    show_default=True,
    metavar="N",
    help="Number of gateway calls at a time of one worker.",
)
@click.option(
    "--latency",
    type=_Number(0.001, 60, whole=False, unit=" of seconds"),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Median time of a gateway call.",
)
@click.option(
    "--sigma",
    type=_Number(0, 1.5, whole=False),
    default=0.6,
    show_default=True,
    metavar="X",
    help="Spread of that time (lognormal); 0 makes all calls equal.",
)
@click.option(
    "--hosts",
    type=_Number(1, 10_000),
    default=1,
    show_default=True,
    metavar="N",
    help="Hosts over which the tasks are spread.",
)
@click.option(
    "--host-limit",
    type=_Number(0, 1_000),
    default=0,
    show_default=True,
    metavar="N",
    help="Maximum number of calls at a time to one host; 0 for no limit.",
)
@click.option(
    "--host-rate",
    type=_Number(0, 1_000, whole=False, unit=" of starts"),
    default=0.0,
    show_default=True,
    metavar="N",
    help="Calls that may begin to one host a second; 0 for no limit, else 0.01 at least.",
)
@click.option(
    "--policy",
    "policies",
    type=_Policy(),
    multiple=True,
    metavar="POLICY",
    help=f"Compare this one; may be repeated: {', '.join(POLICIES)} [{', '.join(_SHOWN)}]. "
    f"{LEGEND} Both names are accepted.",
)
@click.option(
    "--seed",
    type=_Number(0, 2**32 - 1),
    default=0,
    show_default=True,
    metavar="N",
    help="The same seed gives the same events.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a policy.")
def simulate(as_json: bool, policies: tuple[str, ...], **numbers: Any) -> int:
    """Simulate a fleet at work on one job, with your own numbers.

    Runs the worker's own dispatcher in virtual time, against a simulated queue, permit store and
    gateway. Needs no server, no key and no network. Compares permit policies: reserve, which every
    worker runs, takes permits before it receives; local and off receive first, and then hide the
    messages that they may not work yet. Runs of these two are cut short if they would take long;
    they keep no limits of hosts, and are left out where there are some.
    """
    from conveyor.domain.hosts import LEAST_RATE, MOST_RATE, is_rate
    from conveyor.simulation.planner import Question, real_seconds, refusal

    has_limits = numbers["host_limit"] or numbers["host_rate"]
    if has_limits and not set(policies) <= set(_KEEPING):
        keeping = " and ".join(_KEEPING)
        raise click.BadParameter(
            f"limits of hosts are kept by {keeping} alone", param_hint="--policy"
        )
    shown = policies or (_SHOWN if not has_limits else _KEEPING[:1])
    question = Question(policies=tuple(dict.fromkeys(shown)), **numbers)
    if not is_rate(question.host_rate):
        raise click.BadParameter(
            f"must be 0, or from {LEAST_RATE} to {MOST_RATE:,.0f}", param_hint="--host-rate"
        )
    problem = refusal(question)
    if problem is not None:
        raise click.UsageError(problem)
    rows = _run(question, about=real_seconds(question))
    if as_json:
        for row in rows:
            click.echo(json.dumps(row))
    else:
        _show(question, rows)
    return 0


def _run(question: Question, *, about: float) -> list[Row]:
    from conveyor.simulation import simulate as run
    from conveyor.simulation.planner import scenarios
    from conveyor.simulation.view import WaitingLine

    plans = scenarios(question)
    rows: list[Row] = []
    with WaitingLine(sys.stderr) as line:
        for number, scenario in enumerate(plans, start=1):
            line.show(
                f"simulating {scenario.policy}, {number} of {len(plans)}; "
                f"all takes about {duration(about)}"
            )
            report = run(scenario)
            rows.append(report.row() | (report.of_hosts() if question.has_host_limits else {}))
    return rows


def _show(question: Question, rows: Sequence[Row]) -> None:

    from rich.console import Console

    from conveyor.simulation.planner import remarks
    from conveyor.simulation.view import (
        ASCII,
        BLOCKS,
        FIGURES,
        POLICY,
        WIDTH,
        bars,
        groups,
        tables,
        width_of,
    )

    shown = groups(rows)
    console = Console(highlight=False)
    room = min(console.width, WIDTH) if console.is_terminal else WIDTH
    glyphs = ASCII if console.options.ascii_only else BLOCKS
    click.echo(_heading(question) + "\n")
    for number, made in enumerate(tables(shown, (POLICY, *FIGURES), room)):
        if number:
            click.echo("")
        console.width = min(width_of(made), room)
        console.print(made)
    click.echo(f"\n{LEGEND}")
    click.echo("\nMessages received a task done, logarithmic:\n")
    for line in bars(shown, width=_PLOT_WIDTH, glyphs=glyphs):
        click.echo(line)
    click.echo("")
    if question.has_host_limits:
        for row in rows:
            click.echo(
                f"{row['policy']}: at most {count(int(row['host_peak'] or 0), 'call')} of one host "
                f"at a time, and {count(int(row['host_starts'] or 0), 'start')} within 0.9 s; "
                f"hosts used {float(row['host_use'] or 0):.0%} of their limits."
            )
        click.echo("")
    for line in remarks(question, rows):
        click.echo(line)


def _heading(question: Question) -> str:
    return (
        f"{count(question.tasks, 'task')}, at most {question.cap:,} at a time; "
        f"{count(question.workers, 'worker')} of {count(question.slots, 'slot')}.\n"
        f"{_call(question)} Seed {question.seed}."
    )


def _call(question: Question) -> str:
    if not question.sigma:
        return f"Every call takes {question.latency:g} s."
    return f"Calls take a median of {question.latency:g} s (sigma {question.sigma:g})."
