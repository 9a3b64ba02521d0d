"""The HTTP client: requests over pooled connections, answers with their bodies whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

from conveyor.wire.connection import HttpConnection, ReadBuffer, SendQueue
from conveyor.wire.connector import Connector
from conveyor.wire.errors import TransportError, TransportTrouble
from conveyor.wire.head import CHUNKS, CONNECTION, HeaderFields
from conveyor.wire.options import USUAL, ClientOptions
from conveyor.wire.origin import Origin, split_url, write_request
from conveyor.wire.pool import KEEP_ALIVE, Pool
from conveyor.wire.resolver import Admits, Lookup, Resolver
from conveyor.wire.response import ResponseReader

RESET_SECONDS = 0.1
"""Within so long a connection is reset that a dying process would have accepted."""
FRESH_SECONDS = 1.0
"""A request that may not be repeated uses a kept connection only if it was idle for less."""

APART = 65_536
"""Bytes of a body above which it is not copied behind its head, but sent after it."""


class Answer(AsyncIterator[bytes]):
    """An answer whose head has arrived, and an iterator of its body, which can be read once.

    `length` is that of the body, None if only its end shows it. `sent` counts the requests that
    went out for it.
    """

    __slots__ = ("_accepts_ragged", "_connection", "_reader", "headers", "length", "sent", "status")

    def __init__(
        self, connection: HttpConnection, reader: ResponseReader, accepts_ragged: bool, sent: int
    ) -> None:
        head = reader.head
        assert head is not None
        self._connection = connection
        self._reader = reader
        self._accepts_ragged = accepts_ragged
        self.status = head.status
        self.headers: HeaderFields = head.headers
        is_open_ended = head.framing is CHUNKS or head.framing is CONNECTION
        self.length = None if is_open_ended else head.length
        self.sent = sent

    def whole(self) -> bytes | None:
        """Return the whole body if it has arrived; else None, and it is to be read."""
        return self._reader.take() if self._reader.is_complete else None

    async def read(self) -> bytes:
        """Return the whole body. Raises TransportError."""
        return b"".join([piece async for piece in self])

    def allow(self, seconds: float) -> None:
        """Let the rest of the body be there within so many seconds from now, `inf` for no limit,
        in place of the time that was given with the request."""
        # Of a whole answer, the connection may carry another request by now.
        if not self._reader.is_complete:
            self._connection.allow(self._connection.now() + seconds)

    @property
    def is_broken(self) -> bool:
        """Return True if the connection went before the body was whole."""
        return not self._reader.is_complete and self._connection.error is not None

    def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives, in pieces of at most 256 KiB. Raises TransportError: RAGGED
        only after every byte that came."""
        return self

    def release(self) -> None:
        """Drop the connection if the body was not received to its end."""
        if not self._reader.is_complete:
            self._connection.abort()

    async def __anext__(self) -> bytes:
        reader = self._reader
        while not reader.buffered:
            if reader.is_complete:
                raise StopAsyncIteration
            try:
                await self._connection.more()
            except TransportError as error:
                if error.trouble is TransportTrouble.RAGGED and self._accepts_ragged:
                    raise StopAsyncIteration from None
                error.sent = self.sent
                raise
            except BaseException:
                self.release()
                raise
        return reader.take()


