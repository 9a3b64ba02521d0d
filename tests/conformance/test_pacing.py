"""The contract of every pacing adapter: no two starts of a host are closer than their interval."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from random import Random

import anyio
import pytest
import redis

from conveyor.dev.pacing import MemoryPacing, MemoryRobots
from conveyor.dev.permits import MemoryPermits
from conveyor.gateway.direct import DirectGateway
from conveyor.gateway.robots import RobotsGateway
from conveyor.ports.gateway import ScrapeFailed, ScrapeRequest, Success
from conveyor.ports.pacing import CEILING_LASTS, HORIZON, IDLE, NOTHING_ELSE, Booking, Pacing
from conveyor.ports.robots import MOST_KEPT, RobotsFiles
from conveyor.prod.dynamodb.pacing import CLOCKS_APART, DynamoPacing, DynamoRobots
from conveyor.prod.redis.pacing import RedisPacing, RedisRobots, pacing_key
from conveyor.prod.redis.server import RedisServer
from conveyor.testing.clock import FakeClock
from tests.conformance.emulators import address
from tests.conformance.permit_servers import dynamo_permits, permits_table
from tests.unit.test_robots import FILE, LETTERS, Site, running

STEP = 0.25
ASK_AGAIN = 0.05


@dataclass
class Bench:
    """An adapter as two workers see it, the clock it runs by, and two hosts of its own."""

    clock: FakeClock
    one: Pacing
    other: Pacing
    a: str = field(default_factory=lambda: f"host:a-{secrets.token_hex(6)}")
    b: str = field(default_factory=lambda: f"host:b-{secrets.token_hex(6)}")

    async def start(self, pacing: Pacing, host: str, interval: float) -> float:
        """Ask for a start until there is one; return the virtual second of it."""
        while not (booking := await pacing.book(host, interval)).starts:
            await self.clock.advance(ASK_AGAIN)
        return self.clock.monotonic() + booking.starts[0]

    async def until_open(self, pacing: Pacing) -> float:
        """Ask for a start of host a until there is one; return the seconds that took."""
        return -self.clock.monotonic() + await self.start(pacing, self.a, STEP)


async def redis_bench() -> AsyncIterator[Bench]:
    clock = FakeClock()
    url, environment = address("CONVEYOR_TEST_REDIS"), f"test-{secrets.token_hex(6)}"
    server = RedisServer(url, clock, timeout=60.0)

    def instant() -> int:
        return 10**15 + round(clock.monotonic() * 1_000_000)

    one, other = (
        RedisPacing(server, clock, environment=environment, instant=instant) for _ in range(2)
    )
    assert await one.line_up("begins", 1.0) >= 0
    await clock.advance(HORIZON)
    yield Bench(clock, one, other)
    with redis.Redis.from_url(url) as client:
        client.delete(pacing_key(environment))
    await server.aclose()


class OwnClock:
    """The clock of one machine, whose monotonic seconds begin anywhere."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self._begins = 1e6 * clock.random()
        self.sleeping = 0
        self.now, self.new_id = clock.now, clock.new_id
        self.random, self.token = clock.random, clock.token

    def monotonic(self) -> float:
        """Return seconds since this machine was started."""
        return self._clock.monotonic() + self._begins

    async def sleep(self, seconds: float) -> None:
        """Wait until time has been advanced."""
        self.sleeping += 1
        try:
            await self._clock.sleep(seconds)
        finally:
            self.sleeping -= 1


class MovingPacing(DynamoPacing):
    """A pacing whose bookings may wait: time goes on until they have ended."""

    def __init__(self, fake: FakeClock, prefix: str) -> None:
        own = OwnClock(fake)
        table = permits_table(fake)
        table.clock = own
        super().__init__(dynamo_permits(fake, prefix), table, own)
        self._fake, self._own = fake, own

    async def book(
        self,
        host: str,
        interval: float,
        count: int = 1,
        *,
        also: Mapping[str, float] = NOTHING_ELSE,
    ) -> Booking:
        """Book, and let time go on where that waits."""
        booked: list[Booking] = []

        async def book() -> None:
            booked.append(await super(MovingPacing, self).book(host, interval, count, also=also))

        async with anyio.create_task_group() as group:
            group.start_soon(book)
            while not booked:
                await anyio.sleep(0.001)
                if self._own.sleeping:
                    await self._fake.advance(0.02)
        return booked[0]


