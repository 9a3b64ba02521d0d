"""Showing a run as it moves: a bar on a terminal, a line every few seconds elsewhere.

The bar that a terminal shows of a run: one line, as much of it as there is room for.

Showing bytes on their way: a bar on a terminal, a line every few seconds elsewhere.

The bar that a terminal shows of a transfer; gone once it is over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from types import TracebackType
from typing import NamedTuple, Protocol, Self, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.text import Text

from conveyor.client.output import command, duration, printable, size
from conveyor.client.wire import RunReply

LINE_INTERVAL = 3.0
RATE_WINDOW = 10.0


class Rate:
    """Tasks a second over the last ten seconds, told by counters at instants."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, now: float, completed: int) -> None:
        """Note that `completed` tasks had ended at `now` (seconds, never going back)."""
        self._samples.append((now, completed))
        while len(self._samples) > 2 and self._samples[1][0] <= now - RATE_WINDOW:
            self._samples.popleft()

    def per_second(self) -> float:
        """0 until two instants are known."""
        if len(self._samples) < 2:
            return 0.0
        (started, before), (ended, after) = self._samples[0], self._samples[-1]
        return max(after - before, 0) / (ended - started) if ended > started else 0.0


class ProgressView(Protocol):
    """Where the progress of one run is shown, from enter to exit."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

    def show(self, run: RunReply, now: float) -> None:
        """Show the run as read at `now`, seconds."""
        ...

    def trouble(self, text: str, now: float) -> None:
        """Show that the server could not be asked."""
        ...


def describe(run: RunReply) -> str:
    """The state of a run in a word or two."""
    if run.paused:
        return "paused"
    if run.ingesting:
        return "ingesting"
    if run.idle:
        return "waiting for tasks"
    return printable(run.status)


def time_left(run: RunReply, rate: float) -> str:
    """How long the rest will take at the present rate; a hyphen where that is unknown."""
    remaining = run.stats.total - run.stats.completed
    if remaining <= 0 or rate <= 0 or run.paused:
        return "-"
    return duration(remaining / rate)


class LineView:
    """Plain lines, at most one in three seconds unless the state changes."""

    def __init__(self, stream: TextIO, server: str | None = None) -> None:
        self._stream = stream
        self._server = server
        self._rate = Rate()
        self._shown_at = 0.0
        self._state = ""
        self._troubled = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None:
        self._stream.flush()

    def show(self, run: RunReply, now: float) -> None:
        """Print a line when one is due."""
        self._rate.add(now, run.stats.completed)
        if self._troubled:
            self._print("the server answers again")
        state = describe(run)
        due = self._troubled or state != self._state or now - self._shown_at >= LINE_INTERVAL
        self._troubled = False
        if due:
            self._state, self._shown_at = state, now
            self._print(self._line(run, state))

    def trouble(self, text: str, now: float) -> None:
        """Print the trouble once, until the server answers."""
        if not self._troubled:
            self._print(text)
        self._troubled = True

    def _line(self, run: RunReply, state: str) -> str:
        stats = run.stats
        line = (
            f"{state}: {stats.completed:,}/{stats.total:,} done, {stats.successful:,} ok, "
            f"{stats.failed:,} failed"
        )
        if run.live:
            rate = self._rate.per_second()
            line += f", {rate:,.1f}/s, {time_left(run, rate)} left"
        if run.paused:
            line += f"; go on with: {command('resume', run.job_id, server=self._server)}"
        return line

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def view_for(stream: TextIO, server: str | None = None) -> ProgressView:
    """The bar where the stream is a terminal that can draw it, lines elsewhere.

    `server` is what the command line was given, for commands to go on with.
    """
    if stream.isatty():
        bar = BarView(stream)
        if bar.can_draw:
            return bar
    return LineView(stream, server)


FREE_COLUMNS = 2
"""Left at the right, where the terminal echoes ^C."""
LEAST_BAR = 8


class Part(NamedTuple):
    """Words of the line, with their style."""

    text: str
    style: str = ""


class BarGlyphs(NamedTuple):
    """What the bar is drawn with; done and open differ without colour, too."""

    done: str = "━"
    open: str = "─"


class LiveLine(ABC):
    """A line of a terminal that is drawn again while its context is open; `transient`: it is gone
    afterwards. It is asked for as soon as this is made: whoever inherits is ready before."""

    def __init__(self, stream: TextIO, *, transient: bool) -> None:
        self._console = Console(file=stream)
        self._glyphs = BarGlyphs("#", "-") if self._console.options.ascii_only else BarGlyphs()
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
        return run_line(
            self._run,
            self._rate.per_second(),
            state="no answer, trying again" if self._troubled else describe(self._run),
            width=max(self._console.width - FREE_COLUMNS, 1),
            glyphs=self._glyphs,
        )


def run_line(run: RunReply, rate: float, *, state: str, width: int, glyphs: BarGlyphs) -> Text:
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
    state: str, share: float, choices: list[list[Part]], *, width: int, glyphs: BarGlyphs
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


def _bar(share: float, width: int, glyphs: BarGlyphs) -> list[Part]:
    done = int(width * share)
    return [Part(glyphs.done * done, "green"), Part(glyphs.open * (width - done), "dim")]


def _joined(groups: list[list[Part]]) -> Text:
    line = Text(no_wrap=True, overflow="crop", end="")
    for number, group in enumerate(groups):
        line.append(" " if number else "")
        for part in group:
            line.append(part.text, part.style or None)
    return line


class Ticking(Protocol):
    """The part of a clock that is needed here."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary origin."""
        ...


