"""Examine what would keep a development server from starting, and whether a server answers."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from conveyor.client.api import Patience, connect
from conveyor.client.commands import ServerTarget, Terminal
from conveyor.client.errors import ClientError
from conveyor.client.output import duration, printable, size
from conveyor.client.program import FAILED, SUCCEEDED
from conveyor.dev.directory import LEAST_FREE, directory_problem, disk_problem, kept_secret
from conveyor.dev.files import holds_bodies
from conveyor.dev.sqlite.schema import schema_problem
from conveyor.dev.sqlite.store import secret_problem
from conveyor.dev.sqlite.upcoming import newest_instant
from conveyor.domain.api_keys import secret_bytes
from conveyor.domain.errors import ConveyorError
from conveyor.ports.clock import Clock
from conveyor.settings import Settings

LEAST_PYTHON = (3, 11)
BUILT_AFTER = 1_767_225_600_000
"""Milliseconds since the epoch of 2026-01-01: a clock before it is wrong, for there was no
Conveyor."""
CLOCK_TOLERANCE = 300_000
"""Milliseconds by which what is stored may be ahead of the clock."""
_PATIENCE = Patience(tell=5.0, give_up=10.0)

Listening = Callable[[str, int], AbstractContextManager[object]]
"""Open a listening socket on an address and a port. Raises ConveyorError."""


class Diagnosis(msgspec.Struct, frozen=True):
    """The result of one examination: what was `found` if all is well, else the problem."""

    label: str
    problem: str | None = None
    found: str | None = None

    @classmethod
    def of(cls, label: str, problem: str | None, found: str) -> Diagnosis:
        """Make that of an examination which may have found a problem."""
        return cls(label, problem) if problem is not None else cls(label, found=found)

    def __str__(self) -> str:
        if self.problem is not None:
            return f"WRONG   {self.label}: {printable(self.problem)}"
        return f"ok      {self.label}: {printable(self.found or '')}"


def examine_start(
    settings: Settings,
    clock: Clock,
    listening: Listening,
    *,
    python: tuple[int, ...] = sys.version_info[:3],
) -> Iterator[Diagnosis]:
    """Examine what a start with these settings needs."""
    version = ".".join(map(str, python))
    needed = ".".join(map(str, LEAST_PYTHON))
    old = None if python >= LEAST_PYTHON else f"{version} is too old: Conveyor needs {needed}"
    yield Diagnosis.of("python", old, f"{version}, {platform.python_implementation()}")
    yield _port(settings, listening)
    path = Path(settings.data_dir)
    yield Diagnosis.of("directory", directory_problem(path), f"{path.absolute()} can be used")
    yield Diagnosis.of("disk", disk_problem(path), f"more than {size(LEAST_FREE)} are free")
    database = path / "conveyor.db"
    known = "its records can be read" if database.exists() else "there are no records yet"
    may_be_new = not holds_bodies(path / "blobs")
    problem = schema_problem(database, may_be_new=may_be_new)
    yield Diagnosis.of("schema", problem, known)
    yield _secret(settings, path, database if problem is None else None)
    yield _clock(path, database, clock.now())


def _port(settings: Settings, listening: Listening) -> Diagnosis:
    try:
        with listening(settings.host, settings.port):
            free = f"{settings.port} of {settings.host} is free"
            return Diagnosis("port", found=free if settings.port else "any free one")
    except ConveyorError as error:
        return Diagnosis("port", error.detail)


def _secret(settings: Settings, path: Path, database: Path | None) -> Diagnosis:
    """Examine whether the records, which can be read unless `database` is None, are of the root
    secret that a start would use."""
    if settings.secret:
        found = "that of CONVEYOR_SECRET"
        given = [secret_bytes(one) for one in settings.secret.split(",")]
    else:
        found, kept = "that of the directory", kept_secret(path)
        given = [] if kept is None else [kept]
        if kept is None and os.path.lexists(path / "secret"):
            # Examined with the directory.
            return Diagnosis("secret", found=f"{found}, which cannot be read")
        if kept is None:
            found = "the first start makes one"
    problem = None if database is None else secret_problem(database, given)
    return Diagnosis.of("secret", problem, found)


def _clock(path: Path, database: Path, now: int) -> Diagnosis:
    shown = f"{datetime.fromtimestamp(now / 1_000, UTC):%Y-%m-%d %H:%M:%S} UTC"
    if now < BUILT_AFTER:
        return Diagnosis("clock", f"it shows {shown}, which has long passed")
    if (path / "clock").exists():
        return Diagnosis("clock", found=f"{shown}; the directory has one that is moved by hand")
    ahead = newest_instant(database) - now
    if ahead > CLOCK_TOLERANCE:
        late = duration(ahead / 1_000)
        return Diagnosis("clock", f"it shows {shown}, {late} before what is stored")
    return Diagnosis("clock", found=shown)


async def examine_server(target: ServerTarget, terminal: Terminal) -> AsyncIterator[Diagnosis]:
    """Examine whether a server answers, and takes the key."""
    try:
        async with connect(
            target.server, target.api_key, target.pace, patience=_PATIENCE, on_slow=terminal.warn
        ) as api:
            await api.jobs(limit=1, status=None, cursor=None)
            kind = "a development server" if await api.serves_development() else "a server"
    except ClientError as error:
        yield Diagnosis("server", str(error))
    else:
        yield Diagnosis("server", found=f"{target.server} answers: {kind}")


async def doctor(
    target: ServerTarget | None,
    terminal: Terminal,
    start: Iterator[Diagnosis],
) -> int:
    """Print a line for each examination; return FAILED after any that found a problem."""
    code = SUCCEEDED

    def tell(diagnosis: Diagnosis) -> None:
        nonlocal code
        if diagnosis.problem is not None:
            code = FAILED
        terminal.say(str(diagnosis))
        terminal.give(msgspec.to_builtins(diagnosis))

    for diagnosis in start:
        tell(diagnosis)
    if target is not None:
        async for diagnosis in examine_server(target, terminal):
            tell(diagnosis)
    return code
