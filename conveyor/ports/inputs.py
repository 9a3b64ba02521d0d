"""The inputs port: slots for files of tasks that callers upload and then submit."""

from __future__ import annotations

from typing import Protocol

import msgspec

from conveyor.domain.input_spec import CsvSpec, InputType

__all__ = ["CsvSpec", "InputSlots", "InputType", "JobInput"]


class JobInput(msgspec.Struct, frozen=True, kw_only=True):
    """A slot for one file. It takes uploads until `upload_until` and lives until `expires_at`.

    `size` is the size of the last complete upload in bytes, None before the first. Instants are in
    milliseconds since the epoch.
    """

    input_id: str
    caller: str
    type: InputType
    content_type: str
    created_at: int
    upload_until: int
    expires_at: int
    csv: CsvSpec | None = None
    size: int | None = None


class InputSlots(Protocol):
    """Slots, for the API. Their bytes lie in the blob store under `input_key`."""

    async def create_input(self, job_input: JobInput) -> None:
        """Write a new slot."""
        ...

    async def get_input(self, input_id: str) -> JobInput | None:
        """Return a slot by its id, expired ones included; None if it is gone. The API compares its
        owner."""
        ...

    async def input_uploaded(self, input_id: str, *, size: int) -> bool:
        """Note a complete upload of `size` bytes; return False if the slot is gone."""
        ...
