"""A body that is being read: of one version, whatever is put under its key meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.prod.aws.calls import Answer, AnswerBody, Aws, AwsRefused

PIECE = 256 * 1024
"""Most bytes in a piece that is read."""
RESUMPTIONS = 3
"""Times that reading goes on after the connection broke off: a slow reader's is closed."""
ABSENT = frozenset({"404", "NoSuchKey", "NotFound"})
REPLACED = frozenset({"412", "PreconditionFailed", "416", "InvalidRange"}) | ABSENT


class Reading:
    """The pieces of a body, the first of them in hand. Made by `open_body`."""

    def __init__(self, aws: Aws, where: dict[str, str], answer: Answer) -> None:
        self._aws = aws
        self._where = where
        self._version: str = answer["ETag"]
        self._size: int = answer["ContentLength"]
        self._body: AnswerBody | None = answer["Body"]
        self._read = 0
        self._resumed = 0
        self._first = b""

    async def begin(self) -> None:
        """Take the first piece, and with it all of a small body."""
        self._first = await self._next()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        piece, self._first = self._first, b""
        if not piece:
            piece = await self._next()
        if not piece:
            raise StopAsyncIteration
        return piece

    def __del__(self) -> None:
        self._close()

    async def _next(self) -> bytes:
        while self._read < self._size:
            try:
                if self._body is None:
                    self._body = await self._resume()
                piece = await self._body.read(PIECE)
                if not piece:
                    raise ConveyorError(ErrorCode.UNAVAILABLE, "result store: a body ended early")
            except ConveyorError:
                self._close()
                self._resumed += 1
                if self._resumed > RESUMPTIONS:
                    raise
            else:
                self._read += len(piece)
                return piece
        self._close()
        return b""

    async def _resume(self) -> AnswerBody:
        """Go on where the last connection ended, in the same version.

        Raises ConveyorError(unavailable) where that is gone.
        """
        try:
            answer = await self._aws.call(
                "s3",
                "get_object",
                {**self._where, "Range": f"bytes={self._read}-", "IfMatch": self._version},
            )
        except AwsRefused as refused:
            self._resumed = RESUMPTIONS
            if refused.word not in REPLACED:
                raise
            raise ConveyorError(
                ErrorCode.UNAVAILABLE, "result store: the body was replaced while it was read"
            ) from None
        body: AnswerBody = answer["Body"]
        return body

    def _close(self) -> None:
        body, self._body = self._body, None
        if body is not None:
            body.close()


async def open_body(aws: Aws, where: dict[str, str]) -> Reading | None:
    """The body at a bucket and key; None where there is none. Raises AwsRefused."""
    try:
        answer = await aws.call("s3", "get_object", where)
    except AwsRefused as refused:
        if refused.word in ABSENT:
            return None
        raise
    reading = Reading(aws, where, answer)
    await reading.begin()
    return reading
