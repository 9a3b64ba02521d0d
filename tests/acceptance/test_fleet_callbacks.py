"""A state machine that waits for a run of a fleet goes on when the run has ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from conveyor.testing.fleet import RoleFleet
from tests.acceptance.support_bindings import metrics
from tests.acceptance.support_fleet import fleet
from tests.acceptance.support_wire import Wire, eventually, target
from tests.conformance.state_machines import state_machine
from tests.disk import files_below

pytestmark = [pytest.mark.server, pytest.mark.extended, pytest.mark.timeout(600)]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleFleet]:
    with fleet(
        tmp_path_factory.mktemp("fleet"),
        apis=1,
        workers=2,
        discovery_interval=1,
        outbox_interval=0.5,
        callback_heartbeat=1,
        log_level="info",
    ) as running:
        yield running


async def test_a_run_that_ends_lets_its_state_machine_go_on(running: RoleFleet) -> None:
    async with state_machine() as machine:
        execution, token = await machine.wait()
        job = await submit(running, token, status="open")
        await until_told(running, "heartbeat")
        await anyio.to_thread.run_sync(ask, running, "POST", f"/jobs/{job['job_id']}/close")
        found = await machine.end(execution)
    assert found["status"] == "SUCCEEDED"
    event = json.loads(found["output"])
    assert (event["event_type"], event["job_id"]) == ("run.completed", job["job_id"])
    assert (event["stats"]["total"], event["stats"]["successful"]) == (3, 3)
    await until_told(running, "success")
    assert told(running, "success") == 1
    assert_no_log_holds(running, token)


async def test_a_run_that_is_stopped_fails_its_state_machine(running: RoleFleet) -> None:
    async with state_machine() as machine:
        execution, token = await machine.wait()
        job = await submit(running, token, delay=60)
        await anyio.to_thread.run_sync(ask, running, "POST", f"/jobs/{job['job_id']}/stop")
        assert (await machine.end(execution))["status"] == "FAILED"
    assert_no_log_holds(running, token)


async def submit(running: RoleFleet, token: str, *, delay: float = 0, **fields: Any) -> Any:
    urls = [target(f"waited/{number}", delay=delay) for number in range(3)]

    def post() -> Any:
        with Wire(running.api) as wire:
            return wire.submit(urls, callback={"task_token": token}, **fields)

    return await anyio.to_thread.run_sync(post)


def ask(running: RoleFleet, method: str, path: str) -> None:
    with Wire(running.api) as wire:
        wire.ask(method, path)


async def until_told(running: RoleFleet, outcome: str) -> None:
    """A worker counts a callback once it is answered: the state machine may know sooner."""

    def wait() -> None:
        eventually(lambda: told(running, outcome) or None, f"a {outcome} is counted")

    await anyio.to_thread.run_sync(wait)


def told(running: RoleFleet, outcome: str) -> int:
    """Count the callbacks of an outcome that the workers have made."""
    start = f'conveyor_callbacks_total{{outcome="{outcome}"}} '
    lines = [line for page in metrics(running, "worker") for line in page.splitlines()]
    return sum(int(float(line.removeprefix(start))) for line in lines if line.startswith(start))


def assert_no_log_holds(running: RoleFleet, token: str) -> None:
    for path in files_below(running.directory, ".log"):
        assert token not in path.read_text()
