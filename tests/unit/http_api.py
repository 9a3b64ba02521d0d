"""The API in one process, over the development binding in a temporary directory.

Every answer that a test gets is held against our own OpenAPI document, fields included.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
from prometheus_client import CollectorRegistry, Counter

from conveyor.dev.binding import DevOptions, open_binding
from conveyor.domain.deliveries import (
    AttemptResult,
    EventDelivery,
    begin_attempt,
    end_attempt,
    event_id,
)
from conveyor.domain.hosts import HostPolicies
from conveyor.domain.model import (
    Event,
    EventKind,
    Format,
    Problem,
    Run,
    Spend,
    StoredBody,
    Task,
    TaskFailure,
)
from conveyor.domain.task_rules import Failed, Settlement, Succeeded
from conveyor.gateway.webhook import WebhookRules, WebhookSender
from conveyor.http.app import AppOptions, create_app
from conveyor.http.auth import AnyKey, ApiKeys
from conveyor.http.openapi import document
from conveyor.http.pages.session import SessionOptions
from conveyor.http.request import BODY_SECONDS, BodyMemory
from conveyor.ports.binding import Binding
from conveyor.ports.dead_letters import DeadLetterQueue
from conveyor.ports.tasks import Claimed
from conveyor.records.blob_keys import result_key
from conveyor.service import Service, ServiceOptions
from conveyor.service.context import NO_LIMITS
from conveyor.settings.validators import MOST_SHARDS
from conveyor.testing.clock import FakeClock
from conveyor.wire.resolver import Lookup, system_lookup
from tests.webhooks import LOOPBACK

ORIGIN = "http://127.0.0.1:9000"
KEY = "key-of-alice"
OTHER_KEY = "key-of-bob"
PAGE = b"<html>\xff\x00</html>"
PAGE_TYPE = "text/html; charset=windows-1251"

DOCUMENT = document()
AMPLE = BodyMemory()
ANY_KEY = AnyKey()


@dataclass
class Api:
    """A running API: `client` calls it with Alice's key, `foreign` with Bob's, `bare` without a
    key."""

    client: httpx.AsyncClient
    foreign: httpx.AsyncClient
    bare: httpx.AsyncClient
    binding: Binding
    service: Service
    clock: FakeClock
    directory: Path
    ready: list[bool]
    webhooks: WebhookSender

    async def submit(self, urls: int = 3, **fields: Any) -> dict[str, Any]:
        """Create a job of so many tasks; the answer."""
        tasks = [{"url": f"https://site.test/{number}"} for number in range(urls)]
        response = await self.client.post("/v1/jobs", json={"tasks": tasks, **fields})
        assert response.status_code == 201, response.text
        body: dict[str, Any] = response.json()
        return body

    async def tasks_of(self, run_id: str) -> list[Task]:
        """The rows of a run."""
        found: list[Task] = []
        for shard in range(MOST_SHARDS):
            page = await self.binding.tasks.page_tasks(
                run_id, shard=shard, statuses=None, after=None, limit=1_000
            )
            found += page.tasks
        return sorted(found, key=lambda task: task.index)

    async def claim(self, run_id: str, task_id: str, *, seconds: float = 60.0) -> Task:
        """Claim a task, as a worker does."""
        now = self.clock.now()
        claim = await self.binding.tasks.claim_task(
            run_id,
            task_id,
            worker="worker",
            now=now,
            claimed_until=now + round(seconds * 1_000),
            max_interruptions=10,
        )
        assert isinstance(claim, Claimed), claim
        return claim.task

    async def settle(self, task: Task, settlement: Settlement) -> None:
        """Settle a claimed task."""
        settled = await self.binding.tasks.settle_task(
            task.run_id, task.task_id, task.claim_number, settlement, now=self.clock.now()
        )
        assert settled.applied

    async def succeed(
        self,
        job_id: str,
        run_id: str,
        task_id: str,
        *,
        body: bytes = PAGE,
        content_type: str = PAGE_TYPE,
    ) -> None:
        """Let a task bring back a body."""
        task = await self.claim(run_id, task_id)
        key = result_key(job_id, run_id, task_id, task.claim_number, 30)
        await self.binding.blobs.put(key, body)
        result = StoredBody(key, len(body), content_type, Format.HTML)
        await self.settle(task, Succeeded(self.event(task), result))

    async def fail(self, run_id: str, task_id: str, problem: Problem | None = None) -> None:
        """Let a task fail."""
        task = await self.claim(run_id, task_id)
        problem = problem or Problem("RESP001", "No content", 422, "https://docs.test/RESP001")
        await self.settle(task, Failed(self.event(task, problem), problem, TaskFailure.BLOCKED))

    def event(self, task: Task, problem: Problem | None = None) -> Event:
        """The event of a first attempt that took a second."""
        now = self.clock.now()
        return Event(
            kind=EventKind.ATTEMPT,
            attempt=task.attempts + 1,
            started_at=now - 1_000,
            ended_at=now,
            error=problem,
            spend=Spend(5, 0.25),
        )

    async def drain(self, job: dict[str, Any], *, failing: int = 0) -> list[Task]:
        """End every task of a job's latest run, the first `failing` of them as failed."""
        run_id = job["latest_run"]["run_id"]
        for task in await self.tasks_of(run_id):
            if task.index < failing:
                await self.fail(run_id, task.task_id)
            else:
                await self.succeed(job["job_id"], run_id, task.task_id)
        return await self.tasks_of(run_id)

    async def deliver(self, job: dict[str, Any], *, event: str = "run.completed") -> EventDelivery:
        """Put an event about a job's latest run into the log, as a worker does."""
        now, run_id = self.clock.now(), job["latest_run"]["run_id"]
        delivery = EventDelivery(
            delivery_id=event_id(run_id, event, ended_at=now),
            caller=self.service.identify(KEY).caller_id,
            job_id=job["job_id"],
            run_id=run_id,
            event_type=event,
            body=b'{"event_type":"%s","name":"\xe2\x98\x83"}' % event.encode(),
            created_at=now,
            due_at=now,
        )
        assert await self.binding.deliveries.create_delivery(delivery)
        return delivery

    async def attempt(
        self, delivery: EventDelivery, error: str = "", **fields: Any
    ) -> EventDelivery:
        """Make one attempt at a delivery that ends so, as a worker does."""
        now = self.clock.now()
        begun = begin_attempt(delivery, now=now, lapses_at=now + 60_000)
        assert await self.binding.deliveries.change_delivery(delivery, begun)
        result = AttemptResult(error=error, milliseconds=7, host="hooks.test", **fields)
        number = begun.attempt_count
        ended = end_attempt(begun, number, begun.ladder, result, now=now, random=0.0)
        assert await self.binding.deliveries.change_delivery(begun, ended)
        return ended

    async def run_of(self, job_id: str) -> Run | None:
        """The latest run of a job of Alice's."""
        caller = self.service.identify(KEY)
        return await self.binding.runs.get_run(caller.caller_id, job_id, None)


