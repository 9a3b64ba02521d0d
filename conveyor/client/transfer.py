"""Showing bytes on their way: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self, TextIO

from conveyor.client.output import duration, size
from conveyor.client.progress import LINE_INTERVAL


class Ticking(Protocol):
    """The part of a clock that is needed here."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary origin."""
        ...


class Meter(Protocol):
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


class LineMeter:
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


def meter_for(stream: TextIO, clock: Ticking) -> Meter:
    """The bar where the stream is a terminal that can draw it, lines elsewhere."""
    if stream.isatty():
        from conveyor.client.transfer_bar import BarMeter

        bar = BarMeter(stream, clock)
        if bar.can_draw:
            return bar
    return LineMeter(stream, clock)
