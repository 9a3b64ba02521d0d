"""The limits of hosts in the loop: lanes of one host, and messages that knock one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from itertools import pairwise
from random import Random

import anyio
import pytest

from conveyor.domain.hosts import HostPattern, HostRules, Politeness, host_key
from conveyor.domain.run_waits import RunWaitReason
from conveyor.engine.host_starts import LATE
from conveyor.engine.hosts import PATIENCE, WAITING_OF_HOST
from conveyor.ports.pacing import NOTHING_ELSE, Booking, HostState
from conveyor.ports.permits import LeaseRequest
from conveyor.ports.queues import Delivery, TaskMessage, host_queue, run_queue
from tests.unit.dispatch_world import BrokenLedger, World
from tests.unit.test_worker_reports import reporter

A, B = "a.example:443", "b.example:443"
URL_A = f"https://{A}/"


def world(*, limit: int = 0, rate: float = 0.0, workers: int = 1, seconds: float = 1.0) -> World:
    return World(
        slots=20,
        duration=lambda _delivery: seconds,
        workers=workers,
        ledger=BrokenLedger,
        limits=HostRules(limit=limit, rate=rate),
    )


def starts_of(bench: World, url: str = URL_A) -> list[float]:
    return [moment for moment, one in bench.starts if one == url]


async def test_a_lane_of_a_host_keeps_the_limit_and_receives_each_message_once() -> None:
    bench = world(limit=3, workers=2)
    async with bench.running():
        await bench.submit("a", 40, hosts=(A, B), lanes=(A, B))
        await bench.clock.advance(12.0)
    assert len(bench.tasks.done) == 40
    assert (bench.received(), bench.bounced()) == (40, 0)
    for number in range(2):
        assert bench.tasks.peak[host_queue("a", number)] == 3
    assert bench.permits.total(host_key(A)) == 0, "every permit is given back"


async def test_a_lane_of_a_host_starts_as_often_as_the_rate_says() -> None:
    bench = world(rate=4.0, workers=2)
    async with bench.running():
        await bench.submit("a", 40, hosts=(A, B), lanes=(A, B))
        await bench.clock.advance(8.0)
    starts = starts_of(bench)
    assert len(starts) == 20
    assert min(after - before for before, after in zip(starts, starts[1:], strict=False)) > 0.2
    assert starts[-1] - starts[0] == pytest.approx(19 / 4, abs=0.3)
    assert (bench.received(), bench.bounced()) == (40, 0)


async def test_a_lane_whose_host_is_closed_is_not_asked_and_slows_no_other() -> None:
    bench = world(limit=2)
    await bench.pacing.close(host_key(A), 30.0)
    async with bench.running():
        await bench.submit("a", 20, hosts=(A, B), lanes=(A, B))
        await bench.clock.advance(6.0)
        assert (len(bench.tasks.done), bench.received()) == (10, 10)
        await bench.clock.advance(24.0)
        assert not starts_of(bench)
        await bench.clock.advance(8.0)
    assert (len(bench.tasks.done), bench.received()) == (20, 20)


async def test_a_start_that_was_booked_is_not_used_once_its_host_is_closed() -> None:
    bench = world(rate=1.0)
    async with bench.running():
        await bench.submit("a", 6, hosts=(A,), lanes=(A,))
        await bench.clock.advance(1.5)
        made = len(starts_of(bench))
        await bench.pacing.close(host_key(A), 20.0)
        await bench.clock.advance(19.9)
        assert len(starts_of(bench)) == made
        await bench.clock.advance(10.0)
    assert len(bench.tasks.done) == 6


@pytest.mark.parametrize("lanes", [(), (A,)])
async def test_starts_in_hand_are_dropped_once_the_delay_of_a_host_is_known(
    lanes: tuple[str, ...],
) -> None:
    bench = world(limit=20, workers=2)
    file = anyio.Event()

    async def admit(_url: str) -> float:
        await file.wait()
        await bench.pacing.slow(host_key(A), 3.0, 600.0)
        return 3.0

    bench.admit = admit
    async with bench.running():
        await bench.submit("a", 6, hosts=(A,), lanes=lanes)
        await bench.clock.advance(0.5)
        file.set()
        await bench.clock.advance(30.0)
    starts = starts_of(bench)
    assert min(after - before for before, after in zip(starts, starts[1:], strict=False)) > 2.6
    assert len(bench.tasks.done) == 6


async def test_messages_of_many_hosts_knock_and_come_twice_at_most() -> None:
    bench = world(limit=2, workers=2)
    receives: Counter[str] = Counter()
    take = bench.queues.receive

    async def counting(queue: str, **asked: object) -> object:
        found = await take(queue, **asked)  # type: ignore[arg-type]
        for delivery in found:
            if isinstance(delivery.message, TaskMessage):
                receives[delivery.message.task_id] += 1
        return found

    bench.queues.receive = counting  # type: ignore[assignment,method-assign]
    async with bench.running():
        await bench.submit("a", 40, hosts=(A, B))
        await bench.clock.advance(30.0)
    assert len(bench.tasks.done) == 40
    assert max(receives.values()) <= 2
    most = max(
        sum(start <= moment < start + 1.0 for moment in starts_of(bench))
        for start in starts_of(bench)
    )
    assert most <= 2
    assert bench.permits.total(host_key(A)) == 0


async def test_a_message_that_waits_for_its_host_takes_no_permit_of_its_job() -> None:
    bench = world(limit=1, seconds=4.0)
    async with bench.running():
        await bench.submit("a", 6, limit=2, hosts=(A,))
        await bench.clock.advance(6.0)
        lane = bench.dispatcher.lanes.get("a")
        assert lane is not None
        assert lane.busy - lane.probing <= 1
        await bench.clock.advance(40.0)
    assert len(bench.tasks.done) == 6


async def test_the_host_of_an_older_message_is_learned_at_its_claim() -> None:
    bench = world(limit=1, seconds=2.0, workers=2)
    async with bench.running():
        await bench.submit("a", 4)
        bench.hosts = (A,)
        await bench.clock.advance(30.0)
    assert len(bench.tasks.done) == 4
    assert bench.tasks.peak[run_queue("a")] == 1
    assert bench.received() <= 12, "each worker learns the host at a claim of its own"


async def test_calls_end_before_the_ledger_may_give_their_hosts_permits_to_others() -> None:
    for lanes in ((A,), ()):
        bench = world(limit=2, seconds=1_000.0)
        async with bench.running():
            await bench.submit("a", 2, hosts=(A,), lanes=lanes)
            await bench.clock.advance(3.0)
            assert bench.tasks.in_flight.total() == 2
            bench.broken.away = lambda request: request.job_id == host_key(A)
            await bench.clock.advance(30.0)
            assert bench.tasks.cancelled == 2
            bench.broken.away = lambda _request: False


async def test_without_limits_nothing_is_asked_of_the_ledger_for_hosts() -> None:
    bench = world()
    async with bench.running():
        await bench.submit("a", 40, hosts=(A, B))
        await bench.clock.advance(5.0)
    assert len(bench.tasks.done) == 40
    assert not [one for one in bench.broken.asked if one.job_id.startswith("host:")]


async def test_a_run_that_is_closed_gives_what_waits_back_at_once() -> None:
    bench = world(rate=0.2)
    async with bench.running():
        await bench.submit("a", 10, hosts=(A,))
        await bench.clock.advance(3.0)
        await bench.dispatcher.close_lane("a")
        await bench.clock.advance(0.5)
        assert bench.dispatcher.lanes.get("a") is None or not bench.dispatcher.has_work


@pytest.mark.slow
async def test_a_message_of_a_small_run_gets_its_turn_beside_a_large_one_elsewhere() -> None:
    bench = world(limit=1, workers=2)
    first, second = (member.dispatcher for member in bench.members)
    async with bench.running():
        await bench.submit("big", 200, hosts=(A,), lanes=(A,))
        await second.close_lane("big")
        await bench.clock.advance(5.0)
        assert bench.tasks.peak[host_queue("big", 0)] == 1
        await bench.submit("small", 3, hosts=(A,))
        await first.close_lane("small")
        await bench.clock.advance(90.0)
        done = len([one for one in bench.tasks.done if one in dict(bench.rows["small"]).values()])
        assert done == 3
        assert len(bench.tasks.done) > 60, "the large one goes on"
        assert bench.tasks.peak["all"] == 1


async def test_a_job_with_a_stricter_limit_waits_until_its_caller_makes_fewer_calls() -> None:
    bench = world()
    async with bench.running():
        await bench.submit("loose", 12, hosts=(A,), caller="c", politeness=Politeness(per_host=4))
        await bench.clock.advance(0.5)
        assert bench.tasks.in_flight.total() == 4
        await bench.submit("strict", 4, hosts=(A,), caller="c", politeness=Politeness(per_host=2))
        await bench.clock.advance(20.0)
    assert len(bench.tasks.done) == 16
    assert bench.tasks.peak["all"] == 4
    assert bench.tasks.peak[run_queue("strict")] <= 2


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_job_with_a_stricter_limit_comes_beside_one_that_does_not_end(workers: int) -> None:
    """It has one permit in all, so that of two workers one makes way for nothing now and then."""
    bench = world(workers=workers)
    strict, loose = Politeness(per_host=1), Politeness(per_host=4)
    async with bench.running():
        await bench.submit("x", 400, hosts=(A,), lanes=(A,), caller="c", politeness=loose)
        await bench.clock.advance(2.0)
        await bench.submit("y", 90, hosts=(A,), lanes=(A,), caller="c", politeness=strict)
        await bench.clock.advance(38.0)
        mine = {task for _, task in bench.rows["y"]}
        assert sum(task in mine for task in bench.tasks.done) >= 28
        assert len(bench.tasks.done) >= 140, "the other goes on"
    assert most_in_flight(bench, 0.0) == 4
    assert bench.tasks.peak[host_queue("y", 0)] == 1


def most_in_flight(bench: World, since: float, seconds: float = 1.0) -> int:
    """Return the most calls at a time of those that began since then."""
    starts = [start for start in starts_of(bench) if start >= since]
    lasts = seconds - 0.01
    return max(sum(begin <= start < begin + lasts for begin in starts) for start in starts)


@pytest.mark.parametrize("lanes", [(A,), ()])
async def test_a_limit_that_is_lowered_holds_as_the_calls_end(lanes: tuple[str, ...]) -> None:
    bench = world(limit=4, workers=2)
    async with bench.running():
        await bench.submit("a", 99, hosts=(A,), lanes=lanes)
        await bench.clock.advance(3.0)
        assert most_in_flight(bench, 0.0) == 4
        bench.limits = HostRules(limit=1)
        await bench.clock.advance(4.0)
        lowered = bench.clock.monotonic()
        await bench.clock.advance(4.0)
        assert bench.permits.total(host_key(A)) <= 1
    assert most_in_flight(bench, lowered) == 1


@pytest.mark.parametrize("lanes", [(A,), ()])
async def test_a_ceiling_holds_over_the_fleet(lanes: tuple[str, ...]) -> None:
    bench = world(limit=8, workers=3)
    async with bench.running():
        await bench.submit("a", 99, hosts=(A,), lanes=lanes)
        await bench.clock.advance(3.0)
        assert await bench.pacing.lower(host_key(A), 4) == 2
        await bench.clock.advance(3.0)
        lowered = bench.clock.monotonic()
        await bench.clock.advance(5.0)
    assert most_in_flight(bench, lowered) == 2


async def test_the_ceiling_of_one_caller_slows_no_other() -> None:
    bench = world(limit=6)
    polite = Politeness(per_host=6)
    async with bench.running():
        await bench.pacing.lower(host_key(A, "c"), 2)
        await bench.submit("a", 40, hosts=(A,), lanes=(A,), caller="c", politeness=polite)
        await bench.submit("b", 40, hosts=(A,), lanes=(A,), caller="d")
        await bench.clock.advance(5.0)
    assert bench.tasks.peak[host_queue("a", 0)] == 1
    assert bench.tasks.peak["all"] == 6


@pytest.mark.parametrize("lanes", [(A,), ()])
async def test_jobs_of_one_caller_keep_each_its_own_rules(lanes: tuple[str, ...]) -> None:
    bench = world()
    strict, loose = Politeness(per_host_rate=0.5), Politeness(per_host_rate=5.0)
    async with bench.running():
        await bench.submit("y", 20, hosts=(A,), lanes=lanes, caller="c", politeness=strict)
        await bench.submit("x", 99, hosts=(A,), lanes=lanes, caller="c", politeness=loose)
        await bench.clock.advance(10.0)
    mine = {task for _, task in bench.rows["y"]}
    assert 2 <= sum(task in mine for task in bench.tasks.done) <= 6
    assert len(bench.tasks.done) > 8


async def test_a_limit_of_ones_own_holds_beside_a_looser_one_on_host_lanes() -> None:
    bench = world()
    strict, loose = Politeness(per_host=1), Politeness(per_host=4)
    async with bench.running():
        await bench.submit("y", 4, hosts=(A,), lanes=(A,), caller="c", politeness=strict)
        await bench.submit("x", 12, hosts=(A,), lanes=(A,), caller="c", politeness=loose)
        await bench.clock.advance(40.0)
    assert len(bench.tasks.done) == 16
    assert bench.tasks.peak[host_queue("y", 0)] == 1
    assert bench.tasks.peak["all"] == 4


async def test_a_second_receipt_of_a_task_does_not_take_the_turn_of_the_first() -> None:
    bench = world(rate=1.2)
    turns, came = bench.members[0].turns, []
    assert turns is not None

    async def work(receipt: str, seconds: float, *, calls: bool) -> None:
        message = TaskMessage("job-a", "a", "task", version=2, host=A)
        delivery = Delivery(run_queue("a"), message, receipt, 1)
        lane = bench.dispatcher.lanes.get("a")
        assert lane is not None
        turn = turns.turn_of(lane, delivery, None)
        assert turn is not None
        turns.begin(turn, delivery, anyio.CancelScope())
        await bench.clock.sleep(seconds)
        if calls:
            await turns.come("a", "task", URL_A)
            came.append(bench.clock.monotonic())
        await turns.end(turn)

    async with bench.running():
        await bench.submit("a", 50, hosts=(B,))
        await bench.pacing.book(host_key(A), 0.9)
        async with anyio.create_task_group() as group:
            group.start_soon(partial(work, "first", 0.2, calls=True))
            group.start_soon(partial(work, "second", 0.1, calls=False))
            await bench.clock.advance(4.0)
    assert came[0] >= 0.83, "an interval behind that start"


async def test_a_run_of_which_only_closed_hosts_are_left_says_until_when() -> None:
    bench = world(limit=2)
    await bench.pacing.close(host_key(A), 30.0)
    until = bench.clock.now() + 30_000
    async with bench.running():
        await bench.submit("a", 20, hosts=(A, B), lanes=(A, B))
        await bench.clock.advance(2.0)
        reports = reporter(bench)
        (lane,) = reports.report().lanes
        assert (lane.reason, lane.in_flight > 0) == (None, True), "host B is worked"
        await bench.clock.advance(10.0)
        (lane,) = reports.report().lanes
        assert (lane.reason, lane.in_flight) == (RunWaitReason.HOST_CLOSED, 0)
        assert lane.until == pytest.approx(until, abs=500)


SLOW, SLOWEST = "s2.polite:443", "s1.polite:443"


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [(SLOW, SLOWEST), ()])
@pytest.mark.parametrize("jitter", [0.0, 0.3])
async def test_slow_hosts_use_their_starts_though_the_slots_are_taken(
    lanes: tuple[str, ...], jitter: float
) -> None:
    rates = {"s1.polite": 0.05, "s2.polite": 0.5}
    chance = Random(3)
    bench = World(
        slots=10,
        duration=lambda _: 2.4 * (1 + jitter * chance.uniform(-1, 1)),
        limits=HostRules(patterns={host: HostPattern(rate=rate) for host, rate in rates.items()}),
    )
    bench.queues._window = 10_000
    bench.queues.receive_time = 0.02
    plain = tuple(f"h{number}.example:443" for number in range(6))
    async with bench.running():
        await bench.submit("a", 1_500, hosts=(*plain, SLOW, SLOW, SLOWEST), lanes=lanes)
        await bench.clock.advance(20.0)
        before = len(bench.starts)
        await bench.clock.advance(200.0)
    made = Counter(url for _, url in bench.starts[before:])
    assert made[f"https://{SLOW}/"] >= 0.95 * 100
    assert made[f"https://{SLOWEST}/"] >= 0.95 * 10
    assert made.total() >= 8 * 200.0 / 2.4, "two slots of ten are kept at most"


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    ("slots", "rate", "seconds", "jitter"),
    [
        (5, 0.5, 2.4, 0.0),
        pytest.param(5, 0.2, 2.4, 0.3, marks=pytest.mark.extended),
        pytest.param(10, 0.5, 2.4, 0.3, marks=pytest.mark.extended),
    ],
)
async def test_a_slow_host_takes_little_more_of_the_slots_than_its_calls_last(
    slots: int, rate: float, seconds: float, jitter: float
) -> None:
    async def made(hosts: tuple[str, ...]) -> Counter[str]:
        chance = Random(1)
        bench = World(
            slots=slots,
            duration=lambda _: seconds * (1 + jitter * chance.uniform(-1, 1)),
            limits=HostRules(patterns={"s2.polite": HostPattern(rate=rate)}),
        )
        bench.queues._window = 10_000
        async with bench.running():
            await bench.submit("a", 6_000, hosts=hosts, lanes=(SLOW,) if SLOW in hosts else ())
            await bench.clock.advance(20.0)
            before = len(bench.starts)
            await bench.clock.advance(200.0)
        return Counter(url for _, url in bench.starts[before:])

    alone, both = await made((A,)), await made((A, A, A, SLOW))
    slow = both[f"https://{SLOW}/"]
    assert slow >= 0.95 * 200.0 * rate
    assert alone[URL_A] - both[URL_A] <= 1.6 * slow


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("lanes", [(A, B), ()])
async def test_a_host_that_refuses_slows_no_other_of_its_run(lanes: tuple[str, ...]) -> None:
    async def ends(hosts: tuple[str, ...]) -> float:
        chance = Random(0)
        bench = World(
            slots=10,
            duration=lambda _: 2.0 + chance.uniform(-1, 1),
            workers=2,
            limits=HostRules(limit=3),
        )
        bench.queues._window = 10_000
        of_b: list[float] = []
        async with bench.running():
            here = tuple(host for host in lanes if host in hosts)
            await bench.submit("a", 60 * len(hosts), hosts=hosts, lanes=here)
            await bench.clock.advance(1.0)
            await bench.pacing.close(host_key(A), 600.0)
            while len(of_b) < 60:
                await bench.clock.advance(0.25)
                of_b = starts_of(bench, f"https://{B}/")
        return max(of_b)

    assert await ends((A, B)) <= 1.05 * await ends((B,))


async def test_a_ledger_that_is_away_is_not_asked_at_once_for_a_message_that_has_come_free() -> (
    None
):
    bench = world(rate=4.0, seconds=3.0)
    async with bench.running():
        await bench.submit("a", 60, hosts=(A, B))
        await bench.clock.advance(2.2)
        before = bench.broken.calls

        def away(_request: LeaseRequest) -> bool:
            # Without a pause the asking would never end.
            return bench.broken.calls < before + 50

        bench.broken.away = away
        await bench.clock.advance(5.0)
        asked, bench.broken.away = bench.broken.calls - before, lambda _request: False
        assert asked < 40
        await bench.clock.advance(30.0)
    assert len(bench.tasks.done) == 60


async def test_a_limit_that_is_given_to_a_busy_host_does_not_stop_its_lane() -> None:
    rules = HostRules(rate=50.0)
    bench = World(slots=30, duration=lambda _: 1.0, limits=rules)
    assert bench.policies is not None
    turns = bench.members[0].turns
    assert turns is not None
    come = turns.come

    async def come_late(run_id: str, task_id: str, url: str, asked: float | None = None) -> None:
        await bench.clock.sleep(0.05)
        await come(run_id, task_id, url, asked)

    turns.come = come_late  # type: ignore[method-assign]
    bench.queues._window = 10_000
    async with bench.running():
        await bench.submit("a", 400, hosts=(A,), lanes=(A,))
        await bench.clock.advance(3.2)
        bench.policies._rules = lambda: HostRules(rate=50.0, limit=1)
        await bench.clock.advance(6.0)
        before = len(bench.starts)
        await bench.clock.advance(6.0)
        assert len(bench.starts) - before >= 4


async def test_a_run_whose_messages_wait_in_hand_for_a_closed_host_says_so() -> None:
    bench = world(limit=1)
    await bench.pacing.close(host_key(A), 15.0)
    async with bench.running():
        await bench.submit("a", 2, hosts=(A,))
        await bench.clock.advance(14.0)
        await bench.pacing.close(host_key(A), 6.0)  # for what another worker was told
        opens = bench.clock.now() + 6_000
        await bench.clock.advance(4.0)
        teller = reporter(bench)
        [lane] = [one for one in teller.report().lanes if one.run_id == "a"]
        assert (lane.reason, lane.buffered) == (RunWaitReason.HOST_CLOSED, 2)
        assert lane.until == pytest.approx(opens, abs=100)
        await bench.clock.advance(10.0)
    assert len(bench.tasks.done) == 2


def patterned(pattern: HostPattern, *, seconds: float = 1.0, slots: int = 20) -> World:
    """Limits for the hosts under `polite` alone."""
    return World(
        slots=slots,
        duration=lambda _delivery: seconds,
        limits=HostRules(patterns={"*.polite": pattern}),
    )


def timed_turns(bench: World) -> list[float]:
    """Note how long messages wait in their slots."""
    turns, waits = bench.members[0].turns, []
    assert turns is not None
    come = turns.come

    async def timed(run_id: str, task: str, url: str, asked: float | None = None) -> None:
        began = bench.clock.monotonic()
        try:
            await come(run_id, task, url, asked)
        finally:
            waits.append(bench.clock.monotonic() - began)

    turns.come = timed  # type: ignore[assignment,method-assign]
    return waits


async def test_messages_without_hosts_do_not_wait_for_each_other_for_ever() -> None:
    bench = patterned(HostPattern(limit=1, together=True))
    async with bench.running():
        await bench.submit("a", 12, limit=2)
        bench.hosts = tuple(f"h{number}.polite:443" for number in range(3))
        await bench.clock.advance(60.0)
        assert len(bench.tasks.done) == 12


async def test_messages_without_hosts_leave_their_slots_to_others() -> None:
    bench = patterned(HostPattern(rate=0.1))
    waits = timed_turns(bench)
    async with bench.running():
        await bench.submit("a", 30)
        bench.hosts = ("h.polite:443",)
        await bench.clock.advance(4.0)
        assert bench.dispatcher.calling == 0
        await bench.clock.advance(40.0)
    assert len(bench.starts) in {4, 5}
    assert max(waits) <= PATIENCE + 0.1


async def test_a_message_whose_start_passed_while_it_had_no_slot_waits_in_none() -> None:
    bench = patterned(HostPattern(rate=0.1), seconds=3.0, slots=1)
    waits = timed_turns(bench)
    async with bench.running():
        await bench.submit("busy", 40, hosts=(B,))
        await bench.clock.advance(1.0)
        await bench.submit("a", 3, hosts=("h.polite:443",))
        await bench.clock.advance(40.0)
    assert waits
    assert max(waits) <= PATIENCE + 0.1


async def test_no_host_has_so_many_waiting_that_others_are_not_asked_for() -> None:
    bench = world(limit=1, seconds=60.0)
    async with bench.running():
        await bench.submit("a", 40, hosts=(A,))
        await bench.clock.advance(30.0)
        lane = bench.dispatcher.lanes.get("a")
        assert lane is not None
        assert 0 < lane.waiting <= WAITING_OF_HOST


async def test_a_slow_answer_of_the_pacing_stops_no_host() -> None:
    """It is asked for the earlier, once it is known how long it takes."""
    for lanes in ((A,), ()):
        bench = world(rate=1.0, seconds=0.2)
        state = bench.pacing.state

        async def slow(
            hosts: Iterable[str],
            bench: World = bench,
            state: Callable[[Iterable[str]], Awaitable[dict[str, HostState]]] = state,
        ) -> dict[str, HostState]:
            await bench.clock.sleep(0.15)
            return await state(hosts)

        bench.pacing.state = slow  # type: ignore[method-assign]
        async with bench.running():
            await bench.submit("a", 20, hosts=(A,), lanes=lanes)
            await bench.clock.advance(10.0)
        starts = starts_of(bench)
        assert len(starts) >= 9
        late = [start - starts[0] - number for number, start in enumerate(starts)]
        assert max(late[2:]) == pytest.approx(LATE)


async def test_a_worker_wants_no_permit_of_a_host_for_messages_that_went() -> None:
    """Others would hand theirs over, one after the other, for nobody."""
    bench = world(limit=1, seconds=500.0)

    async def wanting(sequence: int) -> int:
        request = LeaseRequest(
            job_id=host_key(A),
            holder="other",
            count=1,
            before=min(1, sequence),
            sequence=sequence,
        )
        state = await bench.permits.acquire_or_renew(request, limit=1, lease=1e6)
        assert state.granted
        return state.wanting

    assert await wanting(0) == 0
    async with bench.running():
        await bench.submit("a", 3, hosts=(A,))
        await bench.clock.advance(2.0)
        assert await wanting(1) == 1
        await bench.dispatcher.close_lane("a")
        await bench.clock.advance(0.5)
        assert await wanting(2) == 0


async def test_runs_of_one_host_do_not_book_its_starts_side_by_side() -> None:
    """Each would book some that no call uses while another run, or worker, waits for them. Beside
    a lane only a message that comes again asks for a start of its own."""
    bench = world(rate=2.0, seconds=0.1)
    book, under_way, most = bench.pacing.book, 0, 0

    async def slow(
        host: str, interval: float, count: int = 1, *, also: Mapping[str, float] = NOTHING_ELSE
    ) -> Booking:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await bench.clock.sleep(0.3)
        under_way -= 1
        return await book(host, interval, count, also=also)

    bench.pacing.book = slow  # type: ignore[method-assign]
    async with bench.running():
        for name in ("a", "b", "c"):
            await bench.submit(name, 60, hosts=(A,), lanes=(A,))
        await bench.clock.advance(10.0)
    assert len(starts_of(bench)) >= 19
    assert most <= 2


Halting = Callable[[World], object]


@pytest.mark.parametrize("lanes", [(A,), ()], ids=["host lane", "run queue"])
@pytest.mark.parametrize(
    "halting",
    [
        lambda bench: bench.dispatcher.halt("a"),
        lambda bench: bench.pause.hear(bench.clock.now()),
        lambda bench: bench.dispatcher.stop(),
    ],
    ids=["run", "fleet", "worker"],
)
async def test_no_call_begins_once_a_worker_knows_that_none_may(
    lanes: tuple[str, ...], halting: Halting
) -> None:
    for moment in (1.92, 1.97, 2.3, 2.6):  # starts are due at 2.0 and 2.67
        bench = world(rate=1.5)
        async with bench.running():
            await bench.submit("a", 20, hosts=(A,), lanes=lanes)
            await bench.clock.advance(moment)
            halted_at = bench.clock.monotonic()
            halting(bench)
            await bench.clock.advance(3.0)
            assert starts_of(bench)
            assert max(starts_of(bench)) <= halted_at


@pytest.mark.parametrize("lanes", [(A,), ()], ids=["host lane", "run queue"])
async def test_a_message_that_waits_for_a_slot_is_not_begun_once_its_run_is_halted(
    lanes: tuple[str, ...],
) -> None:
    bench = world(rate=40.0, seconds=1.5)  # more than the slots can take
    async with bench.running():
        await bench.submit("a", 90, hosts=(A,), lanes=lanes)
        await bench.clock.advance(2.6)
        halted_at = bench.clock.monotonic()
        bench.dispatcher.halt("a")
        await bench.clock.advance(4.0)
        assert starts_of(bench)
        assert max(starts_of(bench)) <= halted_at


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_run_that_is_closed_keeps_no_place_before_others_in_the_line(workers: int) -> None:
    bench = world(rate=10.0, seconds=0.1, workers=workers)
    bench.queues._window = 10_000
    async with bench.running():
        await bench.submit("a", 900, hosts=(A,))
        await bench.clock.advance(5.0)
        for member in bench.members:
            await member.dispatcher.close_lane("a")
        await bench.clock.advance(1.0)
        before = len(bench.tasks.done)
        await bench.submit("b", 50, hosts=(A,))
        await bench.clock.advance(10.0)
        assert len(bench.tasks.done) - before == 50, "5 s are enough for them"


async def test_a_run_that_goes_on_elsewhere_keeps_its_places_in_the_line() -> None:
    bench = world(rate=1.0, seconds=0.1, workers=2)
    first, other = (member.dispatcher for member in bench.members)
    async with bench.running():
        await bench.submit("a", 40, hosts=(A,))
        await bench.clock.advance(5.0)
        await first.close_lane("a", goes_on=True)
        assert await bench.pacing.line_up(host_key(A), 1.0, "b") > 20
        await other.close_lane("a")
        assert await bench.pacing.line_up(host_key(A), 1.0, "b") < 20


async def test_a_run_gives_up_the_places_that_a_worker_which_died_had_in_the_line() -> None:
    bench = world(rate=1.0, seconds=0.1)
    async with bench.running():
        for _ in range(60):
            await bench.pacing.line_up(host_key(A), 1.0, "a")
        await bench.submit("a", 3, hosts=(B,))
        await bench.clock.advance(4.0)
        await bench.dispatcher.close_lane("a")
        assert await bench.pacing.line_up(host_key(A), 1.0, "b") <= 1.0


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
async def test_messages_that_are_hidden_behind_those_of_a_closed_run_close_up(workers: int) -> None:
    bench = world(rate=10.0, seconds=0.1, workers=workers)
    bench.queues._window = 10_000
    async with bench.running():
        await bench.submit("a", 900, hosts=(A,))
        await bench.clock.advance(5.0)
        await bench.submit("b", 50, hosts=(A,))
        await bench.clock.advance(5.0)
        for member in bench.members:
            await member.dispatcher.close_lane("a")
        await bench.clock.advance(15.0)
        done = set(bench.tasks.done)
        assert sum(task in done for _, task in bench.rows["b"]) == 50


@pytest.mark.parametrize("lanes", [(A,), ()], ids=["host lane", "run queue"])
async def test_the_starts_of_a_run_that_is_halted_are_for_the_next_run(
    lanes: tuple[str, ...],
) -> None:
    for moment in (1.2, 4.8, 6.4):  # after a start, before the next, and in between
        bench = world(rate=0.2)
        async with bench.running():
            await bench.submit("a", 20, hosts=(A,), lanes=lanes)
            await bench.clock.advance(20.0 + moment)
            await bench.dispatcher.close_lane("a")
            await bench.submit("b", 20, hosts=(A,))
            await bench.clock.advance(42.0)
            gaps = [later - one for one, later in pairwise(starts_of(bench))]
            assert min(gaps) >= 4.9
            # The first of a new line has its place one start later than there might be one.
            assert len([gap for gap in gaps if gap > 5.6]) <= 1
            assert max(gaps) <= 10.6
