"""What every queues adapter must do, sentence by sentence of the port."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel
import pytest

from conveyor.dev.queues import MemoryQueues
from conveyor.ports.queues import (
    CONTROL_QUEUE,
    MAX_BATCH,
    DeleteMessage,
    Delivery,
    Message,
    Queues,
    TaskMessage,
    run_queue,
)
from conveyor.testing.clock import FakeClock

pytestmark = pytest.mark.parametrize(
    "anyio_backend", [pytest.param(("asyncio", {}), id="asyncio"), pytest.param("trio", id="trio")]
)

JOB, RUN, OTHER_RUN = "JOB", "RUN", "OTHER"
QUEUE = run_queue(RUN)


@dataclass
class Rows:
    """A stand-in for the task rows: what is written and not yet finished."""

    rows: dict[str, dict[int, str]] = field(default_factory=dict)
    refusals: int = 0

    def write(self, run_id: str, *indexes: int) -> list[tuple[int, str]]:
        tasks = [(index, f"{run_id}-{index}") for index in indexes]
        self.rows.setdefault(run_id, {}).update(tasks)
        return tasks

    async def unfinished_after(self, run_id: str, after: int, limit: int) -> list[tuple[int, str]]:
        await anyio.lowlevel.checkpoint()
        if self.refusals:
            self.refusals -= 1
            raise ConnectionError
        rows = self.rows.get(run_id, {})
        return [(index, rows[index]) for index in sorted(rows) if index > after][:limit]


@dataclass
class Bench:
    """An adapter under test, and what it can do beyond the port.

    `ordered`: messages come in the order sent. `exact_depth`: `depth` is not approximate.
    """

    queues: Queues
    clock: FakeClock
    rows: Rows
    ordered: bool
    exact_depth: bool

    async def fill(self, *indexes: int, run_id: str = RUN) -> None:
        await self.queues.open_run(JOB, run_id)
        await self.queues.send_tasks(JOB, run_id, self.rows.write(run_id, *indexes))

    async def receive(self, queue: str = QUEUE, *, visibility: float = 60) -> list[Delivery]:
        return await self.queues.receive(queue, limit=MAX_BATCH, visibility=visibility)

    async def drain(self, queue: str = QUEUE) -> list[Delivery]:
        """Everything that is visible, received and deleted."""
        drained: list[Delivery] = []
        while batch := await self.receive(queue):
            drained += batch
            await self.queues.delete(queue, [delivery.receipt for delivery in batch])
        return drained


def _memory(*, reorder: int) -> Bench:
    clock, rows = FakeClock(), Rows()
    queues = MemoryQueues(rows.unfinished_after, clock, window=50, reorder=reorder)
    return Bench(queues, clock, rows, ordered=not reorder, exact_depth=True)


BINDINGS: dict[str, Callable[[], Bench]] = {
    "memory": lambda: _memory(reorder=0),
    "memory-out-of-order": lambda: _memory(reorder=4),
}


@pytest.fixture(params=BINDINGS)
def bench(request: pytest.FixtureRequest) -> Bench:
    return BINDINGS[request.param]()


def _indexes(deliveries: list[Delivery]) -> list[int]:
    return [int(_task(delivery.message).rpartition("-")[2]) for delivery in deliveries]


def _task(message: Message) -> str:
    assert isinstance(message, TaskMessage)
    return message.task_id


def _deletion(run_id: str) -> DeleteMessage:
    return DeleteMessage(JOB, run_id)


async def test_a_reference_comes_as_a_task_message_with_its_ids(bench: Bench) -> None:
    await bench.fill(0)
    [delivery] = await bench.receive()
    assert delivery.message == TaskMessage(JOB, RUN, f"{RUN}-0")
    assert (delivery.queue, delivery.receive_count) == (QUEUE, 1)


async def test_every_reference_sent_comes_once(bench: Bench) -> None:
    await bench.fill(*range(33))
    indexes = _indexes(await bench.drain())
    assert sorted(indexes) == list(range(33))
    if bench.ordered:
        assert indexes == list(range(33))


async def test_a_receive_returns_at_most_its_limit_and_never_more_than_a_batch(
    bench: Bench,
) -> None:
    await bench.fill(*range(40))
    assert len(await bench.queues.receive(QUEUE, limit=3, visibility=60)) == 3
    assert len(await bench.queues.receive(QUEUE, limit=1_000, visibility=60)) == MAX_BATCH
    assert await bench.queues.receive(QUEUE, limit=0, visibility=60) == []


async def test_a_received_message_is_hidden_for_its_visibility_and_then_comes_again(
    bench: Bench,
) -> None:
    await bench.fill(0)
    [first] = await bench.receive(visibility=30)
    await bench.clock.advance(29)
    assert await bench.receive() == []
    await bench.clock.advance(1)
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


async def test_deleting_twice_is_harmless(bench: Bench) -> None:
    await bench.fill(0, 1)
    first, second = await bench.receive()
    await bench.queues.delete(QUEUE, [first.receipt])
    await bench.queues.delete(QUEUE, [first.receipt, second.receipt])
    if bench.exact_depth:
        bench.rows.rows[RUN].clear()
        assert await bench.receive() == []
        assert bench.queues.depth(QUEUE) == 0


async def test_visibility_counts_from_the_change(bench: Bench) -> None:
    await bench.fill(0)
    [delivery] = await bench.receive(visibility=30)
    for _ in range(10):
        await bench.clock.advance(20)
        await bench.queues.change_visibility(QUEUE, [delivery.receipt], visibility=30)
        assert await bench.receive() == []
    await bench.clock.advance(29)
    assert await bench.receive() == []
    await bench.clock.advance(1)
    assert len(await bench.receive()) == 1


async def test_visibility_of_nothing_gives_the_message_back(bench: Bench) -> None:
    await bench.fill(0)
    [delivery] = await bench.receive(visibility=600)
    await bench.queues.change_visibility(QUEUE, [delivery.receipt], visibility=0)
    [again] = await bench.receive()
    assert (again.message, again.receive_count) == (delivery.message, 2)
    assert await bench.receive() == []


async def test_a_delayed_message_is_seen_after_its_delay(bench: Bench) -> None:
    await bench.queues.send(CONTROL_QUEUE, _deletion("later"), delay=30)
    await bench.queues.send(CONTROL_QUEUE, _deletion("now"))
    [now] = await bench.receive(CONTROL_QUEUE)
    assert now.message == _deletion("now")
    await bench.clock.advance(29)
    assert await bench.receive(CONTROL_QUEUE) == []
    await bench.clock.advance(1)
    [later] = await bench.receive(CONTROL_QUEUE)
    assert (later.message, later.receive_count) == (_deletion("later"), 1)


async def test_a_run_queue_takes_single_messages_too(bench: Bench) -> None:
    await bench.queues.send(QUEUE, TaskMessage(JOB, RUN, f"{RUN}-7"), delay=5)
    assert await bench.receive() == []
    await bench.clock.advance(5)
    assert _indexes(await bench.receive()) == [7]


async def test_queues_are_apart(bench: Bench) -> None:
    await bench.fill(0, 1)
    await bench.fill(5, run_id=OTHER_RUN)
    await bench.queues.send(CONTROL_QUEUE, _deletion(RUN))
    other = await bench.receive(run_queue(OTHER_RUN))
    assert _indexes(other) == [5]
    await bench.queues.delete(QUEUE, [delivery.receipt for delivery in other])
    assert sorted(_indexes(await bench.receive())) == [0, 1]
    assert len(await bench.receive(CONTROL_QUEUE)) == 1


async def test_sending_opens_a_run_and_opening_again_changes_nothing(bench: Bench) -> None:
    await bench.queues.send_tasks(JOB, RUN, bench.rows.write(RUN, 0, 1))
    await bench.queues.open_run(JOB, RUN)
    assert len(await bench.receive()) == 2
    await bench.queues.open_run(JOB, RUN)
    assert await bench.receive() == []


async def test_a_queue_that_does_not_exist_gives_nothing(bench: Bench) -> None:
    assert await bench.queues.receive(QUEUE, limit=1, visibility=1, wait=20) == []
    await bench.queues.delete(QUEUE, ["1"])
    await bench.queues.change_visibility(QUEUE, ["1"], visibility=1)
    assert bench.queues.depth(QUEUE) == 0


async def test_a_dropped_queue_is_gone_with_its_messages_and_receipts(bench: Bench) -> None:
    await bench.fill(0, 1)
    old = await bench.receive()
    await bench.queues.drop_run(RUN)
    assert await bench.receive() == []
    bench.rows.rows[RUN].clear()
    await bench.fill(8, 9)
    fresh = await bench.receive(visibility=30)
    assert sorted(_indexes(fresh)) == [8, 9]
    await bench.queues.delete(QUEUE, [delivery.receipt for delivery in old])
    await bench.clock.advance(30)
    assert sorted(_indexes(await bench.receive())) == [8, 9]


async def test_depth_counts_waiting_and_hidden_messages(bench: Bench) -> None:
    await bench.fill(0, 1, 2)
    await bench.queues.send(CONTROL_QUEUE, _deletion(RUN), delay=60)
    await bench.queues.receive(QUEUE, limit=1, visibility=60)
    if bench.exact_depth:
        assert (bench.queues.depth(QUEUE), bench.queues.depth(CONTROL_QUEUE)) == (3, 1)


class Waiter:
    """One receive that runs beside the test; `result` is None until it has returned."""

    def __init__(self, bench: Bench, queue: str, *, wait: float) -> None:
        self.bench, self.queue, self.wait = bench, queue, wait
        self.result: list[Delivery] | None = None
        self.returned_at = -1.0

    async def __call__(self) -> None:
        self.result = await self.bench.queues.receive(
            self.queue, limit=MAX_BATCH, visibility=60, wait=self.wait
        )
        self.returned_at = self.bench.clock.monotonic()


async def test_a_receive_waits_so_long_and_then_gives_nothing(bench: Bench) -> None:
    waiter = Waiter(bench, CONTROL_QUEUE, wait=20)
    async with anyio.create_task_group() as group:
        group.start_soon(waiter)
        await bench.clock.advance(19)
        assert waiter.result is None
        await bench.clock.advance(1)
        assert waiter.result == []
    assert bench.clock.pending == 0


async def test_a_waiting_receive_returns_with_the_first_message(bench: Bench) -> None:
    await bench.fill(run_id=RUN)
    control, run = Waiter(bench, CONTROL_QUEUE, wait=20), Waiter(bench, QUEUE, wait=20)
    async with anyio.create_task_group() as group:
        group.start_soon(control)
        group.start_soon(run)
        await bench.clock.advance(3)
        await bench.queues.send(CONTROL_QUEUE, _deletion(RUN))
        await bench.clock.advance(1)
        assert control.result is not None
        assert (len(control.result), control.returned_at, run.result) == (1, 3.0, None)
        await bench.fill(0)
        await bench.clock.advance(0)
        assert run.result is not None
        assert (_indexes(run.result), run.returned_at) == ([0], 4.0)
    assert bench.clock.pending == 0


@pytest.mark.parametrize("how", ["lapse", "delay", "give back", "shorten"])
async def test_a_waiting_receive_returns_when_a_message_becomes_visible(
    bench: Bench, how: str
) -> None:
    await bench.queues.send(CONTROL_QUEUE, _deletion(RUN), delay=5 if how == "delay" else 0)
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


async def test_a_waiting_receive_ends_with_its_queue(bench: Bench) -> None:
    await bench.fill(run_id=RUN)
    waiter = Waiter(bench, QUEUE, wait=20)
    async with anyio.create_task_group() as group:
        group.start_soon(waiter)
        await bench.clock.advance(1)
        await bench.queues.drop_run(RUN)
        await bench.clock.advance(0)
        assert waiter.result == []


async def test_several_waiters_share_what_comes(bench: Bench) -> None:
    await bench.fill(run_id=RUN)
    waiters = [Waiter(bench, QUEUE, wait=20) for _ in range(3)]
    async with anyio.create_task_group() as group:
        for waiter in waiters:
            group.start_soon(waiter)
        await bench.clock.advance(1)
        await bench.fill(*range(15))
        await bench.clock.advance(30)
    received = [_indexes(waiter.result or []) for waiter in waiters]
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
    assert _indexes((waiter.result or []) + await bench.receive()) == [0]
    assert bench.clock.pending == 0


async def test_what_the_store_refuses_reaches_the_receiver_and_loses_nothing(
    bench: Bench,
) -> None:
    await bench.queues.open_run(JOB, RUN)
    bench.rows.write(RUN, 0)
    bench.rows.refusals = 1
    with pytest.raises(ConnectionError):
        await bench.receive()
    assert _indexes(await bench.receive()) == [0]
