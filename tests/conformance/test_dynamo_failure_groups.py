"""Failure groups on DynamoDB: exact under lost and late answers, with two processes at once, and
beside versions without groups; bounded in the run's row; gone with the run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from msgspec import structs

from conveyor.clock import SystemClock
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.failure_groups import MOST_GROUPS, MOST_SAMPLES, failure_kind
from conveyor.domain.model import Format, Problem, RunStats, RunStatus, StoredBody, TaskFailure
from conveyor.domain.result_shape import MOST_TYPES, OTHER_TYPE, SIZE_CLASSES, ResultShape
from conveyor.domain.task_rules import Failed, Succeeded
from conveyor.ports.tasks import Settled
from conveyor.prod.aws.calls import AwsRefused, Parameters
from conveyor.prod.dynamodb import counter_sums
from conveyor.prod.dynamodb import recount as recounting
from conveyor.prod.dynamodb.client import Item, Query, tag_all
from conveyor.prod.dynamodb.counter_sums import (
    CountedValues,
    GroupCount,
    encode_values,
    new_process_item,
)
from conveyor.prod.dynamodb.failure_groups import FailureSample, new_group_item
from conveyor.prod.dynamodb.recount import recount
from conveyor.prod.dynamodb.run_rows import new_run_item
from conveyor.prod.dynamodb.schema import GROUPS_SHAPE, ROW_SHAPE, failure_group_key, run_key
from conveyor.testing.clock import FakeClock
from tests.conformance.dynamo_ingests import DB, TRANSACT, Ingests, away, open_ingests, plan
from tests.conformance.dynamo_runs import TableBench, additions, check
from tests.conformance.world import CALLER, F, P, S, World

pytestmark = pytest.mark.extended

MOST_BYTES = 8_192


@pytest.fixture
async def ingests(clock: FakeClock) -> AsyncIterator[Ingests]:
    """An empty table, and two processes."""
    async with open_ingests(clock) as opened:
        yield opened


def problem_of(kind: int) -> Problem:
    """A failure of a kind."""
    word = "".join(chr(ord("a") + int(digit)) for digit in str(kind))
    return Problem(code="blocked", title="Blocked", status=502, detail=f"{word} said no")


def id_of(kind: int) -> str:
    """The id of its group."""
    return failure_kind(TaskFailure.BLOCKED, problem_of(kind)).group_id


async def fail(world: World, run_id: str, index: int, kind: int) -> Settled:
    """Take a task from pending to failed."""
    return await world.fail(run_id, index, TaskFailure.BLOCKED, problem_of(kind))


async def begin_groups(world: World, run_id: str, count: int, *, first: int = 0) -> None:
    """Fail tasks at once, each of a kind of its own."""
    await asyncio.gather(*(fail(world, run_id, index, index) for index in range(first, count)))


async def counts(bench: TableBench, run_id: str) -> dict[str, int]:
    """The groups as a reader finds them; they are those of the rows."""
    world = bench.observer()
    found = await world.groups(run_id)
    rows = Counter(row.failure_group for row in await world.rows(run_id))
    for group in found.groups:
        assert group.count == rows[group.group_id]
        assert len(group.task_ids) == len(set(group.task_ids)) == min(group.count, MOST_SAMPLES)
    return {group.group_id: group.count for group in found.groups}


async def group_keys(table: Any, run_id: str) -> list[str]:
    """The items beside the place of a run."""
    page = await table.page(Query(failure_group_key(run_id, "").pk, begins_with="Failure#"))
    return [item["sk"] for item in page.items]


def notes(operation: str, _parameters: Parameters) -> bool:
    """Every write of one item, whole or in part, and every transaction."""
    return operation in ("put_item", "update_item", "transact_write_items")


async def fail_three(one: World, two: World) -> str:
    """Three failures of two kinds, in two processes."""
    _, run_id = await one.submit(4)
    for index, (world, kind) in enumerate([(one, 0), (two, 1), (two, 0)]):
        await fail(world, run_id, index, kind)
    return run_id


async def test_the_answer_of_each_write_is_lost_once(
    bench: TableBench, one: World, two: World
) -> None:
    await fail_three(one, two)
    count = sum(notes(*call) for call in bench.seam.calls)
    for lost in range(count):
        bench.seam.lose_answers(notes, passed=lost)
        run_id = await fail_three(one, two)
        assert bench.seam.faults == []
        assert await counts(bench, run_id) == {id_of(0): 2, id_of(1): 1}
        await check(bench, run_id)


@pytest.mark.parametrize("carried_out", [True, False])
async def test_a_sample_that_is_not_answered_is_noted_before_its_group_counts(
    bench: TableBench, one: World, carried_out: bool
) -> None:
    _, run_id = await one.submit(2)

    def puts(operation: str, _parameters: Parameters) -> bool:
        return operation == "put_item"

    bench.seam.be_away(puts, carried_out=carried_out)
    with pytest.raises(ConveyorError) as refused:
        await fail(one, run_id, 0, 7)
    assert refused.value.code is ErrorCode.UNAVAILABLE
    assert (await bench.row(run_id)).run.stats.failed == 0
    await fail(one, run_id, 1, 7)
    assert await counts(bench, run_id) == {id_of(7): 2}
    await check(bench, run_id)


async def test_what_arrives_twice_and_late_changes_nothing(
    bench: TableBench, one: World, two: World
) -> None:
    run_id = await fail_three(one, two)
    before = await bench.items(run_id)
    late = [
        (call, parameters) for call, parameters in bench.seam.calls if additions(call, parameters)
    ]
    assert [call for call, _ in late] == ["transact_write_items"] * 2 + ["update_item"]
    for call, parameters in late:
        # The transaction has other items, and thus another token, than one that DynamoDB knows.
        anew = {"ClientRequestToken": SystemClock().new_id()} if call != "update_item" else {}
        with pytest.raises(AwsRefused) as refused:
            await bench.seam.call(DB, call, {**parameters, **anew})
        assert refused.value.is_condition
    assert await bench.items(run_id) == before


async def test_two_processes_that_begin_the_last_group_at_once_agree_on_it(
    bench: TableBench, one: World, two: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counter_sums, "MOST_GROUPS", 4)
    _, run_id = await one.submit(8)
    await begin_groups(one, run_id, 3)
    await two.claimed(run_id, 7)  # it has seen as many
    held = bench.seam.acquire_or_renew(additions)
    slow = asyncio.create_task(fail(one, run_id, 3, 900))
    await held.met.wait()
    await bench.clock.advance(1)
    await fail(two, run_id, 4, 901)
    assert (await counts(bench, run_id)).keys() == {*map(id_of, range(3)), id_of(901)}
    held.gate.set()
    await slow
    await fail(two, run_id, 5, 900)

    # The group that began first is kept, whoever was counted first.
    assert (await counts(bench, run_id)).keys() == {*map(id_of, range(3)), id_of(900)}
    groups = await one.groups(run_id)
    assert (groups.failed, groups.other) == (6, 1)
    rows = await one.rows(run_id)
    assert [row.failure_group for row in rows[3:7]] == [*map(id_of, (900, 901, 900)), None]
    await check(bench, run_id)


async def test_a_group_that_one_process_had_no_room_for_is_not_shown_in_part(
    bench: TableBench, one: World, two: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (counter_sums, recounting):
        monkeypatch.setattr(module, "MOST_GROUPS", 2)
    _, run_id = await one.submit(8)
    for index, kind in enumerate([0, 1, 2, 0]):
        await fail(one, run_id, index, kind)
    for index, kind in enumerate([2, 0], start=4):
        await fail(two, run_id, index, kind)
    # The first process left a failure of the third kind out, so it counts in no group at all.
    assert await counts(bench, run_id) == {id_of(0): 3, id_of(1): 1}
    groups = await one.groups(run_id)
    assert (groups.failed, groups.other) == (6, 2)
    await check(bench, run_id)
    await bench.clock.advance(120)
    await recount(bench.outside, run_id, now=one.now)
    assert len(await counts(bench, run_id)) == 2


async def test_two_processes_agree_on_the_first_types(
    bench: TableBench, one: World, two: World
) -> None:
    _, run_id = await one.submit(2 * MOST_TYPES + 4)

    async def succeed(world: World, index: int, content_type: str) -> None:
        task = await world.claimed(run_id, index)
        body = StoredBody(f"{task.task_id}-body", 5, content_type, Format.PLAINTEXT)
        await world.settle(task, Succeeded(world.attempt(task), body))

    for index in range(MOST_TYPES + 2):
        held = bench.seam.acquire_or_renew(additions)
        slow = asyncio.create_task(succeed(one, 2 * index, f"a/x-{index:02}"))
        await held.met.wait()
        await succeed(two, 2 * index + 1, f"b/x-{index:02}")
        held.gate.set()
        await slow
    shape = (await bench.row(run_id)).run.stats.shape
    assert shape.sizes[1] == sum(shape.types.values()) == 2 * MOST_TYPES + 4
    assert len(shape.types) == MOST_TYPES + 1
    assert shape.types[OTHER_TYPE] == MOST_TYPES + 4
    counted = await recount(bench.outside, run_id, now=one.now)
    assert counted is not None
    row = await bench.row(run_id)
    assert (counted.run, counted.counter_epoch) == (row.run, 0)


async def test_a_task_that_succeeds_makes_three_writes(bench: TableBench, one: World) -> None:
    _, run_id = await one.submit(4)
    await fail(one, run_id, 3, 0)
    for index in range(3):
        bench.seam.calls.clear()
        await one.succeed(run_id, index)
        made = [call for call, _ in bench.seam.calls if call not in ("get_item", "query")]
        # The last one also ends the run.
        assert made == ["update_item"] * (3 if index < 2 else 4)


async def test_samples_are_written_for_the_first_failures_alone(
    bench: TableBench, one: World
) -> None:
    _, run_id = await one.submit(9)
    made = []
    for index in range(6):
        bench.seam.calls.clear()
        await fail(one, run_id, index, 0)
        made.append(sum(notes(*call) for call in bench.seam.calls))
    assert made == [4, 4, 4, 3, 3, 3]


async def test_a_failure_in_no_group_leaves_those_that_may_lack_it_out(
    bench: TableBench, one: World
) -> None:
    """Until a recount finds the rows of each."""
    _, run_id = await one.submit(6)
    await fail(one, run_id, 0, 0)
    row = await bench.row(run_id)
    task = await one.claimed(run_id, 1)
    await bench.outside.table.update(
        row.place.task_key(task.task_id),
        "SET #status = :failed, claimed_until = :zero, #failure = :failure",
        condition="",
        failed=str(F),
        failure=str(TaskFailure.BLOCKED),
        zero=0,
    )
    await bench.outside.table.update(
        row.place.key,
        "ADD failed :one, failed_blocked :one",
        condition="",
        one=1,
    )
    await one.claimed(run_id, 5)
    await fail(one, run_id, 2, 1)
    await fail(one, run_id, 3, 0)
    groups = await one.groups(run_id)
    assert (list(groups.groups), groups.other) == ([], 4)

    await one.clock.advance(120)
    row_after = await recount(bench.outside, run_id, now=one.now)
    assert row_after is not None
    assert row_after.counter_epoch == 1
    groups = await one.groups(run_id)
    assert {one.group_id: one.count for one in groups.groups} == {id_of(0): 2, id_of(1): 1}
    assert groups.other == 1
    [found] = [one for one in groups.groups if one.group_id == id_of(1)]
    assert found.detail == problem_of(1).detail
    assert await recount(bench.outside, run_id, now=one.now) == row_after


async def test_a_group_whose_item_cannot_be_read_lies_in_none(
    bench: TableBench, one: World
) -> None:
    _, run_id = await one.submit(4)
    for index in range(3):
        await fail(one, run_id, index, index)
    await bench.outside.table.delete(failure_group_key(run_id, id_of(0)))
    await bench.outside.table.update(
        failure_group_key(run_id, id_of(1)), "REMOVE #code", condition=""
    )
    groups = await one.groups(run_id)
    assert [one.group_id for one in groups.groups] == [id_of(2)]
    assert (groups.failed, groups.other) == (3, 2)


def size_of(value: Any) -> int:
    """The bytes of an attribute's value, as DynamoDB counts them."""
    if isinstance(value, bool) or value is None:
        return 1
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, int | float):
        return (len(str(value)) + 1) // 2 + 1
    if isinstance(value, Mapping):
        return 3 + sum(1 + len(name) + size_of(one) for name, one in value.items())
    return 3 + sum(1 + size_of(one) for one in value)


