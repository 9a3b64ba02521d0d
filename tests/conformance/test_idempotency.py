"""The contract of every idempotency adapter, sentence by sentence of the port."""

from __future__ import annotations

import asyncio

from conveyor.ports.records import (
    ClaimedKey,
    Idempotency,
    IdempotencyScope,
    KeyClaim,
    KeyInUse,
    KeyMismatch,
    StoredResponse,
)
from conveyor.testing.clock import FakeClock
from tests.conformance.world import World

LAPSE = 60_000
DAY = 86_400_000


async def claim(
    idempotency: Idempotency, now: int, *, body: bytes = b"body", created_id: str = "FIRST"
) -> KeyClaim:
    return await idempotency.claim_idempotency_key(
        "scope",
        fingerprint=body,
        created_id=created_id,
        now=now,
        lapses_at=now + LAPSE,
        expires_at=now + DAY,
    )


async def release(
    idempotency: Idempotency, now: int, *, scope: str = "scope", created_id: str = "FIRST"
) -> None:
    """Release what `claim` claimed at `now`."""
    await idempotency.release_idempotency_key(scope, created_id=created_id, lapses_at=now + LAPSE)


async def test_a_new_key_is_claimed(idempotency: Idempotency, clock: FakeClock) -> None:
    assert await claim(idempotency, clock.now()) == ClaimedKey("FIRST", taken_over=False)


async def test_a_second_request_meets_the_first(idempotency: Idempotency, clock: FakeClock) -> None:
    await claim(idempotency, clock.now())
    assert await claim(idempotency, clock.now() + LAPSE - 1, created_id="2") == KeyInUse()


async def test_another_body_is_a_mismatch(idempotency: Idempotency, world: World) -> None:
    await claim(idempotency, world.now)
    assert await claim(idempotency, world.now, body=b"other") == KeyMismatch()
    assert await claim(idempotency, world.now + LAPSE, body=b"other") == KeyMismatch()
    await world.submit(1, once=IdempotencyScope("scope"))
    assert await claim(idempotency, world.now, body=b"other") == KeyMismatch()


async def test_a_lapsed_claim_is_taken_over_with_its_id(
    idempotency: Idempotency, clock: FakeClock
) -> None:
    now = clock.now()
    await claim(idempotency, now)
    taken = await claim(idempotency, now + LAPSE, created_id="SECOND")
    assert taken == ClaimedKey("FIRST", taken_over=True)
    assert await claim(idempotency, now + 2 * LAPSE - 1, created_id="THIRD") == KeyInUse()


async def test_an_answer_stands_until_it_expires(idempotency: Idempotency, world: World) -> None:
    now = world.now
    await claim(idempotency, now)
    await world.submit(1, once=IdempotencyScope("scope"))
    assert await claim(idempotency, now + DAY - 1) == StoredResponse(201, b"{}")
    assert await claim(idempotency, now + DAY, created_id="NEW") == ClaimedKey("NEW", False)


async def test_a_released_key_is_free_again(idempotency: Idempotency, clock: FakeClock) -> None:
    await claim(idempotency, clock.now())
    await release(idempotency, clock.now())
    fresh = await claim(idempotency, clock.now(), body=b"other", created_id="NEW")
    assert fresh == ClaimedKey("NEW", taken_over=False)


async def test_a_release_leaves_an_answer_alone(idempotency: Idempotency, world: World) -> None:
    await claim(idempotency, world.now)
    await world.submit(1, once=IdempotencyScope("scope"))
    await release(idempotency, world.now)
    await release(idempotency, world.now, scope="never claimed")
    assert await claim(idempotency, world.now) == StoredResponse(201, b"{}")


async def test_a_late_release_leaves_the_claims_of_others_alone(
    idempotency: Idempotency, clock: FakeClock
) -> None:
    now = clock.now()
    await claim(idempotency, now)
    await claim(idempotency, now + LAPSE, created_id="SECOND")
    await release(idempotency, now)
    assert await claim(idempotency, now + LAPSE, created_id="THIRD") == KeyInUse()
    await release(idempotency, now + LAPSE)
    fresh = await claim(idempotency, now, created_id="FOURTH")
    assert fresh == ClaimedKey("FOURTH", taken_over=False)
    await release(idempotency, now)
    assert await claim(idempotency, now) == KeyInUse()


async def test_of_fifty_at_once_one_goes_on(idempotency: Idempotency, clock: FakeClock) -> None:
    now = clock.now()
    claims = await asyncio.gather(
        *(claim(idempotency, now, created_id=str(number)) for number in range(50))
    )
    assert sum(isinstance(one, ClaimedKey) for one in claims) == 1
    assert claims.count(KeyInUse()) == 49


async def test_an_answer_of_work_in_several_steps_is_kept(
    idempotency: Idempotency, clock: FakeClock
) -> None:
    now = clock.now()
    answer = StoredResponse(202, b'{"replayed":2}\n')
    await claim(idempotency, now)
    for given in (answer, answer, StoredResponse(202, b"other")):
        await idempotency.answer_idempotency_key("scope", created_id="FIRST", answer=given)
    assert await claim(idempotency, now) == answer
    assert await claim(idempotency, now, body=b"other") == KeyMismatch()
    await release(idempotency, now)
    assert await claim(idempotency, now + DAY - 1) == answer
    assert await claim(idempotency, now + DAY, created_id="NEW") == ClaimedKey("NEW", False)


async def test_an_answer_of_somebody_else_is_dropped(
    idempotency: Idempotency, clock: FakeClock
) -> None:
    now = clock.now()
    answer = StoredResponse(202, b"{}")
    await idempotency.answer_idempotency_key("scope", created_id="FIRST", answer=answer)
    await claim(idempotency, now)
    await idempotency.answer_idempotency_key("scope", created_id="SECOND", answer=answer)
    assert await claim(idempotency, now) == KeyInUse()


async def test_an_answer_after_a_take_over_is_that_of_both(
    idempotency: Idempotency, clock: FakeClock
) -> None:
    now = clock.now()
    answer = StoredResponse(202, b"{}")
    await claim(idempotency, now)
    await claim(idempotency, now + LAPSE, created_id="SECOND")
    await idempotency.answer_idempotency_key("scope", created_id="FIRST", answer=answer)
    assert await claim(idempotency, now + LAPSE) == answer
