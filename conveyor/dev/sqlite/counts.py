"""What the rows of a run say: the truth that its counters are a cache of."""

from __future__ import annotations

import sqlite3

import msgspec

from conveyor.dev.sqlite.rows import FAILED, SUCCESSFUL, UNFINISHED, Place, to_json

_COUNT = """
    SELECT count(*) FROM tasks INDEXED BY tasks_by_state
    WHERE state = ? AND task_key > ? AND task_key <= ?
"""
_REASONS = """
    SELECT coalesce(h.failure, 'other'), count(*)
    FROM (SELECT task_key FROM tasks INDEXED BY tasks_by_state
          WHERE state = 2 AND task_key > ? AND task_key <= ?) failed
    LEFT JOIN histories h USING (task_key) GROUP BY 1
"""


class RowCounts(msgspec.Struct, frozen=True):
    """How many rows are in which state, and why those failed that did."""

    unfinished: int
    successful: int
    failed: int
    failure_reasons: dict[str, int]

    @property
    def total(self) -> int:
        """All rows."""
        return self.unfinished + self.successful + self.failed


def count_rows(connection: sqlite3.Connection, place: Place) -> RowCounts:
    """Count the rows of a run, by an index alone where they did not fail."""
    counts = dict.fromkeys((UNFINISHED, SUCCESSFUL, FAILED), 0)
    reasons: dict[str, int] = {}
    for shard in range(place.shards.count):
        low, high = place.of_shard(shard)
        for state in counts:
            (count,) = connection.execute(_COUNT, (state, low, high)).fetchone()
            counts[state] += count
        for reason, count in connection.execute(_REASONS, (low, high)):
            reasons[reason] = reasons.get(reason, 0) + count
    return RowCounts(counts[UNFINISHED], counts[SUCCESSFUL], counts[FAILED], reasons)


def write_counts(connection: sqlite3.Connection, place: Place, counts: RowCounts) -> None:
    """Make them the counters of the run."""
    connection.execute(
        "UPDATE runs SET total = ?, successful = ?, failed = ?, failure_reasons = ? "
        "WHERE run_no = ?",
        (
            counts.total,
            counts.successful,
            counts.failed,
            to_json(counts.failure_reasons),
            place.run_no,
        ),
    )
