"""Commands to paste, as they are shown to people."""

from __future__ import annotations

import shlex
from pathlib import Path

from conveyor.client.output import printable


def command(*words: str, server: str | None = None, out: Path | str | None = None) -> str:
    """A `conveyor` command, quoted for a shell, without any key.

    `server` and `out` are what the command being run was given, None where it was given nothing.
    """
    parts = ["conveyor", *words]
    if server is not None:
        parts += ["--server", server]
    if out is not None:
        parts += ["--out", str(out)]
    return printable(shlex.join(parts))
