"""The page that lists results beside their files: HTML without script, with all text escaped."""

from __future__ import annotations

from html import escape
from urllib.parse import quote

from conveyor.domain.export_rows import ExportRow
from conveyor.domain.text_rules import mask_credentials

MOST_ROWS = 10_000
"""A browser is slow to show more; the manifest has all rows."""

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="referrer" content="no-referrer">
<title>Results</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em; color-scheme: light dark }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; vertical-align: top; padding: .25em .75em .25em 0 }
th, td { border-bottom: 1px solid #8885; overflow-wrap: anywhere }
.plain { white-space: nowrap; overflow-wrap: normal }
.size { text-align: right }
.failed { color: #c33 }
</style>
</head>
<body>
<h1>Results</h1>
<table>
<thead><tr><th>Status<th>Page<th>URL<th>Type<th class="size">Bytes<th>Reason</thead>
<tbody>
"""
_FOOT = """</tbody>
</table>
<p>%s. <a href="manifest.jsonl">manifest.jsonl</a> lists every row.</p>
</body>
</html>
"""


class IndexPage:
    """Builds the page piece by piece: the head, the rows, the foot. Rows beyond MOST_ROWS are
    counted only."""

    head = _HEAD

    def __init__(self) -> None:
        self._rows = 0
        self._files = 0

    def row(self, row: ExportRow) -> str:
        """Build one line of the table."""
        self._rows += 1
        self._files += row.file is not None
        if self._rows > MOST_ROWS:
            return ""
        name = escape(row.external_id or row.task_id)
        page = name if row.file is None else f'<a href="{quote(row.file)}">{name}</a>'
        kind = escape((row.content_type or row.type or "").partition(";")[0])
        size = "" if row.size is None else f"{row.size:,}"
        reason = "" if row.error is None else f"{row.error.title} ({row.error.code})"
        status = escape(row.status)
        return (
            f'<tr><td class="plain {status}">{status}<td>{page}<td>{_link(row.url)}'
            f'<td class="plain">{kind}<td class="plain size">{size}<td>{escape(reason)}\n'
        )

    def foot(self) -> str:
        """Build the end of the page, with the counts."""
        text = f"{_count(self._rows, 'task')}, {_count(self._files, 'file')}"
        if self._rows > MOST_ROWS:
            text += f"; the first {MOST_ROWS:,} are shown"
        return _FOOT % text


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _link(url: str) -> str:
    shown = escape(mask_credentials(url))
    if shown == escape(url) and url.lower().startswith(("http://", "https://")):
        return f'<a href="{shown}">{shown}</a>'
    return shown