def item_size(item: Item) -> int:
    """The bytes of an item."""
    return sum(len(name) + size_of(value) for name, value in item.items())


async def test_a_row_with_all_groups_is_below_eight_kilobytes(clock: FakeClock) -> None:
    """Each with five thousand tasks; with all types, and the processes of a small fleet."""
    world = World(None, clock)  # type: ignore[arg-type]
    job, run, _ = world.draft(0, caller="c" * 32)
    types = {f"application/vnd.kind-{number:02}+json": 60_000 for number in range(MOST_TYPES)}
    stats = RunStats(
        total=1_000_000,
        successful=1_000_000,
        failed=1_000_000,
        failure_reasons=dict.fromkeys(TaskFailure, 100_000),
        shape=ResultShape((125_000,) * SIZE_CLASSES, types),
    )
    run = structs.replace(run, stats=stats, next_index=1_000_000)
    groups = {id_of(kind): GroupCount(5_000, 1_764_000_000_000) for kind in range(MOST_GROUPS)}
    assert len(groups) == MOST_GROUPS
    item = new_run_item(run, job, groups=groups)
    assert 6_000 < item_size(item) < MOST_BYTES
    assert tag_all(item)


async def test_an_item_with_all_groups_is_below_sixteen_kilobytes() -> None:
    """Each with fifty tasks of one process."""
    groups = {
        id_of(kind): GroupCount(50, 1_764_000_000_000, 1_764_000_000_000)
        for kind in range(MOST_GROUPS)
    }
    values = CountedValues(failed=10_000, groups=groups)
    item = new_process_item(1_000_000, values)
    assert 8_000 < item_size(item) < 2 * MOST_BYTES
    assert len(encode_values(values)) < item_size(item)


