"""Signed upload links: whoever holds one puts one file into one slot, with no API key."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.service.signing import Signer

PATH = "/v1/job_inputs/{input_id}/content"


class UploadSigner:
    """Makes upload links, and checks them. A link is good for one Content-Type."""

    def __init__(self, keys: Sequence[bytes], *, origin: str) -> None:
        self._signer = Signer(keys)
        self._origin = origin

    def link(self, input_id: str, *, content_type: str, expires_at: int) -> str:
        """The link into a slot, up to the whole second after `expires_at`, in milliseconds."""
        query = self._signer.query(_upload(input_id, content_type), expires_at=expires_at)
        return f"{self._origin}{PATH.format(input_id=input_id)}?{query}"

    def check(
        self,
        input_id: str,
        *,
        expires: str,
        signature: str,
        content_type: str,
        content_types: Collection[str],
    ) -> int:
        """When the link ends, in milliseconds; that may have been long ago.

        Raises ConveyorError(permission_denied) for a link that is not ours, and for another
        Content-Type than the one, out of `content_types`, that it was made for.
        """
        for made_for in (content_type, *content_types):
            what = _upload(input_id, made_for)
            end = self._signer.end_of(what, expires=expires, signature=signature)
            if end is None:
                continue
            if made_for != content_type:
                raise _refused(f"this upload link takes a file sent as Content-Type: {made_for}")
            return end
        raise _refused("the upload link is not valid")


def _upload(input_id: str, content_type: str) -> str:
    return f"PUT {input_id} {content_type}"


def _refused(detail: str) -> ConveyorError:
    return ConveyorError(ErrorCode.PERMISSION_DENIED, detail)
