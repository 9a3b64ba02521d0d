"""Bodies over TLS: what goes to S3 for each, through a front that records it."""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from conveyor.clock import SystemClock
from conveyor.ports.blobs import BodyRefused
from conveyor.prod.aws.opening import open_aws
from conveyor.prod.s3.blobs import PART, S3Blobs
from conveyor.records.blob_keys import run_prefix
from tests.conformance.emulators import REGION, address, aws_options
from tests.conformance.s3_bucket import empty_bucket
from tests.nasty.certificate import Certificate

KEY = f"{run_prefix('JOB', 'RUN', 30)}BODY"
_PIECE = 65_536


class Front:
    """Ends TLS in front of a server, and keeps what clients send. `damage`: bytes of requests to
    replace on the way, and by what."""

    def __init__(self, behind: str) -> None:
        parts = urlsplit(behind)
        self.damage = (b"", b"")
        self._behind = (parts.hostname or "", parts.port or 80)
        self._sent: list[bytearray] = []
        self._open: set[asyncio.Task[None]] = set()

    async def end(self) -> None:
        """End every connection."""
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        for _ in range(3):  # turns of the loop, in which it closes their sockets
            await asyncio.sleep(0)

    def puts(self) -> list[dict[str, str]]:
        """Return the fields of the head of each PUT, by their names in small letters."""
        heads = [
            bytes(piece.partition(b"\r\n\r\n")[0])
            for sent in self._sent
            for piece in bytes(sent).split(b"PUT /")[1:]
        ]
        return [
            {
                name.lower(): value.strip()
                for name, _, value in (
                    line.partition(":") for line in head.decode("latin-1").split("\r\n")[1:]
                )
            }
            for head in heads
        ]

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass a connection on until its client ends it."""
        task = asyncio.create_task(self._forward(reader, writer))
        self._open.add(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._behind)
        sent = bytearray()
        self._sent.append(sent)
        answers = asyncio.create_task(_pump(there, writer))
        try:
            while piece := await reader.read(_PIECE):
                sent += piece
                back.write(piece.replace(*self.damage) if self.damage[0] else piece)
                await back.drain()
        finally:
            answers.cancel()
            for end in (back, writer):
                end.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(_PIECE):
        writer.write(piece)
        await writer.drain()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Certificate:
    made = Certificate(tmp_path)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(made.authority))
    return made


@pytest.fixture
async def front(certificate: Certificate) -> AsyncIterator[tuple[Front, str]]:
    """A front before the tests' S3, and its URL."""
    recording = Front(address("CONVEYOR_TEST_S3"))
    server = await asyncio.start_server(
        recording.accept, "127.0.0.1", 0, ssl=certificate.server_context()
    )
    async with server:
        yield recording, f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await recording.end()


@pytest.fixture
async def blobs(front: tuple[Front, str]) -> AsyncIterator[S3Blobs]:
    """An empty bucket, behind that front."""
    clock = SystemClock()
    async with empty_bucket() as (_, bucket):
        aws = await open_aws(aws_options(s3_endpoint=front[1], region=REGION), clock, "s3")
        yield S3Blobs(aws, bucket=bucket, clock=clock)
        await aws.aclose()


def checksum(body: bytes) -> str:
    """Return the CRC-32 of a body as S3 writes it."""
    return b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()


async def test_a_body_goes_with_its_head_signed_and_with_a_checksum(
    blobs: S3Blobs, front: tuple[Front, str]
) -> None:
    body = b"<p>a page</p>" * 600
    await blobs.put(KEY, body)
    [sent] = front[0].puts()
    assert not {"expect", "transfer-encoding", "x-amz-trailer", "content-encoding"} & sent.keys()
    assert sent["content-length"] == str(len(body))
    assert sent["x-amz-checksum-crc32"] == checksum(body)
    assert sent["x-amz-content-sha256"] == hashlib.sha256(body).hexdigest()
    reader = await blobs.open(KEY)
    assert reader is not None
    assert b"".join([piece async for piece in reader]) == body


async def test_so_do_the_parts_of_a_large_body(blobs: S3Blobs, front: tuple[Front, str]) -> None:
    parts = [b"a" * PART, b"b" * 10]
    await blobs.put(KEY, b"".join(parts))
    sent = front[0].puts()
    assert {one["x-amz-checksum-crc32"] for one in sent} == {checksum(part) for part in parts}
    assert not [one for one in sent if {"expect", "transfer-encoding"} & one.keys()]


async def test_a_body_that_was_damaged_on_its_way_is_refused(
    blobs: S3Blobs, front: tuple[Front, str]
) -> None:
    front[0].damage = (b"a page", b"a PAGE")
    with pytest.raises(BodyRefused):
        await blobs.put(KEY, b"<p>a page</p>")
    assert await blobs.open(KEY) is None