@asynccontextmanager
async def open_api(
    directory: Path,
    *,
    max_request_bytes: int = 50_331_648,
    body_memory: BodyMemory = AMPLE,
    body_seconds: float = BODY_SECONDS,
    lookup: Lookup = system_lookup,
    rules: WebhookRules = LOOPBACK,
    api_keys: ApiKeys = ANY_KEY,
    sessions: SessionOptions | None = None,
    clock: FakeClock | None = None,
    dead_letters: DeadLetterQueue | None = None,
    daily_tasks: int = 0,
    policies: HostPolicies = NO_LIMITS,
    **options: Any,
) -> AsyncIterator[Api]:
    """An API over a fresh data directory; `options` go to the service. `lookup` and `rules` are
    those of receivers. Without `sessions` there is no dashboard, without `daily_tasks` no limit of
    tasks a day."""
    clock = clock or FakeClock()
    dev = await open_binding(directory, clock, options=DevOptions(daily_tasks=daily_tasks))
    options.setdefault("public_origin", ORIGIN)
    webhooks = WebhookSender(clock, rules, lookup=lookup)
    ports = replace(dev.ports, dead_letters=dead_letters)
    service = Service(ports, ServiceOptions(**options), clock, webhooks=webhooks, policies=policies)
    ready = [True]
    app = create_app(
        service,
        registry=_counted_things(),
        ready=lambda: ready[0],
        clock=clock,
        options=AppOptions(
            allowed_hosts=["conveyor.test"],
            max_request_bytes=max_request_bytes,
            body_memory=body_memory,
            body_seconds=body_seconds,
            api_keys=api_keys,
            sessions=sessions,
        ),
    )
    transport = httpx.ASGITransport(app)
    try:
        async with (
            _caller(transport, {"X-API-Key": KEY}) as client,
            _caller(transport, {"X-API-Key": OTHER_KEY}) as foreign,
            _caller(transport, {}) as bare,
        ):
            yield Api(client, foreign, bare, dev.ports, service, clock, directory, ready, webhooks)
    finally:
        await dev.ports.aclose()


