"""Claims and settlements, many at a time.

The rows concerned are read by one statement, each move is decided in order on what the moves before
it left, and what they all changed is written by a statement a table. A task that comes twice ends a
stretch, so that every decision is taken on rows as they are.

The runs that a batch of moves touches: read once, added up in memory, written once.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from conveyor.dev.sqlite.rows import (
    FAILED,
    INDEX_MASK,
    MOST_ROWS,
    SUCCESSFUL,
    UNFINISHED,
    KeyRange,
    KeyStatement,
    RowsStatement,
    counts_from,
    index_of,
    to_json,
)
from conveyor.domain.interruptions import INTERRUPTED, interruption
from conveyor.domain.model import (
    RunStats,
    RunStatus,
    Spend,
    Task,
    TaskFailure,
    TaskSpec,
    TaskStatus,
)
from conveyor.domain.shards import Shards, ShardScheme
from conveyor.domain.states import LIVE_RUN_STATES, live_run_status
from conveyor.ports.tasks import (
    Claim,
    Claimed,
    ClaimedElsewhere,
    Failed,
    NotClaimable,
    Released,
    Retry,
    Settled,
    Settlement,
    Succeeded,
)

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
class RunDelta:
    """One run inside one transaction. The name says what it is for: it may have ended."""

    place: KeyRange
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


def read_runs(connection: sqlite3.Connection, run_ids: Iterable[str]) -> dict[str, RunDelta]:
    """The runs that exist, by id."""
    wanted = list(run_ids)
    runs: dict[str, RunDelta] = {}
    for start in range(0, len(wanted), MOST_ROWS):
        for row in _SELECT.execute(connection, wanted[start : start + MOST_ROWS]):
            runs[row[0]] = RunDelta(
                place=KeyRange(row[1], Shards(row[13], ShardScheme(row[14]))),
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


def write_runs(connection: sqlite3.Connection, runs: Iterable[RunDelta]) -> None:
    """Write the counters of those that changed, and the states of those that moved on."""
    changed = [run for run in runs if run.changed]
    if not changed:
        return
    COUNT.execute(connection, [_counters(run) for run in changed])
    moved = [(run.place.run_no, run.status, run.version) for run in changed if run.moved]
    if moved:
        _MOVE.execute(connection, moved)


def _counters(run: RunDelta) -> tuple[object, ...]:
    return (
        run.place.run_no,
        run.updated_at,
        run.successful,
        run.failed,
        to_json(run.failure_reasons),
        run.credits,
        run.cost,
    )


_INTERRUPTED_JSON = to_json(INTERRUPTED)

_SELECT_CANDIDATES = KeyStatement(
    """
    SELECT group_concat(printf('[%d,"%s",%d,%d,%d,%d,%d,%d,%d,%d,%d,%s]', t.task_key, t.task_id,
        t.state, t.created_at, t.attempts, t.interruptions,
        coalesce(c.claim_number, t.claim_number), t.not_before,
        c.task_key IS NOT NULL, c.claimed_at, c.claimed_until, t.spec))
    FROM tasks t LEFT JOIN claims c ON c.task_key = t.task_key WHERE t.task_key IN ({keys})
    """
)
_SELECT_HELD = KeyStatement(
    """
    SELECT group_concat(printf('[%d,"%s",%d,%d,%d,%d]', t.task_key, t.task_id, t.attempts,
        t.interruptions, c.claim_number, t.not_before))
    FROM claims c JOIN tasks t ON t.task_key = c.task_key WHERE c.task_key IN ({keys})
    """
)
_CLAIM = RowsStatement(
    "INSERT OR REPLACE INTO claims (task_key, claim_number, claimed_at, claimed_until, worker) "
    "SELECT * FROM ({rows}) WHERE column1 IS NOT NULL",
    width=5,
)
_RELEASE = KeyStatement("DELETE FROM claims WHERE task_key IN ({keys})")
_UPDATE = RowsStatement(
    """
    WITH written AS ({rows})
    UPDATE tasks SET state = column2, updated_at = column3, attempts = column4,
        interruptions = column5, claim_number = column6, not_before = column7
    FROM written WHERE tasks.task_key = written.column1
    """,
    width=7,
)
_RECORD = RowsStatement(
    """
    INSERT INTO histories (task_key, events, result, error, failure)
    SELECT * FROM ({rows}) WHERE column1 IS NOT NULL
    ON CONFLICT (task_key) DO UPDATE SET events = events || ',' || excluded.events,
        result = excluded.result, error = excluded.error, failure = excluded.failure
    """,
    width=5,
)


class _Candidate(msgspec.Struct, array_like=True, frozen=True):
    """A row that somebody wants to claim, with the claim that is on it, if `claimed`."""

    task_key: int
    task_id: str
    state: int
    created_at: int
    attempts: int
    interruptions: int
    claim_number: int
    not_before: int
    claimed: int
    claimed_at: int
    claimed_until: int
    spec: TaskSpec


class _Held(msgspec.Struct, array_like=True, frozen=True):
    """A claimed row that somebody wants to settle."""

    task_key: int
    task_id: str
    attempts: int
    interruptions: int
    claim_number: int
    not_before: int


Row = TypeVar("Row", _Candidate, _Held)

_candidates = msgspec.json.Decoder(list[_Candidate])
_held = msgspec.json.Decoder(list[_Held])


class ClaimMove(msgspec.Struct, frozen=True, gc=False):
    """One call of `claim_task`."""

    run_id: str
    task_id: str
    worker: str
    now: int
    claimed_until: int
    max_interruptions: int


class SettleMove(msgspec.Struct, frozen=True, gc=False):
    """One call of `settle_task`."""

    run_id: str
    task_id: str
    claim_number: int
    settlement: Settlement
    now: int


Move = ClaimMove | SettleMove


@dataclass(slots=True)
class _Writes:
    """What a stretch changes, row by row, until it is written table by table."""

    claims: list[tuple[object, ...]] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)
    updates: list[tuple[object, ...]] = field(default_factory=list)
    records: list[tuple[object, ...]] = field(default_factory=list)

    def update(
        self,
        row: _Candidate | _Held,
        state: int,
        now: int,
        attempts: int,
        interruptions: int,
        not_before: int,
    ) -> None:
        """Leave a row in a state."""
        self.updates.append(
            (row.task_key, state, now, attempts, interruptions, row.claim_number, not_before)
        )

    def flush(self, connection: sqlite3.Connection) -> None:
        """Write everything."""
        if self.releases:
            _RELEASE.execute(connection, self.releases)
        if self.claims:
            _CLAIM.execute(connection, self.claims)
        if self.updates:
            _UPDATE.execute(connection, self.updates)
        if self.records:
            _RECORD.execute(connection, self.records)


def move_tasks(connection: sqlite3.Connection, moves: list[Move]) -> list[Claim | Settled]:
    """Make moves in order, as if each were alone; their results, in order."""
    return [result for stretch in _stretches(moves) for result in _move(connection, stretch)]


def _stretches(moves: list[Move]) -> Iterator[list[Move]]:
    stretch: list[Move] = []
    seen: set[tuple[str, str]] = set()
    for move in moves:
        task = (move.run_id, move.task_id)
        if task in seen or len(stretch) == MOST_ROWS:
            yield stretch
            stretch, seen = [], set()
        stretch.append(move)
        seen.add(task)
    yield stretch


def _move(connection: sqlite3.Connection, moves: list[Move]) -> list[Claim | Settled]:
    runs = read_runs(connection, {move.run_id for move in moves})
    keys = [_key(runs.get(move.run_id), move) for move in moves]
    candidates, held = _rows(connection, moves, keys)
    writes = _Writes()
    results: list[Claim | Settled] = []
    for move, key in zip(moves, keys, strict=True):
        run = runs.get(move.run_id)
        if isinstance(move, ClaimMove):
            row = candidates.get(key)
            if run is None or row is None or row.task_id != move.task_id:
                results.append(NotClaimable())
            else:
                results.append(_claim(move, run, row, writes))
        elif run is None or run.status is RunStatus.DELETED:
            results.append(Settled(applied=False, run_status=None))
        else:
            results.append(_settle(move, run, held.get(key), writes))
    writes.flush(connection)
    write_runs(connection, runs.values())
    return results


def _key(run: RunDelta | None, move: Move) -> int:
    """Where the task's rows lie; -1, where none do, for a task that cannot exist."""
    index = None if run is None else index_of(move.task_id)
    return -1 if run is None or index is None else run.place.key(move.task_id, index)


