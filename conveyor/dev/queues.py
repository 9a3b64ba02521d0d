"""The queues port in memory: waiting, refills and names around `MessageQueue` and `RunQueue`."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence

import anyio

from conveyor.dev.message_queue import Faults, MessageQueue
from conveyor.dev.run_queue import RunQueue
from conveyor.ports.clock import Clock
from conveyor.ports.queues import MAX_BATCH, Delivery, Message, run_queue

UnfinishedAfter = Callable[[str, int, int], Awaitable[list[tuple[int, str]]]]
"""The tasks port's method: (run_id, after, limit) to (index, task_id) of rows to be worked."""

_RUN_PREFIX = run_queue("")


class MemoryQueues:
    """Queues of one process. What they hold is lost with it; run queues come back from the rows.

    A run's queue keeps at most `window` references in memory and reads the others from
    `unfinished_after` when it runs low: nothing before the first receive. `reorder` and
    `duplicates` are weaknesses for tests (see `Faults`). Belongs to one event loop.
    """

    def __init__(
        self,
        unfinished_after: UnfinishedAfter,
        clock: Clock,
        *,
        window: int = 10_000,
        reorder: int = 0,
        duplicates: float = 0.0,
    ) -> None:
        self._clock = clock
        self._unfinished_after = unfinished_after
        self._window = window
        self._faults: Faults | None = None
        if reorder or duplicates:
            self._faults = Faults(random=clock.random, reorder=reorder, duplicates=duplicates)
        self._runs: dict[str, RunQueue] = {}
        self._others: dict[str, MessageQueue] = {}
        self._changed: dict[str, anyio.Event] = {}
        self._receipts = itertools.count(1).__next__

    async def open_run(self, job_id: str, run_id: str) -> None:
        """Make a run's queue ready; reads nothing."""
        self._open(job_id, run_id)

    async def drop_run(self, run_id: str) -> None:
        """Remove a run's queue; a receive that waits on it returns."""
        name = run_queue(run_id)
        self._runs.pop(name, None)
        self._notify(name)

    async def send_tasks(self, job_id: str, run_id: str, tasks: Sequence[tuple[int, str]]) -> None:
        """Enqueue references to rows that are written; those beyond the window stay in the
        store."""
        queue = self._open(job_id, run_id)
        queue.add(tasks)
        self._notify(queue.name)

    async def send(self, queue: str, message: Message, *, delay: float = 0.0) -> None:
        """Enqueue one message, to be seen after `delay` seconds."""
        found = self._find(queue)
        if found is None:
            found = self._open(message.job_id, message.run_id)
        found.put(message, now=self._clock.monotonic(), delay=delay)
        self._notify(found.name)

    async def receive(
        self, queue: str, *, limit: int, visibility: float, wait: float = 0.0
    ) -> list[Delivery]:
        """Up to `limit` messages, hidden for `visibility` seconds; see the port.

        A run's queue that does not exist gives nothing at once, whatever `wait` is. A cancelled
        receive has taken nothing: nothing is awaited between taking and returning.
        """
        limit = min(limit, MAX_BATCH)
        deadline = self._clock.monotonic() + wait
        while (found := self._find(queue)) is not None and limit > 0:
            if found.starved and not found.refilling:
                await self._refill(found)
                if self._find(queue) is not found:
                    continue
            now = self._clock.monotonic()
            batch = found.take(limit, visibility=visibility, now=now)
            if batch:
                return batch
            if found.refilling:
                await self._event(queue).wait()
            elif not found.starved:
                if now >= deadline:
                    return []
                await self._wait(queue, min(deadline, found.next_due() or deadline) - now)
        return []

    async def delete(self, queue: str, receipts: Sequence[str]) -> None:
        """Acknowledge; void receipts are passed over."""
        found = self._find(queue)
        if found is not None:
            found.delete(receipts)
            if found.starved:
                self._notify(queue)

    async def change_visibility(
        self, queue: str, receipts: Sequence[str], *, visibility: float
    ) -> None:
        """Hide received messages from now on; those that have become visible are passed over."""
        found = self._find(queue)
        if found is not None:
            found.change_visibility(receipts, visibility=visibility, now=self._clock.monotonic())
            self._notify(queue)

    def depth(self, queue: str) -> int:
        """About how many messages wait; at least 1 where a run may have rows not read yet."""
        found = self._runs.get(queue) or self._others.get(queue)
        return 0 if found is None else found.depth

    def _find(self, queue: str) -> MessageQueue | None:
        """A queue by name; one that is not a run's comes into being when it is first named."""
        found: MessageQueue | None = self._runs.get(queue) or self._others.get(queue)
        if found is None and not queue.startswith(_RUN_PREFIX):
            found = MessageQueue(queue, receipts=self._receipts, faults=self._faults)
            self._others[queue] = found
        return found

    def _open(self, job_id: str, run_id: str) -> RunQueue:
        name = run_queue(run_id)
        found = self._runs.get(name)
        if found is None:
            found = self._runs[name] = RunQueue(
                job_id, run_id, window=self._window, receipts=self._receipts, faults=self._faults
            )
            self._notify(name)
        return found

    async def _refill(self, queue: MessageQueue) -> None:
        if not isinstance(queue, RunQueue):
            return
        refill = queue.begin_refill()
        rows: list[tuple[int, str]] | None = None
        try:
            rows = await self._unfinished_after(queue.run_id, refill.after, refill.limit)
        finally:
            queue.end_refill(rows)
            self._notify(queue.name)

    async def _wait(self, queue: str, seconds: float) -> None:
        """Return after `seconds`, or when something about the queue has changed."""
        changed = self._event(queue)
        async with anyio.create_task_group() as group:

            async def give_up() -> None:
                await self._clock.sleep(seconds)
                group.cancel_scope.cancel()

            group.start_soon(give_up)
            await changed.wait()
            group.cancel_scope.cancel()

    def _event(self, queue: str) -> anyio.Event:
        event = self._changed.get(queue)
        if event is None:
            event = self._changed[queue] = anyio.Event()
        return event

    def _notify(self, queue: str) -> None:
        event = self._changed.pop(queue, None)
        if event is not None:
            event.set()
