"""Signed download links: whoever holds one reads one export, until it expires, with no API key."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence

import msgspec

from conveyor.domain import ids
from conveyor.domain.errors import ConveyorError, ErrorCode, not_found

PATH = "/v1/exports/{job_id}/{run_id}/{export_id}"

_SIGNATURE_BYTES = 16
_EXPIRES = re.compile(r"[1-9][0-9]{0,11}")


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
        self._keys = tuple(keys)
        self._origin = origin

    def link(self, target: ExportTarget, *, expires_at: int) -> str:
        """The link. `expires_at` is in milliseconds and rounded up to a whole second."""
        expires = -(-expires_at // 1_000)
        signature = _sign(self._keys[0], target, expires)
        return f"{self._origin}{target.path}?expires={expires}&signature={signature}"

    def check(self, target: ExportTarget, *, expires: str, signature: str, now: int) -> None:
        """Raises ConveyorError(permission_denied) unless the link is ours and still good."""
        if _EXPIRES.fullmatch(expires) is not None and now < int(expires) * 1_000:
            given = signature.encode()
            expected = [_sign(key, target, int(expires)).encode() for key in self._keys]
            if any(hmac.compare_digest(given, one) for one in expected):
                return
        raise ConveyorError(ErrorCode.PERMISSION_DENIED, "the link is not valid, or has expired")


def _sign(key: bytes, target: ExportTarget, expires: int) -> str:
    message = f"GET {target.path}?{expires}".encode()
    return hashlib.blake2b(message, key=key, digest_size=_SIGNATURE_BYTES).hexdigest()
