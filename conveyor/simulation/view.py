"""Shows simulations on a terminal: a table, and bars on a logarithmic scale.

Both read rows of `Report.row()`. Rows that differ only in their seed become one line: minimum /
mean / maximum where they differ.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Self, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from conveyor.client.output import duration, shorten
from conveyor.clock import SystemClock

Row = Mapping[str, str | int | float | None]
"""The figures of one simulation by name, in the order of `Report.row()`."""
Group = Sequence[Row]
"""Rows that differ only in their seed; at least one."""

ALIKE = ("world", "policy", "permit_store", "workers", "cap", "tasks")
NONE = "–"
WIDTH = 100
"""The width of a terminal in columns, which no table exceeds."""
_TENTH = 0.0995
"""Seconds from which on times are rounded to a tenth or more."""


class PlotGlyphs(NamedTuple):
    """The characters of the bars."""

    bar: str = "█"
    axis: str = "│"
    none: str = NONE


BLOCKS = PlotGlyphs()
ASCII = PlotGlyphs("#", "|", "-")


@dataclass(frozen=True, slots=True)
class Column:
    """One figure: its heading in short lines, its meaning, and its form for a group."""

    title: str
    meaning: str
    show: Callable[[Group], str]


def groups(rows: Iterable[Row]) -> list[list[Row]]:
    """Group rows that differ only in their seed, in the order of their first ones."""
    found: dict[tuple[str | int | float | None, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in ALIKE), []).append(row)
    return list(found.values())


def numbers(group: Group, name: str) -> list[float]:
    """Return a figure of every row that has it."""
    return [float(value) for row in group if isinstance(value := row[name], int | float)]


def unfinished(row: Row) -> bool:
    """Return whether its window cut a simulation off."""
    (completed,), (tasks,) = numbers([row], "completed"), numbers([row], "tasks")
    return completed < tasks


def spread(values: Sequence[float], text: Callable[[float], str]) -> str:
    """Format minimum / mean / maximum, as one number if all read the same."""
    if not values:
        return NONE
    shown = [text(value) for value in (min(values), sum(values) / len(values), max(values))]
    return shown[0] if len(set(shown)) == 1 else " / ".join(shown)


def digits(value: float) -> str:
    """Format a number with about three digits."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def factor(value: float) -> str:
    """Format a ratio to two decimals, which three digits would hide near 1; without them from 100
    on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def brief(seconds: float) -> str:
    """Format seconds for people, in milliseconds below a tenth: 1.5 ms, 0.4 s, 2 h 5 min."""
    return duration(seconds) if seconds >= _TENTH else f"{1_000 * seconds:.2g} ms"


def _figure(name: str, text: Callable[[float], str] = digits) -> Callable[[Group], str]:
    return lambda group: spread(numbers(group, name), text)


def _word(name: str) -> Callable[[Group], str]:
    return lambda group: str(group[0][name])


def _calls(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3f}" if value < 1 else f"{value:.2f}"


def _time(group: Group) -> str:
    text = spread(numbers(group, "elapsed_s"), brief)
    return f"> {text}" if any(unfinished(row) for row in group) else text


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


POLICY = Column(
    "policy", "How permits and receives are brought together (see --policy).", _word("policy")
)
PERMITS = Column("permits in", "The kind of permit store.", _word("permit_store"))
WORLD = Column("world", "Latencies, polling and visibility.", _word("world"))
WORKERS = Column("workers", "Worker processes.", _word("workers"))
CAP = Column("cap", "Most gateway calls in flight that the job allows.", _word("cap"))
WORDS = (POLICY, PERMITS, WORLD)
KEYS = (*WORDS, WORKERS, CAP)
"""The columns that identify a line."""
FIGURES = (
    Column("done", "Tasks completed: not all where it was cut off.", _figure("completed")),
    Column(
        "received\na task",
        "Messages received for each task done: 1 means that each was received once.",
        _figure("amplification", factor),
    ),
    Column(
        "receive\ncalls\na task",
        "Calls to the queue for messages, empty answers included.",
        _figure("receive_calls_per_task", _calls),
    ),
    Column(
        "permit\ncalls\na task",
        "Calls to the permit store, renewals included.",
        _figure("permit_calls_per_task", _calls),
    ),
    Column("bounced", "Messages hidden again because no permit was free.", _figure("bounces")),
    Column("in\nflight", "Most gateway calls at a time.", _figure("peak_in_flight")),
    Column(
        "over\ncap, s", "Seconds with more gateway calls than the cap.", _figure("seconds_over_cap")
    ),
    Column(
        "cap\nused",
        "Gateway calls in flight against the cap, until the last task has started.",
        _figure("utilisation_steady", _percent),
    ),
    Column("time", "Simulated time to the end; > where it was cut off.", _time),
)


def table(shown: Sequence[Group], columns: Sequence[Column]) -> Table:
    """Make a table with a line for each group. If it lacks room, words are folded, figures are
    not."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=0)
    for column in columns:
        if column in WORDS:
            made.add_column(column.title, vertical="bottom", overflow="fold")
        else:
            made.add_column(column.title, justify="right", vertical="bottom", no_wrap=True)
    for group in shown:
        made.add_row(*(column.show(group) for column in columns))
    return made


