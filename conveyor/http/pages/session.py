"""Who looks at a page: the developer on this machine, or somebody who signed in."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request

from conveyor.http.middleware import is_loopback
from conveyor.http.pages.viewer import Viewer

_EVERYBODY = Viewer(caller_id=None)


class Sessions:
    """Identifies viewers.

    Nothing is asked for, and all callers are shown, only where the server listens on loopback, the
    request names a loopback host, and no proxy has passed it on: behind a proxy, everybody comes
    from loopback.
    """

    def __init__(self, *, on_loopback: bool) -> None:
        self._on_loopback = on_loopback

    async def identify(self, request: Request) -> Viewer | None:
        """Return the viewer of a request; None if the person has to sign in first."""
        return _EVERYBODY if self._on_loopback and is_local(request.headers) else None


def is_local(headers: Headers) -> bool:
    """Tell whether a request names a loopback host, and no proxy has passed it on."""
    if any(name == "forwarded" or name.startswith("x-forwarded-") for name in headers):
        return False
    hosts = headers.getlist("Host")
    return len(hosts) == 1 and is_loopback(urlsplit(f"//{hosts[0]}").hostname or "")
