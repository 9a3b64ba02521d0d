"""The queues of the hosts of a run, in every queues adapter."""

from __future__ import annotations

from typing import Any

import pytest

from conveyor.ports.queues import (
    HOST_VERSION,
    QueueMissing,
    TaskMessage,
    host_queue,
    run_queue,
    run_queues,
)
from tests.conformance.queue_benches import (
    JOB,
    OTHER_RUN,
    QUEUE,
    RUN,
    Bench,
    fixtures,
    indexes_of,
    those_that,
)

adapter, anyio_backend, bench = fixtures(max_receives=None)
reads_rows = those_that(lambda adapter: adapter.reads_rows)
told_to_refill = those_that(lambda adapter: not adapter.reads_rows)

HOSTS = ("a.example:443", "b.example:80", "c.example:443")
LANES = HOSTS[:2]
A, B = host_queue(RUN, 0), host_queue(RUN, 1)


async def fill(bench: Bench, *indexes: int, lanes: tuple[str, ...] = LANES) -> None:
    """Write rows of three hosts that take turns, and send references to them."""
    bench.rows.hosts = HOSTS
    tasks = bench.rows.write(RUN, *indexes)
    await bench.queues.send_tasks(JOB, RUN, tasks, bench.rows.hosts_of(tasks), lanes)


async def drained(bench: Bench) -> dict[str, list[int]]:
    """All messages by queue, received and deleted."""
    names = run_queues(RUN, LANES)
    return {name: sorted(indexes_of(await bench.drain(name))) for name in names}


async def test_a_reference_goes_into_the_queue_of_its_host_or_else_into_that_of_its_run(
    bench: Bench,
) -> None:
    await fill(bench, *range(9))
    assert await drained(bench) == {QUEUE: [2, 5, 8], A: [0, 3, 6], B: [1, 4, 7]}


async def test_each_message_names_its_host_also_where_it_has_no_queue(bench: Bench) -> None:
    await fill(bench, *range(3))
    for queue, index in ((A, 0), (B, 1), (QUEUE, 2)):
        [delivery] = await bench.receive(queue)
        task_id = f"{RUN}-{index}"
        named = TaskMessage(JOB, RUN, task_id, HOST_VERSION, HOSTS[index])
        assert (delivery.message, delivery.queue) == (named, queue)


async def test_references_of_a_small_run_name_their_hosts_in_the_queue_of_the_run(
    bench: Bench,
) -> None:
    await fill(bench, *range(3), lanes=())
    found = [delivery.message for delivery in await bench.drain()]
    assert {(one.task_id, one.host) for one in found if isinstance(one, TaskMessage)} == {
        (f"{RUN}-{index}", HOSTS[index]) for index in range(3)
    }


async def test_the_queue_of_a_run_is_there_though_all_its_hosts_have_their_own(
    bench: Bench,
) -> None:
    await fill(bench, 0, 1, 3)
    assert await drained(bench) == {QUEUE: [], A: [0, 3], B: [1]}


async def test_a_queue_of_a_host_that_has_none_is_missing(bench: Bench) -> None:
    await fill(bench, *range(3), lanes=LANES[:1])
    with pytest.raises(QueueMissing):
        await bench.receive(B)
    await bench.queues.delete(B, ["1"])
    await bench.queues.change_visibility(B, ["1"], visibility=0)
    assert (bench.queues.depth(B), await bench.queues.count(B)) == (0, 0)


async def test_a_host_gets_its_queue_while_the_run_is_worked(bench: Bench) -> None:
    await fill(bench, *range(6), lanes=())
    early = await bench.receive()
    await fill(bench, *range(6, 12), lanes=LANES[:1])
    await fill(bench, *range(12, 18))
    await bench.queues.delete(QUEUE, [delivery.receipt for delivery in early])
    found = await drained(bench)
    found[QUEUE] += indexes_of(early)
    assert sorted(index for indexes in found.values() for index in indexes) == list(range(18))
    # References that were sent before may follow, and never go where nobody expects them.
    assert {6, 9, 12, 15} <= set(found[A]) <= set(range(0, 18, 3))
    assert {13, 16} <= set(found[B]) <= set(range(1, 18, 3))


