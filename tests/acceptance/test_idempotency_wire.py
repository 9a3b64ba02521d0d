"""One key, one deed: over a development server, and over the apis of a fleet side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from conveyor.testing.fleet import RoleFleet
from conveyor.testing.local_server import conveyor_server
from tests.acceptance.support_bindings import FLEET, items_kept
from tests.acceptance.support_data import rows_of
from tests.acceptance.support_wire import Wire, target, together

pytestmark = [pytest.mark.guarantee("G14"), pytest.mark.server]

AT_ONCE = 50


@dataclass(frozen=True)
class Doors:
    """Every api of what serves, one after another."""

    addresses: list[str]
    wires: list[Wire]
    fleet: RoleFleet | None
    data_dir: Path

    def door(self, number: int) -> Wire:
        """Whose turn it is."""
        return self.wires[number % len(self.wires)]

    def kept(self) -> Mapping[str, set[Any]]:
        """The jobs, runs and tasks that the database holds, by their keys: what others had deleted
        before may go meanwhile."""
        if self.fleet is not None:
            return items_kept(self.fleet)
        keys = {"jobs": "job_id", "runs": "run_id", "tasks": "task_key"}
        return {
            table: set(rows_of(self.data_dir, f"SELECT {key} FROM {table}"))
            for table, key in keys.items()
        }


@pytest.fixture(scope="module")
def doors(
    binding: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Doors]:
    data_dir = tmp_path_factory.mktemp("idempotency")
    with ExitStack() as stack:
        if binding == FLEET:
            fleet: RoleFleet | None = request.getfixturevalue("shared_fleet")
            assert fleet is not None
            addresses = [process.info.api for process in fleet.apis]
        else:
            fleet = None
            addresses = [stack.enter_context(conveyor_server(data_dir, workers=100)).base_url]
        wires = [stack.enter_context(Wire(address)) for address in addresses]
        yield Doors(addresses, wires, fleet, data_dir)


@pytest.mark.parametrize("path", ["submit", "add", "rerun"])
def test_fifty_requests_at_once_with_one_key_do_it_once(doors: Doors, path: str) -> None:
    wire = doors.door(0)
    body: Any = {"tasks": [{"url": target(f"{path}/{one}")} for one in range(3)]}
    url = "/jobs"
    if path == "add":
        url = f"/jobs/{wire.submit([], status='open')['job_id']}/tasks"
    elif path == "rerun":
        job_id = wire.submit([target("again")])["job_id"]
        wire.ended(job_id)
        body, url = None, f"/jobs/{job_id}/rerun"
    before = doors.kept()

    def send(number: int) -> httpx.Response:
        return doors.door(number).send("POST", url, body=body, key=f"one-{path}")

    responses = together(AT_ONCE, send)

    assert_one_answer(responses)
    for number in range(len(doors.wires)):
        again = send(number)
        assert_one_answer([*responses, again])
        assert again.headers["Idempotency-Replayed"] == "true"
    after = doors.kept()
    made = {table: len(after[table] - before[table]) for table in before}
    assert (
        made
        == {
            "submit": {"jobs": 1, "runs": 1, "tasks": 3},
            "add": {"jobs": 0, "runs": 0, "tasks": 3},
            "rerun": {"jobs": 0, "runs": 1, "tasks": 1},
        }[path]
    )
    if path != "rerun":
        other = wire.send("POST", url, body={"tasks": []}, key=f"one-{path}")
        assert (other.status_code, other.json()["code"]) == (409, "idempotency_key_conflict")


def assert_one_answer(responses: list[httpx.Response]) -> None:
    """Check that all answers were alike, and that the other requests were refused as still
    running."""
    answered = [response for response in responses if response.is_success]
    refused = [response for response in responses if not response.is_success]
    assert len({(response.status_code, response.content) for response in answered}) == 1
    assert {(one.status_code, one.json()["code"]) for one in refused} <= {
        (409, "idempotency_key_conflict")
    }


def test_a_replay_is_byte_equal_after_the_job_moved_on(doors: Doors) -> None:
    wire, other = doors.door(0), doors.door(1)
    body = {"tasks": [{"url": target("replay/0")}], "status": "open"}
    more = {"tasks": [{"url": target("replay/1")}], "last_batch": True}
    submitted = wire.send("POST", "/jobs", body=body, key="replay")
    job_id = submitted.json()["job_id"]
    path = f"/jobs/{job_id}"
    added = wire.send("POST", f"{path}/tasks", body=more, key="replay")
    wire.ended(job_id)
    rerun = wire.send("POST", f"{path}/rerun", key="replay")
    wire.ended(job_id)
    wire.ask("DELETE", path)

    again = [
        other.send("POST", "/jobs", body=body, key="replay"),
        other.send("POST", f"{path}/tasks", body=more, key="replay"),
        other.send("POST", f"{path}/rerun", key="replay"),
    ]

    for first, second in zip((submitted, added, rerun), again, strict=True):
        assert (second.status_code, second.content) == (first.status_code, first.content)
        assert "Idempotency-Replayed" not in first.headers
        assert second.headers["Idempotency-Replayed"] == "true"


def test_an_idempotency_key_is_its_callers_own(doors: Doors) -> None:
    body = {"tasks": [{"url": target("own")}]}
    made = []
    for key in ("key-of-one", "key-of-another"):
        with Wire(doors.addresses[0], caller=key) as wire:
            response = wire.send("POST", "/jobs", body=body, key="shared")
        assert "Idempotency-Replayed" not in response.headers
        made.append(response.json()["job_id"])
    assert len(set(made)) == 2
