"""An operator looks at a run of a real fleet, pauses all of it, and lets it go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from conveyor.domain.run_waits import FLEET_PAUSED
from conveyor.testing.fleet import RoleFleet
from tests.acceptance.support_bindings import hits
from tests.acceptance.support_fleet import fleet
from tests.acceptance.support_fleet_runs import (
    CAP,
    QUICK,
    assert_exact,
    pages,
    until_called,
    waiting_for,
)
from tests.acceptance.support_wire import Wire
from tests.patient import fetched

pytestmark = [pytest.mark.server, pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleFleet]:
    """A fleet of two workers."""
    with fleet(tmp_path_factory.mktemp("fleet"), apis=1, workers=2, **QUICK) as started:
        yield started


def looked_at(running: RoleFleet, run_id: str) -> dict[str, Any]:
    """The document of `conveyor admin run` for a program."""
    look: dict[str, Any] = json.loads(running.admin("run", run_id, "--json"))
    return look


def paused_workers(running: RoleFleet) -> int:
    """The number of workers that have heard that the fleet is paused."""
    pages_of = [fetched(f"{one.info.metrics}/metrics").text for one in running.workers]
    return sum("conveyor_fleet_paused 1.0" in page for page in pages_of)


def test_a_paused_fleet_starts_nothing_and_goes_on_where_it_was(running: RoleFleet) -> None:
    urls = pages("paused", 300, delay=1.5)
    with Wire(running.api) as wire:
        job = wire.submit(urls, max_inflight=CAP)
        run_id = job["latest_run"]["run_id"]
        until_called(running, urls, 10)

        def busy() -> dict[str, Any] | None:
            look = looked_at(running, run_id)
            return look if look["permits"] and look["workers"] else None

        look = waiting_for(busy, "permits in use")
        assert (look["job_id"], look["cap"], look["workers_alive"]) == (job["job_id"], CAP, 2)
        assert look["permits"] == sum(one["count"] for one in look["holders"]) <= CAP
        assert {one["holder"] for one in look["holders"]} <= {
            one["worker_id"] for one in look["workers"]
        }
        assert f"of {CAP} in use by" in running.admin("run", run_id)

        assert running.admin("pause", "--fleet").startswith("the fleet is paused: within 10 s")
        assert running.admin("pause", "--fleet").startswith("the fleet was paused already")
        waiting_for(lambda: paused_workers(running) == 2 or None, "both workers have heard of it")
        waiting_for(lambda: hits(running).in_flight == 0 or None, "calls under way end")
        calls = hits(running).total
        assert calls < len(urls)

        def told() -> dict[str, Any] | None:
            waiting: dict[str, Any] = wire.latest_run(job["job_id"]).get("waiting", {})
            return waiting if waiting.get("detail") == FLEET_PAUSED else None

        assert waiting_for(told, "the run says why it waits")["reason"] == "paused"
        for process in running.processes:
            assert fetched(f"{process.info.metrics}/readyz").status_code == 200
        assert hits(running).total == calls

        assert "it was paused since" in running.admin("resume", "--fleet")
        assert running.admin("resume", "--fleet") == "the fleet was not paused\n"
        assert_exact(wire, running, job["job_id"], urls, faults=0)


@pytest.mark.parametrize("run_id", ["01K9ZQ3V5N8M2X7C4B6D1F0G9H", "", "../x", "\udcff"])
def test_a_run_that_does_not_exist_is_told_in_one_line(running: RoleFleet, run_id: str) -> None:
    with pytest.raises(RuntimeError, match="^conveyor admin run: conveyor: no such run\n$"):
        running.admin("run", run_id)


def test_what_programs_read_is_json(running: RoleFleet) -> None:
    findings = [json.loads(line) for line in running.admin("check", "--json").splitlines()]
    assert {"label", "problem"} == set(findings[0])
    assert not [one for one in findings if one["problem"]]
    assert running.admin("dlq", "list", "--json") == ""
    assert running.admin("schedules", "list", "--json") == ""
