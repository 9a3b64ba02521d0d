"""Find out whether a trouble is shared: is the gateway gone, or the network, or this host alone?

A connection to a place that is known, made and closed without a request, answers it.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import anyio

from conveyor.aio.concurrency import wait_or_timeout
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import Absence, Shared
from conveyor.wire.errors import TransportError, TransportTrouble

HOSTS = 5
"""Hosts in a row that cannot be reached until the network itself is doubted."""
DOUBT = 1.0
"""Most seconds that a failure waits for others, which would show that it is not its host's own."""


class Reacher(Protocol):
    """The part of an HTTP client that connects."""

    async def reach(self, url: str) -> None:
        """Make a connection to the origin of a URL and close it. Raises TransportError."""
        ...


class Landmark:
    """A place that can be looked for. Whoever asks while it is looked for gets the same answer.

    With `refusals_count`, one that refuses the connection is there.
    """

    def __init__(self, client: Reacher, *urls: str, refusals_count: bool = False) -> None:
        self._client = client
        self._refusals_count = refusals_count
        self.urls = list(urls)
        self._looking: asyncio.Task[bool] | None = None

    async def is_gone(self) -> bool:
        """Return whether none of the URLs can be connected to."""
        looking = self._looking
        if looking is None:
            looking = self._looking = asyncio.create_task(self._look())
            looking.add_done_callback(self._looked)
        return await asyncio.shield(looking)

    def forget(self) -> None:
        """Look no longer."""
        if self._looking is not None:
            self._looking.cancel()

    async def _look(self) -> bool:
        for url in list(self.urls):
            try:
                await self._client.reach(url)
            except TransportError as error:
                is_there = error.is_answer and self._refusals_count
                # Nobody knows while this process cannot look.
                if is_there or error.trouble is TransportTrouble.EXHAUSTED:
                    return False
            else:
                return False
        return True

    def _looked(self, _looking: asyncio.Task[bool]) -> None:
        self._looking = None


class HostStreak:
    """The hosts that could not be reached in a row, which together show that the network is away.

    A host that answered before is the landmark: where it can still be connected to, the others have
    troubles of their own. Until some host has answered, five are enough.
    """

    def __init__(self, client: Reacher, clock: Clock) -> None:
        self._clock = clock
        self._landmark = Landmark(client, refusals_count=True)
        self._host = ""
        self._failing: dict[str, Shared] = {}
        self._is_away = False
        self._decided = anyio.Event()

    def heard(self, host: str, url: str) -> None:
        """Note that a host answered, whatever it said."""
        if host != self._host:
            self._host = host
            self._landmark.urls = [url, *self._landmark.urls[:1]]
        if self._failing:
            self.end()

    def end(self) -> None:
        """Note that somebody answered, if only that a host is not there."""
        self._failing.clear()
        self._decide(is_away=False)

    async def failed(self, host: str, shared: Shared) -> Absence | None:
        """Note that a host could not be reached, and return what that is a sign of: None if it is
        the host's own trouble."""
        self._failing[host] = shared
        if self._is_away or len(self._failing) >= HOSTS:
            is_away = not self._landmark.urls or await self._landmark.is_gone()
            if not is_away:
                self.end()
                return None
            self._decide(is_away=True)
            return self._absence()
        return await self.broke()

    async def broke(self) -> Absence:
        """Return what it is a sign of that an exchange broke."""
        if self._failing and not self._is_away:
            await wait_or_timeout(self._decided, self._clock, DOUBT)
        return self._absence() if self._is_away else Absence()

    def forget(self) -> None:
        """Look for nothing any longer."""
        self._landmark.forget()

    def _absence(self) -> Absence:
        names_alone = set(self._failing.values()) == {Shared.RESOLVER}
        return Absence(Shared.RESOLVER if names_alone else Shared.NETWORK)

    def _decide(self, *, is_away: bool) -> None:
        self._is_away = is_away
        decided, self._decided = self._decided, anyio.Event()
        decided.set()
