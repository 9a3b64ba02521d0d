"""Tells of each live run that is shown why it waits, by what the workers said last.

However many runs are shown, the reports of the workers are read together, at most once a second,
and less often where there are hundreds.
The store is never asked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import anyio

from conveyor.aio.resilience import log_and_continue
from conveyor.domain.model import Run
from conveyor.domain.run_waits import Crew, RunWait, WorkerReport, run_wait
from conveyor.ports.clock import Clock
from conveyor.ports.workers import Workers

READ_EVERY = 1.0
"""Least seconds between two reads of the reports."""
READ_A_SECOND = 200
"""Reports that a process reads in a second, at most: those of a large fleet are read less often."""
AFTER_FAILURE = 10.0
"""Least seconds from a read that failed to the next one: a request waits for it."""

Waits = Callable[[Run], RunWait | None]
"""Tells why a run waits, or None."""

_log = logging.getLogger("conveyor.service")


class RunWaits:
    """Finds the reasons why runs wait. `heartbeat` is that of the workers, in seconds, until one
    was heard. `run_shown` is called with each run that is looked at."""

    def __init__(
        self,
        workers: Workers,
        clock: Clock,
        *,
        heartbeat: float,
        run_shown: Callable[[Run], None] = lambda _: None,
    ) -> None:
        self._workers = workers
        self._run_shown = run_shown
        self._clock = clock
        self._heartbeat = heartbeat
        self._crew: Crew | None = None
        self._heard_at = clock.now()
        self._read_from = float("-inf")
        self._reading = anyio.Lock()

    async def crew(self) -> Crew | None:
        """Return the workers as they were last heard; None while that cannot be known. Only the
        first request ever waits for the read of another."""
        if self._clock.monotonic() < self._read_from or (self._crew and self._reading.locked()):
            return self._crew
        async with self._reading:
            now = self._clock.monotonic()
            if now >= self._read_from:
                reports = await log_and_continue(
                    _log, "the reports of workers could not be read", self._workers.all
                )
                self._crew = self._heard(reports)
                self._read_from = now + _pause_after(reports)
            return self._crew

    async def look(self) -> Waits:
        """Look at the workers, and return what tells of each run why it waits."""
        crew, now = await self.crew(), self._clock.now()
        return lambda run: self._wait(run, crew, now)

    def _wait(self, run: Run, crew: Crew | None, now: int) -> RunWait | None:
        self._run_shown(run)
        return run_wait(run, crew, now)

    def _heard(self, reports: Sequence[WorkerReport] | None) -> Crew | None:
        if reports is None:
            # Nobody knows how long the workers were silent meanwhile.
            self._heard_at = self._clock.now()
            return None
        crew = Crew(reports, heard_at=self._heard_at, heartbeat=self._heartbeat)
        self._heard_at = max(self._heard_at, crew.heard_at)
        return crew


def _pause_after(reports: Sequence[WorkerReport] | None) -> float:
    """Return the seconds from a read of the reports to the next one."""
    if reports is None:
        return AFTER_FAILURE
    return max(READ_EVERY, len(reports) / READ_A_SECOND)
