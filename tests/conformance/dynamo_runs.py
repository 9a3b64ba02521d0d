"""Runs on a table of their own behind a transport that loses answers, for tests of one adapter when
several processes, or no process, get through."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import anyio

from conveyor.clock import SystemClock
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import Job, NewTask, Run, Spend
from conveyor.domain.shards import shards_of
from conveyor.ports.records import IdempotencyScope, StoredResponse
from conveyor.prod.aws.calls import Answer as AwsAnswer
from conveyor.prod.aws.calls import Aws, AwsRefused, Parameters
from conveyor.prod.aws.client import AwsClient
from conveyor.prod.aws.opening import open_aws
from conveyor.prod.dynamodb.client import Table
from conveyor.prod.dynamodb.counter_sums import ProcessItem, process_items
from conveyor.prod.dynamodb.run_rows import DynamoRunRows, RunPlace, RunPlaces, RunRow, new_run_item
from conveyor.prod.dynamodb.schema import place_key, table_parameters
from conveyor.prod.dynamodb.task_rows import insert_items, new_task_item
from conveyor.prod.dynamodb.tasks import DynamoTasks
from conveyor.testing.clock import FakeClock
from tests.conformance.bindings import Store
from tests.conformance.emulators import address, aws_options
from tests.conformance.world import World

Wanted = Callable[[str, Parameters], bool]


def writes(operation: str, _parameters: Parameters) -> bool:
    """Every update of one item."""
    return operation == "update_item"


def all_writes(operation: str, parameters: Parameters) -> bool:
    """Every update of one item, and every transaction."""
    return writes(operation, parameters) or operation == "transact_write_items"


def scans(operation: str, parameters: Parameters) -> bool:
    """Reads of task rows in their order, as a recount makes them."""
    if operation != "query":
        return False
    partition: str = parameters["ExpressionAttributeValues"][":partition"]["S"]
    return partition.startswith("Job#")


def settles(operation: str, parameters: Parameters) -> bool:
    """Ends of claims that leave an event."""
    return writes(operation, parameters) and "attempts = " in parameters["UpdateExpression"]


def additions(operation: str, parameters: Parameters) -> bool:
    """Writes of what a process has counted in a run: the first makes its item."""
    if operation == "transact_write_items":
        items = [part["Put"]["Item"] for part in parameters["TransactItems"] if "Put" in part]
        return any("counts" in item for item in items)
    return writes(operation, parameters) and "counts = :counts" in parameters["UpdateExpression"]


def changes(operation: str, parameters: Parameters) -> bool:
    """Changes of a run under its version."""
    return writes(operation, parameters) and "known_version" in parameters["ConditionExpression"]


@dataclass(slots=True, eq=False)
class Fault:
    """The fault of the next wanted calls.

    `carried_out`: the number of times that the table sees the call. `answered`: whether its last
    answer comes; otherwise the caller gets an error that the service is away. `left`: the number of
    calls with the fault. `passed`: the number of calls let through before. `held`: the call sets
    `met` when it is made, and waits for `gate`.
    """

    wanted: Wanted
    carried_out: int = 1
    answered: bool = True
    left: int = 1
    passed: int = 0
    held: bool = False
    gate: anyio.Event = field(default_factory=anyio.Event)
    met: anyio.Event = field(default_factory=anyio.Event)


class FaultySeam:
    """Calls that do not all come through, or come through twice."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws
        self.faults: list[Fault] = []
        self.calls: list[tuple[str, Parameters]] = []
        self._answered: list[tuple[str, Parameters]] = []
        self._one_more = anyio.Event()

    async def call(self, service: str, operation: str, parameters: Parameters) -> AwsAnswer:
        """One call, under the first fault that wants it."""
        self.calls.append((operation, parameters))
        fault = self._take(operation, parameters) or Fault(writes)
        if fault.held:
            fault.met.set()
            await fault.gate.wait()
        for _ in range(fault.carried_out - fault.answered):
            with suppress(AwsRefused):
                await self._aws.call(service, operation, parameters)
        if fault.answered:
            answer = await self._aws.call(service, operation, parameters)
            self._answered.append((operation, parameters))
            self._one_more.set()
            self._one_more = anyio.Event()
            return answer
        raise ConveyorError(ErrorCode.UNAVAILABLE, "away", retry_after=1)

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        """Pass the call on."""
        return self._aws.presign(operation, parameters, seconds=seconds)

    async def until_answered(self, wanted: Wanted, count: int) -> None:
        """Wait until so many calls have been answered since the start."""
        while sum(wanted(*call) for call in self._answered) < count:
            await self._one_more.wait()

    def lose_answers(self, wanted: Wanted, *, count: int = 1, passed: int = 0) -> None:
        """Carry the next calls out twice, as one does whose first answer was lost."""
        self.faults.append(Fault(wanted, carried_out=2, left=count, passed=passed))

    def be_away(self, wanted: Wanted, *, carried_out: bool, count: int = 1) -> None:
        """Never answer the next calls."""
        self.faults.append(Fault(wanted, int(carried_out), answered=False, left=count))

    def acquire_or_renew(self, wanted: Wanted, *, passed: int = 0) -> Fault:
        """Keep the next call waiting, before the table sees it, until its `gate` is set; or a later
        one, after those `passed`."""
        fault = Fault(wanted, held=True, passed=passed)
        self.faults.append(fault)
        return fault

    def _take(self, operation: str, parameters: Parameters) -> Fault | None:
        for fault in self.faults:
            if not fault.wanted(operation, parameters):
                continue
            if fault.passed > 0:
                fault.passed -= 1
                continue
            fault.left -= 1
            if fault.left == 0:
                self.faults.remove(fault)
            return fault
        return None


