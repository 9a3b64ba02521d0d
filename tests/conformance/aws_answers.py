"""Services of AWS that answer what a test says, or that stand behind somebody who does."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from conveyor.clock import SystemClock
from conveyor.prod.aws.client import AwsClient
from conveyor.prod.aws.opening import open_aws
from tests.conformance.emulators import aws_options, use_test_keys

ATTEMPTS = 3
REQUEST_ID = b"x-amzn-RequestId: 52fdfc07"


def told(body: bytes, *more: bytes, status: int = 200) -> bytes:
    """An answer as a service gives it: with the id of a request."""
    return bare(body, REQUEST_ID, *more, status=status)


def told_of_rows(body: bytes, *, status: int = 200, wrote: bytes | None = None) -> bytes:
    """An answer as DynamoDB gives it, with the checksum of what it `wrote`, which was the body."""
    checksum = b"x-amz-crc32: %d" % zlib.crc32(body if wrote is None else wrote)
    return told(body, checksum, status=status)


def bare(body: bytes, *more: bytes, status: int = 200) -> bytes:
    """An answer with no headers but its length and those that are named."""
    length = b"Content-Length: %d" % len(body)
    lines = [b"HTTP/1.1 %d Told" % status, b"Connection: close", length, *more, b"", b""]
    return b"\r\n".join(lines) + body


@asynccontextmanager
async def answering(*answers: bytes, services: Sequence[str]) -> AsyncIterator[AwsClient]:
    """Open the AWS transport over a server that gives these answers, one a connection, for these
    services."""
    left = list(answers)

    async def next_one(_request: bytes) -> bytes:
        return left.pop(0)

    async with _serving(next_one) as endpoint:
        aws = await open_at(endpoint, *services)
        try:
            yield aws
        finally:
            await aws.aclose()


async def open_at(endpoint: str, *services: str) -> AwsClient:
    """Open the AWS transport over the server at an endpoint, in the place of these services. A call
    is tried ATTEMPTS times."""
    use_test_keys()
    options = aws_options(
        dynamodb_endpoint=endpoint,
        kms_endpoint=endpoint,
        s3_endpoint=endpoint,
        sqs_endpoint=endpoint,
        stepfunctions_endpoint=endpoint,
        attempts=ATTEMPTS,
        retry_base=0.0,
    )
    return await open_aws(options, SystemClock(), *services)


@dataclass(slots=True)
class Proxy:
    """A proxy before a service, which answers for it while `says` is set; `spoke` counts. The next
    request waits while it `holds` one; `has_one` is set once it does."""

    url: str
    says: bytes | None = None
    spoke: int = 0
    holds: asyncio.Event | None = None
    has_one: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def proxy(service: str) -> AsyncIterator[Proxy]:
    """A proxy before the service at this URL."""
    there = urlsplit(service)
    made = Proxy("")

    async def answer(request: bytes) -> bytes:
        if made.says is not None:
            made.spoke += 1
            return made.says
        held, made.holds = made.holds, None
        if held is not None:
            made.has_one.set()
            await held.wait()
        head, _, body = request.partition(b"\r\n\r\n")
        reader, writer = await asyncio.open_connection(there.hostname, there.port)
        writer.write(head + b"\r\nConnection: close\r\n\r\n" + body)
        answered = await reader.read()
        writer.close()
        return answered

    async with _serving(answer) as made.url:
        yield made


@asynccontextmanager
async def _serving(answer: Callable[[bytes], Awaitable[bytes]]) -> AsyncIterator[str]:
    """A server on loopback, and its URL: one request a connection, and the answer to it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
        writer.write(await answer(head + await reader.readexactly(int(length or 0))))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
