"""Reruns: make a new run from the rows of the latest one.

A small run is copied in the transaction that makes the new one. For a large run that transaction
writes only a plan, and `ingestion` copies the rows step by step. A copied row is either fresh, or
inherited with its result or error. A row that exists already stays as it is, so that a copy can be
repeated.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from conveyor.dev.sqlite.failure_groups import (
    compared,
    copy_groups,
    kept_counts,
    read_groups,
)
from conveyor.dev.sqlite.idempotency import store_answer, stored_answer
from conveyor.dev.sqlite.outbox import insert_entries
from conveyor.dev.sqlite.rows import INDEX_BITS, INDEX_MASK, KeyRange, insert_run
from conveyor.dev.sqlite.states import (
    count_rows,
    find_place,
    find_run,
    move_job,
    need_latest_run,
    need_view,
    write_counts,
)
from conveyor.domain.errors import CallInFlight, ConveyorError, ErrorCode
from conveyor.domain.failure_groups import group_filter
from conveyor.domain.model import (
    GroupFilter,
    Ingest,
    IngestStatus,
    JobStatus,
    Run,
    RunStats,
    RunStatus,
    TaskStatus,
)
from conveyor.domain.result_shape import ResultShape
from conveyor.domain.states import LIVE_RUN_STATES
from conveyor.ports.records import IdempotencyScope, Rerun, RerunRequest, StoredResponse

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
# Both runs have the same shards, so the key of a row changes by as much as the number of its run.
_KEY = f"t.task_key + ((:new_no - :old_no) << {INDEX_BITS})"
_COPY_FRESH = f"""
    INSERT OR IGNORE INTO tasks (task_key, state, task_id, created_at, updated_at, spec)
    SELECT {_KEY}, 0, t.task_id, :now, :now, t.spec {_SOURCE} AND ({{matching}})
"""
_COPY_INHERITED = f"""
    INSERT OR IGNORE INTO tasks (task_key, state, task_id, created_at, updated_at, attempts,
        interruptions, source_run_id, failure_group, spec)
    SELECT {_KEY}, t.state, t.task_id, :now, :now, t.attempts, t.interruptions,
        coalesce(t.source_run_id, :old_id), t.failure_group, t.spec
    {_SOURCE} AND t.state > 0 AND NOT ({{matching}})
