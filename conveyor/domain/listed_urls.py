"""URLs as lists hold them: what people and their tools put around a URL is cut, or refused with the
hint that mends it. A URL that a JSON document names is none of this module's business.
"""

from __future__ import annotations

import re

from conveyor.domain.errors import InvalidTaskReason
from conveyor.domain.text_rules import Refused, quoted
from conveyor.domain.urls import MAX_LENGTH

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
_BETWEEN = rf"[{re.escape(AROUND)},;|\uff0c\u3001\uff1b\uff5c]"
_OPENING = r"['\"<(\[{\u2018\u201a\u201c\u201e\xab\u300c\uff08]"
# A separator before a URL, or a character that no URL holds. A URL may hold another one behind any
# character of its own, as in a path or query, but for a letter or digit that ends no escape.
_SEVERAL = re.compile(
    rf"{_BETWEEN}{_OPENING}*(?:(?:https?|ftp)://|www\.\w)"
    r"|[<>\"\u201c\u201d\u201e\xab\xbb](?:https?|ftp)://",
    re.IGNORECASE,
)
_GLUED = re.compile(r"(?<=[A-Za-z0-9])(?<!%[0-9A-Fa-f]{2})https?://", re.IGNORECASE)
_FURTHER_NAME = re.compile(r"[,;|]www\.", re.IGNORECASE)
_SCHEME_TWICE = re.compile(r"https?://https?(?::/|//)", re.IGNORECASE)
# Blanks of every kind; control characters have a reason of their own.
_BLANK = re.compile(r"[^\S\x00-\x1f\x7f-\x9f]")
_HOST = r"(?:localhost|\d{1,3}(?:\.\d{1,3}){3}|(?:[\w-]+\.)+[^\W\d][\w-]+|[\w-]+(?=:\d))(?![\w@])"
_BARE = re.compile(r"(?://)?[\w.-]+(?::\d+)?(?:[/?#].*)?", re.DOTALL)
_FIRST_HOST = re.compile(rf"(?://)?{_HOST}")
_FURTHER_HOST = re.compile(rf"{_BETWEEN}{_OPENING}*{_HOST}")
_BEFORE_HOST = re.compile(rf"(?:{_OPENING}+|[^\s/?#]*@){_HOST}")
# Quotes, brackets, bullets, numbers, formulas and links of Markdown.
_BEFORE = re.compile(
    r"(?:[^A-Za-z0-9]+|[0-9]+[.)]?\s+|=HYPERLINK\([\"']?|\[[^\]]*\]\()https?://", re.IGNORECASE
)
# A part of a path or query, or the end of the name of a file.
_OF_URLS = re.compile(r"[/?#&=]|\.[A-Za-z]{2,5}\Z")
_PATH_PARAM = re.compile(r";[\w.-]+=")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_OTHER_SCHEME = re.compile(r"(?:about|blob|data|file|ftp|javascript|mailto|sms|tel|view-source):")


def is_alone(urls: list[str]) -> bool:
    """Return whether no text holds a second URL; False says nothing about any one of them."""
    text = "\n".join(urls)
    return text.count("://") <= len(urls) and _FURTHER_NAME.search(text) is None


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
    _refuse_blank(url)
    return url


def url_of_cell(cell: str, quote: str) -> str:
    """Return the URL of a cell of CSV. Raises Refused for several URLs, a note, or an escape."""
    url = cell.strip(AROUND)
    if _BEFORE.match(url) is not None:
        _refuse(url, "something stands before the URL: take it away; --quote names another quote")
    _refuse_several(url)
    if _COMMENT.search(url) is not None:
        _refuse(url, "a note follows the URL: give it a column of its own")
    _refuse_blank(url)
    if url.endswith("\\") or "\\" + quote in url:
        _refuse(url, "the backslash escapes nothing here: put the cell in quotes, and double those")
    return url


def with_scheme(text: str, scheme: str) -> str:
    """Put a scheme before a bare host, with a port, path or query or without.

    Leave any other text to its reader, which takes what has a scheme and refuses the rest.
    """
    url = text.strip(AROUND)
    note = _COMMENT.search(url)
    alone = url if note is None else url[: note.start()]
    if not _is_bare(alone) or _BARE.fullmatch(alone) is None or _has_several_hosts(alone):
        return text
    return f"{scheme}:{url}" if url.startswith("//") else f"{scheme}://{url}"


def separator_in_all(texts: list[str]) -> str | None:
    """Return a separator that every text holds, so that they are probably rows of columns."""
    return next((one for one in SEPARATORS if texts and all(one in text for text in texts)), None)


def have_columns(urls: list[str]) -> bool:
    """Return whether every URL of a list ends in as many commas, with words behind the first that
    look like a column. URLs may be so, therefore they are never refused for it."""
    tails = [url.partition("://")[2].partition(",")[2] for url in urls]
    return (
        len(urls) > 1
        and len({tail.count(",") for tail in tails}) == 1
        and all(tail and not _OF_URLS.search(tail) for tail in tails)
    )


def without_params(url: str) -> str:
    """Return a URL without its params of the path (`;v=1`), whose semicolons separate nothing."""
    return _PATH_PARAM.sub("", url)


def separator_at_all_ends(lines: list[str]) -> str | None:
    """Return a separator that ends every line, so that no URL is meant to end in it."""
    return next((one for one in ENDS if lines and all(line.endswith(one) for line in lines)), None)


def separated(separator: str) -> str:
    """Say how to mend a list of URLs that end in a separator each."""
    return f'every line ends in "{separator}": take it away, or send CSV (--type csv)'


def _is_bare(text: str) -> bool:
    """Return whether a text has no scheme."""
    return not (_SCHEME.match(text) or _OTHER_SCHEME.match(text.lower()))


def _has_several_hosts(text: str) -> bool:
    """Return whether a text of at most the length of a URL begins with a host and has another
    behind a separator; a longer one is refused for its length."""
    if len(text) > MAX_LENGTH or _FIRST_HOST.match(text) is None:
        return False
    return _FURTHER_HOST.search(text) is not None


def _refuse_several(url: str) -> None:
    start = url.find("://") + 1
    if _SEVERAL.search(url) is not None or (start and _GLUED.search(url, start) is not None):
        _refuse(url, "more than one URL: give each a line, or write a JSON task if it is one")
    if _SCHEME_TWICE.match(url) is not None:
        _refuse(url, "the scheme is there twice: take one away")
    if len(url) <= MAX_LENGTH and _is_bare(url):
        if _has_several_hosts(url):
            _refuse(url, "more than one host: give each a line, or the scheme if it is one URL")
        if _BEFORE_HOST.match(url) is not None:
            _refuse(url, "something stands before the host: take it away, or write the whole URL")


def _refuse_blank(url: str) -> None:
    if _BLANK.search(url) is not None and _SCHEME.match(url) is not None:
        _refuse(
            url, "a blank is within: take away what follows it, write it as %20, or a JSON task"
        )


def _refuse(url: str, detail: str) -> None:
    raise Refused(InvalidTaskReason.MALFORMED_URL, quoted(url), detail)
