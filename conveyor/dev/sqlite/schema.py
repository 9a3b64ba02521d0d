"""The tables of the SQLite file, and the steps that lead an older file to them.

Comments in the statements describe each table and column, and docs/reference/columns.md repeats
them: a comment behind a table's name or on its first lines is about the table, one behind a column
is about the column, and goes on in the lines of comment below it. Times are milliseconds since
1970.

`tasks`, `claims` and `histories` share one key (see `rows.KeyRange`), so that the rows of a shard
lie side by side in submission order. What changes often is kept apart from what is large: claiming
touches a row of `claims` alone, and a history is written when an attempt has ended.

`user_version` counts the steps that a file has taken; a new file takes all of them.
`application_id` marks a file whose steps are counted from the first release.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from conveyor.domain.errors import ConveyorError, ErrorCode

APPLICATION_ID = int.from_bytes(b"Cnvy")

TABLES = (
    """
    CREATE TABLE jobs ( -- one row a job
        job_id TEXT PRIMARY KEY, -- ULID
        caller TEXT NOT NULL, -- keyed hash of the API key that made it
        status TEXT NOT NULL, -- state of the job
        created_at INTEGER NOT NULL, -- when it was made
        updated_at INTEGER NOT NULL, -- when it last changed
        name TEXT, -- the caller's label
        external_id TEXT, -- the caller's id
        metadata TEXT, -- the caller's own keys, as JSON
        params TEXT NOT NULL, -- scraper params, as JSON
        format TEXT NOT NULL, -- form of the results that the params imply
        max_inflight INTEGER NOT NULL, -- most gateway calls at a time
        priority INTEGER NOT NULL, -- 0 to 9, higher is sooner
        max_attempts INTEGER NOT NULL, -- attempts that a task gets
        result_ttl_days INTEGER NOT NULL, -- days that a result is kept
        task_shard_count INTEGER NOT NULL, -- shards of the rows of its runs
        shard_scheme TEXT NOT NULL, -- how rows go into shards
        sealed_key BLOB NOT NULL, -- the API key, sealed for the worker
        latest_run_id TEXT, -- its newest run that is not deleted
        run_count INTEGER NOT NULL, -- runs ever made, from which the next number follows
        version INTEGER NOT NULL, -- raised by each change, for optimistic locking
        callback TEXT -- whom to notify of the end of the first run, as JSON, with a secret in it
    ) WITHOUT ROWID
    """,
    "CREATE INDEX jobs_by_caller ON jobs (caller, job_id)",
    "CREATE INDEX jobs_by_status ON jobs (caller, status, job_id)",
    """
    CREATE TABLE runs ( -- one row a run, with its counters
        run_no INTEGER PRIMARY KEY AUTOINCREMENT, -- number of its first shard; its other shards
            -- have the numbers that follow
        run_id TEXT NOT NULL UNIQUE, -- ULID
        job_id TEXT NOT NULL, -- its job
        run_sequence INTEGER NOT NULL, -- its number in the job, from 1
        status TEXT NOT NULL, -- state of the run
        created_at INTEGER NOT NULL, -- when it was made
        updated_at INTEGER NOT NULL, -- when it last changed
        trigger TEXT NOT NULL, -- manual or scheduled
        paused INTEGER NOT NULL, -- 1 while it is paused
        last_batch_received INTEGER NOT NULL, -- 1 once no task comes any more
        next_index INTEGER NOT NULL, -- index of the next task to be added
        total INTEGER NOT NULL, -- tasks
        successful INTEGER NOT NULL, -- tasks that ended successful
        failed INTEGER NOT NULL, -- tasks that ended failed
        failure_reasons TEXT NOT NULL, -- failed tasks by reason, as JSON
        credits INTEGER NOT NULL, -- credits spent, as the gateway reported
        cost REAL NOT NULL, -- money spent, as the gateway reported
        failure_reason TEXT, -- why the run failed
        failure_detail TEXT, -- the same in a sentence
        rerun_of TEXT, -- the run that it repeats
        version INTEGER NOT NULL, -- raised by each change but those of counters
        inherited INTEGER NOT NULL DEFAULT 0, -- rows that came with a body of an earlier run
        dispatch_changed_at INTEGER NOT NULL DEFAULT 0, -- `updated_at` as it was when status or
            -- pause last changed; never goes back
        shard_count INTEGER NOT NULL DEFAULT 1, -- shards of its rows
        shard_scheme TEXT NOT NULL DEFAULT 'stripe', -- how rows go into shards
        ingest TEXT, -- the plan of its ingestion, as JSON
        ingest_next INTEGER NOT NULL DEFAULT 0, -- checkpoint: every row below this index is
            -- written
        ingesting INTEGER NOT NULL DEFAULT 0, -- 1 while rows are being written after the answer
        swept INTEGER NOT NULL DEFAULT 0, -- 1 once its expired bodies are removed
        queue_dropped INTEGER NOT NULL DEFAULT 0, -- 1 once the queue that it left behind is
            -- removed
        UNIQUE (job_id, run_sequence)
    )
    """,
    "CREATE INDEX runs_by_dispatch_change ON runs (dispatch_changed_at)",
    "CREATE INDEX runs_by_ingesting ON runs (ingesting) WHERE ingesting",
    "CREATE INDEX runs_by_status ON runs (status)",
    """
    CREATE TABLE tasks ( -- one row a task: what was asked, and where it stands
        task_key INTEGER PRIMARY KEY, -- number of the shard, shifted by 35 bits, and the index
            -- of the task
        state INTEGER NOT NULL, -- 0 unfinished (`processing` with a row in `claims`, else
            -- `pending`), 1 successful, 2 failed
        task_id TEXT NOT NULL, -- id of the task
        created_at INTEGER NOT NULL, -- when it was accepted
        updated_at INTEGER NOT NULL, -- when it last changed
        attempts INTEGER NOT NULL DEFAULT 0, -- attempts used up
        interruptions INTEGER NOT NULL DEFAULT 0, -- claims that lapsed
        claim_number INTEGER NOT NULL DEFAULT 0, -- number of its latest claim, which fences off
            -- older ones
        not_before INTEGER NOT NULL DEFAULT 0, -- when it may be tried again
        source_run_id TEXT, -- the run that owns its body, where that is an earlier one
        spec TEXT NOT NULL -- URL, method, body, params and the caller's fields, as JSON
    )
    """,
    "CREATE INDEX tasks_by_state ON tasks (state)",
    """
    CREATE TABLE claims ( -- one row a task that is claimed
        task_key INTEGER PRIMARY KEY, -- the task
        claim_number INTEGER NOT NULL, -- which claim this is
        claimed_at INTEGER NOT NULL, -- when it was claimed
        claimed_until INTEGER NOT NULL, -- when the claim lapses
        worker TEXT NOT NULL -- the worker that holds it
    )
    """,
    """
    CREATE TABLE histories ( -- one row a task with a finished attempt
        task_key INTEGER PRIMARY KEY, -- the task
        events TEXT NOT NULL, -- attempts and interruptions, as JSON
        result TEXT, -- key, type and size of the body, as JSON
        error TEXT, -- the problem that it failed with, as JSON
        failure TEXT -- the reason in the roll-up of its run
    )
    """,
    """
    CREATE TABLE idempotency_keys ( -- one row a key: claimed, or answered
        scope TEXT PRIMARY KEY, -- hash of caller, method, path and key
        fingerprint BLOB NOT NULL, -- hash of the body of its request
        created_id TEXT NOT NULL, -- id of what the request makes; a repeated request uses
            -- it again
        lapses_at INTEGER NOT NULL, -- when an unanswered claim ends
        expires_at INTEGER NOT NULL, -- when the row goes
        status INTEGER, -- status of the answer; absent while unanswered
        body BLOB -- the answer, byte for byte
    ) WITHOUT ROWID
    """,
    "CREATE INDEX idempotency_keys_by_expiry ON idempotency_keys (expires_at)",
    """
    CREATE TABLE run_sources ( -- the pins: which runs a run draws bodies from
        run_id TEXT NOT NULL, -- the run that draws
        source_run_id TEXT NOT NULL, -- the run that owns the bodies, which cannot be deleted
            -- before it
        PRIMARY KEY (run_id, source_run_id)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX run_sources_by_source ON run_sources (source_run_id)",
    """
    CREATE TABLE job_inputs ( -- one row a file input
        input_id TEXT PRIMARY KEY, -- ULID
        expires_at INTEGER NOT NULL, -- when it goes, and its file
        size INTEGER, -- bytes of the uploaded file; absent before
        slot TEXT NOT NULL -- caller, type and how the file is read, as JSON
    ) WITHOUT ROWID
    """,
    "CREATE INDEX job_inputs_by_expiry ON job_inputs (expires_at)",
    """
    CREATE TABLE exports ( -- one row an export
        export_id TEXT PRIMARY KEY, -- ULID
        job_id TEXT NOT NULL, -- its job
        run_id TEXT NOT NULL, -- the run that it holds
        format TEXT NOT NULL, -- zip, jsonl, csv or parquet
        status TEXT NOT NULL, -- state of the export
        created_at INTEGER NOT NULL, -- when it was asked for
        updated_at INTEGER NOT NULL, -- when it last changed, or was last touched by its maker
        expires_at INTEGER NOT NULL, -- when it goes
        error TEXT, -- why it failed
        size INTEGER -- bytes of the file
    ) WITHOUT ROWID
    """,
    "CREATE INDEX exports_by_expiry ON exports (expires_at)",
    "CREATE INDEX exports_by_run ON exports (run_id)",
    """
    CREATE TABLE sweeps ( -- one row: until when a sweep is claimed
        one INTEGER PRIMARY KEY CHECK (one = 1), -- always 1
        lapses_at INTEGER NOT NULL -- when the claim ends
    )
    """,
    """
    CREATE TABLE notices (
        -- the outbox: one row a run whose end somebody waits for; without a foreign key, because
        -- the run and its job may be deleted first
        run_id TEXT PRIMARY KEY, -- the run
        job_id TEXT NOT NULL, -- its job
        callback TEXT NOT NULL, -- whom to notify of the end, as JSON, with a secret in it
        due_at INTEGER NOT NULL, -- when to look at it next
        leased_until INTEGER NOT NULL DEFAULT 0, -- when the lease of the present notifier ends
        ended_as TEXT, -- the state that the run ended in; a trigger on `runs.status` sets it
        ending TEXT, -- the message about the end, as JSON, once it is decided
        decided_at INTEGER NOT NULL DEFAULT 0, -- when it was decided
        attempts INTEGER NOT NULL DEFAULT 0 -- notifications that failed
    ) WITHOUT ROWID
    """,
    "CREATE INDEX notices_by_due ON notices (due_at)",
    # Whoever ends a run, by whatever statement, makes its notice due in that transaction.
    """
    CREATE TRIGGER notices_of_ended_runs AFTER UPDATE OF status ON runs
    WHEN NEW.status <> OLD.status AND NEW.status NOT IN ('running', 'pending')
    BEGIN
        UPDATE notices SET due_at = NEW.updated_at, ended_as = ifnull(ended_as, NEW.status)
        WHERE run_id = NEW.run_id AND ending IS NULL;
    END
    """,
)

