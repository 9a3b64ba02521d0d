"""The client of one Redis server: scripts and plain values, with a short timeout for every call.

It never retries: the server may have carried out a call whose answer was lost, and the adapter
knows best what to do about that. After a call without an answer, adapters that can do without the
server leave it alone for a moment (`resting`).

A failover moves the name of the server to another node, and only a new connection asks for the
name. A primary that was demoted in good order keeps its connections and answers on them. So after a
call without an answer, and after an answer that only another node can better, no connection that
was open then is used again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import anyio
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.exceptions import TimeoutError as NoAnswer
from redis.maint_notifications import MaintNotificationsConfig

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
from conveyor.settings.validators import redis_url

CONNECTIONS = 32
TIMEOUT = 1.0
"""Most seconds for a connection, for an answer, and for both together."""
REST = 1.0
"""Seconds for which a server that did not answer gets only the calls that cannot do without it."""
LISTEN = 10.0
"""Seconds of silence on a channel after which the server is asked whether it is there."""
CLOSING = 0.1
"""Seconds to wait for the ends of connections that are closed; a peer that hangs sends none."""
AWAY_AFTER = 3
"""Calls in a row that failed after which the server counts as away."""
AWAY_FOR = 30.0
"""Seconds after the last call for which it still counts as away, unless it answers meanwhile."""

Answered = TypeVar("Answered")

_WRONG_NODE = re.compile(
    r"\b(READONLY|LOADING|MASTERDOWN|CLUSTERDOWN|MOVED|ASK|TRYAGAIN|REDIRECT|NOREPLICAS|MISCONF)\b"
)
"""The words of a node that is no primary, or none that takes writes. Redis 6.2 wraps them into the
error of the script."""


class Script:
    """A Lua script with one key, and others beside it, whose names are that key with an ending. Its
    text is sent only if the server does not know its digest."""

    def __init__(self, text: str, *, beside: tuple[str, ...] = ()) -> None:
        self.text = text
        self._beside = beside
        self.digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    def keys(self, key: str) -> list[str]:
        """Return the names of all keys."""
        return [key, *(f"{key}{ending}" for ending in self._beside)]


class RedisServer:
    """A pool of connections to a server. Belongs to one event loop.

    `timeout` bounds every call, in seconds. Never show the URL, as it may hold a password; show
    `place`, its host and port or socket path. Raises ConveyorError(invalid_argument) for a URL that
    is not valid for CONVEYOR_REDIS_URL.
    """

    def __init__(
        self, url: str, clock: Clock, *, timeout: float = TIMEOUT, connections: int = CONNECTIONS
    ) -> None:
        if problem := redis_url(url):
            raise ConveyorError(ErrorCode.INVALID_ARGUMENT, f"the URL of redis {problem}")
        self._clock = clock
        self._timeout = timeout
        self._rests_until = float("-inf")
        self._failures = 0
        self._failed_at = float("-inf")
        self._generation = 0
        self._pool: BlockingConnectionPool = BlockingConnectionPool.from_url(
            url,
            max_connections=connections,
            timeout=timeout,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 0),
            # If enabled, the client sends on connections that the server has closed.
            maint_notifications_config=MaintNotificationsConfig(enabled=False),
            # Connections to a Unix socket do not take this option.
            **({} if urlsplit(url).scheme == "unix" else {"socket_keepalive": True}),
        )
        self.place = _place(self._pool.connection_kwargs)
        self._redis = Redis(connection_pool=self._pool)
        self._command: Callable[..., Awaitable[Any]] = self._redis.execute_command

    def __repr__(self) -> str:
        return "RedisServer()"

    @property
    def resting(self) -> bool:
        """True for a moment after the server failed to answer."""
        return self._clock.monotonic() < self._rests_until

    @property
    def away(self) -> bool:
        """True while the server does not answer calls, or refuses them."""
        lately = self._clock.monotonic() - self._failed_at <= AWAY_FOR
        return lately and self._failures >= AWAY_AFTER

    async def run(self, script: Script, key: str, *arguments: str | int | float | bytes) -> Any:
        """Run a script and return its result. Raises ConveyorError(unavailable)."""
        return await self._within(self._run(script, key, arguments))

    async def get(self, key: str) -> bytes | None:
        """Return the value of a key. Raises ConveyorError(unavailable)."""
        value: bytes | None = await self._within(self._command("GET", key))
        return value

    async def put(self, key: str, value: bytes, *, seconds: int) -> None:
        """Set the value of a key for some seconds. Raises ConveyorError(unavailable)."""
        await self._within(self._command("SET", key, value, "EX", seconds))

    async def listen(self, channel: str) -> AsyncIterator[bytes]:
        """Yield what is published on a channel from now on, an empty text first. Raises
        ConveyorError(unavailable) once the connection is lost, or a failover has moved the name.
        Neither is a failed call."""
        generation = self._generation
        subscription = self._redis.pubsub()
        try:
            with anyio.fail_after(self._timeout):
                await subscription.subscribe(channel)
            asked = False
            while generation == self._generation:
                message = await subscription.get_message(timeout=LISTEN)
                if message is None and asked:
                    raise NoAnswer
                if message is None:
                    with anyio.fail_after(self._timeout):
                        await subscription.ping()
                elif message["type"] in ("subscribe", "message"):
                    yield message["data"] if message["type"] == "message" else b""
                asked = message is None
        except (RedisError, OSError) as error:
            raise _unavailable(error) from None
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSING):
                await subscription.aclose()  # type: ignore[no-untyped-call]
        raise ConveyorError(ErrorCode.UNAVAILABLE, "redis stands for another node", retry_after=1)

    async def ping(self) -> None:
        """Raise ConveyorError(unavailable) if the server does not answer."""
        await self._within(self._command("PING"))

    async def aclose(self) -> None:
        """Close all connections."""
        await self._redis.aclose()
        await self._pool.aclose()

    async def _run(
        self, script: Script, key: str, arguments: tuple[str | int | float | bytes, ...]
    ) -> Any:
        keys = script.keys(key)
        try:
            return await self._command("EVALSHA", script.digest, len(keys), *keys, *arguments)
        except NoScriptError:
            # The server did not run it, so sending it again is safe.
            return await self._command("EVAL", script.text, len(keys), *keys, *arguments)

    async def _within(self, call: Awaitable[Answered]) -> Answered:
        generation = self._generation
        try:
            with anyio.fail_after(self._timeout):
                answer = await call
        except (RedisError, OSError) as error:
            now = self._clock.monotonic()
            self._rests_until = now + REST
            self._failures, self._failed_at = self._failures + 1, now
            if generation == self._generation and _asks_for_another_node(error):
                self._generation += 1
                await self._drop_connections()
            raise _unavailable(error) from None
        self._failures = 0
        return answer

    async def _drop_connections(self) -> None:
        """Close the connections that nobody uses at once, and each of the others after its call."""
        mark: Callable[[], Awaitable[None]] = self._pool.update_active_connections_for_reconnect
        await mark()
        with anyio.move_on_after(CLOSING):
            await self._pool.disconnect(inuse_connections=False)


def _unavailable(error: Exception) -> ConveyorError:
    return ConveyorError(
        ErrorCode.UNAVAILABLE, f"redis does not answer: {_kind(error)}", retry_after=1
    )


def _asks_for_another_node(error: Exception) -> bool:
    """Return True if a new connection may help: there was no answer, or one of a wrong node."""
    if not isinstance(error, RedisError) or isinstance(error, (NoConnection, NoAnswer)):
        return True
    return _WRONG_NODE.search(f"{error.status_code} {error}") is not None


def _place(parts: Mapping[str, Any]) -> str:
    if "path" in parts:
        return str(parts["path"])
    return f"{parts.get('host', 'localhost')}:{parts.get('port', 6379)}"


def _kind(error: Exception) -> str:
    """Return the type of an error, and for a refusal of the server its first word, such as OOM."""
    kind = type(error).__name__
    word = str(error).partition(" ")[0] if isinstance(error, ResponseError) else ""
    return f"{kind} {word}" if word.isupper() else kind
