"""The contract of every permits adapter, sentence by sentence of the port."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest

from tests.conformance.permit_ledgers import (
    LEASE,
    LEDGERS,
    LIMIT,
    OTHER_JOB,
    Bench,
    over,
)

sequenced = over(lambda ledger: ledger.sequenced)
keeps_wants = over(lambda ledger: ledger.keeps_wants)
atomic = over(lambda ledger: ledger.atomic)
racing = over(lambda ledger: not ledger.atomic)


@pytest.fixture(params=LEDGERS)
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    opened = LEDGERS[request.param].open()
    yield opened
    await opened.aclose()


# Granted where the sum of all unexpired counts stays within the limit, or nothing is changed.


async def test_a_count_that_fits_is_granted_and_the_rest_is_free(bench: Bench) -> None:
    state = await bench.acquire_or_renew("a", 4)
    assert (state.granted, state.free, state.holders) == (True, 6, 1)
    state = await bench.acquire_or_renew("a", LIMIT)
    assert (state.granted, state.free, state.holders) == (True, 0, 1)


async def test_a_count_that_does_not_fit_is_refused_whole(bench: Bench) -> None:
    await bench.acquire_or_renew("a", 4)
    state = await bench.acquire_or_renew("b", 7)
    assert (state.granted, state.free, state.holders) == (False, 6, 1)
    state = await bench.acquire_or_renew("b", 6)
    assert (state.granted, state.free, state.holders) == (True, 0, 2)


async def test_a_refused_growth_leaves_what_was_held(bench: Bench) -> None:
    await bench.acquire_or_renew("a", 4)
    await bench.acquire_or_renew("b", 5)
    assert not await bench.asks("a", 6)
    assert await bench.total() == 9
    assert await bench.asks("a", 5)


async def test_a_refused_growth_renews_nothing(bench: Bench) -> None:
    await bench.acquire_or_renew("a", 4)
    await bench.clock.advance(20)
    assert not await bench.asks("a", LIMIT + 1)
    await bench.clock.advance(10)
    assert await bench.total() == 0


async def test_the_limit_is_over_all_holders_together(bench: Bench) -> None:
    assert [await bench.asks(holder, 4) for holder in "abc"] == [True, True, False]
    assert [await bench.asks(holder, 2) for holder in "cd"] == [True, False]


async def test_jobs_do_not_share_a_limit(bench: Bench) -> None:
    assert (await bench.acquire_or_renew("a", LIMIT)).granted
    assert (await bench.acquire_or_renew("a", LIMIT, job_id=OTHER_JOB)).granted
    await bench.acquire_or_renew("a", 3)
    assert (await bench.total(), await bench.total(OTHER_JOB)) == (3, LIMIT)


async def test_a_limit_of_nothing_grants_nothing(bench: Bench) -> None:
    state = await bench.acquire_or_renew("a", 1, limit=0)
    assert (state.granted, state.free, state.holders) == (False, 0, 0)
    assert (await bench.acquire_or_renew("a", 0, limit=0)).granted


async def test_a_negative_count_is_an_error_and_changes_nothing(bench: Bench) -> None:
    await bench.acquire_or_renew("a", 4)
    with pytest.raises(ValueError, match="not negative"):
        await bench.acquire_or_renew("a", -1)
    assert await bench.total() == 4


# A count equal to `before` renews; one below it gives back.


async def test_the_same_count_renews_the_lease(bench: Bench) -> None:
    await bench.acquire_or_renew("a", LIMIT)
    for _ in range(10):
        await bench.clock.advance(20)
        assert await bench.asks("a", LIMIT)
    assert not await bench.asks("b", 1)


async def test_growth_renews_what_was_held_before(bench: Bench) -> None:
    await bench.acquire_or_renew("a", 4)
    await bench.clock.advance(20)
    await bench.acquire_or_renew("a", 5)
    await bench.clock.advance(20)
    assert await bench.total() == 5


async def test_a_smaller_count_gives_back_and_renews_the_rest(bench: Bench) -> None:
    await bench.acquire_or_renew("a", LIMIT)
    await bench.clock.advance(20)
    state = await bench.acquire_or_renew("a", 7)
    assert (state.granted, state.free, state.holders) == (True, 3, 1)
    await bench.clock.advance(20)
    assert not await bench.asks("b", 4)
    assert await bench.asks("b", 3)


async def test_a_count_given_back_before_the_call_is_given_back_all_the_same(bench: Bench) -> None:
    await bench.acquire_or_renew("a", LIMIT)
    assert (await bench.acquire_or_renew("a", 7, before=7)).free == 3


async def test_a_count_of_nothing_gives_all_back(bench: Bench) -> None:
    await bench.acquire_or_renew("a", LIMIT)
    state = await bench.acquire_or_renew("a", 0)
    assert (state.granted, state.free, state.holders) == (True, LIMIT, 0)
    assert await bench.asks("b", LIMIT)


async def test_who_has_nothing_may_always_have_nothing(bench: Bench) -> None:
    await bench.acquire_or_renew("a", LIMIT)
    state = await bench.acquire_or_renew("b", 0, limit=5)
    assert (state.granted, state.free, state.holders) == (True, 0, 1)


# Never above what the ledger knows: granted, whatever the limit.


async def test_a_lowered_limit_takes_nothing_away_and_grants_nothing_more(bench: Bench) -> None:
    await bench.acquire_or_renew("a", 8)
    assert (await bench.acquire_or_renew("a", 8, limit=5)).granted
    assert not (await bench.acquire_or_renew("a", 9, limit=5)).granted
    assert not (await bench.acquire_or_renew("b", 1, limit=5)).granted
    state = await bench.acquire_or_renew("a", 6, limit=5)
    assert (state.granted, state.free) == (True, 0)
    await bench.acquire_or_renew("a", 4, limit=5)
    assert not (await bench.acquire_or_renew("b", 2, limit=5)).granted
    assert (await bench.acquire_or_renew("b", 1, limit=5)).granted


async def test_a_raised_limit_grants_more(bench: Bench) -> None:
    await bench.acquire_or_renew("a", LIMIT)
    assert (await bench.acquire_or_renew("b", 5, limit=15)).granted
    assert not (await bench.acquire_or_renew("c", 1, limit=15)).granted


async def test_growth_whose_answer_was_lost_is_granted_again(bench: Bench) -> None:
    await bench.acquire_or_renew("a", 2)
    await bench.acquire_or_renew("a", 8)
    assert (await bench.acquire_or_renew("a", 7, before=2, limit=5)).granted
    assert await bench.total() == 7


# Leases: unexpired counts alone are summed.


async def test_permits_fall_free_when_their_lease_lapses(bench: Bench) -> None:
    await bench.acquire_or_renew("a", LIMIT)
    await bench.clock.advance(LEASE - 0.001)
    assert not await bench.asks("b", 1)
    await bench.clock.advance(0.001)
    assert await bench.asks("b", LIMIT)


async def test_one_holders_lease_does_not_carry_another(bench: Bench) -> None:
    await bench.acquire_or_renew("a", 4)
    await bench.acquire_or_renew("b", 4)
    await bench.clock.advance(20)
    await bench.acquire_or_renew("b", 4)
    await bench.clock.advance(15)
    state = await bench.look()
    assert (state.free, state.holders) == (6, 1)


async def test_each_call_sets_its_own_lease_shorter_or_longer(bench: Bench) -> None:
    await bench.acquire_or_renew("a", 4, lease=60)
    await bench.acquire_or_renew("b", 3, lease=10)
    await bench.acquire_or_renew("a", 4, lease=5)
    await bench.acquire_or_renew("b", 3, lease=20)
    await bench.clock.advance(5)
    assert await bench.total() == 3
    await bench.clock.advance(15)
    assert await bench.total() == 0


async def test_a_lease_however_long_concerns_its_own_holder_alone(bench: Bench) -> None:
    await bench.acquire_or_renew("a", 3)
    # A ledger that is younger than that may refuse it, and nobody else.
    await bench.acquire_or_renew("b", 4, lease=36_000.0)
    assert await bench.asks("a", 5)
    assert (await bench.look(job_id=OTHER_JOB)).free == LIMIT
    await bench.clock.advance(LEASE)
    assert await bench.asks("c", 6)
    await bench.acquire_or_renew("b", 0, lease=36_000.0)
    assert await bench.asks("c", LIMIT)


async def test_a_lapsed_holder_renews_where_there_is_still_room(bench: Bench) -> None:
    await bench.acquire_or_renew("a", 6)
    await bench.clock.advance(LEASE)
    await bench.acquire_or_renew("b", 4)
    assert await bench.asks("a", 6)
    assert await bench.total() == LIMIT


async def test_a_lapsed_holder_is_refused_whole_where_there_is_no_room(bench: Bench) -> None:
    await bench.acquire_or_renew("a", 6)
    await bench.clock.advance(LEASE)
    await bench.acquire_or_renew("b", 5)
    state = await bench.acquire_or_renew("a", 6)
    assert (state.granted, state.free, state.holders) == (False, 5, 1)


async def test_clocks_set_back_and_forth_end_no_lease_and_lengthen_none(bench: Bench) -> None:
    await bench.acquire_or_renew("a", LIMIT)
    for shift in (30, -60, 30):
        bench.clock.shift(shift)
        await bench.clock.advance(9)
        assert not await bench.asks("b", 1)
    bench.clock.shift(-30)
    await bench.clock.advance(3)
    assert await bench.asks("b", LIMIT)


# Refused where `sequence` is not greater than the last one seen of an unexpired entry.


@sequenced
async def test_a_call_that_arrives_twice_is_refused_and_changes_nothing(bench: Bench) -> None:
    await bench.acquire_or_renew("a", 4, sequence=1)
    await bench.clock.advance(20)
    state = await bench.acquire_or_renew("a", 4, sequence=1)
    assert (state.granted, state.free, state.holders) == (False, 6, 1)
    await bench.clock.advance(10)
    assert await bench.total() == 0


@sequenced
async def test_late_growth_does_not_undo_a_giving_back(bench: Bench) -> None:
    await bench.acquire_or_renew("a", 2, sequence=1)
    await bench.acquire_or_renew("a", 0, sequence=3)
    assert not (await bench.acquire_or_renew("a", 8, before=2, sequence=2)).granted
    assert await bench.total() == 0


@sequenced
async def test_a_late_giving_back_does_not_undo_growth(bench: Bench) -> None:
    await bench.acquire_or_renew("a", 6, sequence=1)
    await bench.acquire_or_renew("a", 9, sequence=8)
    assert not (await bench.acquire_or_renew("a", 2, before=6, sequence=2)).granted
    assert not await bench.asks("b", 2)


@sequenced
async def test_a_refused_call_leaves_the_sequence_where_it_was(bench: Bench) -> None:
    await bench.acquire_or_renew("a", 4, sequence=1)
    assert not (await bench.acquire_or_renew("a", LIMIT + 1, sequence=9)).granted
    assert (await bench.acquire_or_renew("a", 5, sequence=2)).granted


@sequenced
async def test_sequences_are_counted_by_job_and_holder(bench: Bench) -> None:
    await bench.acquire_or_renew("a", 1, sequence=9)
    assert (await bench.acquire_or_renew("b", 1, sequence=1)).granted
    assert (await bench.acquire_or_renew("a", 1, sequence=1, job_id=OTHER_JOB)).granted


@sequenced
async def test_the_sequence_goes_with_the_entry(bench: Bench) -> None:
    await bench.acquire_or_renew("a", 4, sequence=9)
    await bench.clock.advance(LEASE)
    assert (await bench.acquire_or_renew("a", 4, sequence=1)).granted


# Wants.


@keeps_wants
async def test_wants_are_counted_with_and_without_permits(bench: Bench) -> None:
    await bench.acquire_or_renew("a", LIMIT)
    assert (await bench.acquire_or_renew("b", 0, wants=True)).wanting == 1
    state = await bench.acquire_or_renew("a", LIMIT, wants=True)
    assert (state.holders, state.wanting) == (1, 2)


@keeps_wants
async def test_a_want_ends_with_a_call_without_it(bench: Bench) -> None:
    await bench.acquire_or_renew("a", 3, wants=True)
    await bench.acquire_or_renew("b", 0, wants=True)
    assert [(await bench.acquire_or_renew("a", 3)).wanting for _ in range(2)] == [1, 1]
    assert [(await bench.acquire_or_renew("b", 0)).wanting for _ in range(2)] == [0, 0]


@keeps_wants
async def test_a_want_lapses_with_its_lease(bench: Bench) -> None:
    await bench.acquire_or_renew("b", 0, wants=True)
    await bench.clock.advance(20)
    await bench.acquire_or_renew("a", 0, wants=True)
    assert (await bench.look()).wanting == 2
    await bench.clock.advance(10)
    assert (await bench.look()).wanting == 1


@keeps_wants
async def test_a_refused_call_neither_leaves_a_want_nor_ends_one(bench: Bench) -> None:
    await bench.acquire_or_renew("a", LIMIT)
    assert (await bench.acquire_or_renew("b", 1, wants=True)).wanting == 0
    await bench.acquire_or_renew("b", 0, wants=True)
    assert (await bench.acquire_or_renew("b", 1, wants=False)).wanting == 1


# Calls that overlap.


async def _all_at_once(bench: Bench, holders: int) -> int:
    """Count the holders that get one permit if all ask before any has an answer."""
    granted: list[str] = []

    async def ask(holder: str) -> None:
        if await bench.asks(holder, 1):
            granted.append(holder)

    async with anyio.create_task_group() as group:
        for number in range(holders):
            group.start_soon(ask, f"holder-{number}")
    return len(granted)


@pytest.mark.guarantee("G5")
@atomic
async def test_calls_that_overlap_never_get_more_than_the_limit(bench: Bench) -> None:
    assert await _all_at_once(bench, 50) == LIMIT
    assert await bench.total() == LIMIT


@racing
async def test_counting_before_inserting_breaks_the_limit(bench: Bench) -> None:
    assert await _all_at_once(bench, 50) == 50
    assert await bench.total() == 50
