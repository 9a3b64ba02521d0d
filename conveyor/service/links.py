"""Signed result links: whoever holds one reads one body, until it expires, with no API key."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from conveyor.domain import ids
from conveyor.service.signing import Signer, not_valid

PATH = "/v1/blobs/{job_id}/{run_id}/{task_id}"


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
        """The link to a body, up to the whole second after `expires_at`, in milliseconds."""
        path = _path(target)
        return f"{self._origin}/v1/blobs/{path}?{self._signer.query(path, expires_at=expires_at)}"

    def check(self, target: LinkTarget, *, expires: str, signature: str, now: int) -> None:
        """Raises ConveyorError(permission_denied) unless the link is ours and still good."""
        end = self._signer.end_of(_path(target), expires=expires, signature=signature)
        if end is None or now >= end:
            raise not_valid()


def target_of(job_id: str, run_id: str, task_id: str) -> LinkTarget | None:
    """The target that these path segments name, None where they are no ids."""
    if ids.is_ulid(job_id) and ids.is_ulid(run_id) and ids.is_task_id(task_id):
        return LinkTarget(job_id, run_id, task_id)
    return None


def _path(target: LinkTarget) -> str:
    return f"{target.job_id}/{target.run_id}/{target.task_id}"
