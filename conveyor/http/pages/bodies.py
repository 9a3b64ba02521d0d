"""The beginning of a body as text: in its own character set, never long, whatever bytes it has."""

from __future__ import annotations

import codecs
import re
from bisect import bisect_right
from html import escape

import msgspec

from conveyor.service.page_schemas import Preview

MOST_HEX = 4_096
"""Bytes that are shown of a body that is no text."""
MOST_SHOWN = 120_000
"""Bytes of a body's text on its page, escaped."""
PAGES_OF_MARKUP = frozenset({"text/html", "application/xhtml+xml"})
_STRANGE_SHARE = 0.1
"""Share of characters that no text has, from which bytes are none."""
_DECLARED = 1_024
"""Bytes at whose beginning a page may name its character set, as browsers read it."""
_INDENT = 2

# The character sets that browsers know: by the name of Python's codec, their own label, and the
# codec that reads as browsers do. No other codec of Python's ever reads foreign bytes.
_CHARSETS = {
    "utf-8": ("utf-8", "utf-8"),
    "utf-16": ("utf-16le", "utf-16-le"),
    "utf-16-le": ("utf-16le", "utf-16-le"),
    "utf-16-be": ("utf-16be", "utf-16-be"),
    "ascii": ("windows-1252", "cp1252"),
    "iso8859-1": ("windows-1252", "cp1252"),
    "iso8859-9": ("windows-1254", "cp1254"),
    "iso8859-11": ("windows-874", "cp874"),
    "tis-620": ("windows-874", "cp874"),
    "cp874": ("windows-874", "cp874"),
    **{f"iso8859-{n}": (f"iso-8859-{n}", f"iso8859-{n}") for n in (2, 3, 4, 5, 6, 7, 8)},
    **{f"iso8859-{n}": (f"iso-8859-{n}", f"iso8859-{n}") for n in (10, 13, 14, 15, 16)},
    **{f"cp{n}": (f"windows-{n}", f"cp{n}") for n in range(1250, 1259)},
    "cp866": ("ibm866", "cp866"),
    "koi8-r": ("koi8-r", "koi8-r"),
    "koi8-u": ("koi8-u", "koi8-u"),
    "mac-roman": ("macintosh", "mac-roman"),
    "mac-cyrillic": ("x-mac-cyrillic", "mac-cyrillic"),
    "gb2312": ("gbk", "gb18030"),
    "gbk": ("gbk", "gb18030"),
    "gb18030": ("gb18030", "gb18030"),
    "big5": ("big5", "big5hkscs"),
    "big5hkscs": ("big5", "big5hkscs"),
    "euc_jp": ("euc-jp", "euc_jp"),
    "iso2022_jp": ("iso-2022-jp", "iso2022_jp"),
    "shift_jis": ("shift_jis", "cp932"),
    "cp932": ("shift_jis", "cp932"),
    "euc_kr": ("euc-kr", "cp949"),
    "cp949": ("euc-kr", "cp949"),
}
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_LABEL = r"""\s*=\s*["']?\s*([A-Za-z0-9_.:-]{1,40})"""
_IN_HEADER = re.compile(rf";\s*charset{_LABEL}", re.IGNORECASE)
_IN_PAGE = re.compile(rf"(?:charset|encoding){_LABEL}".encode(), re.IGNORECASE)
_STRANGE = re.compile("[\x01-\x08\x0b\x0e-\x1a\x1c-\x1f\ufffd]")
# A text, closed or not, so that no quote is looked at twice; or what a line ends at.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+\\?(?:"|\Z)|[\[\]{},]', re.DOTALL)


def shown_text(found: Preview) -> str:
    """Show the beginning of a body: JSON with its lines indented, text as it is, other bytes in
    hexadecimal."""
    decoder = codecs.getincrementaldecoder(_codec(found))("replace")
    # A character that the cut parts is left out.
    decoded = decoder.decode(found.data, final=not found.is_cut).removeprefix("\ufeff")
    if "\0" in decoded or len(_STRANGE.findall(decoded)) > _STRANGE_SHARE * len(decoded):
        return _hexadecimal(found.data[:MOST_HEX])
    if not found.is_cut and "json" in media_type(found.content_type):
        return _indented(decoded)
    return decoded


def media_type(content_type: str) -> str:
    """Return the media type of a Content-Type, in lower case."""
    return content_type.partition(";")[0].strip().lower()


def charset(content_type: str) -> str:
    """Return the label of the character set of a Content-Type, if browsers know it; else an empty
    text."""
    named = _IN_HEADER.search(content_type)
    return _known(named[1])[0] if named else ""


def fitting(text: str, most: int) -> str:
    """Cut a text to at most `most` bytes, as it stands escaped in a page."""

    def length(end: int) -> int:
        return len(escape(text[:end]).encode("utf-8", "replace"))

    text = text[: most + 1]
    if length(len(text)) <= most:
        return text
    return (
        text[: bisect_right(range(len(text) + 1), most - len("…".encode()), key=length) - 1] + "…"
    )


def fitting_lines(text: str, most: int) -> tuple[str, bool]:
    """Escape a text for a page, quotes aside, in at most `most` bytes; tell whether all of it is
    there."""

    def length(end: int) -> int:
        return len(escape(text[:end], quote=False).encode("utf-8", "replace"))

    end = len(text)
    if length(end) > most:
        end = bisect_right(range(end + 1), most, key=length) - 1
    return escape(text[:end], quote=False), end == len(text)


def _codec(found: Preview) -> str:
    """Choose the codec of a body as a browser does: by its mark, the header, or the page itself."""
    for mark, name in _MARKS:
        if found.data.startswith(mark):
            return _CHARSETS[name][1]
    if named := _IN_HEADER.search(found.content_type):
        codec = _known(named[1])[1]
        if codec:
            return codec
    kind = media_type(found.content_type)
    if kind in PAGES_OF_MARKUP or kind.endswith("xml"):
        declared = _IN_PAGE.search(found.data[:_DECLARED])
        codec = _known(declared[1].decode("ascii"))[1] if declared else ""
        # Bytes in which that could be read are no UTF-16.
        if codec and not codec.startswith("utf-16"):
            return codec
    return "utf-8"


def _known(label: str) -> tuple[str, str]:
    """Return the label and the codec of a character set, empty if browsers do not know it."""
    try:
        return _CHARSETS.get(codecs.lookup(label).name, ("", ""))
    except LookupError:
        return "", ""


def _indented(text: str) -> str:
    """Indent the lines of JSON, and keep its tokens as they are; any other text stays as it is, and
    so does JSON so deep that its lines were mostly blanks."""
    if _indented_length(text) > MOST_SHOWN:
        return text
    try:
        shown = msgspec.json.format(text, indent=_INDENT)
    except (ValueError, RecursionError):
        return text
    return shown if fitting_lines(shown, MOST_SHOWN)[1] else text


def _indented_length(text: str) -> int:
    """Count the characters that JSON would have indented, roughly, or until they are too many."""
    depth, length = 0, len(text)
    for token in _TOKEN.finditer(text):
        first = text[token.start()]
        if first == '"':
            continue
        depth += {"[": 1, "{": 1, ",": 0}.get(first, -1)
        length += 1 + _INDENT * max(0, depth)
        if length > 2 * MOST_SHOWN:
            break
    return length


def _hexadecimal(data: bytes) -> str:
    lines = []
    for start in range(0, len(data), 16):
        row = data[start : start + 16]
        letters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{start:08x}  {row.hex(' '):47}  {letters}")
    return "\n".join(lines)
