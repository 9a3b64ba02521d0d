"""The runs that a batch of moves touches: read once, added up in memory, written once."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass

from conveyor.dev.sqlite.rows import Place, counts_from, to_json
from conveyor.dev.sqlite.values import MOST_ROWS, KeyStatement, RowsStatement
from conveyor.domain.model import RunStats, RunStatus, Spend, TaskFailure
from conveyor.domain.shards import Shards, ShardScheme
from conveyor.domain.states import LIVE_RUN_STATES, live_run_status

_SELECT = KeyStatement(
    "SELECT r.run_id, r.run_no, r.status, r.updated_at, r.total, r.successful, r.failed, "
    "r.failure_reasons, r.credits, r.cost, r.version, j.status <> 'open', r.ingesting, "
    "r.shard_count, r.shard_scheme "
    "FROM runs r JOIN jobs j USING (job_id) WHERE r.run_id IN ({keys})"
)
COUNT = RowsStatement(
    """
    WITH written AS ({rows})
    UPDATE runs SET updated_at = column2, successful = column3, failed = column4,
        failure_reasons = column5, credits = column6, cost = column7
    FROM written WHERE runs.run_no = written.column1
    """,
    width=7,
)
"""Names no column of an index, so that a run that merely counts costs its row and nothing else."""
_MOVE = RowsStatement(
    """
    WITH written AS ({rows})
    UPDATE runs SET status = column2, version = column3, dispatch_changed_at = updated_at
    FROM written WHERE runs.run_no = written.column1
    """,
    width=3,
)
"""Follows COUNT, which has written `updated_at`."""


NOTHING = Spend()


@dataclass(slots=True)
class LiveRun:
    """One run inside one transaction. The name says what it is for: it may have ended."""

    place: Place
    status: RunStatus
    updated_at: int
    total: int
    successful: int
    failed: int
    failure_reasons: dict[str, int]
    credits: int
    cost: float
    version: int
    job_closed: bool
    ingesting: bool
    changed: bool = False
    moved: bool = False

    @property
    def live(self) -> bool:
        """Whether its tasks may still be claimed."""
        return self.status in LIVE_RUN_STATES

    def spend(self, spend: Spend, now: int) -> None:
        """Account for what one attempt cost."""
        self.credits += spend.credits
        self.cost += spend.cost
        if now > self.updated_at:
            self.updated_at = now
        self.changed = True

    def succeed(self, spend: Spend, now: int) -> None:
        """Account for one task that ended successful."""
        self.spend(spend, now)
        self.successful += 1
        self._move_on()

    def fail(self, failure: TaskFailure, now: int, spend: Spend = NOTHING) -> None:
        """Account for one task that ended failed."""
        self.spend(spend, now)
        self.failed += 1
        self.failure_reasons[failure] = self.failure_reasons.get(failure, 0) + 1
        self._move_on()

    def _move_on(self) -> None:
        """Let the status follow the counters, while the run is live."""
        if self.successful + self.failed < self.total and self.status is RunStatus.RUNNING:
            return  # what the rule below says too, without making a record for every task
        if not self.live:
            return
        stats = RunStats(total=self.total, successful=self.successful, failed=self.failed)
        status = live_run_status(stats, job_closed=self.job_closed, ingesting=self.ingesting)
        if status is not self.status:
            self.status = status
            self.version += 1
            self.moved = True


def read_runs(connection: sqlite3.Connection, run_ids: Iterable[str]) -> dict[str, LiveRun]:
    """The runs that exist, by id."""
    wanted = list(run_ids)
    runs: dict[str, LiveRun] = {}
    for start in range(0, len(wanted), MOST_ROWS):
        for row in _SELECT.execute(connection, wanted[start : start + MOST_ROWS]):
            runs[row[0]] = LiveRun(
                place=Place(row[1], Shards(row[13], ShardScheme(row[14]))),
                status=RunStatus(row[2]),
                updated_at=row[3],
                total=row[4],
                successful=row[5],
                failed=row[6],
                failure_reasons=counts_from(row[7]),
                credits=row[8],
                cost=row[9],
                version=row[10],
                job_closed=bool(row[11]),
                ingesting=bool(row[12]),
            )
    return runs


def write_runs(connection: sqlite3.Connection, runs: Iterable[LiveRun]) -> None:
    """Write the counters of those that changed, and the states of those that moved on."""
    changed = [run for run in runs if run.changed]
    if not changed:
        return
    COUNT.execute(connection, [_counters(run) for run in changed])
    moved = [(run.place.run_no, run.status, run.version) for run in changed if run.moved]
    if moved:
        _MOVE.execute(connection, moved)


def _counters(run: LiveRun) -> tuple[object, ...]:
    return (
        run.place.run_no,
        run.updated_at,
        run.successful,
        run.failed,
        to_json(run.failure_reasons),
        run.credits,
        run.cost,
    )
