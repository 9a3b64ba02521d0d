"""The contract of every queues adapter, sentence by sentence of the port."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from conveyor.domain.errors import ErrorCode
from conveyor.ports.queues import (
    CONTROL_QUEUE,
    DEAD_LETTER_QUEUE,
    MAX_BATCH,
    QueueMissing,
    TaskMessage,
    run_queue,
)
from tests.conformance.queue_benches import (
    JOB,
    OTHER_RUN,
    QUEUE,
    RUN,
    Adapter,
    Bench,
    Waiter,
    deletion,
    fixtures,
    indexes_of,
    those_that,
)

adapter, anyio_backend, bench = fixtures(max_receives=None)

ordered = those_that(lambda adapter: adapter.ordered)
exact_depth = those_that(lambda adapter: adapter.exact_depth)
reads_rows = those_that(lambda adapter: adapter.reads_rows)
lapsed_receipts = those_that(lambda adapter: adapter.keeps_lapsed_receipts)
virtual_waits = those_that(lambda adapter: adapter.waits_in_virtual_time)


async def test_a_reference_comes_as_a_task_message_with_its_ids(bench: Bench) -> None:
    await bench.fill(0)
    [delivery] = await bench.receive()
    assert delivery.message == TaskMessage(JOB, RUN, f"{RUN}-0")
    assert (delivery.queue, delivery.receive_count) == (QUEUE, 1)


async def test_every_reference_sent_comes_once(bench: Bench) -> None:
    await bench.fill(*range(33))
    indexes = indexes_of(await bench.drain())
    assert sorted(indexes) == list(range(33))


@ordered
async def test_references_come_in_the_order_sent(bench: Bench) -> None:
    await bench.fill(*range(33))
    assert indexes_of(await bench.drain()) == list(range(33))


async def test_a_receive_returns_at_most_its_limit_and_never_more_than_a_batch(
    bench: Bench,
) -> None:
    await bench.fill(*range(40))
    assert len(await bench.queues.receive(QUEUE, limit=3, visibility=60)) == 3
    assert len(await bench.queues.receive(QUEUE, limit=1_000, visibility=60)) == MAX_BATCH
    assert await bench.queues.receive(QUEUE, limit=0, visibility=60) == []


async def test_a_received_message_is_hidden_for_its_visibility_and_then_comes_again(
    bench: Bench, adapter: Adapter
) -> None:
    await bench.fill(0)
    [first] = await bench.receive(visibility=30)
    await bench.clock.advance(30 - adapter.slack)
    assert await bench.receive() == []
    await bench.clock.advance(adapter.slack)
    [again] = await bench.receive()
    assert again.message == first.message
    assert (again.receive_count, again.receipt != first.receipt) == (2, True)


async def test_a_deleted_message_never_comes_again(bench: Bench) -> None:
    await bench.fill(0)
    [delivery] = await bench.receive(visibility=30)
    bench.rows.rows[RUN].clear()
    await bench.queues.delete(QUEUE, [delivery.receipt])
    await bench.queues.change_visibility(QUEUE, [delivery.receipt], visibility=0)
    assert await bench.receive() == []
    await bench.clock.advance(3_600)
    assert await bench.receive() == []


@lapsed_receipts
async def test_a_lapsed_receipt_deletes_until_the_message_comes_again(bench: Bench) -> None:
    await bench.fill(0, 1)
    receipts = {held.message: held.receipt for held in await bench.receive(visibility=30)}
    await bench.clock.advance(31)
    await bench.queues.change_visibility(QUEUE, list(receipts.values()), visibility=600)
    [again] = await bench.queues.receive(QUEUE, limit=1, visibility=600)
    del receipts[again.message]
    await bench.queues.delete(QUEUE, list(receipts.values()))
    assert await bench.receive() == []


async def test_a_receipt_is_void_once_the_message_was_received_again(bench: Bench) -> None:
    await bench.fill(0)
    [first] = await bench.receive(visibility=30)
    await bench.clock.advance(31)
    [second] = await bench.receive(visibility=30)
    await bench.queues.delete(QUEUE, [first.receipt, "no receipt at all"])
    await bench.queues.change_visibility(QUEUE, [first.receipt], visibility=600)
    await bench.clock.advance(31)
    [third] = await bench.receive()
    assert (third.message, third.receive_count) == (second.message, 3)


async def test_deleting_twice_is_harmless(bench: Bench, adapter: Adapter) -> None:
    await bench.fill(0, 1)
    first, second = await bench.receive()
    await bench.queues.delete(QUEUE, [first.receipt])
    await bench.queues.delete(QUEUE, [first.receipt, second.receipt])
    bench.rows.rows[RUN].clear()
    assert await bench.receive() == []
    if adapter.exact_depth:
        assert bench.queues.depth(QUEUE) == 0


async def test_visibility_counts_from_the_change(bench: Bench, adapter: Adapter) -> None:
    await bench.fill(0)
    [delivery] = await bench.receive(visibility=60)
    for _ in range(10):
        await bench.clock.advance(40)
        await bench.queues.change_visibility(QUEUE, [delivery.receipt], visibility=60)
        assert await bench.receive() == []
    await bench.clock.advance(60 - adapter.slack)
    assert await bench.receive() == []
    await bench.clock.advance(adapter.slack)
    assert len(await bench.receive()) == 1


async def test_visibility_of_nothing_gives_the_message_back(bench: Bench) -> None:
    await bench.fill(0)
    [delivery] = await bench.receive(visibility=600)
    await bench.queues.change_visibility(QUEUE, [delivery.receipt], visibility=0)
    [again] = await bench.receive()
    assert (again.message, again.receive_count) == (delivery.message, 2)
    assert await bench.receive() == []


async def test_a_delayed_message_is_seen_after_its_delay(bench: Bench, adapter: Adapter) -> None:
    await bench.queues.send(CONTROL_QUEUE, deletion("later"), delay=30)
    await bench.queues.send(CONTROL_QUEUE, deletion("now"))
    [now] = await bench.receive(CONTROL_QUEUE)
    assert now.message == deletion("now")
    await bench.clock.advance(30 - adapter.slack)
    assert await bench.receive(CONTROL_QUEUE) == []
    await bench.clock.advance(adapter.slack)
    [later] = await bench.receive(CONTROL_QUEUE)
    assert (later.message, later.receive_count) == (deletion("later"), 1)


async def test_a_run_queue_takes_single_messages_too(bench: Bench) -> None:
    await bench.fill(3)
    await bench.queues.send(QUEUE, TaskMessage(JOB, RUN, f"{RUN}-7"), delay=60)
    assert indexes_of(await bench.receive(visibility=600)) == [3]
    await bench.clock.advance(60)
    assert indexes_of(await bench.receive()) == [7]


async def test_queues_are_apart(bench: Bench) -> None:
    await bench.fill(0, 1)
    await bench.fill(5, run_id=OTHER_RUN)
    await bench.queues.send(CONTROL_QUEUE, deletion(RUN))
    other = await bench.receive(run_queue(OTHER_RUN))
    assert indexes_of(other) == [5]
    await bench.queues.delete(QUEUE, [delivery.receipt for delivery in other])
    assert sorted(indexes_of(await bench.receive())) == [0, 1]
    assert len(await bench.receive(CONTROL_QUEUE)) == 1


async def test_sending_opens_a_run_and_opening_again_changes_nothing(bench: Bench) -> None:
    await bench.queues.send_tasks(JOB, RUN, bench.rows.write(RUN, 0, 1))
    await bench.queues.open_run(JOB, RUN)
    assert len(await bench.receive()) == 2
    await bench.queues.open_run(JOB, RUN)
    assert await bench.receive() == []


@pytest.mark.parametrize("wait", [0.0, 20.0])
async def test_a_run_queue_that_does_not_exist_is_missing(bench: Bench, wait: float) -> None:
    with pytest.raises(QueueMissing, match=QUEUE) as missing:
        await bench.queues.receive(QUEUE, limit=1, visibility=1, wait=wait)
    assert missing.value.code is ErrorCode.NOT_FOUND
    assert bench.clock.monotonic() == 0
    await bench.queues.delete(QUEUE, ["1"])
    await bench.queues.change_visibility(QUEUE, ["1"], visibility=1)
    assert bench.queues.depth(QUEUE) == 0


@pytest.mark.parametrize("queue", [CONTROL_QUEUE, DEAD_LETTER_QUEUE])
async def test_the_other_queues_are_always_there(bench: Bench, queue: str) -> None:
    assert await bench.receive(queue) == []
    await bench.queues.send(queue, deletion(RUN))
    assert [delivery.message for delivery in await bench.receive(queue)] == [deletion(RUN)]


async def test_a_dropped_queue_is_gone_with_its_messages_and_receipts(bench: Bench) -> None:
    await bench.fill(0, 1)
    old = await bench.receive()
    await bench.queues.drop_run(RUN)
    with pytest.raises(QueueMissing):
        await bench.receive()
    bench.rows.rows[RUN].clear()
    await bench.fill(8, 9)
    fresh = await bench.receive(visibility=30)
    assert sorted(indexes_of(fresh)) == [8, 9]
    await bench.queues.delete(QUEUE, [delivery.receipt for delivery in old])
    await bench.clock.advance(30)
    assert sorted(indexes_of(await bench.receive())) == [8, 9]


async def test_a_missing_queue_is_made_again_from_the_rows_that_are_not_finished(
    bench: Bench,
) -> None:
    await bench.fill(*range(25))
    old = await bench.receive()
    for index in range(5):
        del bench.rows.rows[RUN][index]
    await bench.queues.drop_run(RUN)
    await bench.queues.remake_run(JOB, RUN)
    await bench.queues.delete(QUEUE, [delivery.receipt for delivery in old])
    drained = await bench.drain()
    assert set(indexes_of(drained)) == set(range(5, 25))
    assert {delivery.receive_count for delivery in drained} == {1}


async def test_a_run_never_seen_is_made_from_the_rows_too(bench: Bench) -> None:
    bench.rows.write(RUN, 3, 7, 40)
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(bench.queues.remake_run, JOB, RUN)
    assert set(indexes_of(await bench.drain())) == {3, 7, 40}


async def test_making_a_queue_again_that_is_there_changes_nothing(bench: Bench) -> None:
    await bench.fill(0, 1, 2)
    [first] = await bench.queues.receive(QUEUE, limit=1, visibility=30)
    await bench.queues.remake_run(JOB, RUN)
    rest = await bench.drain()
    assert sorted(indexes_of([first, *rest])) == [0, 1, 2]
    await bench.clock.advance(30)
    [again] = await bench.receive()
    assert (again.message, again.receive_count) == (first.message, 2)


@exact_depth
async def test_depth_counts_waiting_and_hidden_messages(bench: Bench) -> None:
    await bench.fill(0, 1, 2)
    await bench.queues.send(CONTROL_QUEUE, deletion(RUN), delay=60)
    await bench.queues.receive(QUEUE, limit=1, visibility=60)
    assert (bench.queues.depth(QUEUE), bench.queues.depth(CONTROL_QUEUE)) == (3, 1)
    assert await bench.queues.count(QUEUE) == 3


@virtual_waits
async def test_a_receive_waits_so_long_and_then_gives_nothing(bench: Bench) -> None:
    waiter = Waiter(bench, CONTROL_QUEUE, wait=20)
    async with anyio.create_task_group() as group:
        group.start_soon(waiter)
        await bench.clock.advance(19)
        assert waiter.result is None
        await bench.clock.advance(1)
        assert waiter.result == []
    assert bench.clock.pending == 0


@virtual_waits
async def test_a_waiting_receive_returns_with_the_first_message(bench: Bench) -> None:
    await bench.fill(run_id=RUN)
    control, run = Waiter(bench, CONTROL_QUEUE, wait=20), Waiter(bench, QUEUE, wait=20)
    async with anyio.create_task_group() as group:
        group.start_soon(control)
        group.start_soon(run)
        await bench.clock.advance(3)
        await bench.queues.send(CONTROL_QUEUE, deletion(RUN))
        await bench.clock.advance(1)
        assert control.result is not None
        assert (len(control.result), control.returned_at, run.result) == (1, 3.0, None)
        await bench.fill(0)
        await bench.clock.advance(0)
        assert run.result is not None
        assert (indexes_of(run.result), run.returned_at) == ([0], 4.0)
    assert bench.clock.pending == 0


@virtual_waits
@pytest.mark.parametrize("how", ["lapse", "delay", "give back", "shorten"])
async def test_a_waiting_receive_returns_when_a_message_becomes_visible(
    bench: Bench, how: str
) -> None:
    await bench.queues.send(CONTROL_QUEUE, deletion(RUN), delay=5 if how == "delay" else 0)
    receipts = [held.receipt for held in await bench.receive(CONTROL_QUEUE, visibility=5)]
    waiter = Waiter(bench, CONTROL_QUEUE, wait=20)
    async with anyio.create_task_group() as group:
        group.start_soon(waiter)
        await bench.clock.advance(1)
        if how in ("give back", "shorten"):
            visibility = 0 if how == "give back" else 2
            await bench.queues.change_visibility(CONTROL_QUEUE, receipts, visibility=visibility)
        await bench.clock.advance(10)
        assert waiter.result is not None
        assert len(waiter.result) == 1
        expected = {"lapse": 5.0, "delay": 5.0, "give back": 1.0, "shorten": 3.0}
        assert waiter.returned_at == expected[how]


@virtual_waits
async def test_a_waiting_receive_ends_with_its_queue(bench: Bench) -> None:
    await bench.fill(run_id=RUN)
    waiter = Waiter(bench, QUEUE, wait=20)
    async with anyio.create_task_group() as group:
        group.start_soon(waiter)
        await bench.clock.advance(1)
        await bench.queues.drop_run(RUN)
        await bench.clock.advance(0)
        assert waiter.missing is not None
        assert (waiter.result, waiter.returned_at) == (None, 1.0)
    assert bench.clock.pending == 0


@virtual_waits
async def test_several_waiters_share_what_comes(bench: Bench) -> None:
    await bench.fill(run_id=RUN)
    waiters = [Waiter(bench, QUEUE, wait=20) for _ in range(3)]
    async with anyio.create_task_group() as group:
        for waiter in waiters:
            group.start_soon(waiter)
        await bench.clock.advance(1)
        await bench.fill(*range(15))
        await bench.clock.advance(30)
    received = [indexes_of(waiter.result or []) for waiter in waiters]
    assert sorted(index for indexes in received for index in indexes) == list(range(15))
    assert sorted(map(len, received)) == [0, 5, 10]


@pytest.mark.parametrize("turns_after", range(4))
@pytest.mark.parametrize("turns_before", range(4))
async def test_a_cancelled_receive_loses_nothing(
    bench: Bench, turns_before: int, turns_after: int
) -> None:
    await bench.fill(run_id=RUN)
    waiter = Waiter(bench, QUEUE, wait=20)
    async with anyio.create_task_group() as group:
        group.start_soon(waiter)
        for _ in range(turns_before):
            await anyio.lowlevel.checkpoint()
        await bench.fill(0)
        for _ in range(turns_after):
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    assert indexes_of((waiter.result or []) + await bench.receive()) == [0]
    assert bench.clock.pending == 0


@reads_rows
async def test_what_the_store_refuses_reaches_the_receiver_and_loses_nothing(
    bench: Bench,
) -> None:
    await bench.queues.open_run(JOB, RUN)
    bench.rows.write(RUN, 0)
    bench.rows.refusals = 1
    with pytest.raises(ConnectionError):
        await bench.receive()
    assert indexes_of(await bench.receive()) == [0]
