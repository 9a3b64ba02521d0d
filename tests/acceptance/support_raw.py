"""Sends raw bytes to a port, which no HTTP client would send, and reads the answers."""

from __future__ import annotations

import re
import socket

import httpx

_SECONDS = 60.0


def answers_to(
    port: int, sent: bytes, *, hang_up: bool = False, first: bool = False
) -> list[httpx.Response]:
    """The answers that come until the server closes the connection; of them the first alone, with
    `first`.

    With `hang_up` the connection is closed at once, and nothing is read.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=_SECONDS) as connection:
        try:
            connection.sendall(sent)
            received = b"" if hang_up else _read(connection, first)
        except ConnectionError:
            received = b""
    return _responses(received)


def _read(connection: socket.socket, first: bool) -> bytes:
    received = b""
    try:
        while not (first and _is_whole(received)) and (piece := connection.recv(65_536)):
            received += piece
    except ConnectionResetError:
        pass
    return received


def _is_whole(received: bytes) -> bool:
    head, end, rest = received.partition(b"\r\n\r\n")
    length = re.search(rb"\r\ncontent-length: (\d+)", head, re.IGNORECASE)
    return bool(end) and len(rest) >= (int(length[1]) if length else 0)


def _responses(received: bytes) -> list[httpx.Response]:
    responses: list[httpx.Response] = []
    while received:
        head, _, rest = received.partition(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").split("\r\n")
        fields = [line.partition(": ") for line in lines]
        headers = httpx.Headers([(name, value) for name, _, value in fields])
        length = int(headers.get("Content-Length", "0"))
        responses.append(
            httpx.Response(int(status.split(" ")[1]), headers=headers, content=rest[:length])
        )
        received = rest[length:]
    return responses