def _counted_things() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("conveyor_things", "Things.", registry=registry).inc(3)
    return registry


def _caller(transport: httpx.ASGITransport, headers: dict[str, str]) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=transport,
        base_url=ORIGIN,
        headers=headers,
        event_hooks={"response": [check_described]},
    )


def problem_of(response: httpx.Response, *, status: int, code: str) -> dict[str, Any]:
    """The problem document of a refusal, which is checked to be this one."""
    assert response.status_code == status, response.text
    assert response.headers["Content-Type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert (problem["code"], problem["status"]) == (code, status), problem
    return problem


def _closed(schema: Any) -> Any:
    """A schema that refuses fields which it does not name; problems stay open."""
    if isinstance(schema, dict):
        closed = {name: _closed(value) for name, value in schema.items()}
        if "properties" in schema and "code" not in schema["properties"]:
            closed["additionalProperties"] = False
        return closed
    return [_closed(value) for value in schema] if isinstance(schema, list) else schema


_COMPONENTS = {
    **copy.deepcopy(DOCUMENT["components"]),
    "schemas": _closed(DOCUMENT["components"]["schemas"]),
}
_PATTERNS = {
    path: re.compile(
        re.sub(r"{\w+}", "[^/]+", re.escape(path).replace(r"\{", "{").replace(r"\}", "}"))
    )
    for path in DOCUMENT["paths"]
}
_VALIDATORS: dict[str, Any] = {}


async def check_described(response: httpx.Response) -> None:
    """Raises AssertionError for an answer that the document does not describe."""
    assert response.headers["X-Request-ID"]
    method = response.request.method.lower()
    method = "get" if method == "head" else method
    path = response.request.url.path
    operations = [
        DOCUMENT["paths"][known]
        for known, pattern in _PATTERNS.items()
        if pattern.fullmatch(path) and method in DOCUMENT["paths"][known]
    ]
    is_problem = response.headers.get("Content-Type") == "application/problem+json"
    if is_problem and response.request.method != "HEAD":
        assert (await response.aread()).endswith(b"}\n"), "no line feed ends the problem"
    if not operations or response.status_code in (405, 413):
        return
    described = operations[0][method]["responses"].get(str(response.status_code))
    assert described, f"{method} {path} answered {response.status_code}: {await response.aread()!r}"
    if "$ref" in described:
        described = DOCUMENT["components"]["responses"][described["$ref"].rpartition("/")[2]]
    content = described.get("content", {})
    media_type = response.headers.get("Content-Type", "").partition(";")[0]
    body = await response.aread()
    if not content:
        assert not body
        return
    assert media_type in content or "*/*" in content, f"{path}: {media_type}"
    schema = content.get(media_type, {}).get("schema")
    if schema and "$ref" in schema and response.request.method != "HEAD":
        assert body.endswith(b"}\n"), "no line feed ends the answer"
        _validator(schema["$ref"]).validate(json.loads(body))


def _validator(reference: str) -> Any:
    if reference not in _VALIDATORS:
        _VALIDATORS[reference] = jsonschema_rs.Draft202012Validator(
            {"$ref": reference, "components": _COMPONENTS}, validate_formats=True
        )
    return _VALIDATORS[reference]
