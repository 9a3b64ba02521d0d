"""Signed upload links: whoever holds one puts one file into one slot, with no API key."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection, Sequence

from conveyor.domain.errors import ConveyorError, ErrorCode

PATH = "/v1/job_inputs/{input_id}/content"

_SIGNATURE_BYTES = 16
_EXPIRES = re.compile(r"[1-9][0-9]{0,11}")


class UploadSigner:
    """Makes upload links, and checks them. A link is good for one Content-Type."""

    def __init__(self, keys: Sequence[bytes], *, origin: str) -> None:
        self._keys = tuple(keys)
        self._origin = origin

    def link(self, input_id: str, *, content_type: str, expires_at: int) -> str:
        """The link into a slot. `expires_at` is in milliseconds and rounded up to a whole
        second."""
        expires = -(-expires_at // 1_000)
        signature = _sign(self._keys[0], input_id, expires, content_type)
        path = PATH.format(input_id=input_id)
        return f"{self._origin}{path}?expires={expires}&signature={signature}"

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
        if _EXPIRES.fullmatch(expires) is None:
            raise _refused("the upload link is not valid")
        end = int(expires)
        if not self._is_ours(signature, input_id, end, content_type):
            for other in content_types:
                if self._is_ours(signature, input_id, end, other):
                    raise _refused(f"this upload link takes a file sent as Content-Type: {other}")
            raise _refused("the upload link is not valid")
        return end * 1_000

    def _is_ours(self, signature: str, input_id: str, expires: int, content_type: str) -> bool:
        given = signature.encode()
        expected = [_sign(key, input_id, expires, content_type) for key in self._keys]
        return any(hmac.compare_digest(given, one.encode()) for one in expected)


def _sign(key: bytes, input_id: str, expires: int, content_type: str) -> str:
    message = f"PUT {input_id}?{expires} {content_type}".encode()
    return hashlib.blake2b(message, key=key, digest_size=_SIGNATURE_BYTES).hexdigest()


def _refused(detail: str) -> ConveyorError:
    return ConveyorError(ErrorCode.PERMISSION_DENIED, detail)
