"""Show the progress of runs and of transfers: a bar on a terminal, plain lines elsewhere.

`view_for` gives the view of a run, which stays on the screen when the run has ended; `meter_for`
gives the view of a transfer, which is erased. Both bars are drawn by rich.progress, on one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from rich.console import Console, RenderableType
from rich.constrain import Constrain
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column
from rich.text import Text

from conveyor.client.output import command, duration, printable, size
from conveyor.client.wire import RunReply
from conveyor.domain.model import RunStatus
from conveyor.domain.run_waits import RunWaitReason

LINE_INTERVAL = 3.0
FREE_COLUMNS = 2
"""Kept free at the right edge, where the terminal echoes ^C."""
AT_WORK = frozenset({RunWaitReason.MAX_INFLIGHT.value, RunWaitReason.SLOTS.value})
"""The reasons of runs that work as fast as they may: no state of their own."""
LEAST_BAR = 8
"""A bar with less room is left out."""

Layout = Sequence[ProgressColumn]


class ProgressView(Protocol):
    """Shows the progress of one run, from enter to exit."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

    def show(self, run: RunReply, now: float) -> None:
        """Show the run as read at `now`, in seconds."""
        ...

    def trouble(self, text: str, now: float) -> None:
        """Show that the server did not answer."""
        ...

    def warn(self, text: str) -> None:
        """Print a line that stays."""
        ...


