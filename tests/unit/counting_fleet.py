"""A fleet that counts the tasks of one run in virtual time, over a table in memory that has the
capacity of DynamoDB's partitions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import anyio

from conveyor.clock import SystemClock
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.ids import task_id
from conveyor.domain.model import (
    Event,
    EventKind,
    Format,
    Job,
    JobStatus,
    Problem,
    Run,
    RunStats,
    RunStatus,
    Spend,
    StoredBody,
    TaskFailure,
    TaskSpec,
)
from conveyor.domain.shards import shards_of
from conveyor.domain.task_rules import Failed, Settlement, Succeeded
from conveyor.ports.tasks import Claimed
from conveyor.prod.aws.calls import Aws, AwsRefused, Parameters
from conveyor.prod.dynamodb.client import Table, tag_all
from conveyor.prod.dynamodb.run_rows import DynamoRunRows, RunPlace, RunPlaces, new_run_item
from conveyor.prod.dynamodb.schema import place_key
from conveyor.prod.dynamodb.task_rows import new_task_item
from conveyor.prod.dynamodb.tasks import DynamoTasks
from conveyor.simulation.loop import VirtualTime
from conveyor.testing.clock import START
from tests.memory_table import MemoryTable

CLAIM = 60_000
GATEWAY = 2.4
FLUSH = 0.1
SHARDS = 64
RUN_ID = "01J00000000000000000000000"
JOB_ID = "01J00000000000000000000001"


class VirtualClock:
    """The clock port over the virtual time of the simulation's loop."""

    def __init__(self, time: VirtualTime, table: MemoryTable) -> None:
        self._time = time
        self._random = table.random
        self.new_id = SystemClock().new_id

    def now(self) -> int:
        """Return virtual milliseconds since the epoch."""
        return START + round(self._time.seconds() * 1_000)

    def monotonic(self) -> float:
        """Return virtual seconds."""
        return self._time.seconds()

    async def sleep(self, seconds: float) -> None:
        """Wait in virtual time."""
        await self._time.sleep(max(0.0, seconds))

    def random(self) -> float:
        """Return a number by the seed."""
        return self._random.random()

    def token(self, length: int) -> bytes:
        """Return bytes by the seed."""
        return self._random.randbytes(length)


@dataclass(slots=True)
class Weather:
    """The troubles of a fleet: the share of writes whose answer is lost, of those after which the
    caller is told that the service is away, and of those that arrive once more, later."""

    lost: float = 0.0
    away: float = 0.0
    late: float = 0.0
    latest: float = 120.0


WRITES = ("update_item", "transact_write_items", "put_item")


@dataclass(slots=True)
class Seam:
    """The AWS calls of one process. While `frozen` is set, none of them gets through."""

    table: MemoryTable
    time: VirtualTime
    weather: Weather
    late: list[tuple[float, str, Parameters]]
    frozen: anyio.Event | None = None

    async def call(self, _service: str, operation: str, parameters: Parameters) -> Any:
        """One call of DynamoDB."""
        if self.frozen is not None:
            await self.frozen.wait()
        answer = await self.table.call(operation, parameters)
        if operation not in WRITES:
            return answer
        chance, weather = self.table.random.random, self.weather
        if chance() < weather.late:
            due = self.time.seconds() + chance() * weather.latest
            self.late.append((due, operation, parameters))
        if chance() < weather.lost:
            # Its answer was lost: the transport made the call again.
            answer = await self.table.call(operation, parameters)
        if chance() < weather.away:
            raise ConveyorError(ErrorCode.UNAVAILABLE, "away", retry_after=1)
        return answer

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        """Not asked for here."""
        raise AssertionError(operation)


