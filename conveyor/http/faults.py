"""Faults of the API on request, for tests of what its clients do then: an error, no answer, or half
of one. Only a development server has them, below /_dev/faults, for those who have its token.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Any

import anyio
import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conveyor.domain import strict_json
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.text_rules import is_retry_after
from conveyor.http.malformed import CONNECTION
from conveyor.http.middleware import DEV_PATH, METHODS, request_id_of
from conveyor.http.problems import INSTANCE_PREFIX, MEDIA_TYPE, PROBLEMS, ProblemDocument
from conveyor.http.request import json_response, read_small_body
from conveyor.http.routes_dev import check_developer
from conveyor.service.responses import PROBLEM_TYPE, encode

FAULTS_PATH = f"{DEV_PATH}/faults"
API_PATH = "/v1/"
MOST_FAULTS = 1_000
"""Faults that wait for their requests."""


class ApiFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault of the next `times` requests whose path is like `path`, with `*` for any characters,
    and whose method is `method`, if it is given.

    `error` answers with `status`, and with `retry_after` as its Retry-After; the request has no
    effect, and has none with `hang`, which never answers. `cut` serves the request, and breaks the
    connection in the middle of the answer.
    """

    kind: str = "error"
    status: Annotated[int, Meta(ge=400, le=599)] = 503
    times: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    path: Annotated[str, Meta(min_length=1, max_length=1_024)] = f"{API_PATH}*"
    method: Annotated[str, Meta(max_length=16)] = ""
    retry_after: Annotated[str, Meta(max_length=64, pattern=r"^[\x20-\x7e]*$")] = ""


KINDS = ("error", "hang", "cut")


class ApiFaultsBody(msgspec.Struct, frozen=True):
    """The faults that wait for their requests, in the order in which they are asked."""

    faults: list[ApiFault]


class ApiFaults:
    """Keeps the faults that were asked for, and gives each to its requests. The routes want
    the `token`."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._waiting: list[ApiFault] = []
        self._cleared = anyio.Event()

    def routes(self) -> list[Route]:
        """Return the routes that show, add and drop faults."""
        return [Route(FAULTS_PATH, self._serve, methods=["GET", "POST", "DELETE"])]

    def clear(self) -> None:
        """Drop all faults, and break the connections of requests that get no answer."""
        self._waiting.clear()
        self._cleared.set()
        self._cleared = anyio.Event()

    def take(self, method: str, path: str) -> ApiFault | None:
        """Return the fault of a request, if there is one, and count it as given."""
        if not path.startswith(API_PATH):
            return None
        for place, fault in enumerate(self._waiting):
            if fault.method in ("", method) and fnmatchcase(path, fault.path):
                if fault.times > 1:
                    left = msgspec.structs.replace(fault, times=fault.times - 1)
                    self._waiting[place] = left
                else:
                    del self._waiting[place]
                return fault
        return None

    async def hang(self, receive: Receive) -> None:
        """Wait until the client has left, or all faults are dropped."""
        cleared = self._cleared
        async with anyio.create_task_group() as group:

            async def until_cleared() -> None:
                await cleared.wait()
                group.cancel_scope.cancel()

            group.start_soon(until_cleared)
            while (await receive())["type"] != "http.disconnect":
                pass
            group.cancel_scope.cancel()

    async def _serve(self, request: Request) -> Response:
        check_developer(request, self._token)
        if request.method == "DELETE":
            self.clear()
        elif request.method == "POST":
            fault = read_fault(await read_small_body(request))
            if len(self._waiting) >= MOST_FAULTS:
                text = f"{MOST_FAULTS:,} faults wait already: DELETE {FAULTS_PATH} drops them"
                raise ConveyorError(ErrorCode.CONFLICT, text)
            self._waiting.append(fault)
        return json_response(ApiFaultsBody(list(self._waiting)))


def read_fault(body: bytes) -> ApiFault:
    """Read a fault. Raises ConveyorError(invalid_argument)."""
    try:
        fault = msgspec.convert(strict_json.decode(body), ApiFault)
    except msgspec.ValidationError as error:
        raise ConveyorError(ErrorCode.INVALID_ARGUMENT, str(error)) from None
    if fault.kind not in KINDS:
        text = f"kind: must be one of {', '.join(KINDS)}"
        raise ConveyorError(ErrorCode.INVALID_ARGUMENT, text)
    if not fault.path.startswith(API_PATH.rstrip("/")):
        text = f"path: only paths below {API_PATH} fail, such as {API_PATH}jobs*"
        raise ConveyorError(ErrorCode.INVALID_ARGUMENT, text)
    if fault.retry_after and not is_retry_after(fault.retry_after):
        text = "retry_after: takes whole seconds, or an HTTP date"
        raise ConveyorError(ErrorCode.INVALID_ARGUMENT, text)
    method = fault.method.upper()
    if method and method not in METHODS:
        text = f"method: must be one of {', '.join(sorted(METHODS))}"
        raise ConveyorError(ErrorCode.INVALID_ARGUMENT, text)
    return msgspec.structs.replace(fault, method=method)


class FaultyAnswers:
    """Middleware that gives requests the faults that were asked for."""

    def __init__(self, app: ASGIApp, *, faults: ApiFaults) -> None:
        self._app = app
        self._faults = faults

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        fault = None
        if scope["type"] == "http":
            fault = self._faults.take(scope["method"], scope["path"])
        if fault is None:
            await self._app(scope, receive, send)
        elif fault.kind == "error":
            await _refusal(fault, request_id_of(scope))(scope, receive, send)
        elif fault.kind == "hang":
            await self._faults.hang(receive)
            _cut(scope)
            await _until_gone(receive)
        else:
            await self._app(scope, receive, _Half(scope, send))
            await _until_gone(receive)


class _Half:
    """Sends the head of an answer and half of the first piece of its body, then breaks the
    connection."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._head: Message | None = None
        self._is_cut = False

    async def __call__(self, message: Message) -> None:
        if self._is_cut:
            return
        if message["type"] == "http.response.start":
            self._head = message
            return
        self._is_cut = True
        body = message.get("body", b"")
        if body and self._head is not None:
            await self._send(self._head)
            half = body[: len(body) // 2]
            await self._send({"type": "http.response.body", "body": half, "more_body": True})
        _cut(self._scope)


def _cut(scope: Scope) -> None:
    found: Any = scope.get("extensions", {}).get(CONNECTION)
    connection = None if found is None else found()
    if connection is not None:
        connection.cut()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _refusal(fault: ApiFault, request_id: str) -> Response:
    """Build the problem document of an error, with the code that this API has for its status."""
    usual = {status: (code, title) for code, (status, title) in reversed(PROBLEMS.items())}
    usual[429] = (ErrorCode.RATE_LIMITED, PROBLEMS[ErrorCode.RATE_LIMITED][1])
    nearest = ErrorCode.INVALID_ARGUMENT if fault.status < 500 else ErrorCode.INTERNAL
    code, title = usual.get(fault.status, (nearest, PROBLEMS[nearest][1]))
    document = ProblemDocument(
        type=PROBLEM_TYPE + code.value,
        title=title,
        status=fault.status,
        detail="a test asked for this failure",
        code=code.value,
        instance=INSTANCE_PREFIX + request_id,
    )
    headers = {"Retry-After": fault.retry_after} if fault.retry_after else {}
    return Response(
        encode(document), status_code=fault.status, headers=headers, media_type=MEDIA_TYPE
    )
