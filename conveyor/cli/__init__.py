"""The command line: `conveyor` talks to a server, `conveyor-dev` runs one.

This package only parses. Each command imports its code when it runs, so that help, errors and the
server start quickly.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036
    # Before all else: later imports fail in ways that do not say why.
    sys.exit(f"conveyor: needs Python 3.11 or later, and this is {sys.version.split()[0]}")

from conveyor.cli.client import conveyor as conveyor
from conveyor.cli.server import conveyor_dev as conveyor_dev
from conveyor.client.program import FAILED as FAILED
from conveyor.client.program import INTERRUPTED as INTERRUPTED
from conveyor.client.program import guarded


def main(arguments: list[str] | None = None) -> None:
    """Run the `conveyor` program."""
    sys.exit(guarded(conveyor, "conveyor", arguments))


def dev_main(arguments: list[str] | None = None) -> None:
    """Run the `conveyor-dev` program."""
    sys.exit(guarded(conveyor_dev, "conveyor-dev", arguments))
