"""Webhooks over the development store in virtual time, with receivers on real sockets."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from conveyor.domain.deliveries import EventDelivery
from conveyor.domain.model import RunFailure
from conveyor.domain.webhooks import USUAL_EVENTS, EventType, Webhook
from conveyor.engine.telemetry import Telemetry
from conveyor.handlers.deliver import Deliverer
from conveyor.handlers.notify import Notifier
from conveyor.ports.deliveries import DeliveryFilter
from conveyor.ports.webhooks import WebhookAnswer
from tests.unit.http_api import KEY, Api, open_api
from tests.unit.wire_server import Peer, RawServer, raw_server
from tests.unit.wired_handlers import deliverer, notifier
from tests.webhooks import loopback_webhooks

ORIGIN = "https://conveyor.test"
SWEEP = 60.0
PATIENCE = 60.0
_FIELD = re.compile(r"^([\w-]+): (.*?)\r$", re.MULTILINE)


@dataclass(frozen=True)
class Received:
    """A request, as its receiver had it."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Receiver:
    """A receiver on loopback, which answers each request with the next of `answers`, the last one
    for ever: a status, then header fields."""

    server: RawServer
    answers: list[str]
    requests: list[Received] = field(default_factory=list)

    @property
    def url(self) -> str:
        """The URL of a hook there."""
        return self.server.url("/hook?token=hush")

    @property
    def connections(self) -> int:
        """The number of connections that it accepted."""
        return len(self.server.requests)


@asynccontextmanager
async def receiving(*answers: str) -> AsyncIterator[Receiver]:
    """Run a receiver."""

    async def serve(peer: Peer) -> None:
        while head := await peer.request():
            headers = dict(_FIELD.findall(head))
            body = await peer.body(int(headers["Content-Length"]))
            receiver.requests.append(Received(head.split(" ")[1], headers, body))
            left = receiver.answers
            answer = left.pop(0) if len(left) > 1 else left[0]
            await peer.send(f"HTTP/1.1 {answer}\r\nContent-Length: 0\r\n\r\n".encode())

    async with raw_server(serve) as server:
        receiver = Receiver(server, list(answers) or ["200 OK"])
        yield receiver


def succeed(url: str) -> WebhookAnswer:
    """Answer as a good receiver."""
    return WebhookAnswer(status=200)


class Held:
    """Receivers whose answers are held back until `free` is called, and then take a moment; `most`
    is the greatest number of requests under way to each host at a time, `most_in_all` to all."""

    def __init__(self, answer: Callable[[str], WebhookAnswer] = succeed) -> None:
        self.sent: list[str] = []
        self.most: Counter[str] = Counter()
        self.most_in_all = 0
        self.under_way: Counter[str] = Counter()
        self._answer = answer
        self._free = anyio.Event()

    async def check_url(self, url: str) -> None:
        """Fail: a URL is judged when it is set."""
        raise AssertionError(url)

    async def post_event(
        self, url: str, *, headers: Mapping[str, str], body: bytes
    ) -> WebhookAnswer:
        """Answer, once that is allowed."""
        host = url.split("/")[2]
        self.sent.append(url)
        self.under_way[host] += 1
        self.most[host] = max(self.most[host], self.under_way[host])
        self.most_in_all = max(self.most_in_all, self.under_way.total())
        await self._free.wait()
        # All that were held back are counted before the first one ends.
        await anyio.sleep(0.01)
        self.under_way[host] -= 1
        return self._answer(url)

    async def aclose(self) -> None:
        """Nothing is under way."""

    def hold(self) -> None:
        """Hold back the answers to further requests."""
        self._free = anyio.Event()

    def free(self) -> None:
        """Let every request have its answer."""
        self._free.set()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what real sockets bring."""
    with anyio.fail_after(PATIENCE):
        while not condition():  # noqa: ASYNC110  (a socket sets no event)
            await anyio.sleep(0.005)


@dataclass
class DeliveryWorld:
    """A store with a notifier and a deliverer beside it."""

    api: Api
    telemetry: Telemetry = field(default_factory=Telemetry)
    origin: str = ORIGIN

    def __post_init__(self) -> None:
        self.deliverer = self.another_deliverer()

    @property
    def caller(self) -> str:
        """The id of the caller."""
        return self.api.service.identify(KEY).caller_id

    def another_deliverer(self) -> Deliverer:
        """The deliverer of another worker."""
        webhooks = loopback_webhooks(self.api.clock)
        return deliverer(self.api.binding, self.api.clock, webhooks, observer=self.telemetry)

    def notifier(self) -> Notifier:
        """The notifier of a worker."""
        return notifier(
            self.api.binding,
            self.api.clock,
            observer=self.telemetry,
            heartbeat=SWEEP,
            origin=self.origin,
        )

    async def submit(
        self,
        url: str,
        *,
        signed: bool = False,
        events: tuple[EventType, ...] = USUAL_EVENTS,
        **fields: Any,
    ) -> dict[str, Any]:
        """Make a job with a live run and a webhook."""
        job = await self.api.submit(1, **fields)
        await self.set_webhook(job, Webhook(url, signed, events))
        return job

    async def set_webhook(self, job: dict[str, Any], webhook: Webhook | None) -> None:
        """Set or remove the webhook of a job."""
        now = self.api.clock.now()
        await self.api.binding.jobs.set_webhook(self.caller, job["job_id"], webhook, now=now)

    async def fail(self, job: dict[str, Any], detail: str = "nothing left") -> None:
        """End the run of a job."""
        assert await self.api.binding.runs.fail_run(
            job["latest_run"]["run_id"],
            reason=RunFailure.INSUFFICIENT_CREDITS,
            detail=detail,
            now=self.api.clock.now(),
        )

    async def owe(self, url: str, **fields: Any) -> dict[str, Any]:
        """Make a job whose run has failed, and whose event is due."""
        job = await self.submit(url, **fields)
        await self.fail(job)
        await self.notifier().deliver()
        return job

    async def look(self, *, after: float = 0.0, by: Deliverer | None = None) -> None:
        """One look, `after` seconds later; return once its attempts have ended."""
        await self.api.clock.advance(after)
        async with anyio.create_task_group() as group:
            await (by or self.deliverer).look(group)

    async def deliveries(self) -> list[EventDelivery]:
        """All deliveries, newest first."""
        wanted = DeliveryFilter(caller=self.caller)
        return await self.api.binding.deliveries.list_deliveries(wanted, limit=10_000)

    async def delivery(self) -> EventDelivery:
        """The only delivery."""
        [found] = await self.deliveries()
        return found


@asynccontextmanager
async def delivery_world(directory: Path) -> AsyncIterator[DeliveryWorld]:
    """A world over a fresh data directory."""
    async with open_api(directory) as api:
        yield DeliveryWorld(api)