async def test_a_message_of_a_host_is_hidden_given_back_and_deleted_like_any_other(
    bench: Bench,
) -> None:
    await fill(bench, 0)
    [first] = await bench.receive(A, visibility=60)
    assert await bench.receive(A) == []
    await bench.queues.change_visibility(A, [first.receipt], visibility=0)
    [second] = await bench.receive(A)
    assert second.receive_count == 2
    bench.rows.rows[RUN].clear()
    await bench.queues.delete(A, [second.receipt])
    await bench.clock.advance(120)
    assert await bench.receive(A) == []


async def test_dropping_a_run_takes_all_its_queues_and_no_others(bench: Bench) -> None:
    await fill(bench, *range(9))
    await bench.fill(0, run_id=OTHER_RUN)
    bench.rows.rows[RUN].clear()
    await bench.queues.drop_run(RUN)
    for queue in run_queues(RUN, LANES):
        with pytest.raises(QueueMissing):
            await bench.receive(queue)
    assert indexes_of(await bench.drain(run_queue(OTHER_RUN))) == [0]
    await bench.queues.drop_run(RUN)


async def test_queues_that_were_never_made_are_filled_from_the_rows(bench: Bench) -> None:
    bench.rows.hosts = HOSTS
    bench.rows.write(RUN, *range(30))
    await bench.queues.open_run(JOB, RUN, LANES)
    await bench.queues.remake_run(JOB, RUN, LANES)
    await bench.queues.remake_run(JOB, RUN, LANES)
    assert await drained(bench) == {
        QUEUE: list(range(2, 30, 3)),
        A: list(range(0, 30, 3)),
        B: list(range(1, 30, 3)),
    }


async def _holds(_run_id: str) -> bool:
    """A policy holds for every run."""
    return True


async def refilled(bench: Bench) -> set[str]:
    """The hosts that messages name of a small run whose queue was lost, or never made."""
    bench.rows.hosts = HOSTS
    bench.rows.write(RUN, *range(30))
    await bench.queues.open_run(JOB, RUN)
    await bench.queues.remake_run(JOB, RUN)
    found = [one.message for one in await bench.drain()]
    assert len(found) == 30
    return {one.host for one in found if isinstance(one, TaskMessage)}


async def test_a_refill_of_a_run_without_queues_of_hosts_names_them_where_a_policy_holds(
    bench: Bench,
) -> None:
    queues: Any = bench.queues
    getattr(queues, "_service", queues).has_policy = _holds
    assert await refilled(bench) == set(HOSTS)


async def test_a_refill_names_no_host_without_a_policy(bench: Bench) -> None:
    assert await refilled(bench) == {""}


@told_to_refill
async def test_a_queue_that_was_never_made_is_filled_beside_those_that_were(bench: Bench) -> None:
    await fill(bench, *range(9), lanes=LANES[:1])
    # The second host was written, and then the sender died.
    await bench.queues.remake_run(JOB, RUN, LANES)
    found = await drained(bench)
    assert (found[A], found[B]) == ([0, 3, 6], [1, 4, 7])


@reads_rows
async def test_after_a_restart_the_queues_read_the_rows_in_order(bench: Bench) -> None:
    bench.rows.hosts = HOSTS
    bench.rows.write(RUN, *range(200))
    await bench.queues.open_run(JOB, RUN, LANES)
    for queue, first in ((B, 1), (QUEUE, 2), (A, 0)):
        found = await bench.drain(queue)
        assert sorted(indexes_of(found)) == list(range(first, 200, 3))
        assert {one.message.host for one in found if isinstance(one.message, TaskMessage)} == {
            HOSTS[first]
        }


@reads_rows
async def test_references_that_are_sent_without_hosts_come_into_the_queues_that_are_there(
    bench: Bench,
) -> None:
    await fill(bench, *range(6))
    await bench.queues.send_tasks(JOB, RUN, bench.rows.write(RUN, *range(6, 12)))
    assert await drained(bench) == {QUEUE: [2, 5, 8, 11], A: [0, 3, 6, 9], B: [1, 4, 7, 10]}
