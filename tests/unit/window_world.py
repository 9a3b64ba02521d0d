"""A run's queue under any order of writing, sending, receiving and finishing."""

from __future__ import annotations

import random
from dataclasses import dataclass

import anyio
import anyio.lowlevel

from conveyor.dev.queues import MemoryQueues
from conveyor.ports.queues import DEAD_LETTER_QUEUE, Delivery, run_queues
from conveyor.testing.clock import FakeClock
from tests.unit.window_rows import JOB, RUN, Store, task_of, tasks


@dataclass
class World:
    """A run whose rows are written, sent, received, finished and deleted in any order; checks at
    each step that nothing is doubled, and counts what was done."""

    window: int
    refusals: int
    draw: random.Random
    max_receives: int | None
    hosts: tuple[str, ...] = ()
    """Hosts of the run that have a queue of their own, beside one that has none."""

    def __post_init__(self) -> None:
        self.clock = FakeClock()
        self.store = Store(self.clock, seconds=0.01, refusals=self.refusals)
        self.store.hosts = (*self.hosts, "")
        self.names = run_queues(RUN, self.hosts)
        self.queues = MemoryQueues(
            self.store.unfinished_after,
            self.clock,
            task_hosts=self.store.task_hosts,
            window=self.window,
            max_receives=self.max_receives,
        )
        self.written = 0
        self.unsent: list[range] = []
        self.live: dict[str, tuple[Delivery, float]] = {}
        self.done: set[str] = set()
        self.dead: list[str] = []

    async def send(self) -> None:
        """Write and send the next rows, or keep them back and write others first."""
        block = range(self.written, self.written + self.draw.randint(1, 25))
        self.written = block.stop
        self.unsent.append(block)
        if self.draw.random() < 0.7:
            await self.send_one(self.draw.randrange(len(self.unsent)))

    async def send_one(self, position: int) -> None:
        block = self.unsent.pop(position)
        self.store.rows.update(tasks(block))
        if self.draw.random() < 0.3:
            await self.clock.sleep(self.draw.choice((0.005, 0.01, 0.02)))
        sent = tasks(block)
        hosts = self.store.hosts_of(sent) if self.hosts else ()
        await self.queues.send_tasks(JOB, RUN, sent, hosts, self.hosts)

    async def receive(self) -> None:
        visibility = self.draw.choice((1.0, 5.0, 30.0))
        with anyio.CancelScope() as scope, _Refusable():
            if self.draw.random() < 0.2:
                scope.cancel()
            batch = await self.queues.receive(
                self.draw.choice(self.names),
                limit=self.draw.randint(1, 10),
                visibility=visibility,
                wait=self.draw.choice((0.0, 0.0, 2.0)),
            )
            self.note(batch, visibility)

    def note(self, batch: list[Delivery], visibility: float) -> None:
        now = self.clock.monotonic()
        for delivery in batch:
            task = task_of(delivery)
            assert task not in self.done
            if self.max_receives is not None:
                assert delivery.receive_count <= self.max_receives
            if task in self.live:
                assert self.live[task][1] <= now
            self.live[task] = (delivery, now + visibility)

    async def finish(self) -> None:
        """End a received task as a worker does: first the row, later the message."""
        task = self.pick()
        if task is None:
            return
        delivery, _ = self.live.pop(task)
        self.store.rows.pop(int(task))
        self.done.add(task)
        await anyio.lowlevel.checkpoint()
        await self.queues.delete(delivery.queue, [delivery.receipt])

    async def hide(self) -> None:
        task = self.pick()
        if task is not None:
            seconds = self.draw.choice((0.0, 1.0, 20.0))
            delivery, _ = self.live[task]
            await self.queues.change_visibility(
                delivery.queue, [delivery.receipt], visibility=seconds
            )
            self.live[task] = (delivery, self.clock.monotonic() + seconds)

    def pick(self) -> str | None:
        """A task whose message is still hidden."""
        now = self.clock.monotonic()
        hidden = [task for task, (_, due) in self.live.items() if due > now]
        return self.draw.choice(hidden) if hidden else None

    async def pass_time(self) -> None:
        await self.clock.advance(self.draw.choice((0.005, 0.01, 1.0, 6.0, 40.0)))

    async def settle(self) -> None:
        """Send what was kept back, then work until nothing comes any more."""
        async with anyio.create_task_group() as group:
            while self.unsent:
                group.start_soon(self.send_one, 0)
                await self.clock.advance(0.05)
        self.store.refusals = 0
        for _ in range(400):
            await self.clock.advance(60)
            batch = [one for name in self.names for one in await self.receive_now(name)]
            self.note(batch, 1.0)
            while self.pick() is not None:
                await self.finish()
            if not batch and not any(map(self.queues.depth, self.names)):
                break
        await self.bury()

    async def bury(self) -> None:
        """Take note of every dead letter."""
        while batch := await self.queues.receive(DEAD_LETTER_QUEUE, limit=10, visibility=1.0):
            await self.queues.delete(DEAD_LETTER_QUEUE, [delivery.receipt for delivery in batch])
            self.dead += [task_of(delivery) for delivery in batch]

    async def receive_now(self, queue: str) -> list[Delivery]:
        batch: list[Delivery] = []

        async def receive() -> None:
            batch.extend(await self.queues.receive(queue, limit=10, visibility=1.0))

        async with anyio.create_task_group() as group:
            group.start_soon(receive)
            await self.clock.advance(0.5)
        return batch


class _Refusable:
    """Lets the store refuse a read, as a receiver that tries again would."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, ConnectionError)


STEPS = ("send", "receive", "receive", "finish", "finish", "hide", "pass_time")
