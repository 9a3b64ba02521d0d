"""Something that all tasks share goes away in the middle of a run: no task pays for it, and people
are told why the run waits."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from zenrows.batch.models import Run

from conveyor.aio.outages import Outage, Outages
from conveyor.domain.model import Problem, TaskFailure
from conveyor.gateway.problems import transport_failure, unconnected
from conveyor.ports.gateway import Absence, ScrapeFailed, Shared
from conveyor.testing.clock import FakeClock
from conveyor.wire.errors import TransportError, TransportTrouble
from tests.unit.outage_world import LeavingGateway, OutageWorld, outage_world

pytestmark = pytest.mark.anyio

SLOTS = 50
LEAVES_AFTER = 0.7


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def leave(world: OutageWorld, tasks: int, *, away: float) -> dict[str, Any]:
    """Submit a run, and let the gateway go away in the middle of it until it is over."""
    gateway, clock = world.gateway, world.clock
    run = await world.submit(tasks, max_inflight=SLOTS, max_attempts=1)
    gateway.leaves_at, gateway.away = clock.monotonic() + LEAVES_AFTER, away
    await world.until(lambda: gateway.answers == tasks, limit=away + tasks)
    return await world.ended(run)


def probes_a_second(gateway: LeavingGateway) -> int:
    """The most calls within one second, after those of the moment in which it left."""
    later = [at for at in gateway.tried_at if at > gateway.leaves_at + 2.0]
    return max((sum(1 for at in later if 0 <= at - one < 0.999) for one in later), default=0)


def check_free_of_charge(run: dict[str, Any], gateway: LeavingGateway, tasks: int) -> None:
    """Raises AssertionError unless all tasks succeeded, with at most one probe a second."""
    assert run["status"] == "completed"
    assert (run["stats"]["successful"], run["stats"]["failed"]) == (tasks, 0)
    assert 0 < gateway.broken <= SLOTS
    assert probes_a_second(gateway) == 1
    assert len(gateway.tried_at) <= SLOTS + gateway.away + 2


@pytest.mark.parametrize(
    ("shared", "away"),
    [
        (Shared.GATEWAY, 7.0),
        pytest.param(Shared.GATEWAY, 60.0, marks=pytest.mark.slow),
        pytest.param(Shared.RESOLVER, 60.0, marks=pytest.mark.extended),
        pytest.param(Shared.NETWORK, 60.0, marks=pytest.mark.extended),
        pytest.param(Shared.PROCESS, 60.0, marks=pytest.mark.extended),
    ],
)
@pytest.mark.timeout(60)
@pytest.mark.slow
async def test_no_task_pays_for_an_outage(tmp_path: Path, shared: Shared, away: float) -> None:
    tasks = 150
    async with outage_world(tmp_path, workers=SLOTS) as world:
        world.gateway.shared = shared
        run = await leave(world, tasks, away=away)
        check_free_of_charge(run, world.gateway, tasks)
        events = await world.events(run)
        # A call that broke had been sent, so the history has it; no attempt was used up.
        assert len(events) == world.gateway.answers + world.gateway.broken
        assert {one["attempt"] for one in events} == {1}


@pytest.mark.slow
async def test_a_trial_that_hangs_holds_up_no_other_trial(tmp_path: Path) -> None:
    """Meanwhile the worker has shrunk to one permit, and has to ask for one more."""
    tasks = 150
    async with outage_world(tmp_path, workers=SLOTS) as world:
        gateway, clock = world.gateway, world.clock
        await world.submit(tasks, max_inflight=SLOTS, max_attempts=1)
        gateway.leaves_at, gateway.away = clock.monotonic() + LEAVES_AFTER, 10.0
        gateway.hangs = 170.0
        await world.until(lambda: gateway.answers == tasks - 1, limit=60.0)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shared", [Shared.GATEWAY, Shared.RESOLVER, Shared.PROCESS])
@pytest.mark.parametrize("away", [7.0, 60.0, 3_600.0])
async def test_no_task_of_five_thousand_pays_for_an_outage(
    tmp_path: Path, shared: Shared, away: float
) -> None:
    async with outage_world(tmp_path, workers=SLOTS) as world:
        world.gateway.shared = shared
        run = await leave(world, 5_000, away=away)
        check_free_of_charge(run, world.gateway, 5_000)


@pytest.mark.slow
async def test_the_run_says_why_it_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with outage_world(tmp_path, workers=5) as world:
        caplog.set_level(logging.INFO, "conveyor.tasks")
        run = await world.submit(20)
        await world.until(lambda: world.gateway.answers >= 5, limit=10.0)
        assert "outage" not in await world.again(run)
        world.gateway.leaves_at, world.gateway.away = world.clock.monotonic(), 30.0
        await world.clock.advance(5.0)

        waiting = await world.again(run)
        assert Run.model_validate(waiting).run_id == run["run_id"]  # the published client's
        outage = waiting["outage"]
        assert outage["shared"] == "gateway"
        assert outage["detail"] == (
            "the gateway http://***@gateway.test:8080/v1/?*** cannot be reached:"
            " no connection could be made"
        )
        assert "never_answered" not in outage
        assert (await world.get(f"/v1/jobs/{run['job_id']}"))["latest_run"]["outage"] == outage
        ready = await world.client.get("/readyz")
        assert (ready.status_code, ready.json()) == (
            200,
            {"status": "ready", "role": "dev", "away": ["gateway"]},
        )
        metrics = (await world.client.get("/metrics")).text
        assert "conveyor_away 1.0" in metrics
        assert 'conveyor_outages_total{shared="gateway"} 1.0' in metrics

        await world.until(lambda: world.gateway.answers == 20, limit=60.0)
        assert "outage" not in await world.ended(run)
        assert (await world.get("/readyz")) == {"status": "ready", "role": "dev"}
    told = [one.getMessage() for one in caplog.records if "gateway" in one.getMessage()]
    assert [line.partition(" ")[2].partition(":")[0] for line in told] == [
        "gateway http",
        "is back",
    ]


async def test_one_that_never_answered_is_told_as_such(tmp_path: Path) -> None:
    async with outage_world(tmp_path, workers=5) as world:
        world.gateway.leaves_at, world.gateway.away = 0.0, 1_000.0
        run = await world.submit(20)
        await world.clock.advance(3.0)
        assert (await world.again(run))["outage"]["never_answered"] is True


@pytest.mark.slow
async def test_a_run_that_waits_can_be_stopped_and_run_again(tmp_path: Path) -> None:
    async with outage_world(tmp_path, workers=5) as world:
        world.gateway.leaves_at, world.gateway.away = 0.0, 20.0
        run = await world.submit(20)
        await world.clock.advance(3.0)
        stopped = await world.client.post(f"/v1/jobs/{run['job_id']}/stop")
        assert stopped.json()["status"] == "stopped"
        await world.clock.advance(2.0)
        again = await world.client.post(f"/v1/jobs/{run['job_id']}/rerun")
        assert again.status_code == 201, again.text
        await world.until(lambda: world.gateway.answers == 20, limit=60.0)


@pytest.mark.slow
async def test_a_task_waits_until_its_deadline(tmp_path: Path) -> None:
    async with outage_world(tmp_path, workers=5, rate_limit_deadline=60.0) as world:
        world.gateway.leaves_at, world.gateway.away = 0.0, 1_000.0
        run = await world.submit(200)
        await world.clock.advance(59.0)
        assert (await world.again(run))["stats"]["completed"] == 0
        ended = await world.ended(run)
        assert ended["status"] == "completed"
        assert ended["stats"]["failure_reasons"] == {"gateway_error": 200}
        assert len(world.gateway.tried_at) <= 5 + world.clock.monotonic()
        assert "outage" not in ended


async def test_a_gateway_that_has_not_answered_yet_is_named_after_ten_seconds() -> None:
    clock = FakeClock()
    outages = Outages(clock, gateway="https://scraper.test/v1/")
    assert outages.now() == []
    outages.admit()
    began = clock.now()
    await clock.advance(9.9)
    assert outages.now() == []
    await clock.advance(0.2)
    detail = "the gateway https://scraper.test/v1/ has not answered yet"
    assert outages.now() == [Outage(Shared.GATEWAY, detail, began, was_heard=False)]
    assert not outages.is_shut
    outages.heard()
    assert outages.now() == []


async def test_slow_targets_of_direct_fetches_are_no_gateway() -> None:
    clock = FakeClock()
    outages = Outages(clock, gateway="direct")
    outages.admit()
    await clock.advance(60.0)

    assert outages.now() == []


async def test_a_clock_that_is_set_makes_no_outage_longer_or_shorter() -> None:
    clock = FakeClock()
    outages = Outages(clock)

    def waited() -> float:
        problem = Problem("gateway_unreachable", "Gateway unreachable", 502)
        failed = ScrapeFailed(problem, TaskFailure.GATEWAY_ERROR, retryable=True)
        failed.absence = Absence(Shared.GATEWAY)
        outages.judge(failed)
        assert failed.is_spared
        return (clock.now() - failed.waits_since) / 1_000

    assert waited() == 0
    for seconds in (86_400, -2 * 86_400):
        clock.shift(seconds)
        await clock.advance(5.0)
    assert waited() == 10


GATEWAY = "the gateway http://gw.test/"


def not_connected(trouble: TransportTrouble) -> ScrapeFailed:
    return unconnected(TransportError(trouble, is_connecting=True), Absence(Shared.GATEWAY))


@pytest.mark.parametrize(
    ("trouble", "cause"),
    [
        (TransportTrouble.UNRESOLVED, "the host name has no address"),
        (TransportTrouble.UNREACHABLE, "no connection could be made"),
        (TransportTrouble.TLS, "TLS could not be set up, or the certificate is not valid"),
    ],
)
def test_an_outage_of_the_gateway_tells_name_connection_and_tls_apart(
    trouble: TransportTrouble, cause: str
) -> None:
    outages = Outages(FakeClock(), gateway="http://gw.test/")
    outages.judge(not_connected(trouble))
    (outage,) = outages.now()
    assert outage.detail == f"{GATEWAY} cannot be reached: {cause}"


async def test_a_gateway_that_takes_connections_and_breaks_them_is_not_called_unreachable() -> None:
    clock = FakeClock()
    outages = Outages(clock, gateway="http://gw.test/")
    outages.judge(not_connected(TransportTrouble.UNREACHABLE))
    (before,) = outages.now()
    await clock.advance(60.0)
    broken = transport_failure(TransportTrouble.INTERRUPTED)
    broken.sent = 1
    outages.judge(broken)
    (outage,) = outages.now()
    assert outage.detail == (
        f"{GATEWAY} gives no answer: the connection broke before the answer was whole"
    )
    assert (broken.is_spared, outage.since) == (True, before.since)
    outages.judge(not_connected(TransportTrouble.UNREACHABLE))
    assert outages.now() == [before]