class TransferView(Protocol):
    """Where a transfer is shown, from enter to exit."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

    def begin(self, step: str, total: int | None = None) -> None:
        """A new step, of `total` bytes where it is one of bytes."""
        ...

    def move(self, done: int = 0) -> None:
        """So many bytes of the step are done; without a number, it still goes on."""
        ...


class LineTransferView:
    """Plain lines, at most one in three seconds: what is quick says nothing."""

    def __init__(self, stream: TextIO, clock: Ticking) -> None:
        self._stream = stream
        self._clock = clock
        self._shown_at = clock.monotonic()
        self._begun_at = self._shown_at
        self._step = ""
        self._total: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None:
        self._stream.flush()

    def begin(self, step: str, total: int | None = None) -> None:
        """Note the step; print its name when a line is due."""
        self._step, self._total = step, total
        self._begun_at = self._clock.monotonic()
        self.move()

    def move(self, done: int = 0) -> None:
        """Print a line when one is due."""
        now = self._clock.monotonic()
        if now - self._shown_at < LINE_INTERVAL:
            return
        self._shown_at = now
        if self._total is None:
            told = f"for {duration(now - self._begun_at)}"
        else:
            told = f"{size(done)} of {size(self._total)}"
        print(f"{self._step}: {told}", file=self._stream, flush=True)


def meter_for(stream: TextIO, clock: Ticking) -> TransferView:
    """The bar where the stream is a terminal that can draw it, lines elsewhere."""
    if stream.isatty():
        bar = BarTransferView(stream, clock)
        if bar.can_draw:
            return bar
    return LineTransferView(stream, clock)


class BarTransferView(LiveLine):
    """A bar with bytes, rate and time left; for a step without bytes, how long it has taken."""

    def __init__(self, stream: TextIO, clock: Ticking) -> None:
        self._clock = clock
        self._begin("", None)
        super().__init__(stream, transient=True)

    def begin(self, step: str, total: int | None = None) -> None:
        """Start the bar anew."""
        self._begin(step, total)

    def move(self, done: int = 0) -> None:
        """Move the bar."""
        self._done = done
        self._rate.add(self._clock.monotonic(), done)

    def _begin(self, step: str, total: int | None) -> None:
        self._step, self._total, self._done = step, total, 0
        self._begun_at = self._clock.monotonic()
        self._rate = Rate()
        self._rate.add(self._begun_at, 0)

    def _line(self) -> Text:
        if not self._step:
            return Text()
        width = max(self._console.width - FREE_COLUMNS, 1)
        if self._total is None:
            taken = duration(self._clock.monotonic() - self._begun_at)
            text = Text(f"{self._step} {taken}", no_wrap=True, overflow="crop", end="")
            text.truncate(width, overflow="crop")
            return text
        return transfer_line(
            self._step,
            self._done,
            self._total,
            self._rate.per_second(),
            width=width,
            glyphs=self._glyphs,
        )


def transfer_line(
    step: str, done: int, total: int, rate: float, *, width: int, glyphs: BarGlyphs
) -> Text:
    """The line for `width` columns: what counts less is left out where there is no room."""
    counts = Part(f"{size(done)}/{size(total)}")
    speed = Part(f"{size(int(rate))}/s")
    left = Part(f"{duration((total - done) / rate) if rate else '-'} left", "cyan")
    share = min(done / total, 1.0) if total else 1.0
    choices = [[counts, speed, left], [counts, left], [counts]]
    return fitted(step, share, choices, width=width, glyphs=glyphs)
