"""Slots for files of tasks: made here, filled through a signed link, read when they are submitted.

A slot may be filled again until its link ends: the last complete upload counts. If the store makes
links of its own, it does not report uploads, and a file is checked when it is submitted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from conveyor.domain import ids, strict_json
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.input_spec import InputType, parse_input
from conveyor.domain.text_rules import rfc3339
from conveyor.ports.inputs import JobInput
from conveyor.records.blob_keys import input_key
from conveyor.service.context import Context
from conveyor.service.links import UploadSigner
from conveyor.service.schemas import JobInputBody, UploadBody, present

CONTENT_TYPES = {
    InputType.CSV: "text/csv",
    InputType.JSONL: "application/x-ndjson",
    InputType.URLS: "text/plain",
}
"""The Content-Type of each type of file, compressed or not."""


class FileInputs:
    """Makes slots and stores files uploaded into them."""

    def __init__(self, context: Context, signer: UploadSigner) -> None:
        self._context = context
        self._signer = signer
        self._inputs = context.inputs
        self._blobs = context.blobs

    async def create(self, caller_id: str, body: bytes) -> JobInputBody:
        """Make a slot from a JSON document. Raises ConveyorError(invalid_argument)."""
        request = parse_input(strict_json.decode(body))
        clock, options = self._context.clock, self._context.options
        now = clock.now()
        expires_at = now + round(options.input_ttl * 1_000)
        upload_until = min(now + round(options.input_upload_ttl * 1_000), expires_at)
        slot = JobInput(
            input_id=clock.new_id(),
            caller=caller_id,
            type=request.type,
            content_type=CONTENT_TYPES[request.type],
            created_at=now,
            upload_until=upload_until,
            expires_at=expires_at,
            csv=request.csv,
        )
        await self._inputs.create_input(slot)
        return await self._input_body(slot, request.warnings)

    async def open_upload(
        self, input_id: str, *, expires: str, signature: str, content_type: str
    ) -> JobInput:
        """Return the slot of a signed link, before the file is read.

        Raises ConveyorError: permission_denied for a link that is not ours, was made for another
        Content-Type, or has ended; file_input_not_found for an expired slot.
        """
        if not ids.is_ulid(input_id):
            raise _not_found()
        link_ends_at = self._signer.check(
            input_id,
            expires=expires,
            signature=signature,
            content_type=content_type,
            content_types=CONTENT_TYPES.values(),
        )
        now = self._context.clock.now()
        slot = await self._inputs.get_input(input_id)
        if slot is None or now >= slot.expires_at:
            raise _not_found()
        if now >= link_ends_at:
            raise ConveyorError(ErrorCode.PERMISSION_DENIED, "the upload link has expired")
        return slot

    async def store(
        self, slot: JobInput, pieces: AsyncIterator[bytes], *, announced: int | None
    ) -> None:
        """Store a file in a slot, replacing an earlier one. `announced` is its size, if known.

        Reads nothing of a file announced to be too large, and of others no more than the limit. If
        `pieces` raises, the earlier file stays as it was. Raises ConveyorError: payload_too_large;
        file_input_not_found where the slot expired meanwhile.
        """
        limit = self._context.options.max_input_bytes
        if announced is not None and announced > limit:
            raise file_too_large(limit)
        key = input_key(slot.input_id)
        size = await self._blobs.put(key, _bounded(pieces, limit))
        alive = self._context.clock.now() < slot.expires_at
        if not (alive and await self._inputs.input_uploaded(slot.input_id, size=size)):
            # The sweeper may have been here before the file was: nobody else would remove it.
            await self._blobs.delete(key)
            raise _not_found()

    async def _input_body(self, slot: JobInput, warnings: tuple[str, ...]) -> JobInputBody:
        own = await self._blobs.upload_link(
            input_key(slot.input_id),
            content_type=slot.content_type,
            seconds=max(1, (slot.upload_until - slot.created_at) // 1_000),
        )
        ours = self._signer.link(
            slot.input_id, content_type=slot.content_type, expires_at=slot.upload_until
        )
        upload = UploadBody(
            method="PUT",
            url=own or ours,
            headers={"Content-Type": slot.content_type},
            expires_at=rfc3339(slot.upload_until),
            max_bytes=self._context.options.max_input_bytes,
        )
        return JobInputBody(
            slot.input_id, upload, rfc3339(slot.expires_at), present(warnings or None)
        )


def file_too_large(limit: int) -> ConveyorError:
    """Build the answer for a file larger than `limit` bytes."""
    return ConveyorError(
        ErrorCode.PAYLOAD_TOO_LARGE,
        f"an uploaded file holds at most {limit} bytes (CONVEYOR_MAX_INPUT_BYTES)",
    )


def _not_found() -> ConveyorError:
    """Build the answer for a slot that does not exist, has expired, or is another caller's."""
    return ConveyorError(
        ErrorCode.FILE_INPUT_NOT_FOUND, "no such file input, or it is past its time"
    )


async def _bounded(pieces: AsyncIterator[bytes], limit: int) -> AsyncIterator[bytes]:
    size = 0
    async for piece in pieces:
        size += len(piece)
        if size > limit:
            raise file_too_large(limit)
        yield piece
