"""A line that tells what keeps the terminal waiting, from a second on."""

from __future__ import annotations

import threading
from contextlib import suppress
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console

from conveyor.client.output import duration, shorten
from conveyor.clock import SystemClock

TICK = 1.0
LINE_INTERVAL = 10.0
_CLEAR = "\r\x1b[K"


class WaitingLine:
    """Draws from a thread of its own, since what is waited for leaves no time.

    On a terminal the line is drawn again every second and goes at the end; elsewhere one is printed
    every ten seconds, and after a second when the words have changed.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._drawn:
            self._write(_CLEAR)

    def tell(self, words: str) -> None:
        """What is being done from now on."""
        self._words = words

    def _run(self) -> None:
        while not self._ended.wait(TICK):
            self.tick(self._clock.monotonic() - self._began)

    def tick(self, elapsed: float) -> None:
        """Draw or print what is due after so many seconds; called by the thread."""
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