class TransferView(Protocol):
    """Shows a transfer, from enter to exit."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

    def begin(self, step: str, total: int | None = None, *, unit: str | None = None) -> None:
        """Start a step; `total` is its size in bytes, or in `unit` if there is one, None for a step
        of unknown size."""
        ...

    def move(self, done: int = 0) -> None:
        """Set the bytes or units done so far; without a number, show that the step goes on."""
        ...


class TransferClock(Protocol):
    """The part of a clock that a transfer needs."""

    def monotonic(self) -> float:
        """Return seconds from an arbitrary origin."""
        ...


def view_for(stream: TextIO, server: str | None = None) -> ProgressView:
    """Choose the bar for a terminal that can draw it, lines for anything else.

    `server` is the address given on the command line, repeated in the commands that lines suggest.
    """
    if stream.isatty():
        bar = BarView(stream)
        if bar.can_draw:
            return bar
    return LineView(stream, server)


def meter_for(stream: TextIO, clock: TransferClock) -> TransferView:
    """Choose the bar for a terminal that can draw it, lines for anything else."""
    if stream.isatty():
        bar = BarTransferView(stream, clock)
        if bar.can_draw:
            return bar
    return LineTransferView(stream, clock)


def describe(run: RunReply) -> str:
    """Say the state of a run in a word or two."""
    if run.paused:
        return "paused"
    if run.ingesting:
        return "ingesting"
    if run.idle:
        return "waiting for tasks"
    if run.outage is not None:
        return f"waiting for the {printable(run.outage.shared)}"
    if run.waiting is not None and run.waiting.reason == RunWaitReason.HOST_CLOSED:
        return "waiting for its hosts"
    if run.waiting is not None and run.waiting.reason not in AT_WORK:
        return f"waiting: {printable(run.waiting.reason).replace('_', ' ')}"
    return printable(run.status)


def describe_briefly(run: RunReply) -> str:
    """Say the state of a run and, where it works as fast as it may, what bounds it."""
    state = describe(run)
    if run.waiting is not None and state == RunStatus.RUNNING:
        state += f": {printable(run.waiting.reason).replace('_', ' ')}"
    return state


def why_waiting(run: RunReply) -> str:
    """Say why a run waits, with the word for the reason; nothing where it does not."""
    if run.waiting is None:
        return ""
    return f"waiting because {printable(run.waiting.reason)}: {printable(run.waiting.detail)}"


class LineView:
    """Plain lines: one every three seconds, and one whenever the state changes."""

    def __init__(self, stream: TextIO, server: str | None = None) -> None:
        self._stream = stream
        self._server = server
        self._now = 0.0
        # Draws nothing: it estimates the rate, as it does for the bar.
        self._progress = Progress(disable=True, get_time=lambda: self._now)
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
        """Print a line if one is due."""
        self._now = now
        _advance(self._progress, run)
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

    def warn(self, text: str) -> None:
        """Print the line."""
        self._print(text)

    def _line(self, run: RunReply, state: str) -> str:
        stats = run.stats
        line = (
            f"{state}: {stats.completed:,}/{stats.total:,} done, {stats.successful:,} ok, "
            f"{stats.failed:,} failed"
        )
        if _moving(run):
            task = self._progress.tasks[0]
            left = "-" if task.time_remaining is None else duration(task.time_remaining)
            line += f", {task.speed or 0:,.1f}/s, {left} left"
        if run.outage is not None and not run.paused:
            line += f"; {printable(run.outage.detail)}"
        if why := why_waiting(run):
            line += f"; {why}"
        if run.paused:
            line += f"; resume it with: {command('resume', run.job_id, server=self._server)}"
        return line

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class LineTransferView:
    """Plain lines, at most one every three seconds: a quick transfer prints nothing."""

    def __init__(self, stream: TextIO, clock: TransferClock) -> None:
        self._stream = stream
        self._clock = clock
        self._shown_at = clock.monotonic()
        self._begun_at = self._shown_at
        self._step = ""
        self._total: int | None = None
        self._unit: str | None = None

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

    def begin(self, step: str, total: int | None = None, *, unit: str | None = None) -> None:
        """Note the step; print its name if a line is due."""
        self._step, self._total, self._unit = step, total, unit
        self._begun_at = self._clock.monotonic()
        self.move()

    def move(self, done: int = 0) -> None:
        """Print a line if one is due."""
        now = self._clock.monotonic()
        if now - self._shown_at < LINE_INTERVAL:
            return
        self._shown_at = now
        if self._total is None:
            progress = f"for {duration(now - self._begun_at)}"
        elif self._unit is not None:
            progress = f"{done:,} of {self._total:,} {self._unit}"
        else:
            progress = f"{size(done)} of {size(self._total)}"
        print(f"{self._step}: {progress}", file=self._stream, flush=True)


class OneLineProgress(Progress):
    """A progress display that never takes a second line.

    It draws the first of its layouts that fits the terminal, and cuts the last one if none does.
    """

    layouts: Sequence[Layout] = ()

    def __init__(
        self, stream: TextIO, *, get_time: Callable[[], float], transient: bool = False
    ) -> None:
        super().__init__(
            console=Console(file=stream), get_time=get_time, transient=transient, expand=True
        )

    @property
    def can_draw(self) -> bool:
        """Tell whether the terminal can redraw a line."""
        return not self.console.is_dumb_terminal

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:
            width = self.console.width - FREE_COLUMNS
            fitting = (one for one in self.layouts if self._width(one, task) <= width)
            self.columns = tuple(next(fitting, self.layouts[-1]))
            self.expand = any(isinstance(column, BarColumn) for column in self.columns)
            if width > 0:
                yield Constrain(self.make_tasks_table([task]), width)

    def _width(self, layout: Layout, task: Task) -> int:
        needed = [
            LEAST_BAR
            if isinstance(column, BarColumn)
            else self.console.measure(column(task)).maximum
            for column in layout
        ]
        return sum(needed) + len(needed) - 1


class FieldColumn(ProgressColumn):
    """Draws a styled text from the fields of the task."""

    def __init__(self, field: str) -> None:
        super().__init__(_cell())
        self._field = field

    def render(self, task: Task) -> Text:
        text: Text = task.fields[self._field]
        return text


class TaskRateColumn(ProgressColumn):
    """Draws the rate as tasks a second."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed or 0:,.1f}/s")


