"""The viewers of pages: the developer on this machine, or somebody who signed in.

The API key of a person lies, sealed, in a cookie of the browser, which counts for pages alone. It
is asked for anew with each request: a key that is no longer accepted is signed out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from conveyor.domain.api_keys import is_valid_key
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.token_bucket import Bucket, take
from conveyor.http.auth import AnyKey, ApiKeys, Operators, check_rate_limit
from conveyor.http.middleware import is_loopback
from conveyor.http.pages.viewer import Viewer
from conveyor.ports.clock import Clock
from conveyor.ports.rate_limit import RateLimit
from conveyor.service.callers import Caller
from conveyor.service.service import Service
from conveyor.service.sign_ins import LONGEST_SIGN_IN

ROOT = "/dashboard"
SIGN_IN = f"{ROOT}/sign-in"
SIGN_OUT = f"{ROOT}/sign-out"
COOKIE = "__Host-conveyor"
"""A browser sends a cookie of this name to the host that set it alone, and over https alone."""
SIGN_INS_A_SECOND = 1.0
SIGN_INS_AT_ONCE = 20
"""Sign-ins of everybody together, for each process: a key cannot be guessed, and the bound keeps
it so."""

_LOCAL = Viewer(caller_id=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """Tells whether the server listens on loopback alone, and who sees all callers."""

    on_loopback: bool
    operators: Operators = field(default_factory=Operators)


class Sessions:
    """Identifies viewers, signs them in and out, and checks that a form came from a page of theirs.

    Nothing is asked for, and all callers are shown, only where the server listens on loopback, the
    request names a loopback host, and no proxy has passed it on: behind a proxy, everybody comes
    from loopback.
    """

    def __init__(
        self,
        service: Service,
        clock: Clock,
        options: SessionOptions,
        *,
        api_keys: ApiKeys,
        rate_limit: RateLimit | None = None,
    ) -> None:
        self._service = service
        self._clock = clock
        self._options = options
        self._api_keys = api_keys
        self._rate_limit = rate_limit
        self._bucket: Bucket | None = None

    async def identify(self, request: Request) -> Viewer | None:
        """Return the viewer of a request; None if the person has to sign in first.

        Raises ConveyorError(rate_limited) as the API does.
        """
        viewer = self._present(request)
        if viewer is not None and viewer.caller_id is not None:
            await check_rate_limit(self._rate_limit, viewer.caller_id)
        return viewer

    def still_sees(self, request: Request, viewer: Viewer) -> bool:
        """Ask for the sign-in and the key anew."""
        return self._present(request) == viewer

    def keeps_cookies(self, request: Request) -> bool:
        """Tell whether the browser will keep the cookie of a sign-in, which is for https alone."""
        return is_secure(request, self._service.options.public_origin)

    @property
    def accepts_any(self) -> bool:
        """Tell whether every key signs in."""
        return isinstance(self._api_keys, AnyKey)

    def sign_in(self, api_key: str, next_page: str) -> Response | None:
        """Sign a person in and send the browser to `next_page`; None for an unknown key.

        Raises ConveyorError(rate_limited).
        """
        self._bucket, wait = take(
            self._bucket, self._clock.monotonic(), rate=SIGN_INS_A_SECOND, burst=SIGN_INS_AT_ONCE
        )
        if wait > 0:
            raise ConveyorError(
                ErrorCode.RATE_LIMITED,
                "too many people sign in: try again later",
                retry_after=math.ceil(wait),
            )
        if not is_valid_key(api_key) or self._viewer(api_key) is None:
            return None
        response = RedirectResponse(_own_page(next_page), status_code=303)
        _set(response, self._service.sign_ins.seal(api_key), LONGEST_SIGN_IN)
        return response

    def sign_out(self) -> Response:
        """Take the cookie back, and send the browser to the sign-in page."""
        response = RedirectResponse(SIGN_IN, status_code=303)
        _set(response, "", 0)
        return response

    def caller(self, request: Request, viewer: Viewer) -> Caller | None:
        """Return the caller who signed in; None where the viewer sees all callers."""
        api_key = self._service.sign_ins.open(request.cookies.get(COOKIE, ""))
        if viewer.caller_id is None or api_key is None:
            return None
        return self._service.identify(api_key)

    def token(self, request: Request) -> str:
        """Return the token that forms on a page carry: of the person's sign-in, or of this server's
        secret where nobody has to sign in."""
        return self._service.sign_ins.token(self._sign_in(request))

    def check_token(self, request: Request, token: str) -> None:
        """Raise ConveyorError(permission_denied) for a form that was on no page of the viewer."""
        if not self._service.sign_ins.has_token(self._sign_in(request), token):
            raise ConveyorError(
                ErrorCode.PERMISSION_DENIED, "the form is of another session: load the page again"
            )

    def _present(self, request: Request) -> Viewer | None:
        if self._is_local(request):
            return _LOCAL
        api_key = self._service.sign_ins.open(request.cookies.get(COOKIE, ""))
        return None if api_key is None else self._viewer(api_key)

    def _is_local(self, request: Request) -> bool:
        return self._options.on_loopback and is_local(request.headers)

    def _sign_in(self, request: Request) -> str:
        return "" if self._is_local(request) else request.cookies.get(COOKIE, "")

    def _viewer(self, api_key: str) -> Viewer | None:
        operator = self._options.operators.find(api_key)
        if operator is not None:
            return Viewer(None, acts=operator.acts, operator=operator.hashed, signed_in=True)
        if not self._api_keys.knows(api_key):
            return None
        return Viewer(self._service.identify(api_key).caller_id, signed_in=True)


def is_local(headers: Headers) -> bool:
    """Tell whether a request names a loopback host, and no proxy has passed it on."""
    if any(name == "forwarded" or name.startswith("x-forwarded-") for name in headers):
        return False
    return _names_loopback(headers)


def is_secure(request: Request, public_origin: str) -> bool:
    """Tell whether a browser keeps a cookie for https: the page came over https, as the server, the
    proxy before it, its public origin or the browser itself says, or from loopback."""
    headers = request.headers
    public = urlsplit(public_origin)
    forwarded = headers.get("X-Forwarded-Proto", "").partition(",")[0].strip().lower()
    return (
        request.url.scheme == "https"
        or forwarded == "https"
        or "proto=https" in headers.get("Forwarded", "").lower().partition(",")[0]
        or (public.scheme == "https" and headers.get("Host", "").lower() == public.netloc.lower())
        or "Sec-Fetch-Site" in headers  # sent by browsers to trustworthy origins alone
        or _names_loopback(headers)
    )


def _names_loopback(headers: Headers) -> bool:
    hosts = headers.getlist("Host")
    return len(hosts) == 1 and is_loopback(urlsplit(f"//{hosts[0]}").hostname or "")


def _own_page(path: str) -> str:
    """Return a path of a page of ours; the overview in place of anything else."""
    parts = urlsplit(path)
    is_ours = path == ROOT or path.startswith((f"{ROOT}/", f"{ROOT}?"))
    is_plain = not parts.scheme and not parts.netloc and "\\" not in path and path.isprintable()
    # A browser takes %2e for a dot, and some proxies %2f for a slash.
    climbs = not {".", ".."}.isdisjoint(unquote(parts.path).split("/"))
    return path if is_ours and is_plain and not climbs else ROOT


def _set(response: Response, value: str, seconds: int) -> None:
    response.set_cookie(
        COOKIE, value, max_age=seconds, path="/", secure=True, httponly=True, samesite="lax"
    )
    response.headers["Cache-Control"] = "no-store"
