"""Read a request: its caller, the ids in its path, query parameters, the body, the idempotency key.

A query parameter may occur once and is checked; unknown ones are ignored. A body is read whole and
up to a limit, an upload piece by piece with a limit of its own. `ConnectionGuard` cancels long work
when the client hangs up.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import anyio
import msgspec
from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conveyor.aio.concurrency import unwrap
from conveyor.domain import ids
from conveyor.domain.errors import ConveyorError, ErrorCode, not_found
from conveyor.domain.text_rules import parse_rfc3339
from conveyor.service.callers import Caller
from conveyor.service.idempotency import KeyedRequest, Reply
from conveyor.service.links import UPLOAD_PATH
from conveyor.service.responses import encode
from conveyor.service.service import Service


@dataclass(frozen=True, slots=True)
class PathIds:
    """The ids in the path of a request. They raise ConveyorError(not_found) if they are
    malformed."""

    request: Request
    service: Service

    @property
    def job_id(self) -> str:
        """Return the job in the path."""
        return self._ulid("job_id", "job")

    @property
    def run_id(self) -> str | None:
        """Return the run in the path; None if the path has none, which means the latest."""
        return self._ulid("run_id", "run") if "run_id" in self.request.path_params else None

    @property
    def named_run_id(self) -> str:
        """Return the run in a path that always has one."""
        return self._ulid("run_id", "run")

    @property
    def task_id(self) -> str:
        """Return the task in the path."""
        task_id: str = self.request.path_params["task_id"]
        if not ids.is_task_id(task_id):
            raise not_found("task")
        return task_id

    @property
    def delivery_id(self) -> str:
        """Return the delivery in the path."""
        return self._ulid("delivery_id", "delivery")

    def _ulid(self, parameter: str, what: str) -> str:
        value: str = self.request.path_params[parameter]
        if not ids.is_ulid(value):
            raise not_found(what)
        return value


@dataclass(frozen=True, slots=True)
class RequestContext(PathIds):
    """The argument of a handler. `accepted` tells whether the caller's key still is, for what goes
    on after the call."""

    caller: Caller
    accepted: Callable[[], bool]

    @property
    def caller_id(self) -> str:
        """Return the id of the caller."""
        return self.caller.caller_id


Handler = Callable[[RequestContext], Awaitable[Response]]


def json_response(body: msgspec.Struct, *, status: int = 200) -> Response:
    """Answer in JSON."""
    return Response(encode(body), status_code=status, media_type="application/json")


_WHOLE_NUMBER = re.compile(r"[0-9]{1,6}")


def text(query: QueryParams, name: str) -> str | None:
    """Return a parameter unparsed, None if it is absent."""
    values = query.getlist(name)
    if len(values) > 1:
        _refuse(name, "may be given once")
    return values[0] if values else None


def cursor(query: QueryParams) -> str | None:
    """Return the cursor of a list, None if it is absent or empty."""
    return text(query, "cursor") or None


def word(query: QueryParams, name: str, words: Collection[str]) -> str | None:
    """Return a parameter that must be one of the words, None if it is absent."""
    value = text(query, name)
    if value is not None and value not in words:
        _refuse(name, f"must be one of {', '.join(words)}")
    return value


def page_size(query: QueryParams, *, default: int, most: int) -> int:
    """Parse the `limit` of a page, from 1 to `most`."""
    value = text(query, "limit")
    if value is None:
        return default
    if not _WHOLE_NUMBER.fullmatch(value) or not 1 <= int(value) <= most:
        _refuse("limit", f"must be a whole number from 1 to {most}")
    return int(value)


def instant(query: QueryParams, name: str) -> int | None:
    """Return a time in milliseconds since the epoch, None if it is absent."""
    value = text(query, name)
    if value is None:
        return None
    try:
        return parse_rfc3339(value)
    except ValueError:
        _refuse(name, "must be a time with its zone, as 2026-01-31T12:00:00Z")


def _refuse(name: str, problem: str) -> NoReturn:
    raise ConveyorError(ErrorCode.INVALID_ARGUMENT, f"{name}: {problem}")


class ClientGone(Exception):
    """The client has hung up, so there is nobody to answer."""


@dataclass(frozen=True, slots=True)
class Body:
    """The raw bytes of a body, in the pieces received, and their sha256."""

    pieces: list[bytes]
    digest: bytes

    def joined(self) -> bytes:
        """Return the whole body in one piece."""
        return b"".join(self.pieces)


NO_BODY = Body([], hashlib.sha256().digest())
"""The body of a request whose own is ignored."""


class BodyLimit:
    """Middleware that refuses bodies over `limit` bytes, announced or not."""

    def __init__(self, app: ASGIApp, *, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises ConveyorError(payload_too_large)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("Content-Length", "")
        if announced.isdecimal() and int(announced[:20]) > self._limit:
            raise self._too_large()
        received = 0

        async def receive_some() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise self._too_large()
            return message

        await self._app(scope, receive_some, send)

    def _too_large(self) -> ConveyorError:
        return ConveyorError(
            ErrorCode.PAYLOAD_TOO_LARGE,
            f"a request body holds at most {self._limit} bytes (CONVEYOR_MAX_REQUEST_BYTES)",
        )


BODY_SPARE = 65_536
"""Bytes of each body that count for nothing, so that small requests always pass."""
BODY_RETRY = 1
"""Seconds after which a body that found no room may be sent again."""


class BodyMemory:
    """The memory for request bodies: `limit` bytes for all at a time, `caller_limit` for those of
    one caller. One body alone always has room."""

    def __init__(self, *, limit: int = 268_435_456, caller_limit: int = 134_217_728) -> None:
        self._limit = limit
        self._caller_limit = caller_limit
        self._held = 0
        self._held_by: dict[str, int] = {}

    @contextmanager
    def admitted(self, request: Request, caller_id: str) -> Iterator[Request]:
        """Yield the request with its body counted until the exit: as announced, else as it comes.

        Reading it, or the entry, raises ConveyorError(unavailable) if there is no room.
        """
        taken = 0
        received = 0

        def take(size: int) -> None:
            nonlocal taken
            more = max(0, size - BODY_SPARE) - taken
            if more > 0:
                self._take(caller_id, more, taken)
                taken += more

        async def receive() -> Message:
            nonlocal received
            message = await request.receive()
            received += len(message.get("body", b""))
            take(received)
            return message

        announced = request.headers.get("Content-Length", "")
        try:
            take(int(announced[:20]) if announced.isdecimal() else 0)
            yield Request(request.scope, receive)
        finally:
            self._give_back(caller_id, taken)

    def _take(self, caller_id: str, more: int, own: int) -> None:
        """Count further bytes of a body that has `own`."""
        by_caller = self._held_by.get(caller_id, 0)
        for others, held, limit, name in (
            (by_caller - own, by_caller, self._caller_limit, "CONVEYOR_MAX_CALLER_BODY_MEMORY"),
            (self._held - own, self._held, self._limit, "CONVEYOR_MAX_BODY_MEMORY"),
        ):
            if others and held + more > limit:
                raise ConveyorError(
                    ErrorCode.UNAVAILABLE,
                    f"other requests fill the memory for bodies; send it again ({name})",
                    retry_after=BODY_RETRY,
                )
        self._held += more
        self._held_by[caller_id] = by_caller + more

    def _give_back(self, caller_id: str, size: int) -> None:
        self._held -= size
        left = self._held_by.get(caller_id, 0) - size
        if left > 0:
            self._held_by[caller_id] = left
        else:
            self._held_by.pop(caller_id, None)


SMALL_BODY = 65_536
"""Most bytes of a body that is decoded on the event loop at once."""


async def read_small_body(request: Request) -> bytes:
    """Read a body as `read_small_json` does, and return its bytes."""
    return (await read_small_json(request)).joined()


async def read_small_json(request: Request) -> Body:
    """Read a body of at most SMALL_BODY bytes sent as JSON.

    Raises ConveyorError: unsupported_media_type, payload_too_large; ClientGone.
    """
    announced = request.headers.get("Content-Length", "0")
    if announced.isdecimal() and int(announced) > SMALL_BODY:
        raise _too_large()
    body = await read_json_body(request)
    if sum(map(len, body.pieces)) > SMALL_BODY:
        raise _too_large()
    return body


def _too_large() -> ConveyorError:
    return ConveyorError(
        ErrorCode.PAYLOAD_TOO_LARGE, f"the body may have at most {SMALL_BODY:,} bytes"
    )


async def read_json_body(request: Request) -> Body:
    """Read a body sent as JSON.

    Raises ConveyorError(unsupported_media_type); ClientGone.
    """
    headers = request.headers
    media_type, _, parameters = headers.get("Content-Type", "").partition(";")
    if media_type.strip().lower() != "application/json" or not _is_utf8(parameters):
        raise _unsupported("send the body as application/json")
    if headers.get("Content-Encoding", "identity").strip().lower() != "identity":
        raise _unsupported("send the body without a Content-Encoding")
    return await read_body(request)


async def read_body(request: Request) -> Body:
    """Read a body of any type. Raises ClientGone."""
    pieces: list[bytes] = []
    digest = hashlib.sha256()
    try:
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece = message.get("body", b"")
            pieces.append(piece)
            digest.update(piece)
            if not message.get("more_body", False):
                return Body(pieces, digest.digest())
    except BaseException:
        # The error refers to this frame until its answer has been sent, which may take seconds.
        pieces.clear()
        raise


def _is_utf8(parameters: str) -> bool:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset":
            return value.strip().strip('"').lower() in ("utf-8", "utf8", "us-ascii")
    return True


def _unsupported(detail: str) -> ConveyorError:
    return ConveyorError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, detail)


T = TypeVar("T")


class ConnectionGuard:
    """Runs work while the client of a request is connected. The body must have been read before."""

    def __init__(self, request: Request) -> None:
        self._request = request

    async def __call__(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` and return its result. Raises ClientGone if the client hangs up first."""
        results: list[T] = []
        with unwrap():
            async with anyio.create_task_group() as group:

                async def watch() -> None:
                    while (await self._request.receive())["type"] != "http.disconnect":
                        pass
                    group.cancel_scope.cancel()

                group.start_soon(watch)
                results.append(await work())
                group.cancel_scope.cancel()
        if not results:
            raise ClientGone
        return results[0]


