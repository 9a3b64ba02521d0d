"""One Redis server as the adapters ask it: scripts and plain values, answered soon or not at all.

Nothing is ever sent a second time: a call whose answer was lost may have been carried out, and
whoever made it knows better what that means. A server that did not answer is left alone for a
moment by those that can do without it (`resting`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import anyio
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.maint_notifications import MaintNotificationsConfig

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
from conveyor.settings.validators import redis_url

CONNECTIONS = 32
TIMEOUT = 1.0
"""Seconds for a connection, for an answer, and for both together."""
REST = 1.0
"""Seconds for which a server that did not answer is not asked for what can be done without."""

Answered = TypeVar("Answered")


class Script:
    """A Lua script of one key, sent whole only where the server does not know its digest yet."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class RedisServer:
    """A pool of connections. Its address, which may hold a password, is never shown; its `place`,
    which is host and port or the path of a socket, may be.

    `timeout` in seconds bounds every call. Belongs to one event loop. Raises
    ConveyorError(invalid_argument) for an address that CONVEYOR_REDIS_URL does not take.
    """

    def __init__(
        self, url: str, clock: Clock, *, timeout: float = TIMEOUT, connections: int = CONNECTIONS
    ) -> None:
        if problem := redis_url(url):
            raise ConveyorError(ErrorCode.INVALID_ARGUMENT, f"the address of redis {problem}")
        self._clock = clock
        self._timeout = timeout
        self._rests_until = float("-inf")
        self._pool: BlockingConnectionPool = BlockingConnectionPool.from_url(
            url,
            max_connections=connections,
            timeout=timeout,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 0),
            # With them the client sends on connections that the server has closed.
            maint_notifications_config=MaintNotificationsConfig(enabled=False),
            # A connection to a socket of this machine has no such option.
            **({} if urlsplit(url).scheme == "unix" else {"socket_keepalive": True}),
        )
        self.place = _place(self._pool.connection_kwargs)
        self._redis = Redis(connection_pool=self._pool)
        self._command: Callable[..., Awaitable[Any]] = self._redis.execute_command

    def __repr__(self) -> str:
        return "RedisServer()"

    @property
    def resting(self) -> bool:
        """Whether it failed to answer a moment ago."""
        return self._clock.monotonic() < self._rests_until

    async def run(self, script: Script, key: str, *arguments: str | int | float | bytes) -> Any:
        """What a script answers. Raises ConveyorError(unavailable), within the timeout."""
        return await self._within(self._run(script, key, arguments))

    async def get(self, key: str) -> bytes | None:
        """A value. Raises ConveyorError(unavailable), within the timeout."""
        value: bytes | None = await self._within(self._command("GET", key))
        return value

    async def put(self, key: str, value: bytes, *, seconds: int) -> None:
        """Keep a value for a while. Raises ConveyorError(unavailable), within the timeout."""
        await self._within(self._command("SET", key, value, "EX", seconds))

    async def look(self) -> None:
        """Raise ConveyorError(unavailable), within the timeout, where it does not answer."""
        await self._within(self._command("PING"))

    async def aclose(self) -> None:
        """Close all connections."""
        await self._redis.aclose()
        await self._pool.aclose()

    async def _run(
        self, script: Script, key: str, arguments: tuple[str | int | float | bytes, ...]
    ) -> Any:
        try:
            return await self._command("EVALSHA", script.digest, 1, key, *arguments)
        except NoScriptError:
            # It was not run, so there is no harm in asking again.
            return await self._command("EVAL", script.text, 1, key, *arguments)

    async def _within(self, call: Awaitable[Answered]) -> Answered:
        try:
            with anyio.fail_after(self._timeout):
                return await call
        except (RedisError, OSError) as error:
            self._rests_until = self._clock.monotonic() + REST
            raise ConveyorError(
                ErrorCode.UNAVAILABLE, f"redis does not answer: {_kind(error)}", retry_after=1
            ) from None


def _place(parts: Mapping[str, Any]) -> str:
    if "path" in parts:
        return str(parts["path"])
    return f"{parts.get('host', 'localhost')}:{parts.get('port', 6379)}"


def _kind(error: Exception) -> str:
    """The kind of an error; of the server's own refusals their first word too, such as OOM."""
    kind = type(error).__name__
    word = str(error).partition(" ")[0] if isinstance(error, ResponseError) else ""
    return f"{kind} {word}" if word.isupper() else kind
