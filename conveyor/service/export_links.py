"""Signed download links: whoever holds one reads one export, until it expires, with no API key."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from conveyor.domain import ids
from conveyor.domain.errors import not_found
from conveyor.service.signing import Signer, not_valid

PATH = "/v1/exports/{job_id}/{run_id}/{export_id}"


class ExportTarget(msgspec.Struct, frozen=True):
    """The export that a link opens. Raises ConveyorError(not_found) for what cannot be ids."""

    job_id: str
    run_id: str
    export_id: str

    def __post_init__(self) -> None:
        if not all(ids.is_ulid(one) for one in (self.job_id, self.run_id, self.export_id)):
            raise not_found("export")

    @property
    def path(self) -> str:
        """Where it is served."""
        return PATH.format(job_id=self.job_id, run_id=self.run_id, export_id=self.export_id)


class ExportLinks:
    """Makes links, and checks them."""

    def __init__(self, keys: Sequence[bytes], *, origin: str) -> None:
        self._signer = Signer(keys)
        self._origin = origin

    def link(self, target: ExportTarget, *, expires_at: int) -> str:
        """The link, up to the whole second after `expires_at`, in milliseconds."""
        query = self._signer.query(f"GET {target.path}", expires_at=expires_at)
        return f"{self._origin}{target.path}?{query}"

    def check(self, target: ExportTarget, *, expires: str, signature: str, now: int) -> None:
        """Raises ConveyorError(permission_denied) unless the link is ours and still good."""
        end = self._signer.end_of(f"GET {target.path}", expires=expires, signature=signature)
        if end is None or now >= end:
            raise not_valid()
