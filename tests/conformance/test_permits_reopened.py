"""A permits ledger that may have lost its entries comes back closed to growth, for one lease."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.conformance.permit_ledgers import LEASE, LEDGERS, LIMIT, Bench, over

can_reopen_empty = over(lambda ledger: ledger.can_reopen_empty)


@pytest.fixture
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    opened = LEDGERS[request.param].open()
    yield opened
    await opened.aclose()


@can_reopen_empty
async def test_coming_back_empty_grants_nothing_new_for_one_lease(bench: Bench) -> None:
    await bench.acquire_or_renew("a", 6)
    await bench.come_back_empty()
    assert not await bench.asks("a", 7)
    state = await bench.acquire_or_renew("b", 1)
    assert (state.granted, state.free, state.holders) == (False, 0, 0)
    await bench.clock.advance(LEASE - 0.001)
    assert not await bench.asks("b", 1)
    await bench.clock.advance(0.001)
    assert await bench.asks("b", LIMIT)


@can_reopen_empty
async def test_holders_announce_themselves_and_others_can_take_the_rest(bench: Bench) -> None:
    await bench.acquire_or_renew("a", 4)
    await bench.acquire_or_renew("b", 3)
    await bench.come_back_empty()
    await bench.clock.advance(10)
    assert await bench.asks("a", 4)
    state = await bench.acquire_or_renew("b", 3)
    assert (state.granted, state.free, state.holders) == (True, 0, 2)
    await bench.clock.advance(20)
    assert not await bench.asks("c", 4)
    assert await bench.asks("c", 3)


@can_reopen_empty
async def test_what_is_given_back_while_closed_is_nobodys_until_it_opens(bench: Bench) -> None:
    await bench.acquire_or_renew("a", LIMIT)
    await bench.come_back_empty()
    assert await bench.asks("a", 4)
    assert not await bench.asks("a", 5)
    assert not await bench.asks("b", 1)
    await bench.clock.advance(LEASE - 1)
    assert await bench.asks("a", 4)
    await bench.clock.advance(1)
    assert await bench.asks("b", 6)


@can_reopen_empty
async def test_an_announcement_is_believed_above_a_limit_lowered_meanwhile(bench: Bench) -> None:
    await bench.acquire_or_renew("a", 8)
    await bench.come_back_empty()
    assert (await bench.acquire_or_renew("a", 8, limit=5)).granted
    await bench.clock.advance(LEASE - 1)
    assert (await bench.acquire_or_renew("a", 8, limit=5)).granted
    await bench.clock.advance(1)
    assert not (await bench.acquire_or_renew("b", 1, limit=5)).granted


@can_reopen_empty
async def test_an_early_late_call_does_not_hide_an_announcement(bench: Bench) -> None:
    await bench.acquire_or_renew("a", 8, sequence=7)
    await bench.come_back_empty()
    assert (await bench.acquire_or_renew("a", 2, before=2, sequence=3)).granted
    assert (await bench.acquire_or_renew("a", 8, before=8, sequence=8)).granted
    assert not (await bench.acquire_or_renew("a", 1, before=2, sequence=4)).granted
    await bench.clock.advance(LEASE - 1)
    assert await bench.asks("a", 8)
    await bench.clock.advance(1)
    assert not await bench.asks("b", 3)


@over(lambda ledger: ledger.can_reopen_empty and ledger.keeps_wants)
async def test_a_want_is_taken_down_while_closed(bench: Bench) -> None:
    await bench.come_back_empty()
    state = await bench.acquire_or_renew("b", 0, wants=True)
    assert (state.granted, state.wanting) == (True, 1)
