"""Many streams of one run cost the store what one costs, and little memory each."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from conveyor.service.progress import PACE
from tests.acceptance.support_boot import Booted, boot
from tests.acceptance.support_calls import KEY, Caller, Json
from tests.acceptance.support_events import Event, events_of, metric, open_socket, path_of
from tests.acceptance.support_wire import eventually, target

pytestmark = [pytest.mark.server, pytest.mark.extended, pytest.mark.slow]

TASKS = 5_000
MOST = 1_000
SMALL = 64 * 1_024


@pytest.fixture(autouse=True)
def files() -> Iterator[None]:
    """Enough open files for so many connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4 * MOST), hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def told(api: str, path: str) -> list[Event]:
    """All events of a stream."""
    where = urlsplit(api)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    head = f"GET {where.path}{path} HTTP/1.0\r\nHost: {where.netloc}\r\nX-API-Key: {KEY}\r\n\r\n"
    writer.write(head.encode())
    await reader.readuntil(b"\r\n\r\n")
    chunks = [chunk async for chunk in _chunks(reader)]
    writer.close()
    return [event for event in events_of(chunks) if event.name]


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readline(), 16):
        yield await reader.readexactly(size)
        await reader.readline()


def paused_job(caller: Caller) -> Json:
    """A job whose tasks wait until it is resumed."""
    job = caller.submit(status="open")
    caller.http.post(f"/jobs/{job['job_id']}/pause").raise_for_status()
    pages = [{"url": target(f"{number}", delay=0.05)} for number in range(TASKS)]
    added = caller.http.post(
        f"/jobs/{job['job_id']}/tasks", json={"tasks": pages, "last_batch": True}
    )
    added.raise_for_status()
    return job


async def watched(server: Booted, caller: Caller, count: int) -> tuple[float, list[list[Event]]]:
    """Let so many watch a run to its end; return its reads a second, and the events of each."""
    job = paused_job(caller)
    readers = [asyncio.create_task(told(server.api, path_of(job))) for _ in range(count)]
    while metric(server.origin, "streams") < count:
        await asyncio.wait(readers, timeout=0.05)
    before, began = metric(server.origin, "stream_reads_total"), time.monotonic()
    caller.http.post(f"/jobs/{job['job_id']}/resume").raise_for_status()
    streams = await asyncio.gather(*readers)
    reads = metric(server.origin, "stream_reads_total") - before
    return reads / (time.monotonic() - began), streams


def test_a_thousand_streams_cost_the_reads_of_one(tmp_path: Path) -> None:
    limits = {"max_streams": MOST, "max_caller_streams": MOST}
    rates: list[float] = []
    with boot(tmp_path, "--gateway", "fake", **limits) as server, Caller(server.api) as caller:
        for count in (1, 100, MOST):
            rate, streams = asyncio.run(watched(server, caller, count))
            rates.append(rate)
            for *runs, end in streams:
                stats = [event.data["stats"] for event in runs]
                done = [one["completed"] for one in stats]
                assert end.name == "end"
                assert (done[-1], stats[-1]["total"]) == (TASKS, TASKS)
                assert done == sorted(done)
                assert all(one["completed"] <= one["total"] for one in stats)
    # A busy server looks more rarely; the fake clock shows that the looks are as many.
    assert max(rates) <= 1.1 / PACE, rates


def test_readers_that_do_not_read_cost_little_memory(tmp_path: Path) -> None:
    limits = {"max_streams": MOST, "max_caller_streams": MOST}
    with (
        boot(tmp_path, "--gateway", "fake", **limits) as server,
        Caller(server.api) as caller,
        ExitStack() as stack,
    ):
        jobs = [paused_job(caller) for _ in range(2)]
        caller.http.post(f"/jobs/{jobs[0]['job_id']}/resume").raise_for_status()
        caller.wait(jobs[0])
        before = server.memory("VmRSS")
        for _ in range(MOST):
            stack.enter_context(open_socket(server.api, path_of(jobs[1])))
        eventually(lambda: metric(server.origin, "streams") == MOST or None, "all are open")
        caller.http.post(f"/jobs/{jobs[1]['job_id']}/resume").raise_for_status()
        caller.wait(jobs[1])
        after = server.memory("VmRSS")
    assert (after - before) / MOST < SMALL, (before, after)
