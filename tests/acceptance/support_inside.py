"""A whole server inside a test, with ports of its own choosing under it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx

from conveyor.bootstrap import Outside, build_worker
from conveyor.clock import SystemClock
from conveyor.dev.binding import open_binding
from conveyor.engine.telemetry import Telemetry
from conveyor.gateway.fake import FakeGateway
from conveyor.http.app import AppOptions, create_app
from conveyor.ports.binding import Binding
from conveyor.ports.clock import Clock
from conveyor.service import Service, ServiceOptions
from conveyor.settings import load
from tests.acceptance.support_wire import KEY
from tests.webhooks import loopback_webhooks

ORIGIN = "http://conveyor.test"
_POLL = 0.02
_LOOK = 0.4
"""Seconds between two looks at a clock, beyond which its time stands still."""


class UnhurriedClock(SystemClock):
    """The machine's clock, for a server inside a test: it stands still while the machine leaves the
    process without a processor, so that no claim and no lease lapses of that alone."""

    def __init__(self) -> None:
        super().__init__()
        self._looked_at = super().monotonic()
        self._left_out = 0.0

    def now(self) -> int:
        """Milliseconds since the epoch, as far as time did not stand still."""
        self.monotonic()
        return super().now() - round(self._left_out * 1_000)

    def monotonic(self) -> float:
        """Seconds from an arbitrary origin; at most a look more than at the last one."""
        present = super().monotonic()
        self._left_out += max(0.0, present - self._looked_at - _LOOK)
        self._looked_at = present
        return present - self._left_out

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds` of this clock."""
        until = self.monotonic() + seconds
        await super().sleep(min(seconds, _LOOK / 2))
        while (left := until - self.monotonic()) > 0:
            await super().sleep(min(left, _LOOK / 2))


@dataclass(frozen=True)
class Inside:
    """A server with its parts in reach: requests go through `client`, calls to `gateway`."""

    client: httpx.AsyncClient
    gateway: FakeGateway

    async def ask(self, method: str, path: str, **more: Any) -> Any:
        """A request that has to succeed; the JSON that it brings."""
        response = await self.client.request(method, path, **more)
        assert response.is_success, response.text
        return response.json() if response.content else None

    async def rows(self, job_id: str) -> list[Any]:
        """The rows of a job's latest run, which has at most a thousand."""
        page = await self.ask("GET", f"/jobs/{job_id}/results", params={"limit": 1000})
        rows: list[Any] = page["results"]
        return rows

    async def until(
        self, condition: Callable[[], Awaitable[bool]], what: str, *, timeout: float = 60
    ) -> None:
        """Wait until an asynchronous condition holds. Raises AssertionError after `timeout`."""
        deadline = anyio.current_time() + timeout
        while not await condition():
            assert anyio.current_time() < deadline, f"not within {timeout:g} s: {what}"
            await anyio.sleep(_POLL)

    async def ended(self, job_id: str) -> Any:
        """The latest run, once it has completed."""

        async def is_over() -> bool:
            job = await self.ask("GET", f"/jobs/{job_id}")
            return bool(job["latest_run"]["status"] == "completed")

        await self.until(is_over, "the run completes")
        return (await self.ask("GET", f"/jobs/{job_id}"))["latest_run"]


@asynccontextmanager
async def inside(
    data_dir: Path,
    change: Callable[[Binding], Binding],
    *,
    crews: int = 1,
    clock: Clock | None = None,
    gateway_clock: Clock | None = None,
    **settings: Any,
) -> AsyncIterator[Inside]:
    """A server over ports that `change` has made of the development ones, with so many workers;
    `settings` are fields of `Settings`. The gateway's delays pass on a clock of its own, if it is
    given one."""
    clock = clock or UnhurriedClock()
    gateway = FakeGateway(gateway_clock or clock)
    chosen = load({}, data_dir=str(data_dir), **settings)
    dev = await open_binding(data_dir, clock)
    ports = change(dev.ports)
    telemetry = Telemetry()
    webhooks = loopback_webhooks(clock)
    outside = Outside(gateway, webhooks, ORIGIN)
    crew = [build_worker(ports, outside, chosen, clock, telemetry=telemetry) for _ in range(crews)]
    app = create_app(
        Service(ports, ServiceOptions(public_origin=ORIGIN), clock, webhooks=webhooks),
        registry=telemetry.registry(),
        ready=lambda: True,
        clock=clock,
        options=AppOptions(
            allowed_hosts=["conveyor.test"],
            max_request_bytes=chosen.max_request_bytes,
        ),
    )
    client = httpx.AsyncClient(
        transport=httpx.ASGITransport(app),
        base_url=f"{ORIGIN}/v1",
        headers={"X-API-Key": KEY},
    )
    try:
        async with client, anyio.create_task_group() as group:
            for worker in crew:
                group.start_soon(partial(worker.run, grace=0.0))
            try:
                yield Inside(client, gateway)
            finally:
                for worker in crew:
                    worker.stop()
    finally:
        await dev.ports.aclose()
