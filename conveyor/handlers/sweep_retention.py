"""Retention: bodies go when their results have expired, rows so many days after that."""

from __future__ import annotations

from conveyor.handlers.pacing import BODIES_A_STEP, Pace, bodies_below
from conveyor.ports.binding import Binding
from conveyor.ports.blobs import LIFECYCLE_DAYS, run_prefix
from conveyor.ports.clock import Clock
from conveyor.ports.queues import CONTROL_QUEUE, DeleteMessage
from conveyor.ports.sweeping import EndedRun

INTERVAL = 3_600.0
"""Seconds between two looks at every run that has ended."""
BUDGET = 30.0
"""Seconds after which a look stands back for the rest of the sweep; the next sweep goes on."""
PAGE = 100

_DAY = 86_400_000


class Retention:
    """Removes what is past its time, in runs that have ended.

    A result expires `result_ttl_days` after its scrape: its run's bodies go that long after the
    run's end, when the last of them has expired. `row_days` 0 keeps the rows.
    """

    def __init__(self, binding: Binding, clock: Clock, *, row_days: int) -> None:
        self._binding = binding
        self._clock = clock
        self._pace = Pace(clock)
        self._row_days = row_days
        self._looked_at: int | None = None
        self._after = ""

    async def look(self) -> None:
        """Look at the ended runs, by id, where that is due; or go on with an unfinished look."""
        if not self._after and not self._is_due():
            return
        until = self._clock.monotonic() + BUDGET
        while self._clock.monotonic() < until:
            # No result lives for less than a day.
            before = self._clock.now() - _DAY
            runs = await self._binding.sweeping.ended_runs(
                before=before, after=self._after, limit=PAGE
            )
            for run in runs:
                await self._age(run)
                self._after = run.run_id
                if self._clock.monotonic() >= until:
                    return
            if len(runs) < PAGE:
                self._after = ""
                self._looked_at = self._clock.now()
                return

    def _is_due(self) -> bool:
        """By the calendar, as what expires does: also where the clock was set meanwhile."""
        if self._looked_at is None:
            return True
        return not 0 <= self._clock.now() - self._looked_at < INTERVAL * 1_000

    async def _age(self, run: EndedRun) -> None:
        expired_for = self._clock.now() - run.ended_at - run.result_ttl_days * _DAY
        if expired_for < 0:
            return
        if not run.swept:
            for days in LIFECYCLE_DAYS:
                prefix = run_prefix(run.job_id, run.run_id, days)
                while await self._pace.step(
                    bodies_below(self._binding.blobs, prefix), BODIES_A_STEP
                ):
                    pass
            await self._binding.sweeping.mark_swept(run.run_id)
        if self._row_days and expired_for >= self._row_days * _DAY:
            now = self._clock.now()
            for run_id in await self._binding.sweeping.expire_run(run.run_id, now=now):
                message = DeleteMessage(run.job_id, run_id)
                await self._binding.queues.send(CONTROL_QUEUE, message)
