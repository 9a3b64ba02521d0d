"""The meaning of the DynamoDB table, item by item, for docs/reference/items.md.

Times are milliseconds since 1970, except `ttl`, in whole seconds. Attributes that no condition and
no index uses are one JSON text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from conveyor.domain import ids
from conveyor.domain.shards import Shards
from conveyor.ports.outbox import Subscriber
from conveyor.prod.dynamodb import counter_sums, schema
from conveyor.prod.dynamodb.schema import PARTITION_KEY, SORT_KEY, TIME_TO_LIVE, Key


@dataclass(frozen=True, slots=True)
class ItemInfo:
    """One kind of item: its key, its subject, and its attributes."""

    key: Key
    holds: str
    attributes: dict[str, str] = field(default_factory=dict)


def _task_key(shards: int) -> Key:
    # Index 7 lies in shard 7 of 8.
    task_id = next(iter(ids.task_ids("RUN", 7, 1)))
    key = schema.task_key("JOB", "RUN", task_id, Shards(shards))
    return Key(key.pk, key.sk.replace(task_id, "TASK"))


OF_EVERY_ITEM: dict[str, str] = {
    PARTITION_KEY: "partition key",
    SORT_KEY: "sort key",
    "shape": "version of the item's form; items of a higher version are neither read nor written",
    TIME_TO_LIVE: "when DynamoDB removes it by itself, in whole seconds; not on every item",
    "gsi1pk": "partition of the index `gsi1` that finds it",
    "gsi1sk": "its place in that partition",
    "gsi2pk": "partition of the index `gsi2` that finds it",
    "gsi2sk": "its place in that partition: a time in 15 digits, and an id, that of a run also by "
    "its caller, and by `#more` if workers need more of it than the index has",
}

_PLACE = {
    "job_id": "the job",
    "run_sequence": "the run's number in it",
    "shard_count": "shards of the run's rows",
    "shard_scheme": "assignment of rows to shards",
}

_ENTRY = {
    "run_id": "the run",
    "job_id": "its job",
    "due_at": "when to look at it next",
    "leased_until": "end of the lease of the process that delivers it",
    "leased_by": "token of the call that leased it; absent without a lease",
    "ended_as": "the state that the run ended in, set when the end made it due",
    "ended_at": "when the run ended, set when the end made it due",
    "attempts": "failed attempts to deliver it",
}

_DELIVERY_MARK = {
    "caller": "keyed hash of the API key that made the job",
    "created_at": "when the delivery was made",
}

ITEMS: dict[str, ItemInfo] = {
    "job": ItemInfo(
        schema.job_key("JOB"),
        "a job",
        {
            "job": "the whole of it, as JSON",
            "job_id": "ULID",
            "caller": "keyed hash of the API key that made it",
            "status": "state of the job",
            "version": "raised by each change",
            "latest_run_sequence": "number of its newest run that is not deleted; 0 without one",
        },
    ),
    "run": ItemInfo(
        schema.run_key("JOB", 1),
        "a run by its number in the job, in 10 digits, with the base of its counters",
        {
            "run_id": "ULID",
            **_PLACE,
            "caller": "the job's",
            "priority": "the job's",
            "max_inflight": "the job's",
            "result_ttl_days": "the job's",
            "status": "state of the run",
            "created_at": "when it was made",
            "updated_at": "when it last changed; of a tombstone, when it was last touched",
            "counted_at": "when the checkpoint of its ingestion last moved",
            "trigger": "what made it: `manual`",
            "paused": "whether it is paused",
            "last_batch_received": "whether no further task can be added",
            "next_index": "index of the next task to be added",
            "version": "raised by each change; counting leaves the row alone",
            "moved_by": "token of the call that made the last change",
            "inherited": "rows that were taken over from an earlier run, or will be",
            "counter_parts": "partitions over which the items of its counters are spread",
            "counter_epoch": "raised by each recount; items of an earlier epoch do not count",
            "carried": "whether the base took over the sum of the epoch before",
            "folds": "how often items have moved into the base",
            "recounting": "token of the recount that closes the items; absent without one",
            "counted": "once it has ended: what all items hold, as JSON",
            "sums": "how often that was written",
            "reserved": "tasks by first index: indexes given out, rows not counted yet",
            "given_up": "tasks by first index: rows that will not be counted",
            "queue_generation": "number of its present queue",
            "queue_moved_by": "token of the call that moved that number",
            "hosts": "its hosts that have a queue of their own; absent without one",
            "host_queues": "by number of the host: the number of its present queue, and the token "
            "of the call that moved it; there if `hosts` is",
            "ingesting": "whether rows are being written after the answer",
            "ingest": "the plan of its ingestion, as JSON",
            "ingest_next": "checkpoint: every row below this index is written",
            "ingest_by": "token of the call that moved the checkpoint",
            "planned": "counters that a large rerun began with, as JSON, until its rows are copied",
            "copied": "counters of the rows that it has copied so far, as JSON, likewise",
            "recopied": "whether there may be rows that `copied` lacks",
            "dispatch_changed_at": "when status or pause last changed",
            "ended_at": "when it ended",
            "swept": "whether its expired bodies are removed",
            "queue_dropped": "whether the queue that it left behind is removed",
            "unsettled": "whether its rows must be counted once more",
            "calls_back": "whether an outbox entry of a callback waits for its end",
            "notifies": "whether an outbox entry of a webhook waits for its end",
            "rerun_of": "the run that it repeats",
            "politeness": "the job's, as JSON; absent if it has none",
            "traceparent": "the trace of the request or fire that made it, where that was traced",
            "failure_reason": "why the run failed",
            "failure_detail": "the same in a sentence",
            "total": "tasks",
            "successful": "tasks of the base that ended in this state",
            "failed": "tasks of the base that ended in this state",
            "credits": "credits spent, as the gateway reported",
            "cost": "money spent, as the gateway reported",
            "failed_REASON": "failed tasks of each reason of the roll-up",
            "failure_groups": "by group: failed tasks, and the instant of the one counted last; "
            "absent without one",
            "size_CLASS": "bodies of each size class, from 0 to 7; absent without one",
            "types": "bodies by media type; absent without one",
        },
    ),
    "place": ItemInfo(
        schema.place_key("RUN"),
        "the place of a run, found by its id alone; never changed",
        _PLACE,
    ),
    "counters of a process": ItemInfo(
        counter_sums.process_item_key("RUN", 1, 0, "PROCESS"),
        "what a process has counted in an epoch of a run, by the number of the epoch in 10 digits; "
        "gone with the run",
        {
            "seq": "number of the write, which only grows",
            "counts": "counters, failure groups and shape, as JSON",
            "closed": "set once it takes no more values",
            "folded": "number of the move that took its values into the base; absent before",
        },
    ),
    "failure group": ItemInfo(
        schema.failure_group_key("RUN", "GROUP"),
        "the first failure of a group of the run, written before the run counts the group; gone "
        "with the run",
        {
            "reason": "the reason in the roll-up of the run",
            "code": "code of the problem",
            "status": "status of the problem",
            "detail": "the whole detail; absent if the problem has none",
            "first_at": "when it failed",
            "task_ids": "ids of the first three tasks",
        },
    ),
    "task of a job in one shard": ItemInfo(
        _task_key(1),
        "a task with its history",
        {
            "task_id": "id of the task",
            "spec": "URL, method, body, params and the caller's fields, as JSON",
            "status": "state of the task",
            "created_at": "when it was accepted",
            "updated_at": "when it last changed",
            "attempts": "attempts used up",
            "interruptions": "claims that lapsed",
            "claim_number": "number of its latest claim, which fences off older ones",
            "claimed_at": "when it was claimed",
            "claimed_until": "when the claim lapses",
            "holder": "the worker that holds it; absent if unclaimed",
            "not_before": "when it may be tried again",
            "waiting": "why it waits until then; means nothing from then on; absent if it never "
            "waited",
            "waiting_since": "when the waits without an attempt between them began; 0 outside of "
            "any; absent if it never waited",
            "moved_by": "token of the call that wrote it last",
            "events": "attempts and interruptions, JSON texts, each with `by`, the token of the "
            "call that wrote it",
            "shed_spend": "spend of the events that had no room any more, as JSON; absent if none",
            "result": "key, type and size of the body, as JSON",
            "error": "the problem of the failure, as JSON",
            "failure": "the reason in the roll-up of its run",
            "failure_group": "id of its failure group; absent if it failed under a version without",
            "source_run_id": "the run that owns its body, where that is an earlier one",
        },
    ),
    "task of a job in more shards": ItemInfo(
        _task_key(8), "the same, in the partition of its shard"
    ),
    "pin": ItemInfo(
        schema.pin_key("JOB", "SOURCE", "RUN"),
        "exists while a run takes bodies, or is still copied, from another one",
    ),
    "intent": ItemInfo(
        schema.intent_key("JOB", "RUN"),
        "exists while rows are being written whose run is written last",
        {
            **_PLACE,
            "run_id": "the run to be made",
            "rerun_of": "of a rerun: the run that it repeats",
            "holder": "of a rerun: the process that makes it",
            "abandoned": "set once the sweeper has taken it, so that the run can no longer be made",
        },
    ),
    "idempotency key": ItemInfo(
        schema.idempotency_key("SCOPE"),
        "a key, claimed or answered",
        {
            "fingerprint": "hash of the body that came with it",
            "created_id": "id of the thing to make, also for a request that takes the key over",
            "claimed_by": "token of the call that claimed it",
            "lapses_at": "when an unanswered claim ends",
            "expires_at": "when the answer is removed",
            "answer_status": "status of the answer",
            "answer_body": "the answer, byte for byte",
            "ttl": "the end of the answer",
        },
    ),
    "file input": ItemInfo(
        schema.input_item_key("INPUT"),
        "a file input",
        {
            "slot": "caller, type and the way to read the file, as JSON",
            "size": "bytes of the uploaded file",
            "ttl": "a day after its end",
        },
    ),
    "export": ItemInfo(
        schema.export_item_key("EXPORT"),
        "an export",
        {
            "export": "the whole of it, as JSON",
            "job_id": "its job",
            "run_id": "the run that it holds",
            "status": "state of the export",
            "updated_at": "when it last changed, or was last touched by its maker",
            "ttl": "a day after its end, as its mark has",
        },
    ),
    "mark of an export": ItemInfo(
        schema.export_mark_key("JOB", "RUN", "EXPORT"),
        "exists while a run has an export; read strongly when the run is removed, as an index may "
        "not know it yet",
    ),
    "outbox entry of a callback": ItemInfo(
        schema.notice_key("RUN", Subscriber.CALLBACK),
        "the callback owed at a run's end; not removed with the run",
        {
            "callback": "who is called back, as JSON; its task token is a secret",
            **_ENTRY,
            "ending": "the event of the run's end, as JSON, once it is decided",
            "decided_at": "when it was decided",
        },
    ),
    "outbox entry of a webhook": ItemInfo(
        schema.notice_key("RUN", Subscriber.WEBHOOK),
        "the event owed at a run's end, until it is a delivery; not removed with the run",
        {
            **_ENTRY,
            "webhook_number": "that of the job's webhook which waits for the end; grows whenever "
            "one is set where there is none",
        },
    ),
    "delivery": ItemInfo(
        schema.delivery_key("CALLER", "DELIVERY"),
        "an event on its way to a receiver, and its attempts",
        {
            "delivery": "the whole of it, as JSON",
            "job_id": "the job, `test` for an event that a caller asked for",
            "run_id": "the run",
            "status": "state of the delivery",
            "created_at": "when it was made",
            "updated_at": "when it last changed",
            "version": "raised by each change",
        },
    ),
    "mark of a delivery": ItemInfo(
        schema.delivery_mark_key("JOB", "DELIVERY"),
        "exists while a job has a delivery; read strongly for lists, and when the job is removed",
        _DELIVERY_MARK,
    ),
    "mark of a late delivery": ItemInfo(
        schema.late_delivery_key("CALLER", "DELIVERY"),
        "exists while there is a delivery that was made more than an hour after its run's end, so "
        "that a list from an instant on finds it",
        _DELIVERY_MARK,
    ),
    "fire": ItemInfo(
        schema.fire_key("JOB", "FIRE"),
        "a row of a scheduled job's fires: one fire, or several in a row that made no run",
        {
            "fire": "the whole of it, as JSON",
            "ttl": "`CONVEYOR_FIRE_RETENTION_DAYS` after its last change",
        },
    ),
    "daily tasks": ItemInfo(
        schema.daily_tasks_key("CALLER", 20_423),
        "what a caller had accepted on a day, if `CONVEYOR_CALLER_DAILY_TASKS` is set",
        {
            "tasks": "tasks accepted",
            "ttl": "two days after the end of the day",
        },
    ),
    "permits": ItemInfo(
        schema.permits_key("JOB"),
        "the ledger of a job, if `CONVEYOR_LEDGER` is `dynamodb`",
        {
            "entries": "by holder: `count`, `sequence`, `wants`, `lease` in ms, `stamp`",
            "generation": "stamp of the write that added permits last",
            "ttl": "a day after the last write",
        },
    ),
    "worker": ItemInfo(
        schema.worker_key("WORKER"),
        "what a worker said last of itself and its lanes, if there is no Redis",
        {
            "report": "a `WorkerReport`, as MessagePack",
            "ends_at": "when it counts no more",
            "ttl": "the same",
        },
    ),
    "sweep": ItemInfo(
        schema.SWEEP,
        "the claim of the sweep",
        {"lapses_at": "when the claim ends", "claimed_by": "token of the call that made it"},
    ),
    "fleet": ItemInfo(
        schema.FLEET,
        "settings that all processes of the fleet must share",
        {
            "ledger": "where permits are kept",
            "bucket_name": "where bodies are kept",
            "secrets": "fingerprints of the root secrets, newest first",
            "beats": "confirmations of these settings by workers",
            "paused_at": "when an operator ordered that nothing new starts, if so",
        },
    ),
    "data key": ItemInfo(
        schema.DATA_KEY,
        "the key that callers' keys are encrypted with",
        {"kms_key": "the key of KMS", "sealed": "the data key, encrypted by KMS"},
    ),
}
"""Every kind of item, by name."""

FOUND_BY: dict[str, dict[str, str]] = {
    "gsi1": {
        schema.caller_jobs("CALLER"): "regular jobs of a caller, by job id",
        schema.caller_schedules("CALLER"): "scheduled jobs of a caller, by job id",
        "ingesting#N": "runs whose rows are still being written, by run id",
        "unsettled#N": "runs whose rows must be counted once more, by run id",
        "aging#N": "runs that have ended, by the time of the next look at them",
        "aged#N": "ended runs without bodies, by the time at which their results expired",
        "ended#N": "runs that ended before versions kept them by time, by run id",
        "deleted#N": "deleted runs that are not purged, by run id",
        "intents#N": "rows written without their run, by the time that began",
        schema.UNSPREAD_INTENTS: "the same, of versions before, which spread them not",
    },
    "gsi2": {
        "active#N": "runs that are running and not paused, by the time of that change",
        "idle#N": "all other runs, by the time of that change",
        schema.INPUTS: "file inputs, by their end",
        schema.EXPORTS: "exports, by their end",
        schema.OUTBOX: "outbox entries, by the time they are due",
        schema.DELIVERIES: "pending deliveries, by the time they are due",
        schema.ENDED_DELIVERIES: "all other deliveries, by their last change",
        "schedules#N": "scheduled jobs that are not deleted, by the time they are due, last "
        "those that fire no more",
    },
}
"""The partitions of each index. N is the CRC-32 of the id, of the job for schedules and else of the
run, modulo SPREAD, so that no partition becomes hot."""
