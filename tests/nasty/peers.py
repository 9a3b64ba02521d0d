"""The nasty answers read by other clients: curl and aiohttp, as they come."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import aiohttp
import msgspec

from tests.nasty.answer import Nasty
from tests.nasty.codings import LIMIT
from tests.nasty.corpus import ANSWERS
from tests.nasty.origin import NastyOrigin, page_body

PATIENCE = 1.0
"""Seconds after which a client that still waits is given up."""
_GIVES_UP, _PUSHED_AFTER, _IDLE = 0.2, 0.4, 0.6
_WAITS = 28  # an exit code of curl
_LARGE = 8_388_608
_INDEX = {id(answer): index for index, answer in enumerate(ANSWERS.values())}


class Exchange(msgspec.Struct, frozen=True):
    """An answer as a client took it, and a page after it. `body` is None if the client refused
    the answer; `waited` says that it did not come to an end."""

    body: bytes | None
    waited: bool
    next_body: bytes | None
    next_number: int
    is_same_connection: bool


class Case(msgspec.Struct, frozen=True):
    """An answer to ask for, and the numbers of the requests."""

    answer: Nasty
    number: int

    @property
    def path(self) -> str:
        return f"nasty-{_INDEX[id(self.answer)]}-{self.number}"

    @property
    def next_path(self) -> str:
        return f"page-{self.number + 1}"

    @property
    def patience(self) -> float:
        return _GIVES_UP if self.answer.late else PATIENCE

    def take(
        self, origin: NastyOrigin, outcome: tuple[bytes | None, bool, bytes | None]
    ) -> Exchange:
        """Return the exchange, with what the origin knows of it."""
        connections = {served.word: served.connection for served in origin.served}
        is_same = connections.get(self.path) == connections.get(self.next_path)
        return Exchange(*outcome, self.number + 1, is_same)

    def go_on_later(self, origin: NastyOrigin) -> threading.Timer | None:
        """Start what lets a pushed or late answer go on, once the client's connection is idle."""
        if not (self.answer.pushed or self.answer.late):
            return None
        timer = threading.Timer(_PUSHED_AFTER, origin.go_on, [self.number])
        timer.start()
        return timer


class Curl:
    """The program on the path, which writes into a directory."""

    def __init__(self, directory: Path, authority: Path) -> None:
        self._directory = directory
        self._authority = authority
        self._large = self._directory / "large"
        self._large.write_bytes(b"x" * _LARGE)
        self._silent = socket.create_server(("127.0.0.1", 0))
        self._silent_url = "http://{}:{}/".format(*self._silent.getsockname())
        first_line = subprocess.run(["curl", "--version"], capture_output=True, check=True).stdout
        self.version = " ".join(first_line.decode().split()[:2])

    def exchange(self, origin: NastyOrigin, case: Case) -> Exchange:
        timer = case.go_on_later(origin)
        first, second = self._directory / "first", self._directory / "second"
        for path in (first, second):
            path.unlink(missing_ok=True)
        command = ["curl", *self._transfer(case.patience, first), *self._how(case.answer)]
        command += [f"{origin.url}/{case.path}", "--next"]
        if timer is not None:
            # While curl waits for a server that says nothing, its other connection is idle.
            command += [*self._transfer(_IDLE, self._directory / "nothing"), self._silent_url]
            command += ["--next"]
        command += [*self._transfer(PATIENCE, second), f"{origin.url}/{case.next_path}"]
        environment = {"PATH": os.environ["PATH"]}
        done = subprocess.run(command, capture_output=True, check=False, env=environment)
        if timer is not None:
            timer.join()
        codes = [int(line) for line in done.stdout.split()]
        body = (_read(first) if case.answer.method != "HEAD" else b"") if codes[0] == 0 else None
        next_body = _read(second) if codes[-1] == 0 else None
        return case.take(origin, (body, codes[0] == _WAITS, next_body))

    def _transfer(self, seconds: float, output: Path) -> list[str]:
        options = ["--silent", "--compressed", "--max-time", str(seconds), "--output", str(output)]
        return [*options, "--cacert", str(self._authority), "--write-out", "%{exitcode}\n"]

    def _how(self, answer: Nasty) -> list[str]:
        if answer.method == "HEAD":
            return ["--head"]
        return ["--data-binary", f"@{self._large}"] if answer.method == "POST" else []


class Aiohttp:
    """The library, in this process."""

    def __init__(self, authority: Path) -> None:
        self._context = ssl.create_default_context(cafile=authority)
        self.version = f"aiohttp {aiohttp.__version__}"

    def exchange(self, origin: NastyOrigin, case: Case) -> Exchange:
        return asyncio.run(self._exchange(origin, case))

    async def _exchange(self, origin: NastyOrigin, case: Case) -> Exchange:
        answer = case.answer
        data = b"x" * _LARGE if answer.method == "POST" else None
        connector = aiohttp.TCPConnector(ssl=self._context)
        async with aiohttp.ClientSession(connector=connector) as session:
            timer = case.go_on_later(origin)
            body, waited = await _fetch(
                session, answer.method, f"{origin.url}/{case.path}", case.patience, data
            )
            if timer is not None:
                await asyncio.sleep(_IDLE)
                timer.join()
            next_body, _ = await _fetch(session, "GET", f"{origin.url}/{case.next_path}", PATIENCE)
        return case.take(origin, (body, waited, next_body))


async def _fetch(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    seconds: float,
    data: bytes | None = None,
) -> tuple[bytes | None, bool]:
    # Its own timeout does not end the wait for a body whose head came before the request.
    timeout = aiohttp.ClientTimeout(total=None)
    try:
        async with (
            asyncio.timeout(seconds),
            session.request(method, url, timeout=timeout, data=data) as response,
        ):
            return await response.read(), False
    except TimeoutError:
        return None, True
    except Exception:
        # Whatever it raises, it refuses the answer. Not all of it is aiohttp's own.
        return None, False


def _read(path: Path) -> bytes:
    """Return what was downloaded. curl makes no file for an empty body."""
    return path.read_bytes() if path.exists() else b""


def verdict(answer: Nasty, exchange: Exchange) -> str:
    """Return in a few words what a client made of an answer."""
    follow = exchange.next_body
    wrong = ""
    if follow is None:
        wrong = "; the next answer fails"
    elif follow != page_body(exchange.next_number):
        wrong = "; the next answer is wrong"
    if exchange.body is None:
        return ("waits" if exchange.waited else "refused") + wrong
    right = answer.body if answer.content is None else answer.content
    is_whole = answer.trouble is None or answer.content is not None
    if not is_whole or isinstance(right, str):
        taken = "no bound" if len(exchange.body) > LIMIT else "taken as whole"
        return taken + wrong
    if exchange.body != right:
        return "another body" + wrong
    if wrong:
        return "whole" + wrong
    if answer.is_early:
        return "whole"
    return "whole, kept" if exchange.is_same_connection else "whole, closed"