HEADER = "Idempotency-Key"
REPLAYED_HEADER = "Idempotency-Replayed"
MAX_LENGTH = 128


def keyed_request(request: Request, caller_id: str, body: Body) -> KeyedRequest | None:
    """Read the Idempotency-Key header; None without one.

    Raises ConveyorError(invalid_argument) for a key that is empty, too long or given twice.
    """
    keys = request.headers.getlist(HEADER)
    if not keys:
        return None
    if len(keys) > 1 or not 1 <= _characters(keys[0]) <= MAX_LENGTH:
        raise ConveyorError(
            ErrorCode.INVALID_ARGUMENT,
            f"{HEADER}: must be one text of 1 to {MAX_LENGTH} characters",
        )
    target = request.url.path + "?" + request.url.query
    scope = "\n".join((caller_id, request.method, target, keys[0]))
    return KeyedRequest(hashlib.sha256(scope.encode()).hexdigest(), body.digest)


def _characters(value: str) -> int:
    """Count the characters of a header, whose bytes are UTF-8 or else Latin-1."""
    try:
        return len(value.encode("latin-1").decode())
    except UnicodeDecodeError:
        return len(value)


def given_response(given: Reply) -> Response:
    """Answer with stored bytes, and mark a repeated answer."""
    headers = {REPLAYED_HEADER: "true"} if given.replayed else {}
    return Response(
        given.answer.body,
        status_code=given.answer.status,
        headers=headers,
        media_type="application/json",
    )


