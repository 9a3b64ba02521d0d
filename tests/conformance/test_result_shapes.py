"""The shape of a run's results: it moves with the counters, and a rerun takes it over."""

from __future__ import annotations

import pytest

from conveyor.domain.model import Format, StoredBody
from conveyor.domain.result_shape import MOST_TYPES, OTHER_TYPE, SIZE_CLASSES, ResultShape
from conveyor.domain.task_rules import Succeeded
from tests.conformance.world import CALLER, F, S, World


def shape_of(sizes: dict[int, int], **types: int) -> ResultShape:
    """A shape by its classes and its types, whose slashes are underscores here."""
    counts = tuple(sizes.get(number, 0) for number in range(SIZE_CLASSES))
    return ResultShape(counts, {name.replace("_", "/"): count for name, count in types.items()})


async def succeed(world: World, run_id: str, index: int, size: int, content_type: str) -> None:
    """End a task with a body."""
    task = await world.claimed(run_id, index)
    body = StoredBody(f"{run_id}/{index}", size, content_type, Format.HTML)
    await world.settle(task, Succeeded(world.attempt(task), body))


async def test_bodies_are_counted_by_size_and_type(world: World) -> None:
    job_id, run_id = await world.submit(7)
    assert (await world.run(job_id)).stats.shape == ResultShape()
    bodies = [(0, "text/html"), (1, "TEXT/HTML; charset=x"), (1_023, "text/html")]
    bodies += [(1_024, "application/json"), (10_000_000, "text/html")]
    for index, (size, content_type) in enumerate(bodies):
        await succeed(world, run_id, index, size, content_type)
    await world.fail(run_id, 5)
    expected = shape_of({0: 1, 1: 2, 2: 1, 7: 1}, text_html=4, application_json=1)
    assert (await world.run(job_id)).stats.shape == expected
    assert (await world.view(job_id)).latest_run == await world.run(job_id)


async def test_the_types_that_come_late_are_counted_as_one(world: World) -> None:
    count = MOST_TYPES + 3
    job_id, run_id = await world.submit(count)
    for index in range(count):
        await succeed(world, run_id, index, 5, f"text/x-{index}")
    types = (await world.run(job_id)).stats.shape.types
    assert types == {f"text/x-{index}": 1 for index in range(MOST_TYPES)} | {OTHER_TYPE: 3}


@pytest.mark.parametrize("large_from", [10_000, 2], ids=["small", "large"])
async def test_a_rerun_has_the_shape_of_what_it_inherits(world: World, large_from: int) -> None:
    job_id, run_id = await world.submit(5)
    await succeed(world, run_id, 0, 5, "text/html")
    await succeed(world, run_id, 1, 5_000, "text/plain")
    for index in (2, 3):
        await world.fail(run_id, index)
    await world.store.runs.stop_run(CALLER, job_id, now=world.now)
    inherited = shape_of({1: 1, 2: 1}, text_html=1, text_plain=1)

    for statuses, shape in (([F], inherited), ([S], ResultShape())):
        new_id, _ = await world.rerun(job_id, *statuses, large_from=large_from)
        assert (await world.run(job_id)).stats.shape == shape
        assert (await world.run(job_id)).stats.inherited == 2
        if large_from == 2:
            ingestion = world.store.ingestion
            await ingestion.copy_rows(new_id, first_index=0, end_index=5, now=world.now)
            await ingestion.finish_ingest(new_id, now=world.now)
            assert (await world.run(job_id)).stats.shape == shape
            assert (await world.run(job_id)).stats.inherited == 2
        if statuses == [F]:
            await world.store.runs.delete_run(CALLER, job_id, new_id, now=world.now)


async def test_a_rerun_that_is_cut_short_has_the_shape_of_its_rows(world: World) -> None:
    job_id, run_id = await world.submit(4)
    for index, size in enumerate((5, 5_000, 5)):
        await succeed(world, run_id, index, size, "text/html")
    await world.fail(run_id, 3)
    new_id, _ = await world.rerun(job_id, F, large_from=2)
    assert (await world.run(job_id)).stats.shape == shape_of({1: 2, 2: 1}, text_html=3)
    ingestion = world.store.ingestion
    await ingestion.copy_rows(new_id, first_index=0, end_index=2, now=world.now)
    await world.store.runs.stop_run(CALLER, job_id, now=world.now)
    await ingestion.finish_ingest(new_id, now=world.now)
    stats = (await world.run(job_id)).stats
    assert (stats.shape, stats.inherited) == (shape_of({1: 1, 2: 1}, text_html=2), 2)
