"""The core that is mutated, the draw of its mutants, and those that are equivalent."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path

import msgspec

from tests.architecture.source import ROOT
from tests.disk import files_below
from tests.mutants.changes import Mutant, mutants_of

ROOMS = (
    "aio",
    "dev",
    "domain",
    "engine",
    "gateway",
    "handlers",
    "intake",
    "prod/redis",
    "records",
    "service",
    "wire",
)
LEFT_OUT = (
    "conveyor/gateway/aiohttp_client.py",  # the client before our own, until the next release
    "conveyor/gateway/fake.py",  # a gateway for tests
    "conveyor/service/schemas.py",  # texts of the OpenAPI document
)
EQUIVALENT = Path(__file__).with_name("equivalent.toml")


class Equivalent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A change that no behaviour shows, and why. `nth` counts equal changes of equal lines of one
    function from 0."""

    path: str
    function: str
    line: str
    change: str
    reason: str
    nth: int = 0

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """The same as of the mutant."""
        return self.path, self.function, self.line, self.change, self.nth


def every_mutant(root: Path = ROOT) -> list[Mutant]:
    """Return every change of the core."""
    found: list[Mutant] = []
    for room in ROOMS:
        for file in sorted(files_below(root / "conveyor" / room, ".py")):
            path = file.relative_to(root).as_posix()
            if path not in LEFT_OUT:
                found += mutants_of(path, file.read_text(encoding="utf-8"))
    return found


def drawn(mutants: list[Mutant], *, seed: int, count: int) -> list[Mutant]:
    """Return `count` mutants. Each has a place of its own in the order of a seed, so that an edit
    of one line changes the draw of no other."""

    def place(mutant: Mutant) -> bytes:
        return hashlib.sha256("\0".join(map(str, (seed, *mutant.key))).encode()).digest()

    return sorted(mutants, key=place)[:count]


def equivalents(file: Path = EQUIVALENT) -> list[Equivalent]:
    """Read the list of equivalent mutants."""
    document = tomllib.loads(file.read_text(encoding="utf-8"))
    return msgspec.convert(document["equivalent"], list[Equivalent])
