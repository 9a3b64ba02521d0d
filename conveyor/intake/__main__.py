"""`python -m conveyor.intake`: check one list, described by the first line of the input."""

from __future__ import annotations

import sys

from conveyor.intake.child import main

if __name__ == "__main__":
    sys.exit(main())
