"""The receiver that is built into a development server: it keeps the requests that come to
/_dev/inbox/NAME, and shows them with verdicts on their signatures.

It serves loopback alone, without a key, and keeps everything in memory.
"""

from __future__ import annotations

import base64
import importlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache

import anyio.to_thread
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.signatures import (
    SIGNATURE,
    STANDARD_SIGNATURE,
    SigningSecret,
    verify_each_scheme,
)
from conveyor.domain.text_rules import rfc3339
from conveyor.http.middleware import INBOX_PATH
from conveyor.http.request import ClientGone
from conveyor.http.routes_dev import check_local
from conveyor.ports.clock import Clock

MOST_REQUESTS = 1_000
"""Requests that are kept, of all names."""
MOST_BODY = 262_144
"""Bytes of one body."""
MOST_KEPT = 33_554_432
"""Bytes of all bodies that are kept."""

Secrets = Callable[[], Awaitable[Sequence[SigningSecret]]]


class Verdicts(msgspec.Struct, frozen=True):
    """The verdict on the signatures of a request, by the keys of this server: by each scheme and,
    of the first, by the published client; null without that signature, or without the client."""

    x_signature: bool | None = None
    webhook_signature: bool | None = None
    client: bool | None = None


class InboxRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it came: its headers, whose names are in lower case, and its body, in base64
    and, if it is UTF-8, as text. `number` counts the requests to all names from 1."""

    number: int
    inbox: str
    received_at: str
    method: str
    path: str
    headers: dict[str, str]
    body_base64: str
    text: str | None
    verified: Verdicts


class InboxBody(msgspec.Struct, frozen=True):
    """The requests to one name, in the order in which they came."""

    requests: list[InboxRequest]


class InboxName(msgspec.Struct, frozen=True):
    """A name, and the number of requests that are kept of it."""

    name: str
    requests: int


class InboxNamesBody(msgspec.Struct, frozen=True):
    """The names that have requests."""

    inboxes: list[InboxName]


class Inbox:
    """Keeps the newest MOST_REQUESTS requests, and MOST_KEPT bytes of their bodies. `secrets`
    returns the signing keys of all callers of this server."""

    def __init__(self, clock: Clock, secrets: Secrets, *, machine: Clock | None = None) -> None:
        self._clock = clock
        self._machine = machine or clock
        self._secrets = secrets
        self._kept: deque[tuple[InboxRequest, int]] = deque()
        self._size = 0
        self._number = 0

    def routes(self) -> list[Route]:
        """Return the routes of the receiver."""
        kept = ["POST", "PUT", "PATCH"]
        return [
            Route(INBOX_PATH, self._names, methods=["GET"]),
            Route(f"{INBOX_PATH}/{{name}}", self._one, methods=["GET", "DELETE", *kept]),
            Route(f"{INBOX_PATH}/{{name}}/{{rest:path}}", self._receive, methods=kept),
        ]

    def clear(self) -> None:
        """Forget all requests, and count from 1 again."""
        self._kept.clear()
        self._size = self._number = 0

    async def _names(self, request: Request) -> Response:
        check_local(request)
        counts: dict[str, int] = {}
        for kept, _ in self._kept:
            counts[kept.inbox] = counts.get(kept.inbox, 0) + 1
        names = [InboxName(name, count) for name, count in sorted(counts.items())]
        return _json(InboxNamesBody(names))

    async def _one(self, request: Request) -> Response:
        if request.method not in ("GET", "HEAD", "DELETE"):
            return await self._receive(request)
        check_local(request)
        name = request.path_params["name"]
        if request.method == "DELETE":
            self._drop_all(name)
            return Response(status_code=204)
        return _json(InboxBody([kept for kept, _ in self._kept if kept.inbox == name]))

    async def _receive(self, request: Request) -> Response:
        check_local(request)
        body = await _read(request)
        received_at = self._clock.now()
        headers = _headers(request)
        # Signatures are of the machine's time, wherever the clock of the server stands.
        verified = await self._verdicts(body, headers, self._machine.now() // 1_000)
        self._number += 1
        query = f"?{request.url.query}" if request.url.query else ""
        kept = InboxRequest(
            number=self._number,
            inbox=request.path_params["name"],
            received_at=rfc3339(received_at),
            method=request.method,
            path=f"/{request.path_params.get('rest', '')}{query}",
            headers=headers,
            body_base64=base64.b64encode(body).decode(),
            text=_text(body),
            verified=verified,
        )
        self._keep(kept, len(body))
        return Response(status_code=204)

    def _keep(self, kept: InboxRequest, size: int) -> None:
        self._kept.append((kept, size))
        self._size += size
        while len(self._kept) > MOST_REQUESTS or self._size > MOST_KEPT:
            self._size -= self._kept.popleft()[1]

    def _drop_all(self, name: str) -> None:
        self._kept = deque(pair for pair in self._kept if pair[0].inbox != name)
        self._size = sum(size for _, size in self._kept)

    async def _verdicts(self, body: bytes, headers: Mapping[str, str], now: int) -> Verdicts:
        if not {SIGNATURE.lower(), STANDARD_SIGNATURE} & headers.keys():
            return Verdicts()
        keys = await self._secrets()
        ours = verify_each_scheme(body, headers, [key.secret for key in keys], now=now)
        signature = headers.get(SIGNATURE.lower())
        by_client = None
        if signature is not None:
            by_client = await anyio.to_thread.run_sync(
                _verified_by_client, body, signature, keys, now
            )
        return Verdicts(ours[SIGNATURE], ours[STANDARD_SIGNATURE], by_client)


def _verified_by_client(
    body: bytes, signature: str, keys: Sequence[SigningSecret], now: int
) -> bool | None:
    verify = _client_verifier()
    if verify is None:
        return None
    secrets = {key.kid: base64.b64encode(key.secret).decode() for key in keys}
    return bool(verify(body, signature, secrets, now=now))


@cache
def _client_verifier() -> Callable[..., object] | None:
    """Return the function of the published client; None where that is not installed."""
    try:
        client = importlib.import_module("zenrows.batch")
    except ImportError:
        return None
    verifier: Callable[..., object] | None = getattr(client, "verify_webhook_signature", None)
    return verifier


async def _read(request: Request) -> bytes:
    """Read a body. Raises ConveyorError(payload_too_large), ClientGone."""
    pieces = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        pieces += message.get("body", b"")
        if len(pieces) > MOST_BODY:
            raise ConveyorError(
                ErrorCode.PAYLOAD_TOO_LARGE, f"the inbox takes at most {MOST_BODY:,} bytes"
            )
        if not message.get("more_body", False):
            return bytes(pieces)


def _headers(request: Request) -> dict[str, str]:
    """Return the headers; the values of one that came more than once are joined."""
    headers: dict[str, str] = {}
    for name, value in request.headers.items():
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def _text(body: bytes) -> str | None:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body) + b"\n", media_type="application/json")
