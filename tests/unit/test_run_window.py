"""The window of a run's queue: bounded, refilled from the rows, and never losing a reference."""

from __future__ import annotations

import asyncio
import itertools
import random

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.dev.queues import MemoryQueues
from conveyor.dev.run_queue import RunQueue
from conveyor.ports.queues import (
    CONTROL_QUEUE,
    DEAD_LETTER_QUEUE,
    DeleteMessage,
    Delivery,
    QueueMissing,
    TaskMessage,
    run_queue,
    run_queues,
)
from conveyor.testing.clock import FakeClock
from tests.unit.window_rows import JOB, QUEUE, RUN, Store, indexes_of, take_all, tasks
from tests.unit.window_world import STEPS, World


def _queue(window: int) -> RunQueue:
    return RunQueue(JOB, RUN, window=window, receipts=itertools.count(1).__next__, faults=None)


@pytest.mark.guarantee("G18")
def test_a_send_beyond_the_window_keeps_only_the_window() -> None:
    queue = _queue(100)
    for start in range(0, 100_000, 10_000):
        queue.add(tasks(range(start, start + 10_000)))
    assert queue.in_memory == len(queue._task_ids) == len(queue._indexes) == 100
    assert queue.depth == 100_000


async def test_the_window_moves_over_all_rows_and_reads_each_about_once() -> None:
    clock = FakeClock()
    store = Store(clock, rows=dict(tasks(range(5_000))))
    queues = MemoryQueues(store.unfinished_after, clock, window=400)
    await queues.send_tasks(JOB, RUN, tasks(range(5_000)))
    assert await take_all(queues, store) == list(range(5_000))
    assert store.reads <= 5_000 // 50 + 2


@pytest.mark.guarantee("G18")
async def test_opening_reads_nothing_until_the_first_receive() -> None:
    clock = FakeClock()
    store = Store(clock, rows=dict(tasks(range(30))))
    queues = MemoryQueues(store.unfinished_after, clock, window=100)
    await queues.open_run(JOB, RUN)
    assert store.reads == 0
    assert queues.depth(QUEUE) == 1
    assert await take_all(queues, store) == list(range(30))
    assert queues.depth(QUEUE) == 0


async def test_a_queue_tells_when_it_has_a_message_to_give() -> None:
    """A clock that a caller moves stops there, and nowhere for a queue without one."""
    clock = FakeClock()
    store = Store(clock, rows=dict(tasks(range(1))))
    queues = MemoryQueues(store.unfinished_after, clock, window=100)
    assert queues.visible_at(CONTROL_QUEUE) is None
    await queues.send(CONTROL_QUEUE, DeleteMessage(JOB, RUN), delay=5.0)
    assert queues.visible_at(CONTROL_QUEUE) == clock.monotonic() + 5.0
    await clock.advance(6.0)
    assert queues.visible_at(CONTROL_QUEUE) == clock.monotonic()
    [held] = await queues.receive(CONTROL_QUEUE, limit=1, visibility=60)
    assert queues.visible_at(CONTROL_QUEUE) == clock.monotonic() + 60
    await queues.delete(CONTROL_QUEUE, [held.receipt])
    assert queues.visible_at(CONTROL_QUEUE) is None


async def test_a_drained_run_is_not_read_again() -> None:
    clock = FakeClock()
    store = Store(clock, rows=dict(tasks(range(30))))
    queues = MemoryQueues(store.unfinished_after, clock, window=100)
    await queues.send_tasks(JOB, RUN, tasks(range(30)))
    await take_all(queues, store)
    reads = store.reads
    for _ in range(100):
        assert await queues.receive(QUEUE, limit=10, visibility=60) == []
    assert store.reads == reads <= 2


async def test_rows_with_gaps_come_from_the_store() -> None:
    clock = FakeClock()
    store = Store(clock, rows=dict(tasks(range(0, 90, 3))))
    queues = MemoryQueues(store.unfinished_after, clock, window=20)
    await queues.send_tasks(JOB, RUN, tasks(range(0, 90, 3)))
    assert await take_all(queues, store) == list(range(0, 90, 3))


