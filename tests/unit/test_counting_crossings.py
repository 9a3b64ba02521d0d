"""Recounts, folds and failed calls that cross the writes of a process that counts: each settled
task counts once, every caller is answered, and the run ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.ids import task_id
from conveyor.domain.model import Event, EventKind, RunStatus, Spend
from conveyor.domain.task_rules import Retry
from conveyor.ports.tasks import Claimed, NotClaimable
from conveyor.prod.aws.calls import Parameters
from conveyor.prod.dynamodb import recount as recounting
from conveyor.prod.dynamodb.counter_sums import (
    CountedValues,
    GroupCount,
    new_process_item,
    process_item_key,
)
from conveyor.prod.dynamodb.counters import LATE
from conveyor.prod.dynamodb.recount import fold_items, recount_at
from conveyor.prod.dynamodb.run_rows import DynamoRunRows, RunRow
from conveyor.prod.dynamodb.tasks import DynamoTasks
from conveyor.simulation.loop import VirtualTime, run
from tests.memory_table import READ_UNITS, MemoryTable
from tests.unit.counting_fleet import CLAIM, FLUSH, RUN_ID, Fleet, Seam, Weather, settlement

Hook = Callable[[str, Parameters], Awaitable[None]]


async def nothing(_operation: str, _parameters: Parameters) -> None:
    """A hook that lets a call pass."""


@dataclass(slots=True)
class Hooked:
    """The AWS calls of one process, with something that happens before or after each."""

    inner: Seam
    before: Hook = nothing
    after: Hook = nothing

    async def call(self, service: str, operation: str, parameters: Parameters) -> Any:
        """One call of DynamoDB."""
        await self.before(operation, parameters)
        answer = await self.inner.call(service, operation, parameters)
        await self.after(operation, parameters)
        return answer

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        """Not asked for here."""
        raise AssertionError(operation)


def fleet_of(time: VirtualTime, tasks: int, *, max_inflight: int = 1_000) -> Fleet:
    """A fleet with its run."""
    table = MemoryTable(time.seconds, time.sleep)
    fleet = Fleet(time, table, tasks, max_inflight=max_inflight)
    fleet.open()
    return fleet


def in_virtual_time(test: Callable[[VirtualTime], Awaitable[None]]) -> None:
    """Run a test to its end."""
    run(test, backend="asyncio")


def records(fleet: Fleet, *, before: Hook = nothing, after: Hook = nothing) -> DynamoRunRows:
    """Run rows behind hooks."""
    return fleet.records(Hooked(Seam(fleet.table, fleet.time, Weather(), []), before, after))


def process(
    fleet: Fleet, name: str, *, before: Hook = nothing, after: Hook = nothing
) -> DynamoTasks:
    """A process behind hooks."""
    rows = records(fleet, before=before, after=after)
    return DynamoTasks(rows, worker=name, flush_interval=FLUSH, patience=30.0)


async def claim(
    fleet: Fleet,
    tasks: DynamoTasks,
    index: int,
    *,
    most: int = 100,
    lasts: int = CLAIM,
    after: int = 0,
) -> Any:
    """Claim a task, `after` milliseconds ahead of time."""
    now = fleet.clock.now() + after
    return await tasks.claim_task(
        RUN_ID,
        task_id(RUN_ID, index),
        worker="worker",
        now=now,
        claimed_until=now + lasts,
        max_interruptions=most,
    )


async def settle(fleet: Fleet, tasks: DynamoTasks, index: int, claimed: Any) -> Any:
    """Settle a claimed task."""
    assert isinstance(claimed, Claimed)
    now = fleet.clock.now()
    number = claimed.task.claim_number
    name = task_id(RUN_ID, index)
    return await tasks.settle_task(RUN_ID, name, number, settlement(index, now), now=now)


async def give_back(fleet: Fleet, tasks: DynamoTasks, index: int, claimed: Any) -> None:
    """Settle a claimed task with an attempt that cost something and has to be repeated."""
    now, kind = fleet.clock.now(), EventKind.ATTEMPT
    event = Event(attempt=1, kind=kind, started_at=now, ended_at=now, spend=Spend(1, 0.25))
    number = claimed.task.claim_number
    await tasks.settle_task(RUN_ID, task_id(RUN_ID, index), number, Retry(event, now), now=now)


async def read(fleet: Fleet) -> RunRow:
    """The run with its sum."""
    row = await fleet.records().read_at(fleet.place)
    assert row is not None
    return row


def away() -> ConveyorError:
    """The error of a call that does not get through."""
    return ConveyorError(ErrorCode.UNAVAILABLE, "away", retry_after=1)


def writes_counts(operation: str, parameters: Parameters) -> bool:
    """Tell whether a call writes the item of a process."""
    return operation in ("update_item", "transact_write_items") and "Count#" in repr(parameters)


def closes(parameters: Parameters, process: str) -> bool:
    """Tell whether a call closes the item of a process."""
    update = parameters.get("UpdateExpression", "")
    return "closed = " in update and f"#{process}#" in repr(parameters)


def test_a_task_that_its_claim_fails_counts_once_though_a_recount_comes_first() -> None:
    async def test(time: VirtualTime) -> None:
        fleet = fleet_of(time, 3)
        dead, _ = fleet.process("dead")
        assert isinstance(await claim(fleet, dead, 0, lasts=1_000), Claimed)
        await time.sleep(5.0)
        others: list[Any] = []

        async def after(operation: str, parameters: Parameters) -> None:
            if "#error = :error" in parameters.get("UpdateExpression", "") and not others:
                others.append(None)
                assert (await recount_at(fleet.records(), fleet.place, now=fleet.clock.now())).done
                # The same process sees the epoch of the recount.
                others.append(await claim(fleet, tasks, 1))

        tasks = process(fleet, "one", after=after)
        assert isinstance(await claim(fleet, tasks, 0, most=0), NotClaimable)
        assert (await settle(fleet, tasks, 1, others[1])).applied
        await time.sleep(60.0)
        row = await read(fleet)
        assert (row.run.stats.completed, row.run.status) == (2, RunStatus.RUNNING)
        settled = await settle(fleet, tasks, 2, await claim(fleet, tasks, 2))
        assert settled.run_status is RunStatus.COMPLETED

    in_virtual_time(test)


def test_a_fold_of_several_pieces_stops_where_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recounting, "MOST_ITEMS", 0)
    monkeypatch.setattr(recounting, "MOST_FOLDED", 1)
    monkeypatch.setattr(recounting, "GONE_AFTER", 1)

    async def test(time: VirtualTime) -> None:
        fleet = fleet_of(time, 4)
        for index in range(3):
            tasks, _ = fleet.process(f"process-{index}")
            assert await fleet.work(tasks, f"process-{index}", index)
        last, _ = fleet.process("last")
        await time.sleep(1.0)
        folded: list[str] = []

        async def after(operation: str, _parameters: Parameters) -> None:
            if operation == "transact_write_items":
                folded.append(operation)
                if len(folded) == 1:
                    assert await fleet.work(last, "last", 3)
                    assert fleet.status() == "completed"

        meddled = records(fleet, after=after)
        row = await meddled.read_bare(fleet.place)
        assert row is not None
        assert await fold_items(meddled, row, now=fleet.clock.now()) == 1
        assert (await read(fleet)).run.stats.completed == 4

    in_virtual_time(test)


async def never_counts(operation: str, parameters: Parameters) -> None:
    """The hook of a process that dies before it counts."""
    if writes_counts(operation, parameters):
        await anyio.sleep_forever()


async def uncounted(fleet: Fleet, index: int) -> None:
    """Settle a task by a process that dies before it counts."""
    with anyio.move_on_after(10.0):
        await fleet.work(process(fleet, "dead", before=never_counts), "dead", index)
    assert fleet.is_ended(index)


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_recount_cut_off_while_it_closes_items_loses_nothing(cancelled: bool) -> None:
    async def test(time: VirtualTime) -> None:
        fleet = fleet_of(time, 5)
        one, _ = fleet.process("one")
        two, _ = fleet.process("two")
        assert await fleet.work(one, "one", 0)
        assert await fleet.work(two, "two", 1)
        await uncounted(fleet, 2)
        claimed = await claim(fleet, one, 3)
        await time.sleep(CLAIM / 1_000 + 1)
        scope, cut, settled = anyio.CancelScope(), list[int](), anyio.Event()

        async def come_back() -> None:
            # Its call outlasted its claim.
            assert (await settle(fleet, one, 3, claimed)).applied
            settled.set()

        async def before(operation: str, parameters: Parameters) -> None:
            if closes(parameters, "one") and not cut:
                cut.append((await read(fleet)).run.stats.completed)
                if not cancelled:
                    raise away()
                scope.cancel()
                await anyio.sleep(0.01)
            if "set_carried" in repr(parameters) and not settled.is_set():
                group.start_soon(come_back)
                with anyio.move_on_after(1.0):
                    await settled.wait()
                cut.append((await read(fleet)).run.stats.completed)

        async with anyio.create_task_group() as group:
            meddled = records(fleet, before=before)
            fails = nullcontext() if cancelled else pytest.raises(ConveyorError, match="away")
            with scope, fails:
                await recount_at(meddled, fleet.place, now=fleet.clock.now())
            cut.append((await read(fleet)).run.stats.completed)
            await settled.wait()
        await time.sleep(60.0)
        row = await read(fleet)
        assert (row.run.stats.completed, row.recounting) == (3, "")
        assert (await recount_at(fleet.records(), fleet.place, now=fleet.clock.now())).done
        assert (await read(fleet)).run.stats.completed == sum(fleet.rows()) == 4
        assert cut == sorted(cut)

    in_virtual_time(test)


def test_a_recount_whose_token_got_through_unanswered_closes_the_items_before_it_counts() -> None:
    async def test(time: VirtualTime) -> None:
        fleet = fleet_of(time, 3)
        one, _ = fleet.process("one")
        assert await fleet.work(one, "one", 0)
        await uncounted(fleet, 1)
        await time.sleep(CLAIM / 1_000 + 1)
        closed: list[bool] = []

        async def after(operation: str, parameters: Parameters) -> None:
            if "set_recounting" in repr(parameters) and not closed:
                closed.append(False)
                # Somebody else changes the row, and the answer is lost: the transport asks again.
                key = {name: parameters["Key"][name] for name in ("pk", "sk")}
                value = {":other": {"S": "other"}, ":one": {"N": "1"}}
                update = "SET moved_by = :other, version = version + :one"
                change = {"Key": key, "UpdateExpression": update}
                await fleet.table.call(
                    "update_item", {**change, "ExpressionAttributeValues": value}
                )
                await fleet.table.call(operation, parameters)
            if closes(parameters, "one"):
                closed.append(True)

        meddled = records(fleet, after=after)
        assert (await recount_at(meddled, fleet.place, now=fleet.clock.now())).done
        assert closed == [False, True]
        assert (await read(fleet)).run.stats.completed == 2

    in_virtual_time(test)


async def close_items(fleet: Fleet) -> None:
    """Close the items of a run by a recount that is cut off thereafter."""
    closed: list[bool] = []

    async def before(_operation: str, _parameters: Parameters) -> None:
        if closed:
            raise away()

    async def after(_operation: str, parameters: Parameters) -> None:
        if "closed = " in parameters.get("UpdateExpression", ""):
            closed.append(True)

    with suppress(ConveyorError):
        later = fleet.clock.now() + 2 * CLAIM
        await recount_at(records(fleet, before=before, after=after), fleet.place, now=later)
    assert closed


def test_what_an_item_holds_is_answered_though_the_next_read_fails() -> None:
    """A write arrives and its answer is lost, a recount closes the item, and the process cannot
    read the run."""

    async def test(time: VirtualTime) -> None:
        fleet = fleet_of(time, 2)
        done: list[str] = []

        async def before(operation: str, parameters: Parameters) -> None:
            if done == ["armed", "lost"] and operation == "get_item" and "Run#" in repr(parameters):
                done.append("away")
                raise away()

        async def after(operation: str, parameters: Parameters) -> None:
            if done == ["armed"] and writes_counts(operation, parameters):
                done.append("lost")
                await close_items(fleet)
                # The answer was lost: the transport makes the call again.
                await fleet.table.call(operation, parameters)

        tasks = process(fleet, "one", before=before, after=after)
        assert await fleet.work(tasks, "one", 0)
        # What this one spends is not counted, so a recount finds something to mend.
        dead = process(fleet, "dead", before=never_counts)
        with anyio.move_on_after(2.0):
            await give_back(fleet, dead, 1, await claim(fleet, dead, 1))
        claimed = await claim(fleet, tasks, 1)
        done.append("armed")
        with anyio.fail_after(300.0):
            assert (await settle(fleet, tasks, 1, claimed)).applied
        await time.sleep(120.0)
        assert done == ["armed", "lost", "away"]
        assert fleet.status() == "completed"

    in_virtual_time(test)


def test_what_cannot_be_written_is_tried_ever_more_rarely_also_while_a_look_is_due() -> None:
    async def test(time: VirtualTime) -> None:
        fleet = fleet_of(time, 6)
        tried: list[float] = []
        broken: list[bool] = []

        async def before(operation: str, parameters: Parameters) -> None:
            if broken and operation == "update_item" and "Count#" in repr(parameters):
                tried.append(time.seconds())
                raise away()

        tasks = process(fleet, "one", before=before)
        claims = [await claim(fleet, tasks, index) for index in range(3)]
        for index, claimed in enumerate(claims):
            await settle(fleet, tasks, index, claimed)
        # The last one has left it without a claim, so it has looked; the next look is put off.
        await settle(fleet, tasks, 3, await claim(fleet, tasks, 3))
        claimed = await claim(fleet, tasks, 4)
        broken.append(True)
        with pytest.raises(ConveyorError):
            await settle(fleet, tasks, 4, claimed)
        await time.sleep(60.0)
        assert 2 < len(tried) < 10
        broken.clear()
        await time.sleep(60.0)
        assert (await read(fleet)).run.stats.completed == 5

    in_virtual_time(test)


def crowd(number: int) -> CountedValues:
    """The values of a process that has seen 200 groups."""
    names = [f"blocked_{number}_{name:03}" * 2 for name in range(200)]
    return CountedValues(failed=200, groups={name: GroupCount(1, 1, 1) for name in names})


@pytest.mark.slow
def test_looks_are_kept_apart_by_the_bytes_that_they_read() -> None:
    """Each of a hundred others has as many groups as it may, and looks as often."""

    async def test(time: VirtualTime) -> None:
        fleet = fleet_of(time, 60, max_inflight=400)
        key = fleet.place.key
        fleet.table.items[key.pk, key.sk]["total"] = {"N": "100000"}
        for number in range(100):
            key = process_item_key(RUN_ID, 1, 0, f"other-{number}")
            fleet.put(key, new_process_item(1, crowd(number)))
        one, _ = fleet.process("one")
        for index in range(60):
            await settle(fleet, one, index, await claim(fleet, one, index))
            await time.sleep(1.0)
        read = sum(
            units
            for (kind, partition, _), units in fleet.table.units.items()
            if kind == "r" and partition.startswith("Count#")
        )
        assert READ_UNITS / 20 < 101 * read / time.seconds() < READ_UNITS * 0.75

    in_virtual_time(test)


def test_a_look_that_is_put_off_for_long_does_not_put_off_a_flush() -> None:
    async def test(time: VirtualTime) -> None:
        fleet = fleet_of(time, 8, max_inflight=400)
        for number in range(110):
            key = process_item_key(RUN_ID, 1, 0, f"other-{number}")
            fleet.put(key, new_process_item(1, crowd(number)))
        key = fleet.place.key
        fleet.table.items[key.pk, key.sk]["total"] = {"N": "100000"}
        one, _ = fleet.process("one")
        # Each leaves the process without a claim: it looks, and is to look again.
        for index in range(5):
            await settle(fleet, one, index, await claim(fleet, one, index))
        claims = [await claim(fleet, one, index) for index in range(5, 8)]
        before = (await read(fleet)).run.stats.successful
        for index in (5, 6):
            await settle(fleet, one, index, claims[index - 5])
        await time.sleep(LATE + 0.5)
        assert (await read(fleet)).run.stats.successful == before + 2

    in_virtual_time(test)


def test_spend_that_comes_after_the_end_goes_on_the_row_of_the_run() -> None:
    async def test(time: VirtualTime) -> None:
        fleet = fleet_of(time, 12)
        broken: list[bool] = []

        async def before(operation: str, parameters: Parameters) -> None:
            if broken and writes_counts(operation, parameters):
                raise away()

        one, (two, _) = process(fleet, "one", before=before), fleet.process("two")
        # It has looked some times, so that it next looks long after the end.
        for index in range(10):
            await time.sleep(10.0)
            assert await fleet.work(one, "one", index)
        tried, lost = await claim(fleet, one, 10), await claim(fleet, one, 11)
        # A settlement that comes now does not wait for the flush after the last one.
        await time.sleep(LATE)
        broken.append(True)
        with pytest.raises(ConveyorError):
            await give_back(fleet, one, 10, tried)
        assert await fleet.work(two, "two", 10)
        other = await claim(fleet, two, 11, after=2 * CLAIM)
        assert (await settle(fleet, two, 11, other)).run_status is RunStatus.COMPLETED
        broken.clear()
        await time.sleep(10.0)
        assert not (await settle(fleet, one, 11, lost)).applied
        await time.sleep(10.0)
        assert (await read(fleet)).run.stats.spend == Spend(13, 13 / 4)

    in_virtual_time(test)
