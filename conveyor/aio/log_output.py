"""Write log lines from a thread of its own: a pipe that nobody reads stops no event loop."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque

MOST_WAITING = 1_048_576
"""Bytes of lines that wait while the output takes none; further lines are lost, and counted."""
FLUSH_SECONDS = 1.0
"""Time for the lines that still wait at the end of a process."""

_log = logging.getLogger("conveyor.logs")


NEWS: dict[str, object] = {"is_news": None}
"""The `extra` of a record that tells something new each time, though its line be the same: it is
never left out as a repetition."""


class LogOutput(logging.Handler):
    """Writes formatted records to a file descriptor. `lost` counts the lines that found no room, or
    an output that is gone."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.lost = 0
        self._descriptor = descriptor
        self._lines: deque[bytes] = deque()
        self._size = 0
        self._is_writing = False
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="log output", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Hand a record over. Never waits for the output."""
        try:
            line = f"{self.format(record)}\n".encode(errors="backslashreplace")
        except Exception:
            self.handleError(record)
            return
        with self._changed:
            if self._size + len(line) > MOST_WAITING:
                self.lost += 1
                return
            self._lines.append(line)
            self._size += len(line)
            if not self._is_writing:
                self._changed.notify_all()

    def flush(self) -> None:
        """Wait until every line is written, but not for long."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._lines or self._is_writing), FLUSH_SECONDS)

    def close(self) -> None:
        """Write what waits, as flush does, and end the thread once the output lets it go."""
        self.flush()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        super().close()

    def _run(self) -> None:
        told, works = 0, True
        while (lines := self._next()) is not None:
            missing = self.lost - told
            if missing and works:
                # There is room for this line, behind the lines at hand.
                told += missing
                _log.warning("log lines were lost", extra={"lines": missing})
            try:
                self._write(b"".join(lines))
                works = True
            except OSError:
                works = False
                with self._changed:
                    self.lost += len(lines)

    def _next(self) -> list[bytes] | None:
        """Wait for lines; return all of them, or None once closed."""
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._lines or self._is_closed)
            if not self._lines:
                return None
            lines = list(self._lines)
            self._lines.clear()
            self._size = 0
            self._is_writing = True
            return lines

    def _write(self, content: bytes) -> None:
        rest = memoryview(content)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:
                select.select([], [self._descriptor], [])


def lost_lines() -> int:
    """Return how many lines the log outputs of this process have lost."""
    outputs = logging.getLogger().handlers
    return sum(output.lost for output in outputs if isinstance(output, LogOutput))
