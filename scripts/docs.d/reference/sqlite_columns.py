"""The meaning of each table and column of SQLite, for docs/reference/columns.md.

The statements of `schema` hold no descriptions. Times are milliseconds since 1970.
"""

from __future__ import annotations

TABLES: dict[str, tuple[str, dict[str, str]]] = {
    "jobs": (
        "one row a job",
        {
            "job_id": "ULID",
            "caller": "keyed hash of the API key that made it",
            "status": "state of the job",
            "created_at": "when it was made",
            "updated_at": "when it last changed",
            "name": "the caller's label",
            "external_id": "the caller's id",
            "metadata": "the caller's own keys, as JSON",
            "params": "scraper params, as JSON",
            "format": "form of the results that the params imply",
            "max_inflight": "most gateway calls at a time",
            "priority": "0 to 9, higher is sooner",
            "max_attempts": "attempts that a task gets",
            "result_ttl_days": "days that a result is kept",
            "task_shard_count": "shards of the rows of its runs",
            "shard_scheme": "how rows go into shards",
            "sealed_key": "the API key, sealed for the worker",
            "latest_run_id": "its newest run that is not deleted",
            "run_count": "runs ever made, from which the next number follows",
            "version": "raised by each change, so that a write knows what it was decided on",
            "callback": "who hears the end of the first run, as JSON; its task token is a secret",
        },
    ),
    "runs": (
        "one row a run, with its counters",
        {
            "run_no": "number of its first shard; a run owns as many in a row as it has shards",
            "run_id": "ULID",
            "job_id": "its job",
            "run_sequence": "its number in the job, from 1",
            "status": "state of the run",
            "created_at": "when it was made",
            "updated_at": "when it last changed",
            "trigger": "what made it: `manual`",
            "paused": "1 while it is paused",
            "last_batch_received": "1 once no task comes any more",
            "next_index": "index of the next task to be added",
            "total": "tasks",
            "successful": "tasks that ended so",
            "failed": "tasks that ended so",
            "failure_reasons": "failed tasks by reason, as JSON",
            "credits": "credits spent, as the gateway reported",
            "cost": "money spent, as the gateway reported",
            "failure_reason": "why the run failed",
            "failure_detail": "the same in a sentence",
            "rerun_of": "the run that it repeats",
            "version": "raised by each change but those of counters",
            "inherited": "rows that came with a body of an earlier run",
            "dispatch_changed_at": "`updated_at` as it was when status or pause last changed; "
            "never goes back",
            "shard_count": "shards of its rows",
            "shard_scheme": "how rows go into shards",
            "ingest": "the plan of its ingestion, as JSON",
            "ingest_next": "checkpoint: every row below this index is written",
            "ingesting": "1 while rows are being written after the answer",
            "swept": "1 once its expired bodies are removed",
            "queue_dropped": "1 once the queue that it left behind is removed",
        },
    ),
    "tasks": (
        "one row a task: what was asked, and where it stands",
        {
            "task_key": "number of the shard, shifted by 35 bits, and the index of the task",
            "state": "0 unfinished (`processing` with a row in `claims`, else `pending`), "
            "1 successful, 2 failed",
            "task_id": "id of the task",
            "created_at": "when it was accepted",
            "updated_at": "when it last changed",
            "attempts": "attempts used up",
            "interruptions": "claims that lapsed",
            "claim_number": "number of its latest claim, which fences off older ones",
            "not_before": "when it may be tried again",
            "source_run_id": "the run that owns its body, where that is an earlier one",
            "spec": "URL, method, body, params and the caller's fields, as JSON",
        },
    ),
    "claims": (
        "one row a task that is claimed",
        {
            "task_key": "the task",
            "claim_number": "which claim this is",
            "claimed_at": "when it was claimed",
            "claimed_until": "when the claim lapses",
            "worker": "who holds it",
        },
    ),
    "histories": (
        "one row a task with a finished attempt",
        {
            "task_key": "the task",
            "events": "attempts and interruptions, as JSON",
            "result": "key, type and size of the body, as JSON",
            "error": "the problem that it failed with, as JSON",
            "failure": "the reason in the roll-up of its run",
        },
    ),
    "idempotency_keys": (
        "one row a key: claimed, or answered",
        {
            "scope": "hash of caller, method, path and key",
            "fingerprint": "hash of the body that came with it",
            "created_id": "id of what the request makes, also for whoever takes it over",
            "lapses_at": "when an unanswered claim ends",
            "expires_at": "when the row goes",
            "status": "status of the answer; absent while unanswered",
            "body": "the answer, byte for byte",
        },
    ),
    "run_sources": (
        "the pins: which runs a run draws bodies from",
        {
            "run_id": "the run that draws",
            "source_run_id": "the run that owns the bodies, which cannot be deleted before it",
        },
    ),
    "job_inputs": (
        "one row a file input",
        {
            "input_id": "ULID",
            "expires_at": "when it goes, and its file",
            "size": "bytes of the uploaded file; absent before",
            "slot": "caller, type and how the file is read, as JSON",
        },
    ),
    "exports": (
        "one row an export",
        {
            "export_id": "ULID",
            "job_id": "its job",
            "run_id": "the run that it holds",
            "format": "zip, jsonl, csv or parquet",
            "status": "state of the export",
            "created_at": "when it was asked for",
            "updated_at": "when it last changed, or was last touched by its maker",
            "expires_at": "when it goes",
            "error": "why it failed",
            "size": "bytes of the file",
        },
    ),
    "sweeps": (
        "one row: until when a sweep is claimed",
        {"one": "always 1", "lapses_at": "when the claim ends"},
    ),
    "notices": (
        "the outbox: one row a run whose end somebody waits for; no foreign key, as a run and "
        "its job may go before",
        {
            "run_id": "the run",
            "job_id": "its job",
            "callback": "who hears it, as JSON; its task token is a secret",
            "due_at": "when to look at it next",
            "leased_until": "until when somebody is telling it",
            "ended_as": "the state that the run ended in; a trigger on `runs.status` sets it",
            "ending": "the message about the end, as JSON, once it is decided",
            "decided_at": "when it was decided",
            "attempts": "tries to tell it that failed",
        },
    ),
}
"""Each table: the meaning of a row, and of each column."""

WRITER, READER = "writer", "reader"

PRAGMAS: tuple[tuple[str, str, str], ...] = (
    ("journal_mode", WRITER, "readers never wait for the writer"),
    ("synchronous", WRITER, "1, NORMAL: a flush at each checkpoint instead of each commit"),
    ("wal_autocheckpoint", WRITER, "pages after which the log is written back, about 8 MB"),
    ("journal_size_limit", WRITER, "bytes to which a log that has grown shrinks again"),
    ("cache_size", WRITER, "bounded memory; a negative number is KiB"),
    ("user_version", WRITER, "the schema's version"),
    ("cache_size", READER, "bounded memory, for each reader"),
    ("query_only", READER, "only the writer writes"),
)
"""The pragmas: name, connection, and reason."""
