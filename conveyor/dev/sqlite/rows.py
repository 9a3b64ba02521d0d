"""The mapping between records and rows, with few steps of the database for many rows.

Each step of a statement releases the interpreter's lock and has to win it back, which a busy event
loop makes slow. So a statement renders a page of task rows as one JSON text, read in one step and
decoded in one call; and one statement writes fifty rows in one step instead of fifty. The numbers
of rows are rounded up and padded with NULL keys, so that few statements need to be prepared.
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from operator import attrgetter
from typing import Any

import msgspec

from conveyor.domain import ids
from conveyor.domain.hosts import Politeness
from conveyor.domain.model import (
    Callback,
    Event,
    Format,
    Ingest,
    IngestStatus,
    Job,
    JobStatus,
    JobView,
    NewTask,
    Problem,
    Run,
    RunFailure,
    RunStats,
    RunStatus,
    Spend,
    StoredBody,
    Task,
    TaskSpec,
)
from conveyor.domain.result_shape import ResultShape
from conveyor.domain.run_events import RunFinished
from conveyor.domain.scheduling import FireRecord, Scheduling
from conveyor.domain.shards import Shards
from conveyor.domain.webhooks import Webhook

MOST_ROWS = 64
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 50, MOST_ROWS)
"""A full batch of claims has a size of its own."""


def rounded(count: int) -> int:
    """Round a number of rows, at most MOST_ROWS, up to one that has a statement."""
    return _SIZES[bisect_left(_SIZES, count)]


class KeyStatement:
    """A statement over a list of keys, which replaces `{keys}` in `sql`."""

    def __init__(self, sql: str) -> None:
        self.sql: Callable[[int], str] = lru_cache(
            lambda size: sql.format(keys=",".join("?" * size))
        )

    def execute(self, connection: sqlite3.Connection, keys: Sequence[object]) -> sqlite3.Cursor:
        """Run it over at most MOST_ROWS keys."""
        size, last = rounded(len(keys)), keys[-1] if keys else None
        return connection.execute(self.sql(size), [*keys, *[last] * (size - len(keys))])


class RowsStatement:
    """A statement that writes rows of `width` values, which replace `{rows}` in `sql`.

    The rows are a VALUES clause with columns named column1 and so on; the statement has to skip
    rows with a NULL in column1. The last values may be left out of all rows where they are NULL: to
    bind a None takes longer than to bind ten numbers.
    """

    def __init__(self, sql: str, *, width: int) -> None:
        def write(size: int, given: int = width) -> str:
            row = f"({','.join(['?'] * given + ['NULL'] * (width - given))})"
            return sql.format(rows="VALUES" + ",".join([row] * size))

        self.sql: Callable[..., str] = lru_cache(write)

    def execute(self, connection: sqlite3.Connection, rows: Sequence[tuple[object, ...]]) -> None:
        """Run it over the rows, MOST_ROWS at a time."""
        for start in range(0, len(rows), MOST_ROWS):
            part = rows[start : start + MOST_ROWS]
            size, given = rounded(len(part)), len(part[0])
            padding = [(None, *(0,) * (given - 1))] * (size - len(part))
            connection.execute(self.sql(size, given), list(chain.from_iterable([*part, *padding])))


INDEX_BITS = 5 * ids.INDEX_LENGTH
INDEX_MASK = (1 << INDEX_BITS) - 1

UNFINISHED, SUCCESSFUL, FAILED = 0, 1, 2
"""`tasks.state`. Unfinished rows are processing where they have a row in `claims`, else pending."""

JOB_COLUMNS = (
    "job_id, caller, status, created_at, updated_at, name, external_id, metadata, params, format, "
    "max_inflight, priority, max_attempts, result_ttl_days, task_shard_count, shard_scheme, "
    "sealed_key, latest_run_id, run_count, version, callback, webhook, scheduling, "
    "webhook_number, politeness"
)
RUN_COLUMNS = (
    "run_id, job_id, run_sequence, status, created_at, updated_at, trigger, paused, "
    "last_batch_received, next_index, total, successful, failed, failure_reasons, credits, cost, "
    "failure_reason, failure_detail, rerun_of, version, ingest, ingest_next, ingesting, inherited, "
    "shape, traceparent"
)
JOB_WIDTH = JOB_COLUMNS.count(",") + 1


def columns_of(table: str, columns: str) -> str:
    """Name columns by their table."""
    return ", ".join(f"{table}.{column}" for column in columns.split(", "))


SELECT_VIEW = f"""
    SELECT {columns_of("jobs", JOB_COLUMNS)}, {columns_of("runs", RUN_COLUMNS)}
    FROM jobs LEFT JOIN runs ON runs.run_id = iif(jobs.status = 'deleted',
        (SELECT run_id FROM runs WHERE job_id = jobs.job_id ORDER BY run_sequence DESC LIMIT 1),
        jobs.latest_run_id)
    AND (jobs.status = 'deleted' OR runs.status <> 'deleted')
