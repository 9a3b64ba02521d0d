"""The body of an answer as a result to store: in one piece where it is small, else in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence

from conveyor.gateway.decode import Decoder, known_codings
from conveyor.gateway.problems import too_large, transport_failure
from conveyor.gateway.transport import Answer, TransportError, content_length
from conveyor.ports.blobs import Content
from conveyor.ports.gateway import ScrapeFailed

SMALL = 262_144


async def read_content(answer: Answer, max_bytes: int) -> Content:
    """The decoded body, at most `max_bytes` of it.

    Bodies of at most SMALL bytes come whole and are known to be sound; larger ones are an iterator.
    Raises ScrapeFailed, as does the iterator.
    """
    codings = known_codings(answer.headers.getall("Content-Encoding", []))
    length = content_length(answer.headers)
    if not codings and length is not None:
        if length > max_bytes:
            raise too_large(max_bytes)
        if length <= SMALL:
            try:
                return await answer.read()
            except TransportError as error:
                raise transport_failure(error.trouble) from None
    body = DecodedBody(answer.pieces(), codings, max_bytes)
    head: list[bytes] = []
    size = 0
    async for piece in body:
        head.append(piece)
        size += len(piece)
        if size > SMALL:
            body.unread(head)
            return body
    return b"".join(head)


async def read_document(answer: Answer, limit: int) -> bytes:
    """The body of an error answer, for what it may tell; empty where it cannot be read whole."""
    try:
        codings = known_codings(answer.headers.getall("Content-Encoding", []))
        return b"".join([piece async for piece in DecodedBody(answer.pieces(), codings, limit)])
    except ScrapeFailed:
        return b""


class DecodedBody(AsyncIterator[bytes]):
    """A body being received, decoded and bounded. Raises ScrapeFailed."""

    def __init__(
        self, source: AsyncIterator[bytes], codings: Sequence[str], max_bytes: int
    ) -> None:
        self._source = source
        self._decoder = Decoder(codings, max_bytes)
        self._unread: deque[bytes] = deque()
        self._decoded: Iterator[bytes] = iter(())

    def unread(self, pieces: Sequence[bytes]) -> None:
        """Put back what was taken from the front."""
        self._unread.extend(pieces)

    async def __anext__(self) -> bytes:
        if self._unread:
            return self._unread.popleft()
        while True:
            for piece in self._decoded:
                if piece:
                    return piece
            try:
                data = await anext(self._source, None)
            except TransportError as error:
                raise transport_failure(error.trouble) from None
            if data is None:
                self._decoder.finish()
                raise StopAsyncIteration
            self._decoded = self._decoder.feed(data)
