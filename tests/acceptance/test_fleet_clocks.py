"""A fleet whose clocks are 30 s apart, as far as `conveyor admin check` lets them be: every second
process believes that it is later than the others do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from conveyor.gateway.fake import expected_body
from conveyor.testing.fleet import RoleFleet, RoleProcess
from tests.acceptance.support_fleet import fleet
from tests.acceptance.support_fleet_runs import (
    CAP,
    QUICK,
    assert_exact,
    calls_of,
    pages,
    permits_of,
    until_called,
    waiting_for,
)
from tests.acceptance.support_wire import Wire
from tests.patient import fetched

pytestmark = [pytest.mark.server, pytest.mark.extended, pytest.mark.timeout(600)]

APART = 30.0
TASKS = 100
VISIBILITY = 40
"""A claim has to outlast the difference: whoever is ahead takes it to lapse sooner."""


def ahead(_role: str, number: int) -> Sequence[str]:
    """Every second process."""
    return ("--ahead", str(APART * (number % 2)))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleFleet]:
    directory: Path = tmp_path_factory.mktemp("clocks")
    settings = {**QUICK, "visibility_timeout": VISIBILITY}
    with fleet(directory, trouble=ahead, **settings) as started:
        yield started


@pytest.fixture
def apis(running: RoleFleet) -> Iterator[list[Wire]]:
    """Return requests to each api: the first has the true time, the second is ahead."""
    with ExitStack() as stack:
        yield [stack.enter_context(Wire(process.info.api)) for process in running.apis]


def moved(link: str, api: RoleProcess) -> str:
    """The same link at another api."""
    origin = httpx.URL(api.info.api)
    return str(httpx.URL(link).copy_with(host=origin.host, port=origin.port))


def test_runs_of_either_api_are_exact(running: RoleFleet, apis: list[Wire]) -> None:
    for number, wire in enumerate(apis):
        urls = pages(f"clock-{number}", TASKS, delay=0.2)
        job_id = wire.submit(urls[:60], status="open", max_inflight=CAP)["job_id"]
        until_called(running, urls, CAP)
        # What one api begins, the other goes on with.
        body = {"tasks": [{"url": url} for url in urls[60:]], "last_batch": True}
        other = apis[1 - number]
        other.ask("POST", f"/jobs/{job_id}/tasks", body=body, key="rest")
        assert wire.send("POST", f"/jobs/{job_id}/tasks", body=body, key="rest").is_success
        assert assert_exact(other, running, job_id, urls, faults=0) == 0


def test_cursors_and_links_of_one_api_work_on_the_other(
    running: RoleFleet, apis: list[Wire]
) -> None:
    urls = pages("moved", 30, delay=0)
    job_id = apis[0].submit(urls)["job_id"]
    apis[1].ended(job_id)
    for first, second in (apis, apis[::-1]):
        cursor, turns, rows = None, [first, second], []
        while True:
            page = turns[0].ask("GET", f"/jobs/{job_id}/results", cursor=cursor, limit=7)
            rows += page["results"]
            cursor = page.get("next_cursor")
            turns.reverse()
            if cursor is None:
                break
        assert [row["url"] for row in rows] == urls
        for row in rows[:14]:
            for process in running.apis:
                answer = fetched(moved(row["result_url"], process))
                assert answer.content == expected_body(row["url"])


def test_jobs_are_listed_once_each_by_either(running: RoleFleet, apis: list[Wire]) -> None:
    made = [apis[number % 2].submit([], status="open")["job_id"] for number in range(6)]
    for wire in apis:
        listed = [job["job_id"] for job in wire.ask("GET", "/jobs", limit=100)["jobs"]]
        assert len(listed) == len(set(listed))
        assert set(made) <= set(listed)


@pytest.mark.full
def test_a_worker_that_is_killed_is_stood_in_for(running: RoleFleet, apis: list[Wire]) -> None:
    urls = pages("killed", 100)
    job_id = apis[1].submit(urls, max_inflight=CAP)["job_id"]
    until_called(running, urls, 2 * CAP)
    victim = max(running.workers, key=permits_of)
    victim.kill()
    running.restart(victim)
    assert assert_exact(apis[0], running, job_id, urls, faults=1) > 0


@pytest.mark.parametrize("first", [0, 1], ids=["behind", "ahead"])
def test_stop_and_pause_of_one_api_hold_for_workers_of_any_time(
    running: RoleFleet, apis: list[Wire], first: int
) -> None:
    wire, other = apis[first], apis[1 - first]
    urls = pages(f"held-{first}", 400)
    job_id = wire.submit(urls, max_inflight=CAP)["job_id"]
    until_called(running, urls, 1)
    other.ask("POST", f"/jobs/{job_id}/pause")
    wire.ask("POST", f"/jobs/{job_id}/resume")
    until_called(running, urls, sum(calls_of(running, urls).values()) + 1)
    assert other.ask("POST", f"/jobs/{job_id}/stop")["status"] == "stopped"
    called = sum(calls_of(running, urls).values())
    assert wire.latest_run(job_id)["status"] == "stopped"

    def is_idle() -> bool | None:
        return all(row["status"] != "processing" for row in wire.rows(job_id)) or None

    waiting_for(is_idle, "what was in flight ends")
    assert sum(calls_of(running, urls).values()) <= called + CAP