async def test_groups_go_with_the_rows_of_a_deleted_run_and_come_back_no_more(
    ingests: Ingests,
) -> None:
    one, other = ingests.one.world, ingests.other.world
    job_id, run_id = await other.submit(4)
    await fail(other, run_id, 0, 0)
    await fail(one, run_id, 1, 1)
    assert len(await group_keys(ingests.table, run_id)) == 2
    task = await one.claimed(run_id, 2)

    async def delete() -> None:
        await other.store.runs.delete_run(CALLER, job_id, run_id, now=one.now)
        while await other.store.tasks.scrub_tasks(run_id, 100):
            pass
        assert await group_keys(ingests.table, run_id) == []
        await other.store.runs.purge_run(run_id)

    # The last failure moves its row, and then its run is gone before it is counted.
    ingests.faults.before(DB, "put_item", delete)
    problem = problem_of(2)
    failed = Failed(one.attempt(task, problem), problem, TaskFailure.BLOCKED)
    assert await one.settle(task, failed) == Settled(applied=False, run_status=None)
    assert ingests.faults.fired == 1
    assert await group_keys(ingests.table, run_id) == []


async def test_samples_of_a_run_that_is_gone_are_removed_however_often_it_takes(
    bench: TableBench, one: World
) -> None:
    _, run_id = await one.submit(1)
    task = await one.claimed(run_id, 0)
    await bench.outside.table.delete((await bench.row(run_id)).place.key)
    bench.seam.be_away(lambda operation, _: operation == "query", carried_out=False, count=2)
    problem = problem_of(0)
    failed = Failed(one.attempt(task, problem), problem, TaskFailure.BLOCKED)
    with pytest.raises(ConveyorError):
        await one.settle(task, failed)
    assert len(await group_keys(bench.outside.table, run_id)) == 1
    while await group_keys(bench.outside.table, run_id):
        await bench.clock.advance(0.5)