"""
"""A deleted job has the newest run that is left of it."""
SELECT_JOB = f"SELECT {JOB_COLUMNS} FROM jobs"
SELECT_RUN = f"SELECT {columns_of('runs', RUN_COLUMNS)} FROM runs"

STATUS = """CASE t.state WHEN 1 THEN 'successful' WHEN 2 THEN 'failed'
    ELSE iif(c.task_key IS NULL, 'pending', 'processing') END"""
"""The status of a row of t(asks), joined with c(laims)."""

TASK_JSON = (
    """printf(
    '{"run_id":"%s","task_id":"%s","index":%d,"status":"%s","created_at":%d,"updated_at":%d,'
    || '"attempts":%d,"interruptions":%d,"claim_number":%d,"claimed_until":%d,"not_before":%d,'
    || '"waiting":%s,"waiting_since":%d,"result":%s,"error":%s,"failure":%s,'
    || '"failure_group":%s,"source_run_id":%s,"spec":%s}',
    ?1, t.task_id, t.task_key & 34359738367, """
    + STATUS
    + """,
    t.created_at, max(t.updated_at, coalesce(c.claimed_at, 0)),
    t.attempts, t.interruptions, coalesce(c.claim_number, t.claim_number), c.claimed_until,
    t.not_before, coalesce('"' || t.waiting || '"', 'null'), t.waiting_since,
    coalesce(h.result, 'null'), coalesce(h.error, 'null'),
    coalesce('"' || h.failure || '"', 'null'), coalesce('"' || t.failure_group || '"', 'null'),
    coalesce('"' || t.source_run_id || '"', 'null'),
    t.spec
)"""
)
"""One task as JSON, of the tables t(asks), c(laims) and h(istories); ?1 is the run_id."""

TASK_EXTRAS = """
    LEFT JOIN claims c ON c.task_key = t.task_key
    LEFT JOIN histories h ON h.task_key = t.task_key
