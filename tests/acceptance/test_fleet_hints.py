"""A new run reaches a worker of a fleet by a hint over Redis, without a look of discovery."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conveyor.testing.fleet import RoleFleet
from tests.acceptance.support_fleet import fleet
from tests.acceptance.support_wire import Wire, target

pytestmark = [pytest.mark.server, pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(300)]

NEVER = 3_600
"""Seconds between two looks: longer than the test may last."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleFleet]:
    """A fleet whose workers look around when they start, and not again."""
    with fleet(
        tmp_path_factory.mktemp("fleet"),
        apis=1,
        workers=2,
        discovery_interval=NEVER,
        resync_interval=NEVER,
        sweep_interval=NEVER,
    ) as started:
        yield started


def test_the_first_call_of_a_job_comes_by_a_hint(running: RoleFleet) -> None:
    with Wire(running.api) as wire:
        for number in range(3):
            job_id = wire.submit([target(f"hint/{number}/{place}") for place in range(5)])["job_id"]
            assert wire.ended(job_id)["status"] == "completed"


def test_tasks_added_to_a_run_that_waited_are_called_for_by_a_hint(running: RoleFleet) -> None:
    with Wire(running.api) as wire:
        job_id = wire.submit([], status="open")["job_id"]
        wire.ask("POST", f"/jobs/{job_id}/tasks", body={"tasks": [{"url": target("hint/later")}]})
        wire.ask("POST", f"/jobs/{job_id}/close")
        assert wire.ended(job_id)["status"] == "completed"