def leased(clock: FakeClock, prefix: str) -> MovingPacing:
    """A worker's view of a ledger in DynamoDB."""
    return MovingPacing(clock, prefix)


@pytest.fixture(params=["memory", "redis", "dynamodb"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    clock = FakeClock()
    if request.param == "redis":
        async for opened in redis_bench():
            yield opened
    elif request.param == "memory":
        pacing = MemoryPacing(clock)
        yield Bench(clock, pacing, pacing)
    else:
        prefix = secrets.token_hex(6)
        yield Bench(clock, leased(clock, prefix), leased(clock, prefix))


def gaps(starts: list[float]) -> list[float]:
    """The seconds between each start and the next one."""
    return [later - earlier for earlier, later in zip(starts, starts[1:], strict=False)]


async def test_starts_of_all_workers_are_an_interval_apart(bench: Bench) -> None:
    starts = [await bench.start(who, bench.a, STEP) for who in (bench.one, bench.other) * 3]
    assert min(gaps(sorted(starts))) >= STEP - 1e-6
    assert max(gaps(sorted(starts))) <= 2 * STEP + ASK_AGAIN


async def test_several_starts_are_booked_at_once(bench: Bench) -> None:
    booking = await bench.one.book(bench.a, STEP, 4)
    assert booking.starts == pytest.approx((0, STEP, 2 * STEP, 3 * STEP), abs=1e-5)
    assert await bench.start(bench.other, bench.a, STEP) >= 4 * STEP - 1e-6


async def test_two_workers_that_book_at_once_never_come_too_close_and_both_get_on(
    bench: Bench,
) -> None:
    """Each asks for three starts as soon as it has used those before, for three turns."""
    begin = bench.clock.monotonic()
    starts: tuple[list[float], list[float]] = ([], [])
    while bench.clock.monotonic() < begin + 12:
        for worker, mine in zip((bench.one, bench.other), starts, strict=True):
            if not mine or mine[-1] <= bench.clock.monotonic():
                booking = await worker.book(bench.a, STEP, 3)
                mine += [bench.clock.monotonic() + start for start in booking.starts]
        await bench.clock.advance(STEP)
    booked = sorted(starts[0] + starts[1])
    assert min(gaps(booked)) >= STEP - 1e-5
    assert min(map(len, starts)) > 8
    assert len(booked) >= 0.85 * 12 / STEP


async def test_a_start_keeps_the_intervals_of_all_its_names(bench: Bench) -> None:
    first = await bench.one.book(bench.a, STEP, 2, also={bench.b: 3 * STEP})
    assert gaps(list(first.starts)) in ([], pytest.approx([3 * STEP], abs=1e-5))
    later = await bench.start(bench.other, bench.b, 3 * STEP)
    assert later - bench.clock.monotonic() <= 6 * STEP
    assert later >= 3 * STEP * len(first.starts) - 1e-5


async def test_an_interval_that_has_grown_holds_from_the_next_start_on(bench: Bench) -> None:
    booked = [
        bench.clock.monotonic() + start for start in (await bench.one.book(bench.a, STEP, 4)).starts
    ]
    for _ in range(4):
        await bench.clock.advance(STEP)
        for worker in (bench.one, bench.other):
            booking = await worker.book(bench.a, 8 * STEP, 1)
            booked += [bench.clock.monotonic() + start for start in booking.starts]
    for worker in (bench.one, bench.other) * 2:
        booked.append(await bench.start(worker, bench.a, 8 * STEP))
    assert min(gaps(sorted(booked))[4:]) >= 8 * STEP - 1e-5


async def test_without_an_interval_all_may_start_at_once(bench: Bench) -> None:
    booking = await bench.one.book(bench.a, 0.0, 3, also={bench.b: 0.0})
    assert booking == Booking((0.0, 0.0, 0.0))


async def test_a_pause_is_not_made_up_for(bench: Bench) -> None:
    await bench.start(bench.one, bench.a, STEP)
    await bench.clock.advance(5.0)
    first = await bench.start(bench.one, bench.a, STEP)
    second = await bench.start(bench.other, bench.a, STEP)
    assert second - first >= STEP - 1e-6


async def test_hosts_do_not_wait_for_each_other(bench: Bench) -> None:
    assert (await bench.one.book(bench.a, 5.0)).starts == pytest.approx((0,), abs=1e-5)
    assert (await bench.one.book(bench.b, 5.0)).starts == pytest.approx((0,), abs=1e-5)


async def test_nothing_is_booked_beyond_the_horizon(bench: Bench) -> None:
    assert (await bench.one.book(bench.a, 2 * HORIZON)).starts
    assert await bench.one.book(bench.a, 2 * HORIZON) == Booking()
    await bench.clock.advance(2 * HORIZON)
    assert (await bench.one.book(bench.a, 2 * HORIZON, 5)).starts == pytest.approx((0,), abs=1e-5)


async def test_an_interval_that_has_shrunk_holds_from_the_last_start_on(bench: Bench) -> None:
    slow = 10 * HORIZON
    first = await bench.start(bench.one, bench.a, slow)
    await bench.clock.advance(STEP)
    if not isinstance(bench.other, DynamoPacing):  # there it knows nothing of the last start
        assert (await bench.other.book(bench.b, STEP, also={bench.a: STEP})).starts == ()
    booking = await bench.one.book(bench.a, 4 * STEP, 2)
    starts = [bench.clock.monotonic() + start for start in booking.starts]
    assert starts == pytest.approx([first + 4 * STEP, first + 8 * STEP], abs=1e-4)
    assert await bench.one.line_up(bench.a, 4 * STEP) <= 12 * STEP


async def test_the_line_of_a_host_goes_by_the_interval_of_now(bench: Bench) -> None:
    await bench.start(bench.one, bench.a, 10 * HORIZON)
    places = [await bench.one.line_up(bench.a, STEP) for _ in range(2)]
    assert places == pytest.approx([STEP, 2 * STEP], abs=1e-4)


async def test_the_first_place_of_a_line_is_the_next_start(bench: Bench) -> None:
    begin = bench.clock.monotonic()
    first = await bench.start(bench.one, bench.a, 8 * STEP)
    places = [await bench.one.line_up(bench.a, 8 * STEP) for _ in range(3)]
    ahead = first + 8 * STEP - begin
    assert places == pytest.approx([ahead, ahead + 8 * STEP, ahead + 16 * STEP], abs=1e-4)


async def test_places_in_a_line_are_an_interval_apart_and_book_nothing(bench: Bench) -> None:
    places = [await bench.one.line_up(bench.a, STEP) for _ in range(4)]
    assert places == pytest.approx([STEP, 2 * STEP, 3 * STEP, 4 * STEP], abs=1e-4)
    assert (await bench.one.book(bench.a, STEP)).starts == pytest.approx((0,), abs=1e-5)


async def test_a_host_tells_how_many_stand_in_its_line(bench: Bench) -> None:
    for run in ("one", "one", "other", "one"):
        await bench.one.line_up(bench.a, STEP, run)
    known = {} if isinstance(bench.one, DynamoPacing) else {bench.a: 4}

    async def in_line() -> dict[str, int]:
        states = await bench.other.state([bench.a, bench.b])
        return {name: state.in_line for name, state in states.items()}

    assert await in_line() == known, "a worker without a common ledger has a line of its own"
    await bench.clock.advance(2.2 * STEP)
    assert await in_line() == dict.fromkeys(known, 3)
    await bench.one.leave("one", [bench.a])
    assert await in_line() == dict.fromkeys(known, 1)
    await bench.clock.advance(9 * STEP)
    assert await in_line() == {}


async def test_a_run_leaves_all_lines_also_those_of_a_worker_that_has_died(bench: Bench) -> None:
    for pacing in (bench.one, bench.other):
        for host in (bench.a, bench.b):
            for _ in range(8):
                await pacing.line_up(host, STEP, "over")
    await bench.one.line_up(bench.b, STEP, "lives")
    known = bench.one, bench.other
    for pacing in known if isinstance(bench.one, DynamoPacing) else known[:1]:
        await pacing.leave("over")
    for pacing in known:
        assert await pacing.line_up(bench.a, STEP, "next") <= 4 * STEP + 1e-3
        assert await pacing.line_up(bench.b, STEP, "next") <= 4 * STEP + 1e-3


async def test_the_line_of_two_workers_moves_no_faster_than_that_of_one(bench: Bench) -> None:
    await bench.one.line_up(bench.a, STEP)
    places = [await bench.other.line_up(bench.a, STEP) for _ in range(8)]
    assert min(gaps(places)) >= STEP - 1e-4


async def test_a_closed_host_has_no_start_for_any_worker(bench: Bench) -> None:
    await bench.one.close(bench.a, 5.0)
    for worker in (bench.one, bench.other):
        booking = await worker.book(bench.a, STEP, 2)
        assert booking.starts == ()
        assert booking.closed_for == pytest.approx(5.0, abs=1e-3)
        booking = await worker.book(bench.b, STEP, also={bench.a: 0.0})
        assert booking.starts == ()
        assert booking.closed_for == pytest.approx(5.0, abs=1e-3)
    [(name, state)] = (await bench.other.state([bench.a, bench.b])).items()
    assert (name, state.ceiling) == (bench.a, 0)
    assert state.closed_for == pytest.approx(5.0, abs=1e-3)
    await bench.clock.advance(4.99)
    assert (await bench.other.book(bench.a, STEP)).closed_for > 0
    await bench.clock.advance(0.02)
    assert await bench.until_open(bench.other) <= STEP
    assert await bench.other.state([bench.a]) == {}


async def test_a_host_is_never_opened_sooner_than_was_said_before(bench: Bench) -> None:
    await bench.one.close(bench.a, 5.0)
    await bench.other.close(bench.a, 1.0)
    assert (await bench.one.state([bench.a]))[bench.a].closed_for == pytest.approx(5.0, abs=1e-3)
    await bench.clock.advance(4.9)
    assert (await bench.one.book(bench.a, STEP)).closed_for > 0
    await bench.other.close(bench.a, 9.0)
    assert (await bench.one.state([bench.a]))[bench.a].closed_for == pytest.approx(9.0, abs=1e-3)
    await bench.clock.advance(8.9)
    assert (await bench.one.book(bench.a, STEP)).closed_for > 0
    await bench.clock.advance(0.2)
    assert await bench.until_open(bench.one) <= STEP


async def test_the_line_of_a_closed_host_begins_behind_its_end(bench: Bench) -> None:
    await bench.one.close(bench.a, 100.0)
    places = [await bench.one.line_up(bench.a, STEP) for _ in range(2)]
    assert places == pytest.approx([100, 100 + STEP], abs=1e-2)


async def test_a_host_that_is_slow_gives_fewer_starts_than_are_asked_for(bench: Bench) -> None:
    await bench.one.slow(bench.a, 4 * STEP, 60.0)
    starts = [await bench.start(who, bench.a, STEP) for who in (bench.other, bench.one) * 2]
    starts.append(await bench.start(bench.one, bench.b, 0.0))
    assert min(gaps(starts[:4])) >= 4 * STEP - 1e-5
    both = await bench.other.book(bench.b, 0.0, 2, also={bench.a: 0.0})
    assert both.interval == pytest.approx(4 * STEP)
    assert len(both.starts) < 2 or gaps(list(both.starts))[0] >= 4 * STEP - 1e-5
    [(name, state)] = (await bench.other.state([bench.a, bench.b])).items()
    assert (name, state.closed_for, state.ceiling) == (bench.a, 0, 0)
    assert state.interval == pytest.approx(4 * STEP)
    await bench.one.slow(bench.b, 4 * STEP, 60.0)
    await bench.clock.advance(61.0)
    assert await bench.one.state([bench.a, bench.b]) == {}
    assert len((await bench.one.book(bench.b, 0.0, 2)).starts) == 2


async def test_a_ceiling_is_halved_and_grows_back_by_one_at_a_time(bench: Bench) -> None:
    assert await bench.one.lower(bench.a, 7, 0.5) == 3
    await bench.clock.advance(1.0)
    assert await bench.other.lower(bench.a, 7, 1.5) == 3, "it was in flight together with the first"
    assert [await bench.other.lower(bench.a, 7, 0.5) for _ in range(2)] == [1, 1]
    await bench.other.lift(bench.b, 7)
    seen = [(await bench.other.state([bench.a, bench.b]))[bench.a].ceiling]
    assert (await bench.other.book(bench.a, STEP)).ceiling == 1
    while state := await bench.other.state([bench.a, bench.b]):
        seen.append(state[bench.a].ceiling)
        await bench.one.lift(bench.a, 4)
    assert seen == [1, 1, 2, 3]


async def test_a_ceiling_that_does_not_change_is_forgotten(bench: Bench) -> None:
    await bench.one.lower(bench.a, 9, 0.0)
    await bench.clock.advance(CEILING_LASTS - 1)
    assert (await bench.one.state([bench.a]))[bench.a].ceiling == 4
    await bench.clock.advance(2)
    assert await bench.one.state([bench.a]) == {}


async def test_a_memory_that_may_have_lost_bookings_books_nothing_for_a_while() -> None:
    clock = FakeClock()
    pacing = MemoryPacing(clock, closed_for=HORIZON)
    assert (await pacing.book("a", STEP)).starts == (HORIZON,)


async def test_a_memory_after_a_restart_takes_each_host_to_have_been_called_just_then() -> None:
    clock = FakeClock()
    pacing = MemoryPacing(clock, were_called=True)
    assert (await pacing.book("a", 8.0, 2)).starts == (8.0,)
    assert (await pacing.book("b", 0.0)).starts == (0.0,)
    await clock.advance(5.0)
    assert (await pacing.book("c", 4.0)).starts == (0.0,)
    assert (await pacing.book("d", 2 * HORIZON)).starts == ()
    await clock.advance(6.0)
    assert (await pacing.book("d", 2 * HORIZON, also={"e": 1.0})).starts == (9.0,)


async def test_a_delay_that_a_host_wants_is_kept_from_a_restart_on() -> None:
    clock = FakeClock()
    pacing = MemoryPacing(clock, were_called=True)
    await pacing.slow("a", 8.0, 600.0)
    assert (await pacing.book("b", 0.0, 2, also={"a": 0.0})).starts == (8.0,)


async def test_a_redis_that_lost_its_starts_books_none_until_all_before_are_over() -> None:
    async for bench in redis_bench():
        assert isinstance(bench.one, RedisPacing)
        assert (await bench.one.book(bench.a, STEP)).starts == (0,)
        await bench.one.close(bench.b, 60.0)
        with redis.Redis.from_url(address("CONVEYOR_TEST_REDIS")) as client:
            client.delete(bench.one._key)
        assert (await bench.one.book(bench.a, STEP)).starts == pytest.approx((HORIZON,))
        assert (await bench.one.book(bench.b, STEP)).closed_for == pytest.approx(60.0)


async def test_redis_drops_the_hosts_that_are_idle() -> None:
    async for bench in redis_bench():
        assert isinstance(bench.one, RedisPacing)
        for number in range(150):
            await bench.one.book(f"{bench.a}-{number}", STEP)
        await bench.one.lower(bench.b, 8, 0.0)
        await bench.clock.advance(2 * IDLE)
        for _ in range(60):
            await bench.one.book(bench.a, STEP)
        with redis.Redis.from_url(address("CONVEYOR_TEST_REDIS")) as client:
            assert client.hlen(bench.one._key) < 50
        assert (await bench.one.state([bench.b]))[bench.b].ceiling == 4


@pytest.fixture(params=["memory", "redis", "dynamodb"])
async def files(request: pytest.FixtureRequest) -> AsyncIterator[tuple[RobotsFiles, FakeClock]]:
    clock = FakeClock()
    if request.param == "redis":
        server = RedisServer(address("CONVEYOR_TEST_REDIS"), clock, timeout=60.0)
        yield RedisRobots(server, environment=f"test-{secrets.token_hex(6)}"), clock
        await server.aclose()
    elif request.param == "memory":
        yield MemoryRobots(clock), clock
    else:
        yield DynamoRobots(permits_table(clock), clock), clock


async def test_the_file_of_an_origin_is_there_until_its_time_is_over(
    files: tuple[RobotsFiles, FakeClock],
) -> None:
    port, clock = files
    one, other = (f"https://{secrets.token_hex(6)}.test:443" for _ in range(2))
    assert await port.find(one) is None
    await port.keep(one, b"\x00\xff", 100.0)
    await port.keep(other, b"x" * MOST_KEPT, 1.0)
    found = await port.find(one)
    assert found is not None
    assert found.content == b"\x00\xff"
    assert found.left == pytest.approx(100.0, abs=20.0)
    large = await port.find(other)
    assert large is None or len(large.content) == MOST_KEPT
    await port.keep(one, b"new", 50.0)
    found = await port.find(one)
    assert found is not None
    assert found.content == b"new"
    assert found.left == pytest.approx(50.0, abs=20.0)
    if not isinstance(port, RedisRobots):  # which goes by its own time
        await clock.advance(50.0)
        assert await port.find(one) is None


async def test_workers_read_a_large_file_of_each_other_in_pieces(
    files: tuple[RobotsFiles, FakeClock],
) -> None:
    port, clock = files
    permits, random = MemoryPermits(clock), Random(1)

    async def get(path: str) -> Success | ScrapeFailed:
        """Make a call by a worker that has read nothing yet."""
        direct = DirectGateway(clock, allow_private=True)
        worker = RobotsGateway(direct, port, permits, clock, lease=30.0)
        try:
            async with worker.scrape(ScrapeRequest(site.url(path), "key", heeds_robots=True)) as it:
                return it
        except ScrapeFailed as failed:
            return failed
        finally:
            await worker.aclose()

    rules = "".join(f"Disallow: /{''.join(random.choices(LETTERS, k=170))}\n" for _ in range(2_800))
    async with running(Site(f"User-agent: *\n{rules}Disallow: /x\n")) as site:
        origin = site.url("")
        assert isinstance(await get("/x"), ScrapeFailed)
        kept = [await port.find(name) for name in (origin, f"{origin} 1", f"{origin} 2")]
        assert [one is not None and len(one.content) > 0 for one in kept] == [True, True, False]
        assert isinstance(await get("/x"), ScrapeFailed)
        assert isinstance(await get("/a"), Success)
        assert site.asked == [FILE, "/a"], "the others found all of it"
        assert kept[0] is not None
        await port.keep(f"{origin} 1", b"1234another", kept[0].left)
        assert isinstance(await get("/x"), ScrapeFailed)
        assert site.asked == [FILE, "/a", FILE], "a piece was another file's"


async def test_a_worker_that_comes_later_goes_by_its_wall_clock_too() -> None:
    clock, prefix = FakeClock(), secrets.token_hex(6)
    first = leased(clock, prefix)
    bench = Bench(clock, first, first)
    await first.close(bench.a, 3_600.0)
    await clock.advance(3_500.0)
    late = leased(clock, prefix)
    assert (await late.state([bench.a]))[bench.a].closed_for == pytest.approx(100 + CLOCKS_APART)
    assert (await first.state([bench.a]))[bench.a].closed_for <= 100.1


async def test_the_line_of_a_host_that_was_idle_begins_anew(bench: Bench) -> None:
    await bench.one.book(bench.a, STEP)
    for _ in range(200):
        await bench.one.line_up(bench.a, STEP)
    await bench.clock.advance(2 * IDLE)
    assert await bench.one.line_up(bench.a, STEP) == pytest.approx(STEP, abs=1e-4)


async def test_a_run_that_leaves_the_line_has_no_place_that_others_stand_behind(
    bench: Bench,
) -> None:
    await bench.one.book(bench.a, STEP)
    for _ in range(100):
        await bench.one.line_up(bench.a, STEP, "gone")
    await bench.one.leave("gone", [bench.b, bench.a])
    places = [await bench.one.line_up(bench.a, STEP, "here") for _ in range(120)]
    assert places[0] <= 4 * STEP
    assert min(gaps(places)) >= STEP - 1e-4
    assert places[-1] <= 124 * STEP
    await bench.one.leave("gone", [bench.a])
    assert await bench.one.line_up(bench.a, STEP) >= places[-1]


async def test_the_places_of_a_run_that_left_are_given_beside_those_of_others(bench: Bench) -> None:
    for _ in range(50):
        await bench.one.line_up(bench.a, STEP, "gone")
        others = await bench.one.line_up(bench.a, STEP, "here")
    await bench.clock.advance(5.0)
    await bench.one.book(bench.a, STEP)
    await bench.one.leave("gone", [bench.a])
    places = [await bench.one.line_up(bench.a, STEP, "new") for _ in range(60)]
    assert places[0] <= 5 * STEP
    assert min(gaps(places)) >= STEP - 1e-4
    among = [place for place in places if place < others - 5.0 - STEP]
    assert 35 <= len(among) <= 41
    assert places[-1] == pytest.approx(others - 5.0 + 21 * STEP, abs=4 * STEP)
