"""Read one answer from the bytes of a connection, without any I/O."""

from __future__ import annotations

from enum import Enum, auto

from conveyor.wire.chunks import ChunkReader
from conveyor.wire.errors import TransportError, TransportTrouble
from conveyor.wire.head import (
    CHUNKS,
    CONNECTION,
    LENGTH,
    MAX_HEAD,
    NO_BODY,
    ResponseHead,
    head_end,
    malformed,
    read_head,
)

MAX_PADDING = 65_536
"""Bytes of an answer that are neither its head nor its body: 1xx answers, chunk extensions,
trailers, padding."""
_START = b"HTTP/1."


class Ending(Enum):
    """The end of the sender's side of a connection."""

    CLEAN = auto()
    """FIN; over TLS, close_notify."""
    RAGGED = auto()
    """FIN without close_notify, over TLS."""
    RESET = auto()
    """RST, or an error of the connection."""


class ResponseReader:
    """One answer, as it arrives.

    `head` is None until it is whole, `is_complete` tells whether the body is. `may_keep` turns
    False once anything forbids that the connection carries another request. `buffered` counts the
    body bytes that `take` would return. Bytes after the end are dropped.
    """

    __slots__ = (
        "_body",
        "_chunks",
        "_held",
        "_is_exact",
        "_left",
        "_method",
        "_padding",
        "buffered",
        "head",
        "is_complete",
        "may_keep",
    )

    def __init__(self, method: str = "GET") -> None:
        self._method = method
        self._held = b""
        self._is_exact = True
        self._padding = 0
        self._left = 0
        self._chunks: ChunkReader | None = None
        self._body: list[bytes] = []
        self.buffered = 0
        self.head: ResponseHead | None = None
        self.is_complete = False
        self.may_keep = False

    def feed(self, data: bytes) -> None:
        """Read more bytes. Raises TransportError(MALFORMED)."""
        head = self.head
        if head is None:
            head = self._collect(data)
            if head is None:
                return
            data = self._held
            self._held = b""
        if self.is_complete:
            if data:
                self.may_keep = False
        elif head.framing is LENGTH:
            self._take_length(data)
        elif self._chunks is not None:
            self._take_chunks(self._chunks, data)
        elif data:
            self._body.append(data)
            self.buffered += len(data)

    def take(self) -> bytes:
        """Return the body bytes that came since the last call."""
        body = self._body
        if len(body) == 1:
            self.buffered = 0
            return body.pop()
        taken = b"".join(body)
        body.clear()
        self.buffered = 0
        return taken

    def finish(self, ending: Ending) -> None:
        """Note that no further byte will come.

        Completes a body that only the end of the connection ends. Raises TransportError if the
        answer is not whole: INTERRUPTED before the end of the head, then TRUNCATED, or RAGGED.
        """
        if self.is_complete:
            return
        if self.head is None:
            raise TransportError(TransportTrouble.INTERRUPTED)
        if self.head.framing is not CONNECTION or ending is Ending.RESET:
            raise TransportError(TransportTrouble.TRUNCATED)
        if ending is Ending.RAGGED:
            raise TransportError(TransportTrouble.RAGGED)
        self.is_complete = True

    def _collect(self, data: bytes) -> ResponseHead | None:
        """Collect the head, and pass over 1xx answers. The bytes after it are held."""
        seen = len(self._held)
        held = self._held + data if seen else data
        while True:
            if not held.startswith(_START) and held != _START[: len(held)]:
                raise malformed()
            end = head_end(held, max(0, seen - 3))
            if end > MAX_HEAD or (end < 0 and len(held) > MAX_HEAD):
                raise malformed()
            if end < 0:
                self._held = held
                return None
            head = read_head(held[:end], self._method)
            held = held[end:]
            if head.status >= 200:
                break
            self._pad(end)
            if head.status == 101:
                raise malformed()
            self._is_exact &= head.may_keep
            seen = 0
        self._held = held
        self._begin(head)
        return head

    def _begin(self, head: ResponseHead) -> None:
        self.head = head
        self.may_keep = head.may_keep and self._is_exact
        self._left = head.length
        if head.framing is CHUNKS:
            self._chunks = ChunkReader()
        self.is_complete = head.framing is NO_BODY or (head.framing is LENGTH and not head.length)

    def _take_length(self, data: bytes) -> None:
        left = self._left
        if len(data) > left:
            data = data[:left]
            self.may_keep = False
        if data:
            self._body.append(data)
            self.buffered += len(data)
            self._left = left = left - len(data)
            self.is_complete = not left

    def _take_chunks(self, chunks: ChunkReader, data: bytes) -> None:
        before = len(self._body)
        has_surplus = chunks.feed(data, self._body)
        pieces = self._body[before:]
        if len(pieces) > 1:
            # Thousands of tiny chunks would take far more memory than their bytes.
            pieces = self._body[before:] = [b"".join(pieces)]
        for piece in pieces:
            self.buffered += len(piece)
        if self._padding + chunks.padding + chunks.pending > MAX_PADDING:
            raise malformed()
        if chunks.is_complete:
            self.is_complete = True
            self.may_keep &= chunks.is_exact and not has_surplus

    def _pad(self, count: int) -> None:
        self._padding += count
        if self._padding > MAX_PADDING:
            raise malformed()
