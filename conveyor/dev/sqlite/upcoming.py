"""The instants at which something in the store is due next, for a clock that stops there."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from conveyor.dev.sqlite.database import Database
from conveyor.dev.sqlite.sweeping import ENDED_RUNS
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
    found: Sequence[tuple[int, str, bool]]


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
            until = min((at for at, _, _ in found if at > now), default=FAR)
            late = any(at <= now for at, _, _ in found)
            self._last = last = _Read(groups, now + 1_000 if late else until, found)
        return [Due((at - now) / 1_000, what, is_work) for at, what, is_work in last.found]

    def _read(self, reader: sqlite3.Connection, now: int) -> list[tuple[int, str, bool]]:
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
        found: list[tuple[int, str, bool]] = []
        for kinds, is_work, every in ((_WORK, True, 0), (_CALENDAR, False, 0), (_EXPIRY, False, 1)):
            for what, sql in kinds:
                (at,) = reader.execute(sql, values).fetchone()
                if at is not None:
                    found.append((_again(at, now) if every else at, what, is_work))
        return found


def _again(at: int, now: int) -> int:
    """Return an instant of expiry; after it, the next at which to look."""
    late = now - at
    return at if late < 0 else at + (late // EXPIRY_EVERY + 1) * EXPIRY_EVERY
