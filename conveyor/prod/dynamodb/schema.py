"""The one table: its keys, its indexes, its time to live. `conveyor admin init` makes it from this
description, and the deployment template is held against it.

The keys of every item, and which index partitions an item is found by.

A task lies beside its job where the job has one shard, and in a partition a shard where it has
more. Everything that is found by a run's id alone goes by way of its place, which never changes.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

from conveyor.domain import ids
from conveyor.domain.shards import Shards
from conveyor.prod.aws.calls import Parameters

PARTITION_KEY = "pk"
SORT_KEY = "sk"
TIME_TO_LIVE = "ttl"
"""Whole seconds since the epoch, after which DynamoDB removes an item by itself, some time."""
BY_OWNER = "gsi1"
"""Jobs of a caller; runs by what is due for them."""
BY_DISPATCH = "gsi2"
"""Runs by when their dispatch changed. Its name tells of them alone: whatever else is looked for by
time lies in partitions of its own here too, file inputs and exports by when they end, notices of
the outbox by when they are due."""

INDEXES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    BY_OWNER: ("gsi1pk", "gsi1sk", ("status", "job_id", "run_id")),
    BY_DISPATCH: (
        "gsi2pk",
        "gsi2sk",
        ("status", "paused", "job_id", "run_id", "priority", "max_inflight", "created_at"),
    ),
}
"""Each index: partition key, sort key, and the attributes carried over. Nothing that a counter's
flush writes is among them, so that counting touches no index."""

ROW_SHAPE = 1
"""The version of the items' shape, in the attribute `shape` of each."""


def description(table: str) -> Parameters:
    """What CreateTable is asked for: billed by request, keys and indexes as above."""
    keys = [PARTITION_KEY, SORT_KEY]
    indexes: list[dict[str, Any]] = []
    for name, (partition, sort, attributes) in INDEXES.items():
        keys += [partition, sort]
        indexes.append(
            {
                "IndexName": name,
                "KeySchema": _schema(partition, sort),
                "Projection": {
                    "ProjectionType": "INCLUDE",
                    "NonKeyAttributes": list(attributes),
                },
            }
        )
    return {
        "TableName": table,
        "BillingMode": "PAY_PER_REQUEST",
        "AttributeDefinitions": [{"AttributeName": key, "AttributeType": "S"} for key in keys],
        "KeySchema": _schema(PARTITION_KEY, SORT_KEY),
        "GlobalSecondaryIndexes": indexes,
    }


def _schema(partition: str, sort: str) -> list[dict[str, str]]:
    return [
        {"AttributeName": partition, "KeyType": "HASH"},
        {"AttributeName": sort, "KeyType": "RANGE"},
    ]


BEGIN = "!"
"""Sorts before every character of an id or a time."""
END = "~"
"""Sorts behind every character of an id or a time."""
SPREAD = 4
"""Index partitions that all runs of one kind are spread over, so that none becomes hot."""


class Key(NamedTuple):
    """Partition key and sort key."""

    pk: str
    sk: str


def job_key(job_id: str) -> Key:
    """A job."""
    return Key(f"Job#{job_id}", "Job")


def run_key(job_id: str, run_sequence: int) -> Key:
    """A run: by its number in the job, so that two makers of one run collide."""
    return Key(f"Job#{job_id}", f"Run#{run_sequence:010}")


def place_key(run_id: str) -> Key:
    """Where a run lies: its job, number, shards. Written with it, never changed."""
    return Key(f"Run#{run_id}", "Place")


def pin_key(job_id: str, source_run_id: str, run_id: str) -> Key:
    """That a run draws bodies, or is still copied, from another of the same job."""
    return Key(f"Job#{job_id}", f"Pin#{source_run_id}#{run_id}")


def intent_key(job_id: str, run_id: str) -> Key:
    """That rows of a run are being written, which itself is written last."""
    return Key(f"Job#{job_id}", f"Intent#{run_id}")


