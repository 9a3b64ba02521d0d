"""Reading runs, and moving them under their version.

Where runs lie: looked up once by a run's id, and remembered, since a place never changes.

A run's own row: what is in it, and how it is read.

Status, total and everything else that a decision hangs on moves under the row's `version`. The
counters are additions and leave the version alone, so that settling tasks never collides with a
change of status. `counter_epoch` and `sequences` make an addition safe to repeat: see `counters`.

The runs of a job, newest first, strongly read.

A notice's item: what is in it, how it is read, and how the end of its run makes it due.

That is a write of its own, right after the one that ended the run. Where it is lost, the notice is
due when it was before, for the next sign of life, and whoever takes it then sees the end.

Strongly consistent reads of run rows, each shared by all who asked before it began.

Whoever has just claimed a task must know that its run is live: a read that was under way already
may have been answered before the claim, so it waits for the next one, with all others that do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from cachetools import LRUCache

from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import (
    Callback,
    Ingest,
    IngestStatus,
    Job,
    Run,
    RunFailure,
    RunStats,
    RunStatus,
    Spend,
)
from conveyor.domain.run_events import RunFinished
from conveyor.domain.shards import Shards, ShardScheme, shards_of
from conveyor.domain.states import LIVE_RUN_STATES, live_run_status
from conveyor.ports.outbox import OutboxEntry
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb import schema
from conveyor.prod.dynamodb.client import (
    Given,
    Item,
    Plain,
    Query,
    Table,
    changed_too_often,
    condition_met,
    readable,
    whole,
)
from conveyor.prod.dynamodb.schema import (
    OUTBOX,
    ROW_SHAPE,
    SORT_KEY,
    Key,
    by_time,
    notice_key,
    pin_key,
    place_key,
    run_key,
    task_key,
)

MOST_REMEMBERED = 10_000


class RunPlace(msgspec.Struct, frozen=True):
    """The job and number of a run, and the shards of its rows."""

    run_id: str
    job_id: str
    run_sequence: int
    shards: Shards

    @property
    def key(self) -> Key:
        """Where the run's own row lies."""
        return run_key(self.job_id, self.run_sequence)

    def task(self, task_id: str) -> Key:
        """Where a task's row lies. Raises ValueError where the text is not a task id."""
        return task_key(self.job_id, self.run_id, task_id, self.shards)

    def item(self) -> Item:
        """The item to be written beside the run's."""
        return {
            "shape": ROW_SHAPE,
            "job_id": self.job_id,
            "run_sequence": self.run_sequence,
            "shard_count": self.shards.count,
            "shard_scheme": str(self.shards.scheme),
        }


@whole
def read_place(item: Item) -> RunPlace:
    """A place from an item that has it, and the run's id. Raises DamagedRow."""
    shards = {"count": item["shard_count"], "scheme": item["shard_scheme"]}
    place = {name: item[name] for name in ("run_id", "job_id", "run_sequence")}
    return msgspec.convert({**place, "shards": shards}, RunPlace)


