"""File names for results: portable, unique, and never outside the directory asked for."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

MAX_STEM = 120

_FORMATS = {
    "html": ".html",
    "json": ".json",
    "markdown": ".md",
    "plaintext": ".txt",
    "pdf": ".pdf",
}
_MEDIA_TYPES = {
    "application/json": ".json",
    "application/pdf": ".pdf",
    "application/xml": ".xml",
    "image/gif": ".gif",
    "image/jpeg": ".jpg",
    "image/png": ".png",
    "image/svg+xml": ".svg",
    "image/webp": ".webp",
    "text/css": ".css",
    "text/csv": ".csv",
    "text/markdown": ".md",
    "text/plain": ".txt",
    "text/xml": ".xml",
}
_EXTENSIONS = frozenset({".htm", *_FORMATS.values(), *_MEDIA_TYPES.values()})
_UNPORTABLE = re.compile(r"[^A-Za-z0-9._-]")
_RESERVED = frozenset(
    {"con", "prn", "aux", "nul", "clock$", "conin$", "conout$"}
    | {f"{port}{number}" for port in ("com", "lpt") for number in range(10)}
)


def extension(result_format: str | None, content_type: str) -> str:
    """The extension for a body, with its dot.

    The format decides; for `html`, which is also what a plain fetch of anything is called, the
    Content-Type may say better.
    """
    media_type = content_type.partition(";")[0].strip().lower()
    if result_format in (None, "html"):
        return _MEDIA_TYPES.get(media_type, ".html")
    return _FORMATS.get(result_format or "", ".bin")


def portable_stem(text: str) -> str:
    """A file name without extension that every common file system takes.

    ASCII letters, digits, `.`, `_` and `-` only; no dot at either end, no leading hyphen, no name
    that Windows reserves; at most 120 characters, a cut one ending in a part of its hash.
    """
    stem, dot, suffix = text.rpartition(".")
    if dot and stem and f".{suffix.lower()}" in _EXTENSIONS:
        text = stem
    portable = _UNPORTABLE.sub("_", text).strip(".")
    if portable.startswith("-") or portable.partition(".")[0].lower() in _RESERVED:
        portable = f"_{portable}"
    if len(portable) > MAX_STEM:
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        portable = f"{portable[: MAX_STEM - 9]}-{digest}"
    return portable or "_"


class Stems:
    """Gives out stems that stay apart where upper and lower case are the same."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._next: dict[str, int] = {}

    def claim(self, text: str) -> str:
        """The portable stem for the text, numbered from 2 where it is taken."""
        stem = portable_stem(text)
        unique = stem
        number = self._next.get(stem.lower(), 2)
        while unique.lower() in self._taken:
            unique = f"{stem}-{number}"
            number += 1
        self._next[stem.lower()] = number
        self._taken.add(unique.lower())
        return unique


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write aside, which takes the name `path` once complete.

    What was aside is removed if anything goes wrong; a file that had the name stays until then.
    """
    aside = path.with_name(f".{path.name}.part")
    aside.unlink(missing_ok=True)
    try:
        with aside.open("xb") as file:
            yield file
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
