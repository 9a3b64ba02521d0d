"""Signed links to one result body, one upload slot or one export, valid without an API key.

Whoever holds a link may use it until it expires. A signature covers the target of the link and its
end.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection, Sequence

import msgspec

from conveyor.domain import ids
from conveyor.domain.errors import ConveyorError, ErrorCode, not_found

_BYTES = 16
_EXPIRES = re.compile(r"[1-9][0-9]{0,11}")


class Signer:
    """Signs with the first of its keys, and accepts signatures of all."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = tuple(keys)

    def query(self, what: str, *, expires_at: int) -> str:
        """Return the query of a link to `what`.

        `expires_at` is in milliseconds and is rounded up to a whole second.
        """
        expires = -(-expires_at // 1_000)
        return f"expires={expires}&signature={_sign(self._keys[0], what, expires)}"

    def end_of(self, what: str, *, expires: str, signature: str) -> int | None:
        """Return the end of a link to `what` in milliseconds, which may be long past.

        None for a link that is not ours, or to something else.
        """
        if _EXPIRES.fullmatch(expires) is None:
            return None
        end, given = int(expires), signature.encode()
        expected = [_sign(key, what, end).encode() for key in self._keys]
        return end * 1_000 if any(hmac.compare_digest(given, one) for one in expected) else None


def not_valid() -> ConveyorError:
    """Build the answer for a link that is not ours, or has ended."""
    return ConveyorError(ErrorCode.PERMISSION_DENIED, "the link is not valid, or has expired")


def _sign(key: bytes, what: str, expires: int) -> str:
    # A page signs a thousand links: keyed BLAKE2 is a MAC at a third of the cost of HMAC-SHA256.
    return hashlib.blake2b(f"{what}?{expires}".encode(), key=key, digest_size=_BYTES).hexdigest()


UPLOAD_PATH = "/v1/job_inputs/{input_id}/content"


ANY_BYTES = "application/octet-stream"
"""The Content-Type of clients that know no better; every upload link takes it."""


class UploadSigner:
    """Makes and checks upload links. A link is good for one Content-Type, and for ANY_BYTES."""

    def __init__(self, keys: Sequence[bytes], *, origin: str) -> None:
        self._signer = Signer(keys)
        self._origin = origin

    def link(self, input_id: str, *, content_type: str, expires_at: int) -> str:
        """Make the link into a slot, up to the whole second after `expires_at`, in milliseconds."""
        query = self._signer.query(_upload(input_id, content_type), expires_at=expires_at)
        return f"{self._origin}{UPLOAD_PATH.format(input_id=input_id)}?{query}"

    def check(
        self,
        input_id: str,
        *,
        expires: str,
        signature: str,
        content_type: str,
        content_types: Collection[str],
    ) -> int:
        """Return the end of the link in milliseconds, which may be long past.

        Raises ConveyorError(permission_denied) for a link that is not ours, and for any
        Content-Type but ANY_BYTES and the one, out of `content_types`, that it was made for.
        """
        for made_for in (content_type, *content_types):
            what = _upload(input_id, made_for)
            end = self._signer.end_of(what, expires=expires, signature=signature)
            if end is None:
                continue
            if content_type not in (made_for, ANY_BYTES):
                raise _refused(f"this upload link takes a file sent as Content-Type: {made_for}")
            return end
        raise _refused("the upload link is not valid")


def _upload(input_id: str, content_type: str) -> str:
    return f"PUT {input_id} {content_type}"


def _refused(detail: str) -> ConveyorError:
    return ConveyorError(ErrorCode.PERMISSION_DENIED, detail)


EXPORT_PATH = "/v1/exports/{job_id}/{run_id}/{export_id}"


class ExportTarget(msgspec.Struct, frozen=True):
    """The export that a link opens. Raises ConveyorError(not_found) for parts that cannot be
    ids."""

    job_id: str
    run_id: str
    export_id: str

    def __post_init__(self) -> None:
        if not all(ids.is_ulid(one) for one in (self.job_id, self.run_id, self.export_id)):
            raise not_found("export")

    @property
    def path(self) -> str:
        """The path that serves it."""
        return EXPORT_PATH.format(job_id=self.job_id, run_id=self.run_id, export_id=self.export_id)


class ExportLinks:
    """Makes and checks links to exports."""

    def __init__(self, keys: Sequence[bytes], *, origin: str) -> None:
        self._signer = Signer(keys)
        self._origin = origin

    def link(self, target: ExportTarget, *, expires_at: int) -> str:
        """Make the link, up to the whole second after `expires_at`, in milliseconds."""
        query = self._signer.query(f"GET {target.path}", expires_at=expires_at)
        return f"{self._origin}{target.path}?{query}"

    def check(self, target: ExportTarget, *, expires: str, signature: str, now: int) -> None:
        """Raise ConveyorError(permission_denied) unless the link is ours and still valid."""
        end = self._signer.end_of(f"GET {target.path}", expires=expires, signature=signature)
        if end is None or now >= end:
            raise not_valid()


CONTENT_PATH = "/v1/blobs/{job_id}/{run_id}/{task_id}"


class LinkTarget(msgspec.Struct, frozen=True, gc=False):
    """The body that a link opens."""

    job_id: str
    run_id: str
    task_id: str


class LinkSigner:
    """Makes links for the rows of one page (all with the same expiry), and checks them."""

    def __init__(self, keys: Sequence[bytes], *, origin: str) -> None:
        self._signer = Signer(keys)
        self._origin = origin

    def link(self, target: LinkTarget, *, expires_at: int) -> str:
        """Make the link to a body, up to the whole second after `expires_at`, in milliseconds."""
        path = _path(target)
        return f"{self._origin}/v1/blobs/{path}?{self._signer.query(path, expires_at=expires_at)}"

    def check(self, target: LinkTarget, *, expires: str, signature: str, now: int) -> None:
        """Raise ConveyorError(permission_denied) unless the link is ours and still valid."""
        end = self._signer.end_of(_path(target), expires=expires, signature=signature)
        if end is None or now >= end:
            raise not_valid()


def target_of(job_id: str, run_id: str, task_id: str) -> LinkTarget | None:
    """Return the target of these path segments, or None where they are not ids."""
    if ids.is_ulid(job_id) and ids.is_ulid(run_id) and ids.is_task_id(task_id):
        return LinkTarget(job_id, run_id, task_id)
    return None


def _path(target: LinkTarget) -> str:
    return f"{target.job_id}/{target.run_id}/{target.task_id}"
