"""The slots of a client: open connections, busy and idle together, never exceed its limit.

Who waits for a slot is served by origin in turn, so one host with many requests delays no other.
"""

from __future__ import annotations

import asyncio
from collections import deque

from conveyor.wire.connection import HttpConnection
from conveyor.wire.errors import TransportError, TransportTrouble
from conveyor.wire.origin import Origin

KEEP_ALIVE = 15.0
"""Seconds for which an idle connection is kept."""

_Turn = asyncio.Future[HttpConnection | None]


class Pool:
    """Slots and idle connections. Belongs to one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._taken = 0
        self._idle: dict[Origin, list[HttpConnection]] = {}
        self._by_age: dict[HttpConnection, None] = {}
        self._waiting: dict[Origin, deque[_Turn]] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self.is_closed = False

    @property
    def taken(self) -> int:
        """The slots in use, those of idle connections included."""
        return self._taken

    def take(self, origin: Origin, *, idle_for: float) -> HttpConnection | None:
        """Take the connection to an origin that became idle last, if that was less than `idle_for`
        seconds ago."""
        idle = self._idle.get(origin)
        while idle:
            connection = idle[-1]
            since = connection.idle_since
            if since is None or self._loop.time() - since >= idle_for:
                return None
            idle.pop()
            del self._by_age[connection]
            if not idle:
                del self._idle[origin]
            if connection.is_open():
                return connection
            connection.abort()
        return None

    async def wait(self, origin: Origin) -> HttpConnection | None:
        """Wait for a slot; return a connection to the origin if one became idle meanwhile, else
        None: the caller may open one, and calls `free` when it is gone. Raises TransportError once
        the pool is closed."""
        if self.is_closed:
            raise TransportError(TransportTrouble.INTERRUPTED)
        if self._taken < self._limit:
            self._taken += 1
            return None
        turn: _Turn = self._loop.create_future()
        self._waiting.setdefault(origin, deque()).append(turn)
        if self._by_age:
            self._drop(next(iter(self._by_age)))
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.exception() is None:
                self._pass_on(turn.result())
            raise

    def keep(self, connection: HttpConnection) -> None:
        """Keep an idle connection for the next request, or give its slot to whoever waits."""
        if self._waiting:
            origin = self._next_origin()
            if origin == connection.origin:
                self._serve(origin, connection)
            elif origin is not None:
                connection.abort()
            if origin is not None:
                return
        self._idle.setdefault(connection.origin, []).append(connection)
        self._by_age[connection] = None
        if self._sweep is None:
            self._sweep = self._loop.call_later(KEEP_ALIVE, self._drop_old)

    def free(self, connection: HttpConnection | None = None) -> None:
        """Give a slot back: its connection is gone, or was never made."""
        if connection is not None and connection in self._by_age:
            self._forget(connection)
        self._taken -= 1
        origin = self._next_origin()
        if origin is not None:
            self._taken += 1
            self._serve(origin, None)

    def close(self) -> None:
        """Drop every idle connection, and let nobody wait any longer."""
        self.is_closed = True
        for turns in self._waiting.values():
            for turn in turns:
                if not turn.done():
                    turn.set_exception(TransportError(TransportTrouble.INTERRUPTED))
        self._waiting.clear()
        for connection in list(self._by_age):
            self._drop(connection)
        if self._sweep is not None:
            self._sweep.cancel()

    def _next_origin(self) -> Origin | None:
        """Return the origin whose turn it is; forget turns that nobody waits for any more."""
        for origin, turns in list(self._waiting.items()):
            while turns and turns[0].done():
                turns.popleft()
            if turns:
                return origin
            del self._waiting[origin]
        return None

    def _serve(self, origin: Origin, connection: HttpConnection | None) -> None:
        """Give the first who waits at an origin a slot; the origin goes to the end of the turn."""
        turns = self._waiting.pop(origin)
        turns.popleft().set_result(connection)
        if turns:
            self._waiting[origin] = turns

    def _pass_on(self, connection: HttpConnection | None) -> None:
        if connection is not None and connection.is_usable():
            self.keep(connection)
        elif connection is not None:
            connection.abort()
        else:
            self.free()

    def _forget(self, connection: HttpConnection) -> None:
        del self._by_age[connection]
        idle = self._idle[connection.origin]
        idle.remove(connection)
        if not idle:
            del self._idle[connection.origin]

    def _drop(self, connection: HttpConnection) -> None:
        self._forget(connection)
        connection.abort()

    def _drop_old(self) -> None:
        self._sweep = None
        now = self._loop.time()
        for connection in list(self._by_age):
            since = connection.idle_since or 0.0
            if now - since < KEEP_ALIVE:
                self._sweep = self._loop.call_at(since + KEEP_ALIVE, self._drop_old)
                return
            self._drop(connection)
