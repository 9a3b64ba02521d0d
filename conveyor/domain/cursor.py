"""Opaque page cursors: a keyset position, bound to the list it belongs to and signed.

A cursor holds key values, never a row pointer. Its scope (which list, whose, under which filter) is
signed with it but not carried, so a cursor of another list is refused like a forged one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

from conveyor.domain.errors import ConveyorError, ErrorCode

_MAC_LENGTH = 12
_VERSION = b"1"
MAX_LENGTH = 512


def encode_cursor(position: str, *, scope: str, key: bytes) -> str:
    """The cursor that continues after `position` in the list named by `scope`."""
    payload = _VERSION + position.encode()
    token = _mac(payload, scope, key) + payload
    return base64.urlsafe_b64encode(token).rstrip(b"=").decode()


def decode_cursor(text: str, *, scope: str, key: bytes) -> str:
    """The position that a cursor holds. Raises ConveyorError(invalid_argument) for any other
    text."""
    try:
        if len(text) > MAX_LENGTH:
            raise ValueError("too long")
        token = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        mac, payload = token[:_MAC_LENGTH], token[_MAC_LENGTH:]
        if not payload.startswith(_VERSION):
            raise ValueError("unknown version")
        if not hmac.compare_digest(mac, _mac(payload, scope, key)):
            raise ValueError("bad signature")
        return payload[len(_VERSION) :].decode()
    except (ValueError, binascii.Error, UnicodeError):
        raise ConveyorError(
            ErrorCode.INVALID_ARGUMENT, "cursor: not a cursor of this list"
        ) from None


def _mac(payload: bytes, scope: str, key: bytes) -> bytes:
    message = len(scope).to_bytes(4, "big") + scope.encode() + payload
    return hmac.new(key, message, hashlib.sha256).digest()[:_MAC_LENGTH]