async def test_a_batch_written_late_but_with_smaller_indexes_is_not_lost() -> None:
    clock = FakeClock()
    store = Store(clock, rows=dict(tasks(range(100, 130))))
    queues = MemoryQueues(store.unfinished_after, clock, window=100)
    await queues.send_tasks(JOB, RUN, tasks(range(100, 130)))
    first = await queues.receive(QUEUE, limit=10, visibility=60)
    store.rows.update(tasks(range(100)))
    await queues.send_tasks(JOB, RUN, tasks(range(100)))
    rest = await take_all(queues, store)
    assert len(first) == 10
    assert sorted(rest) == [*range(100), *range(110, 130)]


async def test_sending_what_is_in_the_window_or_done_doubles_nothing() -> None:
    clock = FakeClock()
    store = Store(clock, rows=dict(tasks(range(60))))
    queues = MemoryQueues(store.unfinished_after, clock, window=100)
    await queues.open_run(JOB, RUN)
    done = await queues.receive(QUEUE, limit=10, visibility=60)
    for index in range(10):
        del store.rows[index]
    await queues.delete(QUEUE, [delivery.receipt for delivery in done])
    in_flight = await queues.receive(QUEUE, limit=5, visibility=60)
    for _ in range(2):
        await queues.send_tasks(JOB, RUN, tasks(range(60)))
    assert await take_all(queues, store) == list(range(15, 60))
    assert len(in_flight) == 5


async def test_once_caught_up_what_follows_goes_straight_in_again() -> None:
    clock = FakeClock()
    store = Store(clock, rows=dict(tasks(range(10, 20))))
    queues = MemoryQueues(store.unfinished_after, clock, window=100)
    await queues.send_tasks(JOB, RUN, tasks(range(10, 20)))
    await take_all(queues, store)
    store.rows.update(tasks(range(10)))
    await queues.send_tasks(JOB, RUN, tasks(range(10)))
    await take_all(queues, store)
    reads = store.reads
    await queues.send_tasks(JOB, RUN, tasks(range(20, 50)))
    assert await take_all(queues, store) == list(range(20, 50))
    assert store.reads == reads


async def test_a_window_full_of_hidden_messages_makes_room_when_one_is_deleted() -> None:
    clock = FakeClock()
    store = Store(clock, rows=dict(tasks(range(11))))
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
    store = Store(clock, seconds=1.0, rows=dict(tasks(range(1_000))))
    queues = MemoryQueues(store.unfinished_after, clock, window=160)
    await queues.send_tasks(JOB, RUN, tasks(range(160)))
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


async def test_a_queue_dropped_during_a_refill_is_missing() -> None:
    clock = FakeClock()
    store = Store(clock, seconds=1.0, rows=dict(tasks(range(5))))
    queues = MemoryQueues(store.unfinished_after, clock, window=10)
    await queues.open_run(JOB, RUN)
    missing: list[QueueMissing] = []

    async def receive() -> None:
        with pytest.raises(QueueMissing) as raised:
            await queues.receive(QUEUE, limit=10, visibility=60, wait=20)
        missing.append(raised.value)

    async with anyio.create_task_group() as group:
        group.start_soon(receive)
        group.start_soon(receive)
        await clock.advance(0.5)
        await queues.drop_run(RUN)
        await clock.advance(1)
    assert len(missing) == 2


async def test_a_window_full_of_dead_letters_makes_room_for_the_rows_behind() -> None:
    clock = FakeClock()
    store = Store(clock, rows=dict(tasks(range(25))))
    queues = MemoryQueues(store.unfinished_after, clock, window=10, max_receives=1)
    await queues.open_run(JOB, RUN)
    seen = []
    for expected in (10, 10, 5, 0):
        batch = await queues.receive(QUEUE, limit=10, visibility=5)
        assert len(batch) == expected == queues._runs[QUEUE].in_memory
        seen += indexes_of(batch)
        await clock.advance(5)
    assert seen == list(range(25))
    assert (queues.depth(QUEUE), queues.depth(DEAD_LETTER_QUEUE)) == (0, 25)


