"""Measures making and reading task ids: once for each task at submit, once for each row in a
cursor."""

from __future__ import annotations

from pytest_benchmark.fixture import BenchmarkFixture

from conveyor.domain.ids import task_id, task_index

RUN_ID = "01JABCDEFGHJKMNPQRSTVWXYZ0"
COUNT = 10_000


def test_task_id(benchmark: BenchmarkFixture) -> None:
    ids = benchmark(lambda: [task_id(RUN_ID, index) for index in range(COUNT)])
    assert len(set(ids)) == COUNT
    assert ids == sorted(ids)


def test_task_index(benchmark: BenchmarkFixture) -> None:
    ids = [task_id(RUN_ID, index) for index in range(COUNT)]
    indexes = benchmark(lambda: [task_index(text) for text in ids])
    assert indexes == list(range(COUNT))
