"""Calls to a service in a bad way, for a while: nothing stays open, nothing is kept."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest

from bench.processes import memory
from conveyor.domain.errors import ConveyorError
from conveyor.prod.aws.client import AwsClient
from tests.unit.aws_stub import (
    Cut,
    Seen,
    Stub,
    calling,
    eventually,
    give_keys,
    nothing,
    own,
    said,
    serving,
    summed,
)

CALLERS = 48
PARTS = 4
GROWTH = 1.05
"""The last part's memory at most, as a multiple of the one before it."""
ALLOWED_MB = 8.0
"""Memory that an allocator may keep besides."""
THROTTLED = {
    "json": said(b'{"__type":"a#ThrottlingException"}', status=429),
    "xml": said(b"<Error><Code>SlowDown</Code></Error>", status=429),
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class BadService:
    """Closes, throttles, breaks, cuts and hangs at random; answers more often than not."""

    def __init__(self, chance: random.Random, patience: float) -> None:
        self.done: Counter[str] = Counter()
        self.stub = Stub(self.answer)
        self._chance = chance
        self._patience = patience

    async def answer(self, seen: Seen) -> bytes:
        self.stub.seen.clear()
        act = self._chance.choices(
            ("answer", "close", "throttle", "break", "cut", "end", "hang"),
            (70, 8, 5, 5, 5, 5, 2),
        )[0]
        self.done[act] += 1
        whole = await self._whole(seen)
        if act == "close":
            return b""
        if act == "throttle":
            return THROTTLED["json" if "x-amz-target" in seen.fields else "xml"]
        if act == "break":
            return said(b"<html>", status=self._chance.choice((500, 502, 503)))
        if act == "cut":
            return Cut(whole[: self._chance.randrange(1, len(whole))])
        if act == "end":
            return Cut(whole)
        if act == "hang":
            await anyio.sleep(1.5 * self._patience)
        return whole

    async def _whole(self, seen: Seen) -> bytes:
        if seen.method == "GET":
            return said(b"x" * self._chance.choice((0, 900, 90_000, 900_000)), b'ETag: "1"')
        if "x-amz-target" in seen.fields:
            return summed(b'{"Item":{"a":{"B":"AP8="}}}')
        return await nothing(seen)


async def some_call(aws: AwsClient, chance: random.Random) -> None:
    """Make one call of any kind; some bodies are not read to their end."""
    row: dict[str, Any] = {"TableName": "t", "Key": {}}
    where = {"Bucket": "bucket", "Key": "k"}
    kind = chance.randrange(5)
    if kind == 0:
        await aws.call("dynamodb", "get_item", row)
    elif kind == 1:
        await aws.call("dynamodb", "put_item", {"TableName": "t", "Item": {"a": {"B": b"\x00"}}})
    elif kind == 2:
        await aws.call("sqs", "receive_message", {"QueueUrl": "q"})
    elif kind == 3:
        size = chance.choice((10, 10_000, 400_000))
        await aws.call("s3", "put_object", {**where, "Body": b"x" * size})
    else:
        body = (await aws.call("s3", "get_object", where))["Body"]
        try:
            while await body.read(65_536) and chance.random() < 0.9:
                pass
        finally:
            body.close()


async def soak(aws: AwsClient, chance: random.Random, seconds: float) -> list[float]:
    """Call for so long, cancelling now and then; return the memory of each part, in MB."""
    ends = time.monotonic() + seconds
    found: list[list[float]] = [[] for _ in range(PARTS)]

    async def call_on() -> None:
        while time.monotonic() < ends:
            patience = chance.choice((0.02, 10.0, 10.0, 10.0))
            with anyio.move_on_after(patience):
                try:
                    await some_call(aws, chance)
                except ConveyorError:
                    continue

    async with anyio.create_task_group() as group:
        for _ in range(CALLERS):
            group.start_soon(call_on)
        while (left := ends - time.monotonic()) > 0:
            found[min(PARTS - 1, int(PARTS * (1 - left / seconds)))].append(_megabytes())
            await anyio.sleep(seconds / 100)
    return [sum(part) / len(part) for part in found]


def _megabytes() -> float:
    return memory(os.getpid(), "VmRSS") / 1_048_576


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(12.0, marks=[pytest.mark.extended, pytest.mark.slow]),
        pytest.param(600.0, marks=[pytest.mark.full, pytest.mark.timeout(1_200)]),
    ],
)
async def test_a_service_in_a_bad_way_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    give_keys(monkeypatch)
    chance = random.Random(18)
    patience = 0.5
    service = BadService(chance, patience)
    async with serving(service.stub) as stub:
        options: dict[str, Any] = {"attempts": 3, "retry_base": 0.002, "connect_timeout": 5.0}
        async with calling(stub.url, read_timeout=patience, **options) as aws:
            await soak(aws, chance, seconds / 10)
            before = descriptors() - own(aws).open_connections - stub.open
            tasks = len(asyncio.all_tasks()) - stub.open
            parts = await soak(aws, chance, seconds)
            outcomes = {outcome for _, _, outcome in aws.stats.calls}
            # What was cancelled in flight has ended, too.
            bound = own(aws).open_connections
            await eventually(lambda: len(asyncio.all_tasks()) - stub.open <= tasks)
        assert own(aws).open_connections == 0
        await eventually(lambda: stub.open == 0)
        await eventually(lambda: descriptors() <= before)
    assert service.done.keys() >= {"answer", "close", "throttle", "break", "cut", "end", "hang"}
    assert outcomes >= {"ok", "failed"}
    assert bound <= 16 + 16 + 32 + 16 + 256
    assert parts[-1] <= GROWTH * parts[-2] + ALLOWED_MB, parts
