"""The queues that the hosts of a large run get, by whichever way its tasks are written."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from conveyor.dev.binding import open_binding
from conveyor.domain.hosts import HostPolicies, HostRules
from conveyor.handlers.sweep import SweepOptions
from conveyor.ports.binding import Binding
from conveyor.ports.queues import CONTROL_QUEUE, TaskMessage, run_queues
from conveyor.service.context import NO_LIMITS
from conveyor.testing.clock import FakeClock
from tests.unit.http_api import Api, open_api
from tests.unit.wired_handlers import ingest_handler, sweeper, task_sender

ROWS = 1_000
HOSTS = tuple(f"h{number}.test:443" for number in range(3))
MANNERS = {"per_host": 2}
EVERY_HOST = HostPolicies(lambda: HostRules(limit=3))


@pytest.fixture
def anyio_backend() -> str:
    """The development binding belongs to asyncio."""
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data") as opened:
        yield opened


def tasks_of(count: int) -> list[dict[str, str]]:
    """Tasks of three hosts that take turns."""
    return [{"url": f"https://h{number % 3}.test/{number}"} for number in range(count)]


async def submit(api: Api, count: int, **fields: Any) -> dict[str, Any]:
    """Submit so many tasks."""
    response = await api.client.post("/v1/jobs", json={"tasks": tasks_of(count), **fields})
    assert response.is_success, response.text
    job: dict[str, Any] = response.json()
    return job


async def hosts_of(binding: Binding, run_id: str) -> tuple[str, ...]:
    """The hosts of a run as a worker finds them."""
    run = await binding.runs.dispatchable_run(run_id)
    assert run is not None
    return run.hosts


async def waiting(binding: Binding, run_id: str, hosts: tuple[str, ...]) -> dict[str, int]:
    """The messages of a run by their hosts; each is checked to lie in the queue of its host."""
    await binding.queues.open_run("J", run_id, hosts)
    found: dict[str, int] = {}
    for queue, host in zip(run_queues(run_id, hosts), ("", *hosts), strict=True):
        while batch := await binding.queues.receive(queue, limit=10, visibility=600):
            for delivery in batch:
                assert isinstance(delivery.message, TaskMessage)
                assert host in ("", delivery.message.host)
                found[delivery.message.host] = found.get(delivery.message.host, 0) + 1
    return found


def spread(count: int) -> dict[str, int]:
    """So many tasks by host."""
    return {host: len(range(number, count, 3)) for number, host in enumerate(HOSTS)}


async def ingest(api: Api, policies: HostPolicies = NO_LIMITS) -> None:
    """Do as a worker does that is told to write rows."""
    handler = ingest_handler(api.binding, api.clock, policies)
    [delivery] = await api.binding.queues.receive(CONTROL_QUEUE, limit=1, visibility=60)
    await handler.handle(delivery, lambda: None)


async def test_a_submit_with_politeness_gives_each_host_a_queue(api: Api) -> None:
    job = await submit(api, ROWS, politeness=MANNERS)
    run_id = job["latest_run"]["run_id"]
    assert await hosts_of(api.binding, run_id) == HOSTS
    assert await waiting(api.binding, run_id, HOSTS) == spread(ROWS)


async def test_a_submit_under_the_limits_of_the_server_does_too(tmp_path: Path) -> None:
    async with open_api(tmp_path / "data", policies=EVERY_HOST) as api:
        job = await submit(api, ROWS)
        assert await hosts_of(api.binding, job["latest_run"]["run_id"]) == HOSTS


async def test_without_limits_and_in_small_runs_no_host_has_a_queue(api: Api) -> None:
    for count, fields in ((ROWS, {}), (ROWS - 1, {"politeness": MANNERS})):
        job = await submit(api, count, **fields)
        run_id = job["latest_run"]["run_id"]
        assert await hosts_of(api.binding, run_id) == ()
        expected = spread(count) if fields else {"": count}
        assert await waiting(api.binding, run_id, ()) == expected


async def test_an_open_job_that_grows_gets_them_when_it_is_large(api: Api) -> None:
    job = await submit(api, 600, status="open", politeness=MANNERS)
    run_id = job["latest_run"]["run_id"]
    assert await hosts_of(api.binding, run_id) == ()
    response = await api.client.post(
        f"/v1/jobs/{job['job_id']}/tasks", json={"tasks": tasks_of(600)}
    )
    assert response.is_success
    assert await hosts_of(api.binding, run_id) == HOSTS
    assert sum((await waiting(api.binding, run_id, HOSTS)).values()) == 1_200


async def test_a_list_that_is_written_later_gets_them_from_its_first_rows(api: Api) -> None:
    job = await submit(api, ROWS, politeness=MANNERS, **{"async": True})
    run_id = job["latest_run"]["run_id"]
    await ingest(api)
    assert await hosts_of(api.binding, run_id) == HOSTS
    assert await waiting(api.binding, run_id, HOSTS) == spread(ROWS)


@pytest.mark.parametrize("large", [False, True], ids=["at once", "later"])
async def test_a_rerun_gets_its_own(tmp_path: Path, large: bool) -> None:
    more: dict[str, Any] = {"async_threshold": 500} if large else {}
    async with open_api(tmp_path / "data", **more) as api:
        job = await submit(api, ROWS, politeness=MANNERS)
        if large:
            await ingest(api)
        await api.client.post(f"/v1/jobs/{job['job_id']}/stop")
        response = await api.client.post(f"/v1/jobs/{job['job_id']}/rerun")
        assert response.status_code == (202 if large else 201)
        if large:
            await ingest(api)
        run_id = response.json()["latest_run"]["run_id"]
        assert await hosts_of(api.binding, run_id) == HOSTS
        assert await waiting(api.binding, run_id, HOSTS) == spread(ROWS)


@pytest.mark.parametrize(("rows", "lanes"), [(ROWS, HOSTS), (30, ())], ids=["large", "small"])
async def test_after_a_restart_messages_name_their_hosts_in_the_queues_of_these(
    tmp_path: Path, rows: int, lanes: tuple[str, ...]
) -> None:
    async with open_api(tmp_path / "data") as api:
        job = await submit(api, rows, politeness=MANNERS)
    again = await open_binding(tmp_path / "data", FakeClock())
    try:
        [run] = await again.ports.runs.dispatchable_runs()
        assert (run.job_id, run.hosts) == (job["job_id"], lanes)
        assert await waiting(again.ports, run.run_id, run.hosts) == spread(rows)
    finally:
        await again.ports.aclose()


async def test_the_sweeper_sends_lost_references_into_the_queues_of_their_hosts(api: Api) -> None:
    job = await submit(api, ROWS, politeness=MANNERS)
    run_id = job["latest_run"]["run_id"]
    await api.binding.queues.drop_run(run_id)
    options = SweepOptions(
        interval=10.0,
        quiet_after=60.0,
        row_retention_days=0,
        delivery_retention_days=1,
        fire_retention_days=1,
    )
    await api.clock.advance(61)
    await sweeper(api.binding, api.clock, options=options).sweep()
    found = await waiting(api.binding, run_id, HOSTS)
    assert {host: found[host] for host in HOSTS} == spread(ROWS)


async def test_a_host_that_was_written_before_its_sender_died_loses_nothing(api: Api) -> None:
    job = await submit(api, ROWS)
    run_id = job["latest_run"]["run_id"]
    references = await api.binding.tasks.unfinished_after(run_id, -1, ROWS)
    await api.binding.runs.add_hosts(run_id, HOSTS[:1], now=api.clock.now())
    sender = task_sender(api.binding, api.clock, EVERY_HOST)
    await sender.send(job["job_id"], run_id, references, politeness=None)
    assert await hosts_of(api.binding, run_id) == HOSTS
    # They came twice: once as they were sent first, without a host.
    found = await waiting(api.binding, run_id, HOSTS)
    assert sum(found.values()) >= ROWS
