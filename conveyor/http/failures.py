"""Whatever is raised while a request is served becomes a problem document, and nothing else."""

from __future__ import annotations

import logging
import traceback

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.http.body import ClientGone
from conveyor.http.problems import problem_response
from conveyor.http.request_id import request_id_of

_log = logging.getLogger("conveyor.http")


class Failures:
    """Middleware that answers for what the application raises."""

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
    """The answer to a path that nothing serves, or not with this method."""
    request_id = request_id_of(request.scope)
    if not isinstance(error, HTTPException) or error.status_code != 405:
        return problem_response(
            ConveyorError(ErrorCode.NOT_FOUND, "nothing is served at this path"),
            request_id=request_id,
        )
    allowed = (error.headers or {}).get("Allow", "")
    response = problem_response(
        ConveyorError(ErrorCode.METHOD_NOT_ALLOWED, f"this path takes {allowed}"),
        request_id=request_id,
    )
    response.headers["Allow"] = allowed
    return response


def _unexpected(error: Exception, request_id: str) -> ConveyorError:
    # The text of an unforeseen exception may hold anything, a key included: it is not logged.
    _log.error(
        "unhandled error",
        extra={
            "request_id": request_id,
            "error": type(error).__name__,
            "where": "".join(traceback.format_tb(error.__traceback__)),
        },
    )
    return ConveyorError(ErrorCode.INTERNAL, "the server met an unforeseen error; it was logged")
