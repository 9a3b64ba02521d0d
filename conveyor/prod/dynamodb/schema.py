"""The schema of the one table: its keys, its two indexes and its time to live.

`conveyor admin init` creates the table from `table_parameters`; a test compares the deployment
template with it. The functions below build the key of every item, and the partitions of the indexes
that find it. A task of a job with one shard lies in the job's partition, else in the partition of
its shard. Whatever is looked up by a run's id alone goes through the run's place item, which never
changes.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

from conveyor.domain import ids
from conveyor.domain.shards import Shards
from conveyor.ports.outbox import Subscriber
from conveyor.prod.aws.calls import Parameters

PARTITION_KEY = "pk"
SORT_KEY = "sk"
TIME_TO_LIVE = "ttl"
"""Whole seconds since the epoch, after which DynamoDB removes an item by itself, with a delay."""
BY_OWNER = "gsi1"
"""Finds jobs of a caller, and runs by the work that is due for them."""
BY_DISPATCH = "gsi2"
"""Finds runs by the time of their last change of status or pause. Partitions of their own in this
index also find file inputs and exports by their end, outbox entries by their due time,
deliveries by their due time or their last change, and scheduled jobs by their due time."""

INDEXES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    BY_OWNER: ("gsi1pk", "gsi1sk", ("status", "job_id", "run_id")),
    BY_DISPATCH: (
        "gsi2pk",
        "gsi2sk",
        ("status", "paused", "job_id", "run_id", "priority", "max_inflight", "created_at"),
    ),
}
"""Partition key, sort key and projected attributes by index. Counting writes none of these
attributes, so it never updates an index."""

ROW_SHAPE = 1
"""The version of the items' form, in the attribute `shape` of each."""
TEMPLATE_SHAPE = 2
"""The shape of a run's row while its rows are being written from a template. Versions without
schedules would write other rows, so they are to leave the run alone until then."""
GROUPS_SHAPE = 3
"""The shape of a rerun's row while its rows are being copied, if failed rows are chosen by their
group or taken over with it. Versions without failure groups would choose others, and count the
groups wrong, so they are to leave the run alone until then."""
TABLE_SHAPE = 4
"""The shape of the item with the settings of the fleet. Versions that counted in the row of a run
refuse to start beside those that count in items of their own, and to go on."""
KNOWN_SHAPE = 4
"""The highest shape that this version knows."""


def table_parameters(table: str) -> Parameters:
    """Return the parameters of CreateTable: billed by request, with the keys and indexes above."""
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
"""Sorts after every character of an id or a time."""
SPREAD = 4
"""Index partitions per kind of run, so that none becomes hot."""


class Key(NamedTuple):
    """Partition key and sort key."""

    pk: str
    sk: str


def job_key(job_id: str) -> Key:
    """Key of a job."""
    return Key(f"Job#{job_id}", "Job")


def run_key(job_id: str, run_sequence: int) -> Key:
    """Key of a run, by its number in the job, so that two writers of the same run collide."""
    return Key(f"Job#{job_id}", f"Run#{run_sequence:010}")


def place_key(run_id: str) -> Key:
    """Key of a run's place item: its job, number and shards. Written with the run, never
    changed."""
    return Key(f"Run#{run_id}", "Place")


def failure_group_key(run_id: str, group_id: str) -> Key:
    """Key of the item of a run's failure group, beside the run's place, which names the run for
    ever; with an empty id, the prefix of their sort keys."""
    return Key(f"Run#{run_id}", f"Failure#{group_id}")


def pin_key(job_id: str, source_run_id: str, run_id: str) -> Key:
    """Key of a pin: the run draws bodies, or is still copied, from another run of its job."""
    return Key(f"Job#{job_id}", f"Pin#{source_run_id}#{run_id}")


def intent_key(job_id: str, run_id: str) -> Key:
    """Key of an intent: a call writes rows of a run, and the run itself last."""
    return Key(f"Job#{job_id}", f"Intent#{run_id}")


def task_partition(job_id: str, shards: Shards, shard: int) -> str:
    """Partition of a shard's tasks."""
    return f"Job#{job_id}" if shards.count <= 1 else f"Job#{job_id}#TS{shard}"


