"""`python -m conveyor`: the command line."""

from __future__ import annotations

from conveyor.cli import main

if __name__ == "__main__":
    main()
