"""Copying rows of one run into another of the same job: fresh ones, and inherited ones with their
ends. A row that is there already stays as it is, so that a copy can be repeated."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import NamedTuple

from conveyor.dev.sqlite.rows import INDEX_BITS, Place
from conveyor.domain.model import TaskStatus

_MATCHES = {
    TaskStatus.PENDING: "(t.state = 0 AND c.task_key IS NULL)",
    TaskStatus.PROCESSING: "(t.state = 0 AND c.task_key IS NOT NULL)",
    TaskStatus.SUCCESSFUL: "t.state = 1",
    TaskStatus.FAILED: "t.state = 2",
}
_SOURCE = """
    FROM tasks t LEFT JOIN claims c ON c.task_key = t.task_key
    WHERE t.task_key > :low AND t.task_key <= :high
"""
# Both runs have the same shards, so that a row moves by as much as its run's number does.
_KEY = f"t.task_key + ((:new_no - :old_no) << {INDEX_BITS})"
_COPY_FRESH = f"""
    INSERT OR IGNORE INTO tasks (task_key, state, task_id, created_at, updated_at, spec)
    SELECT {_KEY}, 0, t.task_id, :now, :now, t.spec {_SOURCE} AND ({{matching}})
"""
_COPY_INHERITED = f"""
    INSERT OR IGNORE INTO tasks (task_key, state, task_id, created_at, updated_at, attempts,
        interruptions, source_run_id, spec)
    SELECT {_KEY}, t.state, t.task_id, :now, :now, t.attempts, t.interruptions,
        coalesce(t.source_run_id, :old_id), t.spec
    {_SOURCE} AND t.state > 0 AND NOT ({{matching}})
"""
_COPY_ENDINGS = f"""
    INSERT OR IGNORE INTO histories (task_key, events, result, error, failure)
    SELECT {_KEY}, '', h.result, h.error, h.failure
    FROM histories h JOIN tasks t USING (task_key)
    LEFT JOIN claims c ON c.task_key = t.task_key
    WHERE t.task_key > :low AND t.task_key <= :high AND t.state > 0 AND NOT ({{matching}})
"""


_HELD = """
    SELECT t.task_id FROM claims c JOIN tasks t USING (task_key)
    WHERE c.task_key > ? AND c.task_key <= ? AND c.claimed_until > ? LIMIT 1
"""
_LATE = f"SELECT count(*) {_SOURCE} AND t.state > 0 AND t.updated_at >= :since AND ({{matching}})"


class Copied(NamedTuple):
    """How many rows were written that start afresh, and how many that were inherited."""

    retried: int
    inherited: int


@dataclass(frozen=True, slots=True)
class Copy:
    """From where to where, and which rows start afresh; None as statuses: all of them."""

    source: Place
    source_id: str
    target: Place
    statuses: frozenset[TaskStatus] | None

    def run(
        self, connection: sqlite3.Connection, *, first_index: int, end_index: int, now: int
    ) -> Copied:
        """Copy the rows with an index from `first_index` below `end_index`."""
        matching = self._matching
        retried = inherited = 0
        for low, high in self._ranges(first_index, end_index):
            values = {
                "old_no": self.source.run_no,
                "new_no": self.target.run_no,
                "old_id": self.source_id,
                "now": now,
                "low": low,
                "high": high,
            }
            fresh = connection.execute(_COPY_FRESH.format(matching=matching), values)
            retried += fresh.rowcount
            if self.statuses is not None:
                kept = connection.execute(_COPY_INHERITED.format(matching=matching), values)
                inherited += kept.rowcount
                connection.execute(_COPY_ENDINGS.format(matching=matching), values)
        return Copied(retried, inherited)

    def held(
        self, connection: sqlite3.Connection, *, first_index: int, end_index: int, now: int
    ) -> str | None:
        """A task of the stretch that is under a live claim in the source."""
        for keys in self._ranges(first_index, end_index):
            found = find_live_claim(connection, keys, now=now)
            if found is not None:
                return found
        return None

    def ended_since(
        self, connection: sqlite3.Connection, *, first_index: int, end_index: int, since: int
    ) -> int:
        """How many rows of the stretch start afresh that have ended in the source since."""
        late = 0
        for low, high in self._ranges(first_index, end_index):
            values = {"low": low, "high": high, "since": since}
            (count,) = connection.execute(_LATE.format(matching=self._matching), values).fetchone()
            late += count
        return late

    @property
    def _matching(self) -> str:
        if self.statuses is None:
            return "1"
        return " OR ".join(_MATCHES[one] for one in sorted(self.statuses))

    def _ranges(self, first_index: int, end_index: int) -> list[tuple[int, int]]:
        """The keys of a stretch of the source, shard by shard: (exclusive low, inclusive high)."""
        lows = [
            self.source.of_shard(shard, first_index - 1)[0]
            for shard in range(self.source.shards.count)
        ]
        return [(low, low + end_index - first_index) for low in lows]


def find_live_claim(
    connection: sqlite3.Connection, keys: tuple[int, int], *, now: int
) -> str | None:
    """A task with a key in a range, (exclusive low, inclusive high), under a live claim."""
    found = connection.execute(_HELD, (*keys, now)).fetchone()
    return None if found is None else str(found[0])