def task_key(job_id: str, run_id: str, task_id: str, shards: Shards) -> Key:
    """Key of a task with its history. Raises ValueError if the text is not a task id."""
    shard = shards.of(task_id, ids.task_index(task_id))
    return Key(task_partition(job_id, shards, shard), task_sort_key(run_id, task_id))


def task_sort_key(run_id: str, task_id: str) -> str:
    """Sort key of a task; for a prefix of task ids, the prefix of their sort keys."""
    return f"Task#{run_id}#{task_id}"


def idempotency_key(scope: str) -> Key:
    """Key of an idempotency key."""
    return Key(f"Key#{scope}", "Key")


def daily_tasks_key(caller: str, day: int) -> Key:
    """Key of the count of tasks that a caller had accepted on a day, in days since 1970."""
    return Key(f"Daily#{caller}", f"Day#{day}")


def input_item_key(input_id: str) -> Key:
    """Key of a file input."""
    return Key(f"Input#{input_id}", "Input")


def export_item_key(export_id: str) -> Key:
    """Key of an export."""
    return Key(f"Export#{export_id}", "Export")


def export_mark_key(job_id: str, run_id: str, export_id: str) -> Key:
    """Key of an export's mark beside its job, where a strong read finds all exports of a run."""
    return Key(f"Job#{job_id}", f"Export#{run_id}#{export_id}")


def fire_key(job_id: str, fire_id: str) -> Key:
    """Key of a row of a scheduled job's fires; with an empty id, the prefix of their sort keys."""
    return Key(f"Job#{job_id}", f"Fire#{fire_id}")


def notice_key(run_id: str, subscriber: Subscriber) -> Key:
    """Key of a run's outbox entry for a subscriber: by the run's id, and not removed with it."""
    return Key(f"Notice#{run_id}", _NOTICE_SORT_KEYS[subscriber])


_NOTICE_SORT_KEYS = {Subscriber.CALLBACK: "Notice", Subscriber.WEBHOOK: "Webhook"}


def signing_key(caller: str) -> Key:
    """Key of a caller's signing keys, both slots in one item."""
    return Key(f"Signing#{caller}", "Keys")


def delivery_key(caller: str, delivery_id: str) -> Key:
    """Key of a delivery."""
    return Key(f"Deliveries#{caller}", f"Delivery#{delivery_id}")


def late_delivery_key(caller: str, delivery_id: str) -> Key:
    """Key of the mark of a delivery that was made long after the end of its run."""
    return Key(f"Deliveries#{caller}", f"Late#{delivery_id}")


def delivery_mark_key(job_id: str, delivery_id: str) -> Key:
    """Key of a delivery's mark beside its job, where a strong read finds all deliveries of it."""
    return Key(f"Job#{job_id}", f"Delivery#{delivery_id}")


def permits_key(job_id: str) -> Key:
    """Key of a job's permit ledger, if DynamoDB keeps it."""
    return Key(f"Permits#{job_id}", "Permits")


def host_row_key(name: str) -> Key:
    """Key of what a host that refuses calls has said, if there is no Redis."""
    return Key(f"Host#{name}", "Host")


def host_starts_key(name: str) -> Key:
    """Key of the starts of a host that workers have, if there is no Redis."""
    return Key(f"Host#{name}", "Starts")


def robots_row_key(origin: str) -> Key:
    """Key of the robots.txt of an origin, if there is no Redis."""
    return Key(f"Robots#{origin}", "Robots")


WORKERS = "Workers"
"""Partition of the reports of workers, if there is no Redis."""


def worker_key(worker_id: str) -> Key:
    """Key of the report of a worker."""
    return Key(WORKERS, f"Worker#{worker_id}")


SWEEP = Key("Sweep", "Sweep")
"""The lease of the sweep."""
FLEET = Key("Fleet", "Fleet")
"""The settings that all processes of a fleet must share."""
DATA_KEY = Key("Fleet", "DataKey")
"""The data key for callers' API keys, encrypted by KMS, if KMS is used."""


