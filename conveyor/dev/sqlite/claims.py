"""Claims and settlements, many at a time.

A stretch of moves is three steps: one statement reads the rows, `task_rules` decides on each move
in order, and one statement a table writes all the changes. The runs of a stretch are read once,
counted in memory and written once. A stretch ends before a task that is in it already, so that
every decision is made on the row as it is.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import msgspec

from conveyor.dev.sqlite.failure_groups import FailedRow, count_failures
from conveyor.dev.sqlite.rows import (
    FAILED,
    INDEX_MASK,
    MOST_ROWS,
    STATUS,
    SUCCESSFUL,
    UNFINISHED,
    KeyRange,
    KeyStatement,
    RowsStatement,
    counts_from,
    index_of,
    shape_from,
    to_json,
)
from conveyor.domain.failure_groups import failure_kind
from conveyor.domain.model import RunStatus, Task, TaskSpec, TaskStatus
from conveyor.domain.result_shape import ShapeCounter
from conveyor.domain.shards import Shards, ShardScheme
from conveyor.domain.task_rules import (
    NotYet,
    RunCounters,
    RunDelta,
    TaskChange,
    claim_change,
    is_held,
    settlement_change,
)
from conveyor.ports.tasks import (
    Claim,
    Claimed,
    ClaimedElsewhere,
    ClaimRequest,
    NotClaimable,
    Settled,
    SettleRequest,
)

_SELECT = KeyStatement(
    "SELECT r.run_id, r.run_no, r.status, r.updated_at, r.total, r.successful, r.failed, "
    "r.failure_reasons, r.credits, r.cost, r.version, j.status <> 'open', r.ingesting, "
    "r.shard_count, r.shard_scheme, r.shape "
    "FROM runs r JOIN jobs j USING (job_id) WHERE r.run_id IN ({keys})"
)
COUNT = RowsStatement(
    """
    WITH written AS ({rows})
    UPDATE runs SET updated_at = column2, successful = column3, failed = column4,
        failure_reasons = column5, credits = column6, cost = column7, shape = column8
    FROM written WHERE runs.run_no = written.column1
    """,
    width=8,
)
"""Sets no column of an index, so that counting writes the run's row and nothing else."""
_MOVE = RowsStatement(
    """
    WITH written AS ({rows})
    UPDATE runs SET status = column2, version = column3, dispatch_changed_at = updated_at
    FROM written WHERE runs.run_no = written.column1
    """,
    width=3,
)
"""Follows COUNT, which has written `updated_at`."""


@dataclass(slots=True)
class CountedRun:
    """A run inside one transaction: read once, counted in memory, written once."""

    place: KeyRange
    status: RunStatus
    counters: RunCounters
    version: int
    job_closed: bool
    ingesting: bool
    failures: list[FailedRow] = field(default_factory=list)
    changed: bool = False
    moved: bool = False

    def add(self, delta: RunDelta) -> None:
        """Account for one change of a task, and let the status follow where that ended it."""
        self.counters.add(delta)
        self.changed = True
        if not (delta.successful or delta.failed):
            return
        status = self.counters.status_after(
            self.status, job_closed=self.job_closed, ingesting=self.ingesting
        )
        if status is not self.status:
            self.status = status
            self.version += 1
            self.moved = True


def read_runs(connection: sqlite3.Connection, run_ids: Iterable[str]) -> dict[str, CountedRun]:
    """Read the runs that exist, by id."""
    wanted = list(run_ids)
    runs: dict[str, CountedRun] = {}
    for start in range(0, len(wanted), MOST_ROWS):
        for row in _SELECT.execute(connection, wanted[start : start + MOST_ROWS]):
            runs[row[0]] = CountedRun(
                KeyRange(row[1], Shards(row[13], ShardScheme(row[14]))),
                RunStatus(row[2]),
                RunCounters(
                    updated_at=row[3],
                    total=row[4],
                    successful=row[5],
                    failed=row[6],
                    failure_reasons=counts_from(row[7]),
                    credits=row[8],
                    cost=row[9],
                    shape=ShapeCounter.of(shape_from(row[15])),
                ),
                version=row[10],
                job_closed=bool(row[11]),
                ingesting=bool(row[12]),
            )
    return runs


def write_runs(connection: sqlite3.Connection, runs: Iterable[CountedRun]) -> None:
    """Write the counters of the runs that changed, and the status of those that moved on."""
    changed = [run for run in runs if run.changed]
    if not changed:
        return
    COUNT.execute(connection, [_counters(run) for run in changed])
    failed = [
        (run.place.run_no, run.counters.failed, run.failures) for run in changed if run.failures
    ]
    if failed:
        count_failures(connection, failed)
    moved = [(run.place.run_no, run.status, run.version) for run in changed if run.moved]
    if moved:
        _MOVE.execute(connection, moved)


