"""The direct gateway: fetch the target from this machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import msgspec

from conveyor.gateway.decode import read_content
from conveyor.gateway.headers import (
    HttpAnswer,
    asked_pause,
    content_type,
    custom_headers,
    is_allowed,
    merged,
    without,
)
from conveyor.gateway.http_client import (
    DEFAULT_HEADERS,
    HttpCall,
    OpenClient,
    Opened,
)
from conveyor.gateway.landmarks import HostStreak
from conveyor.gateway.problems import (
    MAX_REDIRECTS,
    host_pause,
    of_target,
    target_failure,
    target_verdict,
    too_many_redirects,
    unconnected,
)
from conveyor.gateway.targets import Target, is_public, parse_target, redirected
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import HostRefusal, ScrapeFailed, ScrapeRequest, Shared, Success
from conveyor.wire.client import HttpClient
from conveyor.wire.errors import TransportError, TransportTrouble
from conveyor.wire.resolver import Lookup

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_SECRETS = ("authorization", "cookie")
_OWN = (TransportTrouble.EXHAUSTED, TransportTrouble.UNSENDABLE, TransportTrouble.REFUSED)
"""Troubles that come before anything goes out."""
_SAFE = frozenset({"GET", "HEAD"})


class _Hop(msgspec.Struct, frozen=True):
    """One request of a chain of redirects."""

    method: str
    target: Target
    headers: dict[str, str]
    body: bytes | None

    @property
    def is_private(self) -> bool:
        """Tell whether the request bears a field that is its caller's."""
        return without(self.headers, "content-type") != DEFAULT_HEADERS


@dataclass(slots=True)
class _Tally:
    """The requests that went out in one scrape for an API key, and the refusal of the last host,
    with the pause that it has since."""

    api_key: str
    sent: int = 0
    pause: float = 0.0
    refusal: HostRefusal | None = None


MOST_PAUSED_HOSTS = 4_096
SPREAD = 1.0
"""Seconds over which the first calls after a pause are spread."""
_ASK_FOR_PAUSES = frozenset({429, 503})


