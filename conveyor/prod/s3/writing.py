"""A large body on its way into S3: in parts, a few side by side, all of them or nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import anyio
from anyio.abc import TaskGroup

from conveyor.aio.concurrency import raised_alone
from conveyor.domain.errors import ConveyorError
from conveyor.prod.aws.calls import Aws, AwsRefused
from conveyor.prod.s3.reading import ABSENT

PART = 8 * 1024 * 1024
"""Bytes of a part, and most bytes of a body that goes in one piece."""
SAME_SIZE = 4_000
"""Parts after which they become twice as large: S3 takes 10,000 of them, and we 150 GiB."""
CONTENT_TYPE = "application/octet-stream"


class Parts:
    """One upload in parts. `turns` bounds the parts in flight of all uploads of a process.

    `token` is a text of this upload alone, by which it is known again once it is whole.
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

    async def put(self, head: bytes, rest: AsyncIterator[bytes] | None) -> int:
        """Store a body that begins with `head`; its bytes.

        Whatever the iterator raises is raised again; then, and when cancelled, nothing is stored.
        """
        with anyio.CancelScope(shield=True):
            # Not cut short, or an upload could begin that nobody ends.
            begun = await self._call(
                "create_multipart_upload",
                ContentType=CONTENT_TYPE,
                Metadata={"upload": self._token},
                ChecksumAlgorithm="CRC32",
            )
        self._upload_id = begun["UploadId"]
        try:
            with raised_alone():
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
        self, group: TaskGroup, head: bytes, rest: AsyncIterator[bytes] | None
    ) -> int:
        pieces, buffered, size, number = [head], len(head), 0, 1
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
            part, left = content[:most], content[most:]
            pieces, buffered = [left], len(left)
            await self._turns.acquire()
            self._held += 1
            group.start_soon(self._send, number, part)
            size += len(part)
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
        """Make the body visible. An upload that is gone may have been completed, and the answer
        lost."""
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
            if refused.word in ABSENT:
                return False
            raise
        metadata: dict[str, str] = found.get("Metadata", {})
        return metadata.get("upload") == self._token

    async def _abort(self) -> None:
        """Remove the parts. What fails here is left to the lifecycle rules: the reason for the
        abort is what the caller must see."""
        with suppress(ConveyorError):
            await self._call("abort_multipart_upload", UploadId=self._upload_id)

    async def _call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        return await self._aws.call("s3", operation, {**self._where, **parameters})


def part_size(number: int) -> int:
    """The bytes of a part, by its number from 1."""
    return PART << (number - 1) // SAME_SIZE
