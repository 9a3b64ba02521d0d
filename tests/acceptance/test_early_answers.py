"""Answers that come before a request has ended: every client hears them."""

from __future__ import annotations

import io
import select
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import anyio
import httpx
import pytest
from zenrows import ZenRowsBatchClient
from zenrows.batch.errors import BatchAPIError

from conveyor.client.api import connect
from conveyor.client.errors import ServerRefused
from conveyor.client.submit import PIECE_BYTES
from conveyor.clock import SystemClock
from tests.acceptance.support_boot import Booted, boot
from tests.acceptance.support_cli import CLIENT, Ran
from tests.patient import SECONDS

pytestmark = pytest.mark.server

MAX_BYTES = 100_000
LARGE = 40 * 1_024 * 1_024
"""More than sockets hold, so that it cannot be sent before the answer is there."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Booted]:
    directory = tmp_path_factory.mktemp("early")
    limits = {"max_input_bytes": MAX_BYTES, "max_request_bytes": MAX_BYTES}
    with boot(directory, "--gateway", "fake", "--log-level", "warning", **limits) as booted:
        yield booted


@pytest.fixture
def client(server: Booted) -> Iterator[ZenRowsBatchClient]:
    with ZenRowsBatchClient(api_key="key", base_url=server.api) as opened:
        yield opened


def test_the_published_client_hears_that_a_file_is_too_large(client: ZenRowsBatchClient) -> None:
    with pytest.raises(BatchAPIError) as caught:
        client.upload_csv(io.BytesIO(b"x" * LARGE), fields={"url": 0})

    # It keeps an answer of the store as it came, since that need not be ours.
    assert caught.value.status_code == 413
    assert b"at most 100000 bytes (CONVEYOR_MAX_INPUT_BYTES)" in caught.value.raw


def test_the_published_client_hears_that_a_submit_is_too_large(client: ZenRowsBatchClient) -> None:
    with pytest.raises(BatchAPIError) as caught:
        client.submit_regular([f"https://a.test/{'x' * 2_000}{number}" for number in range(15_000)])

    assert (caught.value.status_code, caught.value.code) == (413, "payload_too_large")


@pytest.mark.parametrize("announced", [True, False])
def test_a_plain_client_hears_it_and_the_connection_is_closed(
    server: Booted, client: ZenRowsBatchClient, announced: bool
) -> None:
    link = client.create_job_input({"type": "csv", "csv": {"fields": {"url": 0}}}).upload
    pieces = (b"x" * 65_536 for _ in range(LARGE // 65_536))
    content: bytes | Iterator[bytes] = b"x" * LARGE if announced else pieces

    answer = httpx.put(
        str(link.url), content=content, headers={"Content-Type": "text/csv"}, timeout=SECONDS
    )

    assert answer.status_code == 413
    assert answer.headers["Connection"] == "close"
    assert answer.json()["code"] == "payload_too_large"


def test_our_client_hears_it_at_once(server: Booted) -> None:
    async def upload() -> str:
        sends = 0

        async def content() -> AsyncIterator[bytes]:
            nonlocal sends
            sends += 1
            for _ in range(LARGE // PIECE_BYTES):
                yield b"x" * PIECE_BYTES

        async with connect(server.api, "key", SystemClock()) as api:
            slot = await api.create_input({"type": "urls"})
            assert slot.upload.max_bytes == MAX_BYTES
            with pytest.raises(ServerRefused) as caught:
                await api.upload(slot.upload, LARGE, content)
        assert sends == 1
        return str(caught.value)

    assert "at most 100000 bytes (CONVEYOR_MAX_INPUT_BYTES)" in anyio.run(upload)


def test_the_command_line_refuses_the_file_before_it_is_sent(
    server: Booted, tmp_path: Path
) -> None:
    path = tmp_path / "large.csv"
    fitting = b"https://a.test/\n" * (MAX_BYTES // 16)
    path.write_bytes(fitting + b"\n\n")

    refused = submitted(path, server)
    path.write_bytes(fitting)

    assert refused.code == 1
    assert refused.err == [
        f"conveyor: {path} has 100,002 bytes, and the server takes 100,000: split it, or raise "
        "CONVEYOR_MAX_INPUT_BYTES of the server; nothing was sent"
    ]
    assert submitted(path, server).code == 0


def submitted(path: Path, server: Booted) -> Ran:
    command = [*CLIENT, "submit", str(path), "--server", server.api]
    return Ran(subprocess.run(command, capture_output=True, text=True, timeout=60, check=False))


UPLOADS = 20
EACH = 15 * 1_024 * 1_024
MEMORY = 32 * 1_024 * 1_024


@pytest.mark.parametrize("announced", [True, False])
def test_bodies_that_are_held_before_their_last_byte_stay_within_the_memory(
    tmp_path: Path, announced: bool
) -> None:
    limits = {"max_body_memory": MEMORY, "max_caller_body_memory": MEMORY}
    flags = ("--gateway", "fake", "--log-level", "error")
    with boot(tmp_path, *flags, **limits) as server, ExitStack() as open_ones:
        before = server.memory("VmHWM")
        uploads = [
            open_ones.enter_context(socket.create_connection(("127.0.0.1", server.port), SECONDS))
            for _ in range(UPLOADS)
        ]
        for number, upload in enumerate(uploads):
            send_but_one_byte(upload, key=f"k{number % 5}", announced=announced)
        refused = [upload for upload in uploads if answered(upload, b"503")]

        assert UPLOADS - MEMORY // EACH - 1 <= len(refused) < UPLOADS
        # Refused bodies are let go before their connections are.
        assert server.memory("VmHWM") - before < 2 * MEMORY


def send_but_one_byte(upload: socket.socket, *, key: str, announced: bool) -> None:
    """Send a submit of EACH bytes, without the last one."""
    length = f"Content-Length: {EACH}" if announced else "Transfer-Encoding: chunked"
    head = f"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {key}\r\n{length}\r\n"
    upload.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n")
    if not announced:
        upload.sendall(f"{EACH:x}\r\n".encode())
    upload.sendall(b" " * (EACH - 1))


def answered(upload: socket.socket, status: bytes) -> bool:
    """Tell whether the server has answered, which must be with this status."""
    readable, _, _ = select.select([upload], [], [], 0.2)
    if not readable:
        return False
    start = upload.recv(65_536)
    assert start.startswith(b"HTTP/1.1 " + status), start
    assert b"retry-after: 1" in start.lower()
    return True