def task_partition(job_id: str, shards: Shards, shard: int) -> str:
    """The partition of a shard's tasks."""
    return f"Job#{job_id}" if shards.count <= 1 else f"Job#{job_id}#TS{shard}"


def task_key(job_id: str, run_id: str, task_id: str, shards: Shards) -> Key:
    """A task, its history with it. Raises ValueError where the text is not a task id."""
    shard = shards.of(task_id, ids.task_index(task_id))
    return Key(task_partition(job_id, shards, shard), task_sort_key(run_id, task_id))


def task_sort_key(run_id: str, task_id: str) -> str:
    """The sort key of a task; of a prefix of task ids, what their sort keys begin with."""
    return f"Task#{run_id}#{task_id}"


def idempotency_key(scope: str) -> Key:
    """An idempotency key."""
    return Key(f"Key#{scope}", "Key")


def input_item_key(input_id: str) -> Key:
    """A slot for a file."""
    return Key(f"Input#{input_id}", "Input")


def export_item_key(export_id: str) -> Key:
    """An export."""
    return Key(f"Export#{export_id}", "Export")


def exported_key(job_id: str, run_id: str, export_id: str) -> Key:
    """That a run has an export: beside its job, where it is found strongly."""
    return Key(f"Job#{job_id}", f"Export#{run_id}#{export_id}")


def notice_key(run_id: str) -> Key:
    """What is owed to who waits for a run's end: by the run's id, and not removed with it."""
    return Key(f"Notice#{run_id}", "Notice")


def permits_key(job_id: str) -> Key:
    """A job's ledger of permits, where DynamoDB keeps it."""
    return Key(f"Permits#{job_id}", "Permits")


SWEEP = Key("Sweep", "Sweep")
"""Who sweeps, and until when."""
FLEET = Key("Fleet", "Fleet")
"""What all processes of a fleet have to agree on."""
DATA_KEY = Key("Fleet", "DataKey")
"""The key that callers' keys are sealed with, encrypted by KMS, where KMS is used."""


def caller_jobs(caller: str) -> str:
    """gsi1: the jobs of a caller, by job id."""
    return f"Caller#{caller}"


def ingesting(run_id: str) -> str:
    """gsi1: runs whose rows are still being written, by run id."""
    return _spread("ingesting", run_id)


def ended(run_id: str) -> str:
    """gsi1: runs that have ended, by run id."""
    return _spread("ended", run_id)


def unsettled(run_id: str) -> str:
    """gsi1: runs whose rows are to be counted once more, by run id."""
    return _spread("unsettled", run_id)


def tombstones(run_id: str) -> str:
    """gsi1: deleted runs that are not purged, by run id."""
    return _spread("deleted", run_id)


INTENTS = "intents"
"""gsi1: rows written without their run, by when that began."""


def active(run_id: str) -> str:
    """gsi2: runs that are running and not paused, by when that changed."""
    return _spread("active", run_id)


def idle(run_id: str) -> str:
    """gsi2: all other runs, by when that changed."""
    return _spread("idle", run_id)


INPUTS = "inputs"
"""gsi2: slots, by when they end."""
EXPORTS = "exports"
"""gsi2: exports, by when they end."""
OUTBOX = "outbox"
"""gsi2: notices, by when they are due."""


def every(kind: str) -> list[str]:
    """All index partitions of one kind: "ingesting", "unsettled", "ended", "deleted", "active" or
    "idle"."""
    return [f"{kind}#{number}" for number in range(SPREAD)]


def by_time(instant: int, tail: str) -> str:
    """A sort key that sorts by an instant in milliseconds, unique by its tail."""
    return f"{max(instant, 0):015}#{tail}"


def _spread(kind: str, run_id: str) -> str:
    # Ids made in the same moment share their beginning: a checksum spreads them all the same.
    return f"{kind}#{zlib.crc32(run_id.encode()) % SPREAD}"
