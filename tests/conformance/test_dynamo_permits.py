"""A ledger on DynamoDB that many processes move, each with clocks of its own."""

from __future__ import annotations

import math
import random
import secrets
from collections import Counter
from typing import Any

import anyio
import pytest

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.permits import LeaseRequest, LedgerState
from conveyor.prod.aws.calls import Answer, AwsRefused, Parameters
from conveyor.prod.dynamodb.client import Table
from conveyor.prod.dynamodb.permits import ROW_TTL, DynamoPermits
from conveyor.prod.dynamodb.schema import permits_key
from conveyor.testing.clock import FakeClock
from tests.conformance.permit_servers import permits_table

pytestmark = pytest.mark.extended

LIMIT = 12
LEASE = 30.0


class Seam:
    """Counts what goes through, makes a call again whose answer it loses, and keeps one back whose
    sender gives up on it."""

    def __init__(self, table: Table) -> None:
        self.calls: Counter[str] = Counter()
        self.lose = False
        self.keep_back = False
        self.kept: list[tuple[str, dict[str, Any]]] = []
        self._table = table

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        rest = {name: value for name, value in parameters.items() if name != "TableName"}
        self.calls[operation] += 1
        if self.keep_back:
            self.keep_back = False
            self.kept.append((operation, rest))
            raise ConveyorError(ErrorCode.UNAVAILABLE, "no answer")
        answer = await self._table.call(operation, **rest)
        if self.lose and operation != "get_item":
            self.lose = False
            return await self._table.call(operation, **rest)
        return answer

    async def deliver(self) -> None:
        """Let the call that was kept back arrive."""
        operation, parameters = self.kept.pop()
        await self._table.call(operation, **parameters)

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        raise AssertionError("nobody asks for links")


class Process:
    """One worker: its clocks, its ledger, what it knows of its permits."""

    def __init__(self, job_id: str, number: int, *, shift: float = 0.0) -> None:
        self.clock = FakeClock(seed=number)
        self.clock.shift(shift)
        table = permits_table(self.clock)
        self.seam = Seam(table)
        self.permits = DynamoPermits(Table(self.seam, table.name, self.clock), self.clock)
        self.name = f"worker-{number}"
        self.held = 0
        self._job_id = job_id
        self._sequence = 0
        self._renewed_at = -math.inf

    @property
    def used(self) -> int:
        """Permits that it may use now, by its own clock."""
        if self.clock.monotonic() >= self._renewed_at + 0.9 * LEASE:
            self.held = 0
        return self.held

    async def ask(self, change: int = 0, *, limit: int = LIMIT, wants: bool = False) -> LedgerState:
        """One call for so many more or fewer."""
        before = self.used
        count = max(0, before + change)
        self.held = min(before, count)
        self._sequence += 1
        asked_at = self.clock.monotonic()
        holding = LeaseRequest(
            job_id=self._job_id,
            holder=self.name,
            count=count,
            before=before,
            sequence=self._sequence,
            wants=wants,
        )
        standing = await self.permits.acquire_or_renew(holding, limit=limit, lease=LEASE)
        if standing.granted:
            self._renewed_at = asked_at
            self.held += max(0, count - before)
        return standing

    async def costs(self, change: int = 0, *, limit: int = LIMIT) -> dict[str, int]:
        """Count the DynamoDB calls of one call of the port."""
        self.seam.calls.clear()
        await self.ask(change, limit=limit)
        return dict(self.seam.calls)


class Fleet:
    """Workers of one job, whose wall clocks are up to half a minute apart either way and whose
    monotonic clocks began whenever."""

    def __init__(self, workers: int) -> None:
        self._job_id = secrets.token_hex(6)
        self.processes: list[Process] = []
        for _ in range(workers):
            self.join()

    @property
    def used(self) -> int:
        return sum(process.used for process in self.processes)

    def join(self) -> Process:
        """A worker that has just started."""
        number = len(self.processes)
        process = Process(self._job_id, number, shift=(0.0, 30.0, -30.0)[number % 3])
        self.processes.append(process)
        return process

    async def pass_time(self, seconds: float) -> None:
        for process in self.processes:
            await process.clock.advance(seconds)

    async def row(self) -> dict[str, Any] | None:
        return await permits_table(FakeClock()).get(permits_key(self._job_id))


