"""The instants at which something in the store is due next, for a clock that stops there."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from conveyor.dev.sqlite.database import Database
from conveyor.dev.sqlite.schema import open_unchanged
from conveyor.dev.sqlite.sweeping import ENDED_RUNS
from conveyor.domain.ids import is_ulid, made_at
from conveyor.ports.idle import Due
from conveyor.ports.maintenance import ENDED_FOR

DAY = 86_400_000
PATIENCE = 600_000
"""Milliseconds for which something due is waited for: each loop looks more often. What is due for
longer waits for something else."""
EXPIRY_EVERY = 3_660_000
"""Milliseconds after which something that has expired is looked for again: the sweeper looks every
hour at ended runs."""
FAR = 1 << 62

_WORK = (
    (
        "events",
        "SELECT min(max(due_at, leased_until)) FROM notices "
        "WHERE ended_as IS NOT NULL AND max(due_at, leased_until) > :floor",
    ),
    (
        "deliveries",
        "SELECT min(max(due_at, leased_until)) FROM deliveries "
        "WHERE status = 'pending' AND max(due_at, leased_until) > :floor",
    ),
)
_CALENDAR = (
    ("schedules", "SELECT min(fires_at) FROM jobs WHERE fires_at > :floor"),
    (
        "heartbeats of callbacks",
        "SELECT min(max(due_at, leased_until)) FROM notices "
        "WHERE ended_as IS NULL AND subscriber = 'callback' "
        "AND max(due_at, leased_until) > :floor",
    ),
)
_EXPIRY = (
    ("file inputs", "SELECT min(expires_at) FROM job_inputs WHERE expires_at > :since"),
    ("exports", "SELECT min(expires_at) FROM exports WHERE expires_at > :since"),
    (
        "old deliveries",
        "SELECT min(updated_at) + :delivery_days * :day + 1 FROM deliveries "
        "WHERE status <> 'pending' AND updated_at + :delivery_days * :day > :since",
    ),
    (
        "old fires",
        "SELECT min(noted_at) + :fire_days * :day + 1 FROM fires "
        "WHERE noted_at + :fire_days * :day > :since",
    ),
    ("results", f"SELECT min(due_at) FROM ({ENDED_RUNS}) WHERE due_at > :since"),
)


_WRITTEN = (
    "SELECT max(updated_at) FROM jobs",
    "SELECT max(updated_at) FROM runs",
    "SELECT max(updated_at) FROM tasks",
    "SELECT max(claimed_at) FROM claims",
    "SELECT max(updated_at) FROM exports",
    "SELECT max(created_at) FROM signing_keys",
    "SELECT max(max(ended_at), max(decided_at)) FROM notices",
    "SELECT max(updated_at) FROM deliveries",
    "SELECT max(noted_at) FROM fires",
)
_MADE = (
    "SELECT max(job_id) FROM jobs",
    "SELECT max(run_id) FROM runs",
    "SELECT max(input_id) FROM job_inputs",
    "SELECT max(export_id) FROM exports",
)


class KeptDays(NamedTuple):
    """The days for which rows of ended runs, deliveries and fires are kept."""

    row_days: int
    delivery_days: int
    fire_days: int


@dataclass(slots=True)
class _Read:
    """The result of a read. It holds until something is written, or an instant that it names has
    been waited for."""

    groups: int
    until: int
    found: Sequence[tuple[int, Due]]


class SqliteUpcoming:
    """Reads what is due next; twice only if something was written meanwhile."""

    def __init__(self, database: Database, kept: KeptDays) -> None:
        self._database = database
        self._kept = kept
        self._last: _Read | None = None

    async def due(self, now: int) -> list[Due]:
        """Return what is due next, of each kind, at `now` in milliseconds."""
        last = self._last
        if last is None or last.groups != self._database.groups or now >= last.until:
            groups = self._database.groups
            found = await self._database.read(lambda reader: self._read(reader, now))
            until = min((at for at, _ in found if at > now), default=FAR)
            late = any(at <= now for at, _ in found)
            self._last = last = _Read(groups, now + 1_000 if late else until, found)
        return [item._replace(after=(at - now) / 1_000) for at, item in last.found]

    def _read(self, reader: sqlite3.Connection, now: int) -> list[tuple[int, Due]]:
        values = {
            "floor": now - PATIENCE,
            "since": now - DAY,
            "day": DAY,
            "now": FAR,
            "after": -1,
            "after_id": "",
            "limit": 1_000_000,
            "ended_for": ENDED_FOR,
            **self._kept._asdict(),
        }
        found: list[tuple[int, Due]] = []
        for kinds in (_WORK, _CALENDAR, _EXPIRY):
            for what, sql in kinds:
                (at,) = reader.execute(sql, values).fetchone()
                if at is not None:
                    at = _again(at, now) if kinds is _EXPIRY else at
                    found.append((at, Due(0.0, what, kinds is _WORK, kinds is _EXPIRY)))
        return found


def newest_instant(path: Path) -> int:
    """Return the newest instant in a file of records, in milliseconds; -1 without any, or where it
    cannot be read: opening the store tells why."""
    if not path.exists() or not path.stat().st_size:
        return -1
    try:
        with closing(open_unchanged(path)) as reader:
            found = [reader.execute(sql).fetchone()[0] for sql in _WRITTEN]
            ids = [reader.execute(sql).fetchone()[0] for sql in _MADE]
    except sqlite3.Error:
        return -1
    instants = [at for at in found if at is not None]
    instants += [made_at(one) for one in ids if one is not None and is_ulid(one)]
    return max(instants, default=-1)


def _again(at: int, now: int) -> int:
    """Return an instant of expiry; after it, the next at which to look."""
    late = now - at
    return at if late < 0 else at + (late // EXPIRY_EVERY + 1) * EXPIRY_EVERY
