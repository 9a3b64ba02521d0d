"""A store on a small disk, opened again once the disk is full, as a program: writes the refusal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

from conveyor.dev.sqlite import open_store
from conveyor.domain.errors import ConveyorError


async def main(directory: Path) -> str:
    """Make a store, fill its disk, and open the store again."""
    database = directory / "conveyor.db"
    await (await open_store(database, now=0)).aclose()
    with (directory / "filling").open("wb", buffering=0) as filling, contextlib.suppress(OSError):
        while True:
            filling.write(bytes(4_096))
    try:
        await (await open_store(database, now=0)).aclose()
    except ConveyorError as error:
        return error.detail
    return "opened"


if __name__ == "__main__":
    sys.stdout.write(asyncio.run(main(Path(sys.argv[1]))))
