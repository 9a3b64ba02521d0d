"""Look over the outbox, and hand each due entry to whoever deals with its subscriber."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

from conveyor.aio.concurrency import for_each
from conveyor.aio.resilience import log_and_continue
from conveyor.ports.clock import Clock
from conveyor.ports.outbox import EntryKey, Outbox, OutboxEntry, Subscriber

PAGE = 100
"""Entries read at a time; a look goes on while there are as many."""
SIDE_BY_SIDE = 10
"""Entries dealt with at a time."""
LEASE = 60.0
"""Seconds that an entry stays with a worker that may have died."""

Tell = Callable[[OutboxEntry], Awaitable[None]]
"""Deal with a leased entry: drop it, or reschedule it."""

_log = logging.getLogger("conveyor.handlers")


class Notifier:
    """Deals with the due entries of the outbox. Any number of workers may do so at once.

    `tellers` has a function for each subscriber. `oldest` is how many seconds before it was met the
    longest ended run of the latest look had ended; 0 if that met none.
    """

    def __init__(self, clock: Clock, *, outbox: Outbox, tellers: Mapping[Subscriber, Tell]) -> None:
        self.oldest = 0.0
        self._oldest_met = 0.0
        self._clock = clock
        self._outbox = outbox
        self._tellers = tellers

    async def deliver(self) -> None:
        """Deal with every due entry once; log an entry that fails: its lease lapses, and then it is
        due again."""
        self._oldest_met = 0.0
        before: list[EntryKey] = []
        while True:
            due = await self._outbox.due_entries(now=self._clock.now(), limit=PAGE)
            await for_each(self._alone, due, limit=SIDE_BY_SIDE)
            self.oldest = self._oldest_met
            if len(due) < PAGE or due == before:
                return
            before = due

    async def _alone(self, key: EntryKey) -> None:
        await log_and_continue(
            _log, f"the {key.subscriber} of run {key.run_id} failed", lambda: self._deliver(key)
        )

    async def _deliver(self, key: EntryKey) -> None:
        now = self._clock.now()
        entry = await self._outbox.lease_entry(key, now=now, lapses_at=now + round(LEASE * 1_000))
        if entry is None:
            return
        if entry.ended_at and not entry.attempts:
            self._oldest_met = max(self._oldest_met, (now - entry.ended_at) / 1_000)
        await self._tellers[entry.subscriber](entry)