async def test_workers_whose_clocks_are_apart_never_use_more_than_the_limit() -> None:
    fleet = Fleet(5)
    draw = random.Random(7)
    most = given_up = refused_late = 0

    async def ask(process: Process, change: int, trouble: float) -> None:
        nonlocal given_up
        process.seam.lose = trouble < 0.1
        process.seam.keep_back = 0.1 <= trouble < 0.2
        try:
            await process.ask(change)
        except ConveyorError:
            given_up += 1

    async def arrive_late(process: Process) -> None:
        nonlocal refused_late
        try:
            await process.seam.deliver()
        except AwsRefused:
            refused_late += 1

    for _ in range(60):
        crowd = draw.sample(fleet.processes, draw.randint(1, 4))
        async with anyio.create_task_group() as group:
            for process in crowd:
                change = draw.choice((-5, -1, 0, 0, 2, 4, 9))
                group.start_soon(ask, process, change, draw.random())
            for process in fleet.processes:
                if process.seam.kept and draw.random() < 0.3:
                    group.start_soon(arrive_late, process)
        most = max(most, fleet.used)
        assert fleet.used <= LIMIT
        row = await fleet.row()
        assert row is not None
        assert fleet.used <= sum(entry[0] for entry in row["entries"].values()) <= LIMIT
        await fleet.pass_time(draw.choice((0.0, 0.1, 3.0, 3.0, 11.0, 26.9, 31.0)))
    assert most == LIMIT
    assert given_up
    assert refused_late


async def test_overlapping_calls_of_many_processes_never_get_more_than_the_limit() -> None:
    fleet = Fleet(LIMIT + 6)
    async with anyio.create_task_group() as group:
        for process in fleet.processes:
            group.start_soon(process.ask, 1)
    assert fleet.used == LIMIT


async def test_a_dead_workers_permits_fall_free_once_somebody_watched_for_a_lease() -> None:
    fleet = Fleet(2)
    dead, other = fleet.processes
    await dead.ask(LIMIT - 1)
    await other.ask(1)
    await fleet.pass_time(LEASE - 0.001)
    assert not (await other.ask(2)).granted
    await fleet.pass_time(0.001)
    assert (await other.ask(LIMIT)).granted


async def test_who_has_just_started_waits_a_lease_from_its_own_first_look() -> None:
    fleet = Fleet(1)
    await fleet.processes[0].ask(LIMIT)
    await fleet.pass_time(LEASE - 1)
    late = fleet.join()
    assert not (await late.ask(1)).granted
    await fleet.pass_time(LEASE - 0.001)
    assert not (await late.ask(1)).granted
    await fleet.pass_time(0.001)
    assert (await late.ask(1)).granted
    assert (await late.ask()).holders == 1


async def test_who_renews_late_keeps_what_nobody_has_taken_and_loses_what_somebody_has() -> None:
    fleet = Fleet(2)
    slow, other = fleet.processes
    await slow.ask(6)
    await other.ask(2)
    await fleet.pass_time(20)
    assert (await other.ask()).granted
    await fleet.pass_time(20)
    assert slow.used == 0
    assert (await slow.ask(6)).granted
    assert (await other.ask()).holders == 2
    await fleet.pass_time(20)
    assert not (await other.ask(5)).granted
    assert (await other.ask()).granted
    await fleet.pass_time(11)
    assert (await other.ask(LIMIT - 2)).granted
    standing = await slow.ask(1)
    assert (standing.granted, standing.free, standing.holders) == (False, 0, 1)


async def test_an_entry_that_was_renewed_unseen_is_not_removed() -> None:
    fleet = Fleet(2)
    holder, other = fleet.processes
    await holder.ask(6)
    await other.ask(2)
    await fleet.pass_time(10)
    await other.ask()
    await fleet.pass_time(10)
    await holder.ask()
    await fleet.pass_time(12)
    assert not (await other.ask(8)).granted
    assert (await other.ask(2)).granted
    assert fleet.used == 10


