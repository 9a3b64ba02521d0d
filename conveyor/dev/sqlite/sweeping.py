"""The sweeping port: find runs that need the sweeper, correct their counters, and expire them."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from conveyor.dev.sqlite.database import Database
from conveyor.dev.sqlite.failure_groups import kept_counts
from conveyor.dev.sqlite.rows import KeyRange, hosts_from, politeness_from
from conveyor.dev.sqlite.states import (
    RowCounts,
    count_bodies,
    count_rows,
    find_job,
    find_place,
    find_run,
    move_job,
    move_run,
    write_counts,
)
from conveyor.dev.sqlite.tasks import References, merged_references
from conveyor.domain.model import JobStatus, Run, RunStats, RunStatus
from conveyor.domain.result_shape import ResultShape
from conveyor.domain.states import LIVE_RUN_STATES, live_run_status
from conveyor.ports.maintenance import ENDED_FOR, DuePosition, EndedRun, QuietRun, Sweeping

CLOCKS_APART = 60_000
"""Milliseconds by which a claim may outlast one that is made now. One that lasts longer was made
before a clock was set back, and does not count."""

_QUIET = """
    SELECT r.job_id, r.run_id, r.updated_at, j.politeness, r.hosts
    FROM runs r INDEXED BY runs_by_status JOIN jobs j USING (job_id)
    WHERE r.status = 'running' AND NOT r.paused AND NOT r.ingesting AND r.updated_at < ?
    ORDER BY r.updated_at
"""
"""A live run whose tasks have all ended is pending, not running."""

_DUE = """
    SELECT group_concat(reference) FROM (
        SELECT printf('[%d,"%s"]', t.task_key & 34359738367, t.task_id) AS reference
        FROM tasks t INDEXED BY tasks_by_state LEFT JOIN claims c ON c.task_key = t.task_key
        WHERE t.state = 0 AND t.task_key > ?2 AND t.task_key <= ?3
        AND t.not_before <= {now} AND coalesce(c.claimed_until, 0) <= {now}
        ORDER BY t.task_key LIMIT ?1
    )
"""
_CLAIMED = """
    SELECT 1 FROM claims WHERE task_key > ? AND task_key <= ? AND claimed_until > ? LIMIT 1
"""

_NEEDED = """
    SELECT 1 FROM run_sources s JOIN runs d ON d.run_id = s.run_id
    WHERE s.source_run_id = ? AND (d.status IN ('running', 'pending')
        OR d.ingesting AND d.status <> 'deleted') LIMIT 1
"""
"""Finds a run that has not ended and draws bodies from this one, or is about to copy its rows."""

ENDED_RUNS = """
    SELECT job_id, run_id, ended_at, result_ttl_days, swept, queue_dropped, due_at FROM (
        SELECT *, CASE WHEN NOT queue_dropped THEN ended_at + :ended_for
            WHEN NOT swept THEN ended_at + result_ttl_days * :day
            WHEN :row_days THEN ended_at + (result_ttl_days + :row_days) * :day END AS due_at
        FROM (
        SELECT r.job_id, r.run_id, j.result_ttl_days, r.swept, r.queue_dropped,
            max(r.updated_at, coalesce(max(d.updated_at), 0)) AS ended_at,
            coalesce(max(d.status IN ('running', 'pending') OR d.ingesting), 0) AS needed
        FROM runs r JOIN jobs j USING (job_id)
        LEFT JOIN run_sources s ON s.source_run_id = r.run_id
        LEFT JOIN runs d ON d.run_id = s.run_id AND d.status <> 'deleted'
        WHERE r.status IN ('completed', 'stopped', 'failed') AND NOT r.ingesting
        GROUP BY r.run_id
        ) WHERE NOT needed
    ) WHERE due_at <= :now AND (due_at, run_id) > (:after, :after_id)
    ORDER BY due_at, run_id LIMIT :limit
