"""Text for the terminal: safe to print whatever its source, readable numbers, commands to paste."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

_UNSAFE = (
    r"\x00-\x1f\x7f-\x9f"  # C0, DEL and C1 controls
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks that reorder what is read
    r"\u2028\u2029\ufeff\ud800-\udfff"  # line separators, byte order mark, lone surrogates
)
_CONTROLS = re.compile(f"[{_UNSAFE}]")
_CREDENTIALS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*:[/\\]{2,})[^/?#\\\s\"]*@")


def clean(text: str) -> str:
    r"""Write every control character as an escape such as `\x1b`."""
    return _CONTROLS.sub(_escape, text)


def clean_json(text: str) -> str:
    """Escape the control characters that JSON allows; the meaning stays the same."""
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def mask_credentials(text: str) -> str:
    """Replace `user:password@` of every URL in a text by `***@`."""
    return _CREDENTIALS.sub(r"\g<scheme>***@", text)


def printable(text: str) -> str:
    """Mask and then escape a text from elsewhere, to show it to the user.

    Masks `user:password@`, and the URL parameters named like credentials.
    """
    # Importing it above would make every --help load a decoder of JSON.
    from conveyor.domain.text_rules import mask_parameters

    return clean(mask_parameters(mask_credentials(text)))


def shorten(text: str, width: int) -> str:
    """Cut a text to `width` characters, ending a cut one in an ellipsis."""
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def duration(seconds: float) -> str:
    """Format seconds: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3_600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3_600} h {whole % 3_600 // 60} min"


def size(number: int) -> str:
    """Format bytes by thousands: 12 B, 4.0 kB, 1.5 GB."""
    if number < 1_000:
        return f"{number} B"
    value = float(number)
    for unit in ("kB", "MB", "GB"):
        value /= 1_000
        if value < 999.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1_000:,.1f} TB"


def to_the_minute(text: str) -> str:
    """Show an RFC 3339 time without seconds and zone."""
    return printable(text)[:16].replace("T", " ")


def to_the_minute_or_second(text: str) -> str:
    """Show an RFC 3339 time without its fraction and zone, and without seconds that are zero."""
    shown = to_the_second(text)
    return shown[:16] if shown[16:] == ":00" else shown


def to_the_second(text: str) -> str:
    """Show an RFC 3339 time without its fraction and zone."""
    return printable(text)[:19].replace("T", " ")


def count(number: int, noun: str) -> str:
    """Format a number with its noun: 1 file, 2,000 files."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def command(*words: str, server: str | None = None, out: Path | str | None = None) -> str:
    """Build a `conveyor` command, quoted for a shell, without any key.

    `server` and `out` are the options of the command being run, None for those not given.
    """
    parts = ["conveyor", *words]
    if server is not None:
        parts += ["--server", server]
    if out is not None:
        parts += ["--out", str(out)]
    return printable(shlex.join(parts))
