"""Who calls: the X-API-Key header, and nothing else (a key in a query ends up in logs)."""

from __future__ import annotations

from starlette.requests import Request

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.http.api_keys import ApiKeys
from conveyor.service.callers import Caller
from conveyor.service.service import Service

HEADER = "X-API-Key"


def authenticate(request: Request, service: Service, api_keys: ApiKeys) -> Caller:
    """The caller of a request. Raises ConveyorError(unauthenticated), for an unknown key too."""
    keys = request.headers.getlist(HEADER)
    caller = service.identify(keys[0] if len(keys) == 1 else None)
    if not api_keys.knows(caller.api_key):
        raise ConveyorError(ErrorCode.UNAUTHENTICATED, "this API key is not known here")
    return caller
