"""What every permits adapter must do, sentence by sentence of the port."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.dev.permits import MemoryPermits
from conveyor.ports.permits import Permits
from conveyor.testing.clock import FakeClock

JOB, OTHER_JOB = "JOB", "OTHER"


@dataclass
class Bench:
    """An adapter under test and the clock that its leases run by.

    `wall_clock_free`: leases do not care when the machine's clock is set.
    """

    permits: Permits
    clock: FakeClock
    wall_clock_free: bool

    async def grow(self, holder: str, count: int, *, limit: int = 10, job_id: str = JOB) -> int:
        return await self.permits.grow(job_id, holder, count, limit=limit, lease=30)

    async def free(self, *, limit: int = 10, job_id: str = JOB) -> int:
        """How many permits are left; takes none for good."""
        granted = await self.grow("probe", limit, limit=limit, job_id=job_id)
        await self.permits.release("probe")
        return granted


def _memory() -> Bench:
    clock = FakeClock()
    return Bench(MemoryPermits(clock), clock, wall_clock_free=True)


BINDINGS: dict[str, Callable[[], Bench]] = {"memory": _memory}


@pytest.fixture(params=BINDINGS)
def bench(request: pytest.FixtureRequest) -> Bench:
    return BINDINGS[request.param]()


async def test_growing_grants_up_to_the_limit_and_then_nothing(bench: Bench) -> None:
    assert await bench.grow("a", 4) == 4
    assert await bench.grow("a", 4) == 4
    assert await bench.grow("a", 4) == 2
    assert await bench.grow("a", 4) == 0


async def test_the_limit_is_over_all_holders_together(bench: Bench) -> None:
    assert await bench.grow("a", 7) == 7
    assert await bench.grow("b", 7) == 3
    assert await bench.grow("c", 7) == 0


async def test_jobs_do_not_share_a_limit(bench: Bench) -> None:
    assert await bench.grow("a", 10) == 10
    assert await bench.grow("a", 10, job_id=OTHER_JOB) == 10


async def test_asking_for_nothing_grants_nothing(bench: Bench) -> None:
    assert await bench.grow("a", 0) == 0
    assert await bench.free() == 10


async def test_what_is_given_back_can_be_taken_again(bench: Bench) -> None:
    await bench.grow("a", 10)
    await bench.permits.give_back(JOB, "a", 3)
    assert await bench.grow("b", 10) == 3


async def test_giving_back_more_than_held_returns_all_and_no_more(bench: Bench) -> None:
    await bench.grow("a", 2)
    await bench.grow("b", 3)
    await bench.permits.give_back(JOB, "a", 100)
    await bench.permits.give_back(JOB, "nobody", 100)
    await bench.permits.give_back(OTHER_JOB, "b", 100)
    assert await bench.free() == 7


async def test_a_lower_limit_takes_nothing_away_and_grants_nothing(bench: Bench) -> None:
    assert await bench.grow("a", 8) == 8
    assert await bench.grow("b", 5, limit=5) == 0
    await bench.permits.give_back(JOB, "a", 4)
    assert await bench.grow("b", 5, limit=5) == 1


async def test_permits_fall_free_when_their_lease_lapses(bench: Bench) -> None:
    await bench.grow("a", 10)
    await bench.clock.advance(29)
    assert await bench.grow("b", 10) == 0
    await bench.clock.advance(1)
    assert await bench.grow("b", 10) == 10


async def test_growing_renews_the_lease_even_when_full(bench: Bench) -> None:
    await bench.grow("a", 10)
    await bench.clock.advance(20)
    assert await bench.grow("a", 1) == 0
    await bench.clock.advance(20)
    assert await bench.grow("b", 1) == 0


async def test_renewing_extends_leases_from_now_and_reports_none_lapsed(bench: Bench) -> None:
    await bench.grow("a", 10)
    await bench.grow("a", 5, job_id=OTHER_JOB)
    for _ in range(10):
        await bench.clock.advance(20)
        assert await bench.permits.renew("a", [JOB, OTHER_JOB], lease=30) == []
    assert (await bench.free(), await bench.free(job_id=OTHER_JOB)) == (0, 5)


async def test_renewing_reports_what_had_lapsed_and_does_not_revive_it(bench: Bench) -> None:
    await bench.grow("a", 10)
    await bench.clock.advance(20)
    await bench.grow("a", 5, job_id=OTHER_JOB)
    await bench.clock.advance(15)
    assert await bench.permits.renew("a", [JOB, OTHER_JOB], lease=30) == [JOB]
    assert await bench.grow("b", 10) == 10


async def test_a_holder_that_gave_all_back_has_not_lapsed(bench: Bench) -> None:
    await bench.grow("a", 10)
    await bench.permits.give_back(JOB, "a", 10)
    assert await bench.permits.renew("a", [JOB], lease=30) == []
    assert await bench.free() == 10


async def test_one_holders_lease_does_not_carry_another(bench: Bench) -> None:
    await bench.grow("a", 4)
    await bench.grow("b", 4)
    await bench.clock.advance(20)
    await bench.permits.renew("b", [JOB], lease=30)
    await bench.clock.advance(15)
    assert await bench.grow("c", 10) == 6


async def test_releasing_returns_all_that_a_holder_has_and_only_that(bench: Bench) -> None:
    await bench.grow("a", 4)
    await bench.grow("b", 3)
    await bench.grow("a", 6, job_id=OTHER_JOB)
    await bench.permits.release("a")
    assert (await bench.free(), await bench.free(job_id=OTHER_JOB)) == (7, 10)


async def test_setting_the_wall_clock_ends_no_lease(bench: Bench) -> None:
    if not bench.wall_clock_free:
        pytest.skip("leases run by the wall clock here")
    await bench.grow("a", 10)
    bench.clock.shift(3_600)
    assert await bench.grow("b", 1) == 0
    bench.clock.shift(-7_200)
    await bench.clock.advance(30)
    assert await bench.grow("b", 1) == 1


async def test_the_memory_ledger_forgets_jobs_that_nobody_asks_about() -> None:
    clock = FakeClock()
    permits = MemoryPermits(clock)
    for number in range(5_000):
        await permits.grow(f"job-{number}", "a", 1, limit=1, lease=30)
        await clock.advance(1)
    assert len(permits._jobs) <= 2 * 31 + 64


@dataclass
class Ledger:
    """What holders may believe to have: grants under a lease that has not lapsed."""

    shares: dict[str, tuple[int, float]] = field(default_factory=dict)

    def held(self, now: float) -> int:
        return sum(count for count, lapses_at in self.shares.values() if lapses_at > now)


STEPS = ("grow", "grow", "give back", "renew", "release", "pass time")


@pytest.mark.parametrize("binding", BINDINGS)
@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.sampled_from(STEPS), max_size=60), seed=st.integers(0, 2**32))
def test_grants_never_exceed_the_limit(binding: str, steps: list[str], seed: int) -> None:
    async def scenario() -> None:
        bench, ledger, draw = BINDINGS[binding](), Ledger(), random.Random(seed)
        for step in steps:
            holder = draw.choice("abc")
            await _step(step, holder, bench, ledger, draw)
            assert ledger.held(bench.clock.monotonic()) <= 10

    asyncio.run(scenario())


async def _step(step: str, holder: str, bench: Bench, ledger: Ledger, draw: random.Random) -> None:
    now = bench.clock.monotonic()
    count, lapses_at = ledger.shares.get(holder, (0, 0.0))
    count = count if lapses_at > now else 0
    if step == "grow":
        held, wanted = ledger.held(now), draw.randint(0, 12)
        granted = await bench.grow(holder, wanted)
        assert granted == min(wanted, 10 - held)
        ledger.shares[holder] = (count + granted, now + 30)
    elif step == "give back":
        returned = draw.randint(0, 12)
        await bench.permits.give_back(JOB, holder, returned)
        ledger.shares[holder] = (max(count - returned, 0), lapses_at)
    elif step == "renew":
        lapsed = await bench.permits.renew(holder, [JOB], lease=30)
        if not lapsed:
            ledger.shares[holder] = (count, now + 30)
        assert not (lapsed and count)
    elif step == "release":
        await bench.permits.release(holder)
        ledger.shares.pop(holder, None)
    else:
        await bench.clock.advance(draw.choice((1, 10, 29, 31)))
