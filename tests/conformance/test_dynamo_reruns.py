"""Reruns on DynamoDB when answers are lost, calls break off between two steps, and others
interfere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import RunStatus
from conveyor.ports.records import IdempotencyScope, RerunRequest, StoredResponse
from conveyor.prod.dynamodb.schema import intent_key, pin_key, place_key
from conveyor.testing.clock import FakeClock
from tests.conformance.dynamo_ingests import (
    DB,
    INSERT,
    TRANSACT,
    UPDATE,
    Ingests,
    away,
    open_ingests,
)
from tests.conformance.world import CALLER, F, P, R, World, refused

pytestmark = pytest.mark.extended


@pytest.fixture
async def bench(clock: FakeClock) -> AsyncIterator[Ingests]:
    """An empty table."""
    async with open_ingests(clock) as opened:
        yield opened


async def key(bench: Ingests, scope: str) -> object:
    """Claim an idempotency key, or find its answer."""
    now = bench.one.world.now
    return await bench.other.world.store.idempotency.claim_idempotency_key(
        scope,
        fingerprint=b"",
        created_id="ID",
        now=now,
        lapses_at=now + 60_000,
        expires_at=now + 86_400_000,
    )


# Every answer lost once


@pytest.mark.parametrize("large_from", [1, 100])
async def test_a_rerun_is_made_once(bench: Ingests, large_from: int) -> None:
    job_id, source = await bench.other.ended("sffsp")
    await key(bench, "rerun")
    bench.lose_every_answer()
    once = IdempotencyScope("rerun")
    run_id, told = await bench.one.world.rerun(job_id, F, large_from=large_from, once=once)
    assert told == f"2 2 {source}"
    view = await bench.other.world.view(job_id)
    assert view.latest_run is not None
    assert (view.job.run_count, view.job.latest_run_id, view.job.version) == (2, run_id, 2)
    assert (view.latest_run.run_id, view.latest_run.version) == (run_id, 1)
    assert await bench.intents() == 0
    assert await key(bench, "rerun") == StoredResponse(201, told.encode())
    assert await bench.table.get(pin_key(job_id, source, run_id)) is not None
    if large_from == 100:
        await bench.exact(job_id, run_id, "spps")
    else:
        assert await bench.other.world.rows(run_id, 2) == []
    # Nothing of the source has moved that anybody is shown, but for its version.
    before = await bench.item(job_id, 1)
    assert (before["status"], before["version"]) == ("stopped", 3)


async def test_a_rerun_that_was_made_unheard_is_answered(bench: Ingests) -> None:
    job_id, source = await bench.other.ended("sff")
    bench.faults.vanish(DB, TRANSACT)
    run_id = bench.one.world.clock.new_id()
    await refused(ErrorCode.UNAVAILABLE, bench.one.world.rerun(job_id, F, run_id=run_id))
    await bench.exact(job_id, run_id, "spp")
    await key(bench, "rerun")
    again = await bench.one.world.rerun(job_id, F, run_id=run_id, once=IdempotencyScope("rerun"))
    assert again == (run_id, f"2 1 {source}")
    assert await key(bench, "rerun") == StoredResponse(201, again[1].encode())
    assert (await bench.other.world.view(job_id)).job.run_count == 2
    await bench.exact(job_id, run_id, "spp")


# Calls that break off between two steps


async def test_a_rerun_that_could_not_be_made_leaves_nothing(bench: Ingests) -> None:
    job_id, _ = await bench.other.ended("sff")
    before, rows = await bench.other.world.view(job_id), await bench.rows_left(job_id)
    bench.faults.fail(DB, TRANSACT, away())
    bench.faults.lose_answer(DB, UPDATE)
    await refused(ErrorCode.UNAVAILABLE, bench.one.world.rerun(job_id, F))
    assert bench.faults.fired == 2
    assert await bench.other.world.view(job_id) == before
    assert (await bench.rows_left(job_id), await bench.intents()) == (rows, 0)


async def test_a_rerun_that_was_cut_off_is_made_by_the_next_call(bench: Ingests) -> None:
    job_id, source = await bench.other.ended("sff" * 20)
    run_id = bench.one.world.clock.new_id()
    bench.faults.fail(DB, INSERT, away(), nth=2)
    bench.faults.fail(DB, UPDATE, away())
    await refused(ErrorCode.UNAVAILABLE, bench.one.world.rerun(job_id, F, run_id=run_id))
    assert await bench.intents() == 1
    assert await bench.other.world.rerun(job_id, F, run_id=run_id) == (run_id, f"40 20 {source}")
    assert await bench.intents() == 0
    await bench.exact(job_id, run_id, "spp" * 20)


async def test_what_a_call_that_was_cut_off_had_written_is_counted(bench: Ingests) -> None:
    """Before the rerun is asked for again, a worker gives a task back that it had left."""
    job_id, source = await bench.other.ended("rsr")
    run_id = bench.one.world.clock.new_id()
    bench.faults.fail(DB, TRANSACT, away())
    bench.faults.fail(DB, UPDATE, away())
    await refused(ErrorCode.UNAVAILABLE, bench.one.world.rerun(job_id, R, run_id=run_id))
    task = await bench.other.row(source, 2)
    await bench.other.world.settle(task, bench.other.world.retry(task))
    again = await bench.other.world.rerun(job_id, R, run_id=run_id)
    assert again == (run_id, f"2 1 {source}")
    await bench.exact(job_id, run_id, "psp")


async def test_rows_of_another_source_are_removed_first(bench: Ingests) -> None:
    """A rerun is cut off; another is made, worked and ended; then the first is asked for again."""
    job_id, first = await bench.other.ended("sfr")
    run_id = bench.one.world.clock.new_id()
    bench.faults.fail(DB, TRANSACT, away())
    bench.faults.fail(DB, UPDATE, away())
    await refused(ErrorCode.UNAVAILABLE, bench.one.world.rerun(job_id, R, run_id=run_id))
    second, _ = await bench.other.world.rerun(job_id)
    task = await bench.other.row(second, 1)
    await bench.other.succeed(second, task)
    await bench.other.world.store.runs.stop_run(CALLER, job_id, now=bench.one.world.now)
    again = await bench.one.world.rerun(job_id, P, run_id=run_id)
    assert again == (run_id, f"2 1 {second}")
    await bench.exact(job_id, run_id, "psp")
    sources = [row.source_run_id for row in await bench.other.world.rows(run_id, 2)]
    assert sources == [None, second, None]
    assert await bench.table.get(pin_key(job_id, first, run_id)) is None


async def test_rows_that_somebody_takes_back_make_no_run(bench: Ingests) -> None:
    job_id, _ = await bench.other.ended("sff")
    run_id = bench.one.world.clock.new_id()

    async def abandon() -> None:
        await bench.table.update(
            intent_key(job_id, run_id),
            "SET abandoned = :yes",
            condition="attribute_exists(pk)",
            yes=True,
        )

    bench.faults.before(DB, TRANSACT, abandon)
    await refused(ErrorCode.UNAVAILABLE, bench.one.world.rerun(job_id, F, run_id=run_id))
    await refused(ErrorCode.UNAVAILABLE, bench.other.world.rerun(job_id, F, run_id=run_id))
    assert await bench.table.get(place_key(run_id)) is None
    assert (await bench.other.world.view(job_id)).job.run_count == 1


async def test_a_call_that_was_overtaken_leaves_the_rows_to_the_other(bench: Ingests) -> None:
    job_id, _ = await bench.other.ended("sff")
    run_id = bench.one.world.clock.new_id()
    rows = await bench.rows_left(job_id)

    async def overtake() -> None:
        await bench.table.update(
            intent_key(job_id, run_id),
            "SET #holder = :other",
            condition="attribute_exists(pk)",
            other="OTHER",
        )

    bench.faults.before(DB, TRANSACT, overtake)
    await refused(ErrorCode.UNAVAILABLE, bench.one.world.rerun(job_id, F, run_id=run_id))
    assert (await bench.rows_left(job_id), await bench.intents()) == (rows + 3, 1)
    assert await bench.table.get(place_key(run_id)) is None


async def test_an_answer_that_cannot_be_rendered_leaves_no_row(bench: Ingests) -> None:
    job_id, _ = await bench.other.ended("sff")
    rows = await bench.rows_left(job_id)

    def broken(_made: object) -> StoredResponse:
        raise RuntimeError("rendering failed")

    with pytest.raises(RuntimeError, match="rendering"):
        await bench.one.world.store.runs.rerun(
            RerunRequest(
                caller=CALLER,
                job_id=job_id,
                run_id=bench.one.world.clock.new_id(),
                statuses=frozenset({F}),
                window_start=0,
                large_from=100,
                now=bench.one.world.now,
            ),
            answer=broken,
            once=None,
        )
    assert (await bench.rows_left(job_id), await bench.intents()) == (rows, 0)


async def test_statuses_that_match_nothing_leave_no_row(bench: Ingests) -> None:
    job_id, _ = await bench.other.ended("ssp")
    rows = await bench.rows_left(job_id)
    await refused(ErrorCode.NO_MATCHING_TASKS, bench.one.world.rerun(job_id, F))
    assert (await bench.rows_left(job_id), await bench.intents()) == (rows, 0)


# Others in between


async def test_of_two_reruns_at_once_one_is_made(bench: Ingests) -> None:
    job_id, _ = await bench.other.ended("sff")
    rows = await bench.rows_left(job_id)
    won: list[str] = []

    async def overtake() -> None:
        won.append((await bench.other.world.rerun(job_id, F))[0])

    bench.faults.before(DB, TRANSACT, overtake)
    await refused(ErrorCode.RUN_NOT_TERMINAL, bench.one.world.rerun(job_id, F))
    view = await bench.other.world.view(job_id)
    assert (view.job.run_count, view.job.latest_run_id) == (2, won[0])
    assert (await bench.rows_left(job_id), await bench.intents()) == (rows + 3, 0)


@pytest.mark.parametrize("large_from", [1, 100])
async def test_two_calls_for_one_run_make_it_once(bench: Ingests, large_from: int) -> None:
    job_id, source = await bench.other.ended("sff" * 10)
    run_id = bench.one.world.clock.new_id()

    async def call(world: World) -> object:
        try:
            return await world.rerun(job_id, F, run_id=run_id, large_from=large_from)
        except ConveyorError as error:
            return error.code

    worlds = (bench.one.world, bench.other.world, bench.other.world)
    answers = await asyncio.gather(*(call(world) for world in worlds))
    assert (run_id, f"20 10 {source}") in answers
    assert set(answers) <= {(run_id, f"20 10 {source}"), ErrorCode.UNAVAILABLE}
    assert (await bench.other.world.view(job_id)).job.run_count == 2
    if large_from == 100:
        await bench.exact(job_id, run_id, "spp" * 10)
    assert await bench.intents() == 0


async def test_a_call_that_was_overtaken_answers_for_the_one_that_made_the_run(
    bench: Ingests,
) -> None:
    job_id, source = await bench.other.ended("sff")
    run_id = bench.one.world.clock.new_id()

    async def overtake() -> None:
        await bench.other.world.rerun(job_id, F, run_id=run_id)

    bench.faults.before(DB, TRANSACT, overtake)
    assert await bench.one.world.rerun(job_id, F, run_id=run_id) == (run_id, f"2 1 {source}")
    await bench.exact(job_id, run_id, "spp")


async def test_a_source_that_is_deleted_meanwhile_is_not_replayed(bench: Ingests) -> None:
    job_id, source = await bench.other.ended("sff")

    async def delete() -> None:
        runs = bench.other.world.store.runs
        await runs.delete_run(CALLER, job_id, source, now=bench.one.world.now)

    bench.faults.before(DB, TRANSACT, delete)
    await refused(ErrorCode.NO_PRIOR_RUN, bench.one.world.rerun(job_id, F))
    assert await bench.intents() == 0


@pytest.mark.parametrize("large_from", [1, 100])
async def test_a_source_that_is_replayed_meanwhile_is_not_deleted(
    bench: Ingests, large_from: int
) -> None:
    job_id, source = await bench.other.ended("sff")

    async def rerun() -> None:
        await bench.other.world.rerun(job_id, F, large_from=large_from)

    # The pins have been looked at by then.
    bench.faults.before(DB, TRANSACT, rerun)
    delete = bench.one.world.store.runs.delete_run
    await refused(
        ErrorCode.RUN_HAS_DESCENDANTS, delete(CALLER, job_id, source, now=bench.one.world.now)
    )
    assert bench.faults.fired == 1


async def test_a_task_that_settles_while_it_is_copied_is_counted_as_it_was_copied(
    bench: Ingests,
) -> None:
    job_id, source = await bench.other.ended("rs")
    task = await bench.other.row(source, 0)

    async def settle() -> None:
        await bench.other.world.settle(task, bench.other.world.success(task))

    bench.faults.before(DB, TRANSACT, settle)
    run_id, told = await bench.one.world.rerun(job_id, R)
    assert told == f"1 1 {source}"
    await bench.exact(job_id, run_id, "ps")


async def test_tasks_that_were_only_being_added_are_not_replayed(bench: Ingests) -> None:
    job_id, run_id = await bench.other.world.submit(2, closed=False, task_shard_count=2)
    bench.faults.fail(DB, TRANSACT, away(), nth=2)
    bench.faults.fail(DB, UPDATE, away())
    await refused(ErrorCode.UNAVAILABLE, bench.one.world.append(job_id, 3))
    assert await bench.rows_left(job_id) == 5
    await bench.other.world.store.runs.stop_run(CALLER, job_id, now=bench.one.world.now)
    small, told = await bench.one.world.rerun(job_id)
    assert told == f"2 0 {run_id}"
    await bench.exact(job_id, small, "pp")


async def test_a_large_rerun_replays_no_task_that_was_only_being_added(bench: Ingests) -> None:
    job_id, run_id = await bench.other.world.submit(2, closed=False, task_shard_count=2)
    bench.faults.fail(DB, TRANSACT, away(), nth=2)
    bench.faults.fail(DB, UPDATE, away())
    await refused(ErrorCode.UNAVAILABLE, bench.one.world.append(job_id, 3))
    await bench.other.world.store.runs.stop_run(CALLER, job_id, now=bench.one.world.now)
    large, told = await bench.one.world.rerun(job_id, large_from=1)
    assert told == f"2 0 {run_id}"
    assert await bench.one.copy(large, 0, 5) == [0, 1]
    assert await bench.one.finish(large) is RunStatus.RUNNING
    await bench.exact(job_id, large, "pp")
