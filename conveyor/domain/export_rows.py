"""One row of a run as an export tells it: a line of the manifest, or a row with its body."""

from __future__ import annotations

import codecs
import re
from base64 import b64encode

import msgspec

from conveyor.domain.model import Problem, Task

EXPIRED = "expired"
"""The status of a row whose body is past its retention, or is not there any more."""

TEXT, BASE64 = "text", "base64"
"""What `body_encoding` says of a body that stands inside a row."""

_CHARSET = re.compile(r";\s*charset\s*=\s*\"?([A-Za-z0-9._:-]+)", re.IGNORECASE)
# Python knows encodings that are no character sets, some of them slow enough to be a weapon.
_KNOWN_CHARSETS = re.compile(
    r"ascii|utf-8|utf-16|utf-16-[bl]e|utf-32|utf-32-[bl]e|iso8859-\d+|cp125\d|koi8-[rut]|mac-roman"
    r"|shift_jis|cp932|euc_jp|iso2022_jp|gb2312|gbk|gb18030|big5|big5hkscs|euc_kr|cp949|tis-620"
)
_FORMULA = frozenset("=+-@\t\r\n＝＋－＠")  # spreadsheets read the wide ones alike


class ExportRow(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One row. `status` is a task's, or `expired`; `file` is the body's name in an archive, `size`
    its bytes; where bodies stand inside rows, `body` is its text, or base64 of its bytes."""

    task_id: str
    external_id: str | None = None
    url: str
    status: str
    file: str | None = None
    content_type: str | None = None
    size: int | None = None
    error: Problem | None = None
    metadata: dict[str, str] | None = None
    body_encoding: str | None = None
    body: str | None = None


class Exported(msgspec.Struct, frozen=True):
    """A task and the pieces of its body; None as body where there is none to be given."""

    task: Task
    body: tuple[bytes, ...] | None


def export_row(
    exported: Exported,
    *,
    file: str | None = None,
    body: str | None = None,
    body_encoding: str | None = None,
) -> ExportRow:
    """The row of one task."""
    task, result = exported.task, exported.task.result
    status = task.status.value
    if result is not None and exported.body is None:
        status, result = EXPIRED, None
    return ExportRow(
        task_id=task.task_id,
        external_id=task.spec.external_id,
        url=task.spec.url,
        status=status,
        file=file,
        content_type=None if result is None else result.content_type,
        size=None if result is None else result.size,
        error=task.error,
        metadata=task.spec.metadata,
        body_encoding=body_encoding,
        body=body,
    )


def inline_row(exported: Exported) -> ExportRow:
    """The row of one task with its body inside."""
    result = exported.task.result
    if exported.body is None or result is None:
        return export_row(exported)
    body = b"".join(exported.body)
    text = decoded(body, result.content_type)
    if text is None:
        return export_row(exported, body=b64encode(body).decode(), body_encoding=BASE64)
    return export_row(exported, body=text, body_encoding=TEXT)


def decoded(body: bytes, content_type: str) -> str | None:
    """The text of a body under the charset of its content type, UTF-8 where that names none; None
    where it is no such text, or the charset is not known."""
    named = _CHARSET.search(content_type)
    try:
        charset = codecs.lookup(named[1] if named else "utf-8").name
        return body.decode(charset) if _KNOWN_CHARSETS.fullmatch(charset) else None
    except (LookupError, UnicodeError):
        return None


def neutral(cell: str) -> str:
    """A cell that no spreadsheet takes for a formula: one that begins like a formula gets an
    apostrophe in front."""
    return f"'{cell}" if cell[:1] in _FORMULA else cell