def _rows(
    connection: sqlite3.Connection, moves: list[Move], keys: list[int]
) -> tuple[dict[int, _Candidate], dict[int, _Held]]:
    wanted: list[int] = []
    settled: list[int] = []
    for move, key in zip(moves, keys, strict=True):
        (wanted if isinstance(move, ClaimMove) else settled).append(key)
    return (
        _select(connection, _SELECT_CANDIDATES, wanted, _candidates),
        _select(connection, _SELECT_HELD, settled, _held),
    )


def _select(
    connection: sqlite3.Connection,
    statement: KeyStatement,
    keys: list[int],
    decoder: msgspec.json.Decoder[list[Row]],
) -> dict[int, Row]:
    if not keys:
        return {}
    (text,) = statement.execute(connection, keys).fetchone()
    return {} if text is None else {row.task_key: row for row in decoder.decode(f"[{text}]")}


def _claim(move: ClaimMove, run: RunDelta, row: _Candidate, writes: _Writes) -> Claim:
    if not run.live or row.state != UNFINISHED:
        return NotClaimable()
    interruptions = row.interruptions
    if row.claimed:
        if row.claimed_until > move.now:
            return ClaimedElsewhere(row.claimed_until)
        interruptions += 1
        _interrupt(move, run, row, writes)
        if interruptions > move.max_interruptions:
            return NotClaimable(run.status)
    elif row.not_before > move.now:
        return ClaimedElsewhere(row.not_before)
    number = row.claim_number + 1
    writes.claims.append((row.task_key, number, move.now, move.claimed_until, move.worker))
    return Claimed(
        Task(
            run_id=move.run_id,
            task_id=row.task_id,
            index=row.task_key & INDEX_MASK,
            spec=row.spec,
            status=TaskStatus.PROCESSING,
            created_at=row.created_at,
            updated_at=move.now,
            attempts=row.attempts,
            interruptions=interruptions,
            claim_number=number,
            claimed_until=move.claimed_until,
            not_before=row.not_before,
        )
    )


