"""A web page must not drive the API: foreign Host names and Origins are refused.

A name of somebody else's that resolves to this machine shows in Host; a page of another origin,
another port of this machine included, shows in Origin. No CORS header is ever sent.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from conveyor.domain.errors import ConveyorError, ErrorCode


class Origins:
    """Middleware that lets through loopback names, `allowed_hosts`, and the public origin."""

    def __init__(self, app: ASGIApp, *, allowed_hosts: Collection[str], public_origin: str) -> None:
        self._app = app
        self._public_origin = _origin_of(public_origin)
        self._allowed = {_canonical(host) for host in allowed_hosts}
        self._allowed.add(_canonical(urlsplit(public_origin).hostname or ""))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises ConveyorError(permission_denied)."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            hosts = headers.getlist("Host")
            for host in hosts:
                if not self._is_ours(host):
                    raise _refused("the Host header names another server")
            own = {f"{scheme}://{host.lower()}" for host in hosts for scheme in ("http", "https")}
            for origin in headers.getlist("Origin"):
                if origin.lower() not in own and origin.lower() != self._public_origin:
                    raise _refused("requests of web pages of another origin are refused")
        await self._app(scope, receive, send)

    def _is_ours(self, host: str) -> bool:
        try:
            parts = urlsplit(f"//{host}")
            name = _canonical(parts.hostname or "")
        except ValueError:
            return False
        if not name or "@" in host or parts.netloc != host:
            return False
        return name in self._allowed or _is_loopback(name)


def _is_loopback(name: str) -> bool:
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
