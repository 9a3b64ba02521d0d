"""The queues port and the signals port within one process.

`run_queue` holds the messages; this module adds names, waiting, and refills from the store.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence

import anyio

from conveyor.aio.concurrency import wait_or_timeout
from conveyor.dev.run_queue import (
    Faults,
    MessageQueue,
    ReceiveLimit,
    RunQueue,
    Stretch,
)
from conveyor.ports.clock import Clock
from conveyor.ports.queues import (
    CONTROL_QUEUE,
    DEAD_LETTER_QUEUE,
    MAX_BATCH,
    Delivery,
    HasPolicy,
    Message,
    QueueMissing,
    Queues,
    Signals,
    no_policy,
    run_queue,
    run_queues,
)


class LocalSignals(Signals):
    """Hints between parts of one process on the same event loop."""

    def __init__(self) -> None:
        self._changed: set[str] = set()
        self._event = anyio.Event()
        self._on_halt: list[Callable[[str], None]] = []
        self._on_end: list[Callable[[], None]] = []

    def run_changed(self, run_id: str) -> None:
        self._changed.add(run_id)
        self._event.set()

    def run_ended(self, run_id: str) -> None:
        self.run_changed(run_id)
        for tell in self._on_end:
            tell()

    def on_end(self, tell: Callable[[], None]) -> None:
        self._on_end.append(tell)

    def run_halted(self, run_id: str) -> None:
        for give_up in self._on_halt:
            give_up(run_id)

    def on_halt(self, give_up: Callable[[str], None]) -> None:
        self._on_halt.append(give_up)

    def clear(self) -> None:
        """Forget the hints, and whom to tell: another worker takes the place of the present one."""
        self._changed.clear()
        self._on_halt.clear()
        self._on_end.clear()

    async def wait(self) -> set[str]:
        await self._event.wait()
        self._event = anyio.Event()
        changed, self._changed = self._changed, set()
        return changed


UnfinishedAfter = Callable[[str, int, int], Awaitable[list[tuple[int, str]]]]
"""The tasks port's method: (run_id, after, limit) to (index, task_id) of rows to be worked."""
TaskHosts = Callable[[str, Sequence[tuple[int, str]]], Awaitable[list[str]]]
"""The tasks port's method: a run's rows, (index, task_id) each, to their hosts."""


async def no_hosts(_run_id: str, tasks: Sequence[tuple[int, str]]) -> list[str]:
    """Know the host of no row."""
    return [""] * len(tasks)


