"""A run's queue is opened once, and left alone once it is dropped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from conveyor.ports.binding import Binding
from conveyor.ports.queues import Queues, run_queue
from tests.acceptance.support_inside import inside
from tests.acceptance.support_wire import target

pytestmark = pytest.mark.server


@pytest.fixture
def anyio_backend() -> str:
    """The development store runs on asyncio."""
    return "asyncio"


class RecordedQueues:
    """The queues port over another one; notes each call as it begins, and each drop as it ends."""

    def __init__(self, queues: Queues) -> None:
        self.calls: list[tuple[str, str]] = []
        self.acknowledged: list[str] = []
        self._queues = queues

    def __getattr__(self, name: str) -> Any:
        call: Callable[..., Any] = getattr(self._queues, name)

        def noted(queue: str, *args: Any, **named: Any) -> Any:
            self.calls.append((name, queue))
            return call(queue, *args, **named)

        return noted if name in ("receive", "change_visibility", "send") else call

    async def open_run(self, job_id: str, run_id: str, hosts: Sequence[str] = ()) -> None:
        self.calls.append(("open_run", run_queue(run_id)))
        await self._queues.open_run(job_id, run_id, hosts)

    async def drop_run(self, run_id: str) -> None:
        await self._queues.drop_run(run_id)
        self.calls.append(("drop_run", run_queue(run_id)))

    async def delete(self, queue: str, receipts: Sequence[str]) -> None:
        self.calls.append(("delete", queue))
        self.acknowledged += receipts
        await self._queues.delete(queue, receipts)


class Recording:
    """Puts RecordedQueues under a server; `queues` is it once the server is there."""

    queues: RecordedQueues

    def __call__(self, binding: Binding) -> Binding:
        self.queues = RecordedQueues(binding.queues)
        return dataclasses.replace(binding, queues=cast(Queues, self.queues))


@pytest.mark.parametrize("tasks", [1, 25])
async def test_a_queue_is_dropped_after_its_last_message_is_acknowledged(
    tmp_path: Path, tasks: int
) -> None:
    recording = Recording()
    urls = [target(f"end/{number}") for number in range(tasks)]
    async with inside(tmp_path, recording, workers=4) as server:
        job = await server.ask("POST", "/jobs", json={"tasks": [{"url": url} for url in urls]})
        await server.ended(job["job_id"])
        queue = run_queue(job["latest_run"]["run_id"])
        queues = recording.queues

        async def is_dropped() -> bool:
            return ("drop_run", queue) in queues.calls

        await server.until(is_dropped, "the queue is dropped")
    calls = [name for name, named in queues.calls if named == queue]
    assert calls[-2:] == ["delete", "drop_run"]
    assert calls.count("drop_run") == 1
    assert len(queues.acknowledged) == len(set(queues.acknowledged)) == tasks


async def test_a_run_that_fails_under_its_calls_leaves_its_dropped_queue_alone(
    tmp_path: Path,
) -> None:
    recording = Recording()
    urls = [target("refused", status=402), *(target(f"{n}", delay=0.5) for n in range(60))]
    async with inside(tmp_path, recording, workers=4, heartbeat=0.1) as server:
        job = await server.ask("POST", "/jobs", json={"tasks": [{"url": url} for url in urls]})
        queue = run_queue(job["latest_run"]["run_id"])
        queues = recording.queues

        async def is_dropped() -> bool:
            return ("drop_run", queue) in queues.calls and server.gateway.hits.total >= 4

        await server.until(is_dropped, "the queue is dropped")
        run = (await server.ask("GET", f"/jobs/{job['job_id']}"))["latest_run"]
        assert run["status"] == "failed"
    calls = [name for name, named in queues.calls if named == queue]
    assert calls[-2:] == ["delete", "drop_run"]
    assert calls.count("drop_run") == 1


async def test_a_submit_opens_its_queue_once(tmp_path: Path) -> None:
    recording = Recording()
    async with inside(tmp_path, recording) as server:
        # The worker has looked for runs by then, and learns of the next one by its hint alone.
        first = await server.ask("POST", "/jobs", json={"tasks": [{"url": target("first")}]})
        await server.ended(first["job_id"])
        job = await server.ask("POST", "/jobs", json={"tasks": [{"url": target("once")}]})
        await server.ended(job["job_id"])
    queue = run_queue(job["latest_run"]["run_id"])
    assert recording.queues.calls.count(("open_run", queue)) == 1


async def test_a_rerun_opens_its_queue_once(tmp_path: Path) -> None:
    recording = Recording()
    async with inside(tmp_path, recording) as server:
        job = await server.ask("POST", "/jobs", json={"tasks": [{"url": target("twice")}]})
        await server.ended(job["job_id"])
        rerun = await server.ask("POST", f"/jobs/{job['job_id']}/rerun")
        await server.ended(job["job_id"])
    queue = run_queue(rerun["latest_run"]["run_id"])
    assert recording.queues.calls.count(("open_run", queue)) == 1
