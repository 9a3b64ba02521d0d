"""Wheels of what is installed here, so that pip fills an empty environment without an index."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.tags import parse_tag, sys_tags
from packaging.utils import canonicalize_name

OF_PIP = frozenset({"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"})
"""Files beside the metadata that an installation has made."""


def fill(folder: Path, *names: str) -> list[Path]:
    """Pack all that these distributions need, and what that needs, into wheels; also those of
    themselves that were installed as wheels."""
    folder.mkdir()
    own = [distribution(name) for name in names]
    # Neither what is installed from this folder, nor what a build of its wheel has left in it.
    packed = [one for one in own if one.read_text("WHEEL") and not one.read_text("direct_url.json")]
    return [_packed(found, folder) for found in (*packed, *_needed(names))]


def _needed(names: tuple[str, ...]) -> Iterator[Distribution]:
    waiting, seen = [*names], set[str]()
    while waiting:
        found = distribution(waiting.pop())
        for line in found.requires or ():
            needed = Requirement(line)
            name = canonicalize_name(needed.name)
            is_wanted = needed.marker is None or needed.marker.evaluate({"extra": ""})
            if is_wanted and name not in seen:
                seen.add(name)
                waiting.append(name)
                yield distribution(name)


def _packed(found: Distribution, folder: Path) -> Path:
    inside = [path for path in found.files or () if path.parts[0] not in ("..", "/")]
    kept = [p for p in inside if p.name not in OF_PIP and "__pycache__" not in p.parts]
    [metadata] = [p for p in inside if p.name == "METADATA" and p.parent.suffix == ".dist-info"]
    target = folder / f"{metadata.parent.stem}-{_tag(found)}.whl"
    with zipfile.ZipFile(target, "w") as wheel:
        for path in kept:
            wheel.write(Path(str(path.locate())), str(path))
        record = f"{metadata.parent}/RECORD"
        lines = [f"{path},,\n" for path in (*kept, record)]
        wheel.writestr(record, "".join(lines))
    return target


def _tag(found: Distribution) -> str:
    """A tag of the wheel that was installed, which fits this interpreter."""
    told = (found.read_text("WHEEL") or "").splitlines()
    own = {line.partition(": ")[2] for line in told if line.startswith("Tag: ")}
    ours = set(sys_tags())
    return next(tag for tag in sorted(own) if ours & parse_tag(tag))