def _counters(run: CountedRun) -> tuple[object, ...]:
    counters = run.counters
    return (
        run.place.run_no,
        counters.updated_at,
        counters.successful,
        counters.failed,
        to_json(counters.failure_reasons),
        counters.credits,
        counters.cost,
        to_json(counters.shape.shape()),
    )


# Each task asks several times, and to look into an enumeration is slow before Python 3.12.
_PROCESSING, _DELETED = TaskStatus.PROCESSING, RunStatus.DELETED

_STATES = {
    TaskStatus.PENDING: UNFINISHED,
    TaskStatus.PROCESSING: UNFINISHED,
    TaskStatus.SUCCESSFUL: SUCCESSFUL,
    TaskStatus.FAILED: FAILED,
}
"""`tasks.state` of a status."""

_SELECT_CANDIDATES = KeyStatement(
    f"""
    SELECT group_concat(printf('[%d,"%s","%s",%d,%d,%d,%d,%d,%d,%d,%d,%d,%s]',
        t.task_key, t.task_id, {STATUS}, t.created_at, t.updated_at, t.attempts, t.interruptions,
        coalesce(c.claim_number, t.claim_number), t.not_before,
        c.claimed_at, c.claimed_until, t.waiting_since, t.spec))
    FROM tasks t LEFT JOIN claims c ON c.task_key = t.task_key WHERE t.task_key IN ({{keys}})
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
        interruptions = column5, claim_number = column6, not_before = column7,
        failure_group = column8
    FROM written WHERE tasks.task_key = written.column1
    """,
    width=8,
)
_WAIT = RowsStatement(
    """
    WITH written AS ({rows})
    UPDATE tasks SET waiting = column2, waiting_since = column3
    FROM written WHERE tasks.task_key = written.column1
    """,
    width=3,
)
"""Apart from _UPDATE, so that rows without a wait cost no more."""
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
    """A row that somebody wants to claim, with the claim on it where it is processing."""

    task_key: int
    task_id: str
    status: TaskStatus
    created_at: int
    updated_at: int
    attempts: int
    interruptions: int
    claim_number: int
    not_before: int
    claimed_at: int
    claimed_until: int
    waiting_since: int
    spec: TaskSpec


class _Held(msgspec.Struct, array_like=True, frozen=True):
    """A claimed row that somebody wants to settle."""

    status: ClassVar[TaskStatus] = TaskStatus.PROCESSING

    task_key: int
    task_id: str
    attempts: int
    interruptions: int
    claim_number: int
    not_before: int


Row = TypeVar("Row", _Candidate, _Held)

_candidates = msgspec.json.Decoder(list[_Candidate])
_held = msgspec.json.Decoder(list[_Held])


Move = ClaimRequest | SettleRequest


@dataclass(slots=True)
class _Writes:
    """The changes of a stretch, collected row by row and written table by table. Rows of `updates`
    and `results` leave out what `failures` and `records` have."""

    claims: list[tuple[object, ...]] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)
    updates: list[tuple[object, ...]] = field(default_factory=list)
    failures: list[tuple[object, ...]] = field(default_factory=list)
    waits: list[tuple[object, ...]] = field(default_factory=list)
    results: list[tuple[object, ...]] = field(default_factory=list)
    records: list[tuple[object, ...]] = field(default_factory=list)

    def change(
        self, row: _Candidate | _Held, change: TaskChange, now: int, group: str | None
    ) -> None:
        """Write a change of a row, and release the row where it is not processing any more."""
        key, event, not_before = row.task_key, change.event, change.not_before
        if event is not None and change.result is not None:
            self.results.append((key, to_json(event), to_json(change.result)))
        elif event is not None:
            error = None if change.error is None else to_json(change.error)
            self.records.append((key, to_json(event), None, error, change.failure))
        if change.waiting is not None:
            self.waits.append((key, change.waiting, change.waiting_since))
        if change.status is not _PROCESSING:
            self.releases.append(key)
        update = (
            key,
            _STATES[change.status],
            now,
            row.attempts + change.attempts,
            row.interruptions + change.interruptions,
            row.claim_number,
            row.not_before if not_before is None else not_before,
        )
        if group is None:
            self.updates.append(update)
        else:
            self.failures.append((*update, group))

    def flush(self, connection: sqlite3.Connection) -> None:
        """Write everything."""
        if self.releases:
            _RELEASE.execute(connection, self.releases)
        if self.claims:
            _CLAIM.execute(connection, self.claims)
        if self.updates:
            _UPDATE.execute(connection, self.updates)
        if self.failures:
            _UPDATE.execute(connection, self.failures)
        if self.waits:
            _WAIT.execute(connection, self.waits)
        if self.results:
            _RECORD.execute(connection, self.results)
        if self.records:
            _RECORD.execute(connection, self.records)