async def test_the_purge_of_a_run_takes_groups_that_came_after_the_scrub(ingests: Ingests) -> None:
    world = ingests.other.world
    job_id, run_id = await world.submit(1)
    await world.store.runs.delete_run(CALLER, job_id, run_id, now=world.now)
    await world.store.tasks.scrub_tasks(run_id, 100)
    failure = FailureSample.of("task", TaskFailure.BLOCKED, problem_of(0), 1)
    item = new_group_item(failure, ["task"])
    await ingests.table.put(failure_group_key(run_id, failure.group_id), item)
    await world.store.runs.purge_run(run_id)
    assert await group_keys(ingests.table, run_id) == []


@pytest.mark.parametrize("large_from", [100, 1])
async def test_a_rerun_that_is_not_made_leaves_no_groups(ingests: Ingests, large_from: int) -> None:
    world = ingests.other.world
    job_id, run_id = await world.submit(4)
    for index in range(3):
        await fail(world, run_id, index, index)
    await world.succeed(run_id, 3)
    new_id = world.clock.new_id()
    written: list[str] = []

    async def look() -> None:
        written.extend(await group_keys(ingests.table, new_id))
        raise away()

    ingests.faults.before(DB, TRANSACT, look)
    with pytest.raises(ConveyorError):
        await ingests.one.world.rerun(
            job_id, run_id=new_id, large_from=large_from, groups=[id_of(0)]
        )
    assert len(written) == 2
    assert await group_keys(ingests.table, new_id) == []
    assert await ingests.intents() == 0


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("large_from", [100, 1])
async def test_a_rerun_of_a_group_carries_the_others_over(
    ingests: Ingests, large_from: int, lost: bool
) -> None:
    one, other = ingests.one.world, ingests.other.world
    job_id, run_id = await other.submit(6, task_shard_count=2)
    for index, kind in enumerate([0, 1, 1, 2]):
        await fail(other, run_id, index, kind)
        await one.clock.advance(1)
    await other.succeed(run_id, 4)
    await other.succeed(run_id, 5)
    source = await other.groups(run_id)
    if lost:
        ingests.lose_every_answer()
    new_id, told = await one.rerun(job_id, large_from=large_from, groups=[id_of(1)])
    assert told == f"2 4 {run_id}"
    kept = [group for group in source.groups if group.group_id != id_of(1)]
    assert (await one.groups(new_id)).groups == kept
    if large_from == 1:
        item = await ingests.item(job_id, 2)
        assert item["shape"] == GROUPS_SHAPE
        assert await ingests.one.copy(new_id, 0, 3) == [1, 2]
        assert await ingests.one.copy(new_id, 3, 6) == []
        assert await ingests.one.finish(new_id) is RunStatus.RUNNING
    item = await ingests.item(job_id, 2)
    assert item["shape"] == ROW_SHAPE
    assert item.keys().isdisjoint({"planned", "copied"})
    groups = await one.groups(new_id)
    assert (groups.groups, groups.failed, groups.other) == (kept, 2, 0)
    stats = (await one.run(job_id, new_id)).stats
    assert (stats.total, stats.inherited, stats.failure_reasons) == (6, 4, {"blocked": 2})
    assert stats.shape == (await one.run(job_id, run_id)).stats.shape
    before = await ingests.item(job_id, 2)
    await other.store.sweeping.reconcile_run(new_id, now=one.now)
    assert await ingests.item(job_id, 2) == before
    await ingests.exact(job_id, new_id, "fppfss")


