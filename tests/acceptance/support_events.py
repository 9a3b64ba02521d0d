"""Streams of events as a browser reads them, over plain HTTP."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.acceptance.support_calls import KEY, TIMEOUT
from tests.patient import fetched


@dataclass(frozen=True)
class Event:
    """One event: its name, its id, and its data, which is JSON."""

    name: str
    number: int | None
    data: Any


def events_of(pieces: Iterable[bytes]) -> Iterator[Event]:
    """The events in the bytes of a stream; a comment is an event without a name."""
    rest = b""
    for piece in pieces:
        *blocks, rest = (rest + piece).split(b"\n\n")
        for block in blocks:
            fields = dict(line.split(b":", 1) for line in block.split(b"\n"))
            number = fields.get(b"id")
            yield Event(
                name=fields.get(b"event", b"").strip().decode(),
                number=None if number is None else int(number),
                data=json.loads(fields.get(b"data", b"null")),
            )
    assert not rest, rest


@contextmanager
def opened(
    api: str, path: str, *, key: str = KEY, last: str | None = None, method: str = "GET"
) -> Iterator[httpx.Response]:
    """The answer at the address of a stream, whatever it is, not read yet."""
    headers = {"X-API-Key": key} | ({} if last is None else {"Last-Event-ID": last})
    with (
        httpx.Client(trust_env=False, timeout=TIMEOUT, verify=False) as client,
        client.stream(method, api + path, headers=headers) as response,
    ):
        yield response


@contextmanager
def streamed(
    api: str, path: str, *, key: str = KEY, last: str | None = None
) -> Iterator[Iterator[Event]]:
    """The events of a stream that is served; what only keeps the connection is left out."""
    with opened(api, path, key=key, last=last) as response:
        assert response.status_code == 200, response.read()
        yield (event for event in events_of(response.iter_raw()) if event.name)


def path_of(job: dict[str, Any]) -> str:
    """The address of the stream of a job's latest run."""
    return f"/jobs/{job['job_id']}/runs/{job['latest_run']['run_id']}/events"


def open_socket(api: str, path: str, *, key: str = KEY) -> socket.socket:
    """A connection on which a stream was asked for, and of which nothing is read."""
    where = urlsplit(api)
    address = where.hostname or "", where.port or 0
    connection = socket.create_connection(address, timeout=TIMEOUT)
    request = f"GET {where.path}{path} HTTP/1.1\r\nHost: {where.netloc}\r\nX-API-Key: {key}\r\n\r\n"
    connection.sendall(request.encode())
    return connection


def metric(origin: str, name: str) -> float:
    """A figure of /metrics without labels."""
    text = fetched(f"{origin}/metrics").text
    found = re.search(rf"^conveyor_{name} (\S+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])
