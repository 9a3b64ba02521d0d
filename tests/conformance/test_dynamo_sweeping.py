"""The additions of DynamoDB to the sweeping port: indexes to merge, writes cut off in the
middle."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import anyio.to_thread
import pytest
from msgspec import structs

from conveyor.domain import ids
from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import Job, JobStatus, NewTask, Run, RunStats, RunStatus, TaskSpec
from conveyor.domain.shards import Shards, ShardScheme
from conveyor.ports.maintenance import ENDED_FOR, DuePosition, EndedRun
from conveyor.ports.records import Appended, AppendRequest
from conveyor.ports.records import StoredResponse as Stored
from conveyor.prod.aws.calls import Answer, Aws, Parameters
from conveyor.prod.aws.opening import over_clients
from conveyor.prod.dynamodb import schema
from conveyor.prod.dynamodb.client import Query, Table
from conveyor.prod.dynamodb.jobs import DynamoJobs
from conveyor.prod.dynamodb.run_rows import DynamoRunRows, RunPlace, RunPlaces, new_run_item
from conveyor.prod.dynamodb.runs import query_all
from conveyor.prod.dynamodb.schema import (
    Key,
    by_time,
    intent_key,
    pin_key,
    place_key,
    table_parameters,
    task_partition,
    task_sort_key,
)
from conveyor.prod.dynamodb.submitting import intent_item
from conveyor.prod.dynamodb.sweeping import PATIENCE, DynamoSweeping
from conveyor.prod.dynamodb.task_rows import new_task_item
from conveyor.testing.clock import FakeClock
from tests.conformance.production_store import account, dynamodb, new_name

pytestmark = pytest.mark.extended

DAY = 86_400_000
CALLER = "caller"
SPEC = TaskSpec(url="https://site.test/")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Seam:
    """Passes calls on; makes one again whose answer it loses, and counts entries of the index.

    `meanwhile` happens before the next transaction that makes a job, or counts tasks.
    """

    def __init__(self, aws: Aws) -> None:
        self.lose = False
        self.entries = self.calls = self.read = 0
        self.meanwhile: Callable[[], Awaitable[None]] | None = None
        self._aws = aws

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        if self.meanwhile is not None and _counts(parameters):
            meanwhile, self.meanwhile = self.meanwhile, None
            await meanwhile()
        answer = await self._aws.call(service, operation, parameters)
        if self.lose and operation == "update_item":
            self.lose = False
            answer = await self._aws.call(service, operation, parameters)
        self.calls += 1
        self.read += answer.get("ScannedCount", 0)
        if parameters.get("IndexName") == "gsi1":
            self.entries += answer["ScannedCount"]
        return answer

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        raise AssertionError("nobody asks for links")


def _counts(parameters: Parameters) -> bool:
    parts = parameters.get("TransactItems", ())
    return len(parts) > 1 or any("#total" in str(part) for part in parts)


class Bench:
    """An empty table, a sweeper, and short words for what lies in the table."""

    def __init__(self, aws: Aws, table: str, clock: FakeClock) -> None:
        self.clock = clock
        self.seam = Seam(aws)
        self.table = Table(self.seam, table, clock)
        records = DynamoRunRows(self.table, RunPlaces(self.table))
        self.sweeping = DynamoSweeping(records)
        self.jobs = DynamoJobs(records)

    @property
    def now(self) -> int:
        return self.clock.now()

    def draft(self, *, count: int, shards: int = 1) -> tuple[Job, Run, list[NewTask]]:
        """An open job with a run of so many tasks, not written yet."""
        job_id, run_id = self.clock.new_id(), self.clock.new_id()
        job = Job(
            job_id=job_id,
            status=JobStatus.OPEN,
            created_at=self.now,
            updated_at=self.now,
            caller=CALLER,
            latest_run_id=run_id,
            run_count=1,
            task_shard_count=shards,
            shard_scheme="stripe",
        )
        run = Run(
            run_id=run_id,
            job_id=job_id,
            run_sequence=1,
            status=RunStatus.RUNNING,
            created_at=self.now,
            updated_at=self.now,
            next_index=count,
            stats=RunStats(total=count),
        )
        tasks = [
            NewTask(index, task_id, SPEC)
            for index, task_id in enumerate(ids.task_ids(run_id, 0, count))
        ]
        return job, run, tasks

    async def run(
        self,
        *,
        status: RunStatus = RunStatus.RUNNING,
        rows: Sequence[int] = (),
        shards: int = 1,
        **attributes: Any,
    ) -> RunPlace:
        """Write a run with rows at some indexes."""
        job, run, _ = self.draft(count=len(rows), shards=shards)
        run = structs.replace(run, status=status)
        place = RunPlace(run.run_id, job.job_id, 1, Shards(shards, ShardScheme.STRIPE))
        await self.table.put(place.key, {**new_run_item(run, job), **attributes})
        await self.table.put(place_key(run.run_id), place.item())
        await self.rows(place, rows)
        return place

    async def rows(self, place: RunPlace, indexes: Sequence[int]) -> None:
        """Write rows of a run, whether it exists or not."""
        for index in indexes:
            task_id = ids.task_id(place.run_id, index)
            item = new_task_item(task_id, SPEC, now=self.now)
            await self.table.put(place.task_key(task_id), item)

    async def intent(self, place: RunPlace) -> Key:
        """Write that rows of a run are about to be written."""
        key = intent_key(place.job_id, place.run_id)
        await self.table.put(key, intent_item(place, now=self.now))
        return key

    async def left(self, place: RunPlace) -> list[int]:
        """The indexes of the rows of a run that there are."""
        found: list[int] = []
        for shard in range(place.shards.count):
            partition = task_partition(place.job_id, place.shards, shard)
            async for page in self.table.pages(
                Query(partition, begins_with=task_sort_key(place.run_id, ""))
            ):
                found += [ids.task_index(item["task_id"]) for item in page.items]
        return sorted(found)

    async def ended(self, *, after: DuePosition | None = None, limit: int = 10) -> list[EndedRun]:
        """The runs that have ended by now, as a look an hour later has them."""
        return await self.sweeping.ended_runs(
            now=self.now + ENDED_FOR, row_days=1, after=after, limit=limit
        )

    async def pass_by(self, milliseconds: int = PATIENCE) -> None:
        await self.clock.advance(milliseconds / 1_000)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    client, options = await anyio.to_thread.run_sync(dynamodb)
    # Clocks of one seed make the same tokens, and a transaction is known by its token.
    name, clock = new_name(), FakeClock(seed=secrets.randbits(48))
    aws = over_clients({"dynamodb": client}, options, clock, credentials=account())
    await aws.call("dynamodb", "create_table", table_parameters(name))
    exists = client.get_waiter("table_exists")
    await anyio.to_thread.run_sync(lambda: exists.wait(TableName=name))
    yield Bench(aws, name, clock)
    await aws.call("dynamodb", "delete_table", {"TableName": name})
    await aws.aclose()


def _place(bench: Bench, shards: int) -> RunPlace:
    clock = bench.clock
    return RunPlace(clock.new_id(), clock.new_id(), 1, Shards(shards, ShardScheme.STRIPE))


@pytest.mark.parametrize("shards", [1, 3])
async def test_rows_of_a_job_that_never_came_to_be_go_after_a_while(
    bench: Bench, shards: int
) -> None:
    place, other = _place(bench, shards), await bench.run(rows=[0, 1], shards=shards)
    intent = await bench.intent(place)
    await bench.rows(place, range(7))
    await bench.pass_by(PATIENCE - 1)
    assert await bench.sweeping.tidy(now=bench.now) == 0
    assert await bench.left(place) == list(range(7))
    await bench.pass_by(2)
    assert await bench.sweeping.tidy(now=bench.now) == 1
    assert await bench.left(place) == []
    assert await bench.table.get(intent) is None
    assert await bench.left(other) == [0, 1]
    assert await bench.sweeping.tidy(now=bench.now) == 0


async def test_an_intent_whose_run_exists_goes_alone(bench: Bench) -> None:
    place = await bench.run(rows=range(3))
    intent = await bench.intent(place)
    await bench.pass_by(PATIENCE + 1)
    assert await bench.sweeping.tidy(now=bench.now) == 1
    assert await bench.left(place) == [0, 1, 2]
    assert await bench.table.get(intent) is None


async def test_no_partition_has_all_intents_and_each_is_looked_at(bench: Bench) -> None:
    """Each small submit writes and removes one, and a partition takes 1,000 writes a second."""
    count = 40
    for _ in range(count):
        await bench.intent(_place(bench, 1))
    found = [
        len(await query_all(bench.table, [partition], index=schema.BY_OWNER))
        for partition in schema.all_partitions("intents")
    ]
    assert sum(found) == count
    assert max(found) <= count / 2
    await bench.pass_by(PATIENCE + 1)
    assert await bench.sweeping.tidy(now=bench.now) == count


async def test_who_was_given_up_cannot_make_the_job_any_more(bench: Bench) -> None:
    job, run, tasks = bench.draft(count=3)
    removed: list[int] = []

    async def tidied() -> None:
        await bench.pass_by(PATIENCE + 1)
        removed.append(await bench.sweeping.tidy(now=bench.now))

    bench.seam.meanwhile = tidied
    with pytest.raises(ConveyorError, match="took too long"):
        await bench.jobs.create_job(job, run, tasks, answer=Stored(201, b"{}"), once=None)
    assert removed == [1]
    assert await bench.jobs.find_job(job.job_id) is None
    assert (
        await bench.left(RunPlace(run.run_id, job.job_id, 1, Shards(1, ShardScheme.STRIPE))) == []
    )
    assert await bench.sweeping.tidy(now=bench.now) == 0


async def test_who_was_given_up_cannot_add_any_more(bench: Bench) -> None:
    job, run, tasks = bench.draft(count=2)
    await bench.jobs.create_job(job, run, tasks, answer=Stored(201, b"{}"), once=None)
    removed: list[int] = []

    async def tidied() -> None:
        for _ in range(2):
            removed.append(await bench.sweeping.tidy(now=bench.now))
            await bench.pass_by()

    async def add() -> Stored:
        return await bench.jobs.append_tasks(
            AppendRequest(
                caller=CALLER,
                job_id=job.job_id,
                specs=[SPEC, SPEC, SPEC],
                last_batch=False,
                max_tasks=100,
                now=bench.now,
            ),
            answer=_first_index,
            once=None,
        )

    bench.seam.meanwhile = tidied
    with pytest.raises(ConveyorError):
        await add()
    assert removed == [0, 1]
    place = RunPlace(run.run_id, job.job_id, 1, Shards(1, ShardScheme.STRIPE))
    assert await bench.left(place) == [0, 1]
    # No index is given twice.
    assert (await add()).body == b"5"
    view = await bench.jobs.get_job(CALLER, job.job_id)
    assert view is not None
    assert view.latest_run is not None
    assert view.latest_run.stats.total == 5
    assert await bench.left(place) == [0, 1, 5, 6, 7]


def _first_index(made: Appended) -> Stored:
    return Stored(200, str(made.first_index).encode())


@pytest.mark.parametrize("shards", [1, 3])
async def test_an_addition_that_was_cut_off_is_taken_back_after_a_while(
    bench: Bench, shards: int
) -> None:
    place = await bench.run(rows=[0, 1], shards=shards, reserved={"2": 3, "5": 2}, next_index=7)
    await bench.rows(place, [2, 3, 4, 5])
    due = await bench.sweeping.due_references(place.run_id, after=-1, limit=9, now=bench.now)
    assert [index for index, _ in due] == [0, 1]
    assert await bench.sweeping.tidy(now=bench.now) == 0
    await bench.pass_by(PATIENCE - 1)
    assert await bench.sweeping.tidy(now=bench.now) == 0
    assert await bench.left(place) == [0, 1, 2, 3, 4, 5]
    await bench.pass_by(1)
    assert await bench.sweeping.tidy(now=bench.now) == 2
    assert await bench.left(place) == [0, 1]
    item = await bench.table.get(place.key)
    assert item is not None
    assert (item["reserved"], item.get("given_up", {}), item["next_index"]) == ({}, {}, 7)


async def test_an_addition_that_is_not_the_one_seen_before_is_young(bench: Bench) -> None:
    place = await bench.run(reserved={"0": 2}, next_index=2)
    await bench.rows(place, [0, 1])
    assert await bench.sweeping.tidy(now=bench.now) == 0
    await bench.pass_by()
    await bench.table.update(
        place.key,
        "SET reserved = :reserved, next_index = :next",
        condition="attribute_exists(pk)",
        reserved={"2": 1},
        next=3,
    )
    await bench.rows(place, [2])
    assert await bench.sweeping.tidy(now=bench.now) == 0
    assert await bench.left(place) == [0, 1, 2]


async def test_taking_back_that_was_itself_cut_off_goes_on(bench: Bench) -> None:
    place = await bench.run(rows=[0], given_up={"1": 2}, next_index=3)
    await bench.rows(place, [1, 2])
    due = await bench.sweeping.due_references(place.run_id, after=-1, limit=9, now=bench.now)
    assert [index for index, _ in due] == [0]
    assert await bench.sweeping.tidy(now=bench.now) == 0
    await bench.pass_by()
    assert await bench.sweeping.tidy(now=bench.now) == 1
    assert await bench.left(place) == [0]


async def test_additions_to_runs_that_ended_are_seen_when_these_are_looked_at(
    bench: Bench,
) -> None:
    place = await bench.run(status=RunStatus.STOPPED, rows=[0], reserved={"1": 1}, next_index=2)
    await bench.rows(place, [1])
    for done in (0, 1):
        await bench.ended()
        assert await bench.sweeping.tidy(now=bench.now) == done
        await bench.pass_by()
    assert await bench.left(place) == [0]


async def test_pins_of_runs_that_are_gone_go_too(bench: Bench) -> None:
    place, gone = await bench.run(status=RunStatus.COMPLETED), bench.clock.new_id()
    pin = pin_key(place.job_id, place.run_id, gone)
    await bench.table.put(pin, {"shape": 1})
    [ended] = await bench.ended()
    assert ended.run_id == place.run_id
    assert await bench.sweeping.tidy(now=bench.now) == 0
    assert await bench.table.get(pin) is not None
    await bench.pass_by()
    assert await bench.sweeping.tidy(now=bench.now) == 1
    assert await bench.table.get(pin) is None


async def test_ended_runs_of_all_index_partitions_come_in_one_order(bench: Bench) -> None:
    made = []
    for number in range(40):
        status = RunStatus.COMPLETED if number % 4 else RunStatus.RUNNING
        place = await bench.run(status=status)
        if number % 4:
            made.append(place.run_id)
    found: list[str] = []
    after: DuePosition | None = None
    while True:
        page = await bench.ended(after=after, limit=7)
        found += [run.run_id for run in page]
        after = DuePosition(page[-1].due_at, page[-1].run_id)
        if len(page) < 7:
            break
    assert found == sorted(made)


async def test_a_look_at_ended_runs_reads_few_entries_that_it_does_not_need(bench: Bench) -> None:
    for _ in range(60):
        await bench.run(status=RunStatus.COMPLETED)
    bench.seam.entries = 0
    assert len(await bench.ended(limit=60)) == 60
    assert bench.seam.entries == 60


@pytest.mark.parametrize("aged", [False, True])
async def test_the_reads_of_a_look_do_not_grow_with_ended_runs_for_which_nothing_is_due(
    bench: Bench, aged: bool
) -> None:
    async def look() -> tuple[int, int]:
        await bench.pass_by(2 * PATIENCE)
        bench.seam.calls = bench.seam.read = 0
        found = await bench.sweeping.ended_runs(now=bench.now, row_days=30, after=None, limit=100)
        assert found == []
        await bench.sweeping.tidy(now=bench.now)
        return bench.seam.calls, bench.seam.read

    await look()
    few = await look()
    for _ in range(120):
        place = await bench.run(status=RunStatus.COMPLETED, queue_dropped=aged, swept=aged)
        partition = (schema.aged if aged else schema.aging)(place.run_id)
        await bench.table.update(
            place.key,
            "SET gsi1pk = :partition, gsi1sk = :place",
            condition="attribute_exists(pk)",
            partition=partition,
            place=by_time(bench.now + DAY, place.run_id),
        )
    await look()
    assert await look() == few


async def test_a_look_too_early_is_put_off_and_runs_without_time_are_given_one(
    bench: Bench,
) -> None:
    """Versions before kept ended runs by their id, and moved none when they marked it."""
    place = await bench.run(status=RunStatus.COMPLETED, result_ttl_days=2)
    old = await bench.run(status=RunStatus.COMPLETED, result_ttl_days=2)
    await bench.table.update(
        old.key,
        "SET gsi1pk = :partition, gsi1sk = :place, queue_dropped = :yes",
        condition="attribute_exists(pk)",
        partition=schema.ended(old.run_id),
        place=old.run_id,
        yes=True,
    )
    await bench.sweeping.mark_queue_dropped(place.run_id)
    ended_at = bench.now
    await bench.pass_by(ENDED_FOR)
    for _ in range(2):
        found = await bench.sweeping.ended_runs(now=bench.now, row_days=0, after=None, limit=9)
        assert found == []
    for one in (place, old):
        item = await bench.table.get(one.key)
        assert item is not None
        assert (item["gsi1pk"], item["gsi1sk"]) == (
            schema.aging(one.run_id),
            by_time(ended_at + 2 * DAY, one.run_id),
        )
    found = await bench.sweeping.ended_runs(now=ended_at + 2 * DAY, row_days=0, after=None, limit=9)
    assert {run.run_id for run in found} == {place.run_id, old.run_id}


async def test_runs_too_young_do_not_end_the_look(bench: Bench) -> None:
    """Fewer than were asked for tells that none is left: those that do not count must not."""
    late = bench.now + 1_000
    old = [(await bench.run(status=RunStatus.COMPLETED)).run_id]
    for _ in range(30):
        await bench.run(status=RunStatus.COMPLETED, updated_at=late)
    old.append((await bench.run(status=RunStatus.COMPLETED)).run_id)
    found = await bench.ended(limit=2)
    assert [run.run_id for run in found] == old


async def test_a_claim_whose_answer_was_lost_is_still_the_callers(bench: Bench) -> None:
    bench.seam.lose = True
    assert await bench.sweeping.claim_sweep(now=1_000, lapses_at=2_000)
    assert not bench.seam.lose
    assert not await bench.sweeping.claim_sweep(now=1_500, lapses_at=9_000)
