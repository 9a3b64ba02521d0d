"""Showing a run as it moves: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from conveyor.client.output import duration, printable
from conveyor.client.wire import RunReply

if TYPE_CHECKING:
    from rich.progress import Progress

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
    if run.idle:
        return "waiting for tasks"
    return printable(run.status)


def time_left(run: RunReply, rate: float) -> str:
    """How long the rest will take at the present rate; a dash where that is unknown."""
    remaining = run.stats.total - run.stats.completed
    if not run.live or remaining <= 0:
        return duration(0)
    return duration(remaining / rate) if rate > 0 and not run.paused else "–"


class LineView:
    """Plain lines, at most one in three seconds unless the state changes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._rate = Rate()
        self._shown_at = 0.0
        self._state = ""

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
        rate = self._rate.per_second()
        stats = run.stats
        state = describe(run)
        if not self._due(state, now):
            return
        line = (
            f"{state}: {stats.completed:,}/{stats.total:,} done, {stats.successful:,} ok, "
            f"{stats.failed:,} failed, {rate:,.1f}/s, {time_left(run, rate)} left"
        )
        if run.paused:
            line += f"; go on with: conveyor resume {printable(run.job_id)}"
        self._print(line)

    def trouble(self, text: str, now: float) -> None:
        """Print the trouble when a line is due."""
        if self._due(text, now):
            self._print(text)

    def _due(self, state: str, now: float) -> bool:
        if state == self._state and now - self._shown_at < LINE_INTERVAL:
            return False
        self._state, self._shown_at = state, now
        return True

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class BarView:
    """A progress bar with ok, failed, rate and time left; the last state stays on the screen."""

    def __init__(self, stream: TextIO) -> None:
        self._progress = _bar(stream)
        self._rate = Rate()
        self._bar = self._progress.add_task(
            "run", total=None, state="", ok="0", failed="0", rate="0.0", left="–"
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None:
        self._progress.stop()

    def show(self, run: RunReply, now: float) -> None:
        """Move the bar."""
        self._rate.add(now, run.stats.completed)
        rate = self._rate.per_second()
        self._progress.update(
            self._bar,
            total=run.stats.total,
            completed=run.stats.completed,
            state=describe(run),
            ok=f"{run.stats.successful:,}",
            failed=f"{run.stats.failed:,}",
            rate=f"{rate:,.1f}",
            left=time_left(run, rate),
        )

    def trouble(self, text: str, now: float) -> None:
        """Say so beside the bar."""
        self._progress.update(self._bar, state="no answer, trying again")


def view_for(stream: TextIO) -> View:
    """The bar where the stream is a terminal, lines elsewhere."""
    return BarView(stream) if stream.isatty() else LineView(stream)


def _bar(stream: TextIO) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    def column(template: str, style: str = "none") -> TextColumn:
        return TextColumn(template, style=style, markup=False)

    return Progress(
        column("{task.fields[state]}", "bold"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        column("{task.fields[ok]} ok", "green"),
        column("{task.fields[failed]} failed", "red"),
        column("{task.fields[rate]}/s"),
        column("{task.fields[left]} left", "cyan"),
        console=Console(file=stream),
        expand=True,
    )
