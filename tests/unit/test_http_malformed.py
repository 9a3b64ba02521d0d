"""Bytes that are no HTTP are refused as every other request is."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
from http.client import HTTPMessage, HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from conveyor.testing.local_server import conveyor_server

REQUEST = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
HEAD = b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


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
    with conveyor_server(tmp_path / "data", head_timeout=1.0) as server:
        address = urlsplit(server.base_url)
        with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
            connection.sendall(sent)
            answered = b"".join(iter(lambda: connection.recv(65_536), b""))
    assert answered.count(b"HTTP/1.1 200") == sent.count(REQUEST)


def _stalled(connection: socket.socket) -> None:
    """Begin a submit whose body is not sent; return once the server reads it."""
    connection.sendall(
        HEAD + b"X-API-Key: k\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n"
        b"Expect: 100-continue\r\n\r\n"
    )
    # On a busy machine the answer may come before this is read.
    assert connection.recv(len(CONTINUE), socket.MSG_WAITALL) == CONTINUE
    connection.sendall(b"{")


def _answer_of(connection: socket.socket) -> tuple[int, HTTPMessage, dict[str, object]]:
    with HTTPResponse(connection) as response:
        response.begin()
        return response.status, response.headers, json.loads(response.read())


@pytest.mark.slow
def test_a_body_that_stops_coming_is_refused(tmp_path: Path) -> None:
    with conveyor_server(tmp_path / "data", body_timeout=0.2) as server:
        address = urlsplit(server.base_url)
        with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
            _stalled(connection)
            status, headers, problem = _answer_of(connection)
    assert status == 408
    assert headers["Connection"] == "close"
    assert problem["code"] == "request_timeout"


@pytest.mark.slow
def test_a_request_that_the_end_of_the_server_cuts_off_is_told_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "conveyor.http")
    with contextlib.ExitStack() as open_connections:
        with conveyor_server(tmp_path / "data") as server:
            address = urlsplit(server.base_url)
            connection = open_connections.enter_context(
                socket.create_connection((address.hostname, address.port), timeout=60)
            )
            _stalled(connection)
        status, headers, problem = _answer_of(connection)
    assert status == 503
    assert headers["Content-Type"] == "application/problem+json"
    assert int(headers["Retry-After"]) > 0
    assert problem["code"] == "unavailable"
    [logged] = [one for one in caplog.records if one.getMessage() == "request"]
    assert logged.__dict__["status"] == 503
