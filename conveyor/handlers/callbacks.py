"""Report runs to state machines: heartbeats while a run goes on, its result once it has ended."""

from __future__ import annotations

import logging

from msgspec import structs

from conveyor.domain.backoff import Backoff
from conveyor.domain.errors import ConveyorError
from conveyor.domain.run_events import RunFinished, build_run_event
from conveyor.domain.states import LIVE_RUN_STATES
from conveyor.ports.clock import Clock
from conveyor.ports.handler import Observer
from conveyor.ports.outbox import Callbacks, Outbox, OutboxEntry, TokenExpired
from conveyor.ports.records import JobLookup

RETRIES = Backoff(2.0, 300.0)
GIVE_UP_AFTER = 3 * 86_400.0
"""Seconds after which the end of a run is no longer sent, as for webhooks."""

_log = logging.getLogger("conveyor.handlers")


class StateMachines:
    """Deals with entries of callbacks.

    `heartbeat` is the number of seconds between two heartbeats of a run that goes on.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        outbox: Outbox,
        callbacks: Callbacks,
        jobs: JobLookup,
        observer: Observer,
        heartbeat: float,
    ) -> None:
        self._clock = clock
        self._outbox = outbox
        self._callbacks = callbacks
        self._jobs = jobs
        self._observer = observer
        self._heartbeat = heartbeat

    async def tell(self, entry: OutboxEntry) -> None:
        """Send a heartbeat or the result, by the state of the run."""
        if entry.ending is not None:
            await self._tell(entry, entry.ending)
        elif entry.run is not None and entry.run.status in LIVE_RUN_STATES:
            await self._say_alive(entry)
        else:
            await self._decide(entry)

    async def _say_alive(self, entry: OutboxEntry) -> None:
        assert entry.callback is not None
        try:
            await self._callbacks.send_heartbeat(entry.callback.task_token)
        except TokenExpired:
            await self._nobody(entry)
            return
        except ConveyorError as error:
            self._observer.callback_made("failed")
            _log.warning("a heartbeat for run %s failed: %s", entry.run_id, error)
        else:
            self._observer.callback_made("heartbeat")
        due_at = self._clock.now() + round(self._heartbeat * 1_000)
        await self._outbox.reschedule_entry(entry, due_at=due_at, attempts=0)

    async def _decide(self, entry: OutboxEntry) -> None:
        """Fix the payload of an entry, and send it, unless another worker has taken the entry."""
        now = self._clock.now()
        ending = build_run_event(
            entry.run,
            entry.ended_as,
            await self._jobs.find_job(entry.job_id),
            job_id=entry.job_id,
            run_id=entry.run_id,
            event_id=self._clock.new_id(),
            now=now,
        )
        if await self._outbox.fix_payload(entry, ending, now=now):
            await self._tell(structs.replace(entry, decided_at=now), ending)

    async def _tell(self, entry: OutboxEntry, ending: RunFinished) -> None:
        assert entry.callback is not None
        try:
            await self._send(entry.callback.task_token, ending)
        except TokenExpired:
            await self._nobody(entry)
        except ConveyorError as error:
            self._observer.callback_made("failed")
            await self._again(entry, error)
        else:
            self._observer.callback_made("failure" if ending.error else "success")
            await self._outbox.drop_entry(entry)

    async def _send(self, task_token: str, ending: RunFinished) -> None:
        if ending.error:
            await self._callbacks.send_failure(task_token, error=ending.error, cause=ending.event)
        else:
            await self._callbacks.send_success(task_token, output=ending.event)

    async def _nobody(self, entry: OutboxEntry) -> None:
        """Drop an entry that nobody waits for. A repetition ends here, too, if the answer to its
        first delivery was lost."""
        self._observer.callback_made("unwanted")
        _log.warning("nobody waits for run %s: dropped its callback", entry.run_id)
        await self._outbox.drop_entry(entry)

    async def _again(self, entry: OutboxEntry, error: ConveyorError) -> None:
        attempts = entry.attempts + 1
        now = self._clock.now()
        if now - entry.decided_at > GIVE_UP_AFTER * 1_000:
            _log.error("gave up the callback of run %s: %s", entry.run_id, error)
            await self._outbox.drop_entry(entry)
            return
        _log.warning("the callback of run %s failed: %s", entry.run_id, error)
        delay = RETRIES.spread(attempts, self._clock.random())
        await self._outbox.reschedule_entry(
            entry, due_at=now + round(delay * 1_000), attempts=attempts
        )