async def test_a_read_that_goes_back_passes_dead_letters_over_until_they_are_sent_again() -> None:
    clock = FakeClock()
    store = Store(clock, rows=dict(tasks(range(10, 20))))
    queues = MemoryQueues(store.unfinished_after, clock, window=100, max_receives=1)
    await queues.send_tasks(JOB, RUN, tasks(range(10, 20)))
    await queues.receive(QUEUE, limit=10, visibility=5)
    await clock.advance(5)
    assert await queues.receive(QUEUE, limit=10, visibility=5) == []
    store.rows.update(tasks(range(10)))
    await queues.send_tasks(JOB, RUN, tasks(range(10)))
    assert await take_all(queues, store) == list(range(10))
    await queues.send_tasks(JOB, RUN, tasks(range(13, 16)))
    assert await take_all(queues, store) == [13, 14, 15]
    assert sorted(store.rows) == [10, 11, 12, 16, 17, 18, 19]


async def test_dead_letters_come_from_the_rows_after_a_restart() -> None:
    clock = FakeClock()
    store = Store(clock, rows=dict(tasks(range(5))))
    for _ in range(2):
        queues = MemoryQueues(store.unfinished_after, clock, window=100, max_receives=1)
        await queues.open_run(JOB, RUN)
        assert len(await queues.receive(QUEUE, limit=10, visibility=5)) == 5
        await clock.advance(5)
        assert await queues.receive(QUEUE, limit=10, visibility=5) == []
        assert queues.depth(DEAD_LETTER_QUEUE) == 5


def test_renewing_for_hours_keeps_the_record_of_hidden_messages_small() -> None:
    queue = _queue(100)
    queue.add(tasks(range(50)))
    receipts = []
    for _ in range(5):
        receipts += [held.receipt for held in queue.take(10, visibility=60, now=0.0)]
    for beat in range(5_000):
        queue.change_visibility(receipts, visibility=60, now=beat * 0.001)
    assert queue._in_hidden <= 4 * 50 + 1_024 + 50
    assert len(queue._hidden) <= 1_500
    assert queue.take(10, visibility=60, now=59.0) == []
    assert len(queue.take(10, visibility=60, now=65.0)) == 10


HOSTS = ("a:80", "b:80", "c:80")
LANES = HOSTS[:2]


def _queues_of_hosts(store: Store, *, window: int) -> MemoryQueues:
    store.hosts = HOSTS
    return MemoryQueues(
        store.unfinished_after, store.clock, task_hosts=store.task_hosts, window=window
    )


@pytest.mark.guarantee("G18")
async def test_the_queues_of_hosts_together_read_each_row_about_once() -> None:
    store = Store(FakeClock(), rows=dict(tasks(range(3_000))))
    queues = _queues_of_hosts(store, window=2_000)
    await queues.open_run(JOB, RUN, LANES)
    names = run_queues(RUN, LANES)
    taken = {name: await take_all(queues, store, name) for name in names}
    assert {name: sorted(some) for name, some in taken.items()} == {
        names[1]: list(range(0, 3_000, 3)),
        names[2]: list(range(1, 3_000, 3)),
        names[0]: list(range(2, 3_000, 3)),
    }
    # Each read served all three.
    assert store.reads <= 3_000 // 250 + 3


