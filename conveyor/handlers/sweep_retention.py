"""Retention: queues go that outlived their runs, bodies when their results have expired, rows so
many days after that."""

from __future__ import annotations

from functools import partial

from conveyor.handlers.alone import alone
from conveyor.handlers.pacing import BODIES_A_STEP, Pace, Remove, bodies_below
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
ENDED_FOR = 3_600_000
"""Milliseconds that a run has ended before it is looked at: whoever ended it has dropped its queue
by then, or never will."""

_DAY = 86_400_000


class Retention:
    """Removes what is past its time, in runs that have ended.

    A queue goes with its run's end; where a worker was lost just then, it goes here, once. A result
    expires `result_ttl_days` after its scrape: its run's bodies go that long after the run's end,
    when the last of them has expired. `row_days` 0 keeps the rows.
    """

    def __init__(self, binding: Binding, clock: Clock, *, row_days: int) -> None:
        self._binding = binding
        self._clock = clock
        self._pace = Pace(clock)
        self._row_days = row_days
        self._looked_at: int | None = None
        self._after = ""
        self._rests_until = 0.0

    async def look(self, *, until: float) -> None:
        """Look at the ended runs, by id, where that is due; or go on with an unfinished look.

        Ends soon after the monotonic instant `until`, or its own budget, in the middle of a run if
        need be: with a step of removal at least.
        """
        now = self._clock.monotonic()
        if now < self._rests_until or not (self._after or self._is_due()):
            return
        until = min(until, now + BUDGET)
        while True:
            before = self._clock.now() - ENDED_FOR
            runs = await self._binding.sweeping.ended_runs(
                before=before, after=self._after, limit=PAGE
            )
            for run in runs:
                if not await self._age(run, until=until):
                    return
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

    async def _age(self, run: EndedRun, *, until: float) -> bool:
        """Remove what is due of a run; False where the time was over before that."""
        if not run.queue_dropped:
            drop = partial(self._drop_queue, run.run_id)
            await alone("dropping the queue of an ended run", drop)
        expired_for = self._clock.now() - run.ended_at - run.result_ttl_days * _DAY
        if expired_for < 0:
            return True
        if not run.swept:
            for days in LIFECYCLE_DAYS:
                prefix = run_prefix(run.job_id, run.run_id, days)
                if not await self._remove(bodies_below(self._binding.blobs, prefix), until=until):
                    return False
            await self._binding.sweeping.mark_swept(run.run_id)
        if self._row_days and expired_for >= self._row_days * _DAY:
            now = self._clock.now()
            for run_id in await self._binding.sweeping.expire_run(run.run_id, now=now):
                message = DeleteMessage(run.job_id, run_id)
                await self._binding.queues.send(CONTROL_QUEUE, message)
        return True

    async def _drop_queue(self, run_id: str) -> None:
        await self._binding.queues.drop_run(run_id)
        await self._binding.sweeping.mark_queue_dropped(run_id)

    async def _remove(self, remove: Remove, *, until: float) -> bool:
        """Remove step by step; False where the time was over before that. A rest that does not end
        in time is not waited for: no step of a later look comes before its end."""
        while (rest := await self._pace.step_without_rest(remove, BODIES_A_STEP)) is not None:
            self._rests_until = self._clock.monotonic() + rest
            if self._rests_until >= until:
                return False
            await self._clock.sleep(rest)
        return True