class MemoryQueues(Queues):
    """Queues of one process. Their messages are lost with it; run queues come back from the rows.

    A run's queue keeps at most `window` references in memory and reads the others from
    `unfinished_after` when it runs low; it reads nothing before the first receive. The queues of a
    run with queues for its hosts read all references from there, and their hosts by `task_hosts`; a
    run that `has_policy` gets its hosts with what is read, too.
    `reorder` and `duplicates` are weaknesses for tests (see `Faults`). Belongs to one event loop.

    A message that is visible again after `max_receives` receives (None: no limit) goes to the
    dead-letter queue at the next receive, which counts its receives from 1. It stays there when its
    run's queue is dropped. In the rows its task is as unfinished as before: a reference to it comes
    again when it is sent again, when the run's queue is made again, and after a restart.
    """

    def __init__(
        self,
        unfinished_after: UnfinishedAfter,
        clock: Clock,
        *,
        task_hosts: TaskHosts = no_hosts,
        window: int = 10_000,
        reorder: int = 0,
        duplicates: float = 0.0,
        max_receives: int | None = None,
    ) -> None:
        self._clock = clock
        self._unfinished_after = unfinished_after
        self._task_hosts = task_hosts
        self.has_policy: HasPolicy = no_policy
        self._window = window
        self._faults: Faults | None = None
        if reorder or duplicates:
            self._faults = Faults(random=clock.random, reorder=reorder, duplicates=duplicates)
        self._runs: dict[str, RunQueue] = {}
        self._lanes: dict[str, tuple[str, ...]] = {}
        self._changed: dict[str, anyio.Event] = {}
        self._receipts = itertools.count(1).__next__
        self._limit: ReceiveLimit | None = None
        if max_receives is not None:
            self._limit = ReceiveLimit(receives=max_receives, move=self._give_up)
        self.clear()

    def clear(self) -> None:
        """Forget all messages, and the queues of all runs."""
        self._dead_letters = self._other(DEAD_LETTER_QUEUE, None)
        self._others = {
            CONTROL_QUEUE: self._other(CONTROL_QUEUE, self._limit),
            DEAD_LETTER_QUEUE: self._dead_letters,
        }
        self._runs.clear()
        self._lanes.clear()
        for queue in list(self._changed):
            self._notify(queue)

    async def open_run(self, job_id: str, run_id: str, hosts: Sequence[str] = ()) -> None:
        self._open_all(job_id, run_id, hosts)

    async def remake_run(self, job_id: str, run_id: str, hosts: Sequence[str] = ()) -> None:
        self._open_all(job_id, run_id, hosts)

    async def drop_run(self, run_id: str) -> None:
        for name in run_queues(run_id, self._lanes.pop(run_id, ())):
            self._runs.pop(name, None)
            self._notify(name)

    async def send_tasks(
        self,
        job_id: str,
        run_id: str,
        tasks: Sequence[tuple[int, str]],
        hosts: Sequence[str] = (),
        lanes: Sequence[str] = (),
    ) -> None:
        queues = self._open_all(job_id, run_id, lanes)
        if len(queues) == 1:
            queues[0].add(tasks, hosts)
            self._notify(queues[0].name)
            return
        parts = self._divided(run_id, tasks, hosts) if hosts else {}
        for queue in queues:
            # Without their hosts, the rows themselves will tell whose they are.
            queue.add_later(parts[queue.name][0] if hosts else tasks)
            self._notify(queue.name)

    async def send(self, queue: str, message: Message, *, delay: float = 0.0) -> None:
        found = self._find(queue)
        if found is None:
            if queue != run_queue(message.run_id):
                raise QueueMissing(queue)
            found = self._open(message.job_id, message.run_id)
        found.put(message, now=self._clock.monotonic(), delay=delay)
        self._notify(found.name)

    async def receive(
        self, queue: str, *, limit: int, visibility: float, wait: float = 0.0
    ) -> list[Delivery]:
        # A cancelled receive has taken nothing: nothing is awaited between taking and returning.
        limit = min(limit, MAX_BATCH)
        deadline = self._clock.monotonic() + wait
        while limit > 0:
            found = self._find(queue)
            if found is None:
                raise QueueMissing(queue)
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
                left = min(deadline, found.next_due() or deadline) - now
                await wait_or_timeout(self._event(queue), self._clock, left)
        return []

    async def delete(self, queue: str, receipts: Sequence[str]) -> None:
        found = self._find(queue)
        if found is not None:
            found.delete(receipts)
            if found.starved:
                self._notify(queue)

    async def change_visibility(
        self, queue: str, receipts: Sequence[str], *, visibility: float
    ) -> None:
        found = self._find(queue)
        if found is not None:
            found.change_visibility(receipts, visibility=visibility, now=self._clock.monotonic())
            self._notify(queue)

    def depth(self, queue: str) -> int:
        found = self._find(queue)
        return 0 if found is None else found.depth

    def visible_at(self, queue: str) -> float | None:
        """Return the monotonic instant from which a queue has a message to give, the present if it
        has one now or may find one in the store; None if nothing waits in it."""
        found = self._find(queue)
        return None if found is None else found.visible_at(self._clock.monotonic())

    async def count(self, queue: str) -> int:
        return self.depth(queue)

    def _find(self, queue: str) -> MessageQueue | None:
        return self._runs.get(queue) or self._others.get(queue)

    def _open_all(self, job_id: str, run_id: str, hosts: Sequence[str]) -> list[RunQueue]:
        """Return the queues of a run, its own first; make those that are missing. Those of hosts
        only ever become more, so the longest list is the latest."""
        queues = [self._open(job_id, run_id)]
        lanes = self._lanes.get(run_id, ())
        if len(hosts) > len(lanes):
            lanes = self._lanes[run_id] = tuple(hosts)
        for name in run_queues(run_id, lanes)[1:]:
            is_new = name not in self._runs
            queues.append(self._open(job_id, run_id, name))
            if is_new:
                queues[-1].begin_behind(queues[0].mark)
        return queues

    def _open(self, job_id: str, run_id: str, name: str = "") -> RunQueue:
        name = name or run_queue(run_id)
        found = self._runs.get(name)
        if found is None:
            found = self._runs[name] = RunQueue(
                job_id,
                run_id,
                window=self._window,
                receipts=self._receipts,
                faults=self._faults,
                receive_limit=self._limit,
                name=name,
            )
            self._notify(name)
        return found

    def _other(self, name: str, limit: ReceiveLimit | None) -> MessageQueue:
        return MessageQueue(name, receipts=self._receipts, faults=self._faults, receive_limit=limit)

    def _give_up(self, message: Message) -> None:
        self._dead_letters.put(message, now=self._clock.monotonic(), delay=0.0)
        self._notify(DEAD_LETTER_QUEUE)

    async def _refill(self, queue: MessageQueue) -> None:
        if not isinstance(queue, RunQueue):
            return
        if queue.run_id in self._lanes:
            await self._refill_together(queue)
            return
        refill = queue.begin_refill()
        rows: list[tuple[int, str]] | None = None
        hosts: Sequence[str] = ()
        try:
            found = await self._unfinished_after(queue.run_id, refill.after, refill.limit)
            if found and await self.has_policy(queue.run_id):
                hosts = await self._task_hosts(queue.run_id, found)
            rows = found
            if queue.run_id in self._lanes:
                # Hosts of the run have queues since: their rows are not for this one.
                rows = None
        finally:
            queue.end_refill(rows, hosts)
            self._notify(queue.name)

    async def _refill_together(self, queue: RunQueue) -> None:
        """Refill a queue of a run with several, and the others that have come equally far."""
        run_id, readers = queue.run_id, [queue]
        refill = queue.begin_refill()
        for name in run_queues(run_id, self._lanes[run_id]):
            other = self._runs.get(name)
            if other is not None and other.may_join(refill):
                other.begin_refill()
                readers.append(other)
        parts: dict[str, Stretch] | None = None
        try:
            rows = await self._unfinished_after(run_id, refill.after, refill.limit)
            hosts = await self._task_hosts(run_id, rows)
            end, is_last = rows[-1][0] if rows else refill.after, len(rows) < refill.limit
            # A host that has got its queue meanwhile reads for itself.
            parts = {
                name: Stretch(rows=some, hosts=theirs, end=end, is_last=is_last)
                for name, (some, theirs) in self._divided(run_id, rows, hosts).items()
            }
        finally:
            for reader in readers:
                reader.end_stretch(None if parts is None else parts.get(reader.name))
                self._notify(reader.name)

    def _divided(
        self, run_id: str, tasks: Sequence[tuple[int, str]], hosts: Sequence[str]
    ) -> dict[str, tuple[list[tuple[int, str]], list[str]]]:
        """Divide references and their hosts among the queues of a run."""
        lanes = self._lanes.get(run_id, ())
        own, *others = run_queues(run_id, lanes)
        name_of = dict(zip(lanes, others, strict=True))
        parts: dict[str, tuple[list[tuple[int, str]], list[str]]] = {
            name: ([], []) for name in (own, *others)
        }
        for task, host in zip(tasks, hosts, strict=True):
            some, theirs = parts[name_of.get(host, own)]
            some.append(task)
            theirs.append(host)
        return parts

    def _event(self, queue: str) -> anyio.Event:
        event = self._changed.get(queue)
        if event is None:
            event = self._changed[queue] = anyio.Event()
        return event

    def _notify(self, queue: str) -> None:
        event = self._changed.pop(queue, None)
        if event is not None:
            event.set()
