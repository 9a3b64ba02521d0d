"""Queues with a receive limit: a message received too often goes to the dead-letter queue."""

from __future__ import annotations

import anyio
import pytest

from conveyor.ports.queues import (
    CONTROL_QUEUE,
    DEAD_LETTER_QUEUE,
    MAX_BATCH,
    Delivery,
    Message,
    TaskMessage,
)
from tests.conformance.queue_benches import (
    JOB,
    LIMIT,
    QUEUE,
    RUN,
    Bench,
    Waiter,
    deletion,
    fixtures,
    indexes_of,
    those_that,
)

adapter, anyio_backend, bench = fixtures(max_receives=LIMIT)

exact_depth = those_that(lambda adapter: adapter.exact_depth)
virtual_waits = those_that(lambda adapter: adapter.waits_in_virtual_time)


async def _exhaust(bench: Bench, queue: str = QUEUE) -> list[Delivery]:
    """Receive all that is visible as often as the limit allows, the last time for a minute."""
    for count in range(1, LIMIT + 1):
        received: list[Delivery] = []
        while batch := await bench.receive(queue, visibility=60):
            received += batch
        assert {delivery.receive_count for delivery in received} == {count}
        if count < LIMIT:
            receipts = [delivery.receipt for delivery in received]
            await bench.queues.change_visibility(queue, receipts, visibility=0)
    return received


def _messages(deliveries: list[Delivery]) -> list[Message]:
    return [delivery.message for delivery in deliveries]


@pytest.mark.parametrize("how", ["lapse", "give back"])
async def test_what_was_received_to_the_limit_is_a_dead_letter_once_visible(
    bench: Bench, how: str
) -> None:
    await bench.fill(0)
    [last] = await _exhaust(bench)
    assert await bench.receive() == []
    assert await bench.receive(DEAD_LETTER_QUEUE) == []
    if how == "lapse":
        await bench.clock.advance(60)
    else:
        await bench.queues.change_visibility(QUEUE, [last.receipt], visibility=0)
    assert await bench.receive() == []
    [dead] = await bench.receive(DEAD_LETTER_QUEUE)
    assert (dead.queue, dead.message) == (DEAD_LETTER_QUEUE, TaskMessage(JOB, RUN, f"{RUN}-0"))
    await bench.clock.advance(3_600)
    assert await bench.receive() == []


@exact_depth
async def test_it_moves_at_the_next_receive_and_is_counted_where_it_is(bench: Bench) -> None:
    await bench.fill(0)
    await _exhaust(bench)
    await bench.clock.advance(60)
    assert (bench.queues.depth(QUEUE), bench.queues.depth(DEAD_LETTER_QUEUE)) == (1, 0)
    await bench.receive()
    assert (bench.queues.depth(QUEUE), bench.queues.depth(DEAD_LETTER_QUEUE)) == (0, 1)


async def test_the_control_queue_has_the_limit_too(bench: Bench) -> None:
    await bench.queues.send(CONTROL_QUEUE, deletion(RUN))
    await _exhaust(bench, CONTROL_QUEUE)
    await bench.clock.advance(60)
    assert await bench.receive(CONTROL_QUEUE) == []
    assert _messages(await bench.receive(DEAD_LETTER_QUEUE)) == [deletion(RUN)]


async def test_the_dead_letter_queue_has_no_limit(bench: Bench) -> None:
    await bench.queues.send(DEAD_LETTER_QUEUE, deletion(RUN))
    for count in range(1, 2 * LIMIT + 2):
        [dead] = await bench.receive(DEAD_LETTER_QUEUE, visibility=5)
        assert (dead.message, dead.receive_count) == (deletion(RUN), count)
        await bench.clock.advance(5)


async def test_acknowledging_at_the_last_receive_is_in_time(bench: Bench) -> None:
    await bench.fill(0, 1)
    bench.rows.rows[RUN].clear()
    hidden, lapsed = await _exhaust(bench)
    await bench.queues.delete(QUEUE, [hidden.receipt])
    await bench.clock.advance(60)
    await bench.queues.delete(QUEUE, [lapsed.receipt])
    assert await bench.receive() == []
    assert await bench.receive(DEAD_LETTER_QUEUE) == []


async def test_the_receipts_of_a_dead_letter_are_void(bench: Bench) -> None:
    await bench.fill(0)
    [last] = await _exhaust(bench)
    await bench.clock.advance(60)
    await bench.receive()
    for queue in (QUEUE, DEAD_LETTER_QUEUE):
        await bench.queues.change_visibility(queue, [last.receipt], visibility=600)
        await bench.queues.delete(queue, [last.receipt])
    assert await bench.receive() == []
    assert _messages(await bench.receive(DEAD_LETTER_QUEUE)) == [last.message]


async def test_what_waits_behind_dead_letters_comes(bench: Bench) -> None:
    await bench.fill(*range(MAX_BATCH + 2))
    await _exhaust(bench)
    await bench.clock.advance(60)
    await bench.fill(*range(20, 23))
    fresh = await bench.drain()
    assert sorted(indexes_of(fresh)) == [20, 21, 22]
    dead = await bench.drain(DEAD_LETTER_QUEUE)
    assert sorted(indexes_of(dead)) == list(range(MAX_BATCH + 2))


async def test_dropping_the_queue_leaves_its_dead_letters(bench: Bench) -> None:
    await bench.fill(0)
    await _exhaust(bench)
    await bench.clock.advance(60)
    await bench.receive()
    await bench.queues.drop_run(RUN)
    assert indexes_of(await bench.receive(DEAD_LETTER_QUEUE)) == [0]


@pytest.mark.parametrize("how", ["sent again", "made again"])
async def test_a_dead_letter_is_not_lost_to_its_run(bench: Bench, how: str) -> None:
    await bench.fill(0, 1)
    await _exhaust(bench)
    await bench.clock.advance(60)
    await bench.receive()
    if how == "sent again":
        await bench.fill(0, 1)
    else:
        await bench.queues.drop_run(RUN)
        await bench.queues.remake_run(JOB, RUN)
    again = await bench.receive()
    assert sorted(indexes_of(again)) == [0, 1]
    assert {delivery.receive_count for delivery in again} == {1}


@virtual_waits
async def test_a_waiting_receive_passes_dead_letters_over_and_wakes_who_waits_for_them(
    bench: Bench,
) -> None:
    await bench.fill(0)
    await _exhaust(bench)
    run, dead = Waiter(bench, QUEUE, wait=100), Waiter(bench, DEAD_LETTER_QUEUE, wait=100)
    async with anyio.create_task_group() as group:
        group.start_soon(run)
        group.start_soon(dead)
        await bench.clock.advance(70)
        assert (run.result, dead.returned_at) == (None, 60.0)
        assert dead.result is not None
        assert indexes_of(dead.result) == [0]
        await bench.clock.advance(30)
        assert (run.result, run.returned_at) == ([], 100.0)
    assert bench.clock.pending == 0
