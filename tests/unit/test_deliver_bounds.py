"""Bounds of delivering: one receiver that never answers, or never succeeds, holds up no other."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from conveyor.domain import delivery_places
from conveyor.domain.deliveries import DeliveryStatus, EventDelivery
from conveyor.domain.delivery_places import (
    FAILING_AFTER,
    MOST_AT_A_TIME,
    MOST_OF_A_CALLER,
    MOST_SLOW,
    MOST_TO_A_HOST,
    MOST_UNPROVEN,
    SLOW_AFTER,
    DeliveryLine,
    Place,
    Places,
    WaitingDelivery,
)
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import Job
from conveyor.domain.webhooks import Webhook
from conveyor.handlers import deliver
from conveyor.handlers.deliver import LONGEST_PUT_OFF
from conveyor.ports.webhooks import WebhookAnswer
from tests.unit.delivery_world import DeliveryWorld, Held, delivery_world, receiving, succeed, until
from tests.unit.http_api import OTHER_KEY
from tests.unit.wire_server import Peer, RawServer, raw_server
from tests.unit.wired_handlers import deliverer

GOOD = "https://good.test/"
SILENCE = 15.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def world(tmp_path: Path, anyio_backend: str) -> AsyncIterator[DeliveryWorld]:
    async with delivery_world(tmp_path) as world:
        yield world


@asynccontextmanager
async def silent() -> AsyncIterator[tuple[RawServer, list[int]]]:
    """A receiver that takes connections and never answers, and how many were open whenever one more
    came."""
    open_at_once = 0
    seen: list[int] = []

    async def serve(peer: Peer) -> None:
        nonlocal open_at_once
        open_at_once += 1
        seen.append(open_at_once)
        try:
            while await peer.request():
                pass
        finally:
            open_at_once -= 1

    async with raw_server(serve) as server:
        yield server, seen


def fail(url: str) -> WebhookAnswer:
    return WebhookAnswer(status=500, error="http_5xx:500")


def holding(world: DeliveryWorld, answer: Callable[[str], WebhookAnswer] = succeed) -> Held:
    """Let the deliverer of a world have such receivers."""
    held = Held(answer)
    clock, telemetry = world.api.clock, world.telemetry
    world.deliverer = deliverer(world.api.binding, clock, held, observer=telemetry)
    return held


def count(deliveries: list[EventDelivery], status: DeliveryStatus) -> int:
    return sum(one.status is status for one in deliveries)


@pytest.mark.slow
async def test_a_silent_receiver_holds_up_no_other(world: DeliveryWorld) -> None:
    async with silent() as (dead, open_at_once), receiving("200 OK") as good:
        for _ in range(120):
            await world.owe(dead.url("/hook"))
        async with anyio.create_task_group() as attempts:
            await world.deliverer.look(attempts)
            last = await world.owe(f"http://localhost:{good.server.port}/")
            await world.deliverer.look(attempts)
            await until(lambda: bool(good.requests))
            waiting = [one for one in await world.deliveries() if not one.attempt_count]
            for _ in range(20):
                await world.api.clock.advance(5)
                await world.deliverer.look(attempts)
            assert len(waiting) >= 110
            assert max(open_at_once) == MOST_OF_A_CALLER
            attempts.cancel_scope.cancel()

    delivered = [one for one in await world.deliveries() if one.status is DeliveryStatus.DELIVERED]
    assert [one.job_id for one in delivered] == [last["job_id"]]


class Timed:
    """Receivers that answer at once, but for those of silent hosts: they let every request wait for
    SILENCE."""

    def __init__(self, world: DeliveryWorld) -> None:
        self.sent: list[str] = []
        self._clock = world.api.clock
        world.deliverer = deliverer(world.api.binding, self._clock, self, observer=world.telemetry)

    async def check_url(self, url: str) -> None:
        """Fail: a URL is judged when it is set."""
        raise AssertionError(url)

    async def post_event(
        self, url: str, *, headers: Mapping[str, str], body: bytes
    ) -> WebhookAnswer:
        """Answer, sooner or later."""
        self.sent.append(url)
        if not url.startswith("https://silent"):
            return WebhookAnswer(status=200)
        await self._clock.sleep(SILENCE)
        return WebhookAnswer(error="timeout")

    async def aclose(self) -> None:
        """Nothing is under way."""


async def owe_many(world: DeliveryWorld, url: str, times: int) -> None:
    """Make a job whose webhook is owed many events."""
    await owe_events(world, await world.submit(url), world.caller, times)


async def owe_foreign(world: DeliveryWorld, url: str) -> None:
    """Make a job of another caller whose webhook is owed an event."""
    document = {"tasks": [{"url": "https://a.test/"}]}
    job = (await world.api.foreign.post("/v1/jobs", json=document)).json()
    caller = world.api.service.identify(OTHER_KEY).caller_id
    now = world.api.clock.now()
    await world.api.binding.jobs.set_webhook(caller, job["job_id"], Webhook(url), now=now)
    await owe_events(world, job, caller, 1)


async def owe_events(world: DeliveryWorld, job: dict[str, Any], caller: str, times: int) -> None:
    """Let events of a job be due."""
    now = world.api.clock.now()
    for _ in range(times):
        event = EventDelivery(
            delivery_id=world.api.clock.new_id(),
            caller=caller,
            job_id=job["job_id"],
            run_id=job["latest_run"]["run_id"],
            event_type="run.completed",
            body=b"{}",
            created_at=now,
            due_at=now,
            updated_at=now,
            webhook_number=1,
        )
        assert await world.api.binding.deliveries.create_delivery(event)


@pytest.mark.slow
@pytest.mark.parametrize(("hosts", "seconds"), [(5, 1), (22, SILENCE)])
async def test_silent_hosts_hold_up_no_other(
    world: DeliveryWorld, hosts: int, seconds: float
) -> None:
    """The event for a good receiver goes out in the next look, and where silent hosts that nobody
    knew have taken every place of their caller, as soon as their first attempts have ended."""
    receivers, clock = Timed(world), world.api.clock
    for number in range(hosts):
        await owe_many(world, f"https://silent-{number}.test/", 30)
    began = clock.now()
    async with anyio.create_task_group() as attempts:
        await world.deliverer.look(attempts)
        await until(lambda: clock.pending == len(receivers.sent) > MOST_SLOW)
        assert len(receivers.sent) <= MOST_AT_A_TIME
        await owe_many(world, GOOD, 1)
        await clock.advance(1)
        await world.deliverer.look(attempts)
        assert world.deliverer.oldest == 1
        await clock.advance(seconds - 1)
        await until(lambda: GOOD in receivers.sent)
        assert clock.now() - began == seconds * 1_000

        # By now the hosts are known, and together leave half of the places to others.
        for _ in range(8):
            await clock.advance(SILENCE)
            await until(lambda: clock.pending > 0)
            await world.deliverer.look(attempts)
            receivers.sent.clear()
            await owe_many(world, GOOD, 3)
            await world.deliverer.look(attempts)
            await until(lambda: receivers.sent.count(GOOD) == 3)
        assert clock.pending <= MOST_SLOW
        attempts.cancel_scope.cancel()


@pytest.mark.parametrize("is_readable", [True, False])
async def test_many_due_at_a_silent_host_are_each_read_once_and_put_off_side_by_side(
    world: DeliveryWorld, monkeypatch: pytest.MonkeyPatch, is_readable: bool
) -> None:
    """Also where their job cannot be read. The good event behind them goes out in the same look,
    though each write takes a while."""
    receivers, clock, binding = Timed(world), world.api.clock, world.api.binding
    await owe_many(world, "https://silent.test/", 300)
    [silent] = {one.job_id for one in await world.deliveries()}
    await owe_many(world, GOOD, 1)
    log, find_job = binding.deliveries, binding.jobs.find_job
    due, change = log.due_deliveries, log.change_delivery
    read, jobs = Counter[str](), Counter[str]()
    most = writing = 0

    async def counted_due(*, now: int, limit: int) -> list[EventDelivery]:
        # Of hundreds, whose bodies may be large, no more are in memory at a time.
        assert limit <= 100
        found = await due(now=now, limit=limit)
        read.update(one.delivery_id for one in found if not one.leased_until)
        return found

    async def counted_job(job_id: str) -> Job | None:
        jobs[job_id] += 1
        if job_id == silent and not is_readable:
            raise ConveyorError(ErrorCode.UNAVAILABLE, "this one is damaged")
        return await find_job(job_id)

    async def slow_change(before: EventDelivery, after: EventDelivery) -> bool:
        nonlocal most, writing
        writing += 1
        most = max(most, writing)
        clock.shift(0.05)
        try:
            return await change(before, after)
        finally:
            writing -= 1

    monkeypatch.setattr(log, "due_deliveries", counted_due)
    monkeypatch.setattr(log, "change_delivery", slow_change)
    monkeypatch.setattr(binding.jobs, "find_job", counted_job)
    async with anyio.create_task_group() as attempts:
        await world.deliverer.look(attempts)
        await until(lambda: GOOD in receivers.sent)
        attempts.cancel_scope.cancel()

    waiting = [one for one in await world.deliveries() if not one.attempt_count]
    assert len(waiting) == 300 - MOST_OF_A_CALLER * is_readable
    assert {read[one.delivery_id] for one in waiting} == {1}
    assert set(jobs.values()) == {1}
    assert MOST_OF_A_CALLER < most <= deliver.SIDE_BY_SIDE + MOST_AT_A_TIME


async def test_no_look_reads_a_delivery_twice_whose_place_is_full(
    world: DeliveryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliver, "PAGE", 5)
    holding(world)
    for _ in range(30):
        await world.owe("https://hooks.test/")
    read: Counter[str] = Counter()
    store = world.api.binding.deliveries
    due = store.due_deliveries

    async def counted(*, now: int, limit: int) -> list[EventDelivery]:
        found = await due(now=now, limit=limit)
        read.update(one.delivery_id for one in found if not one.leased_until)
        return found

    monkeypatch.setattr(store, "due_deliveries", counted)
    async with anyio.create_task_group() as attempts:
        await world.deliverer.look(attempts)
        now = world.api.clock.now()
        put_off = [one for one in await world.deliveries() if one.due_at > now]
        attempts.cancel_scope.cancel()

    assert len(put_off) == 30 - MOST_OF_A_CALLER
    assert {read[one.delivery_id] for one in put_off} == {1}
    assert all(one.due_at <= now + LONGEST_PUT_OFF * 1_500 for one in put_off)
    assert len({one.due_at for one in put_off}) > 20


async def test_waiting_deliveries_follow_as_soon_as_an_attempt_has_ended(
    world: DeliveryWorld,
) -> None:
    """No further look is needed for them, and no second passes."""
    held = holding(world)
    for _ in range(30):
        await world.owe("https://hooks.test/")
    held.free()
    await world.look()

    assert count(await world.deliveries(), DeliveryStatus.DELIVERED) == 30
    assert held.most == {"hooks.test": MOST_OF_A_CALLER}


async def test_a_waiting_delivery_that_was_changed_is_left_to_a_later_look(
    world: DeliveryWorld,
) -> None:
    held = holding(world)
    jobs = [await world.owe("https://hooks.test/") for _ in range(MOST_OF_A_CALLER + 2)]
    async with anyio.create_task_group() as attempts:
        await world.deliverer.look(attempts)
        await world.set_webhook(jobs[-1], Webhook("https://other.test/"))
        path = f"/v1/jobs/{jobs[-2]['job_id']}/webhook"
        assert (await world.api.client.delete(path)).status_code == 204
        held.free()

    assert held.most == {"hooks.test": MOST_OF_A_CALLER, "other.test": 1}
    assert count(await world.deliveries(), DeliveryStatus.DROPPED) == 1


async def test_a_waiting_delivery_that_another_worker_has_sent_is_not_sent_again(
    world: DeliveryWorld,
) -> None:
    held, others = holding(world), Held()
    others.free()
    clock, telemetry = world.api.clock, world.telemetry
    other = deliverer(world.api.binding, clock, others, observer=telemetry)
    for _ in range(MOST_OF_A_CALLER + 1):
        await world.owe("https://hooks.test/")
    async with anyio.create_task_group() as attempts:
        await world.deliverer.look(attempts)
        await until(lambda: len(held.sent) == MOST_OF_A_CALLER)
        await world.look(after=10, by=other)
        held.free()

    assert (len(held.sent), len(others.sent)) == (MOST_OF_A_CALLER, 1)
    assert {one.attempt_count for one in await world.deliveries()} == {1}


async def test_a_worker_makes_twenty_attempts_at_a_time(world: DeliveryWorld) -> None:
    held = holding(world)
    held.free()
    for number in range(5):
        await world.owe(f"https://host-{number}.test/")
    # By now the hosts are known to be quick.
    await world.look()
    held.hold()
    for number in range(55):
        await world.owe(f"https://host-{number % 5}.test/")
    async with anyio.create_task_group() as attempts:
        attempts.start_soon(world.deliverer.look, attempts)
        await until(lambda: held.under_way.total() == MOST_AT_A_TIME)
        held.free()

    assert held.most_in_all == MOST_AT_A_TIME
    assert count(await world.deliveries(), DeliveryStatus.DELIVERED) == 60


@pytest.mark.slow
async def test_after_twenty_failures_one_attempt_at_a_time_goes_to_a_url(
    world: DeliveryWorld,
) -> None:
    """Until one succeeds. Another URL of the same host is not concerned."""
    answers = {"/bad": fail, "/good": succeed}
    held = holding(world, lambda url: answers[url.removeprefix("https://hooks.test")](url))
    held.free()

    async def owe(path: str, times: int) -> None:
        for _ in range(times):
            await world.owe(f"https://hooks.test{path}")

    async def most_at_once(*, after: float) -> int:
        held.most.clear()
        await world.look(after=after)
        return held.most["hooks.test"]

    await owe("/bad", FAILING_AFTER)
    assert await most_at_once(after=0) == MOST_OF_A_CALLER
    assert await most_at_once(after=5) == 1
    await owe("/good", 3)
    assert await most_at_once(after=0) == 3
    answers["/bad"] = succeed
    held.hold()
    await world.api.clock.advance(400)
    async with anyio.create_task_group() as attempts:
        await world.deliverer.look(attempts)
        await until(lambda: held.under_way.total() > 0)
        assert held.under_way.total() == 1
        held.free()
    assert count(await world.deliveries(), DeliveryStatus.DELIVERED) == FAILING_AFTER + 3
    await owe("/bad", MOST_OF_A_CALLER)
    assert await most_at_once(after=0) == MOST_OF_A_CALLER


async def test_a_deliverer_that_is_stopped_begins_nothing_more(world: DeliveryWorld) -> None:
    held = holding(world)
    for _ in range(10):
        await world.owe("https://hooks.test/")
    async with anyio.create_task_group() as attempts:
        await world.deliverer.look(attempts)
        await until(lambda: len(held.sent) == MOST_OF_A_CALLER)
        world.deliverer.stop()
        await world.deliverer.look(attempts)
        held.free()

    assert len(held.sent) == MOST_OF_A_CALLER
    assert count(await world.deliveries(), DeliveryStatus.DELIVERED) == MOST_OF_A_CALLER


def test_a_host_has_places_for_several_callers() -> None:
    places = Places()
    asked = [Place(caller, "hooks.test", "https://hooks.test/") for caller in "abc"] * 6
    taken = [place for place in asked if places.take(place)]

    assert len(taken) == MOST_TO_A_HOST
    assert max(Counter(place.caller for place in taken).values()) <= MOST_OF_A_CALLER
    assert places.take(Place("a", "other.test", "https://other.test/"))
    for place in taken:
        places.give_back(place)
    assert not places.is_idle()
    places.give_back(Place("a", "other.test", "https://other.test/"))
    assert places.is_idle()
    assert places.take(taken[0])


def test_failures_are_counted_by_caller_and_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_places, "MOST_REMEMBERED", 2)
    places = Places()
    bad, *others = (Place(caller, "hooks.test", "https://hooks.test/") for caller in "abc")
    for _ in range(FAILING_AFTER):
        places.note(bad, delivered=False, seconds=0)
    assert (places.take(bad), places.take(bad)) == (True, False)
    assert (places.take(others[0]), places.take(others[0])) == (True, True)
    # The one that failed longest ago is forgotten.
    for other in others:
        places.note(other, delivered=False, seconds=0)
    assert places.take(bad)


def places_of(*urls: str, caller: str = "a") -> list[Place]:
    return [Place(caller, url, f"https://{url}/") for url in urls]


def test_slow_hosts_leave_half_of_the_places_to_others() -> None:
    places = Places()
    slow = places_of(*[f"slow-{number}" for number in range(30)])
    for place in slow:
        places.note(place, delivered=True, seconds=SLOW_AFTER)
    assert [places.take(place) for place in slow].count(True) == MOST_SLOW
    new = places_of(*[f"new-{number}" for number in range(MOST_UNPROVEN - MOST_SLOW)])
    assert [places.take(place) for place in new] == [True] * len(new)
    places.give_back(new[0])
    assert not places.take(slow[-1])
    places.note(slow[-1], delivered=False, seconds=0)
    assert places.take(slow[-1])


def test_one_caller_with_many_new_hosts_leaves_places_to_others() -> None:
    places = Places()
    mine = places_of(*[f"host-{number}" for number in range(30)])
    taken = [place for place in mine if places.take(place)]
    theirs = places_of(*[f"their-{number}" for number in range(30)], caller="b")
    others = [place for place in theirs if places.take(place)]

    assert len(taken) == MOST_UNPROVEN
    assert len(others) == MOST_AT_A_TIME - MOST_UNPROVEN
    for place in others:
        places.give_back(place)
    # A quick host is nobody's burden.
    quick = mine[-1]
    assert not places.take(quick)
    places.note(quick, delivered=True, seconds=0)
    assert places.take(quick)
    places.give_back(taken[0])
    assert places.take(mine[-2])
    assert not places.take(taken[0])


async def test_silent_hosts_of_one_caller_hold_up_no_other_caller(world: DeliveryWorld) -> None:
    receivers = Timed(world)
    for number in range(30):
        await owe_many(world, f"https://silent-{number}.test/", 3)
    async with anyio.create_task_group() as attempts:
        await world.deliverer.look(attempts)
        await until(lambda: len(receivers.sent) == MOST_UNPROVEN)
        await owe_foreign(world, GOOD)
        await world.deliverer.look(attempts)
        await until(lambda: GOOD in receivers.sent)
        attempts.cancel_scope.cancel()

    assert len(receivers.sent) == MOST_UNPROVEN + 1


def test_an_unknown_host_has_one_place_once_half_of_all_are_taken() -> None:
    places = Places()
    for place in places_of(*[f"host-{number}" for number in range(MOST_SLOW)]):
        assert places.take(place)
    [new] = places_of("new")
    assert (places.take(new), places.take(new)) == (True, False)
    places.note(new, delivered=True, seconds=0)
    assert places.take(new)


def test_callers_and_their_hosts_take_turns() -> None:
    places, line = Places(), DeliveryLine()
    many = places_of(*[f"host-{number}" for number in range(30)])
    for place in many:
        places.note(place, delivered=True, seconds=0)
    for number, place in enumerate([*many, *many, *places_of("other", caller="b")]):
        line.join(WaitingDelivery(str(number), place, 1))
    assert all(map(places.take, many[:MOST_AT_A_TIME]))
    assert line.take_next(places) is None
    had = []
    for place in many[:MOST_AT_A_TIME]:
        places.give_back(place)
        assert (waiting := line.take_next(places))
        had.append(waiting.place)

    assert had[0].caller == "b"
    assert had[1:11] == many[MOST_AT_A_TIME:]
    assert had[11:] == many[:9]


def test_the_line_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_places, "MOST_WAITING", 2)
    monkeypatch.setattr(delivery_places, "MOST_WAITING_IN_ALL", 3)
    line = DeliveryLine()
    hosts = places_of("one", "two")
    for place in hosts:
        for number in (1, 2, 1, 3):
            line.join(WaitingDelivery(f"{place.host}-{number}", place, 1))
    assert [line.length(place) for place in hosts] == [2, 1]
    for _ in range(2):
        line.leave(hosts[0], "one-1")
    line.join(WaitingDelivery("two-2", hosts[1], 1))
    assert [line.length(place) for place in hosts] == [1, 2]
    line.clear()
    assert [line.length(place) for place in hosts] == [0, 0]


async def test_spellings_of_a_host_are_one_host(world: DeliveryWorld) -> None:
    held = holding(world)
    hosts = ("HOOKS.test", "hooks.test.", "hooks.test:443", "hooks.TEST", "hooks.test")
    for host in hosts:
        await world.owe(f"https://{host}/")
    held.free()
    await world.look()

    assert sorted(held.sent) == sorted(f"https://{host}/" for host in hosts)
    assert held.most_in_all == MOST_OF_A_CALLER


def test_what_was_heard_of_longest_ago_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_places, "MOST_REMEMBERED", 3)
    places = Places()
    for host in ("a", "b", "a", "c"):
        place = Place("caller", host, f"https://{host}/")
        assert places.take(place)
        places.give_back(place)

    assert [places.last_turn("caller", host) for host in "abc"] == [(4, 3), (4, 0), (4, 4)]