class RunPlaces:
    """Finds places by run ids."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._known: LRUCache[str, RunPlace] = LRUCache(MOST_REMEMBERED)

    async def find(self, run_id: str) -> RunPlace | None:
        """The place of a run; None where there is no such run.

        A run that was purged may be found a while longer: its row tells.
        """
        known = self._known.get(run_id)
        if known is not None:
            return known
        item = await self._table.get(place_key(run_id))
        if item is None:
            return None
        place = read_place({**item, "run_id": run_id})
        self.remember(place)
        return place

    def remember(self, place: RunPlace) -> None:
        """Keep a place that was just made or found."""
        self._known[place.run_id] = place


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
    def place(self) -> RunPlace:
        """Where its rows lie."""
        return RunPlace(self.run.run_id, self.run.job_id, self.run.run_sequence, self.shards)

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
        owner = schema.tombstones(run_id)
    elif ingesting:
        owner = schema.ingesting(run_id)
    elif unsettled:
        owner = schema.unsettled(run_id)
    elif status in LIVE_RUN_STATES:
        owner = None
    else:
        owner = schema.ended(run_id)
    works = status is RunStatus.RUNNING and not paused
    return {
        "gsi1pk": owner,
        "gsi1sk": None if owner is None else run_id,
        "gsi2pk": schema.active(run_id) if works else schema.idle(run_id),
        "gsi2sk": schema.by_time(changed_at, run_id),
    }


@whole
def read_run_row(item: Item) -> RunRow:
    """A run from its item. Raises DamagedRow."""
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


PIECE = 100
"""Runs that one query asks for, unless told otherwise."""


async def runs_of(
    table: Table,
    job_id: str,
    *,
    below: int | None = None,
    limit: int = PIECE,
    known_only: bool = False,
) -> AsyncIterator[RunRow]:
    """Every run of a job, tombstones included, with a run_sequence below `below`; so many a query
    as `limit` says. Raises UnreadableRow where one is of a newer shape or damaged, or leaves it
    out."""
    first, last = run_key(job_id, 0), run_key(job_id, 10**10 - 1)
    if below is not None:
        last = run_key(job_id, max(below - 1, 0))
    async for page in table.pages(
        Query(
            first.pk, between=(first.sk, last.sk), forward=False, limit=limit, known_only=known_only
        )
    ):
        rows = readable(read_run_row, page.items) if known_only else map(read_run_row, page.items)
        for row in rows:
            yield row


_callback = msgspec.json.Decoder(Callback)
_ending = msgspec.json.Decoder(RunFinished)
_log = logging.getLogger("conveyor.records")


def new_outbox_item(run: Run, callback: Callback) -> Item:
    """The notice of a new run, due at once."""
    return {
        "shape": ROW_SHAPE,
        "run_id": run.run_id,
        "job_id": run.job_id,
        "callback": _encode(callback).decode(),
        "due_at": run.created_at,
        "attempts": 0,
        "gsi2pk": OUTBOX,
        "gsi2sk": by_time(run.created_at, run.run_id),
    }


def encode_run_event(ending: RunFinished) -> str:
    """An ending as an attribute."""
    return _encode(ending).decode()


@whole
def read_outbox_item(item: Item, run: Run | None) -> OutboxEntry:
    """A leased notice from its item, with its run. Raises DamagedRow."""
    ending = item.get("ending")
    return OutboxEntry(
        job_id=item["job_id"],
        run_id=item["run_id"],
        callback=_callback.decode(item["callback"]),
        lease=item["leased_until"],
        run=run,
        ended_as=RunStatus(item["ended_as"]) if "ended_as" in item else None,
        ending=None if ending is None else _ending.decode(ending),
        decided_at=item.get("decided_at", 0),
        attempts=item["attempts"],
    )


async def make_due(table: Table, run_id: str, *, ended_as: RunStatus, ended_at: int) -> None:
    """Make a notice due at the end of its run, and note what that was, unless it is told or that
    was done before. The end itself is written: what fails here fails nobody."""
    try:
        await table.update(
            notice_key(run_id),
            "SET ended_as = :ended_as, ended_at = :ended_at, due_at = :ended_at, gsi2sk = :place",
            condition="attribute_exists(pk) AND attribute_not_exists(ended_at) "
            "AND attribute_not_exists(ending)",
            ended_as=str(ended_as),
            ended_at=ended_at,
            place=by_time(ended_at, run_id),
        )
    except ConveyorError as error:
        if isinstance(error, AwsRefused) and error.is_condition:
            return
        _log.warning(
            "the end of a run is told with the next sign of life",
            extra={"run_id": run_id, "error": type(error).__name__},
        )


TRIES = 20
"""Times that a change is decided anew, because the row moved meanwhile."""


_CUT_SHORT = (RunStatus.STOPPED, RunStatus.FAILED)


class RunMoved(Exception):
    """The row was changed by another since it was read: read it, and decide again."""


class Change(NamedTuple):
    """One change of a run's row under its version: what is set, added and removed.

    `status`, `paused`, `ingesting` and `unsettled` bring the index keys, times and the end with
    them; a run that is cut short becomes unsettled by it. Counters are never set here, except by
    who raises `counter_epoch` too. An entry of `removes` that begins with "#" is a path of
    placeholders; what these, and those of the condition, stand for is in `values`.
    """

    status: RunStatus | None = None
    paused: bool | None = None
    ingesting: bool | None = None
    unsettled: bool | None = None
    sets: Mapping[str, Plain] = {}
    adds: Mapping[str, int] = {}
    removes: Sequence[str] = ()
    condition: str = ""
    values: Mapping[str, Given] = {}


class Expression(NamedTuple):
    """A change as DynamoDB takes it."""

    update: str
    condition: str
    values: dict[str, Given]


class DynamoRunRows:
    """The rows of runs."""

    def __init__(self, table: Table, places: RunPlaces) -> None:
        self.table = table
        self.places = places

    async def read(self, run_id: str) -> RunRow | None:
        """A run by its id, strongly read; None where there is none (any more)."""
        place = await self.places.find(run_id)
        return None if place is None else await self.read_at(place)

    async def read_at(self, place: RunPlace) -> RunRow | None:
        """A run by its place, strongly read."""
        item = await self.table.get(place.key)
        return None if item is None else read_run_row(item)

    async def change(self, row: RunRow, change: Change, *, now: int) -> RunRow:
        """Make a change; the row afterwards. Raises RunMoved."""
        token = self.table.clock.new_id()
        update, condition, values = self.expression(row, change, now=now, token=token)
        try:
            item = await self.table.update(row.place.key, update, condition=condition, **values)
        except AwsRefused as refused:
            if not refused.is_condition:
                raise
            found = condition_met(refused)
            if found is None or found.get("moved_by") != token:
                raise RunMoved from None
            # It was carried out, and its answer lost.
            item = found
        after = read_run_row(item)
        if row.live:
            await self.tell_end(after)
        return after

    async def tell_end(self, row: RunRow) -> None:
        """Make the notice of a run due, if it has one and has ended: to be called with the row
        after whatever may have ended it. `change` does; who uses `part` has to."""
        if row.calls_back and not row.live:
            run = row.run
            await make_due(self.table, run.run_id, ended_as=run.status, ended_at=row.ended_at)

    def part(self, row: RunRow, change: Change, *, now: int) -> dict[str, Any]:
        """A change as a part of a transaction."""
        token = self.table.clock.new_id()
        update, condition, values = self.expression(row, change, now=now, token=token)
        return self.table.update_part(row.place.key, update, condition=condition, **values)

    def expression(self, row: RunRow, change: Change, *, now: int, token: str) -> Expression:
        """What a change is on the wire."""
        at = max(row.run.updated_at, now)
        sets: dict[str, Plain] = {
            **change.sets,
            "updated_at": at,
            "version": row.run.version + 1,
            "moved_by": token,
        }
        removes = list(change.removes)
        if (change.status, change.paused, change.ingesting, change.unsettled) != (None,) * 4:
            _state(row, change, at, sets, removes)
        values: dict[str, Given] = {**change.values, "known_version": row.run.version}
        values |= {f"set_{name}": value for name, value in sets.items()}
        values |= {f"add_{name}": value for name, value in change.adds.items()}
        update = "SET " + ", ".join(f"#{name} = :set_{name}" for name in sets)
        if change.adds:
            update += " ADD " + ", ".join(f"#{name} :add_{name}" for name in change.adds)
        if removes:
            update += " REMOVE " + ", ".join(f"#{name.lstrip('#')}" for name in removes)
        condition = "#version = :known_version"
        if change.condition:
            condition += f" AND ({change.condition})"
        return Expression(update, condition, values)

    async def decide(
        self, row: RunRow, decision: Callable[[RunRow], Change | None], *, now: int
    ) -> RunRow | None:
        """Make the change that `decision` makes of a row, of the latest one where it has moved; the
        row afterwards. None, and nothing written, where it decides for none, or the run is gone."""
        known: RunRow | None = row
        for _ in range(TRIES):
            change = None if known is None else decision(known)
            if known is None or change is None:
                return None
            try:
                return await self.change(known, change, now=now)
            except RunMoved:
                known = await self.read_at(row.place)
        raise changed_too_often()

    async def settle_status(self, row: RunRow, *, now: int) -> RunRow:
        """Let a live run's status follow the counters of the row that a write returned; the row
        afterwards. Every writer that can be the last one calls this with what it got back."""
        for _ in range(TRIES):
            run = row.run
            if run.status not in LIVE_RUN_STATES:
                return row
            status = live_run_status(
                run.stats, job_closed=run.last_batch_received, ingesting=run.ingesting
            )
            if status is run.status:
                return row
            try:
                return await self.change(row, Change(status=status), now=now)
            except RunMoved:
                again = await self.read_at(row.place)
                if again is None:
                    return row
                row = again
        raise changed_too_often()

    async def shown(self, row: RunRow) -> RunRow:
        """A row as a reader may see it. Its status follows the last addition to the counters in a
        write of its own: a reader who comes between the two, or after a crash there, makes it."""
        return await self.settle_status(row, now=row.run.updated_at)


def _state(
    row: RunRow, change: Change, at: int, sets: dict[str, Plain], removes: list[str]
) -> None:
    """What comes along with a change of state."""
    run = row.run
    status = change.status or run.status
    paused = run.paused if change.paused is None else change.paused
    ingesting = run.ingesting if change.ingesting is None else change.ingesting
    unsettled = _is_unsettled(row, change)
    sets |= {"status": str(status), "paused": paused, "ingesting": ingesting}
    if unsettled is not row.unsettled:
        sets["unsettled"] = unsettled
    sets["dispatch_changed_at"] = at
    if status not in LIVE_RUN_STATES and not row.ended_at:
        sets["ended_at"] = at
    keys = index_keys(
        run.run_id,
        status,
        paused=paused,
        ingesting=ingesting,
        unsettled=unsettled,
        changed_at=at,
    )
    for name, value in keys.items():
        if value is None:
            removes.append(name)
        else:
            sets[name] = value


def _is_unsettled(row: RunRow, change: Change) -> bool:
    """Whether a run is, after a change. Calls in flight of one that is cut short still end, and
    whoever makes them may be lost between a row's end and its addition to the counters."""
    if change.unsettled is not None:
        return change.unsettled
    cut_short = change.status in _CUT_SHORT and row.run.stats.completed < row.run.stats.total
    return row.unsettled or cut_short


