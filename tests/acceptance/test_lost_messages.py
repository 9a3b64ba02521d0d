"""Messages that are lost outright, and a queue lost under a live run: the sweeper brings every task
to its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from conveyor.handlers import sweep
from conveyor.ports.binding import Binding
from conveyor.ports.queues import (
    DeleteMessage,
    Delivery,
    IngestMessage,
    Message,
    Queues,
    run_queue,
)
from tests.acceptance.support_inside import Inside, inside
from tests.acceptance.support_wire import target

pytestmark = [pytest.mark.guarantee("G19"), pytest.mark.server]

SWEEPING: dict[str, Any] = {
    "sweep_interval": 0.1,
    "quiet_after": 1.0,
    "visibility_timeout": 1.0,
    "heartbeat": 0.3,
}
"""So quick that a test sees it; the defaults are a minute and five."""


@pytest.fixture
def anyio_backend() -> str:
    """The development store runs on asyncio."""
    return "asyncio"


class LosingQueues:
    """The queues port over another one that loses each message the first time, for which
    `loses` holds: it was sent, was never delivered, and is gone."""

    def __init__(self, queues: Queues, loses: Callable[[Message], bool]) -> None:
        self.lost: set[Message] = set()
        self._queues = queues
        self._loses = loses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queues, name)

    async def receive(
        self, queue: str, *, limit: int, visibility: float, wait: float = 0.0
    ) -> list[Delivery]:
        """Receive messages, and lose some."""
        batch = await self._queues.receive(queue, limit=limit, visibility=visibility, wait=wait)
        lost = [one for one in batch if self._loses(one.message) and one.message not in self.lost]
        self.lost.update(one.message for one in lost)
        await self._queues.delete(queue, [one.receipt for one in lost])
        return [one for one in batch if one not in lost]


class Losing:
    """Puts a LosingQueues under a server; `queues` is it once the server is there."""

    def __init__(self, loses: Callable[[Message], bool]) -> None:
        self._loses = loses
        self.queues: LosingQueues
        self.binding: Binding

    def __call__(self, binding: Binding) -> Binding:
        self.queues = LosingQueues(binding.queues, self._loses)
        self.binding = dataclasses.replace(binding, queues=cast(Queues, self.queues))
        return self.binding


def bodies(urls: Sequence[str], **fields: object) -> dict[str, object]:
    """The body of a submit."""
    return {"tasks": [{"url": url} for url in urls], **fields}


async def assert_all_scraped_once(server: Inside, job_id: str, urls: Sequence[str]) -> None:
    """The run completes with every URL scraped, each once."""
    run = await server.ended(job_id)
    assert run["stats"]["successful"] == run["stats"]["total"] == len(urls)
    assert [row["status"] for row in await server.rows(job_id)] == ["successful"] * len(urls)
    assert dict(server.gateway.hits.counts) == dict.fromkeys(urls, 1)


async def test_references_lost_outright_come_again(tmp_path: Path) -> None:
    losing = Losing(lambda message: message.job_id != "")
    urls = [target(f"lost/{number}") for number in range(60)]
    async with inside(tmp_path, losing, **SWEEPING) as server:
        job = await server.ask("POST", "/jobs", json=bodies(urls))
        await assert_all_scraped_once(server, job["job_id"], urls)
        assert len(losing.queues.lost) == len(urls)


async def test_a_queue_lost_under_a_live_run_comes_back_with_all_its_tasks(tmp_path: Path) -> None:
    losing = Losing(lambda _message: False)
    urls = [target(f"queue/{number}", delay=0.05) for number in range(60)]
    async with inside(tmp_path, losing, **SWEEPING) as server:
        job = await server.ask("POST", "/jobs", json=bodies(urls, max_inflight=5))
        run_id = job["latest_run"]["run_id"]

        async def is_under_way() -> bool:
            return server.gateway.hits.total >= 10

        await server.until(is_under_way, "some tasks are scraped")
        queues = losing.binding.queues
        await queues.drop_run(run_id)
        assert queues.depth(run_queue(run_id)) == 0
        await assert_all_scraped_once(server, job["job_id"], urls)


async def test_a_lost_ingest_message_comes_again(tmp_path: Path) -> None:
    losing = Losing(lambda message: isinstance(message, IngestMessage))
    urls = [target(f"ingest/{number}") for number in range(20)]
    async with inside(tmp_path, losing, **SWEEPING) as server:
        answer = await server.client.post("/jobs", json=bodies(urls, **{"async": True}))
        assert answer.status_code == 202, answer.text
        job_id = answer.json()["job_id"]
        await assert_all_scraped_once(server, job_id, urls)
        assert len(losing.queues.lost) == 1


async def test_a_lost_delete_message_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "DELETE_PATIENCE", 1)
    losing = Losing(lambda message: isinstance(message, DeleteMessage))
    urls = [target("one"), target("two")]
    async with inside(tmp_path, losing, **SWEEPING) as server:
        job = await server.ask("POST", "/jobs", json=bodies(urls))
        await server.ended(job["job_id"])
        await server.ask("DELETE", f"/jobs/{job['job_id']}")

        async def is_gone() -> bool:
            return (await server.client.get(f"/jobs/{job['job_id']}")).status_code == 404

        await server.until(is_gone, "the job is gone")
        lost = losing.queues.lost
        assert {isinstance(one, DeleteMessage) and one.final for one in lost} == {False, True}
