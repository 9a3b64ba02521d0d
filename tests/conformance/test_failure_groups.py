"""Failure groups: counted with `failed`, on the row, and rerun one by one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
from random import Random

import pytest

from conveyor.domain import ids
from conveyor.domain.errors import ErrorCode
from conveyor.domain.failure_groups import (
    MOST_GROUPS,
    OTHER_GROUP,
    FailureGroup,
    failure_kind,
    group_filter,
)
from conveyor.domain.model import GroupFilter, Problem, RunStatus, Task, TaskFailure
from conveyor.domain.shards import Shards, ShardScheme
from conveyor.domain.task_rules import Failed, Settlement, Succeeded
from conveyor.ports.tasks import Claimed
from tests.conformance.bindings import BindingKind
from tests.conformance.world import CALLER, CLAIM_LENGTH, F, P, S, World, refused

REASONS = list(TaskFailure)
LAYOUTS = [Shards(), Shards(3, ShardScheme.FNV32A)]


@pytest.fixture(
    params=[LAYOUTS[0], pytest.param(LAYOUTS[1], marks=pytest.mark.extended)],
    ids=lambda shards: f"{shards.count}-{shards.scheme}",
)
def shards(request: pytest.FixtureRequest) -> Shards:
    """Each layout in turn."""
    layout: Shards = request.param
    return layout


def problem_of(kind: int, task: int = 0) -> Problem:
    """A failure of a kind, with a detail that differs from task to task in numbers alone."""
    words = "".join(chr(ord("a") + int(digit)) for digit in str(kind))
    return Problem(
        code="blocked", title="Blocked", status=502, detail=f"{words} said no after {task} ms"
    )


def reason_of(kind: int) -> TaskFailure:
    """The reason of a kind."""
    return REASONS[kind % len(REASONS)]


def id_of(kind: int) -> str:
    """The id of the group of a kind."""
    return failure_kind(reason_of(kind), problem_of(kind)).group_id


class Failures:
    """A job with a run whose tasks fail as they are told."""

    def __init__(self, world: World, shards: Shards) -> None:
        self.world = world
        self.shards = shards
        self.job_id = self.run_id = self.first_id = ""
        self.kinds: dict[int, int] = {}

    async def submit(self, count: int) -> Failures:
        """Write the job and its run."""
        self.job_id, self.run_id = await self.world.submit(
            count, task_shard_count=self.shards.count, shard_scheme=self.shards.scheme.value
        )
        self.first_id = self.run_id
        return self

    async def fail(self, index: int, kind: int) -> None:
        """Fail one task."""
        task = await self.claimed(index)
        problem = problem_of(kind, index)
        await self.world.settle(
            task, Failed(self.world.attempt(task, problem), problem, reason_of(kind))
        )
        self.kinds[index] = kind

    async def succeed(self, index: int) -> None:
        """End one task well."""
        task = await self.claimed(index)
        await self.world.settle(task, self.world.success(task))

    async def claimed(self, index: int) -> Task:
        """Claim a task of the latest run, which has the ids of the first one."""
        task_id = ids.task_id(self.first_id, index)
        return await self.world.claimed(self.run_id, index, task_id=task_id)

    async def rerun(self, *groups: str, large_from: int = 10_000) -> str:
        """Rerun some groups; tell what the answer tells."""
        self.run_id, told = await self.world.rerun(
            self.job_id, groups=groups, large_from=large_from
        )
        return told

    async def copy(self, end: int) -> None:
        """Do all the ingestion of a large rerun."""
        ingestion = self.world.store.ingestion
        await ingestion.copy_rows(self.run_id, first_index=0, end_index=end, now=self.world.now)
        await ingestion.finish_ingest(self.run_id, now=self.world.now)

    async def counts(self) -> dict[str, int]:
        """The counts of the groups, with that of none, which must add up to what the run says."""
        groups = await self.world.groups(self.run_id)
        run = await self.world.run(self.job_id, self.run_id)
        assert groups.failed == run.stats.failed
        counts = {group.group_id: group.count for group in groups.groups}
        return counts | ({OTHER_GROUP: groups.other} if groups.other else {})

    async def group(self, kind: int) -> FailureGroup:
        """One group."""
        groups = await self.world.groups(self.run_id)
        return next(group for group in groups.groups if group.group_id == id_of(kind))

    async def rows(self) -> list[Task]:
        """Every row of the latest run."""
        return await self.world.rows(self.run_id, self.shards.count)

    async def indexes(self, groups: GroupFilter, *, limit: int = 1_000) -> list[int]:
        """The indexes of the rows of some groups, page by page."""
        found: list[int] = []
        for shard in range(self.shards.count):
            after: int | None = -1
            while after is not None:
                page = await self.world.store.tasks.page_tasks(
                    self.run_id,
                    shard=shard,
                    statuses=frozenset({F}),
                    after=after,
                    limit=limit,
                    groups=groups,
                )
                found += [task.index for task in page.tasks]
                after = page.next_index
        return sorted(found)


def of(*kinds: int, outside: Collection[int] | None = None) -> GroupFilter:
    """A filter by kinds."""
    return GroupFilter(
        frozenset(map(id_of, kinds)),
        None if outside is None else frozenset(map(id_of, outside)),
    )


async def test_failures_are_counted_in_groups(world: World, shards: Shards) -> None:
    failures = await Failures(world, shards).submit(12)
    begun = world.now
    for index, kind in enumerate([0, 0, 1, 0, 0, 2]):
        await failures.fail(index, kind)
        await world.clock.advance(1.0)
        assert sum((await failures.counts()).values()) == index + 1
    await failures.succeed(6)

    assert await failures.counts() == {id_of(0): 4, id_of(1): 1, id_of(2): 1}
    groups = (await world.groups(failures.run_id)).groups
    assert [group.group_id for group in groups] == [id_of(0), id_of(1), id_of(2)]
    largest = groups[0]
    assert largest == FailureGroup(
        group_id=id_of(0),
        reason=reason_of(0),
        code="blocked",
        status=502,
        count=4,
        first_at=begun,
        last_at=begun + 4_000,
        detail=problem_of(0, 0).detail,
        task_ids=tuple(ids.task_id(failures.run_id, index) for index in (0, 1, 3)),
    )
    rows = await failures.rows()
    assert [row.failure_group for row in rows] == [
        *[id_of(kind) for kind in (0, 0, 1, 0, 0, 2)],
        *[None] * 6,
    ]


async def test_a_run_without_failures_has_no_groups_and_none_has_none(world: World) -> None:
    failures = await Failures(world, Shards()).submit(2)
    await failures.succeed(0)
    groups = await world.groups(failures.run_id)
    assert (groups.failed, list(groups.groups)) == (0, [])
    assert await world.store.tasks.failure_groups(world.clock.new_id()) is None


async def test_a_task_whose_claims_lapse_too_often_is_in_a_group(world: World) -> None:
    failures = await Failures(world, Shards()).submit(1)
    for _ in range(3):
        await failures.claimed(0)
        await world.clock.advance(CLAIM_LENGTH / 1_000 + 1)
    await world.claim(failures.run_id, 0)
    [group] = (await world.groups(failures.run_id)).groups
    [row] = await failures.rows()
    assert row.error is not None
    assert (group.code, group.count, group.reason) == (row.error.code, 1, TaskFailure.OTHER)
    assert row.failure_group == group.group_id
    assert group.group_id == failure_kind(TaskFailure.OTHER, row.error).group_id


async def test_a_settlement_that_comes_twice_counts_once(world: World) -> None:
    failures = await Failures(world, Shards()).submit(3)
    task = await failures.claimed(0)
    problem = problem_of(1)
    failed = Failed(world.attempt(task, problem), problem, reason_of(1))
    answers = await asyncio.gather(*(world.settle(task, failed) for _ in range(4)))
    assert sorted(answer.applied for answer in answers) == [False, False, False, True]
    assert await failures.counts() == {id_of(1): 1}


async def test_rows_are_read_by_their_group(world: World, shards: Shards) -> None:
    failures = await Failures(world, shards).submit(14)
    for index in range(12):
        await failures.fail(index, index % 3)
    await failures.succeed(12)

    assert await failures.indexes(of(1)) == [1, 4, 7, 10]
    assert await failures.indexes(of(1), limit=2) == [1, 4, 7, 10]
    assert await failures.indexes(of(0, 2), limit=3) == [0, 2, 3, 5, 6, 8, 9, 11]
    assert await failures.indexes(of(9)) == []
    assert await failures.indexes(of(outside=[1]), limit=3) == [0, 2, 3, 5, 6, 8, 9, 11]
    assert await failures.indexes(of(0, outside=[0, 1])) == [0, 2, 3, 5, 6, 8, 9, 11]
    assert await failures.indexes(of(outside=[0, 1, 2])) == []
    page = await world.store.tasks.page_tasks(
        failures.run_id, statuses=frozenset({S, P}), after=None, limit=10, groups=of(1)
    )
    assert (page.tasks, page.next_index) == ([], None)


async def test_a_page_by_groups_reads_no_more_rows_than_it_may(world: World) -> None:
    failures = await Failures(world, Shards()).submit(11)
    for index in range(10):
        await failures.fail(index, 0 if index == 9 else 1)
    found: list[int] = []
    after: int | None = -1
    pages = 0
    while after is not None:
        page = await world.store.tasks.page_tasks(
            failures.run_id,
            statuses=frozenset({F}),
            after=after,
            limit=2,
            most_read=3,
            groups=of(outside=[1]),
        )
        assert page.rows_read <= 3
        found += [task.index for task in page.tasks]
        after = page.next_index
        pages += 1
    assert (found, pages >= 4) == ([9], True)


@pytest.mark.parametrize("large_from", [10_000, 5], ids=["small", "large"])
async def test_two_groups_of_five_are_rerun(world: World, shards: Shards, large_from: int) -> None:
    failures = await Failures(world, shards).submit(22)
    for index in range(15):
        await failures.fail(index, index % 5)
    for index in range(15, 20):
        await failures.succeed(index)
    await world.store.runs.stop_run(CALLER, failures.job_id, now=world.now)
    source = failures.run_id
    kept = await failures.group(0)
    await world.clock.advance(60.0)

    told = await failures.rerun(id_of(1), id_of(3), large_from=large_from)
    assert told == f"6 14 {source}"
    assert await failures.counts() == {id_of(0): 3, id_of(2): 3, id_of(4): 3}
    if large_from == 5:
        await failures.copy(22)
        assert await failures.counts() == {id_of(0): 3, id_of(2): 3, id_of(4): 3}
    run = await world.run(failures.job_id)
    assert (run.stats.total, run.stats.failed, run.stats.inherited) == (20, 9, 14)
    assert sum(run.stats.failure_reasons.values()) == 9
    assert await failures.group(0) == kept
    rows = await failures.rows()
    assert {row.index: row.failure_group for row in rows if row.status is F} == {
        index: id_of(index % 5) for index in range(15) if index % 5 in (0, 2, 4)
    }
    assert [row.index for row in rows if row.status is P] == [1, 3, 6, 8, 11, 13]
    assert {row.source_run_id for row in rows if row.status is not P} == {source}

    for index in (1, 3, 6, 8, 11):
        await failures.succeed(index)
    await failures.fail(13, 0)
    assert await failures.counts() == {id_of(0): 4, id_of(2): 3, id_of(4): 3}
    run = await world.run(failures.job_id)
    assert (run.status, run.stats.completed) == (RunStatus.COMPLETED, 20)


async def test_a_rerun_without_a_task_of_its_groups_is_refused(world: World) -> None:
    failures = await Failures(world, Shards()).submit(4)
    for index in range(4):
        await failures.fail(index, index % 2)
    for large_from in (10_000, 2):
        for unknown in (id_of(7), OTHER_GROUP):
            await refused(
                ErrorCode.NO_MATCHING_TASKS,
                world.rerun(failures.job_id, groups=[unknown], large_from=large_from),
            )
    assert (await world.view(failures.job_id)).job.run_count == 1
    assert await failures.rerun(id_of(7), id_of(0)) == f"2 2 {failures.first_id}"


@pytest.mark.parametrize("large_from", [10_000, 2], ids=["small", "large"])
async def test_all_other_failures_are_inherited_with_their_groups(
    world: World, large_from: int
) -> None:
    failures = await Failures(world, Shards()).submit(8)
    for index in range(6):
        await failures.fail(index, index % 2)
    await world.store.runs.stop_run(CALLER, failures.job_id, now=world.now)
    failures.run_id, told = await world.rerun(failures.job_id, P, large_from=large_from)
    assert told == f"2 6 {failures.first_id}"
    if large_from == 2:
        await failures.copy(8)
    assert await failures.counts() == {id_of(0): 3, id_of(1): 3}
    for index in (6, 7):
        await failures.succeed(index)
    failures.run_id, told = await world.rerun(failures.job_id, F, large_from=large_from)
    assert told.startswith("6 2")
    if large_from == 2:
        await failures.copy(8)
    assert await failures.counts() == {}


async def test_a_rerun_that_is_cut_short_has_the_groups_of_its_rows(world: World) -> None:
    failures = await Failures(world, Shards()).submit(9)
    for index in range(9):
        await failures.fail(index, index % 3)
    await failures.rerun(id_of(2), large_from=2)
    assert await failures.counts() == {id_of(0): 3, id_of(1): 3}
    ingestion = world.store.ingestion
    await ingestion.copy_rows(failures.run_id, first_index=0, end_index=4, now=world.now)
    await world.store.runs.stop_run(CALLER, failures.job_id, now=world.now)
    await ingestion.finish_ingest(failures.run_id, now=world.now)
    assert await failures.counts() == {id_of(0): 2, id_of(1): 1}
    run = await world.run(failures.job_id)
    assert (run.stats.total, run.stats.failed, run.stats.inherited) == (4, 3, 3)


@pytest.mark.slow
@pytest.mark.extended
async def test_what_comes_after_the_last_group_falls_into_one(world: World) -> None:
    count = MOST_GROUPS + 50
    failures = await Failures(world, Shards()).submit(count + 12)
    await asyncio.gather(*(failures.fail(index, index) for index in range(count)))
    counts = await failures.counts()
    assert counts.pop(OTHER_GROUP) == 50
    assert (len(counts), set(counts.values())) == (MOST_GROUPS, {1})
    assert await world.store.sweeping.reconcile_run(failures.run_id, now=world.now)
    assert await failures.counts() == counts | {OTHER_GROUP: 50}

    outside = [index for index in range(count) if id_of(index) not in counts]
    inside = next(index for index in range(count) if id_of(index) in counts)
    await failures.fail(count, outside[0])
    await failures.fail(count + 1, inside)
    await failures.fail(count + 2, 9_999)
    assert await failures.counts() == counts | {OTHER_GROUP: 52, id_of(inside): 2}
    rows = await failures.rows()
    assert {row.index: row.failure_group for row in rows if row.status is F} == {
        index: id_of(kind) for index, kind in failures.kinds.items()
    }
    others = [*outside, count, count + 2]
    kept = [group.group_id for group in (await world.groups(failures.run_id)).groups]
    assert await failures.indexes(group_filter(frozenset({OTHER_GROUP}), kept)) == others
    assert await failures.indexes(group_filter(frozenset({id_of(outside[0])}), kept)) == []

    await world.store.runs.stop_run(CALLER, failures.job_id, now=world.now)
    await refused(
        ErrorCode.NO_MATCHING_TASKS, world.rerun(failures.job_id, groups=[id_of(outside[0])])
    )
    told = await failures.rerun(OTHER_GROUP, id_of(inside))
    assert told == f"54 {count + 3 - 54} {failures.first_id}"
    assert await failures.counts() == {group: 1 for group in counts if group != id_of(inside)}
    fresh = [row.index for row in await failures.rows() if row.status is P]
    assert fresh == sorted([*others, inside, count + 1])


class Weather:
    """Work on a run by workers that die, and messages that come twice."""

    def __init__(self, failures: Failures, seed: int, count: int) -> None:
        self.failures = failures
        self.world = failures.world
        self.random = Random(seed)
        self.open = set(range(count))

    async def work(self, index: int) -> None:
        """Claim a task, and fail it once or twice, end it, try it again, or die with it."""
        failures, world, random = self.failures, self.world, self.random
        claim = await world.claim(failures.run_id, index)
        if not isinstance(claim, Claimed):
            return
        task = claim.task
        chance = random.random()
        if chance < 0.15:
            return  # its worker is gone
        kind = random.randrange(50)
        problem = problem_of(kind, index)
        failed = Failed(world.attempt(task, problem), problem, reason_of(kind))
        settlement: Settlement = failed
        if chance < 0.3:
            settlement = world.success(task)
        elif chance < 0.5:
            settlement = world.retry(task)
        copies = 1 + (random.random() < 0.5)
        settled = await asyncio.gather(*(world.settle(task, settlement) for _ in range(copies)))
        assert sum(one.applied for one in settled) == 1
        if isinstance(settlement, Failed | Succeeded):
            self.open.discard(index)

    async def look(self) -> None:
        """Read the groups: they add up to the failed tasks of the very answer."""
        groups = await self.world.groups(self.failures.run_id)
        assert groups.other == 0
        assert sum(group.count for group in groups.groups) == groups.failed

    async def round(self) -> None:
        """Work every task that is open, all at once, and look meanwhile."""
        order = sorted(self.open)
        self.random.shuffle(order)
        steps = [self.work(index) for index in order for _ in range(1 + (index % 3 == 0))]
        await asyncio.gather(*steps, *(self.look() for _ in range(5)))
        await self.look()
        await self.world.clock.advance(CLAIM_LENGTH / 1_000 + 1)
        rows = await self.failures.rows()
        self.open = {row.index for row in rows if row.status not in (S, F)}


@pytest.mark.guarantee("G3")
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(n, marks=pytest.mark.extended) for n in (2, 3))]
)
async def test_groups_add_up_at_every_read_whatever_happens(
    world: World, binding_kind: BindingKind, seed: int
) -> None:
    count = round(150 * binding_kind.effort)
    failures = await Failures(world, Shards()).submit(count)
    weather = Weather(failures, seed, count)
    while weather.open:
        await weather.round()
    run = await world.run(failures.job_id)
    assert (run.status, run.stats.completed) == (RunStatus.COMPLETED, count)
    expected: Counter[str] = Counter()
    for row in await failures.rows():
        if row.status is F:
            assert row.failure is not None
            assert row.error is not None
            expected[failure_kind(row.failure, row.error).group_id] += 1
    assert await failures.counts() == expected
