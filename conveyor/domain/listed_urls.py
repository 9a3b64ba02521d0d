"""URLs as lists hold them: what people and their tools put around a URL is cut, or refused with the
hint that mends it. A URL that a JSON document names is none of this module's business.
"""

from __future__ import annotations

import re

from conveyor.domain.errors import InvalidTaskReason
from conveyor.domain.text_rules import Refused, quoted

# No-break and other spaces, and the marks that copying from pages and documents leaves behind.
AROUND = (
    " \t\r\n\v\f"
    "\xa0\xad\u061c\u1680\u180e\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009"
    "\u200a\u200b\u200c\u200d\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u202f\u205f"
    "\u2060\u2061\u2062\u2063\u2064\u2066\u2067\u2068\u2069\u3000\ufeff"
)
"""Blanks and invisible characters that count for nothing at either end of a line or a cell."""
SEPARATORS = ";|\t"
"""Characters that separate columns where the comma does not."""
ENDS = ",;|"
"""Separators that tools leave at the ends of lines."""

SEPARATOR_LINE = re.compile(r'"?sep=([^\r\n])"?(?=\r?\n|\Z)', re.IGNORECASE)
"""The first line of a CSV file that Excel writes and reads to name the separator."""

_COMMENT = re.compile(r"\s#")
_SEVERAL = re.compile(r"[\s,;|]['\"<(]?(?:https?|ftp)://", re.IGNORECASE)
# Quotes, brackets, bullets, numbers, formulas and links of Markdown.
_BEFORE = re.compile(
    r"(?:[^A-Za-z0-9]+|[0-9]+[.)]?\s+|=HYPERLINK\([\"']?|\[[^\]]*\]\()https?://", re.IGNORECASE
)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_OTHER_SCHEME = re.compile(r"(?:about|blob|data|file|ftp|javascript|mailto|sms|tel|view-source):")


def is_alone(urls: list[str]) -> bool:
    """Return whether no text holds a second URL; False says nothing about any one of them."""
    return "\n".join(urls).count("://") <= len(urls)


def url_of_line(line: str) -> str:
    """Return the URL of a line, without the note that a blank and `#` begin.

    Raises Refused for a line of several URLs, or of anything beside one.
    """
    if "\r" in line:
        _refuse(line, "a carriage return ends no line: end lines with LF or CR LF")
    if line.startswith("{"):
        _refuse(line, "a JSON task: send the list as such tasks (--type jsonl)")
    note = _COMMENT.search(line)
    url = line[: note.start()].rstrip(AROUND) if note is not None else line
    if _BEFORE.match(url) is not None:
        _refuse(url, "something stands before the URL: take it away, or send CSV (--type csv)")
    _refuse_several(url)
    if "\t" in url:
        _refuse(url, "a tab is within: send columns as CSV (--type csv --delimiter '\\t')")
    return url


def url_of_cell(cell: str, quote: str) -> str:
    """Return the URL of a cell of CSV. Raises Refused for several URLs, a note, or an escape."""
    url = cell.strip(AROUND)
    if _BEFORE.match(url) is not None:
        _refuse(url, "something stands before the URL: take it away; --quote names another quote")
    _refuse_several(url)
    if _COMMENT.search(url) is not None:
        _refuse(url, "a note follows the URL: give it a column of its own")
    if url.endswith("\\") or "\\" + quote in url:
        _refuse(url, "the backslash escapes nothing here: put the cell in quotes, and double those")
    return url


def with_scheme(text: str, scheme: str) -> str:
    """Put a scheme before a bare host; leave a text that is empty or has a scheme."""
    url = text.strip(AROUND)
    if not url or _SCHEME.match(url) or _OTHER_SCHEME.match(url.lower()):
        return text
    return f"{scheme}:{url}" if url.startswith("//") else f"{scheme}://{url}"


def separator_in_all(texts: list[str]) -> str | None:
    """Return a separator that every text holds, so that they are probably rows of columns."""
    return next((one for one in SEPARATORS if texts and all(one in text for text in texts)), None)


def separator_at_all_ends(lines: list[str]) -> str | None:
    """Return a separator that ends every line, so that no URL is meant to end in it."""
    return next((one for one in ENDS if lines and all(line.endswith(one) for line in lines)), None)


def separated(separator: str) -> str:
    """Say how to mend a list of URLs that end in a separator each."""
    return f'every line ends in "{separator}": take it away, or send CSV (--type csv)'


def _refuse_several(url: str) -> None:
    if _SEVERAL.search(url) is not None:
        _refuse(url, "more than one URL: give each a line, or write a JSON task if it is one")


def _refuse(url: str, detail: str) -> None:
    raise Refused(InvalidTaskReason.MALFORMED_URL, quoted(url), detail)
