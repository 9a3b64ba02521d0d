"""Opaque page cursors: a keyset position, bound to the list it belongs to and signed.

A cursor holds key values, never a row pointer. Its scope (which list, whose, under which filter) is
signed with it but not carried, so a cursor of another list is refused like a forged one.

A list that lies in many shards has one position a shard: such a cursor begins with `sh:`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence

from conveyor.domain.errors import ConveyorError, ErrorCode

_MAC_LENGTH = 12
_VERSION = b"1"
MAX_LENGTH = 1_024
"""Characters of a cursor, at most: 64 positions that lie as far apart as they can need 760."""
COMPOSITE = "sh:"
"""What a cursor with one position a shard begins with."""
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


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
        if base64.urlsafe_b64encode(token).rstrip(b"=").decode() != text:
            raise ValueError("not as it was made")
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


def is_composite(text: str) -> bool:
    """Whether a cursor claims to hold one position a shard."""
    return text.startswith(COMPOSITE)


def encode_positions(run_id: str, positions: Sequence[int]) -> str:
    """A run and one position a shard, from -1, as a position for `encode_cursor`."""
    least = min(positions)
    words = [_base36(least + 1), *(_base36(position - least) for position in positions)]
    return ".".join([run_id, *words])


def decode_positions(text: str) -> tuple[str, tuple[int, ...]]:
    """What `encode_positions` made a text of. Raises ValueError for any other text."""
    run_id, first, *rest = text.split(".")
    least = int(first, 36) - 1
    positions = tuple(least + int(word, 36) for word in rest)
    if not positions or encode_positions(run_id, positions) != text:
        raise ValueError("not the positions of shards")
    return run_id, positions


def _base36(number: int) -> str:
    digits = ""
    while number >= 36:
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
    return _DIGITS[number] + digits


def _mac(payload: bytes, scope: str, key: bytes) -> bytes:
    message = len(scope).to_bytes(4, "big") + scope.encode() + payload
    return hmac.new(key, message, hashlib.sha256).digest()[:_MAC_LENGTH]
