"""Names of files in an archive: unique and usable on every system, whatever the ids are.

Unique means: also where case is folded. A name is the external id where there is one, else the task
id, and an extension. Which row gets which name depends on the order of the rows alone.
"""

from __future__ import annotations

import hashlib
import re
from array import array

from conveyor.domain import ids
from conveyor.domain.model import Format

MANIFEST = "manifest.jsonl"
"""The name of the list of all rows, which no body gets."""

MAX_STEM = 128

EXTENSIONS = {
    Format.HTML: "html",
    Format.JSON: "json",
    Format.MARKDOWN: "md",
    Format.PLAINTEXT: "txt",
    Format.PDF: "pdf",
}

_NOT_PORTABLE = re.compile(r"[^A-Za-z0-9._-]")
_DEVICE = re.compile(r"(?:con|prn|aux|nul|(?:com|lpt)[0-9])(?:\.|\Z)", re.IGNORECASE)
_FEW_TASKS = 1 << 25
"""Task ids below this index are unique without being remembered. It lies below what the time in a
ULID looks like as an index, so that ULIDs as external ids stay as they are."""


class Names:
    """Gives out names. Remembers 8 bytes of hash and a count for each, not the names."""

    def __init__(self) -> None:
        self._uses = UseCounts()
        self._uses.add(_hash(MANIFEST))

    def name(self, task_id: str, external_id: str | None, extension: str) -> str:
        """The name of the next body."""
        if external_id is None and _is_low(task_id):
            return f"{task_id}.{extension}"
        stem = portable_stem(task_id if external_id is None else external_id)
        if _is_low(stem.upper()):
            stem = f"_{stem}"
        uses = self._uses.add(_hash(f"{stem}.{extension}"))
        # No stem holds a space, so that a name with a number is no other row's name without one.
        return f"{stem}.{extension}" if uses == 1 else f"{stem} ({uses}).{extension}"


def portable_stem(text: str) -> str:
    """The text as the beginning of a file's name: letters, digits, dots, dashes and underscores
    only, no dot at either end, no dash at the beginning, no name of a device of Windows."""
    stem = _NOT_PORTABLE.sub("_", text[:MAX_STEM]).rstrip(".")
    if not stem or stem.startswith((".", "-")) or _DEVICE.match(stem):
        return f"_{stem}"
    return stem


class UseCounts:
    """How often each 64-bit key was added: 12 bytes a slot, at most two thirds of them taken."""

    def __init__(self) -> None:
        self._used = 0
        self._make(1_024)

    def add(self, key: int) -> int:
        """Count a key; how often it has been counted by now."""
        slot = self._slot(key)
        if self._counts[slot] == 0:
            self._used += 1
            self._keys[slot] = key
            if self._used * 3 > len(self._keys) * 2:
                self._grow()
                slot = self._slot(key)
        self._counts[slot] += 1
        return self._counts[slot]

    def _make(self, size: int) -> None:
        self._keys = array("Q", bytes(8 * size))
        self._counts = array("I", bytes(4 * size))

    def _slot(self, key: int) -> int:
        mask = len(self._keys) - 1
        slot = key & mask
        while self._counts[slot] and self._keys[slot] != key:
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        keys, counts = self._keys, self._counts
        self._make(2 * len(keys))
        for key, count in zip(keys, counts, strict=True):
            if count:
                slot = self._slot(key)
                self._keys[slot] = key
                self._counts[slot] = count


def _is_low(text: str) -> bool:
    return ids.is_task_id(text) and ids.task_index(text) < _FEW_TASKS


def _hash(name: str) -> int:
    digest = hashlib.blake2b(name.lower().encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
