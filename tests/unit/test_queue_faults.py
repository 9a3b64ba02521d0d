"""The weaknesses that tests can switch on in the queues of memory, or put around any queues."""

from __future__ import annotations

import pytest

from conveyor.dev.queues import MemoryQueues
from conveyor.ports.queues import (
    CONTROL_QUEUE,
    DEAD_LETTER_QUEUE,
    DeleteMessage,
    QueueMissing,
    TaskMessage,
    run_queue,
)
from conveyor.testing.clock import FakeClock
from conveyor.testing.faults import DuplicatingQueues

JOB, RUN = "JOB", "RUN"
QUEUE = run_queue(RUN)


async def _no_rows(_run_id: str, _after: int, _limit: int) -> list[tuple[int, str]]:
    return []


async def _send_and_drain(count: int, *, reorder: int = 0, duplicates: float = 0.0) -> list[int]:
    """The order in which `count` references come, each deleted at its receipt."""
    queues = MemoryQueues(_no_rows, FakeClock(), reorder=reorder, duplicates=duplicates)
    await queues.send_tasks(JOB, RUN, [(index, str(index)) for index in range(count)])
    drained = []
    while batch := await queues.receive(QUEUE, limit=10, visibility=60):
        await queues.delete(QUEUE, [delivery.receipt for delivery in batch])
        for delivery in batch:
            assert isinstance(delivery.message, TaskMessage)
            drained.append(int(delivery.message.task_id))
    assert queues.depth(QUEUE) == 0
    return drained


async def test_duplicates_come_whatever_happens_to_the_first() -> None:
    indexes = await _send_and_drain(25, duplicates=1.0)
    assert sorted(indexes) == sorted([*range(25), *range(25)])


async def test_some_messages_come_twice_the_same_ones_for_the_same_seed() -> None:
    first, second = [await _send_and_drain(200, duplicates=0.2) for _ in range(2)]
    assert first == second
    assert set(first) == set(range(200))
    assert 200 < len(first) < 300


async def test_messages_out_of_order_stay_near_their_place() -> None:
    indexes = await _send_and_drain(200, reorder=4)
    assert sorted(indexes) == list(range(200))
    assert indexes != list(range(200))
    assert all(index <= place + 4 for place, index in enumerate(indexes))


async def test_without_them_every_message_comes_once_and_in_order() -> None:
    assert await _send_and_drain(200) == list(range(200))


@pytest.mark.parametrize(("max_receives", "expected"), [(1, [1]), (2, [1, 2, 2])])
async def test_both_copies_of_a_message_become_dead_letters(
    max_receives: int, expected: list[int]
) -> None:
    clock = FakeClock()
    queues = MemoryQueues(_no_rows, clock, duplicates=1.0, max_receives=max_receives)
    await queues.send(CONTROL_QUEUE, DeleteMessage(JOB, RUN))
    counts = []
    while batch := await queues.receive(CONTROL_QUEUE, limit=10, visibility=1):
        counts += [delivery.receive_count for delivery in batch]
        await clock.advance(1)
    assert counts == expected
    assert (queues.depth(CONTROL_QUEUE), queues.depth(DEAD_LETTER_QUEUE)) == (0, 2)


async def _every_row(_run_id: str, after: int, limit: int) -> list[tuple[int, str]]:
    return [(index, str(index)) for index in range(after + 1, 5)][:limit]


async def test_a_dropped_queue_gets_no_copies_until_it_is_made_again() -> None:
    queues = DuplicatingQueues(MemoryQueues(_every_row, FakeClock()))
    await queues.open_run(JOB, RUN)
    batch = await queues.receive(QUEUE, limit=10, visibility=60)
    await queues.drop_run(RUN)
    await queues.delete(QUEUE, [batch[0].receipt])
    with pytest.raises(QueueMissing):
        await queues.receive(QUEUE, limit=10, visibility=60)
    await queues.remake_run(JOB, RUN)
    again = await queues.receive(QUEUE, limit=10, visibility=60)
    assert {delivery.message for delivery in again} == {delivery.message for delivery in batch}
    await queues.delete(QUEUE, [delivery.receipt for delivery in again])
    copies = await queues.receive(QUEUE, limit=10, visibility=60)
    assert [delivery.message for delivery in copies] == [delivery.message for delivery in again]


async def test_a_message_for_a_queue_of_neither_kind_is_refused() -> None:
    queues = MemoryQueues(_no_rows, FakeClock())
    with pytest.raises(QueueMissing):
        await queues.send("no such queue", DeleteMessage(JOB, RUN))
    assert queues.depth(QUEUE) == 0
