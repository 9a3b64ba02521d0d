"""A role that says again and again by which terms it works: only other terms end it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from conveyor.bootstrap.loop import Readiness
from conveyor.bootstrap.production import RoleRuntime
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.engine.telemetry import LoopLag
from conveyor.http.malformed import protocol
from conveyor.roles.production import UNHEARD, RoleInfo, serve
from conveyor.settings import load
from conveyor.testing.clock import FakeClock

EVERY = 10.0
UNFORESEEN = [KeyError("Attributes"), TypeError("x"), ValueError("x"), RuntimeError("x")]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class IdleWorker:
    """Works nothing, until it is stopped."""

    def __init__(self) -> None:
        self._stopped = anyio.Event()

    def stop(self) -> None:
        self._stopped.set()

    async def run(self, *, grace: float) -> None:
        await self._stopped.wait()


class Fleet:
    """The answers of the fleet, in turn; nothing in the end."""

    def __init__(self, *says: Exception) -> None:
        self.left = list(says)
        self.asked = 0

    async def agree(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.asked += 1
        if self.left:
            raise self.left.pop(0)


async def nothing(_scope: Any, _receive: Any, _send: Any) -> None:
    """An application that nobody asks."""


@asynccontextmanager
async def working(
    role: str, fleet: Fleet, clock: FakeClock
) -> AsyncIterator[tuple[Callable[[], bool], anyio.Event]]:
    """A role of this fleet: whether it has ended, and what stops it. Raises what it raises."""
    ready, stop, ended = anyio.Event(), anyio.Event(), anyio.Event()

    async def opened(*_: object, **__: object) -> RoleRuntime:
        await anyio.lowlevel.checkpoint()
        worker: Any = IdleWorker() if role == "worker" else None
        return RoleRuntime(
            app=nothing,
            worker=worker,
            probes=nothing,
            protocol=protocol(clock),
            readiness=Readiness(),
            lag=LoopLag(clock),
            agree=fleet.agree,
            agree_every=EVERY,
            aclose=anyio.lowlevel.checkpoint,
        )

    def is_ready(_info: RoleInfo) -> None:
        ready.set()

    async def run() -> None:
        where = {"CONVEYOR_HOST": "127.0.0.1", "CONVEYOR_METRICS_HOST": "127.0.0.1"}
        settings = load(where, production=True, role=role, port=0, metrics_port=0)
        try:
            await serve(settings, on_ready=is_ready, stop=stop, clock=clock, opened=opened)
        finally:
            ended.set()

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        with anyio.fail_after(20):
            await ready.wait()
            yield ended.is_set, stop
            while not ended.is_set():
                await clock.advance(1.0)
                with anyio.move_on_after(0.02):
                    await ended.wait()


@pytest.mark.parametrize("role", ["api", "worker"])
@pytest.mark.slow
async def test_the_unforeseen_is_told_and_asked_again(
    role: str, unforeseen: list[logging.LogRecord]
) -> None:
    clock, fleet = FakeClock(), Fleet(*UNFORESEEN)
    async with working(role, fleet, clock) as (has_ended, stop):
        await clock.advance(EVERY * (len(UNFORESEEN) + 2))
        assert fleet.asked == len(UNFORESEEN) + 2
        assert not has_ended()
        stop.set()
    assert [one.getMessage() for one in unforeseen] == [f"{UNHEARD}: {one!r}" for one in UNFORESEEN]
    assert all(one.exc_info for one in unforeseen)
    unforeseen.clear()


@pytest.mark.parametrize("role", ["api", "worker"])
async def test_other_terms_end_it_whatever_came_before(
    role: str, unforeseen: list[logging.LogRecord], caplog: pytest.LogCaptureFixture
) -> None:
    away = ConveyorError(ErrorCode.UNAVAILABLE, "dynamodb is away")
    others = ConveyorError(ErrorCode.CONFLICT, "others' terms")
    clock, fleet = FakeClock(), Fleet(away, KeyError("Attributes"), others)
    ended = pytest.RaisesExc(ConveyorError, match="others' terms")
    with pytest.RaisesGroup(ended, flatten_subgroups=True):
        async with working(role, fleet, clock):
            await clock.advance(EVERY * 3)
    assert fleet.asked == 3
    assert f"{UNHEARD}: {away}" in caplog.messages
    assert [one.getMessage() for one in unforeseen] == [f"{UNHEARD}: KeyError('Attributes')"]
    unforeseen.clear()
