"""Watch the calls of a gateway: how many are in flight, and whether one has outlived its deadline.

A gateway ends each call by itself at its timeout. One that does not has lost hold of it: its slot
is taken for good, and nobody else would notice.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from conveyor.ports.blobs import Content
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import Gateway, ScrapeRequest, Success

OVERDUE_AFTER = 30.0
"""Seconds beyond its timeout after which a call that is still awaited counts as lost."""


class _Call:
    """A call in flight, and the moment at which it should have answered."""

    __slots__ = ("due",)

    def __init__(self, due: float) -> None:
        self.due = due


class WatchedGateway(Gateway):
    """A gateway whose calls are watched.

    Only waiting for the gateway counts. What a caller does with an answer, such as to store it, has
    no deadline here: the store may be away.
    """

    def __init__(self, gateway: Gateway, clock: Clock) -> None:
        self._gateway = gateway
        self._clock = clock
        self._calls: set[_Call] = set()
        self._awaited: set[_Call] = set()

    @property
    def in_flight(self) -> int:
        """Return the number of calls that have begun and not ended."""
        return len(self._calls)

    def trouble(self) -> str:
        """Say that a call has outlived its deadline; "" if none has."""
        if not self._awaited:
            return ""
        late = self._clock.monotonic() - min(call.due for call in self._awaited)
        if late < OVERDUE_AFTER:
            return ""
        return f"a call is {late:.0f} s beyond its deadline"

    @asynccontextmanager
    async def scrape(self, request: ScrapeRequest) -> AsyncIterator[Success]:
        call = _Call(self._clock.monotonic() + request.timeout)
        self._calls.add(call)
        self._awaited.add(call)
        try:
            async with self._gateway.scrape(request) as success:
                self._awaited.discard(call)
                yield msgspec.structs.replace(success, content=self._watched(call, success.content))
        finally:
            self._calls.discard(call)
            self._awaited.discard(call)

    async def aclose(self) -> None:
        await self._gateway.aclose()

    def _watched(self, call: _Call, content: Content) -> Content:
        return content if isinstance(content, bytes) else self._pieces(call, content)

    async def _pieces(self, call: _Call, content: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        while True:
            self._awaited.add(call)
            try:
                piece = await anext(content, None)
            finally:
                self._awaited.discard(call)
            if piece is None:
                return
            yield piece
