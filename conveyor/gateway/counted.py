"""The gateway and the webhooks ports over others, with each call counted as open work while it
lasts: a clock that is moved by hand waits for it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from conveyor.ports.gateway import Gateway, ScrapeRequest, Success
from conveyor.ports.idle import POSTS, OpenWork, counted
from conveyor.ports.webhooks import WebhookAnswer, Webhooks

SCRAPES = "calls of the gateway"


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