"""
_OF_GROUPS = """(t.state = 2 AND
    ifnull(t.failure_group, '') {among} (SELECT value FROM json_each(:groups)))"""
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


class RowsCopied(NamedTuple):
    """The numbers of rows copied: those that start afresh, and those that were inherited."""

    retried: int
    inherited: int


@dataclass(frozen=True, slots=True)
class RunCopy:
    """A copy of rows from one run to another. Those of `statuses` (None: all) and `groups` (None:
    all) start afresh."""

    source: KeyRange
    source_id: str
    target: KeyRange
    statuses: frozenset[TaskStatus] | None
    groups: GroupFilter | None

    def run(
        self, connection: sqlite3.Connection, *, first_index: int, end_index: int, now: int
    ) -> RowsCopied:
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
                "groups": self._listed,
            }
            fresh = connection.execute(_COPY_FRESH.format(matching=matching), values)
            retried += fresh.rowcount
            if self.statuses is not None:
                kept = connection.execute(_COPY_INHERITED.format(matching=matching), values)
                inherited += kept.rowcount
                connection.execute(_COPY_ENDINGS.format(matching=matching), values)
        return RowsCopied(retried, inherited)

    def held(
        self, connection: sqlite3.Connection, *, first_index: int, end_index: int, now: int
    ) -> str | None:
        """Find a task of the stretch that is under a live claim in the source."""
        for keys in self._ranges(first_index, end_index):
            found = find_live_claim(connection, keys, now=now)
            if found is not None:
                return found
        return None

    def ended_since(
        self, connection: sqlite3.Connection, *, first_index: int, end_index: int, since: int
    ) -> int:
        """Count the rows of the stretch that start afresh and have ended in the source since."""
        late = 0
        for low, high in self._ranges(first_index, end_index):
            values = {"low": low, "high": high, "since": since, "groups": self._listed}
            (count,) = connection.execute(_LATE.format(matching=self._matching), values).fetchone()
            late += count
        return late

    @property
    def _matching(self) -> str:
        if self.statuses is None:
            return "1"
        if self.groups is not None:
            return _OF_GROUPS.format(among=compared(self.groups)[0])
        return " OR ".join(_MATCHES[one] for one in sorted(self.statuses))

    @property
    def _listed(self) -> str:
        """The groups that `_OF_GROUPS` compares with, as JSON."""
        return "[]" if self.groups is None else compared(self.groups)[1]

    def _ranges(self, first_index: int, end_index: int) -> list[tuple[int, int]]:
        """List the key ranges of a stretch of the source, shard by shard: (exclusive low, inclusive
        high)."""
        lows = [
            self.source.of_shard(shard, first_index - 1)[0]
            for shard in range(self.source.shards.count)
        ]
        return [(low, low + end_index - first_index) for low in lows]


def find_live_claim(
    connection: sqlite3.Connection, keys: tuple[int, int], *, now: int
) -> str | None:
    """Find a task under a live claim with a key in a range: (exclusive low, inclusive high)."""
    found = connection.execute(_HELD, (*keys, now)).fetchone()
    return None if found is None else str(found[0])


_CHUNK = 10_000
"""Indexes copied by one statement; it bounds the rows that SQLite buffers while it copies."""


@dataclass(frozen=True, slots=True)
class _Source:
    """The run that is replayed, and the place of its rows."""

    run: Run
    place: KeyRange


def make_rerun(
    connection: sqlite3.Connection,
    request: RerunRequest,
    answer: Callable[[Rerun], StoredResponse],
    once: IdempotencyScope | None,
) -> StoredResponse:
    """Make the run, unless it exists, and render its answer. Raises as `Runs.rerun` does."""
    earlier = stored_answer(connection, once)
    if earlier is not None:
        return earlier
    view = need_view(connection, request.caller, request.job_id)
    made = find_run(connection, request.run_id)
    if made is None:
        run = need_latest_run(connection, request.caller, request.job_id)
        place = find_place(connection, run.run_id)
        assert place is not None
        source = _Source(run, place)
        _refuse(connection, request, source)
        move_job(connection, view.job, JobStatus.CLOSED, now=request.now)
        if run.stats.total >= request.large_from:
            _plan(connection, request, source, sequence=view.job.run_count + 1)
        else:
            _make(connection, request, source, sequence=view.job.run_count + 1)
        new = find_run(connection, request.run_id)
        assert new is not None
        insert_entries(connection, view.job, new)
        connection.execute(
            "UPDATE jobs SET latest_run_id = ?, run_count = run_count + 1, "
            "updated_at = max(updated_at, ?), version = version + 1 WHERE job_id = ?",
            (request.run_id, request.now, request.job_id),
        )
    elif made.job_id != request.job_id:
        raise ConveyorError(ErrorCode.CONFLICT, "the run exists already, of another job")
    rendered = answer(_describe(connection, request))
    store_answer(connection, once, rendered)
    return rendered


def _refuse(connection: sqlite3.Connection, request: RerunRequest, source: _Source) -> None:
    run = source.run
    if run.status in LIVE_RUN_STATES:
        raise ConveyorError(ErrorCode.RUN_NOT_TERMINAL, f"the latest run is {run.status}")
    if run.ingesting:
        raise ConveyorError(
            ErrorCode.RUN_NOT_TERMINAL, "the tasks of the latest run are still being written"
        )
    if run.stats.total < request.large_from:
        # For a large run, each step of the copying checks the claims of its rows.
        held = find_live_claim(connection, source.place.all, now=request.now)
        if held is not None:
            raise CallInFlight(run.run_id, held)
    partial = request.statuses is not None or request.groups is not None
    if partial and run.created_at < request.window_start:
        raise ConveyorError(
            ErrorCode.PARTIAL_RERUN_WINDOW_EXPIRED, "the latest run is too old for a partial rerun"
        )


def _new_run(
    request: RerunRequest,
    source: _Source,
    sequence: int,
    stats: RunStats,
    ingest: Ingest | None = None,
) -> Run:
    return Run(
        run_id=request.run_id,
        job_id=request.job_id,
        run_sequence=sequence,
        status=RunStatus.RUNNING,
        created_at=request.now,
        updated_at=request.now,
        last_batch_received=True,
        next_index=source.run.next_index,
        stats=stats,
        rerun_of=source.run.run_id,
        ingest=ingest,
        traceparent=request.traceparent,
    )


def _make(
    connection: sqlite3.Connection, request: RerunRequest, source: _Source, *, sequence: int
) -> None:
    run = _new_run(request, source, sequence, RunStats())
    place = insert_run(connection, run, source.place.shards)
    statuses, groups = _choose(connection, request, source)
    copy = RunCopy(source.place, source.run.run_id, place, statuses, groups)
    retried = inherited = 0
    for start in range(0, source.run.next_index, _CHUNK):
        copied = copy.run(connection, first_index=start, end_index=start + _CHUNK, now=request.now)
        retried += copied.retried
        inherited += copied.inherited
    _refuse_empty(RowsCopied(retried, inherited))
    _inherit_groups(connection, source, place, statuses, groups)
    write_counts(connection, place, count_rows(connection, place))
    connection.execute(
        "UPDATE runs SET next_index = ?, inherited = ? WHERE run_no = ?",
        (_end_of_rows(connection, place), inherited, place.run_no),
    )
    connection.execute(
        "INSERT INTO run_sources (run_id, source_run_id) SELECT DISTINCT ?, source_run_id "
        "FROM tasks WHERE task_key > ? AND task_key <= ? AND source_run_id IS NOT NULL",
        (request.run_id, *place.all),
    )


def _plan(
    connection: sqlite3.Connection, request: RerunRequest, source: _Source, *, sequence: int
) -> None:
    """Make the run with the counters that it will have, and pin the runs that it may draw bodies
    from: its source until the rows are copied, and those that the source draws from."""
    statuses, groups = _choose(connection, request, source)
    stats = source.run.stats
    if groups is None:
        fresh = _fresh_failures(statuses, stats)
    else:
        fresh = _failures_of(connection, source, groups)
    stats = _counters(statuses, stats, fresh)
    _refuse_empty(RowsCopied(stats.total - stats.inherited, stats.inherited))
    end = source.run.next_index
    ingest = Ingest(status=IngestStatus.PENDING, end=end, statuses=statuses, groups=groups)
    run = _new_run(request, source, sequence, stats, ingest)
    place = insert_run(connection, run, source.place.shards)
    _inherit_groups(connection, source, place, statuses, groups)
    connection.execute(
        "INSERT INTO run_sources (run_id, source_run_id) "
        "SELECT ?1, ?2 UNION SELECT ?1, source_run_id FROM run_sources WHERE run_id = ?2",
        (request.run_id, source.run.run_id),
    )


def _choose(
    connection: sqlite3.Connection, request: RerunRequest, source: _Source
) -> tuple[frozenset[TaskStatus] | None, GroupFilter | None]:
    """Decide which rows start afresh: by status, and by the groups that the source keeps now."""
    if request.groups is None:
        return request.statuses, None
    kept = kept_counts(connection, source.place.run_no)
    return frozenset({TaskStatus.FAILED}), group_filter(request.groups, list(kept))


def _inherit_groups(
    connection: sqlite3.Connection,
    source: _Source,
    place: KeyRange,
    statuses: frozenset[TaskStatus] | None,
    groups: GroupFilter | None,
) -> None:
    """Begin the groups of the new run with those of the failures that it inherits."""
    if groups is not None:
        copy_groups(connection, source.place.run_no, place.run_no, without=groups.named)
    elif statuses is not None and TaskStatus.FAILED not in statuses:
        copy_groups(connection, source.place.run_no, place.run_no)


def _fresh_failures(statuses: frozenset[TaskStatus] | None, stats: RunStats) -> Counter[str]:
    """Count the failed tasks that start afresh, by reason."""
    return Counter(
        stats.failure_reasons if statuses is None or TaskStatus.FAILED in statuses else {}
    )


def _failures_of(
    connection: sqlite3.Connection, source: _Source, groups: GroupFilter
) -> Counter[str]:
    """Count the failed tasks of some groups of the source, by reason."""
    kept = read_groups(connection, source.run.run_id)
    assert kept is not None
    fresh: Counter[str] = Counter()
    outside = Counter(source.run.stats.failure_reasons)
    for group in kept.groups:
        outside[group.reason] -= group.count
        if group.group_id in groups.named:
            fresh[group.reason] += group.count
    return fresh if groups.outside is None else fresh + outside


def _counters(
    statuses: frozenset[TaskStatus] | None, stats: RunStats, fresh: Counter[str]
) -> RunStats:
    """Derive the counters of the new run from those of the source alone; `fresh` are the failures
    that start afresh. They do not distinguish pending tasks from those left under a claim, so a
    rerun of one kind counts both, until the rows are copied."""
    if statuses is None:
        return RunStats(total=stats.total)
    unfinished = {TaskStatus.PENDING, TaskStatus.PROCESSING} & statuses
    retried = stats.total - stats.completed if unfinished else 0
    retried += stats.successful if TaskStatus.SUCCESSFUL in statuses else 0
    retried += fresh.total()
    successful = 0 if TaskStatus.SUCCESSFUL in statuses else stats.successful
    failed = stats.failed - fresh.total()
    return RunStats(
        total=retried + successful + failed,
        successful=successful,
        failed=failed,
        failure_reasons=dict(Counter(stats.failure_reasons) - fresh),
        inherited=successful + failed,
        shape=stats.shape if successful else ResultShape(),
    )


def _refuse_empty(copied: RowsCopied) -> None:
    if not copied.retried:
        raise ConveyorError(ErrorCode.NO_MATCHING_TASKS, "the latest run has no such task")


def _end_of_rows(connection: sqlite3.Connection, place: KeyRange) -> int:
    """Find the highest index, plus one."""
    last = -1
    for shard in range(place.shards.count):
        (key,) = connection.execute(
            "SELECT max(task_key) FROM tasks WHERE task_key > ? AND task_key <= ?",
            place.of_shard(shard),
        ).fetchone()
        last = max(last, -1 if key is None else key & INDEX_MASK)
    return last + 1


def _describe(connection: sqlite3.Connection, request: RerunRequest) -> Rerun:
    view = need_view(connection, request.caller, request.job_id)
    total, inherited, rerun_of = connection.execute(
        "SELECT total, inherited, rerun_of FROM runs WHERE run_id = ?", (request.run_id,)
    ).fetchone()
    return Rerun(view, rerun_of=rerun_of, retried=total - inherited, inherited=inherited)
