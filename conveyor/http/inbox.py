"""The receiver that is built into a development server: it keeps the requests that come to
/_dev/inbox/NAME, and shows them with verdicts on their signatures.

It serves loopback alone, without a key, and keeps everything in memory. Those who have the token of
the server tell it what to answer next.
"""

from __future__ import annotations

import base64
import importlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Annotated

import anyio.to_thread
import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from conveyor.domain import strict_json
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.signatures import (
    SIGNATURE,
    STANDARD_SIGNATURE,
    SigningSecret,
    verify_each_scheme,
)
from conveyor.domain.text_rules import parse_duration, rfc3339
from conveyor.http.middleware import INBOX_PATH
from conveyor.http.request import ClientGone, read_small_body
from conveyor.http.routes_dev import check_developer, check_local
from conveyor.ports.clock import Clock
from conveyor.ports.idle import POSTS, OpenWork

MOST_REQUESTS = 1_000
"""Requests that are kept, of all names."""
MOST_BODY = 262_144
"""Bytes of one body."""
MOST_KEPT = 33_554_432
"""Bytes of all bodies that are kept."""

MOST_DELAY = 86_400.0
"""Seconds before an answer."""

Secrets = Callable[[], Awaitable[Sequence[SigningSecret]]]


class Verdicts(msgspec.Struct, frozen=True):
    """The verdict on the signatures of a request, by the keys of this server: by each scheme and,
    of the first, by the published client; null without that signature, or without the client."""

    x_signature: bool | None = None
    webhook_signature: bool | None = None
    client: bool | None = None


class InboxRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it came: its headers, whose names are in lower case, and its body, in base64
    and, if it is UTF-8, as text. `number` counts the requests to all names from 1; `answered` is
    the status that it got."""

    number: int
    inbox: str
    received_at: str
    method: str
    path: str
    headers: dict[str, str]
    body_base64: str
    text: str | None
    verified: Verdicts
    answered: int = 204


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


class NextAnswers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer to the next `times` requests to a name: a status, given after a delay, which is a
    number of seconds, or a text such as 20s."""

    status: Annotated[int, Meta(ge=200, le=599)] = 204
    times: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    delay: float | str = 0.0


class NextAnswersBody(msgspec.Struct, frozen=True):
    """The answers that wait for requests to one name, in their order."""

    next: list[NextAnswers]


class Inbox:
    """Keeps the newest MOST_REQUESTS requests, and MOST_KEPT bytes of their bodies.

    `secrets` returns the signing keys of all callers of this server; orders want its `token`. On a
    clock that is moved, `work` counts the calls of receivers.
    """

    def __init__(
        self,
        clock: Clock,
        secrets: Secrets,
        *,
        machine: Clock | None = None,
        token: str = "",
        work: OpenWork | None = None,
    ) -> None:
        self._clock = clock
        self._machine = machine or clock
        self._secrets = secrets
        self._token = token
        self._work = work
        self._next: dict[str, list[NextAnswers]] = {}
        self._kept: deque[tuple[InboxRequest, int]] = deque()
        self._size = 0
        self._number = 0

    def routes(self) -> list[Route]:
        """Return the routes of the receiver."""
        kept = ["POST", "PUT", "PATCH"]
        return [
            Route(INBOX_PATH, self._names, methods=["GET"]),
            Route(f"{INBOX_PATH}/{{name}}", self._one, methods=["GET", "DELETE", *kept]),
            Route(f"{INBOX_PATH}/{{name}}/next", self._order, methods=kept),
            Route(f"{INBOX_PATH}/{{name}}/{{rest:path}}", self._receive, methods=kept),
        ]

    def clear(self) -> None:
        """Forget all requests, and count from 1 again."""
        self._kept.clear()
        self._next.clear()
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

    async def _order(self, request: Request) -> Response:
        """Note what to answer next. Without credentials it is a request like others: a receiver may
        have such a path."""
        if "Authorization" not in request.headers:
            request.path_params["rest"] = "next"
            return await self._receive(request)
        check_developer(request, self._token)
        answers = read_next(await read_small_body(request))
        waiting = self._next.setdefault(request.path_params["name"], [])
        if sum(map(len, self._next.values())) >= MOST_REQUESTS:
            text = f"{MOST_REQUESTS:,} answers wait already: DELETE of the name drops its own"
            raise ConveyorError(ErrorCode.CONFLICT, text)
        waiting.append(answers)
        return _json(NextAnswersBody(waiting))

    def _take(self, name: str) -> NextAnswers:
        """Return the answer to a request, and count it as given."""
        waiting = self._next.get(name)
        if not waiting:
            return NextAnswers()
        first = waiting[0]
        if first.times > 1:
            waiting[0] = msgspec.structs.replace(first, times=first.times - 1)
        else:
            del waiting[0]
        return first

    async def _receive(self, request: Request) -> Response:
        check_local(request)
        body = await _read(request)
        answer = self._take(request.path_params["name"])
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
            answered=answer.status,
        )
        self._keep(kept, len(body))
        delay = parse_duration(answer.delay)
        if delay > 0:
            with _uncounted(self._work):
                await self._clock.sleep(delay)
        return Response(status_code=answer.status)

    def _keep(self, kept: InboxRequest, size: int) -> None:
        self._kept.append((kept, size))
        self._size += size
        while len(self._kept) > MOST_REQUESTS or self._size > MOST_KEPT:
            self._size -= self._kept.popleft()[1]

    def _drop_all(self, name: str) -> None:
        self._next.pop(name, None)
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


def read_next(body: bytes) -> NextAnswers:
    """Read an order for the next answers. Raises ConveyorError(invalid_argument)."""
    try:
        answers = msgspec.convert(strict_json.decode(body), NextAnswers)
    except msgspec.ValidationError as error:
        raise ConveyorError(ErrorCode.INVALID_ARGUMENT, str(error)) from None
    try:
        delay = parse_duration(answers.delay)
    except ValueError as error:
        raise ConveyorError(ErrorCode.INVALID_ARGUMENT, f"delay: {error}") from None
    if not 0 <= delay <= MOST_DELAY:
        text = f"delay: must be 0 to {MOST_DELAY:,.0f} seconds"
        raise ConveyorError(ErrorCode.INVALID_ARGUMENT, text)
    return answers


@contextmanager
def _uncounted(work: OpenWork | None) -> Iterator[None]:
    """Count the call that waits for this answer as one that has ended: the clock could never move
    on to the answer."""
    if work is None or not work.is_open(POSTS):
        yield
        return
    work.leave(POSTS)
    try:
        yield
    finally:
        work.enter(POSTS)


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
