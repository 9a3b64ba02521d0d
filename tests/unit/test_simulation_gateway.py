"""The simulated gateway: the same work for every policy, its limits, and what it counts."""

from __future__ import annotations

import anyio
import pytest

from conveyor.ports.gateway import ScrapeFailed, ScrapeRequest
from conveyor.simulation import REALISTIC, GatewayLimit, JobPlan, Scenario, simulate
from conveyor.simulation.gateway import GatewayService, SimulatedGateway
from conveyor.simulation.latency import Latency
from conveyor.simulation.link import Gate
from tests.unit.simulated_parts import Place, in_place

JOB = "JOB"
SECOND = Latency(1.0)


class Bench:
    """A service with one job, and one process."""

    def __init__(self, place: Place, *, cap: int = 10, latency: Latency = SECOND) -> None:
        self.time = place.time
        self.gate = Gate()
        self.service = GatewayService(place.time, seed=5)
        self.service.open(JOB, cap, latency)
        self.gateway = SimulatedGateway(self.service, place.link(self.gate))
        self.took: dict[str, float] = {}
        self.failures: list[ScrapeFailed] = []

    async def call(self, url: str, *, timeout: float = 180.0) -> None:
        began = self.time.seconds()
        try:
            async with self.gateway.scrape(ScrapeRequest(url, JOB, timeout=timeout)):
                self.took[url] = self.time.seconds() - began
        except ScrapeFailed as failure:
            self.failures.append(failure)


def _times(order: list[str]) -> dict[str, float]:
    async def main(place: Place) -> dict[str, float]:
        bench = Bench(place, latency=Latency(2.0, 0.6))
        for url in order:
            await bench.call(url)
        return {url: round(seconds, 9) for url, seconds in bench.took.items()}

    return in_place(main)


def test_a_task_takes_the_same_time_whoever_comes_first() -> None:
    urls = [f"https://site.example/{number}" for number in range(20)]
    times = _times(urls)
    assert _times(urls[::-1]) == times
    assert len(set(times.values())) == 20


def test_another_attempt_takes_another_time() -> None:
    assert _times(["a", "a"]) != _times(["a"])


def test_calls_beyond_the_limit_are_refused_for_load() -> None:
    async def main(place: Place) -> None:
        bench = Bench(place)
        bench.service.limits.append(3)
        async with anyio.create_task_group() as group:
            for number in range(5):
                group.start_soon(bench.call, str(number))
        assert (len(bench.took), bench.service.throttled, bench.service.calls) == (3, 2, 5)
        assert [(f.retryable, f.burns_attempt, f.problem.status) for f in bench.failures] == [
            (True, False, 429)
        ] * 2
        await bench.call("later")
        assert "later" in bench.took

    in_place(main)


def test_a_call_longer_than_its_timeout_fails_then() -> None:
    async def main(place: Place) -> None:
        bench = Bench(place)
        bench.service.slowness = 8.0
        await bench.call("slow", timeout=3.0)
        assert place.time.seconds() == 3.0
        assert [(f.retryable, f.burns_attempt) for f in bench.failures] == [(True, True)]

    in_place(main)


def test_calls_in_flight_their_peak_and_the_time_over_the_cap_are_counted() -> None:
    async def main(place: Place) -> None:
        bench = Bench(place, cap=2)
        async with anyio.create_task_group() as group:
            for number in range(3):
                group.start_soon(bench.call, str(number))
                await place.time.sleep(0.25)
            assert bench.service.in_flight == 3
        assert (bench.service.in_flight, bench.service.peak, bench.service.loads[JOB].peak) == (
            0,
            3,
            3,
        )
        assert bench.service.seconds_over_cap() == pytest.approx(0.5)
        assert bench.service.call_seconds() == pytest.approx(3.0)
        assert bench.service.steady == pytest.approx((0.5, 0.75))

    in_place(main)


def test_a_cancelled_call_ends_at_the_gateway() -> None:
    async def main(place: Place) -> None:
        bench = Bench(place)
        async with anyio.create_task_group() as group:
            group.start_soon(bench.call, "a")
            await place.time.sleep(0.5)
            group.cancel_scope.cancel()
        assert (bench.service.in_flight, bench.service.call_seconds()) == (0, 0.5)

    in_place(main)


def test_a_call_of_a_paused_process_ends_at_the_gateway_and_returns_later() -> None:
    async def main(place: Place) -> None:
        bench = Bench(place)
        async with anyio.create_task_group() as group:
            group.start_soon(bench.call, "a")
            await place.time.sleep(0.5)
            bench.gate.pause()
            await place.time.sleep(10)
            assert (bench.service.in_flight, bench.took) == (0, {})
            bench.gate.resume()
        assert bench.took == {"a": 10.5}

    in_place(main)


def test_calls_without_permits_any_more_are_counted_apart_oldest_first() -> None:
    async def main(place: Place) -> None:
        bench = Bench(place, cap=1, latency=Latency(100.0))
        async with anyio.create_task_group() as group:
            for name in "abc":
                group.start_soon(bench.call, name)
            await place.time.sleep(1)
            bench.gateway.abandon_beyond(JOB, 2)
            assert (bench.service.in_flight, bench.service.abandoned) == (2, 1)
            bench.gateway.abandon_beyond(JOB, 2)
            bench.gateway.abandon_beyond(JOB, 0)
            assert (bench.service.in_flight, bench.service.abandoned) == (0, 3)
        assert (bench.service.in_flight, len(bench.took)) == (0, 3)
        assert bench.service.seconds_over_cap() == pytest.approx(1.0)

    in_place(main)


def test_the_lowest_of_limits_holds_until_each_is_over() -> None:
    job = JobPlan(tasks=60, cap=15)
    took = []
    for faults in [(), (GatewayLimit(2, 1.0, 60.0),)]:
        report = simulate(
            Scenario(
                world=REALISTIC,
                policy="reserve",
                jobs=(job,),
                workers=1,
                faults=(GatewayLimit(1, 0.0, 5.0), *faults),
            )
        )
        assert report.completed == 60
        took.append(report.elapsed_s)
    assert took[1] > took[0] + 15.0
