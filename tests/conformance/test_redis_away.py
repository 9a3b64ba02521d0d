"""Redis that hangs, dies, and comes back empty or with old entries: never more than the limit."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from conveyor.clock import SystemClock
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
from conveyor.ports.permits import LeaseRequest, LedgerState
from conveyor.prod.redis.permits import HOLD, RedisPermits, ledger_key
from conveyor.prod.redis.server import RedisServer
from conveyor.testing.clock import FakeClock
from tests.conformance.redis_process import RedisProcess

pytestmark = pytest.mark.extended

LIMIT = 20
LEASE = 1.0
HOLDERS = 6
PASSWORD = "a-word-that-nobody-may-see"


@pytest.fixture
def redis_process(tmp_path: Path) -> Iterator[RedisProcess]:
    process = RedisProcess(tmp_path)
    yield process
    process.close()


class Holder:
    """A worker's view of its permits, by its own clock from before each call that was granted."""

    def __init__(self, name: str, permits: RedisPermits, clock: Clock) -> None:
        self.name = name
        self.held = 0
        self.grown = 0
        self.errors: list[ErrorCode] = []
        self._permits = permits
        self._clock = clock
        self._sequence = 0
        self._renewed_at = -math.inf

    @property
    def used(self) -> int:
        """Permits that it may use now."""
        if self._clock.monotonic() >= self._renewed_at + 0.9 * LEASE:
            self.held = 0
        return self.held

    async def ask(self, change: int) -> LedgerState | None:
        """One call for so many more or fewer; None where there was no answer."""
        before = self.used
        count = max(0, before + change)
        self.held = min(before, count)
        self._sequence += 1
        asked_at = self._clock.monotonic()
        request = LeaseRequest(
            job_id="JOB", holder=self.name, count=count, before=before, sequence=self._sequence
        )
        try:
            state = await self._permits.acquire_or_renew(request, limit=LIMIT, lease=LEASE)
        except ConveyorError as error:
            self.errors.append(error.code)
            return None
        if state.granted:
            self.used  # noqa: B018  (what lapsed on the way is gone)
            self._renewed_at = asked_at
            self.held += max(0, count - before)
            self.grown += count > before
        return state


class Crowd:
    """Holders that ask for more, for less and for the same all the time; counts what they use."""

    def __init__(self, server: RedisServer, clock: Clock) -> None:
        permits = RedisPermits(server, environment="away")
        self.holders = [Holder(f"holder-{n}", permits, clock) for n in range(HOLDERS)]
        self.most = 0
        self._clock = clock

    @property
    def used(self) -> int:
        return sum(holder.used for holder in self.holders)

    @property
    def grown(self) -> int:
        return sum(holder.grown for holder in self.holders)

    async def work(self, holder: Holder, seed: int) -> None:
        draw = random.Random(seed)
        while True:
            await holder.ask(draw.choice((-4, -1, 0, 0, 1, 3, 7)))
            self.most = max(self.most, self.used)
            await self._clock.sleep(draw.random() * 0.05)

    async def until_grown(self, by: int) -> None:
        """Let them go on until so many calls for more were granted."""
        enough = self.grown + by
        with anyio.fail_after(60):
            while self.grown < enough:
                await self._clock.sleep(0.02)

    async def until_used(self) -> None:
        """Let them go on until some have permits at this moment."""
        with anyio.fail_after(60):
            while not self.used:
                await self._clock.sleep(0.02)

    async def until_all_failed(self) -> None:
        """Let them go on until each had one more call without an answer."""
        for holder in self.holders:
            holder.errors.clear()
        with anyio.fail_after(60):
            while not all(holder.errors for holder in self.holders):
                await self._clock.sleep(0.02)
        errors = {error for holder in self.holders for error in holder.errors}
        assert errors == {ErrorCode.UNAVAILABLE}


@asynccontextmanager
async def working(process: RedisProcess) -> AsyncIterator[Crowd]:
    """A crowd at work."""
    clock = SystemClock()
    server = RedisServer(process.url, clock, timeout=0.3)
    crowd = Crowd(server, clock)
    async with anyio.create_task_group() as group:
        for seed, holder in enumerate(crowd.holders):
            group.start_soon(crowd.work, holder, seed)
        yield crowd
        group.cancel_scope.cancel()
    await server.aclose()


async def test_a_server_that_hangs_stops_no_work_and_breaks_no_limit(
    redis_process: RedisProcess,
) -> None:
    async with working(redis_process) as crowd:
        await crowd.until_grown(30)
        await crowd.until_used()
        redis_process.pause()
        await crowd.until_all_failed()
        redis_process.go_on()
        await crowd.until_grown(30)
    assert 0 < crowd.most <= LIMIT


