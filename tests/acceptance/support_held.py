"""Gateways whose calls end when a test releases them, not after some time: the test's other steps
happen while they are in flight, on however busy a machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anyio.from_thread import start_blocking_portal

from conveyor.clock import SystemClock
from conveyor.gateway.fake import FakeGateway
from conveyor.settings import load
from conveyor.testing.gateway_server import GatewayServer
from conveyor.testing.local_server import ConveyorServer, serving

_POLL = 0.005


class HeldCalls(SystemClock):
    """A gateway's clock: every delay lasts until `release`, and none from then on. May be released
    from any thread."""

    def __init__(self) -> None:
        super().__init__()
        self._released = threading.Event()

    def release(self) -> None:
        """Let all calls end that are delayed."""
        self._released.set()

    async def sleep(self, seconds: float) -> None:
        """Return once released, however long that takes."""
        while not self._released.is_set():
            await super().sleep(_POLL)


@contextmanager
def held_gateway() -> Iterator[tuple[GatewayServer, HeldCalls]]:
    """A scraping API that outlives the servers under test."""
    calls = HeldCalls()
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(GatewayServer(clock=calls)) as running,
    ):
        yield running, calls


@contextmanager
def held_server(data_dir: Path, **settings: Any) -> Iterator[tuple[ConveyorServer, HeldCalls]]:
    """Run `conveyor_server` with calls that are held."""
    calls = HeldCalls()
    gateway = FakeGateway(calls)
    defaults: dict[str, Any] = {"port": 0, "shutdown_grace": 0.0, "retry_base": 0.01}
    chosen = load({}, data_dir=str(data_dir), **{**defaults, **settings})
    with serving(chosen, gateway=gateway) as (info, portal):
        yield ConveyorServer(info, portal, gateway.hits), calls