async def test_what_calls_cost() -> None:
    fleet = Fleet(2)
    first, second = fleet.processes
    assert await first.costs(2) == {"put_item": 1}
    assert await first.costs(2) == {"update_item": 1}
    # The table is not read to begin with: the first write of a process is refused, and shows it.
    assert await second.costs(2) == {"put_item": 1, "update_item": 1}
    assert await second.costs() == {"update_item": 1}
    assert await first.costs() == {"update_item": 1}
    assert await first.costs(-1) == {"update_item": 1}
    assert await second.costs(2) == {"update_item": 1}
    assert await first.costs(1) == {"update_item": 2}
    assert await second.costs(LIMIT) == {"get_item": 1}


async def test_what_an_entry_adds_to_the_row() -> None:
    """Every renewal pays for all of it."""
    fleet = Fleet(1)
    table = permits_table(FakeClock())
    permits, job_id = DynamoPermits(table, FakeClock()), fleet._job_id
    for number in range(40):
        holder = f"01KDVDNA00{number:016}"
        request = LeaseRequest(job_id=job_id, holder=holder, count=20, before=0, sequence=9_999)
        assert (await permits.acquire_or_renew(request, limit=1_000, lease=LEASE)).granted
    row = await fleet.row()
    assert row is not None
    texts = [f"{holder}{entry[-1]}" for holder, entry in row["entries"].items()]
    numbers, marks = 4 * 3, 1 + 5 + 3  # as DynamoDB counts: digits in pairs, a byte a value
    assert max(map(len, texts)) + numbers + marks <= 66


@pytest.mark.parametrize("change", [4, 0, -1, -2])
async def test_a_write_whose_answer_was_lost_is_recognised(change: int) -> None:
    fleet = Fleet(2)
    process, other = fleet.processes
    await process.ask(2)
    await other.ask(1)
    process.seam.lose = True
    standing = await process.ask(change)
    assert standing.granted
    assert not process.seam.lose
    assert standing.free == LIMIT - 3 - change


async def test_the_first_write_of_a_job_whose_answer_was_lost_is_recognised() -> None:
    [process] = Fleet(1).processes
    process.seam.lose = True
    assert (await process.ask(4)).granted
    assert process.used == 4


@pytest.mark.parametrize(("late", "next_one"), [(-2, 4), (-1, 0), (0, -1), (3, 1)])
async def test_a_write_that_arrives_after_the_next_one_is_refused(late: int, next_one: int) -> None:
    fleet = Fleet(1)
    [process] = fleet.processes
    await process.ask(2)
    process.seam.keep_back = True
    with pytest.raises(ConveyorError):
        await process.ask(late)
    assert (await process.ask(next_one)).granted
    with pytest.raises(AwsRefused) as refused:
        await process.seam.deliver()
    assert refused.value.is_condition
    row = await fleet.row()
    assert row is not None
    assert row["entries"][process.name][0] == process.used


async def test_a_refusal_that_is_no_condition_is_not_hidden() -> None:
    [process] = Fleet(1).processes
    too_long = LeaseRequest(job_id="J" * 3_000, holder="a", count=1, before=0, sequence=1)
    with pytest.raises(AwsRefused, match="ValidationException"):
        await process.permits.acquire_or_renew(too_long, limit=1, lease=LEASE)


async def test_a_row_outlives_its_leases_by_far_and_then_goes_by_itself() -> None:
    fleet = Fleet(1)
    [process] = fleet.processes
    await process.ask(1)
    await fleet.pass_time(10)
    await process.ask()
    row = await fleet.row()
    assert row is not None
    assert row["ttl"] == process.clock.now() // 1_000 + ROW_TTL
    assert row["shape"] == 1
    await permits_table(process.clock).delete(permits_key(fleet._job_id))
    assert (await process.ask(1)).granted
    assert process.used == 2