@dataclass(slots=True)
class Fleet:
    """Processes that share the tasks of one run. `waits` are the seconds that settlements took,
    `seen` the sums that an onlooker found, `ends` the writes that ended the run."""

    time: VirtualTime
    table: MemoryTable
    tasks: int
    max_inflight: int = 1_000
    weather: Weather = field(default_factory=Weather)
    waits: list[float] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    late: list[tuple[float, str, Parameters]] = field(default_factory=list)

    @property
    def clock(self) -> VirtualClock:
        """A clock of this time."""
        return VirtualClock(self.time, self.table)

    @property
    def place(self) -> RunPlace:
        """The place of the run."""
        return RunPlace(RUN_ID, JOB_ID, 1, shards_of(self._job()))

    def open(self) -> None:
        """Write the run and its tasks."""
        job = self._job()
        run = Run(
            run_id=RUN_ID,
            job_id=JOB_ID,
            run_sequence=1,
            status=RunStatus.RUNNING,
            created_at=START,
            updated_at=START,
            last_batch_received=True,
            next_index=self.tasks,
            stats=RunStats(total=self.tasks),
        )
        self.put(self.place.key, new_run_item(run, job))
        self.put(place_key(RUN_ID), self.place.item())
        for index in range(self.tasks):
            name = task_id(RUN_ID, index)
            spec = TaskSpec(url=f"http://host/{index}")
            self.put(self.place.task_key(name), new_task_item(name, spec, now=START))

    def process(self, name: str) -> tuple[DynamoTasks, Seam]:
        """One process."""
        seam = Seam(self.table, self.time, self.weather, self.late)
        records = self.records(seam)
        return DynamoTasks(records, worker=name, flush_interval=FLUSH, patience=30.0), seam

    def records(self, seam: Aws | None = None) -> DynamoRunRows:
        """The run rows as a process without faults finds them, or behind a seam."""
        seam = seam or Seam(self.table, self.time, Weather(), [])
        table = Table(seam, "table", self.clock)
        return DynamoRunRows(table, RunPlaces(table))

    async def work(self, tasks: DynamoTasks, worker: str, index: int) -> bool:
        """Take one task from pending to its end; return False if it was not to be had."""
        name, clock = task_id(RUN_ID, index), self.clock
        claim = await self._until_answered(
            lambda: tasks.claim_task(
                RUN_ID,
                name,
                worker=worker,
                now=clock.now(),
                claimed_until=clock.now() + CLAIM,
                max_interruptions=100,
            )
        )
        if not isinstance(claim, Claimed):
            return False
        await self.time.sleep(GATEWAY * (0.5 + self.table.random.random()))
        began = self.time.seconds()
        try:
            await tasks.settle_task(
                RUN_ID,
                name,
                claim.task.claim_number,
                settlement(index, clock.now()),
                now=clock.now(),
            )
        except ConveyorError:
            return False
        self.waits.append(self.time.seconds() - began)
        return True

    async def watch(self, until: Callable[[], bool], pause: float) -> None:
        """Read the sum again and again, and carry out late duplicates, until it is time."""
        records = self.records()
        while not until():
            row = await records.read_at(self.place)
            assert row is not None
            self.seen.append(row.run.stats.completed)
            assert row.run.stats.completed <= row.run.stats.total
            await self.time.sleep(pause)
            self.deliver_late(self.time.seconds())

    def deliver_late(self, now: float) -> None:
        """Carry out the late duplicates that are due."""
        due = [one for one in self.late if one[0] <= now]
        self.late[:] = [one for one in self.late if one[0] > now]
        for _, operation, parameters in due:
            with suppress(AwsRefused):
                self.table.apply(operation, parameters)

    def is_ended(self, index: int) -> bool:
        """Tell whether a task has ended."""
        key = self.place.task_key(task_id(RUN_ID, index))
        return self.table.items[key.pk, key.sk]["status"]["S"] in ("successful", "failed")

    def rows(self) -> tuple[int, int]:
        """The rows that ended, by state."""
        states = [
            item["status"]["S"]
            for (_, key), item in self.table.items.items()
            if key.startswith("Task#")
        ]
        return states.count("successful"), states.count("failed")

    def status(self) -> str:
        """The status on the run's row, which no reader has helped along."""
        key = self.place.key
        found: str = self.table.items[key.pk, key.sk]["status"]["S"]
        return found

    async def _until_answered(self, call: Callable[[], Awaitable[Any]]) -> Any:
        while True:
            try:
                return await call()
            except ConveyorError:
                await self.time.sleep(1.0)

    def put(self, key: tuple[str, str], item: dict[str, Any]) -> None:
        """Write an item at once."""
        keyed = {"pk": key[0], "sk": key[1], **item}
        self.table.apply("put_item", {"Item": tag_all(keyed)})

    def _job(self) -> Job:
        return Job(
            job_id=JOB_ID,
            caller="caller",
            status=JobStatus.CLOSED,
            created_at=START,
            updated_at=START,
            max_inflight=self.max_inflight,
            task_shard_count=SHARDS,
        )


def settlement(index: int, now: int) -> Settlement:
    """Seven of eight tasks succeed."""
    event = Event(
        attempt=1,
        kind=EventKind.ATTEMPT,
        started_at=now,
        ended_at=now,
        spend=Spend(1, 0.25),
    )
    if index % 8:
        body = StoredBody(f"body-{index}", 5, "text/plain", Format.PLAINTEXT)
        return Succeeded(event, body)
    problem = Problem(code="blocked", title="Blocked", status=502, detail="it said no")
    return Failed(event, problem, TaskFailure.BLOCKED)
