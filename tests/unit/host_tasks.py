"""Tasks of one job against scripted hosts: over the development binding, and real sockets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import httpx
import msgspec
from zenrows.batch.models import ListResultsResponse, TaskHistoryResponse

from conveyor.engine.telemetry import Telemetry
from conveyor.handlers.refusals import HostAnswers
from conveyor.handlers.retry_policy import RetryPolicy
from conveyor.handlers.task import TaskHandler
from conveyor.ports.gateway import Gateway
from conveyor.ports.handler import Outcome
from conveyor.ports.queues import Delivery, TaskMessage
from tests.unit.http_api import Api
from tests.unit.wire_server import Peer, RawServer, answer
from tests.unit.wired_handlers import task_handler

DEADLINE = 600.0


async def scripted(peer: Peer) -> None:
    """Answer as the query says: `status` and `fields`, else 200."""
    while head := await peer.request():
        query = parse_qs(urlsplit(head.split(" ")[1]).query)
        status, fields = query.get("status", ["200"])[0], query.get("fields", [""])[0]
        await peer.send(answer(fields=fields).replace(b"200 OK", status.encode() + b" Scripted"))


def asking(server: RawServer, status: int, after: str | None = None, *, fields: str = "") -> str:
    """A URL that is answered so."""
    fields += "" if after is None else f"Retry-After: {after}\r\n"
    return server.url(f"/?status={status}&fields={quote(fields)}")


@dataclass
class Work:
    """Tasks of one job, handled over the development binding and real sockets."""

    api: Api
    client: httpx.AsyncClient
    handler: TaskHandler
    telemetry: Telemetry
    job_id: str
    run_id: str
    deliveries: list[Delivery]

    async def handle(self, number: int, *, receives: int = 1) -> Outcome:
        """Receive the message of a task."""

        def throttled() -> None:
            raise AssertionError("the job must not slow down")

        delivery = msgspec.structs.replace(self.deliveries[number], receive_count=receives)
        return await self.handler.handle(delivery, throttled)

    async def until_done(self, number: int) -> None:
        """Receive a message as often as it comes, and move the clock to when it comes next."""
        receives = 1
        while (outcome := await self.handle(number, receives=receives)).hide_for is not None:
            receives += 1
            await self.api.clock.advance(outcome.hide_for + 0.001)

    async def rows(self) -> list[dict[str, Any]]:
        """The rows as a caller sees them."""
        page = await self.client.get(f"/v1/jobs/{self.job_id}/results")
        parsed = ListResultsResponse.model_validate(page.json())
        assert len(parsed.results) == len(self.deliveries)
        rows: list[dict[str, Any]] = page.json()["results"]
        return rows

    async def history(self, number: int) -> dict[str, Any]:
        """The history of a task."""
        message = self.deliveries[number].message
        assert isinstance(message, TaskMessage)
        path = f"/v1/jobs/{self.job_id}/tasks/{message.task_id}/history"
        history: dict[str, Any] = (await self.client.get(path)).json()
        TaskHistoryResponse.model_validate(history)
        return history


async def work_on(
    api: Api,
    gateway: Gateway,
    *urls: str,
    client: httpx.AsyncClient | None = None,
    hosts: HostAnswers | None = None,
    **job_fields: Any,
) -> Work:
    """A job of Alice's, or of another client's, whose tasks one worker handles."""
    tasks = [{"url": url} for url in urls]
    response = await (client or api.client).post("/v1/jobs", json={"tasks": tasks, **job_fields})
    assert response.status_code == 201, response.text
    job = response.json()
    run_id = job["latest_run"]["run_id"]
    telemetry = Telemetry()
    handler = task_handler(
        api.binding,
        gateway,
        api.clock,
        retry_policy=RetryPolicy(api.clock, base=1.0, cap=2.0, rate_limit_deadline=DEADLINE),
        observer=telemetry,
        max_interruptions=10,
        hosts=hosts,
    )
    deliveries = [
        Delivery("queue", TaskMessage(job["job_id"], run_id, task.task_id), "receipt", 1)
        for task in await api.tasks_of(run_id)
    ]
    return Work(api, client or api.client, handler, telemetry, job["job_id"], run_id, deliveries)