def move_tasks(connection: sqlite3.Connection, moves: list[Move]) -> list[Claim | Settled]:
    """Make moves in order, as if each were alone; return their results in order."""
    return [result for stretch in _stretches(moves) for result in _move(connection, stretch)]


def _stretches(moves: list[Move]) -> Iterator[list[Move]]:
    if len(moves) <= MOST_ROWS and len({(one.run_id, one.task_id) for one in moves}) == len(moves):
        yield moves
        return
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
    keys = _keys(runs, moves)
    candidates, held = _rows(connection, moves, keys)
    writes = _Writes()
    results: list[Claim | Settled] = []
    for move, key in zip(moves, keys, strict=True):
        run = runs.get(move.run_id)
        if isinstance(move, ClaimRequest):
            row = candidates.get(key)
            if run is None or row is None or row.task_id != move.task_id:
                results.append(NotClaimable())
            else:
                results.append(_claim(move, run, row, writes))
        elif run is None or run.status is _DELETED:
            results.append(Settled(applied=False, run_status=None))
        else:
            results.append(_settle(move, run, held.get(key), writes))
    writes.flush(connection)
    write_runs(connection, runs.values())
    return results


def _keys(runs: dict[str, CountedRun], moves: list[Move]) -> list[int]:
    """Find the keys of the rows of tasks; -1, which no row has, for a task that cannot exist."""
    keys = []
    for move in moves:
        run, index = runs.get(move.run_id), index_of(move.task_id)
        if run is None or index is None:
            keys.append(-1)
        else:
            keys.append(run.place.key(move.task_id, index))
    return keys


def _rows(
    connection: sqlite3.Connection, moves: list[Move], keys: list[int]
) -> tuple[dict[int, _Candidate], dict[int, _Held]]:
    wanted: list[int] = []
    settled: list[int] = []
    for move, key in zip(moves, keys, strict=True):
        (wanted if isinstance(move, ClaimRequest) else settled).append(key)
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


def _claim(move: ClaimRequest, run: CountedRun, row: _Candidate, writes: _Writes) -> Claim:
    change = claim_change(
        row, run_status=run.status, now=move.now, max_interruptions=move.max_interruptions
    )
    if change is None:
        return NotClaimable()
    if isinstance(change, NotYet):
        return ClaimedElsewhere(change.until, change.is_due_later, change.end)
    if change.event is not None:  # a pending row is left as it is: the claim alone says more
        _apply(run, row, change, move.now, writes)
    if change.status is not _PROCESSING:
        return NotClaimable(run.status)
    number = row.claim_number + 1
    writes.claims.append((row.task_key, number, move.now, move.claimed_until, move.worker))
    return Claimed(
        Task(
            run_id=move.run_id,
            task_id=row.task_id,
            index=row.task_key & INDEX_MASK,
            spec=row.spec,
            status=_PROCESSING,
            created_at=row.created_at,
            updated_at=move.now,
            attempts=row.attempts,
            interruptions=row.interruptions + change.interruptions,
            claim_number=number,
            claimed_until=move.claimed_until,
            not_before=row.not_before,
            waiting_since=row.waiting_since,
        )
    )


def _settle(move: SettleRequest, run: CountedRun, row: _Held | None, writes: _Writes) -> Settled:
    if row is None or row.task_id != move.task_id or not is_held(row, move.claim_number):
        return Settled(applied=False, run_status=run.status)
    change = settlement_change(move.settlement, now=move.now)
    _apply(run, row, change, move.now, writes)
    return Settled(applied=True, run_status=run.status)


def _apply(
    run: CountedRun, row: _Candidate | _Held, change: TaskChange, now: int, writes: _Writes
) -> None:
    """Write a change of a row, and count it in its run; a failure counts in its group too."""
    group = None
    if change.failure is not None and change.error is not None:
        kind = failure_kind(change.failure, change.error)
        group = kind.group_id
        run.failures.append(FailedRow(kind, row.task_id, change.error.detail, now))
    writes.change(row, change, now, group)
    if change.delta is not None:
        run.add(change.delta)
