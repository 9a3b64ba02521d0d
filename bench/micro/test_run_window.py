"""Measures a task's cost to a run's queue: enqueue, receive by tens, acknowledge."""

from __future__ import annotations

import itertools

from pytest_benchmark.fixture import BenchmarkFixture

from conveyor.dev.run_queue import RunQueue
from conveyor.domain.ids import task_id

RUN_ID = "01JABCDEFGHJKMNPQRSTVWXYZ0"
COUNT = 10_000
BATCH = 10


def test_enqueue_receive_acknowledge(benchmark: BenchmarkFixture) -> None:
    tasks = [(index, task_id(RUN_ID, index)) for index in range(COUNT)]

    def work() -> int:
        receipts = itertools.count(1).__next__
        queue = RunQueue("job", RUN_ID, window=COUNT, receipts=receipts, faults=None)
        queue.add(tasks)
        delivered = 0
        while batch := queue.take(BATCH, visibility=60.0, now=0.0):
            queue.delete([delivery.receipt for delivery in batch])
            delivered += len(batch)
        return delivered

    assert benchmark(work) == COUNT
