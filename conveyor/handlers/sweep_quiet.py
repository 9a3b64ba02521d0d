"""Runs that have come to a standstill: counters set right, lost references sent again."""

from __future__ import annotations

from functools import partial

from conveyor.domain.states import LIVE_RUN_STATES
from conveyor.handlers.alone import alone
from conveyor.handlers.sweep_memory import Recently
from conveyor.ports.binding import Binding
from conveyor.ports.clock import Clock
from conveyor.ports.queues import run_queue
from conveyor.ports.sweeping import QuietRun

PIECE = 1_000
"""References read and sent at a time."""
PIECES = 100
"""Pieces sent for one run in one sweep; the next sweep goes on."""

_BEFORE_ALL = -1


class QuietRuns:
    """Looks after runs in which nothing has moved for `quiet_after` seconds.

    Sending a reference a second time is harmless: a claim tells whether there is work in it. Still
    no run's references are sent while its queue holds as many, nor twice within `quiet_after`.
    """

    def __init__(self, binding: Binding, clock: Clock, *, quiet_after: float) -> None:
        self._binding = binding
        self._clock = clock
        self._quiet_after = quiet_after
        self._recently = Recently(clock, seconds=quiet_after)
        self._onward: dict[tuple[str, str], int] = {}
        self._reached = ""

    async def look(self, *, until: float) -> None:
        """Go on where the last sweep reached its bound; then look at every quiet run, by id.

        Ends soon after the monotonic instant `until`, and the next look goes on behind the run that
        was looked at last.
        """
        for (job_id, run_id), after in list(self._onward.items()):
            send = partial(self._send, job_id, run_id, after=after, until=until)
            await alone("sweeping a quiet run", send)
            if self._clock.monotonic() >= until:
                break
        before = self._clock.now() - round(self._quiet_after * 1_000)
        runs = await self._binding.sweeping.quiet_runs(before=before)
        for run in sorted(runs, key=lambda run: (run.run_id <= self._reached, run.run_id)):
            if self._recently.first(run.run_id):
                await alone("sweeping a quiet run", partial(self._set_right, run, until=until))
                if self._clock.monotonic() >= until:
                    self._reached = run.run_id
                    return
        self._reached = ""

    async def _set_right(self, run: QuietRun, *, until: float) -> None:
        sweeping = self._binding.sweeping
        status = await sweeping.reconcile_run(run.run_id, now=self._clock.now())
        if status is None:
            return
        if status not in LIVE_RUN_STATES:
            await self._binding.queues.drop_run(run.run_id)
            self._binding.signals.run_changed(run.run_id)
            return
        due = await self._due(run.run_id, after=_BEFORE_ALL)
        if await self._binding.queues.count(run_queue(run.run_id)) < len(due):
            await self._send(run.job_id, run.run_id, after=_BEFORE_ALL, until=until)

    async def _send(self, job_id: str, run_id: str, *, after: int, until: float) -> None:
        """Send the references above `after`, up to a bound, and remember where it ended."""
        for _ in range(PIECES):
            due = await self._due(run_id, after=after)
            if due:
                await self._binding.queues.send_tasks(job_id, run_id, due)
                after = due[-1][0]
            if len(due) < PIECE:
                self._onward.pop((job_id, run_id), None)
                break
            self._onward[job_id, run_id] = after
            if self._clock.monotonic() >= until:
                break
        self._binding.signals.run_changed(run_id)

    async def _due(self, run_id: str, *, after: int) -> list[tuple[int, str]]:
        now = self._clock.now()
        return await self._binding.sweeping.due_references(
            run_id, after=after, limit=PIECE, now=now
        )
