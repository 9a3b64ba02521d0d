"""The middleware of every application: ids, the access log, problem documents, the origin check.

`RequestId` gives each request one id, the caller's own if it is well-formed, and returns it in
X-Request-ID. `AccessLog` logs one line a request without its query (links are signed there), its
headers, its body, or the path of a receiver behind the inbox. `LingeringClose` lets a client hear
an answer that comes before its request has ended. `ProblemResponses` turns every exception into a
problem document. `Origins` refuses foreign Host names and Origins, because a web page must not
drive the API: a name that somebody else resolves to this machine shows in Host, a page of another
origin, even of another port of this machine, shows in Origin. No CORS header is ever sent.
`RequestTraces` records each request for those who collect traces.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import traceback
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conveyor.domain import ids
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.histogram import Histogram
from conveyor.http.problems import problem_response
from conveyor.http.request import ClientGone
from conveyor.ports.clock import Clock
from conveyor.ports.tracing import TRACEPARENT, Tracer

HEADER = "X-Request-ID"
DEV_PATH = "/_dev"
INBOX_PATH = f"{DEV_PATH}/inbox"
"""Paths below are a name, then the path of a receiver's URL, which may hold a secret."""

_SANE = re.compile(r"[A-Za-z0-9._-]{1,128}")
_KEY = "conveyor.request_id"


def request_id_of(scope: Scope) -> str:
    """Return the id that the middleware gave a request."""
    request_id: str = scope[_KEY]
    return request_id


class RequestId:
    """Outermost middleware: adds the id to every answer."""

    def __init__(self, app: ASGIApp, *, clock: Clock) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if _SANE.fullmatch(given) else self._clock.new_id()
        scope[_KEY] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class RequestTraces:
    """Middleware that traces requests: a sample of those that read, and all that may change
    something, so that the traces of attempts find the submit of their run.

    A span has the route in its name, and ids, never the path, the query or a header. A caller's own
    `traceparent` is linked to.
    """

    def __init__(self, app: ASGIApp, *, clock: Clock, tracer: Tracer) -> None:
        self._app = app
        self._clock = clock
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, method = self._clock.now(), scope["method"]
        if method in _READING:
            trace = self._tracer.begin(f"{method} request", self._clock.new_id(), started_at=began)
        else:
            trace = self._tracer.begin_always(f"{method} request", started_at=began)
        if trace is None:
            await self._app(scope, receive, send)
            return
        trace.link(Headers(scope=scope).get("traceparent", ""))
        status = CLIENT_CLOSED

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        token = TRACEPARENT.set(trace.traceparent)
        try:
            await self._app(scope, receive, send_and_note)
        finally:
            TRACEPARENT.reset(token)
            attributes = _request_attributes(scope, status)
            trace.end(self._clock.now(), attributes, failed=status >= 500)


def route_of(scope: Scope) -> str:
    """Return the pattern of the path that a request matched, "none" if it matched none."""
    path: str = getattr(scope.get("route"), "path", "none")
    return path


def _method_of(scope: Scope) -> str:
    """Return the method of a request, "other" for one that no route has."""
    method: str = scope["method"]
    return method if method in METHODS else "other"


_READING = ("GET", "HEAD")
METHODS = frozenset({*_READING, "DELETE", "OPTIONS", "PATCH", "POST", "PUT"})
_TRACED_IDS = frozenset({"job_id", "run_id", "task_id", "export_id", "delivery_id"})


def _request_attributes(scope: Scope, status: int) -> dict[str, str | int]:
    """Describe a request by its route, its status, and the well-formed ids in its path."""
    attributes: dict[str, str | int] = {
        "method": scope["method"],
        "route": route_of(scope),
        "status": status,
        "request_id": request_id_of(scope),
    }
    return attributes | {
        name: value
        for name, value in scope.get("path_params", {}).items()
        if name in _TRACED_IDS and (ids.is_ulid(value) or ids.is_task_id(value))
    }


CLIENT_CLOSED = 499
"""Status in the log if the client was gone before the answer."""

_log = logging.getLogger("conveyor.http")


class AccessLog:
    """Logs method, path, status, milliseconds and request id, and counts in `took` how long answers
    take to begin, by method, route and class of the status."""

    def __init__(self, app: ASGIApp, *, clock: Clock, took: Histogram) -> None:
        self._app = app
        self._clock = clock
        self._took = took

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = self._clock.monotonic()
        status = CLIENT_CLOSED

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                seconds = self._clock.monotonic() - began
                self._took.observe(
                    seconds, _method_of(scope), route_of(scope), f"{status // 100}xx"
                )
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            _log.info(
                "request",
                extra={
                    "method": scope["method"],
                    "path": _path_to_log(scope["path"]),
                    "status": status,
                    "ms": round((self._clock.monotonic() - began) * 1_000, 1),
                    "request_id": request_id_of(scope),
                },
            )


def _path_to_log(path: str) -> str:
    if not path.startswith(f"{INBOX_PATH}/"):
        return path
    return "/".join(path.split("/")[: INBOX_PATH.count("/") + 2])


