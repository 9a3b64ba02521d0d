"""The tables, and the steps by which an older file becomes a present one.

`user_version` counts the steps taken. A new file takes all of them, so the steps are the schema.

`tasks`, `claims` and `histories` share one key (see `rows.KeyRange`), so that the rows of a shard
lie side by side in submission order; a run owns as many consecutive numbers as it has shards. What
changes often is kept apart from what is large: claiming touches a row of `claims` alone, and a
history is written when an attempt has ended.
"""

from __future__ import annotations

import sqlite3

from conveyor.domain.errors import ConveyorError, ErrorCode

TABLES = (
    """
    CREATE TABLE jobs (
        job_id TEXT PRIMARY KEY,
        caller TEXT NOT NULL,
        status TEXT NOT NULL,
        created_at INTEGER NOT NULL,
        updated_at INTEGER NOT NULL,
        name TEXT,
        external_id TEXT,
        metadata TEXT,
        params TEXT NOT NULL,
        format TEXT NOT NULL,
        max_inflight INTEGER NOT NULL,
        priority INTEGER NOT NULL,
        max_attempts INTEGER NOT NULL,
        result_ttl_days INTEGER NOT NULL,
        task_shard_count INTEGER NOT NULL,
        shard_scheme TEXT NOT NULL,
        sealed_key BLOB NOT NULL,
        latest_run_id TEXT,
        run_count INTEGER NOT NULL,
        version INTEGER NOT NULL
    ) WITHOUT ROWID
    """,
    "CREATE INDEX jobs_by_caller ON jobs (caller, job_id)",
    "CREATE INDEX jobs_by_status ON jobs (caller, status, job_id)",
    """
    CREATE TABLE runs (
        run_no INTEGER PRIMARY KEY AUTOINCREMENT,
        run_id TEXT NOT NULL UNIQUE,
        job_id TEXT NOT NULL,
        run_sequence INTEGER NOT NULL,
        status TEXT NOT NULL,
        created_at INTEGER NOT NULL,
        updated_at INTEGER NOT NULL,
        trigger TEXT NOT NULL,
        paused INTEGER NOT NULL,
        last_batch_received INTEGER NOT NULL,
        next_index INTEGER NOT NULL,
        total INTEGER NOT NULL,
        successful INTEGER NOT NULL,
        failed INTEGER NOT NULL,
        failure_reasons TEXT NOT NULL,
        credits INTEGER NOT NULL,
        cost REAL NOT NULL,
        failure_reason TEXT,
        failure_detail TEXT,
        rerun_of TEXT,
        version INTEGER NOT NULL,
        inherited INTEGER NOT NULL DEFAULT 0,
        UNIQUE (job_id, run_sequence)
    )
    """,
    "CREATE INDEX runs_by_status ON runs (status)",
    """
    CREATE TABLE tasks (
        task_key INTEGER PRIMARY KEY,
        state INTEGER NOT NULL,
        task_id TEXT NOT NULL,
        created_at INTEGER NOT NULL,
        updated_at INTEGER NOT NULL,
        attempts INTEGER NOT NULL DEFAULT 0,
        interruptions INTEGER NOT NULL DEFAULT 0,
        claim_number INTEGER NOT NULL DEFAULT 0,
        not_before INTEGER NOT NULL DEFAULT 0,
        source_run_id TEXT,
        spec TEXT NOT NULL
    )
    """,
    "CREATE INDEX tasks_by_state ON tasks (state)",
    """
    CREATE TABLE claims (
        task_key INTEGER PRIMARY KEY,
        claim_number INTEGER NOT NULL,
        claimed_at INTEGER NOT NULL,
        claimed_until INTEGER NOT NULL,
        worker TEXT NOT NULL
    )
    """,
    """
    CREATE TABLE histories (
        task_key INTEGER PRIMARY KEY,
        events TEXT NOT NULL,
        result TEXT,
        error TEXT,
        failure TEXT
    )
    """,
    """
    CREATE TABLE idempotency_keys (
        scope TEXT PRIMARY KEY,
        fingerprint BLOB NOT NULL,
        created_id TEXT NOT NULL,
        lapses_at INTEGER NOT NULL,
        expires_at INTEGER NOT NULL,
        status INTEGER,
        body BLOB
    ) WITHOUT ROWID
    """,
    "CREATE INDEX idempotency_keys_by_expiry ON idempotency_keys (expires_at)",
)

