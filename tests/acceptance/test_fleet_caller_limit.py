"""The limit on the calls in flight of a caller, on a real fleet with either ledger."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from conveyor.domain.run_waits import RunWaitReason
from conveyor.testing.fleet import RoleFleet
from tests.acceptance.support_bindings import hits
from tests.acceptance.support_fleet import fleet, services
from tests.acceptance.support_fleet_runs import QUICK, pages, waiting_for
from tests.acceptance.support_wire import Wire

pytestmark = [pytest.mark.server, pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT, TASKS = 6, 60


@pytest.fixture(
    params=["redis", pytest.param("dynamodb", marks=pytest.mark.full)], ids=["redis", "no redis"]
)
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RoleFleet]:
    there = services() if request.param == "redis" else replace(services(), redis="")
    settings: dict[str, Any] = {**QUICK, "caller_max_inflight": LIMIT}
    directory = tmp_path_factory.mktemp("fleet")
    with fleet(directory, apis=1, workers=2, over=there, **settings) as started:
        yield started


def test_jobs_of_one_caller_share_its_limit_and_say_so(running: RoleFleet) -> None:
    with Wire(running.api) as wire:
        jobs = [
            wire.submit(pages(f"job{number}", TASKS, delay=0.5), max_inflight=20)["job_id"]
            for number in range(2)
        ]

        def waits() -> Any:
            waiting = wire.latest_run(jobs[0]).get("waiting", {})
            return waiting if waiting.get("reason") == RunWaitReason.MAX_INFLIGHT else None

        detail = waiting_for(waits, "a run waits for the cap")["detail"]
        assert detail == (
            f"the cap of the caller is in use, over all of its jobs: {LIMIT} of {LIMIT}"
        )
        for job in jobs:
            assert wire.ended(job)["stats"]["successful"] == TASKS
    assert hits(running).peak_in_flight == LIMIT