"""
"""Runs for which something is due, with the latest moment at which they, or those that draw bodies
from them, ended."""

_DAY = 86_400_000


class SqliteSweeping(Sweeping):
    """The sweeping port."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def claim_sweep(self, *, now: int, lapses_at: int) -> bool:
        def claim(connection: sqlite3.Connection) -> bool:
            written = connection.execute(
                "INSERT INTO sweeps (one, lapses_at) VALUES (1, ?1) ON CONFLICT (one) "
                "DO UPDATE SET lapses_at = ?1 "
                "WHERE sweeps.lapses_at <= ?2 OR sweeps.lapses_at > ?3",
                (lapses_at, now, lapses_at + CLOCKS_APART),
            )
            return written.rowcount > 0

        return await self._database.write(claim)

    async def quiet_runs(self, *, before: int) -> list[QuietRun]:
        rows = await self._database.read(
            lambda reader: reader.execute(_QUIET, (before,)).fetchall()
        )
        return [
            QuietRun(job_id, run_id, updated_at, politeness_from(politeness), hosts_from(hosts))
            for job_id, run_id, updated_at, politeness, hosts in rows
        ]

    async def reconcile_run(self, run_id: str, *, now: int) -> RunStatus | None:
        # A reader counts the rows first, so that a run whose counters are right costs no write.
        seen = await self._database.read(lambda reader: _verdict(reader, run_id, now))
        if seen is None or (seen.counters_agree and seen.status is seen.run.status):
            return None if seen is None else seen.status
        return await self._database.write(lambda connection: _set_right(connection, run_id, now))

    async def due_references(
        self, run_id: str, *, after: int, limit: int, now: int
    ) -> list[tuple[int, str]]:
        def read(reader: sqlite3.Connection) -> References:
            run, place = find_run(reader, run_id), find_place(reader, run_id)
            if run is None or place is None or run.status not in LIVE_RUN_STATES:
                return References([])
            sql = _DUE.format(now=int(now))
            return merged_references(reader, place, sql, after=after, limit=limit)

        found = await self._database.read(read)
        self._database.rows_read += found.rows_read
        self._database.rows_returned += len(found.rows)
        return found.rows

    async def ended_runs(
        self, *, now: int, row_days: int, after: DuePosition | None, limit: int
    ) -> list[EndedRun]:
        behind = after or DuePosition(-1, "")
        values = {
            "now": now,
            "row_days": row_days,
            "after": behind.due_at,
            "after_id": behind.run_id,
            "limit": limit,
            "day": _DAY,
            "ended_for": ENDED_FOR,
        }
        rows = await self._database.read(
            lambda reader: reader.execute(ENDED_RUNS, values).fetchall()
        )
        return [
            EndedRun(job_id, run_id, ended_at, ttl_days, bool(swept), bool(dropped), due_at)
            for job_id, run_id, ended_at, ttl_days, swept, dropped, due_at in rows
        ]

    async def mark_swept(self, run_id: str) -> None:
        await self._database.write(
            lambda connection: connection.execute(
                "UPDATE runs SET swept = 1 WHERE run_id = ?", (run_id,)
            )
        )

    async def mark_queue_dropped(self, run_id: str) -> None:
        await self._database.write(
            lambda connection: connection.execute(
                "UPDATE runs SET queue_dropped = 1 WHERE run_id = ?", (run_id,)
            )
        )

    async def expire_run(self, run_id: str, *, now: int) -> list[str]:
        return await self._database.write(lambda connection: _expire(connection, run_id, now=now))

    async def tidy(self, *, now: int) -> int:
        return 0  # each write is one transaction, and leaves nothing behind


@dataclass(frozen=True, slots=True)
class _Verdict:
    """The status that a run should have, the counts of its rows, the shape of its results, and the
    counts of the groups that it keeps. Without `counts` the run is to be left as it is."""

    run: Run
    place: KeyRange
    counts: RowCounts | None
    status: RunStatus
    shape: ResultShape
    kept: dict[str, int]

    @property
    def counters_agree(self) -> bool:
        """True if the counters agree with the rows, or are not to be touched."""
        counts, stats = self.counts, self.run.stats
        return counts is None or (
            (counts.total, counts.successful, counts.failed, counts.failure_reasons)
            == (stats.total, stats.successful, stats.failed, stats.failure_reasons)
            and self.shape == stats.shape
            and all(counts.groups.get(group) == count for group, count in self.kept.items())
        )


def _verdict(connection: sqlite3.Connection, run_id: str, now: int) -> _Verdict | None:
    run, place = find_run(connection, run_id), find_place(connection, run_id)
    job = None if run is None else find_job(connection, run.job_id)
    if run is None or place is None or job is None:
        return None
    shape = run.stats.shape
    untouched = _Verdict(run, place, None, run.status, shape, {})
    if run.status not in LIVE_RUN_STATES or run.ingesting:
        return untouched
    if connection.execute(_CLAIMED, (*place.all, now)).fetchone() is not None:
        return untouched
    counts = count_rows(connection, place)
    stats = RunStats(total=counts.total, successful=counts.successful, failed=counts.failed)
    status = live_run_status(stats, job_closed=job.status is not JobStatus.OPEN)
    if sum(shape.sizes) != counts.successful:
        shape = count_bodies(connection, place)
    return _Verdict(run, place, counts, status, shape, kept_counts(connection, place.run_no))


def _set_right(connection: sqlite3.Connection, run_id: str, now: int) -> RunStatus | None:
    verdict = _verdict(connection, run_id, now)
    if verdict is None:
        return None
    if verdict.counts is not None and not verdict.counters_agree:
        write_counts(connection, verdict.place, verdict.counts)
    move_run(connection, verdict.run, verdict.status, now=now)
    return verdict.status


def _expire(connection: sqlite3.Connection, run_id: str, *, now: int) -> list[str]:
    run = find_run(connection, run_id)
    if run is None or run.status in LIVE_RUN_STATES or run.ingesting:
        return []
    if connection.execute(_NEEDED, (run_id,)).fetchone() is not None:
        return []
    if move_run(connection, run, RunStatus.DELETED, now=now):
        connection.execute(
            "UPDATE jobs SET updated_at = max(updated_at, ?2), version = version + 1, "
            "latest_run_id = (SELECT run_id FROM runs WHERE job_id = ?1 "
            "AND status <> 'deleted' ORDER BY run_sequence DESC LIMIT 1) WHERE job_id = ?1",
            (run.job_id, now),
        )
        job = find_job(connection, run.job_id)
        if job is not None and job.goes_with_its_runs and job.latest_run_id is None:
            move_job(connection, job, JobStatus.DELETED, now=now)
    return [run_id]
