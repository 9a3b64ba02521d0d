"""A run is watched by its stream where the server has one, and by polls elsewhere."""

from __future__ import annotations

import io
import json
from typing import Any

import anyio.lowlevel
import pytest

from conveyor.client.api import LONGEST_LINE, STREAM_TYPE, connect
from conveyor.client.progress import LineView
from conveyor.client.watch import follow
from conveyor.client.wire import RunReply
from tests.unit.scripted_server import KEY, RUN, Answer, Pace, Script, ok, problem, scripted

LIVE = RunReply(run_id="R", job_id="J", status="running")
HALF = {**RUN, "stats": {"total": 2, "completed": 1, "successful": 1}}
DONE = {**RUN, "status": "completed", "stats": {"total": 2, "completed": 2, "successful": 2}}
STREAM, POLL = "/v1/jobs/J/runs/R/events", "/v1/jobs/J/runs/R"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # trio warns of httpx's own generators, which it leaves open


class YieldingPace(Pace):
    """A pace that lets others run while it sleeps."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds)
        await anyio.lowlevel.checkpoint()


def stream(*events: tuple[str, int, Any], end: str = "", kind: str = STREAM_TYPE) -> Answer:
    text = "retry: 2000\n\n:\n\n" + "".join(
        f"event: {name}\nid: {number}\ndata: {json.dumps(data)}\n\n"
        for name, number, data in events
    )
    return 200, {"Content-Type": kind}, (text + end).encode()


async def watched(*answers: Answer) -> tuple[RunReply, Script, list[str]]:
    """The run as it ended, the server that was asked, and the lines that were shown."""
    sink = io.StringIO()
    with scripted(*answers) as server:
        async with connect(server.origin, KEY, YieldingPace()) as api:
            run = await follow(api, LIVE, LineView(sink))
    return run, server, sink.getvalue().splitlines()


def paths(server: Script) -> list[str]:
    return [told.path for told in server.told]


async def test_a_stream_is_followed_to_its_end_without_a_poll() -> None:
    told = stream(("run", 1, HALF), ("run", 2, DONE), ("end", 2, {"run_id": "R"}))
    run, server, lines = await watched(told)
    assert run.succeeded
    assert paths(server) == [STREAM]
    assert lines[-1].startswith("completed: 2/2 done, 2 ok")


class ClosedPipe(io.StringIO):
    """A stream whose reader leaves after the first line."""

    def write(self, text: str) -> int:
        if "\n" in self.getvalue():
            raise BrokenPipeError
        return super().write(text)


async def test_a_reader_that_leaves_in_the_middle_of_a_stream_is_no_group_of_errors() -> None:
    with scripted(stream(("run", 1, HALF), ("run", 2, DONE))) as server:
        async with connect(server.origin, KEY, YieldingPace()) as api:
            with pytest.raises(BrokenPipeError):
                await follow(api, LIVE, LineView(ClosedPipe()))


@pytest.mark.parametrize(
    "answer",
    [
        problem(404, "not_found", detail="no such path"),
        problem(429, "rate_limited"),
        (200, {"Content-Type": "text/html"}, b"<html>"),
        ok(HALF),
        stream(end="data: " + "x" * (LONGEST_LINE + 1)),
        stream(("run", 1, {"run_id": 5})),
    ],
    ids=["older server", "too many", "page", "json", "endless line", "no run"],
)
async def test_without_a_stream_the_run_is_polled(answer: Answer) -> None:
    run, server, _lines = await watched(answer, ok(HALF), ok(HALF), ok(DONE))
    assert run.succeeded
    assert paths(server) == [STREAM, POLL, POLL, POLL]


@pytest.mark.parametrize("last", [("bye", 8, {}), ("run", 8, HALF)])
async def test_a_stream_that_was_cut_is_taken_up_where_it_was(last: tuple[str, int, Any]) -> None:
    cut = stream(("run", 7, HALF), last, end="event: run\nda")
    run, server, _lines = await watched(cut, ok(HALF), stream(("run", 9, DONE)))
    assert run.succeeded
    assert paths(server) == [STREAM, POLL, STREAM]
    assert server.told[0].headers.get("Last-Event-ID") is None
    assert server.told[2].headers["Last-Event-ID"] == "8"


async def test_a_stopping_server_is_asked_again() -> None:
    busy = problem(503, "unavailable")
    run, server, _lines = await watched(busy, ok(HALF), stream(("run", 9, DONE)))
    assert run.succeeded
    assert paths(server) == [STREAM, POLL, STREAM]
