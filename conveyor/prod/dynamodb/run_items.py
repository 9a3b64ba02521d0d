"""A run's own row: what is in it, and how it is read.

Status, total and everything else that a decision hangs on moves under the row's `version`. The
counters are additions and leave the version alone, so that settling tasks never collides with a
change of status. `counter_epoch` and `sequences` make an addition safe to repeat: see `counters`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from conveyor.domain.model import (
    Ingest,
    IngestStatus,
    Job,
    Run,
    RunFailure,
    RunStats,
    RunStatus,
    Spend,
)
from conveyor.domain.shards import Shards, ShardScheme, shards_of
from conveyor.domain.states import LIVE_RUN_STATES
from conveyor.prod.dynamodb import keys
from conveyor.prod.dynamodb.items import Item
from conveyor.prod.dynamodb.places import Place
from conveyor.prod.dynamodb.shapes import whole
from conveyor.prod.dynamodb.table import ROW_SHAPE

REASON = "failed_"
"""Failed tasks are counted by reason, each in an attribute of its own: `failed_timeout`."""

_TEXTS = ("run_id", "job_id", "caller")
_NUMBERS = (
    "run_sequence",
    "priority",
    "max_inflight",
    "result_ttl_days",
    "shard_count",
    "created_at",
    "updated_at",
    "next_index",
    "version",
    "counter_epoch",
    "dispatch_changed_at",
    "total",
    "successful",
    "failed",
)
_encode = msgspec.json.encode
_ingest = msgspec.json.Decoder(Ingest)


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """A run as it was read, and what only this store keeps with it.

    `counter_epoch` is raised by whoever sets the counters absolutely. `sequences` holds the number
    of each worker's last addition, `flushes` how many additions there have been. `inherited` counts
    rows that came with a body of an earlier run. `reserved` holds what is being added and not
    counted yet, as number of tasks by first index, `given_up` what will not be. `ended_at`: when
    the run ended, 0 before. `calls_back`: a notice in the outbox waits for its end. `unsettled`:
    rows may move, or come, after the run's end and never be counted, so that it is to be recounted.
    """

    run: Run
    caller: str
    priority: int
    max_inflight: int
    result_ttl_days: int
    shards: Shards
    counter_epoch: int = 0
    sequences: dict[str, int] = {}
    flushes: int = 0
    inherited: int = 0
    reserved: dict[str, int] = {}
    given_up: dict[str, int] = {}
    ended_at: int = 0
    swept: bool = False
    queue_dropped: bool = False
    unsettled: bool = False
    dispatch_changed_at: int = 0
    calls_back: bool = False

    @property
    def place(self) -> Place:
        """Where its rows lie."""
        return Place(self.run.run_id, self.run.job_id, self.run.run_sequence, self.shards)

    @property
    def live(self) -> bool:
        """Whether its tasks may be claimed."""
        return self.run.status in LIVE_RUN_STATES

    def holds(self, index: int) -> bool:
        """Whether the row at an index is a part of the run, not one that is only being added, or
        being taken back."""
        unfinished = (*self.reserved.items(), *self.given_up.items())
        return not any(0 <= index - int(start) < count for start, count in unfinished)


def new_run_item(run: Run, job: Job, *, inherited: int = 0) -> Item:
    """The row of a new run of a job."""
    item: Item = {
        "shape": ROW_SHAPE,
        "run_id": run.run_id,
        "job_id": run.job_id,
        "run_sequence": run.run_sequence,
        "caller": job.caller,
        "priority": job.priority,
        "max_inflight": job.max_inflight,
        "result_ttl_days": job.result_ttl_days,
        "shard_count": shards_of(job).count,
        "shard_scheme": str(shards_of(job).scheme),
        "status": str(run.status),
        "created_at": run.created_at,
        "updated_at": run.updated_at,
        "trigger": run.trigger,
        "paused": run.paused,
        "last_batch_received": run.last_batch_received,
        "next_index": run.next_index,
        "version": run.version,
        "inherited": inherited,
        "counter_epoch": 0,
        "sequences": {},
        "flushes": 0,
        "reserved": {},
        "queue_generation": 0,
        "ingesting": run.ingesting,
        "dispatch_changed_at": run.created_at,
        **counters(run.stats),
    }
    found_by = index_keys(
        run.run_id,
        run.status,
        paused=run.paused,
        ingesting=run.ingesting,
        unsettled=False,
        changed_at=run.created_at,
    )
    item |= {name: key for name, key in found_by.items() if key is not None}
    if run.rerun_of is not None:
        item["rerun_of"] = run.rerun_of
    if run.ingest is not None:
        item["ingest"] = _encode(run.ingest).decode()
        item["ingest_next"] = run.ingest.next_index
    return item


def counters(stats: RunStats) -> Item:
    """The counters of a run as attributes."""
    return {
        "total": stats.total,
        "successful": stats.successful,
        "failed": stats.failed,
        "credits": stats.spend.credits,
        "cost": stats.spend.cost,
        **{f"{REASON}{reason}": count for reason, count in stats.failure_reasons.items()},
    }


def index_keys(
    run_id: str,
    status: RunStatus,
    *,
    paused: bool,
    ingesting: bool,
    unsettled: bool,
    changed_at: int,
) -> dict[str, str | None]:
    """In which index partitions a run in this state is found; None: the attribute is absent."""
    if status is RunStatus.DELETED:
        owner = keys.tombstones(run_id)
    elif ingesting:
        owner = keys.ingesting(run_id)
    elif unsettled:
        owner = keys.unsettled(run_id)
    elif status in LIVE_RUN_STATES:
        owner = None
    else:
        owner = keys.ended(run_id)
    works = status is RunStatus.RUNNING and not paused
    return {
        "gsi1pk": owner,
        "gsi1sk": None if owner is None else run_id,
        "gsi2pk": keys.active(run_id) if works else keys.idle(run_id),
        "gsi2sk": keys.by_time(changed_at, run_id),
    }


@whole
def read_run_row(item: Item) -> RunRow:
    """A run from its item. Raises Damaged."""
    for names, kind in ((_TEXTS, str), (_NUMBERS, int)):
        for name in names:
            if type(item[name]) is not kind:
                raise TypeError(name)
    return RunRow(
        run=_run(item),
        caller=item["caller"],
        priority=item["priority"],
        max_inflight=item["max_inflight"],
        result_ttl_days=item["result_ttl_days"],
        shards=Shards(item["shard_count"], ShardScheme(item["shard_scheme"])),
        counter_epoch=item["counter_epoch"],
        sequences=item["sequences"],
        flushes=item["flushes"],
        inherited=item["inherited"],
        reserved=item.get("reserved", {}),
        given_up=item.get("given_up", {}),
        ended_at=item.get("ended_at", 0),
        swept=item.get("swept", False),
        queue_dropped=item.get("queue_dropped", False),
        unsettled=item.get("unsettled", False),
        dispatch_changed_at=item["dispatch_changed_at"],
        calls_back=item.get("calls_back", False),
    )


def _run(item: Item) -> Run:
    failure = item.get("failure_reason")
    return Run(
        run_id=item["run_id"],
        job_id=item["job_id"],
        run_sequence=item["run_sequence"],
        status=RunStatus(item["status"]),
        created_at=item["created_at"],
        # Additions to the counters, and changes, have a time each: neither sets the other back.
        updated_at=max(item["updated_at"], item.get("counted_at", 0)),
        trigger=item["trigger"],
        paused=item["paused"],
        last_batch_received=item["last_batch_received"],
        next_index=item["next_index"],
        stats=_stats(item),
        failure_reason=None if failure is None else RunFailure(failure),
        failure_detail=item.get("failure_detail"),
        rerun_of=item.get("rerun_of"),
        ingest=_read_ingest(item),
        version=item["version"],
    )


def _stats(item: dict[str, Any]) -> RunStats:
    reasons = {
        name.removeprefix(REASON): count
        for name, count in item.items()
        if name.startswith(REASON) and count
    }
    return RunStats(
        total=item["total"],
        successful=item["successful"],
        failed=item["failed"],
        failure_reasons=reasons,
        spend=Spend(item["credits"], float(item["cost"])),
    )


def _read_ingest(item: Item) -> Ingest | None:
    text = item.get("ingest")
    if text is None:
        return None
    status = IngestStatus.PENDING if item["ingesting"] else IngestStatus.DONE
    return msgspec.structs.replace(
        _ingest.decode(text), status=status, next_index=item["ingest_next"]
    )