class UnitColumn(ProgressColumn):
    """Draws how many of the units of a step are done."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.completed:,.0f}/{task.total or 0:,.0f} {task.fields['unit']}")


def _cell() -> Column:
    return Column(no_wrap=True, overflow="crop")


def _bar() -> BarColumn:
    return BarColumn(
        bar_width=None,
        complete_style="green",
        finished_style="green",
        table_column=Column(ratio=1),
    )


def _run_layouts(*, moving: bool) -> list[Layout]:
    state, counts, good, bad = map(FieldColumn, ("state", "counts", "successful", "failed"))
    bar, rate, left = _bar(), TaskRateColumn(_cell()), TimeRemainingColumn(table_column=_cell())
    small: list[Layout] = [
        [state, bar, counts, bad],
        [state, counts, bad],
        [counts, bad],
        [counts],
    ]
    if not moving:
        return [[state, bar, counts, good, bad], *small]
    return [
        [state, bar, counts, good, bad, rate, left],
        [state, bar, counts, good, bad, left],
        *small,
    ]


class BarView(OneLineProgress):
    """A bar with counts, rate and time left; the last state stays on the screen."""

    def __init__(self, stream: TextIO) -> None:
        self._now = 0.0
        super().__init__(stream, get_time=lambda: self._now)
        self._moving, self._ended = _run_layouts(moving=True), _run_layouts(moving=False)

    def show(self, run: RunReply, now: float) -> None:
        """Move the bar."""
        self._now = now
        self.layouts = self._moving if _moving(run) else self._ended
        stats = run.stats
        _advance(
            self,
            run,
            state=Text(describe_briefly(run), "bold"),
            counts=Text(f"{stats.completed:,}/{stats.total:,}"),
            successful=Text(f"{stats.successful:,} ok", "green"),
            failed=Text(f"{stats.failed:,} failed", "red" if stats.failed else ""),
        )

    def trouble(self, text: str, now: float) -> None:
        """Say beside the bar that the server does not answer."""
        for task_id in self.task_ids:
            self.update(task_id, state=Text("no answer, trying again", "bold"))

    def warn(self, text: str) -> None:
        """Print the line above the bar."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _moving(run: RunReply) -> bool:
    """Tell whether a rate and a time left mean anything."""
    return run.live and not run.paused


def _advance(progress: Progress, run: RunReply, **fields: Any) -> None:
    # A run without tasks has done none of them: a total of 0 would be drawn as a full bar.
    total = run.stats.total or 1
    if not progress.task_ids:
        progress.add_task("", total=total, **fields)
    progress.update(progress.task_ids[0], total=total, completed=run.stats.completed, **fields)


class BarTransferView(OneLineProgress):
    """A bar with bytes or units, rate and time left; for a step of unknown size, with the time it
    takes."""

    def __init__(self, stream: TextIO, clock: TransferClock) -> None:
        super().__init__(stream, get_time=clock.monotonic, transient=True)
        step = TextColumn("{task.description}", "bold", markup=False, table_column=_cell())
        done, rate = DownloadColumn(table_column=_cell()), TransferSpeedColumn(_cell())
        left, taken = TimeRemainingColumn(table_column=_cell()), TimeElapsedColumn(_cell())
        bar = _bar()
        self._sized: list[Layout] = [
            [step, bar, done, rate, left],
            [step, bar, done, left],
            [step, bar, done],
            [step, done],
            [done],
        ]
        count, speed = UnitColumn(_cell()), TaskRateColumn(_cell())
        self._counted: list[Layout] = [
            [step, bar, count, speed, left],
            [step, bar, count, left],
            [step, bar, count],
            [step, count],
            [count],
        ]
        self._unsized: list[Layout] = [[step, bar, taken], [step, taken]]

    def begin(self, step: str, total: int | None = None, *, unit: str | None = None) -> None:
        """Start the bar anew."""
        for task_id in self.task_ids:
            self.remove_task(task_id)
        sized = self._sized if unit is None else self._counted
        self.layouts = self._unsized if total is None else sized
        self.add_task(step, total=total, unit=unit)

    def move(self, done: int = 0) -> None:
        """Move the bar."""
        for task_id in self.task_ids:
            self.update(task_id, completed=done)