async def test_a_server_that_comes_back_empty_again_and_again_breaks_no_limit(
    redis_process: RedisProcess,
) -> None:
    async with working(redis_process) as crowd:
        for _ in range(2):
            await crowd.until_grown(30)
            redis_process.kill()
            await crowd.until_all_failed()
            redis_process.start()
        await crowd.until_grown(30)
        redis_process.command("FLUSHALL")
        await crowd.until_grown(30)
    assert LIMIT // 2 < crowd.most <= LIMIT


class Virtual:
    """One ledger whose time is virtual, on a server that is real."""

    def __init__(self, process: RedisProcess) -> None:
        self.clock = FakeClock()
        self.server = RedisServer(process.url, self.clock, timeout=60.0)
        self.permits = RedisPermits(
            self.server, environment="away", instant=lambda: round(self.clock.monotonic() * 1_000)
        )
        self._sequence = 0

    async def acquire_or_renew(
        self, holder: str, count: int, before: int = 0, *, job: str = "JOB"
    ) -> LedgerState:
        self._sequence += 1
        request = LeaseRequest(
            job_id=job, holder=holder, count=count, before=before, sequence=self._sequence
        )
        return await self.permits.acquire_or_renew(request, limit=LIMIT, lease=LEASE)


@pytest.fixture
async def virtual(redis_process: RedisProcess) -> AsyncIterator[Virtual]:
    opened = Virtual(redis_process)
    assert not (await opened.acquire_or_renew("first", 1)).granted
    await opened.clock.advance(LEASE)
    yield opened
    await opened.server.aclose()


async def test_an_old_snapshot_is_not_believed(
    redis_process: RedisProcess, virtual: Virtual
) -> None:
    assert (await virtual.acquire_or_renew("a", 2)).granted
    redis_process.command("SAVE")
    assert (await virtual.acquire_or_renew("a", LIMIT, before=2)).granted
    redis_process.kill()
    redis_process.start()
    for _ in range(3):  # turns of the loop, which sees the end of its connections
        await anyio.lowlevel.checkpoint()
    assert redis_process.command("EXISTS", ledger_key("away")) == 1
    assert not (await virtual.acquire_or_renew("b", 1)).granted
    assert (await virtual.acquire_or_renew("a", LIMIT, before=LIMIT)).granted
    await virtual.clock.advance(LEASE - 0.001)
    assert not (await virtual.acquire_or_renew("b", 1)).granted
    assert (await virtual.acquire_or_renew("a", LIMIT, before=LIMIT)).granted
    await virtual.clock.advance(0.001)
    assert not (await virtual.acquire_or_renew("b", 1)).granted


async def test_a_new_job_waits_for_nothing_where_nothing_was_lost(virtual: Virtual) -> None:
    await virtual.acquire_or_renew("a", LIMIT)
    assert (await virtual.acquire_or_renew("a", LIMIT, job="NEW")).granted


async def test_evicting_the_ledger_closes_it_for_all_jobs(
    redis_process: RedisProcess, virtual: Virtual
) -> None:
    await virtual.acquire_or_renew("a", LIMIT)
    assert redis_process.command("TTL", ledger_key("away")) == -1
    redis_process.command("DEL", ledger_key("away"))
    assert not (await virtual.acquire_or_renew("b", 1)).granted
    assert not (await virtual.acquire_or_renew("b", 1, job="NEW")).granted


async def test_losing_the_ends_of_the_leases_alone_closes_it_too(
    redis_process: RedisProcess, virtual: Virtual
) -> None:
    await virtual.acquire_or_renew("a", LIMIT)
    ends = HOLD.keys(ledger_key("away"))[1]
    assert redis_process.command("TTL", ends) == -1
    redis_process.command("DEL", ends)
    assert not (await virtual.acquire_or_renew("b", 1)).granted
    assert not (await virtual.acquire_or_renew("b", 1, job="NEW")).granted
    assert (await virtual.acquire_or_renew("a", LIMIT, before=LIMIT)).granted


def commands(process: RedisProcess) -> dict[str, int]:
    """Commands that the server has carried out since the start, by name; by scripts, too."""
    found = process.command("INFO", "commandstats")
    assert isinstance(found, dict)
    return {name: int(counts["calls"]) for name, counts in found.items()}


async def cost(process: RedisProcess, virtual: Virtual, holder: str) -> dict[str, int]:
    """The commands of one renewal."""
    before = commands(process)
    assert (await virtual.acquire_or_renew(holder, 0, job="MANY")).granted
    after = commands(process)
    return {
        name: count - before.get(name, 0) for name, count in after.items() if "info" not in name
    }


