"""The window of a run's queue: bounded, refilled from the rows, and never losing a reference."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.dev.queues import MemoryQueues
from conveyor.dev.run_queue import RunQueue
from conveyor.ports.queues import Delivery, TaskMessage, run_queue
from conveyor.testing.clock import FakeClock

JOB, RUN = "JOB", "RUN"
QUEUE = run_queue(RUN)


def _tasks(indexes: range) -> list[tuple[int, str]]:
    return [(index, f"{index:026}") for index in indexes]


def _queue(window: int) -> RunQueue:
    return RunQueue(JOB, RUN, window=window, receipts=itertools.count(1).__next__, faults=None)


@dataclass
class Store:
    """Rows to be worked, by index; a read takes `seconds` and shows what was there at its start."""

    clock: FakeClock
    seconds: float = 0.0
    rows: dict[int, str] = field(default_factory=dict)
    reads: int = 0
    refusals: int = 0

    async def unfinished_after(self, _run: str, after: int, limit: int) -> list[tuple[int, str]]:
        self.reads += 1
        found = [(index, self.rows[index]) for index in sorted(self.rows) if index > after][:limit]
        await self.clock.sleep(self.seconds)
        if self.refusals:
            self.refusals -= 1
            raise ConnectionError
        return found


async def _take_all(queues: MemoryQueues, store: Store) -> list[int]:
    taken = []
    while batch := await queues.receive(QUEUE, limit=10, visibility=60):
        for delivery in batch:
            assert isinstance(delivery.message, TaskMessage)
            index = int(delivery.message.task_id)
            taken.append(index)
            store.rows.pop(index, None)
        await queues.delete(QUEUE, [delivery.receipt for delivery in batch])
    return taken


def test_a_send_beyond_the_window_keeps_only_the_window() -> None:
    queue = _queue(100)
    for start in range(0, 100_000, 10_000):
        queue.add(_tasks(range(start, start + 10_000)))
    assert queue.in_memory == len(queue._task_ids) == len(queue._indexes) == 100
    assert queue.depth == 100_000


async def test_the_window_moves_over_all_rows_and_reads_each_about_once() -> None:
    clock = FakeClock()
    store = Store(clock, rows=dict(_tasks(range(5_000))))
    queues = MemoryQueues(store.unfinished_after, clock, window=400)
    await queues.send_tasks(JOB, RUN, _tasks(range(5_000)))
    assert await _take_all(queues, store) == list(range(5_000))
    assert store.reads <= 5_000 // 50 + 2


async def test_opening_reads_nothing_until_the_first_receive() -> None:
    clock = FakeClock()
    store = Store(clock, rows=dict(_tasks(range(30))))
    queues = MemoryQueues(store.unfinished_after, clock, window=100)
    await queues.open_run(JOB, RUN)
    assert store.reads == 0
    assert queues.depth(QUEUE) == 1
    assert await _take_all(queues, store) == list(range(30))
    assert queues.depth(QUEUE) == 0


async def test_a_drained_run_is_not_read_again() -> None:
    clock = FakeClock()
    store = Store(clock, rows=dict(_tasks(range(30))))
    queues = MemoryQueues(store.unfinished_after, clock, window=100)
    await queues.send_tasks(JOB, RUN, _tasks(range(30)))
    await _take_all(queues, store)
    reads = store.reads
    for _ in range(100):
        assert await queues.receive(QUEUE, limit=10, visibility=60) == []
    assert store.reads == reads <= 2


async def test_rows_with_gaps_come_from_the_store() -> None:
    clock = FakeClock()
    store = Store(clock, rows=dict(_tasks(range(0, 90, 3))))
    queues = MemoryQueues(store.unfinished_after, clock, window=20)
    await queues.send_tasks(JOB, RUN, _tasks(range(0, 90, 3)))
    assert await _take_all(queues, store) == list(range(0, 90, 3))


async def test_a_batch_written_late_but_with_smaller_indexes_is_not_lost() -> None:
    clock = FakeClock()
    store = Store(clock, rows=dict(_tasks(range(100, 130))))
    queues = MemoryQueues(store.unfinished_after, clock, window=100)
    await queues.send_tasks(JOB, RUN, _tasks(range(100, 130)))
    first = await queues.receive(QUEUE, limit=10, visibility=60)
    store.rows.update(_tasks(range(100)))
    await queues.send_tasks(JOB, RUN, _tasks(range(100)))
    rest = await _take_all(queues, store)
    assert len(first) == 10
    assert sorted(rest) == [*range(100), *range(110, 130)]


async def test_sending_what_is_in_the_window_or_done_doubles_nothing() -> None:
    clock = FakeClock()
    store = Store(clock, rows=dict(_tasks(range(60))))
    queues = MemoryQueues(store.unfinished_after, clock, window=100)
    await queues.open_run(JOB, RUN)
    done = await queues.receive(QUEUE, limit=10, visibility=60)
    for index in range(10):
        del store.rows[index]
    await queues.delete(QUEUE, [delivery.receipt for delivery in done])
    in_flight = await queues.receive(QUEUE, limit=5, visibility=60)
    for _ in range(2):
        await queues.send_tasks(JOB, RUN, _tasks(range(60)))
    assert await _take_all(queues, store) == list(range(15, 60))
    assert len(in_flight) == 5


async def test_once_caught_up_what_follows_goes_straight_in_again() -> None:
    clock = FakeClock()
    store = Store(clock, rows=dict(_tasks(range(10, 20))))
    queues = MemoryQueues(store.unfinished_after, clock, window=100)
    await queues.send_tasks(JOB, RUN, _tasks(range(10, 20)))
    await _take_all(queues, store)
    store.rows.update(_tasks(range(10)))
    await queues.send_tasks(JOB, RUN, _tasks(range(10)))
    await _take_all(queues, store)
    reads = store.reads
    await queues.send_tasks(JOB, RUN, _tasks(range(20, 50)))
    assert await _take_all(queues, store) == list(range(20, 50))
    assert store.reads == reads


async def test_a_window_full_of_hidden_messages_makes_room_when_one_is_deleted() -> None:
    clock = FakeClock()
    store = Store(clock, rows=dict(_tasks(range(11))))
    queues = MemoryQueues(store.unfinished_after, clock, window=10)
    await queues.open_run(JOB, RUN)
    batch = await queues.receive(QUEUE, limit=10, visibility=600)
    assert await queues.receive(QUEUE, limit=10, visibility=600) == []
    late: list[Delivery] = []

    async def wait() -> None:
        late.extend(await queues.receive(QUEUE, limit=10, visibility=600, wait=20))

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await clock.advance(1)
        assert late == []
        await queues.delete(QUEUE, [batch[0].receipt])
        await clock.advance(1)
        assert [delivery.message for delivery in late] == [TaskMessage(JOB, RUN, f"{10:026}")]


async def test_one_receiver_refills_while_the_others_take_what_is_there() -> None:
    clock = FakeClock()
    store = Store(clock, seconds=1.0, rows=dict(_tasks(range(1_000))))
    queues = MemoryQueues(store.unfinished_after, clock, window=160)
    await queues.send_tasks(JOB, RUN, _tasks(range(160)))
    for _ in range(15):
        await queues.receive(QUEUE, limit=10, visibility=600)
    await queues.delete(QUEUE, [str(receipt) for receipt in range(1, 150)])
    await queues.receive(QUEUE, limit=1, visibility=600)
    sizes: list[int] = []

    async def receive() -> None:
        sizes.append(len(await queues.receive(QUEUE, limit=5, visibility=600)))

    async with anyio.create_task_group() as group:
        group.start_soon(receive)
        await clock.advance(0)
        assert (sizes, store.reads) == ([], 1)
        group.start_soon(receive)
        await clock.advance(0)
        assert (sizes, store.reads) == ([5], 1)
        await clock.advance(1)
    assert sizes == [5, 5]


async def test_a_queue_dropped_during_a_refill_gives_nothing() -> None:
    clock = FakeClock()
    store = Store(clock, seconds=1.0, rows=dict(_tasks(range(5))))
    queues = MemoryQueues(store.unfinished_after, clock, window=10)
    await queues.open_run(JOB, RUN)
    received: list[list[Delivery]] = []

    async def receive() -> None:
        received.append(await queues.receive(QUEUE, limit=10, visibility=60, wait=20))

    async with anyio.create_task_group() as group:
        group.start_soon(receive)
        group.start_soon(receive)
        await clock.advance(0.5)
        await queues.drop_run(RUN)
        await clock.advance(1)
        assert received == [[], []]


def test_renewing_for_hours_keeps_the_record_of_hidden_messages_small() -> None:
    queue = _queue(100)
    queue.add(_tasks(range(50)))
    receipts = []
    for _ in range(5):
        receipts += [held.receipt for held in queue.take(10, visibility=60, now=0.0)]
    for beat in range(5_000):
        queue.change_visibility(receipts, visibility=60, now=beat * 0.001)
    assert queue._in_hidden <= 4 * 50 + 1_024 + 50
    assert len(queue._hidden) <= 1_500
    assert queue.take(10, visibility=60, now=59.0) == []
    assert len(queue.take(10, visibility=60, now=65.0)) == 10


@dataclass
class World:
    """A run whose rows are written, sent, received, finished and deleted in any order; checks at
    each step that nothing is doubled, and counts what was done."""

    window: int
    refusals: int
    draw: random.Random

    def __post_init__(self) -> None:
        self.clock = FakeClock()
        self.store = Store(self.clock, seconds=0.01, refusals=self.refusals)
        self.queues = MemoryQueues(self.store.unfinished_after, self.clock, window=self.window)
        self.written = 0
        self.unsent: list[range] = []
        self.live: dict[str, tuple[str, float]] = {}
        self.done: set[str] = set()

    async def send(self) -> None:
        """Write and send the next rows, or keep them back and write others first."""
        block = range(self.written, self.written + self.draw.randint(1, 25))
        self.written = block.stop
        self.unsent.append(block)
        if self.draw.random() < 0.7:
            await self.send_one(self.draw.randrange(len(self.unsent)))

    async def send_one(self, position: int) -> None:
        block = self.unsent.pop(position)
        self.store.rows.update(_tasks(block))
        if self.draw.random() < 0.3:
            await self.clock.sleep(self.draw.choice((0.005, 0.01, 0.02)))
        await self.queues.send_tasks(JOB, RUN, _tasks(block))

    async def receive(self) -> None:
        visibility = self.draw.choice((1.0, 5.0, 30.0))
        with anyio.CancelScope() as scope, _Refusable():
            if self.draw.random() < 0.2:
                scope.cancel()
            batch = await self.queues.receive(
                QUEUE,
                limit=self.draw.randint(1, 10),
                visibility=visibility,
                wait=self.draw.choice((0.0, 0.0, 2.0)),
            )
            self.note(batch, visibility)

    def note(self, batch: list[Delivery], visibility: float) -> None:
        now = self.clock.monotonic()
        for delivery in batch:
            assert isinstance(delivery.message, TaskMessage)
            task = delivery.message.task_id
            assert task not in self.done
            if task in self.live:
                assert self.live[task][1] <= now
            self.live[task] = (delivery.receipt, now + visibility)

    async def finish(self) -> None:
        """End a received task as a worker does: first the row, later the message."""
        task = self.pick()
        if task is None:
            return
        receipt, _ = self.live.pop(task)
        self.store.rows.pop(int(task))
        self.done.add(task)
        await anyio.lowlevel.checkpoint()
        await self.queues.delete(QUEUE, [receipt])

    async def hide(self) -> None:
        task = self.pick()
        if task is not None:
            seconds = self.draw.choice((0.0, 1.0, 20.0))
            receipt, _ = self.live[task]
            await self.queues.change_visibility(QUEUE, [receipt], visibility=seconds)
            self.live[task] = (receipt, self.clock.monotonic() + seconds)

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
            batch = await self.receive_now()
            self.note(batch, 1.0)
            while self.pick() is not None:
                await self.finish()
            if not batch and not self.store.rows:
                return

    async def receive_now(self) -> list[Delivery]:
        batch: list[Delivery] = []

        async def receive() -> None:
            batch.extend(await self.queues.receive(QUEUE, limit=10, visibility=1.0))

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


@pytest.mark.parametrize("window", [10, 40])
@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.sampled_from(STEPS), min_size=20, max_size=150),
    refusals=st.integers(0, 2),
    seed=st.integers(0, 2**32),
)
def test_no_reference_is_lost_or_doubled(
    window: int, steps: list[str], refusals: int, seed: int
) -> None:
    async def scenario() -> None:
        world = World(window, refusals, random.Random(seed))
        await world.queues.open_run(JOB, RUN)
        async with anyio.create_task_group() as group:
            for step in steps:
                if step in ("send", "receive"):
                    group.start_soon(getattr(world, step))
                else:
                    await getattr(world, step)()
                assert world.queues._runs[QUEUE].in_memory <= window
            await world.clock.advance(100)
        await world.settle()
        assert len(world.done) == world.written
        assert world.store.rows == {}
        assert world.clock.pending == 0

    asyncio.run(scenario())
