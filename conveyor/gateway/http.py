"""The HTTP gateway: call a scraping API compatible with ZenRows."""

from __future__ import annotations

from urllib.parse import quote, unquote, urlsplit

from conveyor.domain.model import Spend
from conveyor.gateway.decode import read_content, read_document
from conveyor.gateway.headers import (
    HttpAnswer,
    content_type,
    custom_headers,
    is_allowed,
    merged,
    retry_after,
    without,
)
from conveyor.gateway.http_client import DEFAULT_HEADERS, HttpCall, OpenClient, Opened
from conveyor.gateway.landmarks import Landmark
from conveyor.gateway.problems import malformed_url, transport_failure, unconnected
from conveyor.gateway.refusals import MAX_DOCUMENT, read_spend, redactor, refusal
from conveyor.gateway.targets import parse_target
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import Absence, ScrapeFailed, ScrapeRequest, Shared, Success
from conveyor.wire.client import HttpClient
from conveyor.wire.errors import TransportError

_COST = "X-Request-Cost"
_CREDITS = "X-Request-Credits"
_OWN_PARAMS = frozenset({"url", "apikey", "custom_headers"})


class HttpGateway:
    """The gateway port over `GET|POST <base_url>?url=…&apikey=…&<params>`.

    `custom_headers` become headers of the request, with `custom_headers=true`. `connections` bounds
    the open connections; `retry_after_cap` is in seconds. Raises ScrapeFailed if `base_url` is not
    the URL of an HTTP endpoint.
    """

    def __init__(
        self,
        base_url: str,
        clock: Clock,
        *,
        connections: int = 100,
        retry_after_cap: float = 3_600.0,
        open_client: OpenClient = HttpClient,
    ) -> None:
        base = parse_target(base_url)
        self._prefix = base.url + ("&" if "?" in base.path else "?")
        self._credentials = {"Authorization": base.credentials} if base.credentials else {}
        self._headers = {**DEFAULT_HEADERS, **self._credentials}
        self._clock = clock
        self._retry_after_cap = retry_after_cap
        self._client = open_client(connections=connections)
        self._landmark = Landmark(self._client, self._prefix)

    def scrape(self, request: ScrapeRequest) -> HttpCall:
        """Have one URL scraped. Raises ScrapeFailed on entry, or while the content is read."""
        return HttpCall(self._call, request, self._explain)

    async def aclose(self) -> None:
        """Close every connection."""
        self._landmark.forget()
        await self._client.aclose()

    async def _call(self, request: ScrapeRequest) -> Opened:
        asked = custom_headers(request.params)
        answer = await self._send(request, asked)
        try:
            spend = _spend(answer)
            if not 200 <= answer.status < 300 and not _is_content(answer, request):
                raise await self._refusal(answer, request, asked)
            try:
                content = await read_content(answer, request.max_bytes)
            except ScrapeFailed as failed:
                failed.spend = spend
                raise
        except BaseException:
            answer.release()
            raise
        return answer, Success(
            content,
            content_type(answer.headers),
            spend,
            status=answer.status,
            headers=answer.headers,
        )

    async def _explain(self, failed: ScrapeFailed) -> None:
        """Find out whether a call broke because the gateway went away."""
        if failed.absence is None or failed.absence.shared is not None:
            return
        if await self._landmark.is_gone():
            failed.absence = Absence(Shared.GATEWAY)

    async def _send(self, request: ScrapeRequest, asked: dict[str, str]) -> HttpAnswer:
        headers, body = self._headers, None
        if request.body is not None:
            body = request.body.content.encode("utf-8", "replace")
            headers = merged(headers, {"Content-Type": request.body.content_type})
        if asked:
            # The API passes them on to the target, which must not see our User-Agent unasked.
            headers = merged(without(headers, "user-agent"), asked)
            headers = merged(headers, self._credentials)
        try:
            url = self._prefix + _query(request, with_headers=bool(asked))
            return await self._client.send(
                request.method, url, headers=headers, body=body, timeout=request.timeout
            )
        except TransportError as error:
            if not error.sent:
                raise unconnected(error, Absence(Shared.GATEWAY)) from None
            failed = transport_failure(error.trouble)
            failed.sent = error.sent
            raise failed from None

    async def _refusal(
        self, answer: HttpAnswer, request: ScrapeRequest, asked: dict[str, str]
    ) -> ScrapeFailed:
        after = answer.headers.get("Retry-After", "")
        document = await read_document(answer, MAX_DOCUMENT)
        refused = refusal(
            answer.status,
            document,
            redact=redactor(request.api_key, [*asked.values(), *_credentials(request.url)]),
            retry_after=retry_after(after, now=self._clock.now(), cap=self._retry_after_cap),
            spend=_spend(answer),
        )
        refused.headers = answer.headers
        return refused


def _is_passed_on(name: str, value: str) -> bool:
    # The type html says what is so without it, and the API does not know the word.
    return name not in _OWN_PARAMS and (name, value.lower()) != ("response_type", "html")


def _query(request: ScrapeRequest, *, with_headers: bool) -> str:
    pairs = [("url", request.url), ("apikey", request.api_key)]
    pairs += [pair for pair in request.params.items() if _is_passed_on(*pair)]
    if with_headers:
        pairs.append(("custom_headers", "true"))
    try:
        return "&".join(f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in pairs)
    except UnicodeError:
        raise malformed_url() from None


def _spend(answer: HttpAnswer) -> Spend:
    return read_spend(answer.headers.get(_COST, ""), answer.headers.get(_CREDITS, ""))


def _is_content(answer: HttpAnswer, request: ScrapeRequest) -> bool:
    """Return whether an answer was charged for and is the content of an allowed status."""
    is_charged = bool(answer.headers.get(_COST, "") or answer.headers.get(_CREDITS, ""))
    is_problem = "problem+json" in content_type(answer.headers)
    return is_charged and not is_problem and is_allowed(answer.status, request.params)


def _credentials(url: str) -> list[str]:
    try:
        parts = urlsplit(url)
        return [unquote(part) for part in (parts.username, parts.password) if part]
    except ValueError:
        return []
