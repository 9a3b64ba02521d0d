"""The contract of every signing keys adapter, sentence by sentence of the port."""

from __future__ import annotations

import asyncio

import pytest

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.signing_keys import SigningKey, SigningKeys, SigningSlots
from conveyor.testing.clock import FakeClock


def key(clock: FakeClock) -> SigningKey:
    """A key, not written yet."""
    return SigningKey(clock.new_id(), clock.now(), clock.token(60))


async def refused(signing_keys: SigningKeys, caller: str, added: SigningKey) -> ErrorCode:
    with pytest.raises(ConveyorError) as caught:
        await signing_keys.add_signing_key(caller, added)
    return caught.value.code


async def test_the_first_key_is_active_and_the_second_a_candidate(
    signing_keys: SigningKeys, clock: FakeClock
) -> None:
    first, second, third = key(clock), key(clock), key(clock)
    assert await signing_keys.get_signing_keys("alice") == SigningSlots()

    await signing_keys.add_signing_key("alice", first)
    assert await signing_keys.get_signing_keys("alice") == SigningSlots(first)
    await signing_keys.add_signing_key("alice", second)

    assert await refused(signing_keys, "alice", third) is ErrorCode.CANDIDATE_PENDING
    assert await signing_keys.get_signing_keys("alice") == SigningSlots(first, second)


async def test_keys_are_each_callers_own(signing_keys: SigningKeys, clock: FakeClock) -> None:
    of_alice, of_bob = key(clock), key(clock)
    await signing_keys.add_signing_key("alice", of_alice)
    await signing_keys.add_signing_key("bob", of_bob)

    assert await signing_keys.get_signing_keys("alice") == SigningSlots(of_alice)
    assert await signing_keys.get_signing_keys("bob") == SigningSlots(of_bob)


async def test_a_promoted_key_is_active_and_the_one_before_is_gone(
    signing_keys: SigningKeys, clock: FakeClock
) -> None:
    first, second, third = key(clock), key(clock), key(clock)
    await signing_keys.add_signing_key("alice", first)
    await signing_keys.add_signing_key("alice", second)

    assert await signing_keys.promote_signing_key("alice", second.kid) == second
    assert await signing_keys.get_signing_keys("alice") == SigningSlots(second)
    await signing_keys.add_signing_key("alice", third)
    assert await signing_keys.get_signing_keys("alice") == SigningSlots(second, third)


async def test_only_the_candidate_is_promoted(signing_keys: SigningKeys, clock: FakeClock) -> None:
    first, second = key(clock), key(clock)
    with pytest.raises(ConveyorError, match=ErrorCode.NO_CANDIDATE):
        await signing_keys.promote_signing_key("alice", second.kid)
    await signing_keys.add_signing_key("alice", first)
    with pytest.raises(ConveyorError, match=ErrorCode.NO_CANDIDATE):
        await signing_keys.promote_signing_key("alice", second.kid)

    assert await signing_keys.get_signing_keys("alice") == SigningSlots(first)


async def test_a_dropped_candidate_leaves_the_active_key(
    signing_keys: SigningKeys, clock: FakeClock
) -> None:
    first, second = key(clock), key(clock)
    await signing_keys.drop_signing_key("alice", second.kid)
    await signing_keys.add_signing_key("alice", first)
    await signing_keys.add_signing_key("alice", second)

    await signing_keys.drop_signing_key("alice", first.kid)
    assert await signing_keys.get_signing_keys("alice") == SigningSlots(first, second)
    await signing_keys.drop_signing_key("alice", second.kid)
    assert await signing_keys.get_signing_keys("alice") == SigningSlots(first)


async def test_a_repeated_change_changes_nothing_more(
    signing_keys: SigningKeys, clock: FakeClock
) -> None:
    """A caller whose answer was lost promotes and drops once more."""
    first, second = key(clock), key(clock)
    await signing_keys.add_signing_key("alice", first)
    await signing_keys.add_signing_key("alice", second)
    for _ in range(2):
        assert await signing_keys.promote_signing_key("alice", second.kid) == second
        await signing_keys.drop_signing_key("alice", second.kid)

    assert await signing_keys.get_signing_keys("alice") == SigningSlots(second)


async def test_keys_added_at_once_are_as_if_one_came_after_the_other(
    signing_keys: SigningKeys, clock: FakeClock
) -> None:
    added = [key(clock) for _ in range(4)]
    outcomes = await asyncio.gather(
        *(signing_keys.add_signing_key("alice", one) for one in added), return_exceptions=True
    )

    slots = await signing_keys.get_signing_keys("alice")
    kept = [one for one, outcome in zip(added, outcomes, strict=True) if outcome is None]
    assert {slots.active, slots.candidate} == set(kept)
    lost = [outcome for outcome in outcomes if outcome is not None]
    assert [getattr(outcome, "code", outcome) for outcome in lost] == [
        ErrorCode.CANDIDATE_PENDING
    ] * 2
