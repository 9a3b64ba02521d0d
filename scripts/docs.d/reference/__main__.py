"""`python -m reference` writes docs/reference and the dashboards; `--check` names each file that is
out of date."""

from __future__ import annotations

import sys

from reference.pages import stale, write


def main(arguments: list[str]) -> int:
    """Write or check; return the exit code."""
    if arguments not in ([], ["--check"]):
        print("usage: scripts/docs [--check]", file=sys.stderr)
        return 2
    if not arguments:
        write()
        return 0
    found = stale()
    for name, row in found.items():
        print(f"{name} is out of date: {row}", file=sys.stderr)
    if found:
        print("run: scripts/docs", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
