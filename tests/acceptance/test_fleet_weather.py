"""A fleet for which nothing about AWS is sure: throttling, answers lost, calls given up, batches
done in part, messages late, doubled and lost outright, all by chance, on every process at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest

from conveyor.testing.aws_faults import AwsTrouble
from conveyor.testing.fleet import RoleFleet
from tests.acceptance.support_bindings import hits, metrics
from tests.acceptance.support_fleet import fleet
from tests.acceptance.support_fleet_runs import (
    CAP,
    QUICK,
    calls_of,
    ended,
    insisting,
    pages,
)
from tests.acceptance.support_wire import Wire

pytestmark = [pytest.mark.server, pytest.mark.extended, pytest.mark.timeout(600)]

RATE = 0.02
AMPLIFICATION = 1.05
JOBS = {"large": (100, 4), "small": (60, 2), "open": (40, 2)}
"""Of each job, how many tasks it has, and how many calls at a time."""
KINDS = {"lost", "refused", "split", "throttled", "vanished"}
OF_MESSAGES = {"dropped", "late"}
"""Troubles that the few calls that send can have besides."""
ONES = {"put_object", "update_item"}
"""Calls whose trouble may have one task scraped once more."""
SETTINGS = {**QUICK, "visibility_timeout": 15, "async_threshold": 100}
SEEDS = [1, *[pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 6)]]


@pytest.fixture(scope="module", params=SEEDS)
def seed(request: pytest.FixtureRequest) -> int:
    """Of all chance there is."""
    chosen: int = request.param
    return chosen


@pytest.fixture(scope="module")
def told(seed: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory where every process logs its faults."""
    return tmp_path_factory.mktemp(f"told-{seed}") / "troubles"


@pytest.fixture(scope="module")
def running(seed: int, told: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleFleet]:
    def trouble(role: str, number: int) -> Sequence[str]:
        name = f"{seed}/{role}/{number}"
        return ("--seed", name, "--rate", str(RATE), "--log", str(told))

    with fleet(tmp_path_factory.mktemp("weather"), trouble=trouble, **SETTINGS) as started:
        yield started


def troubles(told: Path) -> list[AwsTrouble]:
    """All that happened so far."""
    lines = told.read_bytes().splitlines() if told.exists() else []
    return [msgspec.json.decode(line, type=AwsTrouble) for line in lines]


def deliveries(running: RoleFleet) -> float:
    """Messages that the workers have received."""
    found = re.compile(r"^conveyor_deliveries_total (\S+)$", re.MULTILINE)
    return sum(float(value) for page in metrics(running, "worker") for value in found.findall(page))


def test_every_task_ends_once_in_any_weather(running: RoleFleet, told: Path, seed: int) -> None:
    """One job whose tasks are ingested, one that is written at once, one that grows."""
    urls = {name: pages(f"{name}-{seed}", count) for name, (count, _) in JOBS.items()}
    with Wire(running.api) as wire:
        jobs = {name: submitted(wire, name, urls[name]) for name in ("large", "small")}
        jobs["open"] = submitted(wire, "open", urls["open"][:20], status="open")
        rest = {"tasks": [{"url": url} for url in urls["open"][20:]], "last_batch": True}
        path = f"/jobs/{jobs['open']}/tasks"
        insisting(lambda: wire.send("POST", path, body=rest, key="rest"))

        for name, job_id in jobs.items():
            total = len(urls[name])
            run = ended(wire, job_id)
            assert run["status"] == "completed"
            assert (run["stats"]["total"], run["stats"]["successful"]) == (total, total)
            assert rows(wire, job_id) == [(url, "successful") for url in urls[name]]
    assert all(process.alive for process in running.processes)
    assert hits(running).peak_in_flight <= CAP

    happened = troubles(told)
    tasks = [url for each in urls.values() for url in each]
    calls = sum(calls_of(running, tasks).values())
    kinds = {trouble.kind for trouble in happened}
    assert kinds > KINDS
    assert kinds - KINDS <= OF_MESSAGES
    redone = sum(trouble.operation in ONES for trouble in happened)
    assert calls <= AMPLIFICATION * len(tasks) + redone
    repeated = sum(trouble.concerns for trouble in happened if trouble.service == "sqs")
    assert deliveries(running) <= AMPLIFICATION * len(tasks) + redone + repeated


def submitted(wire: Wire, name: str, urls: Sequence[str], **fields: object) -> str:
    """Submit a job until it is answered; its id."""
    tasks = [{"url": url} for url in urls]
    body = {"tasks": tasks, "max_inflight": JOBS[name][1], **fields}
    made = insisting(lambda: wire.send("POST", "/jobs", body=body, key=name))
    return str(made["job_id"])


def rows(wire: Wire, job_id: str) -> list[tuple[str, str]]:
    """URL and status of every row of a job, read page by page for as often as that takes."""
    found: list[tuple[str, str]] = []
    cursor = None
    while True:
        ask = partial(wire.send, "GET", f"/jobs/{job_id}/results", cursor=cursor, limit=50)
        page = insisting(ask)
        found += [(row["url"], row["status"]) for row in page["results"]]
        cursor = page.get("next_cursor")
        if cursor is None:
            return found