async def test_a_call_costs_the_same_among_a_thousand_holders(
    redis_process: RedisProcess, virtual: Virtual
) -> None:
    await virtual.acquire_or_renew("h0", 0, job="MANY")
    alone = await cost(redis_process, virtual, "h0")
    for number in range(1, 1_000):
        await virtual.acquire_or_renew(f"h{number}", 0, job="MANY")
    assert await cost(redis_process, virtual, "h0") == alone
    values = redis_process.command("HVALS", ledger_key("away"))
    assert isinstance(values, list)
    assert len(values) >= 1_000
    assert max(map(len, values)) < 100  # nothing that a call reads grows with the holders


async def test_many_that_lapse_at_once_are_dropped_in_steps_and_count_until_then(
    redis_process: RedisProcess, virtual: Virtual
) -> None:
    for number in range(250):
        assert (await virtual.permits.acquire_or_renew(one(number), limit=250, lease=LEASE)).granted
    await virtual.clock.advance(LEASE)
    refused = await virtual.permits.acquire_or_renew(one(300, count=200), limit=250, lease=LEASE)
    assert (refused.granted, refused.free) == (False, 100)
    last = await virtual.permits.acquire_or_renew(one(249, count=150), limit=250, lease=LEASE)
    assert last.granted
    assert redis_process.command("ZCARD", HOLD.keys(ledger_key("away"))[1]) == 50
    assert (await virtual.permits.acquire_or_renew(one(301), limit=250, lease=LEASE)).free == 99


def one(number: int, *, count: int = 1) -> LeaseRequest:
    """A first call of one of many holders."""
    return LeaseRequest(
        job_id="MANY", holder=f"h{number:03}", count=count, before=0, sequence=1_000 + number
    )


async def test_a_clock_that_goes_back_closes_the_ledger(
    redis_process: RedisProcess, virtual: Virtual
) -> None:
    earlier = Virtual(redis_process)
    await virtual.clock.advance(10 * LEASE)
    await earlier.clock.advance(5 * LEASE)
    assert (await virtual.acquire_or_renew("a", 1)).granted
    state = await earlier.acquire_or_renew("b", 1)
    await earlier.server.aclose()
    assert not state.granted


async def test_nothing_is_left_of_jobs_that_ended(
    redis_process: RedisProcess, virtual: Virtual
) -> None:
    for number in range(50):
        await virtual.acquire_or_renew("a", 1, job=f"JOB-{number}")
    fields = redis_process.command("HLEN", ledger_key("away"))
    assert isinstance(fields, int)
    assert fields >= 50
    await virtual.clock.advance(LEASE)
    for number in range(300):
        await virtual.acquire_or_renew("a", 1, before=int(number > 0))
    left = redis_process.command("HLEN", ledger_key("away"))
    assert isinstance(left, int)
    assert left <= 10


async def test_the_script_is_sent_again_to_a_server_that_does_not_know_it(
    redis_process: RedisProcess, virtual: Virtual
) -> None:
    redis_process.command("SCRIPT", "FLUSH")
    assert (await virtual.acquire_or_renew("a", 1)).granted


async def test_a_password_is_in_no_error_and_no_picture(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(0)
    process = RedisProcess(tmp_path, password="right")
    url = f"redis://:{PASSWORD}@127.0.0.1:{process.port}/0"
    try:
        server = RedisServer(url, SystemClock())
        permits = RedisPermits(server, environment="away")
        with pytest.raises(ConveyorError) as caught:
            await permits.acquire_or_renew(
                LeaseRequest(job_id="JOB", holder="a", count=1, before=0, sequence=1),
                limit=1,
                lease=LEASE,
            )
        await server.aclose()
    finally:
        process.close()
    with pytest.raises(ConveyorError) as malformed:
        RedisServer(f"redis://:{PASSWORD}@host:port/0", SystemClock())
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert malformed.value.code is ErrorCode.INVALID_ARGUMENT
    shown = f"{caught.value!r}{malformed.value!r}{server!r}{permits!r}{caplog.text}"
    assert PASSWORD not in shown


@pytest.mark.parametrize("patience", [0.05, 10.0])
async def test_an_answer_that_comes_too_late_is_nobody_elses(
    redis_process: RedisProcess, patience: float
) -> None:
    server = RedisServer(redis_process.url, SystemClock(), timeout=60.0, connections=2)
    names = [f"name-{number}" for number in range(8)]
    for name in names:
        await server.put(name, name.encode(), seconds=600)
    redis_process.pause()
    server._timeout = 0.2
    for name in names:
        with anyio.move_on_after(patience):
            with pytest.raises(ConveyorError):
                await server.get(name)
    redis_process.go_on()
    server._timeout = 60.0
    for name in reversed(names):
        assert await server.get(name) == name.encode()
    await server.aclose()