async def test_references_that_are_read_again_name_their_hosts_where_a_policy_holds() -> None:
    store = Store(FakeClock(), rows=dict(tasks(range(6))), hosts=HOSTS)

    async def has_policy(run: str) -> bool:
        return run == RUN

    queues = MemoryQueues(store.unfinished_after, store.clock, task_hosts=store.task_hosts)
    queues.has_policy = has_policy
    for run, hosts in ((RUN, [*HOSTS, *HOSTS]), ("OTHER", [""] * 6)):
        await queues.open_run(JOB, run)
        found = await queues.receive(run_queue(run), limit=10, visibility=60)
        assert [one.message.host for one in found if isinstance(one.message, TaskMessage)] == hosts


async def test_a_host_whose_window_is_full_holds_no_other_up() -> None:
    store = Store(FakeClock(), rows=dict(tasks(range(900))))
    queues = _queues_of_hosts(store, window=20)
    await queues.send_tasks(JOB, RUN, tasks(range(900)), store.hosts_of(tasks(range(900))), LANES)
    own, slow, quick = run_queues(RUN, LANES)
    held: list[Delivery] = []
    while batch := await queues.receive(slow, limit=10, visibility=3_600):
        held += batch
    assert indexes_of(held) == list(range(0, 60, 3))
    assert await take_all(queues, store, quick) == list(range(1, 900, 3))
    assert await take_all(queues, store, own) == list(range(2, 900, 3))
    for name in (own, slow, quick):
        assert queues._runs[name].in_memory <= 20
    await queues.change_visibility(slow, [one.receipt for one in held], visibility=0)
    assert sorted(await take_all(queues, store, slow)) == list(range(0, 900, 3))


async def test_hosts_that_get_queues_while_rows_are_read_lose_none_of_theirs() -> None:
    store = Store(FakeClock(), seconds=0.5, rows=dict(tasks(range(60))))
    queues = _queues_of_hosts(store, window=100)
    await queues.open_run(JOB, RUN)
    own, first, second = run_queues(RUN, LANES)
    found: list[Delivery] = []

    async def receive() -> None:
        found.extend(await queues.receive(own, limit=10, visibility=60))

    async with anyio.create_task_group() as group:
        group.start_soon(receive)
        await store.clock.advance(0.1)
        await queues.send_tasks(JOB, RUN, tasks(range(3)), HOSTS, LANES[:1])
        await store.clock.advance(0.6)
        await queues.open_run(JOB, RUN, LANES)
        for _ in range(10):
            await store.clock.advance(1)
    store.seconds = 0.0
    taken = {name: await take_all(queues, store, name) for name in (first, second, own)}
    everything = [*indexes_of(found), *(one for some in taken.values() for one in some)]
    assert sorted(everything) == list(range(60))
    assert sorted(taken[first]) == list(range(0, 60, 3))


@pytest.mark.guarantee("G2")
@pytest.mark.slow
@pytest.mark.parametrize("hosts", [(), LANES], ids=["run", "hosts"])
@pytest.mark.parametrize("max_receives", [None, 2])
@pytest.mark.parametrize("window", [10, 40])
@settings(max_examples=60)
@given(
    steps=st.lists(st.sampled_from(STEPS), min_size=20, max_size=150),
    refusals=st.integers(0, 2),
    seed=st.integers(0, 2**32),
)
def test_no_reference_is_lost_or_doubled(
    window: int,
    max_receives: int | None,
    hosts: tuple[str, ...],
    steps: list[str],
    refusals: int,
    seed: int,
) -> None:
    async def scenario() -> None:
        world = World(window, refusals, random.Random(seed), max_receives, hosts)
        await world.queues.open_run(JOB, RUN, hosts)
        async with anyio.create_task_group() as group:
            for step in steps:
                if step in ("send", "receive"):
                    group.start_soon(getattr(world, step))
                else:
                    await getattr(world, step)()
                assert all(world.queues._runs[name].in_memory <= window for name in world.names)
            await world.clock.advance(100)
        await world.settle()
        assert len(world.done) + len(world.dead) == world.written
        assert sorted(map(int, world.dead)) == sorted(world.store.rows)
        assert world.clock.pending == 0

    asyncio.run(scenario())
