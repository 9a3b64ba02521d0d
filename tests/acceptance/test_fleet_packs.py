"""A fleet that packs bodies: workers are killed in the middle of packed writes, and no body is lost
nor left behind."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from conveyor.gateway.fake import expected_body
from conveyor.testing.fleet import RoleFleet
from tests.acceptance.support_bindings import bodies, metrics
from tests.acceptance.support_fleet import fleet, services
from tests.acceptance.support_fleet_runs import (
    QUICK,
    ended,
    pages,
    until_called,
    waiting_for,
)
from tests.acceptance.support_held_store import PHASES, HeldStore, held_store
from tests.acceptance.support_wire import Wire, target
from tests.patient import fetched

pytestmark = [pytest.mark.server, pytest.mark.extended, pytest.mark.timeout(600)]

AT_ONCE = 12
"""Tasks that end at about the same time: one pack."""


class Packing(NamedTuple):
    """A fleet of one worker that packs, and its way to the store."""

    fleet: RoleFleet
    store: HeldStore

    def kill_in_the_middle(self) -> None:
        """Kill the worker once it has come as far as is armed, and start it again."""
        waiting_for(lambda: self.store.reached.is_set() or None, "a pack is being written")
        [worker] = self.fleet.workers
        worker.kill()
        self.fleet.restart(worker)


@pytest.fixture(scope="module")
def packing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Packing]:
    directory: Path = tmp_path_factory.mktemp("packing")
    over = services()
    with (
        held_store(over.s3) as (store, url),
        fleet(
            directory,
            apis=1,
            workers=1,
            over=dataclasses.replace(over, s3=url),
            pack_bodies="true",
            **QUICK,
        ) as running,
    ):
        yield Packing(running, store)


@pytest.fixture(scope="module")
def wire(packing: Packing) -> Iterator[Wire]:
    with Wire(packing.fleet.api) as wire:
        yield wire


def open_job(wire: Wire) -> Any:
    """A job that gets its tasks later."""
    return wire.submit([], status="open", max_inflight=AT_ONCE)["job_id"]


def add(wire: Wire, job_id: str, urls: list[str], *, last: bool = False) -> None:
    """Add tasks to a job."""
    body = {"tasks": [{"url": url} for url in urls], "last_batch": last}
    answer = wire.send("POST", f"/jobs/{job_id}/tasks", body=body)
    assert answer.is_success, answer.text


def deleted(wire: Wire, job_id: str) -> None:
    """Wait until a job that is being deleted is gone: after the second pass."""
    waiting_for(
        lambda: wire.send("GET", f"/jobs/{job_id}").status_code == 404 or None, "it is gone"
    )


@pytest.mark.guarantee("G10")
@pytest.mark.guarantee("G11")
@pytest.mark.parametrize(
    "kills",
    [
        8,
        # Fifty in all, in two parts that take a few minutes each.
        pytest.param(25, marks=(pytest.mark.full, pytest.mark.timeout(1_200)), id="full-1"),
        pytest.param(25, marks=(pytest.mark.full, pytest.mark.timeout(1_200)), id="full-2"),
    ],
)
def test_kills_in_the_middle_of_packed_writes_lose_no_body_and_leave_none(
    packing: Packing, wire: Wire, kills: int
) -> None:
    job_id, urls = open_job(wire), []
    for number in range(kills):
        packing.store.arm(PHASES[number % len(PHASES)])
        some = pages(f"packed-{kills}-{number}", AT_ONCE, delay=0.05)
        urls += some
        add(wire, job_id, some)
        packing.kill_in_the_middle()
    some = pages(f"packed-{kills}-last", AT_ONCE, delay=0.05)
    urls += some
    add(wire, job_id, some, last=True)

    run = ended(wire, job_id)
    stats = run["stats"]
    assert (stats["total"], stats["successful"], stats["failed"]) == (len(urls), len(urls), 0)
    rows = wire.rows(job_id)
    assert [row["url"] for row in rows] == urls
    for row in rows:
        assert fetched(row["result_url"]).content == expected_body(row["url"])
    objects = bodies(packing.fleet, run["run_id"])
    assert len(objects) < len(urls) / 2
    assert any("/segments/" in key for key in objects)

    assert wire.send("DELETE", f"/jobs/{job_id}").status_code == 202
    deleted(wire, job_id)
    assert bodies(packing.fleet, job_id) == []


@pytest.mark.guarantee("G10")
@pytest.mark.parametrize(
    "phase", [PHASES[0], *(pytest.param(one, marks=pytest.mark.full) for one in PHASES[1:])]
)
def test_a_pack_of_a_run_that_is_deleted_meanwhile_goes_with_it(
    packing: Packing, wire: Wire, phase: str
) -> None:
    job_id = open_job(wire)
    packing.store.arm(phase)
    add(wire, job_id, pages(f"deleted-{phase}", AT_ONCE, delay=0.05))
    waiting_for(lambda: packing.store.reached.is_set() or None, "a pack is being written")
    assert wire.send("DELETE", f"/jobs/{job_id}").status_code == 202
    packing.kill_in_the_middle()
    deleted(wire, job_id)
    assert bodies(packing.fleet, job_id) == []


def test_bodies_of_tasks_that_end_together_share_an_object(packing: Packing, wire: Wire) -> None:
    before = packing.store.writes
    job_id = wire.submit(pages("together", 5 * AT_ONCE, delay=0.05))["job_id"]
    run = ended(wire, job_id)
    assert run["stats"]["successful"] == 5 * AT_ONCE
    written = len(bodies(packing.fleet, run["run_id"]))
    assert packing.store.writes - before <= written < AT_ONCE
    [page] = metrics(packing.fleet, "worker")
    found = re.search(r"^conveyor_packed_bodies_total (\S+)$", page, re.MULTILINE)
    assert found is not None
    assert float(found[1]) >= 5 * AT_ONCE
    # The store cannot sign a link for part of an object.
    for row in wire.rows(job_id):
        answer = fetched(f"{row['result_url']}&redirect=1")
        assert (answer.status_code, answer.content) == (200, expected_body(row["url"]))


def test_rows_of_a_rerun_and_its_export_have_the_packed_bodies_of_its_source(
    packing: Packing, wire: Wire
) -> None:
    good = pages("inherited", AT_ONCE, delay=0.05)
    job_id = wire.submit([*good, target("inherited/bad", status=404)])["job_id"]
    source = ended(wire, job_id)
    wire.ask("POST", f"/jobs/{job_id}/rerun", status="failed")
    waiting_for(lambda: ended(wire, job_id)["run_id"] != source["run_id"] or None, "it runs again")
    run = ended(wire, job_id)
    run_id = run["run_id"]
    assert (run["stats"]["total"], run["stats"]["failed"]) == (AT_ONCE + 1, 1)
    rows = wire.rows(job_id, status="successful")
    assert [row["url"] for row in rows] == good
    assert bodies(packing.fleet, run_id) == []
    for row in rows:
        assert fetched(row["result_url"]).content == expected_body(row["url"])

    exports = f"/jobs/{job_id}/runs/{run_id}/exports"
    export_id = wire.ask("POST", exports, format="jsonl")["export_id"]
    link = waiting_for(
        lambda: wire.ask("GET", f"{exports}/{export_id}").get("download_url"), "it is exported"
    )
    lines = [json.loads(line) for line in fetched(link).text.splitlines()]
    wanted = [expected_body(url).decode() for url in good]
    assert [line["body"] for line in lines if line["status"] == "successful"] == wanted


def test_a_worker_that_stops_writes_what_waits(packing: Packing, wire: Wire) -> None:
    job_id = open_job(wire)
    urls = pages("stopped", AT_ONCE, delay=1.0)
    add(wire, job_id, urls, last=True)
    [worker] = packing.fleet.workers
    until_called(packing.fleet, urls, AT_ONCE)
    assert worker.end() == 0
    packing.fleet.restart(worker)
    run = ended(wire, job_id)
    assert run["stats"]["successful"] == AT_ONCE
    for row in wire.rows(job_id):
        kinds = [event["kind"] for event in wire.history(job_id, row["task_id"])]
        assert kinds == ["attempt"]