def _interrupt(move: ClaimMove, run: RunDelta, row: _Candidate, writes: _Writes) -> None:
    """Write a lapsed claim to the history; one too many ends the task."""
    interruptions = row.interruptions + 1
    too_many = interruptions > move.max_interruptions
    event = interruption(attempts=row.attempts, claimed_at=row.claimed_at, now=move.now)
    error, failure = (_INTERRUPTED_JSON, TaskFailure.OTHER) if too_many else (None, None)
    state, not_before = (FAILED, 0) if too_many else (UNFINISHED, row.not_before)
    writes.records.append((row.task_key, to_json(event), None, error, failure))
    writes.update(row, state, move.now, row.attempts, interruptions, not_before)
    if too_many:
        writes.releases.append(row.task_key)
        run.fail(TaskFailure.OTHER, move.now)


def _settle(move: SettleMove, run: RunDelta, row: _Held | None, writes: _Writes) -> Settled:
    if row is None or row.task_id != move.task_id or row.claim_number != move.claim_number:
        return Settled(applied=False, run_status=run.status)
    settlement = move.settlement
    now, key = move.now, row.task_key
    state, attempts, not_before = UNFINISHED, row.attempts, row.not_before
    if not isinstance(settlement, Released):
        event = settlement.event
        result = error = failure = None
        if isinstance(settlement, Succeeded):
            state, attempts, result = SUCCESSFUL, attempts + 1, to_json(settlement.result)
            run.succeed(event.spend, now)
        elif isinstance(settlement, Failed):
            state, attempts, failure = FAILED, attempts + 1, settlement.failure
            error = to_json(settlement.problem)
            run.fail(failure, now, event.spend)
        else:
            attempts, not_before = attempts + settlement.burns_attempt, settlement.not_before
            run.spend(event.spend, now)
        if not isinstance(settlement, Retry) or settlement.recorded:
            writes.records.append((key, to_json(event), result, error, failure))
    writes.releases.append(key)
    writes.update(row, state, now, attempts, row.interruptions, not_before)
    return Settled(applied=True, run_status=run.status)
