"""A server in the place of AWS, for tests of the calls to it."""

from __future__ import annotations

import asyncio
import socket
import ssl
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import anyio
import pytest
from botocore.credentials import Credentials

from conveyor.clock import SystemClock
from conveyor.prod.aws.boto import make_clients
from conveyor.prod.aws.calls import AwsOptions
from conveyor.prod.aws.client import AwsClient
from conveyor.prod.aws.http import HttpCarrier
from conveyor.prod.aws.opening import over_clients
from tests.patient import SECONDS

KEYS = Credentials("AKID", "secret", "a token")
SERVICES = ("dynamodb", "sqs", "s3")


@dataclass(frozen=True, slots=True)
class Seen:
    """One request. Fields are by names in lowercase."""

    method: str
    target: str
    fields: dict[str, str]
    body: bytes


class Cut(bytes):
    """Bytes after which the connection ends."""


Answering = Callable[[Seen], Awaitable[bytes]]
"""Return a whole answer; b"" closes the connection without one."""


def said(body: bytes, *more: bytes, status: int = 200) -> bytes:
    """An answer of any service, with a checksum as DynamoDB sends it."""
    lines = [
        b"HTTP/1.1 %d Said" % status,
        b"x-amzn-RequestId: 1",
        b"x-amz-request-id: 1",
        b"Content-Length: %d" % len(body),
        *more,
    ]
    return b"\r\n".join([*lines, b"", b""]) + body


def summed(body: bytes, *, status: int = 200) -> bytes:
    """An answer of DynamoDB, with its checksum."""
    return said(body, b"x-amz-crc32: %d" % zlib.crc32(body), status=status)


async def nothing(seen: Seen) -> bytes:
    """Answer everything with nothing."""
    if "x-amz-target" in seen.fields:
        return said(b"{}")
    return said(b"", b'ETag: "1"')


@dataclass(slots=True)
class Stub:
    """A server on loopback. `connections` counts all that were ever made, `open` those there are,
    `most` the maximum at a time."""

    answer: Answering = nothing
    url: str = ""
    seen: list[Seen] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    most: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends."""
        self.connections += 1
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            while answer := await self._one(reader):
                writer.write(answer)
                await writer.drain()
                if isinstance(answer, Cut):
                    writer.write_eof()
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has ended it
        finally:
            self.open -= 1
            writer.close()

    async def _one(self, reader: asyncio.StreamReader) -> bytes:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.rstrip().split("\r\n")
        method, target, _ = first.split(" ")
        fields = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        body = await reader.readexactly(int(fields.get("content-length", 0)))
        self.seen.append(Seen(method, target, fields, body))
        return await self.answer(self.seen[-1])


@cache
def _listening() -> socket.socket:
    """The one port of all stubs of this process: a client of boto3 takes a second to make."""
    return socket.create_server(("127.0.0.1", 0))


@cache
def _client(url: str, service: str) -> Any:
    options = AwsOptions(dynamodb_endpoint=url, sqs_endpoint=url, s3_endpoint=url)
    return make_clients(options, (service,))[0][service]


@asynccontextmanager
async def serving(stub: Stub, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[Stub]:
    """Let a stub listen, one at a time."""
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(stub.serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async with await asyncio.start_server(accept, sock=_listening().dup(), ssl=tls) as server:
        scheme = "http" if tls is None else "https"
        stub.url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield stub
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(3):  # turns of the loop, in which it closes their sockets
            await asyncio.sleep(0)


@asynccontextmanager
async def calling(
    url: str,
    *,
    services: Sequence[str] = SERVICES,
    keys: Credentials | None = KEYS,
    fresh: bool = False,
    **options: Any,
) -> AsyncIterator[AwsClient]:
    """Open calls to a server in the place of the services; `fresh` makes clients for the present
    environment."""
    made = AwsOptions(**{"attempts": 1, "retry_base": 0.0, **options})
    make = _client.__wrapped__ if fresh else _client
    clients = {service: make(url, service) for service in services}
    aws = over_clients(clients, made, SystemClock(), credentials=keys)
    try:
        yield aws
    finally:
        await aws.aclose()


def own(aws: AwsClient) -> HttpCarrier:
    """The carrier of its own that a client has."""
    assert isinstance(aws.carrier, HttpCarrier)
    return aws.carrier


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    with anyio.fail_after(SECONDS):
        while not condition():  # noqa: ASYNC110  (a socket sets no event)
            await anyio.sleep(0.001)


def give_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this process keys that no service asks about."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a token")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