SIGNING_KEYS = (
    """
    CREATE TABLE signing_keys ( -- one row a key that signs the events of a caller
        caller TEXT NOT NULL, -- keyed hash of the API key that made it
        slot TEXT NOT NULL, -- active or candidate
        kid TEXT NOT NULL, -- ULID
        created_at INTEGER NOT NULL, -- when it was made
        sealed BLOB NOT NULL, -- the secret, encrypted
        PRIMARY KEY (caller, slot)
    ) WITHOUT ROWID
    """,
)

WAITS = (
    """
    ALTER TABLE tasks ADD COLUMN waiting TEXT -- why it waits until `not_before`; means nothing
        -- from then on
        DEFAULT NULL
    """,
)
"""SQLite keeps the text of the column as it is written, so it must not end in a comment."""

SECRETS = (
    """
    CREATE TABLE root_secrets ( -- one row a root secret that the jobs here depend on
        number INTEGER PRIMARY KEY, -- the lowest is that of the secret that names callers
        fingerprint TEXT NOT NULL UNIQUE -- digest that tells secrets apart
    )
    """,
)

WAITS_SINCE = (
    """
    ALTER TABLE tasks ADD COLUMN waiting_since INTEGER NOT NULL -- when the waits without an attempt
        -- between them began; 0 outside of any
        DEFAULT 0
    """,
)

