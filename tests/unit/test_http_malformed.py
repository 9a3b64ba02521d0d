"""Bytes that are no HTTP are refused as every other request is."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from conveyor.testing.server import conveyor_server

REQUEST = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
HEAD = b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
        b"BREW /v1/jobs HTTP/1.1\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"X-Long: " + b"x" * 100_000,
        b"GET /v1/jobs HTTP/1.1\r\nConnection: close\r\n\r\n",
    ],
)
def test_what_is_no_request_gets_a_problem_and_an_end(tmp_path: Path, sent: bytes) -> None:
    with conveyor_server(tmp_path / "data") as server:
        address = urlsplit(server.base_url)
        with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
            connection.sendall(sent)
            answer = b"".join(iter(lambda: connection.recv(65_536), b""))

    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().lower().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    problem = json.loads(body)
    assert status == "http/1.1 400 bad request"
    assert headers["content-type"] == "application/problem+json"
    assert headers["connection"] == "close"
    assert headers["content-length"] == str(len(body))
    assert problem["code"] == "invalid_argument"
    assert problem["instance"].lower().endswith(headers["x-request-id"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent", [b"", HEAD, REQUEST + HEAD], ids=["silence", "half a head", "a later half"]
)
def test_a_connection_on_which_no_head_arrives_is_closed(tmp_path: Path, sent: bytes) -> None:
    with conveyor_server(tmp_path / "data", head_timeout=0.2) as server:
        address = urlsplit(server.base_url)
        with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
            connection.sendall(sent)
            answered = b"".join(iter(lambda: connection.recv(65_536), b""))
    assert answered.count(b"HTTP/1.1 200") == sent.count(REQUEST)