class DirectJobs:
    """Makes jobs by writing their items."""

    def __init__(self, table: Table) -> None:
        self._table = table

    async def create_job(
        self,
        job: Job,
        run: Run,
        tasks: Sequence[NewTask],
        *,
        answer: StoredResponse,
        once: IdempotencyScope | None,
    ) -> None:
        """Write rows, run and place; the job itself is not looked at."""
        place = RunPlace(run.run_id, job.job_id, run.run_sequence, shards_of(job))
        rows = [
            (
                place.task_key(task.task_id),
                new_task_item(task.task_id, task.spec, now=run.created_at),
            )
            for task in tasks
        ]
        assert len(await insert_items(self._table, rows)) == len(tasks)
        await self._table.put(place.key, new_run_item(run, job))
        await self._table.put(place_key(run.run_id), place.item())


@dataclass(frozen=True, slots=True)
class TasksStore:
    """The part of a store that `World` needs to submit, claim and settle."""

    jobs: DirectJobs
    tasks: DynamoTasks


class FreshIds:
    """A virtual clock whose ids are real: virtual ones are the same in each test, and a transaction
    whose token is known already is not carried out."""

    def __init__(self, clock: FakeClock) -> None:
        self.new_id = SystemClock().new_id
        self.now = clock.now
        self.monotonic = clock.monotonic
        self.random = clock.random
        self.token = clock.token
        self.sleep = clock.sleep


class TableBench:
    """A table of its own, and any number of processes that work its runs. Time is virtual."""

    def __init__(self, aws: AwsClient, name: str, clock: FakeClock) -> None:
        self._aws = aws
        self.seam = FaultySeam(aws)
        self.clock = clock
        ticks = FreshIds(clock)
        self.table = Table(self.seam, name, ticks)
        self.records = self._records(self.table)
        self.outside = self._records(Table(aws, name, ticks))
        self._processes: list[DynamoTasks] = []

    def world(self, *, worker: str, flush_interval: float = 0.0, patience: float = 0.0) -> World:
        """A process of its own, with what tests do in it."""
        return self._world(self._records(self.table), worker, flush_interval, patience)

    def observer(self) -> World:
        """A process that is not subject to the faults."""
        return self._world(self.outside, "observer", 0.0)

    async def end(self, world: World) -> None:
        """End a process."""
        tasks = world.store.tasks
        assert isinstance(tasks, DynamoTasks)
        await tasks.aclose()

    async def row(self, run_id: str) -> RunRow:
        """A run's row, with its sum."""
        row = await self.outside.read(run_id)
        assert row is not None
        return row

    async def items(self, run_id: str) -> list[ProcessItem]:
        """The items of the processes that count in a run."""
        row = await self.row(run_id)
        return await process_items(self.outside.table, run_id, row.parts, row.counter_epoch)

    async def aclose(self) -> None:
        """Leave nothing behind, nor anybody at work: the table is back for that."""
        self.seam.faults.clear()
        for process in self._processes:
            await process.aclose()
        await self._aws.call("dynamodb", "delete_table", {"TableName": self.table.name})
        await self._aws.aclose()

    def _world(
        self, records: DynamoRunRows, worker: str, flush_interval: float, patience: float = 0.0
    ) -> World:
        tasks = DynamoTasks(
            records, worker=worker, flush_interval=flush_interval, patience=patience
        )
        self._processes.append(tasks)
        store = TasksStore(DirectJobs(self.outside.table), tasks)
        return World(cast("Store", store), self.clock)

    def _records(self, table: Table) -> DynamoRunRows:
        return DynamoRunRows(table, RunPlaces(table))


async def open_bench(clock: FakeClock) -> TableBench:
    """An empty table."""
    options = aws_options(dynamodb_endpoint=address("CONVEYOR_TEST_DYNAMODB"))
    aws = await open_aws(options, SystemClock(), "dynamodb")
    name = f"conveyor-runs-{secrets.token_hex(6)}"
    await aws.call("dynamodb", "create_table", cast("dict[str, Any]", table_parameters(name)))
    return TableBench(aws, name, clock)


async def check(bench: TableBench, run_id: str, *, shards: int = 1) -> None:
    """The counters are those of the rows, money included."""
    world = bench.observer()
    run = (await bench.row(run_id)).run
    rows = await world.rows(run_id, shards)
    statuses = Counter(str(row.status) for row in rows)
    assert run.stats.total == len(rows)
    assert run.stats.successful == statuses["successful"]
    assert run.stats.failed == statuses["failed"]
    assert run.stats.failure_reasons == Counter(row.failure for row in rows if row.failure)
    spend = Spend()
    for row in rows:
        for event in await world.store.tasks.task_history(run_id, row.task_id) or []:
            spend += event.spend
    assert run.stats.spend == spend
