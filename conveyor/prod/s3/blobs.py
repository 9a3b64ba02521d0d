"""The blobs port over S3: one object for each body, under the same key, or for a pack of bodies.

A reader sees one version of a body, whatever is put under its key meanwhile, and resumes if its
connection breaks. A large body goes up in parts, a few concurrently, and becomes visible as a whole
or not at all.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from conveyor.aio.concurrency import unwrap
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.blobs import BodyRefused, Content
from conveyor.ports.clock import Clock
from conveyor.prod.aws.calls import (
    MAY_BE_LEFT,
    Answer,
    AnswerBody,
    Aws,
    AwsRefused,
    BodyGivenBack,
    ShortLived,
    retry_unprocessed,
)
from conveyor.records.blob_keys import checked_key, checked_prefix, is_written_once
from conveyor.records.packed_bodies import packed_bodies, packed_body

PIECE = 256 * 1024
"""Most bytes of a piece that a reader gets."""
RESUMPTIONS = 3
"""Times that a reader resumes after its connection broke: S3 closes those of slow readers."""
NO_OBJECT = frozenset({"404", "NoSuchKey", "NotFound"})
BEHIND_THE_END = frozenset({"416", "InvalidRange"})
REPLACED = frozenset({"412", "PreconditionFailed"}) | BEHIND_THE_END | NO_OBJECT


class ObjectReader:
    """Reads a body piece by piece. `open_body` makes it, with the first piece already read.

    The body is an object, or what is left of one from `offset` on, to where the answer ends.
    """

    def __init__(self, aws: Aws, where: dict[str, str], answer: Answer, *, offset: int = 0) -> None:
        self._aws = aws
        self._where = where
        self._offset = offset
        self._version: str = answer["ETag"]
        self._size: int = answer["ContentLength"]
        self._body: AnswerBody | None = answer["Body"]
        self._read = 0
        self._resumed = 0
        self._first = b""

    async def begin(self) -> None:
        """Read the first piece, which is all of a small body."""
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

    async def aclose(self) -> None:
        """Give the connection back; for a body that is not read to its end."""
        self._close()

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
            except BodyGivenBack:
                # Its own reader was slow, perhaps again and again: nothing broke.
                self._close()
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

        Raises ConveyorError(unavailable) if that version is gone, or another part of it came.
        """
        left = self._size - self._read
        try:
            wanted = _range(self._offset + self._read, left)
            answer = await self._aws.call(
                "s3", "get_object", {**self._where, "Range": wanted, "IfMatch": self._version}
            )
        except AwsRefused as refused:
            self._resumed = RESUMPTIONS
            if refused.word not in REPLACED:
                raise
            raise ConveyorError(
                ErrorCode.UNAVAILABLE, "result store: the body was replaced while it was read"
            ) from None
        body: AnswerBody = answer["Body"]
        if answer["ContentLength"] != left:
            body.close()
            raise ConveyorError(
                ErrorCode.UNAVAILABLE, "result store: another part of the body came than asked for"
            )
        return body

    def _close(self) -> None:
        body, self._body = self._body, None
        if body is not None:
            body.close()


async def open_body(
    aws: Aws, where: dict[str, str], *, size: int | None = None
) -> ObjectReader | None:
    """Open the body at a bucket and key; None if there is no body, or none of a wanted size. Raises
    AwsRefused."""
    try:
        answer = await aws.call("s3", "get_object", where)
    except AwsRefused as refused:
        if refused.word in NO_OBJECT:
            return None
        raise
    if size is not None and answer["ContentLength"] != size:
        answer["Body"].close()
        return None
    reader = ObjectReader(aws, where, answer)
    await reader.begin()
    return reader


async def read_range(aws: Aws, where: dict[str, str], offset: int, size: int) -> bytes:
    """Read some bytes of an object: fewer if it ends before, none if it is missing. Raises
    AwsRefused."""
    try:
        answer = await aws.call("s3", "get_object", {**where, "Range": _range(offset, size)})
    except AwsRefused as refused:
        if refused.word in NO_OBJECT | BEHIND_THE_END:
            return b""
        raise
    reader = ObjectReader(aws, where, answer, offset=offset)
    await reader.begin()
    return b"".join([piece async for piece in reader])


def _range(offset: int, size: int) -> str:
    return f"bytes={offset}-{offset + size - 1}"


