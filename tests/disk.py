"""Lists the files of a directory while a server works in it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path


def files_below(directory: Path, suffix: str = "") -> Iterator[Path]:
    """Every file below a directory whose name ends so; one that is removed meanwhile is passed
    over.

    `Path.rglob` raises where a directory goes between being found and being read, which is what a
    deletion, or the sweeper, does to directories of bodies.
    """
    for folder, _, names in os.walk(directory):
        yield from (Path(folder, name) for name in names if name.endswith(suffix))


def body_files(data_dir: Path) -> list[Path]:
    """Every body below a data directory: its file, or its name below that of its segment."""
    temporaries = data_dir / "blobs" / "tmp"
    found: list[Path] = []
    for path in files_below(data_dir / "blobs"):
        if path.parent.name == "segments":
            found += [path / name for name, _ in packed_bodies(path)]
        elif temporaries not in path.parents:
            found.append(path)
    return found


def body_bytes(body: Path) -> bytes:
    """The bytes of a body that body_files found."""
    if body.parent.parent.name == "segments":
        return dict(packed_bodies(body.parent))[body.name]
    return body.read_bytes()


def packed_bodies(segment: Path) -> list[tuple[str, bytes]]:
    """The whole bodies in a segment with their names, those that no row names included."""
    try:
        left = segment.read_bytes()
    except FileNotFoundError:
        return []
    found = []
    while match := re.match(rb"(\S+) (\d+) [0-9a-f]{8}\n", left):
        end = match.end() + int(match[2])
        if end <= len(left):
            found.append((match[1].decode(), left[match.end() : end]))
        left = left[end:]
    return found