PINS = (
    """
    CREATE TABLE run_sources (
        run_id TEXT NOT NULL,
        source_run_id TEXT NOT NULL,
        PRIMARY KEY (run_id, source_run_id)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX run_sources_by_source ON run_sources (source_run_id)",
    """
    INSERT INTO run_sources (run_id, source_run_id)
    SELECT DISTINCT runs.run_id, tasks.source_run_id
    FROM tasks JOIN runs ON runs.run_no = tasks.task_key >> 35
    WHERE tasks.source_run_id IS NOT NULL
    """,
)

DISPATCH_CHANGES = (
    "ALTER TABLE runs ADD COLUMN dispatch_changed_at INTEGER NOT NULL DEFAULT 0",
    "UPDATE runs SET dispatch_changed_at = updated_at",
    "CREATE INDEX runs_by_dispatch_change ON runs (dispatch_changed_at)",
)

LARGE_RUNS = (
    "ALTER TABLE runs ADD COLUMN shard_count INTEGER NOT NULL DEFAULT 1",
    "ALTER TABLE runs ADD COLUMN shard_scheme TEXT NOT NULL DEFAULT 'stripe'",
    "ALTER TABLE runs ADD COLUMN ingest TEXT",
    "ALTER TABLE runs ADD COLUMN ingest_next INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE runs ADD COLUMN ingesting INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE runs ADD COLUMN swept INTEGER NOT NULL DEFAULT 0",
    "CREATE INDEX runs_by_ingesting ON runs (ingesting) WHERE ingesting",
    """
    CREATE TABLE job_inputs (
        input_id TEXT PRIMARY KEY,
        expires_at INTEGER NOT NULL,
        size INTEGER,
        slot TEXT NOT NULL
    ) WITHOUT ROWID
    """,
    "CREATE INDEX job_inputs_by_expiry ON job_inputs (expires_at)",
    """
    CREATE TABLE exports (
        export_id TEXT PRIMARY KEY,
        job_id TEXT NOT NULL,
        run_id TEXT NOT NULL,
        format TEXT NOT NULL,
        status TEXT NOT NULL,
        created_at INTEGER NOT NULL,
        updated_at INTEGER NOT NULL,
        expires_at INTEGER NOT NULL,
        error TEXT,
        size INTEGER
    ) WITHOUT ROWID
    """,
    "CREATE INDEX exports_by_run ON exports (run_id)",
    "CREATE INDEX exports_by_expiry ON exports (expires_at)",
    """
    CREATE TABLE sweeps (
        one INTEGER PRIMARY KEY CHECK (one = 1),
        lapses_at INTEGER NOT NULL
    )
    """,
)

NOTICES = (
    "ALTER TABLE jobs ADD COLUMN callback TEXT",
    """
    CREATE TABLE notices (
        run_id TEXT PRIMARY KEY,
        job_id TEXT NOT NULL,
        callback TEXT NOT NULL,
        due_at INTEGER NOT NULL,
        leased_until INTEGER NOT NULL DEFAULT 0,
        ended_as TEXT,
        ending TEXT,
        decided_at INTEGER NOT NULL DEFAULT 0,
        attempts INTEGER NOT NULL DEFAULT 0
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

DROPPED_QUEUES = ("ALTER TABLE runs ADD COLUMN queue_dropped INTEGER NOT NULL DEFAULT 0",)

STEPS = (TABLES, PINS, DISPATCH_CHANGES, LARGE_RUNS, NOTICES, DROPPED_QUEUES)
"""What leads from version n to n + 1. Steps are added at the end and never changed."""


def migrate(connection: sqlite3.Connection) -> None:
    """Bring a file to the present schema, each step a transaction of its own.

    Raises ConveyorError(unavailable) for a file of a newer schema, which stays as it is.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(STEPS):
        raise ConveyorError(
            ErrorCode.UNAVAILABLE,
            f"the data was written by a newer Conveyor: its schema is {version}, "
            f"this one knows {len(STEPS)}",
        )
    for number in range(version, len(STEPS)):
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in STEPS[number]:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number + 1}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
