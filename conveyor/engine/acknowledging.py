"""Acknowledging messages in batches, off the path of the slots."""

from __future__ import annotations

import anyio

from conveyor.engine.surviving import tell
from conveyor.ports.clock import Clock
from conveyor.ports.queues import MAX_BATCH, Queues

LINGER = 0.2
"""Seconds that an acknowledgement waits for others: a batch costs one call."""


class Acknowledger:
    """Collects receipts by queue and deletes them in batches.

    A message whose acknowledgement is lost, or late, comes again, and its claim tells that it is
    done. `run` ends with `stop`, when everything has been told.
    """

    def __init__(self, queues: Queues, clock: Clock) -> None:
        self._queues = queues
        self._clock = clock
        self._waiting: dict[str, list[str]] = {}
        self._some = anyio.Event()
        self._stopped = False

    async def add(self, queue: str, receipt: str) -> None:
        """Acknowledge soon; the one that fills a batch sends it."""
        receipts = self._waiting.setdefault(queue, [])
        receipts.append(receipt)
        if len(receipts) >= MAX_BATCH:
            await self._delete(queue, self._waiting.pop(queue))
        elif len(receipts) == 1:
            self._some.set()

    def stop(self) -> None:
        """Let `run` return once nothing waits."""
        self._stopped = True
        self._some.set()

    async def run(self) -> None:
        """Delete what has been added, again and again."""
        while True:
            await self._some.wait()
            if not self._waiting and self._stopped:
                return
            if not self._stopped:
                await self._clock.sleep(LINGER)
            self._some = anyio.Event()
            if self._stopped:
                self._some.set()
            waiting, self._waiting = self._waiting, {}
            for queue, receipts in waiting.items():
                await self._delete(queue, receipts)

    async def _delete(self, queue: str, receipts: list[str]) -> None:
        try:
            await self._queues.delete(queue, receipts)
        except Exception as error:
            tell("acknowledgements were lost", error)
