"""Rows of an export and the names of its files.

A row is a line of the manifest, or a row with its body inside. File names are unique, even where
case is folded, and valid on every system, whatever the ids are: the external id if there is one,
else the task id, and an extension. Names depend only on the order of the rows.
"""

from __future__ import annotations

import codecs
import hashlib
import re
from array import array
from base64 import b64encode

import msgspec

from conveyor.domain import ids
from conveyor.domain.model import Format, Problem, Task

MANIFEST = "manifest.jsonl"
"""The name of the list of all rows; no body gets it."""

INDEX = "index.html"
"""The name of the page that lists the rows; no body gets it."""

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
"""Task ids below this index are unique without being remembered. The index lies below any that a
ULID's time decodes to, so ULIDs as external ids stay as they are."""


class ArchiveNames:
    """Gives out names; remembers 8 bytes of hash and a count for each, not the names."""

    def __init__(self) -> None:
        self._uses = UseCounts()
        for name in (MANIFEST, INDEX):
            self._uses.add(_hash(name))

    def name(self, task_id: str, external_id: str | None, extension: str) -> str:
        """Return the name of the next body."""
        if external_id is None and _is_low(task_id):
            return f"{task_id}.{extension}"
        stem = portable_stem(task_id if external_id is None else external_id)
        if _is_low(stem.upper()):
            stem = f"_{stem}"
        uses = self._uses.add(_hash(f"{stem}.{extension}"))
        # No stem holds a space, so a numbered name never equals another row's unnumbered one.
        return f"{stem}.{extension}" if uses == 1 else f"{stem} ({uses}).{extension}"


def portable_stem(text: str) -> str:
    """Turn a text into the beginning of a file name: only letters, digits, dots, dashes and
    underscores, no dot at either end, no leading dash, no Windows device name."""
    stem = _NOT_PORTABLE.sub("_", text[:MAX_STEM]).rstrip(".")
    if not stem or stem.startswith((".", "-")) or _DEVICE.match(stem):
        return f"_{stem}"
    return stem


class UseCounts:
    """Counts additions of 64-bit keys: 12 bytes a slot, at most two thirds of the slots taken."""

    def __init__(self) -> None:
        self._used = 0
        self._make(1_024)

    def add(self, key: int) -> int:
        """Count a key; return its count so far."""
        slot = self._slot(key)
        if self._counts[slot] == 0:
            self._used += 1
            if self._used * 3 > len(self._keys) * 2:
                self._grow()
                slot = self._slot(key)
            self._keys[slot] = key
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


EXPIRED = "expired"
"""The status of a row whose body is past its retention or gone."""

TEXT, BASE64 = "text", "base64"
"""The values of `body_encoding` for a body inside a row."""

_CHARSET = re.compile(r";\s*charset\s*=\s*\"?([A-Za-z0-9._:-]+)", re.IGNORECASE)
# Python also knows codecs that are not character sets, some slow enough for an attack.
_KNOWN_CHARSETS = re.compile(
    r"ascii|utf-8|utf-16|utf-16-[bl]e|utf-32|utf-32-[bl]e|iso8859-\d+|cp125\d|koi8-[rut]|mac-roman"
    r"|shift_jis|cp932|euc_jp|iso2022_jp|gb2312|gbk|gb18030|big5|big5hkscs|euc_kr|cp949|tis-620"
)
_FORMULA = frozenset("=+-@\t\r\n＝＋－＠")  # spreadsheets read the wide ones alike


class ExportRow(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One row of an export.

    `status` is a task's, or `expired`. `type` is the format of the body, `file` its name in an
    archive and `size` its bytes; where bodies stand inside rows, `body` is the text, or base64 of
    the bytes.
    """

    task_id: str
    external_id: str | None = None
    url: str
    status: str
    type: str | None = None
    file: str | None = None
    content_type: str | None = None
    size: int | None = None
    error: Problem | None = None
    metadata: dict[str, str] | None = None
    body_encoding: str | None = None
    body: str | None = None


class Exported(msgspec.Struct, frozen=True):
    """A task and the pieces of its body; the body is None where none can be given."""

    task: Task
    body: tuple[bytes, ...] | None


def export_row(
    exported: Exported,
    *,
    file: str | None = None,
    body: str | None = None,
    body_encoding: str | None = None,
) -> ExportRow:
    """Build the row of one task."""
    task, result = exported.task, exported.task.result
    status = task.status.value
    if result is not None and exported.body is None:
        status, result = EXPIRED, None
    return ExportRow(
        task_id=task.task_id,
        external_id=task.spec.external_id,
        url=task.spec.url,
        status=status,
        type=None if result is None else result.format.value,
        file=file,
        content_type=None if result is None else result.content_type,
        size=None if result is None else result.size,
        error=task.error,
        metadata=task.spec.metadata,
        body_encoding=body_encoding,
        body=body,
    )


def inline_row(exported: Exported) -> ExportRow:
    """Build the row of one task with its body inside."""
    result = exported.task.result
    if exported.body is None or result is None:
        return export_row(exported)
    body = b"".join(exported.body)
    text = decoded(body, result.content_type)
    if text is None:
        return export_row(exported, body=b64encode(body).decode(), body_encoding=BASE64)
    return export_row(exported, body=text, body_encoding=TEXT)


def decoded(body: bytes, content_type: str) -> str | None:
    """Decode a body by the charset of its content type, UTF-8 by default.

    Returns None where the body is not text in it, or the charset is unknown.
    """
    named = _CHARSET.search(content_type)
    try:
        charset = codecs.lookup(named[1] if named else "utf-8").name
        return body.decode(charset) if _KNOWN_CHARSETS.fullmatch(charset) else None
    except (LookupError, UnicodeError):
        return None


def neutral(cell: str) -> str:
    """Prefix a cell with an apostrophe if a spreadsheet would read it as a formula."""
    return f"'{cell}" if cell[:1] in _FORMULA else cell