"""

_by_index = attrgetter("index")
_tasks = msgspec.json.Decoder(list[Task])
_events = msgspec.json.Decoder(list[Event])
_texts = msgspec.json.Decoder(dict[str, str])
_counts = msgspec.json.Decoder(dict[str, int])
_shapes = msgspec.json.Decoder(ResultShape)
_ingests = msgspec.json.Decoder(Ingest)
_callbacks = msgspec.json.Decoder(Callback)
_webhooks = msgspec.json.Decoder(Webhook)
_schedulings = msgspec.json.Decoder(Scheduling)
_politeness = msgspec.json.Decoder(Politeness)
_hosts = msgspec.json.Decoder(tuple[str, ...])
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class KeyRange:
    """The keys of the rows of a run.

    A run owns as many consecutive numbers as it has shards. A row's key is the number of its shard,
    then its index. So the rows of a shard lie side by side in submission order, and the rows of a
    run in one range.
    """

    run_no: int
    shards: Shards

    def key(self, task_id: str, index: int) -> int:
        """Compute the key of a task."""
        if self.shards.count == 1:
            return self.run_no << INDEX_BITS | index
        return self.run_no + self.shards.of(task_id, index) << INDEX_BITS | index

    def of_shard(self, shard: int, after: int = -1) -> tuple[int, int]:
        """Compute the key range of a shard's tasks with an index above `after`: (exclusive low,
        inclusive high). It is empty where there is no such shard."""
        if not 0 <= shard < self.shards.count:
            return 0, 0
        first = self.run_no + shard << INDEX_BITS
        return first + after, first + INDEX_MASK

    @property
    def all(self) -> tuple[int, int]:
        """The key range of all tasks of the run: (exclusive low, inclusive high)."""
        first = self.run_no << INDEX_BITS
        return first - 1, (self.run_no + self.shards.count - 1 << INDEX_BITS) + INDEX_MASK


@lru_cache(maxsize=8_192)  # a claim, its renewals and its settlement ask for the same
def index_of(task_id: str) -> int | None:
    """Read the index out of a task id; None where the text is no task id."""
    try:
        return ids.task_index(task_id)
    except ValueError:
        return None


def to_json(
    record: TaskSpec
    | StoredBody
    | Problem
    | Event
    | Ingest
    | Callback
    | Webhook
    | Scheduling
    | FireRecord
    | RunFinished
    | ResultShape
    | Politeness
    | tuple[str, ...]
    | dict[str, Any],
) -> str:
    """Encode a record as the text of a column."""
    return _encoder.encode(record).decode()


def tasks_from(concatenated: str | None) -> list[Task]:
    """Decode comma-joined TASK_JSON, in order; None, as group_concat returns it, is no task."""
    if concatenated is None:
        return []
    tasks = _tasks.decode(f"[{concatenated}]")
    tasks.sort(key=_by_index)  # they come in order; group_concat does not promise it
    return tasks


def events_from(concatenated: str) -> list[Event]:
    """Decode the events of a row of histories."""
    return _events.decode(f"[{concatenated}]")


def insert_job(connection: sqlite3.Connection, job: Job) -> None:
    """Write a new job. Raises sqlite3.IntegrityError where its id is taken."""
    values = (
        job.job_id,
        job.caller,
        job.status,
        job.created_at,
        job.updated_at,
        job.name,
        job.external_id,
        None if job.metadata is None else to_json(job.metadata),
        to_json(job.params),
        job.format,
        job.max_inflight,
        job.priority,
        job.max_attempts,
        job.result_ttl_days,
        job.task_shard_count,
        job.shard_scheme,
        job.sealed_key,
        job.latest_run_id,
        job.run_count,
        job.version,
        None if job.callback is None else to_json(job.callback),
        None if job.webhook is None else to_json(job.webhook),
        None if job.scheduling is None else to_json(job.scheduling),
        job.webhook_number,
        None if job.politeness is None else to_json(job.politeness),
        next_fire(job),
    )
    marks = ",".join("?" * len(values))
    connection.execute(f"INSERT INTO jobs ({JOB_COLUMNS}, fires_at) VALUES ({marks})", values)


def next_fire(job: Job) -> int | None:
    """Return when a scheduled job is to be looked at; None if it is not."""
    if job.scheduling is None or job.status is JobStatus.DELETED:
        return None
    return job.scheduling.due_at


def insert_run(connection: sqlite3.Connection, run: Run, shards: Shards) -> KeyRange:
    """Write a new run; return its place. Raises sqlite3.IntegrityError where its id is taken."""
    stats = run.stats
    ingest = run.ingest
    values = (
        run.run_id,
        run.job_id,
        run.run_sequence,
        run.status,
        run.created_at,
        run.updated_at,
        run.trigger,
        run.paused,
        run.last_batch_received,
        run.next_index,
        stats.total,
        stats.successful,
        stats.failed,
        to_json(stats.failure_reasons),
        stats.spend.credits,
        stats.spend.cost,
        run.failure_reason,
        run.failure_detail,
        run.rerun_of,
        run.version,
        None if ingest is None else to_json(ingest),
        0 if ingest is None else ingest.next_index,
        run.ingesting,
        stats.inherited,
        to_json(stats.shape),
        run.traceparent,
        run.updated_at,
        shards.count,
        shards.scheme,
        run.job_id,
    )
    marks = ",".join("?" * (len(values) - 1))
    cursor = connection.execute(
        f"INSERT INTO runs ({RUN_COLUMNS}, dispatch_changed_at, shard_count, shard_scheme, caller) "
        f"VALUES ({marks}, (SELECT caller FROM jobs WHERE job_id = ?))",
        values,
    )
    assert cursor.lastrowid is not None
    if shards.count > 1:
        connection.execute(
            "UPDATE sqlite_sequence SET seq = ? WHERE name = 'runs'",
            (cursor.lastrowid + shards.count - 1,),
        )
    return KeyRange(cursor.lastrowid, shards)


def politeness_from(text: str | None) -> Politeness | None:
    """Decode the politeness of a job."""
    return None if text is None else _politeness.decode(text)


def hosts_from(text: str) -> tuple[str, ...]:
    """Decode the hosts of a run that have a queue of their own."""
    return () if text == "[]" else _hosts.decode(text)


def job_from(row: tuple[Any, ...]) -> Job:
    """Read a job out of JOB_COLUMNS."""
    return Job(
        job_id=row[0],
        caller=row[1],
        status=JobStatus(row[2]),
        created_at=row[3],
        updated_at=row[4],
        name=row[5],
        external_id=row[6],
        metadata=None if row[7] is None else _texts.decode(row[7]),
        params=_texts.decode(row[8]),
        format=Format(row[9]),
        max_inflight=row[10],
        priority=row[11],
        max_attempts=row[12],
        result_ttl_days=row[13],
        task_shard_count=row[14],
        shard_scheme=row[15],
        sealed_key=row[16],
        latest_run_id=row[17],
        run_count=row[18],
        version=row[19],
        callback=None if row[20] is None else callback_from(row[20]),
        webhook=None if row[21] is None else _webhooks.decode(row[21]),
        scheduling=None if row[22] is None else _schedulings.decode(row[22]),
        webhook_number=row[23],
        politeness=politeness_from(row[24]),
    )


def run_from(row: tuple[Any, ...]) -> Run:
    """Read a run out of RUN_COLUMNS."""
    return Run(
        run_id=row[0],
        job_id=row[1],
        run_sequence=row[2],
        status=RunStatus(row[3]),
        created_at=row[4],
        updated_at=row[5],
        trigger=row[6],
        paused=bool(row[7]),
        last_batch_received=bool(row[8]),
        next_index=row[9],
        stats=RunStats(
            total=row[10],
            successful=row[11],
            failed=row[12],
            failure_reasons=counts_from(row[13]),
            spend=Spend(row[14], row[15]),
            inherited=row[23],
            shape=shape_from(row[24]),
        ),
        failure_reason=None if row[16] is None else RunFailure(row[16]),
        failure_detail=row[17],
        rerun_of=row[18],
        version=row[19],
        ingest=None if row[20] is None else ingest_from(row[20], row[21], row[22]),
        traceparent=row[25],
    )


def ingest_from(text: str, next_index: int, ingesting: int) -> Ingest:
    """Read an ingest out of its three columns: the plan, the checkpoint, and whether it goes on."""
    status = IngestStatus.PENDING if ingesting else IngestStatus.DONE
    return msgspec.structs.replace(_ingests.decode(text), next_index=next_index, status=status)


def view_from(row: tuple[Any, ...]) -> JobView:
    """Read a job and its latest run out of SELECT_VIEW."""
    run = None if row[JOB_WIDTH] is None else run_from(row[JOB_WIDTH:])
    return JobView(job_from(row[:JOB_WIDTH]), run)


def callback_from(text: str) -> Callback:
    """Decode a callback out of its column."""
    return _callbacks.decode(text)


def shape_from(text: str) -> ResultShape:
    """Decode the shape of a run's results out of its column."""
    return _shapes.decode(text)


def counts_from(text: str) -> dict[str, int]:
    """Decode a run's failure reasons out of their column."""
    return _counts.decode(text)


_INSERT = RowsStatement(
    "INSERT INTO tasks (task_key, state, created_at, updated_at, task_id, spec) "
    "SELECT column1, 0, column2, column2, column3, column4 FROM ({rows}) "
    "WHERE column1 IS NOT NULL",
    width=4,
)


def insert_tasks(
    connection: sqlite3.Connection, place: KeyRange, tasks: Iterable[NewTask], *, now: int
) -> None:
    """Write pending rows. Raises sqlite3.IntegrityError where an index is taken."""
    rows = _rows(place, tasks, now)
    while part := list(islice(rows, MOST_ROWS)):
        _INSERT.execute(connection, part)


def _rows(
    place: KeyRange, tasks: Iterable[NewTask], now: int
) -> Iterator[tuple[int, int, str, str]]:
    for task in tasks:
        yield place.key(task.task_id, task.index), now, task.task_id, to_json(task.spec)
