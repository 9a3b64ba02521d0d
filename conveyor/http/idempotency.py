"""The Idempotency-Key header: what it is scoped to, and how a repeated answer shows."""

from __future__ import annotations

import hashlib
import re

from starlette.requests import Request
from starlette.responses import Response

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.http.body import Body
from conveyor.service.once import Given, KeyedRequest

HEADER = "Idempotency-Key"
REPLAYED_HEADER = "Idempotency-Replayed"
MAX_LENGTH = 128

_KEY = re.compile(rf"[\x21-\x7e]{{1,{MAX_LENGTH}}}")


def keyed_request(request: Request, caller_id: str, body: Body) -> KeyedRequest | None:
    """The use of a key that a request makes, None without the header.

    Raises ConveyorError(invalid_argument) for a key that is no such thing.
    """
    keys = request.headers.getlist(HEADER)
    if not keys:
        return None
    if len(keys) > 1 or not _KEY.fullmatch(keys[0]):
        raise ConveyorError(
            ErrorCode.INVALID_ARGUMENT,
            f"{HEADER}: must be 1 to {MAX_LENGTH} visible ASCII characters",
        )
    target = request.url.path + "?" + request.url.query
    scope = "\n".join((caller_id, request.method, target, keys[0]))
    return KeyedRequest(hashlib.sha256(scope.encode()).hexdigest(), body.digest)


def given_response(given: Given) -> Response:
    """The very bytes of an answer, marked where they repeat an earlier one."""
    headers = {REPLAYED_HEADER: "true"} if given.replayed else {}
    return Response(
        given.answer.body,
        status_code=given.answer.status,
        headers=headers,
        media_type="application/json",
    )
