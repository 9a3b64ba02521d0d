"""A development server's worker in virtual time, and a gateway that goes away and comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx

from conveyor.bootstrap import open_dev
from conveyor.engine.worker import Worker
from conveyor.gateway.problems import transport_failure, unconnected
from conveyor.ports.gateway import Absence, ScrapeFailed, ScrapeRequest, Shared, Success
from conveyor.settings import Settings
from conveyor.testing.clock import FakeClock
from conveyor.wire.errors import TransportError, TransportTrouble

ORIGIN = "http://127.0.0.1:9000"
ADDRESS = "http://user:word@gateway.test:8080/v1/?token=x"
CALL = 0.5
THREADS = 0.002
"""Real seconds that threads get to come back before virtual time moves on."""

_TROUBLES = {
    Shared.GATEWAY: TransportTrouble.UNREACHABLE,
    Shared.RESOLVER: TransportTrouble.UNRESOLVED,
    Shared.NETWORK: TransportTrouble.UNREACHABLE,
    Shared.PROCESS: TransportTrouble.EXHAUSTED,
}


@dataclass
class LeavingGateway:
    """Answers after CALL seconds, but for `away` seconds from `leaves_at`: no call comes about
    then, and those under way break. `tried_at` are the calls made in that time. The first call
    after it takes `hangs` seconds more."""

    clock: FakeClock
    shared: Shared = Shared.GATEWAY
    leaves_at: float = float("inf")
    away: float = 0.0
    hangs: float = 0.0
    tried_at: list[float] = field(default_factory=list)
    answers: int = 0
    broken: int = 0

    def scrape(self, request: ScrapeRequest) -> AbstractAsyncContextManager[Success]:
        return self._call()

    async def aclose(self) -> None:
        pass

    def is_away(self) -> bool:
        """Return whether it is away now."""
        return self.leaves_at <= self.clock.monotonic() < self.leaves_at + self.away

    @asynccontextmanager
    async def _call(self) -> AsyncIterator[Success]:
        if self.is_away():
            self.tried_at.append(self.clock.monotonic())
            trouble = _TROUBLES[self.shared]
            raise unconnected(TransportError(trouble, is_connecting=True), Absence(self.shared))
        hangs = 0.0
        if self.clock.monotonic() >= self.leaves_at + self.away:
            hangs, self.hangs = self.hangs, 0.0
        await self.clock.sleep(CALL + hangs)
        if self.is_away():
            self.broken += 1
            raise self._broken()
        self.answers += 1
        yield Success(b"body", "text/plain")

    def _broken(self) -> ScrapeFailed:
        failed = transport_failure(TransportTrouble.INTERRUPTED)
        failed.absence = Absence(self.shared)
        return failed


@dataclass
class OutageWorld:
    """A development server at work; `client` calls its API."""

    clock: FakeClock
    client: httpx.AsyncClient
    gateway: LeavingGateway
    worker: Worker

    async def submit(self, tasks: int, **fields: Any) -> dict[str, Any]:
        """Create a job of so many tasks; its first run."""
        urls = [{"url": f"https://site.test/{number}"} for number in range(tasks)]
        answer = await self.client.post("/v1/jobs", json={"tasks": urls, **fields})
        assert answer.is_success, answer.text
        run: dict[str, Any] = answer.json()["latest_run"]
        return run

    async def get(self, path: str, **params: Any) -> Any:
        """Read something of the API."""
        answer = await self.client.get(path, params=params)
        assert answer.is_success, answer.text
        return answer.json()

    async def again(self, run: dict[str, Any]) -> dict[str, Any]:
        """The run as it is now."""
        found: dict[str, Any] = await self.get(f"/v1/jobs/{run['job_id']}/runs/{run['run_id']}")
        return found

    async def ended(self, run: dict[str, Any]) -> dict[str, Any]:
        """Let virtual time pass until a run is over, and return it. Threads may need real time for
        what is done already, so no bound is tight."""
        for _ in range(120):
            found = await self.again(run)
            if found["status"] != "running":
                return found
            await self.clock.advance(1.0)
        raise AssertionError("the run did not end")

    async def events(self, run: dict[str, Any]) -> list[dict[str, Any]]:
        """The histories of all tasks of a job, of which there are at most a thousand."""
        page = await self.get(f"/v1/jobs/{run['job_id']}/results", limit=1_000)
        found: list[dict[str, Any]] = []
        for row in page["results"]:
            path = f"/v1/jobs/{run['job_id']}/tasks/{row['task_id']}/history"
            found += (await self.get(path))["events"]
        return found

    async def until(self, over: Callable[[], bool], *, limit: float) -> None:
        """Let virtual time pass until a condition holds. Raises AssertionError after `limit`."""
        await self.clock.advance_while(lambda: not over(), limit=limit)
        assert over()


@asynccontextmanager
async def outage_world(
    directory: Path, gateway: Callable[[FakeClock], Any] = LeavingGateway, **settings: Any
) -> AsyncIterator[OutageWorld]:
    """Run it, and stop it at the end."""
    clock = FakeClock(grace=THREADS)
    calls = gateway(clock)
    chosen = Settings(data_dir=str(directory), gateway=ADDRESS, **settings)
    runtime = await open_dev(chosen, clock, origin=ORIGIN, gateway=calls)
    runtime.readiness.yes = True
    client = httpx.AsyncClient(
        transport=httpx.ASGITransport(runtime.app), base_url=ORIGIN, headers={"X-API-Key": "key"}
    )
    try:
        async with client, anyio.create_task_group() as group:
            group.start_soon(partial(runtime.worker.run, grace=0.0))
            yield OutageWorld(clock, client, calls, runtime.worker.present)
            runtime.worker.stop()
            await clock.advance(5.0)
    finally:
        await runtime.aclose()
