"""A write that cannot be announced has still happened."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from conveyor.dev.queues import MemoryQueues
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.service import Service
from conveyor.service.notifier import SEND_CHUNK
from conveyor.service.reruns import TaskChoice
from tests.patient import SECONDS
from tests.unit.http_api import KEY, Api, open_api
from tests.webhooks import loopback_webhooks


class BrokenQueues(MemoryQueues):
    """Queues that take nothing any more."""

    async def send_tasks(self, *_args: Any, **_more: Any) -> None:
        raise ConveyorError(ErrorCode.UNAVAILABLE, "no queue")

    async def send(self, *_args: Any, **_more: Any) -> None:
        raise ConnectionError("secret address")

    async def drop_run(self, *_args: Any, **_more: Any) -> None:
        raise ConveyorError(ErrorCode.UNAVAILABLE, "no queue")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data") as opened:
        yield opened


async def test_a_queue_that_is_down_fails_no_request(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    queues = BrokenQueues(api.binding.tasks.unfinished_after, api.clock)
    binding = dataclasses.replace(api.binding, queues=queues)
    service = Service(
        binding,
        api.service.options,
        api.clock,
        webhooks=loopback_webhooks(api.clock),
    )
    caller = service.identify(KEY)
    body = b'{"tasks": [{"url": "https://a.test/"}], "status": "open"}'

    given = await service.submissions.submit(caller, [body], keyed=None)
    [view] = await binding.jobs.list_jobs(caller.caller_id, status=None, before=None, limit=10)
    job_id = view.job.job_id
    added = await service.additions.add_tasks(caller.caller_id, job_id, body, keyed=None)
    await service.lifecycle.stop(caller.caller_id, job_id)
    rerun = await service.reruns.rerun(caller, job_id, choice=TaskChoice(), keyed=None)
    await service.lifecycle.delete_job(caller.caller_id, job_id)

    statuses = [one.answer.status for one in (given, added, rerun)]
    assert statuses == [201, 200, 201]
    assert len(await binding.runs.deleted_runs()) == 2
    warnings = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert {one.getMessage() for one in warnings} == {"workers could not be notified of a change"}
    assert {one.__dict__["error"] for one in warnings} == {"unavailable", "ConnectionError"}
    assert "secret address" not in caplog.text


async def test_each_write_of_tasks_tells_the_workers_of_its_run(api: Api) -> None:
    """So that they look at once, and not at their next look at all runs."""

    async def told() -> set[str]:
        with anyio.fail_after(SECONDS):
            return await api.binding.signals.wait()

    job = await api.submit(1, status="open")
    run_id = job["latest_run"]["run_id"]
    assert await told() == {run_id}
    path, tasks = f"/v1/jobs/{job['job_id']}/tasks", [{"url": "https://a.test/"}]
    assert (await api.client.post(path, json={"tasks": tasks})).status_code == 200
    assert await told() == {run_id}


async def test_every_task_of_a_long_rerun_is_enqueued(api: Api) -> None:
    count = SEND_CHUNK * 2 + 1
    job = await api.submit(count)
    await api.client.post(f"/v1/jobs/{job['job_id']}/stop")

    response = await api.client.post(f"/v1/jobs/{job['job_id']}/rerun")

    run_id = response.json()["latest_run"]["run_id"]
    seen: set[object] = set()
    while deliveries := await api.binding.queues.receive(f"run-{run_id}", limit=10, visibility=600):
        seen |= {getattr(delivery.message, "task_id", None) for delivery in deliveries}
    assert len(seen) == count