class HostPauses:
    """The hosts that asked to be left alone, and for how long.

    A host is a name and a port, whatever the scheme. A pause holds for all calls, or for those of
    one API key. Beyond MOST_PAUSED_HOSTS pauses, the one that ends first is forgotten.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends: dict[tuple[str, int, str], float] = {}

    def begin(self, target: Target, seconds: float, api_key: str = "") -> None:
        """Leave a host alone from now on, with the calls of one API key if it is named; a pause
        that ends later stays."""
        now = self._clock.monotonic()
        host = (*_host(target), api_key)
        if now + seconds <= self._ends.get(host, now):
            return
        if len(self._ends) >= MOST_PAUSED_HOSTS and host not in self._ends:
            self._ends = {host: end for host, end in self._ends.items() if end > now}
            if len(self._ends) >= MOST_PAUSED_HOSTS:
                del self._ends[min(self._ends, key=self._ends.__getitem__)]
        self._ends[host] = now + seconds

    def left(self, target: Target, api_key: str = "") -> float:
        """Return the seconds after which an API key may call a host, spread behind the end of its
        pause; 0 if it may be called at once."""
        if not self._ends:
            return 0.0
        host, now = _host(target), self._clock.monotonic()
        left = max(self._left((*host, key), now) for key in {"", api_key})
        return left + SPREAD * self._clock.random() if left else 0.0

    def _left(self, key: tuple[str, int, str], now: float) -> float:
        left = self._ends.get(key, now) - now
        if left <= 0:
            self._ends.pop(key, None)
        return max(left, 0.0)


def _host(target: Target) -> tuple[str, int]:
    return target.host.removesuffix("."), target.port


class DirectGateway:
    """The gateway port over plain HTTP.

    Unless `allow_private`, it touches only addresses of the public internet. It checks literal
    addresses, resolved names, and the peer of each connection, at every redirect. `connections`
    bounds the open connections; `retry_after_cap` is in seconds; `lookup` replaces the system's
    resolver. A host that answers 429 or 503 with a Retry-After is left alone that long, whatever
    the URL: until then its calls raise Postponed, those of the same API key alone where the
    request bore credentials or a header of its own. Of the params, only custom_headers and
    allowed_status_codes have an effect. A problem always has the target's own status, so
    original_status has nothing to add.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        allow_private: bool = False,
        connections: int = 100,
        retry_after_cap: float = 3_600.0,
        lookup: Lookup | None = None,
        open_client: OpenClient = HttpClient,
    ) -> None:
        self._clock = clock
        self._allow_private = allow_private
        self._retry_after_cap = retry_after_cap
        self._pauses = HostPauses(clock)
        admits = None if allow_private else is_public
        self._client = open_client(connections=connections, admits=admits, lookup=lookup)
        self._streak = HostStreak(self._client, clock)

    def scrape(self, request: ScrapeRequest) -> HttpCall:
        """Fetch one URL. Raises ScrapeFailed on entry, or while the content is read."""
        return HttpCall(self._fetch, request)

    async def aclose(self) -> None:
        """Close every connection."""
        self._streak.forget()
        await self._client.aclose()

    async def _fetch(self, request: ScrapeRequest) -> Opened:
        tally = _Tally(request.api_key)
        try:
            hop, deadline = _first_hop(request), self._clock.monotonic() + request.timeout
            answer = await self._send(hop, request.timeout, tally)
            if _location(answer, request):
                answer = await self._follow(hop, answer, request, deadline, tally)
            try:
                if not 200 <= answer.status < 300 and not is_allowed(answer.status, request.params):
                    pause = max(tally.pause, self._asked(answer) or 0.0)
                    failed = target_verdict(answer.status, retry_after=pause)
                    failed.headers = answer.headers
                    failed.refusal = tally.refusal
                    raise failed
                content = await read_content(answer, request.max_bytes)
            except BaseException:
                answer.release()
                raise
        except ScrapeFailed as failed:
            failed.sent = tally.sent
            raise
        return answer, Success(
            content,
            content_type(answer.headers),
            sent=tally.sent,
            status=answer.status,
            headers=answer.headers,
            refusal=tally.refusal,
        )

    def _asked(self, answer: HttpAnswer) -> float | None:
        """Return the seconds of pause that an answer asks for, None if it asks for none."""
        after = answer.headers.get("Retry-After", "")
        if not after:
            return None
        return asked_pause(after, now=self._clock.now(), cap=self._retry_after_cap)

    async def _follow(
        self, hop: _Hop, answer: HttpAnswer, request: ScrapeRequest, deadline: float, tally: _Tally
    ) -> HttpAnswer:
        """Follow the redirects from an answer; return the last one."""
        followed = 0
        while location := _location(answer, request):
            answer.release()
            if followed == MAX_REDIRECTS:
                raise too_many_redirects()
            followed += 1
            hop = _next_hop(hop, answer.status, location)
            if request.guard is not None:
                await request.guard(hop.target.url)
            answer = await self._send(hop, deadline - self._clock.monotonic(), tally)
        return answer

    async def _send(self, hop: _Hop, timeout: float, tally: _Tally) -> HttpAnswer:
        if timeout <= 0:
            raise target_failure(TransportTrouble.TIMEOUT)
        host, url = hop.target.host, hop.target.url
        if not self._allow_private and _is_literal(host) and not is_public(host.strip("[]")):
            raise target_failure(TransportTrouble.REFUSED)
        self._heed_pause(hop, tally)
        try:
            answer = await self._client.send(
                hop.method,
                url,
                headers=hop.headers,
                body=hop.body,
                timeout=timeout,
                repeatable=hop.method in _SAFE,
                before=partial(self._heed_pause, hop, tally),
            )
        except TransportError as error:
            tally.sent += error.sent
            raise of_target(await self._unfetched(error, host), error.trouble) from None
        tally.sent += answer.sent
        self._streak.heard(host, url)
        if answer.status in _ASK_FOR_PAUSES:
            self._refused(hop, answer, tally)
        return answer

    def _heed_pause(self, hop: _Hop, tally: _Tally) -> None:
        """Raise Postponed if the host is to be left alone now."""
        if pause := self._pauses.left(hop.target, tally.api_key):
            raise host_pause(pause)

    def _refused(self, hop: _Hop, answer: HttpAnswer, tally: _Tally) -> None:
        """Take in that a host answers 429 or 503."""
        asked = self._asked(answer)
        # Others may be served without what this request bore.
        self._pauses.begin(hop.target, asked or 0.0, tally.api_key if hop.is_private else "")
        tally.pause = self._pauses.left(hop.target, tally.api_key)
        if asked is not None or answer.status == 429:
            name, port = _host(hop.target)
            tally.refusal = HostRefusal(f"{name}:{port}", asked, hop.is_private)

    async def _unfetched(self, error: TransportError, host: str) -> ScrapeFailed:
        """Return the verdict on a request without an answer. A host that refuses, and a name that
        does not exist, are answers of a network that is there."""
        if error.trouble in _OWN:
            return unconnected(error, None)
        if not error.is_connecting:
            return unconnected(error, await self._streak.broke())
        if error.is_answer:
            self._streak.end()
            return unconnected(error, None)
        of_name = error.trouble is TransportTrouble.UNRESOLVED
        shared = Shared.RESOLVER if of_name else Shared.NETWORK
        return unconnected(error, await self._streak.failed(host, shared))


def _location(answer: HttpAnswer, request: ScrapeRequest) -> str:
    """Return where an answer leads, nothing if it is to be taken as it is."""
    if answer.status not in _REDIRECTS or is_allowed(answer.status, request.params):
        return ""
    return answer.headers.get("Location", "")


def _first_hop(request: ScrapeRequest) -> _Hop:
    target = parse_target(request.url)
    headers, body = DEFAULT_HEADERS, None
    if target.credentials is not None:
        headers = {**headers, "Authorization": target.credentials}
    if request.body is not None:
        body = request.body.content.encode("utf-8", "replace")
        headers = {**headers, "Content-Type": request.body.content_type}
    if "custom_headers" in request.params:
        headers = merged(headers, custom_headers(request.params))
    return _Hop(request.method, target, headers, body)


def _next_hop(hop: _Hop, status: int, location: str) -> _Hop:
    target = redirected(hop.target, location)
    method, headers, body = hop.method, hop.headers, hop.body
    if status == 303 or (status in (301, 302) and method == "POST"):
        method, headers, body = "GET", without(headers, "content-type"), None
    if target.origin != hop.target.origin:
        headers = without(headers, *_SECRETS)
    if target.credentials is not None:
        headers = merged(headers, {"Authorization": target.credentials})
    return _Hop(method, target, headers, body)


def _is_literal(host: str) -> bool:
    return host.startswith("[") or host.replace(".", "").isdecimal()
