"""The fake gateway as a small real HTTP server: a ZenRows-compatible endpoint, and under `/t/` a
site to scrape. The query of the target URL scripts its answers (`conveyor.gateway.fake`).

    async with GatewayServer() as server:
        HttpGateway(server.url, clock)  # GET <url>?url=http://any.test/?status=503&apikey=…
        server.target("page?size=10")  # a URL for the direct gateway

`python -m conveyor.testing.gateway_server --port 0` prints one JSON line with its `url`. `GET
/hits` returns the calls so far, `DELETE /hits` forgets them.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import struct
import sys
from contextlib import suppress
from urllib.parse import parse_qsl

import msgspec

from conveyor.clock import SystemClock
from conveyor.gateway.fake import (
    Behaviour,
    Hits,
    expected_body,
    problem_document,
    read_script,
    wire_body,
)
from conveyor.gateway.headers import is_allowed
from conveyor.ports.clock import Clock

_PIECE = 65_536
_MAX_HEAD = 262_144
_BODILESS = frozenset({204, 304})


class _Request(msgspec.Struct):
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class _Reply(msgspec.Struct):
    status: int
    headers: dict[str, str]
    body: bytes
    chunked: bool = False
    missing: int = 0
    is_reset: bool = False


class _Reset(Exception):
    """The connection is to be reset here."""


class _HangUp(Exception):
    """The connection is to be closed here, as if the answer were complete."""


class GatewayServer:
    """The server, on loopback by default; port 0 picks a free one."""

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        clock: Clock | None = None,
        hit_limit: int = 100_000,
    ) -> None:
        self.hits = Hits(hit_limit)
        self.connections = 0
        self._host = host
        self._port = port
        self._clock = clock if clock is not None else SystemClock()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> GatewayServer:
        self._server = await asyncio.start_server(
            self._serve, self._host, self._port, limit=_MAX_HEAD
        )
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_error: object) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def origin(self) -> str:
        """Return scheme, host and port."""
        return f"http://{self._host}:{self._port}"

    @property
    def url(self) -> str:
        """Return the endpoint of the scraping API."""
        return f"{self.origin}/v1/"

    def target(self, path: str) -> str:
        """Return the URL of a page of the site; `path` may have a script as its query."""
        return f"{self.origin}/t/{path}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self.connections += 1
        try:
            while (request := await _read_request(reader)) is not None:
                reply = await self._answer(request, reader)
                await _write(writer, reply, request.method)
        except _Reset:
            # A close with no linger is a reset on the wire.
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        except _HangUp:
            writer.write_eof()
        except (OSError, EOFError, ValueError, asyncio.CancelledError):
            # Gone, unreadable or being shut down: there is no client left to answer.
            writer.transport.abort()
        finally:
            writer.close()

    async def _answer(self, request: _Request, reader: asyncio.StreamReader) -> _Reply:
        path, _, query = request.path.partition("?")
        if path == "/hits":
            return self._report_hits(request.method)
        is_target = path.startswith("/t/")
        params = {} if is_target else dict(parse_qsl(query, keep_blank_values=True))
        url = self.origin + request.path if is_target else params.pop("url", "")
        key = params.pop("apikey", "")
        if not is_target and not (url and key):
            return _refusal(Behaviour(code="AUTH001" if url else "REQS001"), 401 if url else 400)
        before = self.hits.enter(url, request.method, tuple(request.headers), key)
        try:
            script = read_script(url)
            await self._delay(script, reader)
            status = 503 if before < script.flaky else 402 if script.account else script.status
            if not 200 <= status < 300 and not is_allowed(status, params):
                return _refusal(script, status)
            body = _echo(request, url, params) if script.echo else expected_body(url)
            return _success(script, status, body)
        finally:
            self.hits.leave()

    async def _delay(self, script: Behaviour, reader: asyncio.StreamReader) -> None:
        if script.delay:
            await self._clock.sleep(script.delay)
        if script.hang:
            await reader.read(1)
            raise _HangUp
        if script.reset and script.reset != "body":
            raise _Reset

    def _report_hits(self, method: str) -> _Reply:
        hits = self.hits
        report = {
            "total": hits.total,
            "counts": hits.counts,
            "in_flight": hits.in_flight,
            "peak_in_flight": hits.peak_in_flight,
        }
        reply = _Reply(200, {"Content-Type": "application/json"}, msgspec.json.encode(report))
        if method == "DELETE":
            hits.clear()
        return reply


async def _read_request(reader: asyncio.StreamReader) -> _Request | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    line, *fields = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    method, path, _version = line.split(" ")
    headers = {}
    for field in fields:
        name, _, value = field.partition(":")
        headers[name.lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return _Request(method, path, headers, body)


def _success(script: Behaviour, status: int, body: bytes) -> _Reply:
    wire = wire_body(script, body)
    headers = {"Content-Type": script.content_type}
    if script.content_encoding:
        headers["Content-Encoding"] = script.content_encoding
    if script.cost:
        headers["X-Request-Cost"] = script.cost
    if script.credits:
        headers["X-Request-Credits"] = script.credits
    is_reset = script.reset == "body"
    missing = len(wire) - len(wire) // 2 if script.short or is_reset else 0
    return _Reply(status, headers, wire, script.chunked, missing, is_reset)


def _refusal(script: Behaviour, status: int) -> _Reply:
    headers = {"Content-Type": "application/problem+json"}
    if script.retry_after:
        headers["Retry-After"] = script.retry_after
    if script.cost:
        headers["X-Request-Cost"] = script.cost
    if script.credits:
        headers["X-Request-Credits"] = script.credits
    if script.location:
        headers["Location"] = script.location
        headers["Set-Cookie"] = "redirected=1; Path=/"
    return _Reply(status, headers, problem_document(script, status))


def _echo(request: _Request, url: str, params: dict[str, str]) -> bytes:
    echo = {
        "method": request.method,
        "url": url,
        "headers": request.headers,
        "params": params,
        "body": request.body.decode("utf-8", "replace"),
    }
    return msgspec.json.encode(echo)


async def _write(writer: asyncio.StreamWriter, reply: _Reply, method: str) -> None:
    """Send an answer. Raises _Reset or _HangUp if it is to end early."""
    body = b"" if reply.status in _BODILESS or method == "HEAD" else reply.body
    headers = dict(reply.headers)
    if reply.chunked:
        headers["Transfer-Encoding"] = "chunked"
    elif reply.status not in _BODILESS:
        headers["Content-Length"] = str(len(reply.body))
    lines = [f"HTTP/1.1 {reply.status} Scripted", *(f"{k}: {v}" for k, v in headers.items())]
    writer.write("\r\n".join([*lines, "", ""]).encode("latin-1", "replace"))
    end = len(body) - reply.missing
    for start in range(0, end, _PIECE):
        piece = body[start : min(start + _PIECE, end)]
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if reply.chunked else piece)
        await writer.drain()
    if reply.missing:
        raise _Reset if reply.is_reset else _HangUp
    if reply.chunked:
        writer.write(b"0\r\n\r\n")
    await writer.drain()


async def _main(host: str, port: int) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError):
            loop.add_signal_handler(number, stopped.set)
    async with GatewayServer(host=host, port=port) as server:
        line = msgspec.json.encode({"url": server.url, "target": server.target("")})
        sys.stdout.write(line.decode() + "\n")
        sys.stdout.flush()
        await stopped.wait()


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description="a scripted scraping API and site")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    asyncio.run(_main(arguments.host, arguments.port))


if __name__ == "__main__":
    main()
