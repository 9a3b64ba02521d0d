"""The contract of every deliveries adapter, sentence by sentence of the port."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import structs

from conveyor.domain.deliveries import (
    GONE_PAUSE,
    LADDER,
    LONGEST,
    MOST_ATTEMPTS_KEPT,
    TEST_EVENT,
    AttemptResult,
    DeliveryAttempt,
    DeliveryStatus,
    EventDelivery,
    begin_attempt,
    dropped,
    put_off,
    replayed,
)
from conveyor.ports.deliveries import Deliveries, DeliveryFilter
from conveyor.ports.outbox import LONGEST_LEASE
from tests.conformance.sent_deliveries import (
    DELIVERED,
    LEASE,
    REFUSED,
    attempt,
    begin,
    change,
    new_delivery,
    owe,
)
from tests.conformance.world import CALLER, World

DAY = 86_400_000
STRANGER = "another caller"


async def read(world: World, delivery: EventDelivery) -> EventDelivery | None:
    """Return a delivery as it stands."""
    return await world.store.deliveries.get_delivery(delivery.caller, delivery.delivery_id)


async def listed(world: World, *, limit: int = 100, **wanted: Any) -> list[EventDelivery]:
    """List deliveries, by default those of the usual caller."""
    found = DeliveryFilter(**({"caller": CALLER} | wanted))
    return await world.store.deliveries.list_deliveries(found, limit=limit)


async def due(world: World, *, now: int | None = None, limit: int = 100) -> list[EventDelivery]:
    """Return the deliveries due now, or at another time."""
    at = world.now if now is None else now
    return await world.store.deliveries.due_deliveries(now=at, limit=limit)


async def owe_some(world: World, count: int, **fields: Any) -> list[EventDelivery]:
    """Write deliveries, a second apart."""
    made = []
    for _ in range(count):
        made.append(await owe(world, **fields))
        await world.clock.advance(1)
    return made


# -- one record --


async def test_a_delivery_is_read_byte_for_byte_by_its_caller_alone(
    deliveries: Deliveries, world: World
) -> None:
    delivery = await owe(world)
    assert await deliveries.get_delivery(CALLER, delivery.delivery_id) == delivery
    assert await deliveries.get_delivery(STRANGER, delivery.delivery_id) is None
    assert await deliveries.get_delivery(CALLER, world.clock.new_id()) is None
    assert await listed(world, caller=STRANGER) == []
    assert await listed(world, caller=STRANGER, job_id=delivery.job_id) == []


async def test_every_field_is_kept(world: World) -> None:
    tried = DeliveryAttempt(
        number=7,
        started_at=world.now,
        outcome="http_4xx:404",
        milliseconds=123,
        host="münchen.example",
        status=404,
        content_type="text/html; charset=é",
        length=0,
        next_at=world.now + 5,
        is_replay=True,
        headers={"X-Signature": "t=1,v1=abcdefgh…", "User-Agent": "conveyor/1"},
    )
    delivery = new_delivery(
        world,
        event_type=TEST_EVENT,
        leased_until=world.now + 9,
        ladder=3,
        replayed_at=world.now - 1,
        first_at=world.now - 2,
        failures=4,
        is_last=True,
        attempt_count=7,
        attempts=(structs.replace(tried, number=6, outcome="", headers={}), tried),
        version=12,
    )
    assert await world.store.deliveries.create_delivery(delivery)
    assert await read(world, delivery) == delivery


async def test_a_delivery_whose_id_is_there_changes_nothing(
    deliveries: Deliveries, world: World
) -> None:
    first = await owe(world)
    sent = await attempt(world, first, DELIVERED)
    again = structs.replace(first, body=b"other", job_id="another job")
    assert not await deliveries.create_delivery(again)
    assert not await deliveries.create_delivery(first)
    assert await listed(world) == [sent]
    assert await listed(world, job_id="another job") == []

    # Ids are of a caller: what another one has is not in the way, and not to be learned of.
    theirs = structs.replace(first, caller=STRANGER)
    assert await deliveries.create_delivery(theirs)
    assert await deliveries.get_delivery(STRANGER, first.delivery_id) == theirs
    assert await read(world, first) == sent


async def test_one_of_many_makes_a_delivery(deliveries: Deliveries, world: World) -> None:
    first = new_delivery(world)
    made = await asyncio.gather(
        *(
            deliveries.create_delivery(structs.replace(first, body=str(number).encode()))
            for number in range(8)
        )
    )
    assert sum(made) == 1
    found = await read(world, first)
    assert found is not None
    assert found.body == str(made.index(True)).encode()


async def test_a_change_replaces_the_version_that_it_names(
    deliveries: Deliveries, world: World
) -> None:
    first, other = await owe_some(world, 2)
    second = await begin(world, first)
    assert await read(world, first) == second
    assert not await deliveries.change_delivery(first, dropped(first, now=world.now))
    assert not await deliveries.change_delivery(
        structs.replace(second, version=3), dropped(second, now=world.now)
    )
    assert await read(world, first) == second
    assert await read(world, other) == other


async def test_a_delivery_that_is_not_there_is_not_changed(
    deliveries: Deliveries, world: World
) -> None:
    unwritten = new_delivery(world)
    assert not await deliveries.change_delivery(unwritten, dropped(unwritten, now=world.now))
    theirs = await owe(world, caller=STRANGER)
    mine = structs.replace(theirs, caller=CALLER)
    assert not await deliveries.change_delivery(mine, dropped(mine, now=world.now))
    assert await listed(world) == []
    assert await read(world, theirs) == theirs


@pytest.mark.parametrize("same", [False, True], ids=["each its own", "all the same"])
async def test_one_of_many_has_the_version_that_all_name(
    deliveries: Deliveries, world: World, same: bool
) -> None:
    for _ in range(5):
        first = await owe(world)
        wanted = [
            begin_attempt(first, now=world.now, lapses_at=world.now + LEASE + number * (not same))
            for number in range(8)
        ]
        taken = await asyncio.gather(
            *(deliveries.change_delivery(first, after) for after in wanted)
        )
        assert sum(taken) == 1
        assert await read(world, first) == wanted[taken.index(True)]


async def test_writers_who_read_again_lose_nothing(deliveries: Deliveries, world: World) -> None:
    first = await owe(world)

    async def begin_one(number: int) -> None:
        while True:
            known = await read(world, first)
            assert known is not None
            begun = begin_attempt(known, now=world.now, lapses_at=world.now + number)
            if await deliveries.change_delivery(known, begun):
                return

    await asyncio.gather(*(begin_one(number) for number in range(6)))
    found = await read(world, first)
    assert found is not None
    assert (found.version, found.attempt_count) == (7, 6)
    assert [one.number for one in found.attempts] == [1, 2, 3, 4, 5, 6]


# -- the log --


async def test_deliveries_are_listed_newest_first_and_no_more_than_asked_for(world: World) -> None:
    made = await owe_some(world, 5)
    newest_first = made[::-1]
    assert await listed(world) == newest_first
    assert await listed(world, limit=2) == newest_first[:2]
    assert await listed(world, before=made[3].delivery_id, limit=2) == newest_first[2:4]
    assert await listed(world, before=made[0].delivery_id) == []
    # A change moves nothing.
    sent = await attempt(world, made[2], DELIVERED)
    assert await listed(world) == [made[4], made[3], sent, made[1], made[0]]


async def test_a_window_has_its_beginning_and_not_its_end(world: World) -> None:
    made = await owe_some(world, 4)
    since, until = made[1].created_at, made[3].created_at
    assert await listed(world, since=since) == made[:0:-1]
    assert await listed(world, until=until) == made[2::-1]
    assert await listed(world, since=since, until=until) == [made[2], made[1]]
    assert await listed(world, since=since + 1, until=until) == [made[2]]
    assert await listed(world, since=until, until=until) == []


async def test_a_window_is_of_the_time_at_which_a_delivery_was_made(world: World) -> None:
    # The end of a run may have been noticed late: the id is of that end.
    late = await owe(world, created_at=world.now + 3_600_000)
    early = await owe(world)
    assert await listed(world, since=world.now + 1) == [late]
    assert await listed(world, until=world.now + 1) == [early]


async def test_filters_choose_the_job_the_status_and_the_page(world: World) -> None:
    first, second = await owe_some(world, 2, job_id="one")
    third, fourth, fifth = await owe_some(world, 3, job_id="two")
    await owe(world, job_id="one", caller=STRANGER)
    sent = await attempt(world, second, DELIVERED)
    gone = await change(world, third, dropped(third, now=world.now))

    assert await listed(world, job_id="one") == [sent, first]
    assert await listed(world, job_id="three") == []
    assert await listed(world, job_id="one", limit=1) == [sent]
    assert await listed(world, job_id="two", before=fifth.delivery_id) == [fourth, gone]
    assert await listed(world, status=DeliveryStatus.PENDING) == [fifth, fourth, first]
    assert await listed(world, status=DeliveryStatus.PENDING, limit=2) == [fifth, fourth]
    assert await listed(world, status=DeliveryStatus.DELIVERED) == [sent]
    assert await listed(world, status=DeliveryStatus.DROPPED, job_id="two") == [gone]
    assert await listed(world, status=DeliveryStatus.FAILED) == []
    assert await listed(world, status=DeliveryStatus.PENDING, job_id="one") == [first]
    assert await listed(
        world,
        status=DeliveryStatus.PENDING,
        since=first.created_at + 1,
        before=fifth.delivery_id,
    ) == [fourth]


async def test_few_are_found_among_many(world: World) -> None:
    """A filtered page is full while there are enough, however many rows lie between."""
    made = await owe_some(world, 30)
    wanted = [await attempt(world, one, DELIVERED) for one in made[::10]]
    found = await listed(world, status=DeliveryStatus.DELIVERED, limit=3)
    assert found == wanted[::-1]


# -- the queue --


async def test_what_is_due_comes_longest_due_first(world: World) -> None:
    made = await owe_some(world, 4)
    theirs = await owe(world, caller=STRANGER)
    later = await owe(world, due_at=world.now + 1)
    ahead = await owe(world, due_at=1)

    assert await due(world) == [ahead, *made, theirs]
    assert await due(world, limit=3) == [ahead, *made[:2]]
    assert await due(world, now=made[2].due_at) == [ahead, *made[:3]]
    assert await due(world, now=made[0].due_at - 1) == [ahead]
    assert await due(world, now=world.now + 1) == [ahead, *made, theirs, later]


async def test_a_leased_delivery_is_nobody_elses_until_the_lease_lapses(world: World) -> None:
    first, second = await owe_some(world, 2)
    begun = await begin(world, first)
    assert await due(world) == [second]
    await world.clock.advance((LEASE - 1) / 1_000)
    assert await due(world) == [second]
    await world.clock.advance(0.001)
    assert await due(world) == [begun, second]


async def test_a_lease_of_a_clock_that_was_set_back_does_not_count(world: World) -> None:
    year = 365 * DAY
    ahead = await owe(world, due_at=world.now, leased_until=world.now + year)
    longest = await owe(world, due_at=world.now + 1, leased_until=world.now + 1 + LONGEST_LEASE)
    assert await due(world, now=world.now + 1) == [ahead]
    assert longest not in await due(world, now=world.now + 1)


async def test_an_attempt_that_ends_gives_the_lease_back(world: World) -> None:
    first, second, third = await owe_some(world, 3)
    again = await attempt(world, first, REFUSED)
    sent = await attempt(world, second, DELIVERED)
    gone = await attempt(world, third, AttemptResult(error="http_4xx:410", status=410))
    assert (again.status, sent.status, gone.status) == (
        DeliveryStatus.PENDING,
        DeliveryStatus.DELIVERED,
        DeliveryStatus.PENDING,
    )

    assert await due(world) == []
    await world.clock.advance(LADDER[0])
    assert await due(world) == [again]
    await world.clock.advance(GONE_PAUSE)
    assert await due(world) == [again, gone]


async def test_only_pending_deliveries_are_due(world: World) -> None:
    made = await owe_some(world, 3)
    await attempt(world, made[0], DELIVERED)
    last = await change(
        world, made[1], structs.replace(made[1], is_last=True, first_at=world.now, version=2)
    )
    failed = await attempt(world, last, REFUSED)
    assert failed.status is DeliveryStatus.FAILED
    await change(world, made[2], dropped(made[2], now=world.now))
    assert await due(world, now=world.now + LONGEST * 1_000) == []


async def test_what_was_put_off_is_due_later(world: World) -> None:
    first, second = await owe_some(world, 2)
    after = await change(world, first, put_off(first, due_at=world.now + 5_000, now=world.now))
    assert await due(world) == [second]
    await world.clock.advance(5)
    assert await due(world) == [second, after]


async def test_a_replay_is_due_at_once_whatever_became_of_the_delivery(world: World) -> None:
    made = await owe_some(world, 3)
    sent = await attempt(world, made[0], DELIVERED)
    gone = await change(world, made[1], dropped(made[1], now=world.now))
    tried = await attempt(world, made[2], REFUSED)
    await world.clock.advance(1)
    again = []
    for one in (sent, gone, tried):
        again.append(await change(world, one, replayed(one, now=world.now)))
        await world.clock.advance(0.001)

    assert await due(world) == again
    assert await listed(world) == again[::-1]
    assert [one.body for one in again] == [one.body for one in made]


async def test_a_replay_under_way_is_due_once_its_lease_is_given_back(world: World) -> None:
    first = await owe(world)
    begun = await begin(world, first)
    again = await change(world, begun, replayed(begun, now=world.now))
    assert await due(world) == []
    await world.clock.advance(LEASE / 1_000)
    assert await due(world) == [again]


async def test_one_of_many_workers_makes_an_attempt(deliveries: Deliveries, world: World) -> None:
    """Workers of one fleet that look at the same instant write the same."""
    await owe_some(world, 6)
    made: list[str] = []

    async def worker() -> None:
        for one in await due(world):
            begun = begin_attempt(one, now=world.now, lapses_at=world.now + LEASE)
            if await deliveries.change_delivery(one, begun):
                made.append(one.delivery_id)

    await asyncio.gather(*(worker() for _ in range(4)))
    assert sorted(made) == sorted({one.delivery_id for one in await listed(world)})
    assert await due(world) == []


async def test_the_largest_delivery_is_kept(world: World) -> None:
    """An event and attempts of the greatest size that they may have."""
    first = await owe(world, body=b"\xf0" * 100_000)
    tried = DeliveryAttempt(
        number=1,
        started_at=world.now,
        outcome="transport_error:" + "é" * 200,
        host="h" * 253,
        headers={f"X-Header-{number}": "v" * 100 for number in range(10)},
    )
    full = structs.replace(first, attempts=(tried,) * MOST_ATTEMPTS_KEPT, version=2)
    await change(world, first, full)
    assert await read(world, first) == full
    assert await due(world) == [full]


# -- removal --


async def test_old_deliveries_go_and_pending_ones_stay(
    deliveries: Deliveries, world: World
) -> None:
    made = await owe_some(world, 5)
    for one in made[:3]:
        await attempt(world, one, DELIVERED)
    await world.clock.advance(1)
    border = world.now
    young = await change(world, made[3], dropped(made[3], now=world.now))

    removed = await deliveries.drop_old_deliveries(before=border, limit=2)
    removed += await deliveries.drop_old_deliveries(before=border, limit=2)
    removed += await deliveries.drop_old_deliveries(before=border, limit=2)
    assert (removed, await listed(world)) == (3, [made[4], young])


async def test_a_page_of_old_deliveries_is_removed_at_a_time(
    deliveries: Deliveries, world: World
) -> None:
    for one in await owe_some(world, 3):
        await attempt(world, one, DELIVERED)
    before = world.now + 1
    counts = [await deliveries.drop_old_deliveries(before=before, limit=2) for _ in range(3)]
    assert counts == [2, 1, 0]


async def end(world: World, job_id: str, run_id: str) -> None:
    """Delete a job and remove what is left of it but its tombstone."""
    await world.store.jobs.delete_job(CALLER, job_id, now=world.now)
    await world.store.tasks.scrub_tasks(run_id, 100)
    await world.store.runs.purge_run(run_id)


async def test_the_deliveries_of_a_job_go_with_its_tombstone(world: World) -> None:
    job_id, run_id = await world.submit(1)
    other_id, _ = await world.submit(1)
    mine = await owe_some(world, 30, job_id=job_id)
    await attempt(world, mine[0], DELIVERED)
    others = [await owe(world, job_id=other_id), await owe(world, job_id="test")]
    await world.store.jobs.purge_job(job_id)
    assert len(await listed(world, job_id=job_id)) == 30
    await world.store.jobs.delete_job(CALLER, job_id, now=world.now)
    await world.store.jobs.purge_job(job_id)
    assert len(await listed(world, job_id=job_id)) == 30  # its run is still there

    await end(world, job_id, run_id)
    await world.store.jobs.purge_job(job_id)
    assert await listed(world, job_id=job_id) == []
    assert sorted(await listed(world), key=lambda one: one.delivery_id) == sorted(
        others, key=lambda one: one.delivery_id
    )
    assert await due(world) == sorted(others, key=lambda one: one.due_at)
    assert await read(world, mine[0]) is None
    await world.store.jobs.purge_job(job_id)
    assert len(await listed(world)) == 2