async def test_a_plan_of_wrong_counters_is_put_right_by_the_rows(ingests: Ingests) -> None:
    """The source told of a failure and a body too many, and of a type that no row has."""
    job_id, run_id = await ingests.other.world.submit(5)
    world = ingests.other.world
    for index in range(2):
        await fail(world, run_id, index, 0)
    await world.succeed(run_id, 2)
    await world.store.runs.stop_run(CALLER, job_id, now=world.now)
    await world.clock.advance(60)
    exact = (await world.run(job_id, run_id)).stats.shape
    await ingests.table.update(
        run_key(job_id, 1),
        "SET failure_groups = :groups, #types = :types ADD failed :one, failed_blocked :one",
        condition="",
        groups={id_of(0): [1, world.now]},
        types={"nobody/knows": 1},
        one=1,
    )
    new_id, _ = await world.rerun(job_id, P, large_from=1)
    assert await ingests.other.copy(new_id, 0, 5) == [3, 4]
    await ingests.other.finish(new_id)
    groups = await world.groups(new_id)
    assert {one.group_id: one.count for one in groups.groups} == {id_of(0): 2}
    assert (groups.failed, groups.other) == (2, 0)
    stats = (await world.run(job_id, new_id)).stats
    assert (stats.shape, stats.inherited) == (exact, 3)


async def test_a_full_rerun_begins_without_groups(ingests: Ingests) -> None:
    job_id, _, run_id = await plan(ingests, "sff", S, F, P)
    assert (await ingests.other.world.groups(run_id)).failed == 0
    item = await ingests.item(job_id, 2)
    assert item.keys().isdisjoint({"failure_groups", "types"})