class HttpClient:
    """Send requests over pooled connections, without following redirects or decoding bodies.

    Open connections, idle ones included, are at most `connections`. `admits` decides whether an IP
    address may be touched: it is asked of each address before a connection is made, and of the peer
    before TLS and before a byte is sent. `lookup` replaces the system's resolver. Belongs to one
    event loop.
    """

    def __init__(
        self,
        *,
        connections: int,
        admits: Admits | None = None,
        lookup: Lookup | None = None,
        options: ClientOptions = USUAL,
    ) -> None:
        self._connections = connections
        self._admits = admits
        self._lookup = lookup
        self._options = options
        self._opened: _Opened | None = None
        self._is_closed = False

    @property
    def open_connections(self) -> int:
        """The number of open connections, and of those being made."""
        return 0 if self._opened is None else self._opened.pool.taken

    async def send(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout: float,
        repeatable: bool = False,
        before: Callable[[], None] | None = None,
    ) -> Answer:
        """Send a request; return its answer once the head is there.

        `url` is ASCII and is sent as it is. `timeout` is in seconds and includes reading the body.
        `before` is called with a connection in hand: an error of it ends the call with none sent.
        A `repeatable` request is sent once more if a kept connection closed before a byte of an
        answer; any other goes over a new connection, or one that was in use within the last
        second. Raises TransportError, and nothing else, whatever the URL.
        """
        origin, target = split_url(url)
        request, apart = _written(method, target, origin, headers, body)
        opened = self._opened or self._open()
        deadline = opened.loop.time() + timeout
        first_byte = self._options.first_byte
        idle_for = KEEP_ALIVE if repeatable else FRESH_SECONDS
        connection, sent = opened.pool.take(origin, idle_for=idle_for), 0
        while True:
            if connection is None:
                connection = await self._connect(opened, origin, deadline, sent)
            _see_that_it_may_go(connection, None if sent else before, sent)
            is_kept = connection.idle_since is not None
            sent += 1
            by = None if first_byte is None else opened.loop.time() + first_byte
            awaited = connection.begin(request, method, deadline=deadline, answer_by=by, body=apart)
            try:
                reader = await awaited
                return Answer(connection, reader, self._options.ragged_end, sent)
            except TransportError as error:
                sent -= not connection.has_sent
                is_unheard = error.trouble is TransportTrouble.INTERRUPTED
                may_repeat = repeatable and not connection.has_answered or not connection.has_sent
                if sent > 1 or not (is_kept and is_unheard and may_repeat):
                    error.sent = sent
                    raise
                connection = None
            except BaseException:
                # Of a whole answer, the connection may carry another request by now.
                if not _brought_all(awaited):
                    connection.abort()
                raise

    async def reach(self, url: str) -> None:
        """Look the origin of a URL up afresh, make a connection to it and close it. Raises
        TransportError.

        A process that is dying may still have its place to listen at: then the connection is reset
        soon, because nobody will accept it.
        """
        origin, _ = split_url(url)
        opened = self._opened or self._open()
        addresses = await opened.connector.resolve(origin, afresh=True)
        sock = await opened.connector.open_socket(addresses, origin)
        try:
            async with asyncio.timeout(RESET_SECONDS):
                await opened.loop.sock_recv(sock, 1)
        except TimeoutError:
            return
        except OSError:
            raise TransportError(TransportTrouble.UNREACHABLE) from None
        finally:
            sock.close()

    async def aclose(self) -> None:
        """Close every connection. A call under way raises TransportError, and so does any other
        from then on."""
        self._is_closed = True
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.aclose()

    async def _connect(
        self, opened: _Opened, origin: Origin, deadline: float, sent: int
    ) -> HttpConnection:
        is_queued = False
        try:
            async with asyncio.timeout_at(deadline):
                # A name that nobody resolves must not hold a slot.
                addresses = await opened.connector.resolve(origin)
                is_queued = True
                while (connection := await opened.pool.wait(origin)) is not None:
                    if connection.is_usable():
                        return connection
                    connection.abort()
                is_queued = False
                return await opened.connect(origin, addresses)
        except TimeoutError:
            raise TransportError(
                TransportTrouble.TIMEOUT,
                sent=sent,
                is_connecting=not sent,
                is_queued=is_queued,
            ) from None
        except TransportError as error:
            error.sent = sent
            raise

    def _open(self) -> _Opened:
        if self._is_closed:
            raise TransportError(TransportTrouble.INTERRUPTED)
        resolver = Resolver(self._lookup, self._admits)
        connector = Connector(resolver, self._admits, self._options)
        opened = _Opened(
            Pool(self._connections), connector, ReadBuffer(self._connections, self._options.held)
        )
        self._opened = opened
        return opened


def _written(
    method: str, target: str, origin: Origin, headers: Mapping[str, str], body: bytes | None
) -> tuple[bytes, bytes]:
    """Write a request; return it, and the body where that is long enough to go behind it."""
    apart = body if body is not None and len(body) > APART else b""
    written = write_request(method, target, origin.authority, headers, body, head_only=bool(apart))
    return written, apart


def _see_that_it_may_go(
    connection: HttpConnection, before: Callable[[], None] | None, sent: int
) -> None:
    if connection.error is not None:
        # It broke, or spoke, before it was asked.
        raise TransportError(connection.error.trouble, sent=sent)
    if before is not None:
        try:
            before()
        except BaseException:
            connection.rest()
            raise


def _brought_all(awaited: asyncio.Future[ResponseReader]) -> bool:
    if not awaited.done() or awaited.cancelled() or awaited.exception() is not None:
        return False
    return awaited.result().is_complete


class _Opened:
    """A client's pool and what fills it, inside an event loop."""

    def __init__(self, pool: Pool, connector: Connector, buffer: ReadBuffer) -> None:
        self.loop = asyncio.get_running_loop()
        self.pool = pool
        self.connector = connector
        self._buffer = buffer
        self._sends = SendQueue()
        self._connections: set[HttpConnection] = set()
        self._all_lost = asyncio.Event()

    async def connect(self, origin: Origin, addresses: list[str]) -> HttpConnection:
        """Make a connection in a slot that was waited for; give the slot back if that fails."""
        try:
            sock = await self.connector.open_socket(addresses, origin)
        except BaseException:
            self.pool.free()
            raise
        if self.pool.is_closed:
            sock.close()
            self.pool.free()
            raise TransportError(TransportTrouble.INTERRUPTED)
        connection = HttpConnection(
            origin, sock, self._buffer, on_lost=self._lost, sends=self._sends
        )
        self._connections.add(connection)
        await self.connector.set_up(connection, sock)
        connection.on_idle = self.pool.keep
        return connection

    async def aclose(self) -> None:
        """Close every connection, and let no other be made; return when all are closed."""
        self.pool.close()
        await self.connector.aclose()
        for connection in list(self._connections):
            connection.abort()
        if self._connections:
            self._all_lost.clear()
            await self._all_lost.wait()

    def _lost(self, connection: HttpConnection) -> None:
        self._connections.discard(connection)
        self.pool.free(connection)
        if not self._connections:
            self._all_lost.set()
