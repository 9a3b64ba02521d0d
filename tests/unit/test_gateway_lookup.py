"""Names whose servers do not answer hold up nobody else."""

from __future__ import annotations

import socket
import threading
from typing import Any

import anyio
import anyio.to_thread
import pytest

from conveyor.wire.resolver import system_lookup

DEAD = 60
"""More names than any shared pool of threads would have room for."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_dead_names_hold_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    patience = threading.Event()
    asked = threading.Semaphore(0)

    def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        if host.startswith("dead"):
            asked.release()
            patience.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", port))] * 2

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    try:
        async with anyio.create_task_group() as group:
            for number in range(DEAD):
                group.start_soon(system_lookup, f"dead{number}.test", 80)
            for _ in range(DEAD):
                await anyio.to_thread.run_sync(asked.acquire)
            with anyio.fail_after(30):
                assert await system_lookup("alive.test", 80) == ["192.0.2.1"]
            group.cancel_scope.cancel()
    finally:
        patience.set()


async def test_a_name_that_does_not_exist_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with pytest.raises(socket.gaierror):
        await system_lookup("missing.test", 80)
