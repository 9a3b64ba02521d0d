"""A run that one worker of three serves, on a real fleet, and its end when that one is killed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from conveyor.testing.fleet import RoleFleet
from tests.acceptance.support_fleet import fleet, services
from tests.acceptance.support_fleet_runs import (
    QUICK,
    calls_of,
    lanes_of,
    pages,
    until_called,
    waiting_for,
)
from tests.acceptance.support_wire import Wire

pytestmark = [pytest.mark.server, pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

TASKS = 200


@pytest.fixture(
    params=["redis", pytest.param("dynamodb", marks=pytest.mark.full)], ids=["redis", "no redis"]
)
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RoleFleet]:
    there = services() if request.param == "redis" else replace(services(), redis="")
    directory = tmp_path_factory.mktemp("fleet")
    with fleet(directory, apis=1, workers=3, over=there, run_workers=1, **QUICK) as started:
        yield started


def alone(running: RoleFleet, wire: Wire) -> tuple[str, list[str], int]:
    """Submit a run until one worker alone serves it, as soon as the three know each other: its job,
    its pages and the worker's number."""
    tried = 0

    def look() -> tuple[str, list[str], int] | None:
        nonlocal tried
        tried += 1
        urls = pages(f"alone{tried}", TASKS, delay=0.5)
        job = wire.submit(urls, max_inflight=10)["job_id"]
        until_called(running, urls, 10)
        lanes = [lanes_of(worker) for worker in running.workers]
        if sum(lanes) == 1:
            return job, urls, lanes.index(1)
        wire.ask("POST", f"/jobs/{job}/stop")
        waiting_for(
            lambda: not any(lanes_of(worker) for worker in running.workers) or None,
            "the run is let go",
        )
        return None

    return waiting_for(look, "one worker alone serves a run")


def test_another_worker_takes_over_from_the_one_that_served_a_run(running: RoleFleet) -> None:
    with Wire(running.api) as wire:
        job, urls, number = alone(running, wire)
        running.workers[number].kill()

        others = [worker for place, worker in enumerate(running.workers) if place != number]
        waiting_for(
            lambda: any(lanes_of(worker) for worker in others) or None, "others take it over"
        )
        stats = waiting_for(
            lambda: (
                run["stats"] if (run := wire.latest_run(job))["status"] == "completed" else None
            ),
            "the run ends",
        )
        assert (stats["total"], stats["successful"], stats["failed"]) == (TASKS, TASKS, 0)
        calls = calls_of(running, urls)
        assert len(calls) == TASKS
        assert sum(calls.values()) <= TASKS + 10, "only what the dead one had in hand, again"