PART = 8 * 1024 * 1024
"""Bytes of a part, and most bytes of a body that goes up in one call."""
SAME_SIZE = 4_000
"""Parts after which their size doubles: S3 takes 10,000 parts, which allows bodies of 150 GiB."""
CONTENT_TYPE = "application/octet-stream"


class MultipartUpload:
    """One upload in parts. `turns` bounds the parts in flight of all uploads of a process.

    `token` is unique to this upload: it identifies the finished object as the result of this one.
    """

    def __init__(
        self, aws: Aws, where: dict[str, str], turns: anyio.Semaphore, *, token: str
    ) -> None:
        self._aws = aws
        self._where = where
        self._turns = turns
        self._token = token
        self._held = 0
        self._upload_id = ""
        self._sent: dict[int, dict[str, Any]] = {}

    async def put(self, head: list[bytes], rest: AsyncIterator[bytes] | None) -> int:
        """Store a body that begins with the pieces of `head`, and return its size.

        Takes the pieces out of the list. Raises the iterator's errors. After an error or a
        cancellation nothing is stored.
        """
        with anyio.CancelScope(shield=True):
            # If this were cancelled, an upload could begin that nobody ends.
            begun = await self._call(
                "create_multipart_upload",
                ContentType=CONTENT_TYPE,
                Metadata={"upload": self._token},
                ChecksumAlgorithm="CRC32",
            )
        self._upload_id = begun["UploadId"]
        try:
            with unwrap():
                async with anyio.create_task_group() as group:
                    size = await self._send_all(group, head, rest)
            await self._complete()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._abort()
            raise
        finally:
            for _ in range(self._held):
                self._turns.release()
        return size

    async def _send_all(
        self, group: TaskGroup, pieces: list[bytes], rest: AsyncIterator[bytes] | None
    ) -> int:
        buffered, size, number = sum(map(len, pieces)), 0, 1
        while True:
            most = part_size(number)
            while rest is not None and buffered < most:
                piece = await anext(rest, None)
                if piece is None:
                    rest = None
                else:
                    pieces.append(piece)
                    buffered += len(piece)
            if not buffered:
                return size
            content = b"".join(pieces)
            part, pieces[:] = content[:most], [content[most:]]
            # What is not let go of now would be held twice while this waits.
            del content
            buffered = len(pieces[0])
            size += len(part)
            await self._turns.acquire()
            self._held += 1
            group.start_soon(self._send, number, part)
            del part
            number += 1

    async def _send(self, number: int, part: bytes) -> None:
        answer = await self._call(
            "upload_part",
            UploadId=self._upload_id,
            PartNumber=number,
            Body=part,
            ChecksumAlgorithm="CRC32",
        )
        sent = {"PartNumber": number, "ETag": answer["ETag"]}
        if "ChecksumCRC32" in answer:
            sent["ChecksumCRC32"] = answer["ChecksumCRC32"]
        self._sent[number] = sent
        self._held -= 1
        self._turns.release()

    async def _complete(self) -> None:
        """Make the body visible. If the upload is gone, an earlier try may have completed it and
        lost the answer."""
        parts = [self._sent[number] for number in sorted(self._sent)]
        try:
            await self._call(
                "complete_multipart_upload",
                UploadId=self._upload_id,
                MultipartUpload={"Parts": parts},
            )
        except AwsRefused as refused:
            if refused.word != "NoSuchUpload" or not await self._is_whole():
                raise

    async def _is_whole(self) -> bool:
        try:
            found = await self._call("head_object")
        except AwsRefused as refused:
            if refused.word in NO_OBJECT:
                return False
            raise
        metadata: dict[str, str] = found.get("Metadata", {})
        return metadata.get("upload") == self._token

    async def _abort(self) -> None:
        """Remove the parts. Ignore errors, so that the caller sees the reason for the abort: the
        lifecycle rules remove parts that are left."""
        with suppress(ConveyorError):
            await self._call("abort_multipart_upload", UploadId=self._upload_id)

    async def _call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        return await self._aws.call("s3", operation, {**self._where, **parameters})


def part_size(number: int) -> int:
    """Return the size of a part, by its number from 1."""
    return PART << (number - 1) // SAME_SIZE


