"""A fingerprint of everything that happened: equal for two runs that did the same at the same
time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

_CHUNK = 1_000


class Trace:
    """A running sha256 over lines of virtual microseconds and an event with its ids.

    The name of the policy is no part of it, so that two policies that do the same are seen to.
    """

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds
        self._hash = hashlib.sha256()
        self._lines: list[str] = []
        self._hashed = 0

    @property
    def events(self) -> int:
        """How many events were noted."""
        return self._hashed + len(self._lines)

    def note(self, event: str) -> None:
        """Something happened now."""
        lines = self._lines
        lines.append(f"{self._seconds() * 1e6:.0f} {event}")
        if len(lines) >= _CHUNK:
            self._flush()

    def digest(self) -> str:
        """The fingerprint up to now, 64 hexadecimal digits."""
        self._flush()
        return self._hash.hexdigest()

    def _flush(self) -> None:
        if self._lines:
            self._hash.update(("\n".join(self._lines) + "\n").encode())
            self._hashed += len(self._lines)
            self._lines.clear()
