"""Showing a run as it moves: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Protocol, Self, TextIO

from conveyor.client.hints import command
from conveyor.client.output import duration, printable
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


class View(Protocol):
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


def view_for(stream: TextIO, server: str | None = None) -> View:
    """The bar where the stream is a terminal that can draw it, lines elsewhere.

    `server` is what the command line was given, for commands to go on with.
    """
    if stream.isatty():
        from conveyor.client.bar import BarView

        bar = BarView(stream)
        if bar.can_draw:
            return bar
    return LineView(stream, server)
