"""Bodies over a disk of a few megabytes, as a program: writes what became of each."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from conveyor.dev.files import FileBlobs
from conveyor.domain.errors import ConveyorError
from conveyor.ports.blobs import Content

SMALL, USUAL, LARGE, PIECE = 50_000, 1_500_000, 8_000_000, 100_000


async def _pieces(size: int) -> AsyncIterator[bytes]:
    for _ in range(size // PIECE):
        yield bytes(PIECE)


async def _kept(blobs: FileBlobs, key: str, content: Content) -> str:
    try:
        await blobs.put(key, content)
    except ConveyorError as error:
        return type(error).__name__
    return "kept"


async def _packed(blobs: FileBlobs) -> list[str]:
    """Pack bodies of a run until the disk is full, and read those that were stored; return what
    came in the way of others, and of reading."""
    stored: dict[str, bytes] = {}
    errors: set[str] = set()
    number = 0
    while not errors:
        bodies = [(f"results/30/J/R/00000/{number + n}.1", b"%d" % n * SMALL) for n in range(10)]
        number += len(bodies)
        for (_, body), one in zip(bodies, await blobs.put_new(bodies), strict=True):
            if isinstance(one, str):
                stored[one] = body
            else:
                errors.add(type(one).__name__)
    for key, body in stored.items():
        pieces = await blobs.open(key, size=len(body))
        if pieces is None or b"".join([piece async for piece in pieces]) != body:
            errors.add(f"{key} was lost")
    assert len(stored) > 20
    assert any("segments" in key for key in stored)
    return sorted(errors)


async def main(root: Path) -> dict[str, object]:
    """Store bodies until the disk is full."""
    blobs = FileBlobs(root)
    found: dict[str, object] = {
        "small": await _kept(blobs, "a/1", bytes(SMALL)),
        "large": await _kept(blobs, "a/2", bytes(LARGE)),
        "small beside it": await _kept(blobs, "a/3", bytes(SMALL)),
        "large piece by piece": await _kept(blobs, "a/4", _pieces(LARGE)),
    }
    together = [("a/5", bytes(SMALL)), ("a/6", bytes(LARGE))]
    stored = await blobs.put_new(together)
    found["many at once"] = [
        "kept" if isinstance(one, str) else type(one).__name__ for one in stored
    ]
    # Each fits alone, and they fill the disk together: none of them is too large.
    at_once = (_kept(blobs, f"b/{number}", _pieces(USUAL)) for number in range(8))
    found["usual ones at once"] = "NoRoom" in await asyncio.gather(*at_once)
    await blobs.delete_prefix("b/")
    number = 10
    while await _kept(blobs, f"a/{number}", bytes(SMALL)) == "kept":
        number += 1
    found["full"] = await _kept(blobs, "a/8", bytes(SMALL))
    found["large while full"] = await _kept(blobs, "a/9", _pieces(LARGE))
    await blobs.delete_prefix("a/")
    found["packed until full"] = await _packed(blobs)
    await blobs.delete_prefix("results/")
    found["packed again"] = await _packed(blobs)
    await blobs.aclose()
    found["leftovers"] = os.listdir(root / "tmp")
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(main(Path(sys.argv[1])))))