Reading = asyncio.Task[RunRow | None]


class RunReads:
    """Fresh reads of runs. Belongs to one event loop."""

    def __init__(self, records: DynamoRunRows) -> None:
        self._records = records
        self._waiting: dict[str, Reading] = {}
        self._under_way: dict[str, Reading] = {}

    async def fresh(self, place: RunPlace) -> RunRow | None:
        """The run as it was at some moment after this call; None where it is gone."""
        reading = self._waiting.get(place.run_id)
        if reading is None:
            reading = asyncio.create_task(self._read(place))
            reading.add_done_callback(_look_at_failure)
            self._waiting[place.run_id] = reading
        # One waiter that is cancelled must not take the read away from the others.
        return await asyncio.shield(reading)

    async def _read(self, place: RunPlace) -> RunRow | None:
        before = self._under_way.get(place.run_id)
        if before is not None:
            await asyncio.wait([before])
        reading = self._waiting.pop(place.run_id)
        self._under_way[place.run_id] = reading
        try:
            return await self._records.read_at(place)
        finally:
            if self._under_way[place.run_id] is reading:
                del self._under_way[place.run_id]


def _look_at_failure(reading: Reading) -> None:
    """Nobody may be left to wait for it; a failure that nobody looked at would be logged."""
    if not reading.cancelled():
        reading.exception()


async def dependants(table: Table, job_id: str, run_id: str) -> list[str]:
    """The ids of the runs that draw bodies, or are still copied, from a run."""
    prefix = pin_key(job_id, run_id, "")
    found: list[str] = []
    async for page in table.pages(Query(prefix.pk, begins_with=prefix.sk, keys_only=True)):
        found += [item[SORT_KEY].rpartition("#")[2] for item in page.items]
    return found
