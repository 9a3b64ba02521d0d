"""Lists the files of a directory while a server works in it."""

from __future__ import annotations

import os
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
    """Every file of a body below a data directory."""
    temporaries = data_dir / "blobs" / "tmp"
    return [path for path in files_below(data_dir / "blobs") if temporaries not in path.parents]
