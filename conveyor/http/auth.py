"""Who calls: the X-API-Key header, and nothing else (a key in a query ends up in logs)."""

from __future__ import annotations

from starlette.requests import Request

from conveyor.service.callers import Caller
from conveyor.service.service import Service

HEADER = "X-API-Key"


def authenticate(request: Request, service: Service) -> Caller:
    """The caller of a request. Raises ConveyorError(unauthenticated)."""
    keys = request.headers.getlist(HEADER)
    return service.identify(keys[0] if len(keys) == 1 else None)
