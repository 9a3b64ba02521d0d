"""A worker on ECS keeps itself from being stopped while its calls are in flight: asked of a small
server in the place of the agent."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import anyio
import pytest

from conveyor.bootstrap.production import _protection
from conveyor.domain.errors import ConveyorError
from conveyor.gateway.fake import FakeGateway
from conveyor.gateway.watch import WatchedGateway
from conveyor.prod.ecs import (
    EXPIRES_MINUTES,
    LONGEST,
    LOOK_EVERY,
    RENEW_AFTER,
    REST,
    TaskProtection,
)
from conveyor.settings import load
from conveyor.testing.clock import FakeClock
from tests.patient import SECONDS
from tests.unit.dispatch_world import idle_worker
from tests.unit.test_pipeline import staged_world

ON = {"ProtectionEnabled": True, "ExpiresInMinutes": EXPIRES_MINUTES}
OFF = {"ProtectionEnabled": False}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Agent(HTTPServer):
    """The agent of ECS, as far as it protects a task. `asked` are the bodies of its requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Asked)
        self.asked: list[Any] = []
        self.status = 200
        self.says: dict[str, Any] = {"protection": {"TaskArn": "arn:one"}}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/api/a-task"


class Asked(BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        agent = self.server
        assert isinstance(agent, Agent)
        assert self.path == "/api/a-task/task-protection/v1/state"
        assert self.headers["Content-Type"] == "application/json"
        agent.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(agent.status)
        self.end_headers()
        self.wfile.write(json.dumps(agent.says).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def agent() -> Iterator[Agent]:
    with Agent() as server:
        serving = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        yield server
        server.shutdown()
        serving.join()


class World:
    """A worker, whose `calls` are in flight, in virtual time."""

    def __init__(self, agent: Agent) -> None:
        self.calls = 0
        self.clock = FakeClock()
        self.agent = agent
        self.protection = TaskProtection(agent.url, self.clock, busy=lambda: self.calls > 0)

    async def looks(self, seconds: float) -> list[Any]:
        """Look for so long; what was asked meanwhile."""
        self.agent.asked.clear()
        for _ in range(int(seconds / LOOK_EVERY)):
            await self.protection.look()
            await self.clock.advance(LOOK_EVERY)
        return list(self.agent.asked)


async def test_a_task_is_protected_while_calls_are_in_flight(agent: Agent) -> None:
    world = World(agent)
    assert await world.looks(60.0) == []
    world.calls = 1
    assert await world.looks(60.0) == [ON]
    world.calls = 0
    assert await world.looks(60.0) == [OFF]
    world.calls = 7
    assert await world.looks(LOOK_EVERY) == [ON]


async def test_a_task_is_protected_while_answers_are_in_hand(agent: Agent) -> None:
    """Their calls have ended and are paid for, and the store may be slow to take them."""
    world, work = staged_world(0.01, at_once=1)
    work.settling = 30.0
    gateway = WatchedGateway(FakeGateway(world.clock, retry_after_cap=1.0), world.clock)
    settings = load({"ECS_AGENT_URI": agent.url}, production=True, role="worker")
    protection = _protection(gateway, idle_worker(world), settings, world.clock)
    assert protection is not None
    async with world.running():
        await world.submit("a", 3)
        await world.clock.advance(10.0)
        await protection.look()
        assert agent.asked == [ON]
        await world.clock.advance(30.0)
        await protection.look()
        assert agent.asked == [ON, OFF]


async def test_a_protection_is_renewed_before_it_expires(agent: Agent) -> None:
    world = World(agent)
    world.calls = 1

    assert RENEW_AFTER + LOOK_EVERY < EXPIRES_MINUTES * 60
    assert await world.looks(2 * RENEW_AFTER + LOOK_EVERY) == [ON, ON, ON]


async def test_a_worker_that_is_never_idle_can_be_stopped_now_and_then(agent: Agent) -> None:
    world = World(agent)
    world.calls = 1
    asked = await world.looks(LONGEST + LOOK_EVERY)

    assert asked[-1] == OFF
    assert await world.looks(REST - LOOK_EVERY) == []
    assert await world.looks(LOOK_EVERY) == [ON]


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (500, {}),
        (400, {"error": {"Code": "AccessDeniedException"}}),
        (200, {"failure": {"Reason": "DEPLOYMENT_BLOCKED"}}),
    ],
)
async def test_what_the_agent_refuses_is_asked_for_again(
    agent: Agent, status: int, says: dict[str, Any]
) -> None:
    world = World(agent)
    world.calls = 1
    good = agent.says
    agent.status, agent.says = status, says
    with pytest.raises(ConveyorError, match=f"does not protect: status {status}"):
        await world.protection.look()
    agent.status, agent.says = 200, good

    assert await world.looks(LOOK_EVERY) == [ON]


async def test_an_agent_that_is_not_there_stops_no_worker(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock(grace=0.01)
    nobody = TaskProtection("http://127.0.0.1:1/api/a-task", clock, busy=lambda: True)
    with caplog.at_level(logging.WARNING, "conveyor.roles"), anyio.fail_after(SECONDS):
        async with anyio.create_task_group() as group:
            group.start_soon(nobody.run)
            while not caplog.records:
                await clock.advance(LOOK_EVERY)
            group.cancel_scope.cancel()

    assert "ConnectionRefusedError" in caplog.text
