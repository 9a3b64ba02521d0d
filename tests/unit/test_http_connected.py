"""Long work is done for as long as the client waits for it; its body is kept as it came."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from starlette.requests import Request
from starlette.types import Message

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.http.request import ClientGone, ConnectionGuard, read_body
from conveyor.http.routes_files import BodyResponse, stored_response
from tests.patient import SECONDS


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_work_goes_on_while_the_client_is_there() -> None:
    async def receive() -> Message:
        await anyio.sleep_forever()
        raise AssertionError

    async def fail() -> int:
        raise ConveyorError(ErrorCode.CONFLICT, "no")

    async def work() -> int:
        return 7

    connected = ConnectionGuard(Request({"type": "http"}, receive))

    assert await connected(work) == 7
    with pytest.raises(ConveyorError, match="no"):
        await connected(fail)


async def test_work_is_given_up_where_the_client_hangs_up() -> None:
    ended: list[str] = []
    gone = anyio.Event()

    async def receive() -> Message:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def work() -> None:
        gone.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("cancelled")

    with pytest.raises(ClientGone):
        await ConnectionGuard(Request({"type": "http"}, receive))(work)
    assert ended == ["cancelled"]


async def test_a_body_is_fetched_for_as_long_as_its_client_is_there() -> None:
    gone = anyio.Event()
    ended: list[int] = []

    async def receive() -> Message:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def pieces() -> AsyncIterator[bytes]:
        count = 0
        try:
            while True:
                count += 1
                yield b"piece"
        finally:
            ended.append(count)

    async def send(message: Message) -> None:
        # As our server takes what nobody will get.
        await anyio.lowlevel.checkpoint()
        if message.get("body"):
            gone.set()

    with anyio.fail_after(SECONDS):
        await BodyResponse(pieces(), headers={})({"type": "http"}, receive, send)
    assert len(ended) == 1


@pytest.mark.parametrize("error", [None, ConveyorError(ErrorCode.UNAVAILABLE, "broke off")])
async def test_a_body_ends_with_its_last_piece_or_its_error(error: Exception | None) -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        await anyio.sleep_forever()
        raise AssertionError

    async def pieces() -> AsyncIterator[bytes]:
        yield b"piece"
        if error is not None:
            raise error

    async def send(message: Message) -> None:
        sent.append(message)

    answering = BodyResponse(pieces(), headers={})({"type": "http"}, receive, send)
    if error is None:
        await answering
    else:
        with pytest.raises(ConveyorError, match="broke off"):
            await answering
    assert [message.get("more_body", False) for message in sent[1:]] == [True, False][
        : len(sent) - 1
    ]
    assert len(sent) == (3 if error is None else 2)


@pytest.mark.parametrize(("pieces", "messages"), [([b""], 1), ([b"whole"], 1), ([b"a", b"bc"], 3)])
async def test_a_body_that_is_there_at_once_is_sent_at_once(
    pieces: list[bytes], messages: int
) -> None:
    sent: list[Message] = []
    closed: list[bool] = []

    async def receive() -> Message:
        await anyio.sleep_forever()
        raise AssertionError

    async def body() -> AsyncIterator[bytes]:
        try:
            for piece in pieces:
                if piece:
                    yield piece
        finally:
            closed.append(True)

    async def send(message: Message) -> None:
        sent.append(message)

    whole = b"".join(pieces)
    answer = await stored_response(body(), len(whole), headers={"X-Sort": "body"}, method="GET")
    await answer({"type": "http"}, receive, send)
    assert b"".join(message["body"] for message in sent[1:]) == whole
    assert (b"x-sort", b"body") in sent[0]["headers"]
    assert [message.get("more_body", False) for message in sent[1:]] == (
        [True] * (messages - 1) + [False]
    )
    assert closed == [True]


async def test_a_body_in_pieces_has_the_fingerprint_of_the_whole(tmp_path: Path) -> None:
    pieces = [b"one", b"", b"two" * 100_000]
    messages: list[Message] = [
        {"type": "http.request", "body": piece, "more_body": piece != pieces[-1]}
        for piece in pieces
    ]

    async def receive() -> Message:
        return messages.pop(0)

    body = await read_body(Request({"type": "http", "headers": []}, receive))

    assert body.pieces == pieces
    assert body.digest == hashlib.sha256(b"".join(pieces)).digest()
