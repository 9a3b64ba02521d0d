"""Hashes that stand for API keys where keys must not stand.

Keys are long and random, so a fast hash gives none of them away, and each request can afford it.
"""

from __future__ import annotations

import hashlib
import re

MAX_API_KEY_LENGTH = 512

_CARRIED = re.compile(rf"[\x21-\x7e]{{1,{MAX_API_KEY_LENGTH}}}")
_HASH = re.compile(r"sha256:[0-9a-fA-F]{64}")


def key_hash(api_key: str) -> str:
    """`sha256:` and the SHA-256 of a key in hexadecimal."""
    return f"sha256:{hashlib.sha256(api_key.encode()).hexdigest()}"


def is_carried(api_key: str) -> bool:
    """Whether a request may carry a key: printable ASCII without spaces, not too long."""
    return _CARRIED.fullmatch(api_key) is not None


def is_key_hash(text: str) -> bool:
    """Whether a text is such a hash, in lower or upper case."""
    return _HASH.fullmatch(text) is not None
