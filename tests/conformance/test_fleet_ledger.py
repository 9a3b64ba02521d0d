"""One fleet, one ledger: who is bound to another does not start, and who runs is not changed."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.prod.dynamodb.fleet import BEAT, WATCH, agree_on_ledger, change_ledger, ledger_kind
from conveyor.prod.dynamodb.items import Table
from conveyor.prod.dynamodb.keys import FLEET
from conveyor.testing.clock import FakeClock
from tests.conformance.permit_servers import permits_table


@pytest.fixture
async def table(clock: FakeClock) -> AsyncIterator[Table]:
    opened = permits_table(clock)
    await opened.delete(FLEET)
    yield opened
    await opened.delete(FLEET)


async def changing(table: Table, clock: FakeClock, kind: str, *, beats: bool = False) -> bool | str:
    """What becomes of a change, during which a worker speaks or not."""
    outcome: list[bool | str] = []

    async def change() -> None:
        try:
            outcome.append(await change_ledger(table, kind))
        except ConveyorError as error:
            outcome.append(error.code)

    async with anyio.create_task_group() as group:
        group.start_soon(change)
        while not clock.pending and not outcome:  # noqa: ASYNC110  (the clock tells nobody)
            await anyio.sleep(0.001)
        await clock.advance(WATCH - 1)
        assert not outcome
        if beats:
            await agree_on_ledger(table, "redis")
        await clock.advance(1)
    return outcome[0]


async def test_the_first_one_writes_the_kind_and_others_agree(table: Table) -> None:
    assert await ledger_kind(table) is None
    await agree_on_ledger(table, "redis")
    await agree_on_ledger(table, "redis")
    assert await ledger_kind(table) == "redis"


async def test_who_is_bound_to_another_is_turned_away_in_one_line(table: Table) -> None:
    await agree_on_ledger(table, "redis")
    with pytest.raises(ConveyorError) as refused:
        await agree_on_ledger(table, "dynamodb")
    assert refused.value.code is ErrorCode.CONFLICT
    assert refused.value.detail == (
        "this fleet keeps its permits in redis and this process is set to dynamodb"
    )
    assert await ledger_kind(table) == "redis"


async def test_of_two_that_come_first_at_once_one_is_turned_away(table: Table) -> None:
    refused: list[str] = []

    async def come(kind: str) -> None:
        try:
            await agree_on_ledger(table, kind)
        except ConveyorError:
            refused.append(kind)

    async with anyio.create_task_group() as group:
        for kind in ("redis", "dynamodb"):
            group.start_soon(come, kind)
    assert sorted([*refused, str(await ledger_kind(table))]) == ["dynamodb", "redis"]


@pytest.mark.parametrize("call", [agree_on_ledger, change_ledger])
async def test_an_unknown_kind_is_refused(table: Table, call: object) -> None:
    assert callable(call)
    with pytest.raises(ConveyorError, match="redis, dynamodb"):
        await call(table, "memory")


async def test_the_kind_is_changed_while_no_worker_speaks(table: Table, clock: FakeClock) -> None:
    await agree_on_ledger(table, "redis")
    assert await changing(table, clock, "dynamodb") is True
    assert await ledger_kind(table) == "dynamodb"
    with pytest.raises(ConveyorError):
        await agree_on_ledger(table, "redis")
    await agree_on_ledger(table, "dynamodb")


async def test_the_kind_is_not_changed_while_a_worker_is_alive(
    table: Table, clock: FakeClock
) -> None:
    assert BEAT < WATCH / 3
    await agree_on_ledger(table, "redis")
    assert await changing(table, clock, "dynamodb", beats=True) == ErrorCode.CONFLICT
    assert await ledger_kind(table) == "redis"


async def test_to_change_to_what_is_there_changes_nothing(table: Table) -> None:
    await agree_on_ledger(table, "redis")
    assert not await change_ledger(table, "redis")


async def test_a_fleet_without_a_kind_gets_it_at_once(table: Table) -> None:
    assert await change_ledger(table, "dynamodb")
    assert await ledger_kind(table) == "dynamodb"
