"""The shapes of answers about slots for files."""

from __future__ import annotations

import msgspec


class UploadBody(msgspec.Struct, frozen=True):
    """How the file is sent: the method, the link, and headers that have to be just these."""

    method: str
    url: str
    headers: dict[str, str]
    expires_at: str


class JobInputBody(msgspec.Struct, frozen=True):
    """A slot; `expires_at` is the end of the slot, with whatever was put into it."""

    file_input_id: str
    upload: UploadBody
    expires_at: str
