"""The memory for request bodies is bounded, for all callers and for each."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import httpx
import pytest
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from conveyor.http.request import BODY_SPARE, BodyLimits, BodyMemory, read_body
from conveyor.simulation.loop import VirtualTime, run
from tests.unit.http_api import Api, open_api, problem_of

SIZE = 200_000
COUNTED = SIZE - BODY_SPARE


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def body(size: int = SIZE) -> bytes:
    document = json.dumps({"tasks": [{"url": "https://a.test/"}]}).encode()
    return document + b" " * (size - len(document))


class Slow:
    """A submit whose last byte is held back until `go`."""

    def __init__(
        self, client: httpx.AsyncClient, content: bytes | None = None, *, announced: bool = True
    ) -> None:
        self._client = client
        self._content = body() if content is None else content
        self._headers = {"Content-Type": "application/json"}
        if announced:
            self._headers["Content-Length"] = str(len(self._content))
        self.go = anyio.Event()
        self.held = anyio.Event()
        self.responses: list[httpx.Response] = []

    async def _pieces(self) -> AsyncIterator[bytes]:
        yield self._content[:-1]
        self.held.set()
        await self.go.wait()
        yield self._content[-1:]

    async def send(self) -> None:
        """Send it whole."""
        response = await self._client.post(
            "/v1/jobs", content=self._pieces(), headers=self._headers
        )
        self.responses.append(response)
        self.held.set()


async def ended(api: Api, slow: list[Slow], *, refused: int) -> None:
    """Send all at once; let go once each is held or refused. Check how many were refused."""
    async with anyio.create_task_group() as group:
        for one in slow:
            group.start_soon(one.send)
            await one.held.wait()
        early = [response for one in slow for response in one.responses]
        assert len(early) == refused
        for response in early:
            problem = problem_of(response, status=503, code="unavailable")
            assert response.headers["Retry-After"] == "1"
            assert "the memory for bodies" in problem["detail"]
        small = await api.client.post("/v1/jobs", content=body(BODY_SPARE), headers=JSON)
        assert small.status_code == 201
        for one in slow:
            one.go.set()
    statuses = sorted(response.status_code for one in slow for response in one.responses)
    assert statuses == [201] * (len(slow) - refused) + [503] * refused


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("announced", [True, False])
async def test_one_caller_has_a_share(tmp_path: Path, announced: bool) -> None:
    memory = BodyMemory(limit=10 * COUNTED, caller_limit=2 * COUNTED)
    async with open_api(tmp_path / "data", body_memory=memory) as api:
        mine = [Slow(api.client, announced=announced) for _ in range(3)]
        await ended(api, [*mine, Slow(api.foreign, announced=announced)], refused=1)
        assert mine[2].responses[0].status_code == 503
        # What was held is given back.
        again = [Slow(api.client, announced=announced) for _ in range(2)]
        await ended(api, again, refused=0)


async def test_all_callers_have_a_share_together(tmp_path: Path) -> None:
    memory = BodyMemory(limit=2 * COUNTED, caller_limit=2 * COUNTED)
    async with open_api(tmp_path / "data", body_memory=memory) as api:
        slow = [Slow(api.client), Slow(api.foreign), Slow(api.client), Slow(api.foreign)]
        await ended(api, slow, refused=2)


async def test_one_body_alone_always_has_room(tmp_path: Path) -> None:
    memory = BodyMemory(limit=1_024, caller_limit=1_024)
    async with open_api(tmp_path / "data", body_memory=memory) as api:
        await ended(api, [Slow(api.client), Slow(api.foreign)], refused=1)
        await ended(api, [Slow(api.foreign)], refused=0)


async def test_nobody_without_a_key_takes_memory(tmp_path: Path) -> None:
    memory = BodyMemory(limit=1_024, caller_limit=1_024)
    async with open_api(tmp_path / "data", body_memory=memory) as api:
        stranger = Slow(api.bare)
        async with anyio.create_task_group() as group:
            group.start_soon(stranger.send)
            await stranger.held.wait()
            assert [response.status_code for response in stranger.responses] == [401]
            await ended(api, [Slow(api.client)], refused=0)


async def test_a_body_that_stops_coming_gives_its_memory_back(tmp_path: Path) -> None:
    memory = BodyMemory(limit=2 * COUNTED, caller_limit=2 * COUNTED)
    async with open_api(tmp_path / "data", body_memory=memory, body_seconds=0.3) as api:
        stalled = [Slow(api.client), Slow(api.foreign)]
        async with anyio.create_task_group() as group:
            for one in stalled:
                group.start_soon(one.send)
        for one in stalled:
            [response] = one.responses
            problem = problem_of(response, status=408, code="request_timeout")
            assert "CONVEYOR_BODY_TIMEOUT" in problem["detail"]
            assert response.headers["Connection"] == "close"
        whole = [await api.client.post("/v1/jobs", content=body(), headers=JSON) for _ in range(2)]
        assert [response.status_code for response in whole] == [201, 201]
        assert memory._held == 0


@pytest.mark.parametrize("announced", [True, False])
def test_a_slow_but_steady_body_passes(announced: bool) -> None:
    async def main(time: VirtualTime) -> list[bytes]:
        left = [b"a"] * 100

        async def receive() -> Message:
            await time.sleep(29.0)
            if not left:
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": left.pop(), "more_body": bool(left)}

        async def send(_message: Message) -> None:
            raise AssertionError("nothing is answered")

        found: list[bytes] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            found.extend((await read_body(Request(scope, receive))).pieces)
            await time.sleep(3_600.0)  # a long answer is no silence of the client's
            assert (await receive())["type"] == "http.disconnect"

        headers = [(b"content-length", b"100")] if announced else []
        scope = {"type": "http", "method": "POST", "path": "/v1/jobs", "headers": headers}
        await BodyLimits(app, limit=1_000)(scope, receive, send)
        return found

    assert run(main, backend="asyncio") == [b"a"] * 100