PARTS_AT_A_TIME = 4
"""Parts in flight of all large bodies of a process: each takes memory."""
HEAD_MEMORY = 256 * 1024 * 1024
"""Bytes that all bodies of a process may take which come in pieces, until they are with S3."""
MOST_DELETE = MOST_LISTED = 1_000
"""Most keys that one DeleteObjects takes, and one ListObjectsV2 returns."""
SHORTEST_LINK = 300
"""Least seconds for which a download link is valid; no link is signed if the credentials expire
sooner."""
DENIED = "AccessDenied"
OF_THE_BODY = frozenset(
    {
        "BadDigest",
        "EntityTooLarge",
        "EntityTooSmall",
        "IncompleteBody",
        "InvalidDigest",
        "InvalidPart",
        "InvalidPartOrder",
        "NoSuchUpload",
        "XAmzContentChecksumMismatch",
        "XAmzContentSHA256Mismatch",
    }
)
"""Refusals caused by one body. All others concern the bucket, its key, permissions or the clock:
they would hit the next body too, and end once an operator has fixed the cause."""


class HeadMemory:
    """Bound the bytes of the bodies that a process collects from pieces.

    A body that wants more than is left waits until another is with S3. The oldest one never waits,
    so that no two wait for each other.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[object, int] = {}
        self._total = 0
        self._freed = anyio.Event()

    @contextmanager
    def body(self) -> Iterator[object]:
        """Hold the memory of one body, which is free again at the exit."""
        body = object()
        self._held[body] = 0
        try:
            yield body
        finally:
            self._total -= self._held.pop(body)
            self._freed.set()
            self._freed = anyio.Event()

    async def take(self, body: object, size: int) -> None:
        """Take so many further bytes for a body, once there is room."""
        while self._total + size > self._limit and body is not next(iter(self._held)):
            await self._freed.wait()
        self._held[body] += size
        self._total += size


class S3Blobs:
    """Bodies as objects of one bucket. Those that come in pieces take at most `head_memory` bytes
    at a time, and one part more.

    All methods raise AwsRefused if S3 refuses; ConveyorError(unavailable) if S3 does not answer;
    ValueError for an invalid key.
    """

    def __init__(
        self, aws: Aws, *, bucket: str, clock: Clock, head_memory: int = HEAD_MEMORY
    ) -> None:
        self._aws = aws
        self._bucket = bucket
        self._clock = clock
        self._memory = HeadMemory(head_memory)
        self._turns = anyio.Semaphore(PARTS_AT_A_TIME)

    async def put(self, key: str, content: Content) -> int:
        try:
            return await self._put(key, content)
        except AwsRefused as refused:
            if refused.word not in OF_THE_BODY:
                raise
            raise BodyRefused(str(refused)) from None

    async def _put(self, key: str, content: Content) -> int:
        where = self._where(key)
        if isinstance(content, bytes):
            return await self._put_head(where, [content], None)
        with self._memory.body() as body:
            head: list[bytes] = []
            size = 0
            # All of a body that fits into one call, or the beginning of a larger one.
            while size <= PART and (piece := await anext(content, None)) is not None:
                await self._memory.take(body, len(piece))
                head.append(piece)
                size += len(piece)
            del piece
            return await self._put_head(where, head, content)

    async def _put_head(
        self, where: dict[str, str], head: list[bytes], rest: AsyncIterator[bytes] | None
    ) -> int:
        """Store a body that begins with the pieces of `head`, and take them out of the list."""
        if sum(map(len, head)) > PART:
            parts = MultipartUpload(self._aws, where, self._turns, token=self._clock.new_id())
            return await parts.put(head, rest)
        whole = b"".join(head)
        head.clear()
        # An S3 that hangs must not hold whoever gives a body up.
        token = MAY_BE_LEFT.set(is_written_once(where["Key"]))
        try:
            await self._aws.call(
                "s3", "put_object", {**where, "Body": whole, "ContentType": CONTENT_TYPE}
            )
        finally:
            MAY_BE_LEFT.reset(token)
        return len(whole)

    async def open(self, key: str, *, size: int | None = None) -> AsyncIterator[bytes] | None:
        packed = packed_body(key)
        if packed is None:
            return await open_body(self._aws, self._where(key), size=size)
        if size is not None and size != packed.size:
            return None
        [body] = await self.read_neighbours([key])
        return None if body is None else _in_pieces(body)

    async def read_neighbours(self, keys: Sequence[str]) -> list[bytes | None]:
        bodies = packed_bodies(keys)
        offset = min(body.offset for body in bodies)
        size = max(body.end for body in bodies) - offset
        read = await read_range(self._aws, self._where(bodies[0].pack), offset, size)
        return [body.checked(read[body.offset - offset : body.end - offset]) for body in bodies]

    async def delete(self, key: str) -> None:
        where = self._where(key)
        if packed_body(key) is None:
            await self._aws.call("s3", "delete_object", where)

    async def delete_prefix(self, prefix: str, *, limit: int | None = None) -> int:
        left = sys.maxsize if limit is None else limit
        parameters: dict[str, Any] = {"Bucket": self._bucket, "Prefix": checked_prefix(prefix)}
        removed = 0
        while left > 0:
            listed = await self._aws.call(
                "s3", "list_objects_v2", {**parameters, "MaxKeys": min(MOST_DELETE, left)}
            )
            keys = [item["Key"] for item in listed.get("Contents", [])]
            if keys:
                await self._delete_all(keys)
            removed += len(keys)
            left -= len(keys)
            if not listed.get("IsTruncated"):
                break
        return removed

    async def list_keys(self, prefix: str, *, after: str, limit: int) -> list[str]:
        parameters = {"Bucket": self._bucket, "Prefix": checked_prefix(prefix), "StartAfter": after}
        keys: list[str] = []
        while len(keys) < limit:
            size = min(MOST_LISTED, limit - len(keys))
            listed = await self._aws.call("s3", "list_objects_v2", {**parameters, "MaxKeys": size})
            keys += [item["Key"] for item in listed.get("Contents", [])]
            if not listed.get("IsTruncated"):
                break
            parameters["StartAfter"] = keys[-1]
        return keys

    async def size(self, key: str) -> int | None:
        packed = packed_body(key)
        try:
            found = await self._aws.call(
                "s3", "head_object", self._where(key if packed is None else packed.pack)
            )
        except AwsRefused as refused:
            if refused.word in NO_OBJECT:
                return None
            raise
        size: int = found["ContentLength"]
        if packed is None:
            return size
        return packed.size if size >= packed.end else None

    async def upload_link(self, key: str, *, content_type: str, seconds: int) -> str | None:
        """Presign a PUT bound to its Content-Type; None if the credentials expire earlier."""
        parameters = {**self._where(key), "ContentType": content_type}
        return await self._link("put_object", parameters, [seconds])

    async def download_link(
        self, key: str, *, seconds: int, file_name: str, content_type: str = ""
    ) -> str | None:
        """Presign a GET of an attachment.

        If the credentials expire earlier, the link is valid for half as long, a quarter and so on;
        None if they expire too soon for a useful link, and for a packed body: a link cannot say
        which bytes of an object it is for.
        """
        if packed_body(key) is not None:
            return None
        disposition = f'attachment; filename="{file_name}"'
        parameters = {**self._where(key), "ResponseContentDisposition": disposition}
        if content_type:
            parameters["ResponseContentType"] = content_type
        lengths = [seconds]
        while lengths[-1] // 2 >= SHORTEST_LINK:
            lengths.append(lengths[-1] // 2)
        return await self._link("get_object", parameters, lengths)

    async def _link(self, operation: str, parameters: Answer, lengths: Sequence[int]) -> str | None:
        """Return the first link, by its length in seconds, that the credentials outlast.

        Signs in a thread, since fetching new credentials would block the event loop.
        """

        def link() -> str | None:
            for seconds in lengths:
                with suppress(ShortLived):
                    return self._aws.presign(operation, parameters, seconds=seconds)
            return None

        return await anyio.to_thread.run_sync(link)

    async def _delete_all(self, keys: list[str]) -> None:
        """Remove objects; retry those that failed. Raises AwsRefused; ConveyorError."""

        async def call(left: list[str]) -> list[str]:
            answer = await self._aws.call(
                "s3",
                "delete_objects",
                {
                    "Bucket": self._bucket,
                    "Delete": {"Objects": [{"Key": key} for key in left], "Quiet": True},
                },
            )
            errors = answer.get("Errors", [])
            for error in errors:
                if error.get("Code") == DENIED:
                    raise AwsRefused(
                        DENIED,
                        "s3 denies the deletion of an object that it lists",
                        asked=("s3", "delete_objects"),
                    )
            return [error["Key"] for error in errors]

        await retry_unprocessed(call, keys, self._clock, complaint="s3 did not delete all objects")

    def _where(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": checked_key(key)}


async def _in_pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), PIECE):
        yield body[start : start + PIECE]
