"""Queues of runs on SQS from their making to their end: young, lost, blocked, made twice."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import anyio
import pytest

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.queues import MOST_HOST_QUEUES, QueueMissing, host_queue, run_queue
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.sqs.queues import SqsQueues
from conveyor.prod.sqs.registry import run_queue_name
from conveyor.testing.aws_faults import FaultyAws
from tests.conformance.queue_benches import JOB, QUEUE, RUN, indexes_of
from tests.conformance.sqs_bench import JumpingClock, SqsBench, sqs_bench

CREATE = ("sqs", "create_queue")
SEND = ("sqs", "send_message_batch")
RECEIVE = ("sqs", "receive_message")
ABSENT = AwsRefused("AWS.SimpleQueueService.NonExistentQueue", "it does not exist")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def bench() -> AsyncIterator[SqsBench]:
    async with sqs_bench() as opened:
        yield opened


async def found(queues: SqsQueues, queue: str = QUEUE) -> list[int]:
    """The rows that all visible messages of a queue refer to, that of the run by default."""
    indexes: list[int] = []
    while batch := await queues.receive(queue, limit=10, visibility=60):
        indexes += indexes_of(batch)
    return sorted(indexes)


async def test_a_queue_says_whose_it_is_and_keeps_messages_as_long_as_it_can(
    bench: SqsBench,
) -> None:
    await bench.queues.send_tasks(JOB, RUN, bench.rows.write(RUN, 0))
    where = await bench.url(f"run-{RUN}-1")
    tags = (await bench.aws.call("sqs", "list_queue_tags", where))["Tags"]
    expected = {"project": "conveyor", "environment": bench.environment, "job": JOB, "run": RUN}
    assert tags == expected
    everything = {**where, "AttributeNames": ["All"]}
    answer = await bench.aws.call("sqs", "get_queue_attributes", everything)
    assert answer["Attributes"]["MessageRetentionPeriod"] == str(14 * 24 * 3_600)
    policy = json.loads(answer["Attributes"]["RedrivePolicy"])
    assert policy["deadLetterTargetArn"].endswith(f"conveyor-{bench.environment}-dead-letter")
    assert int(policy["maxReceiveCount"]) == 1_000


async def test_a_young_queue_is_asked_again_until_sqs_knows_it(bench: SqsBench) -> None:
    faulty, clock = FaultyAws(bench.aws), JumpingClock()
    faulty.fail(*SEND, ABSENT, times=2)
    rows = bench.rows.write(RUN, *range(5))
    await bench.process(aws=faulty, clock=clock).send_tasks(JOB, RUN, rows)
    assert faulty.calls.count(CREATE) == 1
    assert clock.slept == [1.0, 1.0]
    assert await found(bench.queues) == list(range(5))


async def test_a_queue_that_stays_unknown_is_made_once_more_and_filled(bench: SqsBench) -> None:
    faulty = FaultyAws(bench.aws)
    queues = bench.process(aws=faulty, clock=JumpingClock())
    await queues.send_tasks(JOB, RUN, bench.rows.write(RUN, 0))
    faulty.fail(*SEND, ABSENT, times=10)
    await queues.send_tasks(JOB, RUN, bench.rows.write(RUN, 1))
    assert faulty.calls.count(CREATE) == 2
    assert await found(bench.queues) == [0, 0, 1]
    assert bench.generations.numbers == {RUN: 1}


async def test_a_young_queue_is_not_missing_to_a_receiver(bench: SqsBench) -> None:
    faulty, clock = FaultyAws(bench.aws), JumpingClock()
    queues = bench.process(aws=faulty, clock=clock)
    await queues.send_tasks(JOB, RUN, bench.rows.write(RUN, 0))
    faulty.fail(*RECEIVE, ABSENT, times=4)
    assert await queues.receive(QUEUE, limit=1, visibility=60) == []
    assert indexes_of(await queues.receive(QUEUE, limit=1, visibility=60, wait=20)) == [0]
    assert clock.slept == [1.0, 1.0, 1.0]
    await clock.advance(60)
    faulty.fail(*RECEIVE, ABSENT)
    with pytest.raises(QueueMissing):
        await queues.receive(QUEUE, limit=1, visibility=60, wait=20)


async def test_a_young_queue_of_a_run_that_has_ended_is_not_waited_for(bench: SqsBench) -> None:
    faulty, clock = FaultyAws(bench.aws), JumpingClock()
    queues = bench.process(aws=faulty, clock=clock)
    await queues.send_tasks(JOB, RUN, bench.rows.write(RUN, 0))
    bench.generations.ended.add(RUN)
    await bench.process().drop_run(RUN)
    await queues.send_tasks(JOB, RUN, bench.rows.write(RUN, 1))
    await queues.remake_run(JOB, RUN)
    with pytest.raises(QueueMissing):
        await queues.receive(QUEUE, limit=1, visibility=60, wait=20)
    assert clock.slept == []
    assert faulty.calls.count(CREATE) == 1
    assert await bench.queues_of(RUN) == []


async def test_a_number_whose_queue_was_never_made_is_not_passed_over(bench: SqsBench) -> None:
    bench.rows.write(RUN, *range(3))
    # Whoever moved it was killed before it made the queue.
    await bench.generations.follow(RUN, 0)
    await bench.queues.send_tasks(JOB, RUN, bench.rows.write(RUN, 3))
    assert await found(bench.queues) == list(range(4))
    assert await bench.queues_of(RUN) == [f"run-{RUN}-1"]


async def test_sending_into_a_lost_queue_brings_back_the_others(bench: SqsBench) -> None:
    await bench.queues.send_tasks(JOB, RUN, bench.rows.write(RUN, *range(12)))
    await bench.lose(RUN)
    await bench.queues.send_tasks(JOB, RUN, bench.rows.write(RUN, 12))
    assert await found(bench.queues) == list(range(13))
    assert await bench.queues_of(RUN) == [f"run-{RUN}-2"]


async def test_however_many_miss_a_queue_one_of_them_fills_it(bench: SqsBench) -> None:
    processes = [bench.process() for _ in range(4)]
    await bench.queues.send_tasks(JOB, RUN, bench.rows.write(RUN, *range(20)))
    for process in processes:
        assert len(await process.receive(QUEUE, limit=5, visibility=1)) == 5
    await bench.lose(RUN)
    async with anyio.create_task_group() as group:
        for process in processes:
            group.start_soon(process.remake_run, JOB, RUN)
    # A late one finds what the others made.
    await bench.queues.remake_run(JOB, RUN)
    for process in processes:
        assert await process.receive(QUEUE, limit=1, visibility=0)
    assert await found(bench.queues) == list(range(20))
    assert await bench.queues_of(RUN) == [f"run-{RUN}-2"]


async def test_a_process_that_never_saw_a_lost_queue_passes_over_its_blocked_name(
    bench: SqsBench,
) -> None:
    await bench.queues.send_tasks(JOB, RUN, bench.rows.write(RUN, *range(3)))
    await bench.lose(RUN)
    other = bench.process()
    await other.remake_run(JOB, RUN)
    assert await found(other) == list(range(3))
    assert bench.generations.numbers == {RUN: 2}


async def test_a_queue_made_under_other_settings_is_taken_as_it_is(bench: SqsBench) -> None:
    await bench.queues.send_tasks(JOB, RUN, bench.rows.write(RUN, 0))
    faulty = FaultyAws(bench.aws)
    faulty.fail("sqs", "get_queue_url", ABSENT, where=lambda asked: "run-" in asked["QueueName"])
    other = bench.process(aws=faulty, max_receives=7)
    await other.send_tasks(JOB, RUN, bench.rows.write(RUN, 1))
    assert (faulty.fired, faulty.calls.count(CREATE)) == (1, 1)
    assert set(await found(bench.queues)) == {0, 1}
    assert await bench.queues_of(RUN) == [f"run-{RUN}-1"]


HOSTS = ("a.example:443", "b.example:80")


async def send(bench: SqsBench, queues: SqsQueues, *indexes: int) -> None:
    """Write rows of two hosts that take turns, and send references to them."""
    bench.rows.hosts = HOSTS
    tasks = bench.rows.write(RUN, *indexes)
    await queues.send_tasks(JOB, RUN, tasks, bench.rows.hosts_of(tasks), HOSTS)


async def test_a_lost_queue_of_a_host_brings_back_its_own_references(bench: SqsBench) -> None:
    await send(bench, bench.queues, *range(6))
    assert await bench.queues_of(RUN) == [f"run-{RUN}-1", f"run-{RUN}-h0-1", f"run-{RUN}-h1-1"]
    await bench.lose(f"{RUN}-h0")
    other = bench.process()
    await other.remake_run(JOB, RUN, HOSTS)
    assert await bench.queues_of(RUN) == [f"run-{RUN}-1", f"run-{RUN}-h0-2", f"run-{RUN}-h1-1"]
    assert await found(other, host_queue(RUN, 0)) == [0, 2, 4]
    assert await found(other, host_queue(RUN, 1)) == [1, 3, 5]
    # The process that saw the lost one finds what took its place.
    await send(bench, bench.queues, 6, 7)
    assert await found(bench.queues, host_queue(RUN, 0)) == [6]


async def test_dropping_a_run_takes_the_queues_of_its_hosts_whoever_made_them(
    bench: SqsBench,
) -> None:
    await send(bench, bench.queues, *range(4))
    await bench.lose(f"{RUN}-h1")
    await send(bench, bench.process(), 5)
    await bench.process().drop_run(RUN)
    assert await bench.queues_of(RUN) == []


async def test_a_process_drops_the_queues_that_it_saw_of_a_run_whose_row_is_gone(
    bench: SqsBench,
) -> None:
    await send(bench, bench.queues, *range(4))
    bench.generations.numbers.clear()
    bench.generations.hosts.clear()
    await bench.queues.drop_run(RUN)
    assert await bench.queues_of(RUN) == []


async def test_a_run_without_hosts_costs_no_call_more(bench: SqsBench) -> None:
    counted = FaultyAws(bench.aws)
    queues = bench.process(aws=counted)
    await queues.send_tasks(JOB, RUN, bench.rows.write(RUN, 0))
    await queues.send_tasks(JOB, RUN, bench.rows.write(RUN, 1))
    assert counted.calls.count(SEND) == 2
    assert counted.calls.count(CREATE) == 1
    made = len(counted.calls)
    await queues.drop_run(RUN)
    assert len(counted.calls) - made == 1


def test_the_longest_name_of_a_queue_is_one_that_sqs_takes() -> None:
    run_id = "0" * 26
    assert len(run_queue_name("e" * 20, run_id, 9_999, MOST_HOST_QUEUES - 1)) <= 80


async def test_dropping_takes_what_a_lost_race_left_behind(bench: SqsBench) -> None:
    await bench.queues.send_tasks(JOB, RUN, bench.rows.write(RUN, 0))
    await bench.generations.follow(RUN, 1)
    await bench.process().send_tasks(JOB, RUN, bench.rows.write(RUN, 1))
    await bench.process().send_tasks(JOB, f"{RUN}-1", bench.rows.write("OTHER", 2))
    assert len(await bench.queues_of(RUN)) == 3
    await bench.process().drop_run(RUN)
    assert await bench.queues_of(RUN) == [f"{run_queue(f'{RUN}-1')}-1"]


async def test_a_run_that_is_gone_takes_its_queue_along(bench: SqsBench) -> None:
    await bench.queues.send_tasks(JOB, RUN, bench.rows.write(RUN, 0))
    bench.generations.numbers.clear()
    bench.generations.ended.add(RUN)
    await bench.queues.drop_run(RUN)
    assert await bench.queues_of(RUN) == []


@pytest.mark.parametrize("code", ["OverLimit", "AccessDenied"])
async def test_a_refusal_is_no_missing_queue(bench: SqsBench, code: str) -> None:
    faulty = FaultyAws(bench.aws)
    queues = bench.process(aws=faulty)
    await queues.send_tasks(JOB, RUN, bench.rows.write(RUN, 0))
    [delivery] = await queues.receive(QUEUE, limit=1, visibility=60)
    operations = ["receive_message", "send_message_batch", "delete_message_batch", "delete_queue"]
    for operation in operations:
        faulty.fail("sqs", operation, AwsRefused(code, "no"))
    for call in (
        lambda: queues.receive(QUEUE, limit=1, visibility=60),
        lambda: queues.send_tasks(JOB, RUN, bench.rows.write(RUN, 1)),
        lambda: queues.delete(QUEUE, [delivery.receipt]),
        lambda: queues.drop_run(RUN),
    ):
        with pytest.raises(ConveyorError, match=code) as caught:
            await call()
        assert caught.value.code is ErrorCode.UNAVAILABLE
    assert faulty.fired == len(operations)