class ProblemResponses:
    """Middleware that turns exceptions into problem documents."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def send_and_note(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        request_id = request_id_of(scope)
        try:
            await self._app(scope, receive, send_and_note)
        except ClientGone:
            return
        except anyio.get_cancelled_exc_class():
            # Only the end of the server cancels a request as a whole.
            if not started:
                with anyio.CancelScope(shield=True):
                    answer = problem_response(_stopping(), request_id=request_id)
                    await answer(scope, receive, send)
            raise
        except Exception as error:
            refused = error if isinstance(error, ConveyorError) else _unexpected(error, request_id)
            if started:
                raise
            if error is refused and refused.code in (ErrorCode.UNAVAILABLE, ErrorCode.INTERNAL):
                _log.warning(
                    "a request could not be served",
                    extra={"request_id": request_id, "error": str(error)},
                )
            await problem_response(refused, request_id=request_id)(scope, receive, send)


async def routing_problem(request: Request, error: Exception) -> Response:
    """Answer a path that does not exist, or not with this method."""
    request_id = request_id_of(request.scope)
    if not isinstance(error, HTTPException) or error.status_code != 405:
        return problem_response(
            ConveyorError(ErrorCode.NOT_FOUND, "no such path"),
            request_id=request_id,
        )
    allowed = (error.headers or {}).get("Allow", "")
    response = problem_response(
        ConveyorError(ErrorCode.METHOD_NOT_ALLOWED, f"this path allows {allowed}"),
        request_id=request_id,
    )
    response.headers["Allow"] = allowed
    return response


STOPPING_RETRY = 5
"""Seconds after which a request that the end of its server cut off may be sent again."""


def _stopping() -> ConveyorError:
    return ConveyorError(
        ErrorCode.UNAVAILABLE,
        "the server is stopping, and may have done this or not; ask again later",
        retry_after=STOPPING_RETRY,
    )


def _unexpected(error: Exception, request_id: str) -> ConveyorError:
    # The text of an unexpected exception is not logged: it may hold anything, even a key.
    _log.error(
        "unhandled error",
        extra={
            "request_id": request_id,
            "error": type(error).__name__,
            "where": "".join(traceback.format_tb(error.__traceback__)),
        },
    )
    return ConveyorError(ErrorCode.INTERNAL, "unexpected error; the server has logged it")


MAX_UNREAD = 67_108_864
LINGER_SECONDS = 10.0


class LingeringClose:
    """Middleware that reads the rest of a request before its connection is closed, and drops it.

    A socket that is closed over unread bytes is reset, and the client loses the answer that came
    early. At most MAX_UNREAD bytes are read, for LINGER_SECONDS.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        closes, is_read = False, False

        async def receive_and_note() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = not message.get("more_body", False)
            return message

        async def send_and_linger(message: Message) -> None:
            nonlocal closes
            if message["type"] == "http.response.start":
                closes = Headers(raw=message["headers"]).get("Connection") == "close"
            elif closes and not is_read and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await _drop(receive_and_note)
                message = {"type": "http.response.body"}
            await send(message)

        await self._app(scope, receive_and_note, send_and_linger)


async def _drop(receive: Receive) -> None:
    size = 0
    with anyio.move_on_after(LINGER_SECONDS):
        while size < MAX_UNREAD:
            message = await receive()
            size += len(message.get("body", b""))
            if not message.get("more_body", False):
                return


class Origins:
    """Middleware that accepts loopback names, `allowed_hosts`, and the public origin. `explain`
    makes the page for a browser that named another host."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        allowed_hosts: Collection[str],
        public_origin: str,
        explain: Callable[[Request, str], Response | None],
    ) -> None:
        self._app = app
        self._explain = explain
        self._public_origin = _origin_of(public_origin)
        self._allowed = {_canonical(host) for host in allowed_hosts}
        self._allowed.add(_canonical(urlsplit(public_origin).hostname or ""))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises ConveyorError: permission_denied, or invalid_argument for a
        request of HTTP/1.1 without Host."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            hosts = headers.getlist("Host")
            if not hosts and scope["http_version"] == "1.1":
                raise ConveyorError(ErrorCode.INVALID_ARGUMENT, "the Host header is missing")
            for host in hosts:
                if not self._is_ours(host):
                    page = self._explain(Request(scope), host)
                    if page is None:
                        raise _refused(
                            "the Host header names another server: CONVEYOR_ALLOWED_HOSTS lists "
                            "the further names of this one"
                        )
                    await page(scope, receive, send)
                    return
            own = {f"{scheme}://{host.lower()}" for host in hosts for scheme in ("http", "https")}
            # A form of a page that sends no referrer comes without its origin. The browser itself
            # says whose page it was.
            if headers.get("Sec-Fetch-Site") == "same-origin":
                own.add("null")
            for origin in headers.getlist("Origin"):
                if origin.lower() not in own and origin.lower() != self._public_origin:
                    raise _refused("requests from web pages of another origin are refused")
        await self._app(scope, receive, send)

    def _is_ours(self, host: str) -> bool:
        try:
            parts = urlsplit(f"//{host}")
            name = _canonical(parts.hostname or "")
        except ValueError:
            return False
        if not name or "@" in host or parts.netloc != host:
            return False
        return name in self._allowed or is_loopback(name)


def is_loopback(name: str) -> bool:
    """Return whether a host name or an address is this machine's loopback."""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _canonical(host: str) -> str:
    name = host.strip().lower().rstrip(".")
    return name[1:-1] if name.startswith("[") and name.endswith("]") else name


def _origin_of(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}".lower()


def _refused(detail: str) -> ConveyorError:
    return ConveyorError(ErrorCode.PERMISSION_DENIED, detail)
