"""The bar that a terminal shows of a run: one line, as much of it as there is room for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import NamedTuple, Self, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.text import Text

from conveyor.client.progress import Rate, describe, time_left
from conveyor.client.wire import RunReply

FREE_COLUMNS = 2
"""Left at the right, where the terminal echoes ^C."""
LEAST_BAR = 8


class Part(NamedTuple):
    """Words of the line, with their style."""

    text: str
    style: str = ""


class Glyphs(NamedTuple):
    """What the bar is drawn with; done and open differ without colour, too."""

    done: str = "━"
    open: str = "─"


class LiveLine(ABC):
    """A line of a terminal that is drawn again while its context is open; `transient`: it is gone
    afterwards. It is asked for as soon as this is made: whoever inherits is ready before."""

    def __init__(self, stream: TextIO, *, transient: bool) -> None:
        self._console = Console(file=stream)
        self._glyphs = Glyphs("#", "-") if self._console.options.ascii_only else Glyphs()
        self._live = Live(
            get_renderable=self._line,
            console=self._console,
            refresh_per_second=10,
            transient=transient,
        )

    @property
    def can_draw(self) -> bool:
        """Whether the terminal can have a line drawn again."""
        return not self._console.is_dumb_terminal

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None:
        self._live.stop()

    @abstractmethod
    def _line(self) -> Text:
        """The line as it is now."""


class BarView(LiveLine):
    """A bar with counts, rate and time left; the last state stays on the screen."""

    def __init__(self, stream: TextIO) -> None:
        self._rate = Rate()
        self._run: RunReply | None = None
        self._troubled = False
        super().__init__(stream, transient=False)

    def show(self, run: RunReply, now: float) -> None:
        """Move the bar."""
        self._rate.add(now, run.stats.completed)
        self._run, self._troubled = run, False

    def trouble(self, text: str, now: float) -> None:
        """Say so beside the bar."""
        self._troubled = True

    def _line(self) -> Text:
        if self._run is None:
            return Text()
        return line(
            self._run,
            self._rate.per_second(),
            state="no answer, trying again" if self._troubled else describe(self._run),
            width=max(self._console.width - FREE_COLUMNS, 1),
            glyphs=self._glyphs,
        )


def line(run: RunReply, rate: float, *, state: str, width: int, glyphs: Glyphs) -> Text:
    """The line for `width` columns: what counts less is left out where there is no room."""
    stats = run.stats
    counts = Part(f"{stats.completed:,}/{stats.total:,}")
    good = Part(f"{stats.successful:,} ok", "green")
    bad = Part(f"{stats.failed:,} failed", "red" if stats.failed else "")
    speed = [Part(f"{rate:,.1f}/s")] if run.live else []
    left = [Part(f"{time_left(run, rate)} left", "cyan")] if run.live else []
    choices = [[counts, good, bad, *speed, *left], [counts, good, bad, *left], [counts, bad]]
    share = stats.completed / stats.total if stats.total else 0.0
    return fitted(state, share, choices, width=width, glyphs=glyphs)


def fitted(
    state: str, share: float, choices: list[list[Part]], *, width: int, glyphs: Glyphs
) -> Text:
    """A state, a bar of which `share` (0 to 1) is done, and the first choice of words that leaves
    room for it; the last choice without a bar where none does."""
    shown = Part(state, "bold")
    for parts in choices:
        room = width - sum(cell_len(part.text) + 1 for part in [shown, *parts])
        if room >= LEAST_BAR:
            return _joined([[shown], _bar(share, room, glyphs), *([part] for part in parts)])
    text = _joined([[shown], *([part] for part in choices[-1])])
    text.truncate(width, overflow="crop")
    return text


def _bar(share: float, width: int, glyphs: Glyphs) -> list[Part]:
    done = int(width * share)
    return [Part(glyphs.done * done, "green"), Part(glyphs.open * (width - done), "dim")]


def _joined(groups: list[list[Part]]) -> Text:
    line = Text(no_wrap=True, overflow="crop", end="")
    for number, group in enumerate(groups):
        line.append(" " if number else "")
        for part in group:
            line.append(part.text, part.style or None)
    return line
