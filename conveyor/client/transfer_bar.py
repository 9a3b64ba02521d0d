"""The bar that a terminal shows of a transfer; gone once it is over."""

from __future__ import annotations

from typing import TextIO

from rich.text import Text

from conveyor.client.bar import FREE_COLUMNS, Glyphs, LiveLine, Part, fitted
from conveyor.client.output import duration, size
from conveyor.client.progress import Rate
from conveyor.client.transfer import Ticking


class BarMeter(LiveLine):
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
        return line(
            self._step,
            self._done,
            self._total,
            self._rate.per_second(),
            width=width,
            glyphs=self._glyphs,
        )


def line(step: str, done: int, total: int, rate: float, *, width: int, glyphs: Glyphs) -> Text:
    """The line for `width` columns: what counts less is left out where there is no room."""
    counts = Part(f"{size(done)}/{size(total)}")
    speed = Part(f"{size(int(rate))}/s")
    left = Part(f"{duration((total - done) / rate) if rate else '-'} left", "cyan")
    share = min(done / total, 1.0) if total else 1.0
    choices = [[counts, speed, left], [counts, left], [counts]]
    return fitted(step, share, choices, width=width, glyphs=glyphs)
