"""The blobs port over S3: one object for each body, under its very key."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import anyio
import anyio.to_thread

from conveyor.ports.blobs import BodyRefused, Content, checked_key, checked_prefix
from conveyor.ports.clock import Clock
from conveyor.prod.aws.calls import Answer, Aws, AwsRefused, ShortLived
from conveyor.prod.aws.leftovers import to_the_last
from conveyor.prod.s3.reading import ABSENT, open_body
from conveyor.prod.s3.writing import CONTENT_TYPE, PART, Parts

PARTS_AT_A_TIME = 4
"""Parts in flight of all large bodies of a process: each is held in memory."""
MOST_DELETE = 1_000
"""Keys that one DeleteObjects takes."""
SHORTEST_LINK = 300
"""Seconds to which a download link may be cut down; credentials that end sooner sign none."""
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
"""Refusals of one body. All others are of the bucket, its key, our rights or our clock: they would
meet the next body as well, and go once somebody has mended that."""


class S3Blobs:
    """Bodies as objects of one bucket.

    Raises AwsRefused where S3 forbids; ConveyorError(unavailable) where it stays away; ValueError
    for a key that is none.
    """

    def __init__(self, aws: Aws, *, bucket: str, clock: Clock) -> None:
        self._aws = aws
        self._bucket = bucket
        self._clock = clock
        self._turns = anyio.Semaphore(PARTS_AT_A_TIME)

    async def put(self, key: str, content: Content) -> int:
        """Store a body; the number of bytes. Whatever the iterator raises is raised again.

        Raises ConveyorError(unavailable) where S3 is away, or refuses for another reason than this
        body; BodyRefused where it does not want this one.
        """
        try:
            return await self._put(key, content)
        except AwsRefused as refused:
            if refused.word not in OF_THE_BODY:
                raise
            raise BodyRefused(str(refused)) from None

    async def _put(self, key: str, content: Content) -> int:
        where = self._where(key)
        if isinstance(content, bytes):
            head, rest = content, None
        else:
            head, rest = await _head(content), content
        if len(head) > PART:
            parts = Parts(self._aws, where, self._turns, token=self._clock.new_id())
            return await parts.put(head, rest)
        await self._aws.call(
            "s3", "put_object", {**where, "Body": head, "ContentType": CONTENT_TYPE}
        )
        return len(head)

    async def open(self, key: str) -> AsyncIterator[bytes] | None:
        """The body in pieces of at most 256 KiB, of one version; None where there is none."""
        return await open_body(self._aws, self._where(key))

    async def delete(self, key: str) -> None:
        """Remove one body; without effect where there is none."""
        await self._aws.call("s3", "delete_object", self._where(key))

    async def delete_prefix(self, prefix: str, *, limit: int | None = None) -> int:
        """Remove the bodies below a prefix, at most `limit`; how many went."""
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

    async def size(self, key: str) -> int | None:
        """How many bytes a body has; None where there is none."""
        try:
            found = await self._aws.call("s3", "head_object", self._where(key))
        except AwsRefused as refused:
            if refused.word in ABSENT:
                return None
            raise
        size: int = found["ContentLength"]
        return size

    async def upload_link(self, key: str, *, content_type: str, seconds: int) -> str | None:
        """A presigned PUT, bound to its Content-Type; None where the credentials end earlier."""
        parameters = {**self._where(key), "ContentType": content_type}
        return await self._link("put_object", parameters, [seconds])

    async def download_link(self, key: str, *, seconds: int, file_name: str) -> str | None:
        """A presigned GET of an attachment. Where the credentials end earlier, a half as long, or a
        quarter, and so on; None where they end so soon that it would hardly be of use."""
        disposition = f'attachment; filename="{file_name}"'
        parameters = {**self._where(key), "ResponseContentDisposition": disposition}
        lengths = [seconds]
        while lengths[-1] // 2 >= SHORTEST_LINK:
            lengths.append(lengths[-1] // 2)
        return await self._link("get_object", parameters, lengths)

    async def _link(self, operation: str, parameters: Answer, lengths: Sequence[int]) -> str | None:
        """The first link, out of some `lengths` in seconds, that the credentials outlast. In a
        thread: credentials that have to be fetched anew for it would hold up the loop."""

        def link() -> str | None:
            for seconds in lengths:
                with suppress(ShortLived):
                    return self._aws.presign(operation, parameters, seconds=seconds)
            return None

        return await anyio.to_thread.run_sync(link)

    async def _delete_all(self, keys: list[str]) -> None:
        """Remove objects, those that would not go again. Raises AwsRefused; ConveyorError."""

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
                        "s3 does not let delete what is listed",
                        asked=("s3", "delete_objects"),
                    )
            return [error["Key"] for error in errors]

        await to_the_last(call, keys, self._clock, complaint="s3 leaves a part of what is deleted")

    def _where(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": checked_key(key)}


async def _head(content: AsyncIterator[bytes]) -> bytes:
    """All of a body that goes in one piece, or more than that of a larger one."""
    pieces: list[bytes] = []
    size = 0
    async for piece in content:
        pieces.append(piece)
        size += len(piece)
        if size > PART:
            break
    return b"".join(pieces)
