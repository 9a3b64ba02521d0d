"""The gateway and the webhooks ports over others, for development: with each call counted as open
work while it lasts, which a clock that is moved by hand waits for, and with calls that fail when
somebody wants to see what then happens.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from conveyor.gateway.refusals import refusal
from conveyor.ports.gateway import Gateway, ScrapeRequest, Success
from conveyor.ports.idle import POSTS, OpenWork, counted
from conveyor.ports.webhooks import WebhookAnswer, Webhooks

SCRAPES = "calls of the gateway"
_FAILURE = b'{"title": "Failed on demand", "detail": "its operator lets the next calls fail"}'


class CountedGateway(Gateway):
    """A gateway whose calls are counted. It closes the other with itself."""

    def __init__(self, gateway: Gateway, work: OpenWork) -> None:
        self._gateway = gateway
        self._work = work

    def scrape(self, request: ScrapeRequest) -> AbstractAsyncContextManager[Success]:
        return self._counted(request)

    @asynccontextmanager
    async def _counted(self, request: ScrapeRequest) -> AsyncIterator[Success]:
        with counted(self._work, SCRAPES):
            async with self._gateway.scrape(request) as success:
                yield success

    async def aclose(self) -> None:
        await self._gateway.aclose()


class _FailedCall(AbstractAsyncContextManager[Success]):
    async def __aenter__(self) -> Success:
        raise refusal(503, _FAILURE, redact=str)

    async def __aexit__(self, *_: object) -> None:
        return None


class FailingGateway(Gateway):
    """A gateway whose next calls fail as those that a busy target refuses (503), as often as it is
    told. It closes the other with itself."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._left = 0

    def fail_next(self, calls: int) -> int:
        """Let so many more calls fail; return how many are to fail then."""
        self._left += calls
        return self._left

    def scrape(self, request: ScrapeRequest) -> AbstractAsyncContextManager[Success]:
        if not self._left:
            return self._gateway.scrape(request)
        self._left -= 1
        return _FailedCall()

    async def aclose(self) -> None:
        await self._gateway.aclose()


class CountedWebhooks(Webhooks):
    """Webhooks whose requests are counted. They close the others with themselves."""

    def __init__(self, webhooks: Webhooks, work: OpenWork) -> None:
        self._webhooks = webhooks
        self._work = work

    async def check_url(self, url: str) -> None:
        await self._webhooks.check_url(url)

    async def post_event(
        self, url: str, *, headers: Mapping[str, str], body: bytes
    ) -> WebhookAnswer:
        with counted(self._work, POSTS):
            return await self._webhooks.post_event(url, headers=headers, body=body)

    async def aclose(self) -> None:
        await self._webhooks.aclose()