_UPLOAD = re.compile(UPLOAD_PATH.replace("{input_id}", "[^/]+"))


BODY_SECONDS = 30.0
"""Default number of seconds that a reader waits for more of a body."""


class BodyLimits:
    """Middleware that bounds the silence within every body, and the size of every one except
    uploads, which the service bounds."""

    def __init__(self, app: ASGIApp, *, limit: int, seconds: float = BODY_SECONDS) -> None:
        self._app = app
        self._limited = BodyLimit(app, limit=limit)
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises ConveyorError: payload_too_large, request_timeout."""
        app = self._app if _is_upload(scope) else self._limited
        is_whole = False

        async def receive_in_time() -> Message:
            nonlocal is_whole
            if is_whole:  # the next message says that the client has hung up
                return await receive()
            with anyio.move_on_after(self._seconds):
                message = await receive()
                is_whole = not message.get("more_body", False)
                return message
            raise ConveyorError(
                ErrorCode.REQUEST_TIMEOUT,
                f"no byte of the body came for {self._seconds:g} s (CONVEYOR_BODY_TIMEOUT)",
            )

        await app(scope, receive_in_time, send)


async def receive_upload(request: Request, service: Service) -> Response:
    """Store the body in the slot of a signed link. Needs no key."""
    types = request.headers.getlist("Content-Type")
    params = request.query_params
    slot = await service.inputs.open_upload(
        request.path_params["input_id"],
        expires=text(params, "expires") or "",
        signature=text(params, "signature") or "",
        content_type=types[0] if len(types) == 1 else "",
    )
    announced = request.headers.get("Content-Length", "")
    await service.inputs.store(
        slot,
        _pieces(request),
        announced=int(announced[:20]) if announced.isdecimal() else None,
    )
    return Response()


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """Yield the body as it arrives. Raises ClientGone."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def _is_upload(scope: Scope) -> bool:
    return (
        scope["type"] == "http"
        and scope["method"] == "PUT"
        and _UPLOAD.fullmatch(scope["path"]) is not None
    )
