"""A scripted server that records its requests, for tests of the client."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from conveyor.client.api import Api, connect

KEY = "the-key"
RUN = {"run_id": "R", "job_id": "J", "status": "running", "stats": {"total": 1}}
Answer = tuple[int, dict[str, str], bytes]


class Told(msgspec.Struct):
    """A request as it came in."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Script(ThreadingHTTPServer):
    """Answers in the order given, the last one for ever; an empty status breaks the connection.
    A path of `routes` has its own answer."""

    daemon_threads = True

    def __init__(self, answers: list[Answer]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = answers
        self.routes: dict[str, Answer] = {}
        self.told: list[Told] = []

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Script

    def answer(self) -> None:
        length = int(self.headers.get("Content-Length", "0"))
        told = Told(self.command, self.path, dict(self.headers), self.rfile.read(length))
        self.server.told.append(told)
        answers = self.server.answers
        routed = self.server.routes.get(self.path)
        if routed is None:
            routed = answers.pop(0) if len(answers) > 1 else answers[0]
        status, headers, body = routed
        if not status:
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        # The client may have left, as some tests have it do.
        with contextlib.suppress(ConnectionError):
            self.end_headers()
            self.wfile.write(body)
        self.close_connection = "Content-Length" in headers

    do_GET = do_POST = do_PUT = do_DELETE = answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Pace:
    """A clock whose sleeps cost nothing, and are remembered."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def now(self) -> int:
        return round(sum(self.slept) * 1_000)

    def monotonic(self) -> float:
        return sum(self.slept)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    def token(self, length: int) -> bytes:
        return b"\x07" * length


@contextmanager
def scripted(*answers: Answer) -> Iterator[Script]:
    server = Script(list(answers))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@asynccontextmanager
async def asked(*answers: Answer) -> AsyncIterator[tuple[Api, Script, Pace]]:
    pace = Pace()
    with scripted(*answers) as server:
        async with connect(server.origin, KEY, pace) as api:
            yield api, server, pace


def ok(document: object, **headers: str) -> Answer:
    return 200, headers, msgspec.json.encode(document)


def problem(status: int, code: str, **fields: object) -> Answer:
    body = {"type": "about:blank", "title": code, "status": status, "code": code, **fields}
    return status, {}, msgspec.json.encode(body)
