"""Secrets struck out of text that a gateway sent back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

MASK = "***"
MIN_VALUE = 4
_CREDENTIALS = re.compile(r"//[^/@\s]*@")


def redactor(key: str, values: Iterable[str] = ()) -> Callable[[str], str]:
    """A function that masks the key, plain or percent-encoded in part or whole, wherever it stands.

    So are further values of at least MIN_VALUE characters (shorter ones would mask half of any
    sentence), and whatever stands between `//` and `@`.
    """
    secrets = [key] if key else []
    secrets += [value for value in values if len(value) >= MIN_VALUE]
    secrets.sort(key=len, reverse=True)
    pattern = re.compile("|".join(map(_spellings, secrets))) if secrets else None

    def redact(text: str) -> str:
        if pattern is not None:
            text = pattern.sub(MASK, text)
        return _CREDENTIALS.sub(f"//{MASK}@", text)

    return redact


def _spellings(secret: str) -> str:
    return "".join(_character(character) for character in secret)


def _character(character: str) -> str:
    encoded = "".join(f"%{byte:02x}" for byte in character.encode("utf-8", "replace"))
    digits = "".join(f"[{d}{d.upper()}]" if d in "abcdef" else re.escape(d) for d in encoded)
    space = r"|\+" if character == " " else ""
    return f"(?:{re.escape(character)}|{digits}{space})"
