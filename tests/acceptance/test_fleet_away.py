"""A fleet whose DynamoDB is away under a running job. Nobody dies, nobody waits for ever: the apis
say that they cannot serve, work goes on where it was left, and it all counts once.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from conveyor.testing.fleet import RoleFleet
from conveyor.testing.load_balancer import Switch, switch
from tests.acceptance.support_bindings import metrics
from tests.acceptance.support_fleet import fleet, services
from tests.acceptance.support_fleet_runs import (
    CAP,
    QUICK,
    assert_exact,
    insisting,
    pages,
    until_called,
)
from tests.acceptance.support_wire import Wire, eventually, target, together
from tests.patient import fetched

pytestmark = [pytest.mark.server, pytest.mark.extended, pytest.mark.timeout(600)]

TASKS = 200
MOST_RECEIVES = 1.05


@pytest.fixture(scope="module")
def dynamodb() -> Iterator[Switch]:
    """DynamoDB, behind a switch."""
    with switch(services().dynamodb) as switched:
        yield switched


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("redis", 4.0, 5), id="redis"),
        pytest.param(("redis", 15.0, 8), marks=pytest.mark.full, id="redis-full"),
        pytest.param(("dynamodb", 15.0, 8), marks=pytest.mark.full, id="dynamodb-full"),
    ],
)
def weather(request: pytest.FixtureRequest) -> tuple[str, float, int]:
    """Return the ledger, the seconds that DynamoDB is away, and the attempts of a call: as many as
    take less time than that."""
    chosen: tuple[str, float, int] = request.param
    return chosen


@pytest.fixture(scope="module")
def running(
    weather: tuple[str, float, int], dynamodb: Switch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RoleFleet]:
    ledger, _, attempts = weather
    there = replace(services(), dynamodb=dynamodb.url)
    settings: dict[str, Any] = {**QUICK, "aws_attempts": attempts, "ledger": ledger}
    # Claims last as long as by default, and so do leases that are kept in what is away.
    settings |= {"visibility_timeout": 60} | ({"permit_lease": 30} if ledger == "dynamodb" else {})
    with fleet(tmp_path_factory.mktemp("fleet"), over=there, **settings) as started:
        yield started


def readiness(running: RoleFleet) -> list[tuple[int, Any]]:
    """Return the answer of each process at its port for probes."""
    answers = [fetched(f"{process.info.metrics}/readyz") for process in running.processes]
    return [(answer.status_code, answer.json()) for answer in answers]


def deliveries(running: RoleFleet) -> float:
    """Messages that the workers have received so far."""
    found = re.compile(r"^conveyor_deliveries_total (\S+)$", re.MULTILINE)
    return sum(float(value) for page in metrics(running, "worker") for value in found.findall(page))


def test_dynamodb_is_away_under_a_running_job(
    running: RoleFleet, dynamodb: Switch, weather: tuple[str, float, int]
) -> None:
    ledger, away, _ = weather
    urls = pages(f"away-{ledger}-{away:g}", TASKS, delay=0.2)
    with Wire(running.api) as wire:
        received = deliveries(running)
        job_id = wire.submit(urls, max_inflight=CAP)["job_id"]
        until_called(running, urls, 3 * CAP)
        late = {"tasks": [{"url": target("late")}]}

        dynamodb.off()
        gone_at = time.monotonic()
        try:
            refused = answers_meanwhile(running, job_id, late, until=gone_at + away)
            told = [(200, {"status": "ready", "away": ["dynamodb"]})] * len(running.processes)
            # Who has little to do notices last.
            eventually(lambda: readiness(running) == told or None, "every process says so")
            time.sleep(max(0.0, away - (time.monotonic() - gone_at)))
        finally:
            dynamodb.on()

        assert len(refused) >= len(running.apis)
        for answer in refused:
            assert answer.status_code == 503, answer.text
            assert answer.headers["Content-Type"] == "application/problem+json"
            assert answer.json()["code"] == "unavailable"
            assert int(answer.headers["Retry-After"]) > 0
        assert all(process.alive for process in running.processes)
        # What was refused may be asked for again under its key, and is done once.
        second = insisting(lambda: wire.send("POST", "/jobs", body=late, key="late"))
        assert wire.send("POST", "/jobs", body=late, key="late").json() == second
        assert len(wire.ask("GET", "/jobs")["jobs"]) == 2
        wire.ended(second["job_id"])
        further = assert_exact(wire, running, job_id, urls, faults=1)
        if ledger == "redis":
            assert further == 0
            assert deliveries(running) - received <= MOST_RECEIVES * (TASKS + 1)
        for process in running.apis:
            with Wire(process.info.api) as direct:
                direct.ask("GET", "/jobs")
        back = [(200, {"status": "ready"})] * len(running.processes)
        eventually(lambda: readiness(running) == back or None, "every process says that it is back")
    for process in running.apis:
        assert b"Traceback" not in process.log.read_bytes()


def answers_meanwhile(
    running: RoleFleet, job_id: str, body: Any, *, until: float
) -> list[httpx.Response]:
    """Return the answers of every api to repeated reads and writes that began early enough to be
    given up before DynamoDB is back."""
    requests: list[tuple[str, Callable[[Wire], httpx.Response]]] = [
        (process.info.api, request)
        for process in running.apis
        for request in (
            lambda wire: wire.send("GET", f"/jobs/{job_id}"),
            lambda wire: wire.send("GET", f"/jobs/{job_id}/results"),
            lambda wire: wire.send("POST", "/jobs", body=body, key="late"),
        )
    ]

    def ask(number: int) -> list[httpx.Response]:
        address, request = requests[number]
        answers = []
        with Wire(address) as wire:
            while time.monotonic() < until:
                answers.append(request(wire))
        return answers

    return [answer for answers in together(len(requests), ask) for answer in answers]