def tables(shown: Sequence[Group], columns: Sequence[Column], width: int = WIDTH) -> list[Table]:
    """Make one table, or several if it is wider than `width`, each with the KEYS among its columns.

    Raises ValueError if there is no other column.
    """
    keys = [column for column in columns if column in KEYS]
    parts: list[list[Column]] = []
    for column in columns:
        if column in KEYS:
            continue
        if parts and width_of(table(shown, [*keys, *parts[-1], column])) <= width:
            parts[-1].append(column)
        else:
            parts.append([column])
    if not parts:
        raise ValueError("a table needs a figure")
    return [table(shown, [*keys, *part]) for part in parts]


def width_of(made: Table) -> int:
    """Return the columns of the terminal that a table needs."""
    wide = Console(width=10_000)
    return Measurement.get(wide, wide.options, made).maximum


def bars(shown: Sequence[Group], *, width: int, glyphs: PlotGlyphs = BLOCKS) -> list[str]:
    """Draw messages received per task by policy, in lines of at most `width` columns (40 at least).

    The scale is logarithmic and begins at 1, so that a policy without wasted receives has no bar.
    """
    labels = [str(group[0]["policy"]) for group in shown]
    means = [_mean(numbers(group, "amplification")) for group in shown]
    texts = [glyphs.none if mean is None else factor(mean) for mean in means]
    room = max(width, 40) - max(map(len, labels)) - max(map(len, texts)) - 3
    top = 10 ** max(1, math.ceil(math.log10(max([*filter(None, means), 1.0])) - 1e-9))
    lines = []
    for label, mean, text in zip(labels, means, texts, strict=True):
        length = 0 if mean is None else round(room * math.log(max(mean, 1.0)) / math.log(top))
        bar = glyphs.bar * length
        gap = " " if bar else ""
        lines.append(f"{label:<{max(map(len, labels))}} {glyphs.axis}{bar}{gap}{text}")
    return [*lines, " " * (max(map(len, labels)) + 1) + _ticks(top, room)]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _ticks(top: float, room: int) -> str:
    """Draw the numbers below the axis: 1, 10, 100 …"""
    line = ""
    for power in range(round(math.log10(top)) + 1):
        place = round(room * power / math.log10(top))
        line = line.ljust(place) + f"{10**power:,}"
    return line


TICK = 1.0


LINE_INTERVAL = 10.0


_CLEAR = "\r\x1b[K"


class WaitingLine:
    """Shows progress from a thread of its own, since the work leaves no time for it.

    On a terminal the line is drawn again every second and disappears at the end; elsewhere one is
    printed every ten seconds, and a second after the words have changed.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._console = Console(file=stream)
        self._redraws = self._console.is_terminal and not self._console.is_dumb_terminal
        self._clock = SystemClock()
        self._began = self._clock.monotonic()
        self._words = ""
        self._printed = ("", 0.0)
        self._drawn = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._drawn:
            self._write(_CLEAR)

    def show(self, words: str) -> None:
        """Show `words` as the work in progress from now on."""
        self._words = words

    def _run(self) -> None:
        while not self._ended.wait(TICK):
            self.tick(self._clock.monotonic() - self._began)

    def tick(self, elapsed: float) -> None:
        """Draw or print the line due after `elapsed` seconds; called by the thread."""
        line = f"{self._words} … {duration(elapsed)}"
        if self._redraws:
            self._drawn = True
            self._write(_CLEAR + shorten(line, self._console.width - 1))
            return
        words, moment = self._printed
        if words != self._words or elapsed - moment >= LINE_INTERVAL:
            self._printed = (self._words, elapsed)
            self._write(line + "\n")

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()
