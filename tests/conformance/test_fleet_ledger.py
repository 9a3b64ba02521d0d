"""One fleet has one ledger, bucket and secret: a process with others does not start, and no setting
changes under a running process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import anyio
import pytest

from conveyor.domain.api_keys import fingerprint
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.prod.dynamodb.client import Table
from conveyor.prod.dynamodb.schema import FLEET
from conveyor.prod.startup_checks import (
    BEAT,
    WATCH,
    FleetTerms,
    agree,
    change_ledger,
    fleet_item,
    names_callers_anew,
    nobody_works,
    rebind,
)
from conveyor.testing.clock import FakeClock
from tests.conformance.permit_servers import permits_table


@pytest.fixture
async def table(clock: FakeClock) -> AsyncIterator[Table]:
    opened = permits_table(clock)
    await opened.delete(FLEET)
    yield opened
    await opened.delete(FLEET)


async def agree_on_ledger(table: Table, kind: str) -> None:
    """Agree as a worker."""
    await agree(table, FleetTerms(ledger=kind, bucket="bodies"), works=True)


async def ledger_kind(table: Table) -> str | None:
    item = await fleet_item(table)
    return None if item is None else item["ledger"]


def secrets(*texts: str) -> tuple[str, ...]:
    return tuple(fingerprint(text.encode()) for text in texts)


async def changing(table: Table, clock: FakeClock, kind: str, *, beats: bool = False) -> bool | str:
    """Return the outcome of a change of the ledger, during which a worker confirms the settings or
    does not."""
    change = partial(change_ledger, table, kind)
    return await watched(table, clock, change, beats=beats, seconds=WATCH)


async def watched(
    table: Table,
    clock: FakeClock,
    act: Callable[[], Awaitable[bool]],
    *,
    beats: bool = False,
    seconds: float,
) -> bool | str:
    """Return the outcome of `act`, a worker confirming the settings in those seconds or not."""
    outcome: list[bool | str] = []

    async def change() -> None:
        try:
            outcome.append(await act())
        except ConveyorError as error:
            outcome.append(error.code)

    async with anyio.create_task_group() as group:
        group.start_soon(change)
        while not clock.pending and not outcome:  # noqa: ASYNC110  (the clock tells nobody)
            await anyio.sleep(0.001)
        await clock.advance(seconds - 1)
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
        "this fleet keeps its permits in redis, but this process is set to dynamodb"
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


async def test_an_unknown_kind_is_refused(table: Table) -> None:
    for call in (agree_on_ledger, change_ledger):
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


@pytest.mark.parametrize("works", [True, False])
async def test_who_has_another_bucket_is_turned_away_whatever_its_role(
    table: Table, works: bool
) -> None:
    await agree_on_ledger(table, "redis")
    with pytest.raises(ConveyorError) as refused:
        await agree(table, FleetTerms(ledger="redis", bucket="others"), works=works)
    assert refused.value.code is ErrorCode.CONFLICT
    assert refused.value.detail == (
        "this fleet keeps its bodies in the bucket bodies, but this process is set to others"
    )


async def test_an_api_agrees_whatever_its_ledger_and_is_no_sign_of_a_worker(table: Table) -> None:
    await agree_on_ledger(table, "redis")
    before = await fleet_item(table)
    after = await agree(table, FleetTerms(ledger="dynamodb", bucket="bodies"), works=False)
    assert after == before


async def test_what_an_older_version_wrote_is_completed(table: Table) -> None:
    await table.put(FLEET, {"shape": 1, "ledger": "redis", "beats": 7})
    item = await agree(
        table, FleetTerms(ledger="redis", bucket="bodies", secrets=secrets("a")), works=True
    )
    assert (item["beats"], item["bucket_name"], item["secrets"]) == (8, "bodies", [*secrets("a")])


@pytest.mark.parametrize("works", [True, False])
async def test_secrets_are_those_of_one_fleet_while_one_is_shared(
    table: Table, works: bool
) -> None:
    async def come(*texts: str) -> list[str]:
        terms = FleetTerms(ledger="redis", bucket="bodies", secrets=secrets(*texts))
        found: list[str] = (await agree(table, terms, works=works))["secrets"]
        return found

    assert await come("a") == [*secrets("a")]
    assert await come("b", "a") == [*secrets("b", "a")]
    assert await come("a") == [*secrets("b", "a")]
    assert await come("c", "b", "a") == [*secrets("c", "b", "a")]
    assert await come() == [*secrets("c", "b", "a")]
    with pytest.raises(ConveyorError) as refused:
        await come("x", "y")
    assert refused.value.code is ErrorCode.CONFLICT
    assert "CONVEYOR_SECRET" in refused.value.detail
    assert not any(one in refused.value.detail for one in secrets("a", "b", "c", "x", "y"))


async def test_another_last_secret_is_noticed(table: Table) -> None:
    began = FleetTerms(ledger="redis", bucket="bodies", secrets=secrets("b", "a"))
    item = await agree(table, began, works=False)
    cut = FleetTerms(ledger="redis", bucket="bodies", secrets=secrets("c", "b"))

    assert not names_callers_anew(item, began)
    assert names_callers_anew(await agree(table, cut, works=False), cut)


async def test_bucket_and_secrets_are_changed_while_no_worker_speaks(
    table: Table, clock: FakeClock
) -> None:
    await agree_on_ledger(table, "redis")
    moved = FleetTerms(ledger="redis", bucket="moved", secrets=secrets("new"))
    assert await watched(table, clock, partial(rebind, table, moved), seconds=WATCH) is True
    assert not await rebind(table, moved)
    await agree(table, moved, works=True)
    with pytest.raises(ConveyorError, match="in the bucket moved"):
        await agree_on_ledger(table, "redis")


async def test_nothing_is_changed_where_there_is_no_table(clock: FakeClock) -> None:
    absent = permits_table(clock)
    absent.name = "conveyor-none"
    changes = (
        partial(change_ledger, absent, "redis"),
        partial(rebind, absent, FleetTerms(ledger="redis", bucket="moved")),
    )
    for change in changes:
        with pytest.raises(ConveyorError) as caught:
            await change()
        told = "there is no table conveyor-none (conveyor admin init makes it)"
        assert (caught.value.code, caught.value.detail) == (ErrorCode.UNAVAILABLE, told)


@pytest.mark.parametrize("beats", [True, False])
async def test_a_worker_that_speaks_is_noticed(table: Table, clock: FakeClock, beats: bool) -> None:
    assert await nobody_works(table, watch=BEAT)
    await agree_on_ledger(table, "redis")
    look = partial(nobody_works, table, watch=3 * BEAT)
    assert await watched(table, clock, look, beats=beats, seconds=3 * BEAT) is not beats