EVENTS_AND_SCHEDULES = (
    """
    ALTER TABLE jobs ADD COLUMN webhook TEXT -- where its events go, as JSON
        DEFAULT NULL
    """,
    """
    ALTER TABLE jobs ADD COLUMN scheduling TEXT -- schedule, template and next fire of a scheduled
        -- job, as JSON
        DEFAULT NULL
    """,
    """
    ALTER TABLE jobs ADD COLUMN fires_at INTEGER -- when a scheduled job that is not deleted is
        -- looked at next
        DEFAULT NULL
    """,
    "CREATE INDEX jobs_by_next_fire ON jobs (fires_at) WHERE fires_at IS NOT NULL",
    "CREATE INDEX jobs_scheduled ON jobs (job_id) WHERE scheduling IS NOT NULL",
    "DROP TRIGGER notices_of_ended_runs",
    "DROP INDEX notices_by_due",
    "ALTER TABLE notices RENAME TO earlier_notices",
    """
    CREATE TABLE notices (
        -- the outbox: one row a run and subscriber that waits for its end; without a foreign key,
        -- because the run and its job may be deleted first
        run_id TEXT NOT NULL, -- the run
        subscriber TEXT NOT NULL, -- callback or webhook
        job_id TEXT NOT NULL, -- its job
        callback TEXT, -- whom to notify of the end, as JSON, with a secret in it; absent for a
            -- webhook
        due_at INTEGER NOT NULL, -- when to look at it next
        leased_until INTEGER NOT NULL DEFAULT 0, -- when the lease of the present notifier ends
        ended_as TEXT, -- the state that the run ended in; a trigger on `runs.status` sets it
        ended_at INTEGER NOT NULL DEFAULT 0, -- when the run ended; set by the same trigger
        ending TEXT, -- the message about the end, as JSON, once it is decided
        decided_at INTEGER NOT NULL DEFAULT 0, -- when it was decided
        attempts INTEGER NOT NULL DEFAULT 0, -- notifications that failed
        PRIMARY KEY (run_id, subscriber)
    ) WITHOUT ROWID
    """,
    """
    INSERT INTO notices (run_id, subscriber, job_id, callback, due_at, leased_until, ended_as,
        ending, decided_at, attempts)
    SELECT run_id, 'callback', job_id, callback, due_at, leased_until, ended_as, ending, decided_at,
        attempts
    FROM earlier_notices
    """,
    "DROP TABLE earlier_notices",
    "CREATE INDEX notices_by_due ON notices (due_at)",
    """
    CREATE TRIGGER notices_of_ended_runs AFTER UPDATE OF status ON runs
    WHEN NEW.status <> OLD.status AND NEW.status NOT IN ('running', 'pending')
    BEGIN
        UPDATE notices SET due_at = NEW.updated_at, ended_as = ifnull(ended_as, NEW.status),
            ended_at = iif(ended_at, ended_at, NEW.updated_at)
        WHERE run_id = NEW.run_id AND ending IS NULL;
    END
    """,
    """
    CREATE TABLE deliveries ( -- one row an event that is sent to a webhook
        delivery_id TEXT NOT NULL, -- ULID, the id of the event
        caller TEXT NOT NULL, -- keyed hash of the API key that made the job
        job_id TEXT NOT NULL, -- its job
        status TEXT NOT NULL, -- pending, delivered, failed or dropped
        created_at INTEGER NOT NULL, -- when it was made
        updated_at INTEGER NOT NULL, -- when it last changed
        due_at INTEGER NOT NULL, -- when the next attempt is made; 0 unless it is pending
        leased_until INTEGER NOT NULL, -- when the lease of the attempt under way ends
        version INTEGER NOT NULL, -- raised by each change, for optimistic locking
        record TEXT NOT NULL, -- all of it, as JSON: the event's bytes and its attempts
        PRIMARY KEY (caller, delivery_id)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX deliveries_by_job ON deliveries (job_id, delivery_id)",
    "CREATE INDEX deliveries_by_creation ON deliveries (caller, created_at)",
    "CREATE INDEX deliveries_by_due ON deliveries (due_at) WHERE status = 'pending'",
    "CREATE INDEX deliveries_by_change ON deliveries (updated_at) WHERE status <> 'pending'",
    """
    CREATE TABLE fires ( -- one row a fire of a scheduled job, or some in a row without a run
        job_id TEXT NOT NULL, -- its job
        fire_id TEXT NOT NULL, -- ULID
        noted_at INTEGER NOT NULL, -- when the row last changed
        record TEXT NOT NULL, -- all of it, as JSON
        PRIMARY KEY (job_id, fire_id)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX fires_by_change ON fires (noted_at)",
)

WEBHOOK_NUMBERS = (
    """
    ALTER TABLE jobs ADD COLUMN webhook_number INTEGER NOT NULL -- raised whenever a webhook is set
        -- where there is none
        DEFAULT 0
    """,
    """
    ALTER TABLE notices ADD COLUMN webhook_number INTEGER NOT NULL -- that of the webhook which
        -- waits for the end; 0 for a callback
        DEFAULT 0
    """,
)

GROUPS_AND_SHAPES = (
    """
    CREATE TABLE failure_groups ( -- one row a failure group of a run, written when it begins
        run_no INTEGER NOT NULL, -- number of the run's first shard
        group_id TEXT NOT NULL, -- digest of reason, code, status and kind of detail
        first_at INTEGER NOT NULL, -- when its first task failed
        reason TEXT NOT NULL, -- the reason in the roll-up of its run
        code TEXT NOT NULL, -- code of the problem
        status INTEGER NOT NULL, -- status of the problem
        detail TEXT, -- the whole detail of the first failure
        task_ids TEXT NOT NULL, -- ids of its first tasks, as JSON
        PRIMARY KEY (run_no, group_id)
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE failure_counts ( -- one row a run with failure groups
        run_no INTEGER PRIMARY KEY, -- number of the run's first shard
        counts TEXT NOT NULL -- failed tasks of each group, and when its last one failed, as JSON;
            -- what they lack of the run's `failed` are tasks of no group
    )
    """,
    """
    ALTER TABLE histories ADD COLUMN failure_group TEXT -- the failure group of a failed task
        DEFAULT NULL
    """,
    "CREATE INDEX histories_of_groups ON histories (task_key, failure_group) "
    "WHERE failure_group IS NOT NULL",
    """
    ALTER TABLE runs ADD COLUMN shape TEXT NOT NULL -- bodies by size and by type, as JSON
        DEFAULT '{}'
    """,
    """
    ALTER TABLE runs ADD COLUMN inherited_copied INTEGER NOT NULL -- inherited rows that ingestion
        -- has copied by now
        DEFAULT 0
    """,
    """
    UPDATE runs SET inherited_copied = (SELECT count(*) FROM tasks
        WHERE task_key >= runs.run_no << 35 AND task_key < runs.run_no + runs.shard_count << 35
        AND source_run_id IS NOT NULL)
    WHERE ingesting AND rerun_of IS NOT NULL
    """,
    """
    ALTER TABLE runs ADD COLUMN caller TEXT NOT NULL -- the caller of its job
        DEFAULT ''
    """,
    "UPDATE runs SET caller = coalesce((SELECT caller FROM jobs WHERE jobs.job_id = runs.job_id), "
    "'')",
    "CREATE INDEX runs_by_change ON runs (dispatch_changed_at, run_id) WHERE status <> 'deleted'",
    "CREATE INDEX runs_of_caller_by_change ON runs (caller, dispatch_changed_at, run_id) "
    "WHERE status <> 'deleted'",
    "CREATE INDEX live_runs_by_change ON runs (dispatch_changed_at, run_id) "
    "WHERE status IN ('running', 'pending')",
    "CREATE INDEX live_runs_of_caller_by_change ON runs (caller, dispatch_changed_at, run_id) "
    "WHERE status IN ('running', 'pending')",
)

TRACES = (
    """
    ALTER TABLE runs ADD COLUMN traceparent TEXT -- the trace of the request or fire that made it,
        -- where that was traced
        DEFAULT NULL
    """,
)

ENDED = (
    "CREATE INDEX ended_runs_by_change ON runs (dispatch_changed_at, run_id) "
    "WHERE status NOT IN ('running', 'pending', 'deleted')",
    "CREATE INDEX ended_runs_of_caller_by_change ON runs (caller, dispatch_changed_at, run_id) "
    "WHERE status NOT IN ('running', 'pending', 'deleted')",
)

GROUPS_BESIDE_STATES = (
    """
    ALTER TABLE tasks ADD COLUMN failure_group TEXT -- the failure group of a failed task
        DEFAULT NULL
    """,
    """
    UPDATE tasks SET failure_group = (SELECT failure_group FROM histories
        WHERE histories.task_key = tasks.task_key)
    WHERE state = 2
    """,
    "DROP INDEX histories_of_groups",
    "ALTER TABLE histories DROP COLUMN failure_group",
    "DROP INDEX tasks_by_state",
    "CREATE INDEX tasks_by_state ON tasks (state, task_key, failure_group)",
)
"""A task that fails moves in this index anyhow: an index of groups alone cost each failure 5 %."""

DAILY_TASKS = (
    """
    CREATE TABLE daily_tasks ( -- one row a caller and day, if `CONVEYOR_CALLER_DAILY_TASKS` is set
        day INTEGER NOT NULL, -- days since 1970 in UTC
        caller TEXT NOT NULL, -- keyed hash of the API key
        tasks INTEGER NOT NULL, -- tasks accepted on that day
        PRIMARY KEY (day, caller)
    ) WITHOUT ROWID
    """,
)

POLITENESS = (
    """
    ALTER TABLE jobs ADD COLUMN politeness TEXT -- how its calls treat hosts, as JSON
        DEFAULT NULL
    """,
)

HOSTS = (
    """
    ALTER TABLE runs ADD COLUMN hosts TEXT NOT NULL -- its hosts that have a queue of their own, as
        -- JSON
        DEFAULT '[]'
    """,
)

CLOSED_HOSTS = (
    """
    CREATE TABLE closed_hosts ( -- one row a host that asked for a pause, for the next process
        host TEXT PRIMARY KEY, -- its key in the ledger, of all callers or of one
        closed_until INTEGER NOT NULL, -- when it opens
        lasts INTEGER NOT NULL -- milliseconds from when that was said until then
    ) WITHOUT ROWID
    """,
)

STEPS = (
    TABLES,
    SIGNING_KEYS,
    WAITS,
    SECRETS,
    WAITS_SINCE,
    EVENTS_AND_SCHEDULES,
    WEBHOOK_NUMBERS,
    GROUPS_AND_SHAPES,
    TRACES,
    ENDED,
    GROUPS_BESIDE_STATES,
    DAILY_TASKS,
    POLITENESS,
    HOSTS,
    CLOSED_HOSTS,
)
"""Step n leads from version n to n + 1. Append steps; never change one that was released."""


def check_version(connection: sqlite3.Connection, *, may_be_new: bool = True) -> None:
    """Refuse a file that this version cannot bring to its schema; reads only.

    Raises ConveyorError(unavailable) for a file of a newer schema, for one that was made before the
    first release, and for one without a schema unless it `may_be_new`.
    """
    version, application = _version(connection)
    if version == 0 and not may_be_new:
        raise without_records("empty")
    if version < 0:
        raise ConveyorError(ErrorCode.UNAVAILABLE, "conveyor.db is damaged (its schema's number)")
    if version > 0 and application != APPLICATION_ID:
        raise ConveyorError(
            ErrorCode.UNAVAILABLE,
            "its conveyor.db was made by a development version before 0.1.0 and cannot be read; "
            "move the directory away or name another --data-dir",
        )
    if version > len(STEPS):
        raise ConveyorError(
            ErrorCode.UNAVAILABLE,
            f"the data was written by a newer Conveyor: its schema is {version}, "
            f"this one knows {len(STEPS)}",
        )


def open_unchanged(path: Path) -> sqlite3.Connection:
    """Open a file only to read it. Without a log nothing is made beside it."""
    log = path.with_name(f"{path.name}-wal")
    # With mode=ro alone SQLite makes a log and its index, and leaves them.
    how = "mode=ro" if log.exists() and log.stat().st_size else "immutable=1"
    return sqlite3.connect(f"{path.resolve().as_uri()}?{how}", uri=True)


_CHECKED_WHOLE = 256 * 1_024 * 1_024
"""Bytes of a file that is examined whole, which takes about a second."""


def schema_problem(path: Path, *, may_be_new: bool = True) -> str | None:
    """Say why this version cannot use a file, which may be missing if it `may_be_new`; None if it
    can. Changes nothing."""
    if not path.exists() or not path.stat().st_size:
        log = path.with_name(f"{path.name}-wal")
        is_left = not may_be_new or (log.exists() and log.stat().st_size > 0)
        return without_records("missing or empty").detail if is_left else None
    try:
        with closing(open_unchanged(path)) as reader:
            check_version(reader, may_be_new=may_be_new)
            if _is_damaged(reader):
                return "conveyor.db is damaged"
    except ConveyorError as error:
        return error.detail
    except sqlite3.Error as error:
        return f"conveyor.db cannot be read: {error}"
    return None


def _is_damaged(reader: sqlite3.Connection) -> bool:
    """Look through a whole file, unless that takes long; a large one at its tables' first rows.
    Raises sqlite3.Error."""
    [(pages,)], [(size,)] = reader.execute("PRAGMA page_count"), reader.execute("PRAGMA page_size")
    if pages * size <= _CHECKED_WHOLE:
        return bool(reader.execute("PRAGMA quick_check(1)").fetchone() != ("ok",))
    for (table,) in reader.execute(
        "SELECT name FROM sqlite_schema WHERE type = 'table'"
    ).fetchall():
        reader.execute(f"SELECT * FROM {table} LIMIT 1").fetchone()
    return False


def without_records(state: str) -> ConveyorError:
    """Build the refusal of a directory whose bodies, or log, are left without their database."""
    return ConveyorError(
        ErrorCode.UNAVAILABLE,
        f"its conveyor.db is {state}, but its log or bodies are there, which mean nothing without "
        "it; put conveyor.db back, or move the directory away to begin anew",
    )


def migrate(connection: sqlite3.Connection) -> None:
    """Bring a file that `check_version` let pass to the present schema, each step in a transaction
    of its own."""
    version, _ = _version(connection)
    for number in range(version, len(STEPS)):
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in STEPS[number]:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {number + 1}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def _version(connection: sqlite3.Connection) -> tuple[int, int]:
    """Read how many steps a file has taken, and whose file it is."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    return version, application