def caller_schedules(caller: str) -> str:
    """gsi1: scheduled jobs of a caller, by job id."""
    return f"Schedules#{caller}"


def caller_jobs(caller: str) -> str:
    """gsi1: regular jobs of a caller, by job id."""
    return f"Caller#{caller}"


def ingesting(run_id: str) -> str:
    """gsi1: runs that ingest, by run id."""
    return _hashed_partition("ingesting", run_id)


def aging(run_id: str) -> str:
    """gsi1: ended runs whose queue or bodies may be left, by the time of the next look at them."""
    return _hashed_partition("aging", run_id)


def aged(run_id: str) -> str:
    """gsi1: ended runs without queue and bodies, by the time at which their results expired."""
    return _hashed_partition("aged", run_id)


def ended(run_id: str) -> str:
    """gsi1: ended runs, by run id, as versions before wrote them. A look at ended runs moves
    them."""
    return _hashed_partition("ended", run_id)


def unsettled(run_id: str) -> str:
    """gsi1: runs that need a recount after their end, by run id."""
    return _hashed_partition("unsettled", run_id)


def tombstones(run_id: str) -> str:
    """gsi1: deleted runs that are not purged yet, by run id."""
    return _hashed_partition("deleted", run_id)


def intents(run_id: str) -> str:
    """gsi1: intents, by the time they were written."""
    return _hashed_partition("intents", run_id)


UNSPREAD_INTENTS = "intents"
"""gsi1: intents of versions before, which knew one partition of them."""


def active(run_id: str) -> str:
    """gsi2: running runs that are not paused, by their last change of status or pause."""
    return _hashed_partition("active", run_id)


def idle(run_id: str) -> str:
    """gsi2: all other runs, by their last change of status or pause."""
    return _hashed_partition("idle", run_id)


_HAS_MORE = "#more"


def change_place(changed_at: int, run_id: str, caller: str, *, has_more: bool = False) -> str:
    """gsi2: sort key of a run. It ends with the caller, so that a reader of one caller's runs tells
    the others apart without their rows; and with a mark if workers need more of the run than the
    index has, which no index that is there can be made to project."""
    return by_time(changed_at, f"{run_id}#{caller}{_HAS_MORE if has_more else ''}")


def caller_of(place: str) -> str | None:
    """Return the caller in a sort key of `change_place`; None in one of a version that wrote
    none."""
    _, _, owner = place.partition("#")[2].partition("#")
    return owner.partition("#")[0] if place.count("#") > 1 else None


def has_more(place: str) -> bool:
    """Tell whether a sort key of `change_place` sends workers on to the row of the run."""
    return place.endswith(_HAS_MORE)


def schedules(job_id: str) -> str:
    """gsi2: scheduled jobs that are not deleted, by due time; last those without one."""
    return _hashed_partition("schedules", job_id)


INPUTS = "inputs"
"""gsi2: file inputs, by their end."""
EXPORTS = "exports"
"""gsi2: exports, by their end."""
OUTBOX = "outbox"
"""gsi2: outbox entries, by due time."""
DELIVERIES = "deliveries"
"""gsi2: pending deliveries, by due time."""
ENDED_DELIVERIES = "deliveries-ended"
"""gsi2: all other deliveries, by their last change."""


def all_partitions(kind: str) -> list[str]:
    """Return all index partitions of a kind: "ingesting", "unsettled", "intents", "aging", "aged",
    "ended", "deleted", "active", "idle" or "schedules"."""
    return [f"{kind}#{number}" for number in range(SPREAD)]


def by_time(instant: int, tail: str) -> str:
    """Return a sort key that sorts by an instant in milliseconds, and is unique by its tail."""
    return f"{max(instant, 0):015}#{tail}"


def after_all_times(tail: str) -> str:
    """Return a sort key behind those of all instants, unique by its tail."""
    return f"{END}#{tail}"


def _hashed_partition(kind: str, item_id: str) -> str:
    # Ids of one moment share a prefix; a checksum spreads them all the same.
    return f"{kind}#{zlib.crc32(item_id.encode()) % SPREAD}"
