"""Run rows: where they lie, how they are read, and how they change under their version.

`RunPlaces` finds the key of a run by its id and caches it, since a place never changes.
`DynamoRunRows` reads runs strongly and writes a `Change` under an optimistic lock, the row's
`version`. The row holds the base of the counters; what processes have counted lies in items of
their own (`counter_sums`), so counting never touches the row. Reads of a live run add up both. The
row of an ended run carries the sum.

Whoever ends a run makes its outbox entries due right after, by a second write each. If a crash
loses that write, the entry keeps its earlier due time, and its next delivery sees the end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec
from cachetools import LRUCache

from conveyor.aio.concurrency import for_each
from conveyor.domain.hosts import Politeness
from conveyor.domain.model import (
    Ingest,
    IngestStatus,
    Job,
    Run,
    RunFailure,
    RunStats,
    RunStatus,
    TaskStatus,
)
from conveyor.domain.result_shape import SIZE_CLASSES
from conveyor.domain.shards import Shards, ShardScheme, shards_of
from conveyor.domain.states import LIVE_RUN_STATES, live_run_status
from conveyor.ports.maintenance import ENDED_FOR
from conveyor.ports.outbox import EntryKey, Subscriber
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb import schema
from conveyor.prod.dynamodb.client import (
    Item,
    PlaceholderValue,
    Plain,
    Query,
    Table,
    UnreadableRow,
    conflicting_item,
    contention_error,
    decode_intact,
    decodes_row,
)
from conveyor.prod.dynamodb.counter_sums import (
    NOTHING,
    CountedValues,
    GroupCount,
    decode_values,
    encode_values,
    parts_of,
    process_items,
    sum_values,
)
from conveyor.prod.dynamodb.outbox_rows import WAITING, make_due, subscribers_of
from conveyor.prod.dynamodb.schema import (
    GROUPS_SHAPE,
    ROW_SHAPE,
    SORT_KEY,
    TEMPLATE_SHAPE,
    Key,
    pin_key,
    place_key,
    run_key,
    task_key,
)

MOST_REMEMBERED = 10_000


class RunPlace(msgspec.Struct, frozen=True):
    """The job and number of a run, and the shards of its task rows."""

    run_id: str
    job_id: str
    run_sequence: int
    shards: Shards

    @property
    def key(self) -> Key:
        """Key of the run's own row."""
        return run_key(self.job_id, self.run_sequence)

    def task_key(self, task_id: str) -> Key:
        """Return the key of a task's row. Raises ValueError if the text is not a task id."""
        return task_key(self.job_id, self.run_id, task_id, self.shards)

    def item(self) -> Item:
        """Make the place item, which is written together with the run."""
        return {
            "shape": ROW_SHAPE,
            "job_id": self.job_id,
            "run_sequence": self.run_sequence,
            "shard_count": self.shards.count,
            "shard_scheme": str(self.shards.scheme),
        }


@decodes_row
def read_place(item: Item) -> RunPlace:
    """Decode a place from an item that has its attributes and the run's id. Raises DamagedRow."""
    shards = {"count": item["shard_count"], "scheme": item["shard_scheme"]}
    place = {name: item[name] for name in ("run_id", "job_id", "run_sequence")}
    return msgspec.convert({**place, "shards": shards}, RunPlace)


class RunPlaces:
    """Finds places by run ids, and caches them."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._known: LRUCache[str, RunPlace] = LRUCache(MOST_REMEMBERED)

    async def find(self, run_id: str) -> RunPlace | None:
        """Find the place of a run; None if there is no such run.

        The cache may return a purged run for a while longer; its missing row shows that it is gone.
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
        """Cache a place that was just written or read."""
        self._known[place.run_id] = place


REASON = "failed_"
"""Prefix of the counters of failed tasks by reason, such as `failed_timeout`."""
SIZE = "size_"
"""Prefix of the counters of bodies by size class, such as `size_0`. A class without one has no
counter."""
TYPES = "types"
"""The map of bodies by media type; absent without one."""
GROUPS = "failure_groups"
"""The map of failure groups; absent without one."""
COUNTED = "counted"
"""The values of all items together, on the row of an ended run; absent before."""
SUMS = "sums"
"""The number of writes of that sum."""
HOSTS = "hosts"
"""The list of hosts that have a queue of their own; absent without one."""
HOST_QUEUES = "host_queues"
"""The map of their queues by number, such as `h0`: the generation, and the token of its last move.
It is there if `hosts` is."""
RECOUNTING = "recounting"
"""The token of the recount that closes the items of the epoch; absent without one."""

_TEXT_ATTRIBUTES = ("run_id", "job_id", "caller")
_NUMBER_ATTRIBUTES = (
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
_politeness = msgspec.json.Decoder(Politeness)


class StampPosition(NamedTuple):
    """A stamping of settled rows, as if they had ended at `at`, and the position it has reached:
    all rows of the shards before `shard`, and of that one those up to the index `after`."""

    at: int
    shard: int
    after: int


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """A run as read, with the attributes that only this store keeps.

    The counters in `run`, and `groups`, the failure groups by id, are the sum of `base` and
    `counted`, which lacks items of processes unless `is_summed`; `processes` is the number of those
    items. They have `item_bytes` in all, and are spread over `parts` partitions. `counter_epoch` is
    raised by every absolute write of the counters; `carried` tells that the last one took over the
    sum of the epoch before, `folds` how often items have moved into the base, `sums` how often the
    sum was written on the row. `recounting` is the token of a recount that closes items. `reserved`
    holds additions that are not counted yet, as number of tasks by first index; `given_up` those
    that never will be. `ended_at` is 0 before the end. `subscribers`: an outbox entry for each
    waits for the end. `politeness` is that of its job; `hosts` are those of its hosts that have a
    queue of their own. `rows_stamped_at`: settled rows live at least as if they had ended then;
    `stamping` is a later stamp under way. `expired`: retention has deleted the run. `unsettled`:
    rows may change or appear, uncounted, after the run's end, so it needs a recount.
    """

    run: Run
    caller: str
    priority: int
    max_inflight: int
    result_ttl_days: int
    shards: Shards
    counter_epoch: int = 0
    base: CountedValues = NOTHING
    counted: CountedValues = NOTHING
    groups: Mapping[str, GroupCount] = {}
    is_summed: bool = False
    processes: int = 0
    item_bytes: int = 0
    parts: int = 1
    folds: int = 0
    sums: int = 0
    carried: bool = False
    recounting: str = ""
    reserved: dict[str, int] = {}
    given_up: dict[str, int] = {}
    ended_at: int = 0
    swept: bool = False
    queue_dropped: bool = False
    rows_stamped_at: int = 0
    stamping: StampPosition | None = None
    expired: bool = False
    unsettled: bool = False
    dispatch_changed_at: int = 0
    subscribers: tuple[Subscriber, ...] = ()
    politeness: Politeness | None = None
    hosts: tuple[str, ...] = ()

    @property
    def has_more(self) -> bool:
        """True if workers need more of the run than the dispatch index has."""
        return self.politeness is not None or bool(self.hosts)

    @property
    def place(self) -> RunPlace:
        """The run's place."""
        return RunPlace(self.run.run_id, self.run.job_id, self.run.run_sequence, self.shards)

    @property
    def live(self) -> bool:
        """True if tasks of the run may be claimed."""
        return self.run.status in LIVE_RUN_STATES

    def with_counted(
        self, counted: CountedValues, *, processes: int = 0, item_bytes: int = 0
    ) -> RunRow:
        """Return the row with the sum of its base and what processes have counted."""
        values = sum_values(self.base, [counted])
        run = msgspec.structs.replace(
            self.run,
            stats=values.stats(total=self.run.stats.total, inherited=self.run.stats.inherited),
            updated_at=max(self.run.updated_at, values.at),
        )
        return msgspec.structs.replace(
            self,
            run=run,
            counted=counted,
            groups=values.groups,
            is_summed=True,
            processes=processes,
            item_bytes=item_bytes,
        )

    def contains_index(self, index: int) -> bool:
        """Return whether the row at an index is part of the run, and not of an addition that is
        under way or given up."""
        unfinished = (*self.reserved.items(), *self.given_up.items())
        return not any(0 <= index - int(start) < count for start, count in unfinished)


def new_run_item(run: Run, job: Job, *, groups: Mapping[str, GroupCount] | None = None) -> Item:
    """Make the row of a new run, which begins with failure groups if it takes any over."""
    item: Item = {
        "shape": _shape(run, live=run.status in LIVE_RUN_STATES, ingesting=run.ingesting),
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
        "counter_epoch": 0,
        "counter_parts": parts_of(job.max_inflight),
        "folds": 0,
        SUMS: 0,
        "reserved": {},
        "queue_generation": 0,
        "ingesting": run.ingesting,
        "dispatch_changed_at": run.created_at,
        **counters(run.stats, groups or {}),
        **{WAITING[subscriber]: True for subscriber in subscribers_of(job, run)},
    }
    state = State(run.status, run.paused, run.ingesting, unsettled=False)
    looked_at = run.updated_at + ENDED_FOR
    optional = index_keys(
        run.run_id,
        state,
        changed_at=run.created_at,
        caller=job.caller,
        looked_at=looked_at,
        has_more=job.politeness is not None,
    )
    optional |= {"rerun_of": run.rerun_of, "traceparent": run.traceparent}
    item |= {name: value for name, value in optional.items() if value is not None}
    if job.politeness is not None:
        item["politeness"] = _encode(job.politeness).decode()
    if run.ingest is not None:
        item["ingest"] = _encode(run.ingest).decode()
        item["ingest_next"] = run.ingest.next_index
    return item


def _shape(run: Run, *, live: bool, ingesting: bool) -> int:
    """Return the shape of a run's row in a state: once the run has ended, any version can end its
    ingestion."""
    if run.ingest is None or not live or not ingesting:
        return ROW_SHAPE
    afresh = run.ingest.statuses
    if afresh is not None and (TaskStatus.FAILED not in afresh or run.ingest.groups is not None):
        return GROUPS_SHAPE
    return TEMPLATE_SHAPE if run.ingest.template else ROW_SHAPE


def counters(stats: RunStats, groups: Mapping[str, GroupCount]) -> Item:
    """Return the counters of a run as attributes."""
    item: Item = {
        "total": stats.total,
        "successful": stats.successful,
        "failed": stats.failed,
        "inherited": stats.inherited,
        "credits": stats.spend.credits,
        "cost": stats.spend.cost,
        **{f"{REASON}{reason}": count for reason, count in stats.failure_reasons.items()},
        **{f"{SIZE}{number}": count for number, count in enumerate(stats.shape.sizes) if count},
    }
    if stats.shape.types:
        item[TYPES] = dict(stats.shape.types)
    if groups:
        item[GROUPS] = {one: [group.failed, group.last_at] for one, group in groups.items()}
    return item


class State(NamedTuple):
    """The part of a run that decides in which partitions of the indexes it lies."""

    status: RunStatus
    paused: bool
    ingesting: bool
    unsettled: bool


def index_keys(
    run_id: str,
    state: State,
    *,
    changed_at: int,
    caller: str,
    looked_at: int,
    has_more: bool,
) -> dict[str, str | None]:
    """Return the index keys of a run in this state; None removes the attribute. Once it has ended,
    it is looked at first at `looked_at`."""
    status, paused, ingesting, unsettled = state
    place = run_id
    if status is RunStatus.DELETED:
        owner = schema.tombstones(run_id)
    elif ingesting:
        owner = schema.ingesting(run_id)
    elif unsettled:
        owner = schema.unsettled(run_id)
    elif status in LIVE_RUN_STATES:
        owner = None
    else:
        owner, place = schema.aging(run_id), schema.by_time(looked_at, run_id)
    works = status is RunStatus.RUNNING and not paused
    return {
        "gsi1pk": owner,
        "gsi1sk": None if owner is None else place,
        "gsi2pk": schema.active(run_id) if works else schema.idle(run_id),
        "gsi2sk": schema.change_place(changed_at, run_id, caller, has_more=has_more),
    }


@decodes_row
def read_run_row(item: Item) -> RunRow:
    """Decode a run as its row has it: summed only once it has ended and is settled. Raises
    DamagedRow."""
    for names, kind in ((_TEXT_ATTRIBUTES, str), (_NUMBER_ATTRIBUTES, int)):
        for name in names:
            if type(item[name]) is not kind:
                raise TypeError(name)
    base = _base(item)
    row = RunRow(
        run=_run(item, base),
        caller=item["caller"],
        priority=item["priority"],
        max_inflight=item["max_inflight"],
        result_ttl_days=item["result_ttl_days"],
        shards=Shards(item["shard_count"], ShardScheme(item["shard_scheme"])),
        counter_epoch=item["counter_epoch"],
        base=base,
        groups=base.groups,
        parts=item["counter_parts"],
        folds=item["folds"],
        sums=item[SUMS],
        carried=item.get("carried", False),
        recounting=item.get(RECOUNTING, ""),
        reserved=item.get("reserved", {}),
        given_up=item.get("given_up", {}),
        ended_at=item.get("ended_at", 0),
        swept=item.get("swept", False),
        queue_dropped=item.get("queue_dropped", False),
        rows_stamped_at=item.get("rows_stamped_at") or item["created_at"],
        stamping=StampPosition(*item["stamping"]) if "stamping" in item else None,
        expired=item.get("expired", False),
        unsettled=item.get("unsettled", False),
        dispatch_changed_at=item["dispatch_changed_at"],
        subscribers=tuple(one for one, name in WAITING.items() if item.get(name, False)),
        politeness=_politeness.decode(item["politeness"]) if "politeness" in item else None,
        hosts=tuple(item.get(HOSTS, ())),
    )
    text = item.get(COUNTED)
    if text is None:
        return row
    row = row.with_counted(decode_values(text))
    return msgspec.structs.replace(row, is_summed=not row.live and not row.unsettled)


def _run(item: Item, base: CountedValues) -> Run:
    failure = item.get("failure_reason")
    return Run(
        run_id=item["run_id"],
        job_id=item["job_id"],
        run_sequence=item["run_sequence"],
        status=RunStatus(item["status"]),
        created_at=item["created_at"],
        # Checkpoints and changes each write a time of their own, so neither sets the other back.
        updated_at=max(item["updated_at"], item.get("counted_at", 0)),
        trigger=item["trigger"],
        paused=item["paused"],
        last_batch_received=item["last_batch_received"],
        next_index=item["next_index"],
        stats=base.stats(total=item["total"], inherited=item["inherited"]),
        failure_reason=None if failure is None else RunFailure(failure),
        failure_detail=item.get("failure_detail"),
        rerun_of=item.get("rerun_of"),
        traceparent=item.get("traceparent"),
        ingest=_read_ingest(item),
        version=item["version"],
    )


def _base(item: dict[str, Any]) -> CountedValues:
    """Decode the base of the counters. Of a group that counts no task the row has no use."""
    return CountedValues(
        successful=item["successful"],
        failed=item["failed"],
        credits=item["credits"],
        cost=Decimal(repr(item["cost"])),
        reasons={
            name.removeprefix(REASON): count
            for name, count in item.items()
            if name.startswith(REASON) and count
        },
        sizes=tuple(item.get(f"{SIZE}{number}", 0) for number in range(SIZE_CLASSES)),
        types=item.get(TYPES, {}),
        groups={group_id: GroupCount(*group) for group_id, group in item.get(GROUPS, {}).items()},
    )


def _read_ingest(item: Item) -> Ingest | None:
    text = item.get("ingest")
    if text is None:
        return None
    status = IngestStatus.PENDING if item["ingesting"] else IngestStatus.DONE
    return msgspec.structs.replace(
        _ingest.decode(text), status=status, next_index=item["ingest_next"]
    )


RUNS_PER_PAGE = 100
"""Runs per query, by default."""


async def list_run_rows(
    table: Table,
    job_id: str,
    *,
    below: int | None = None,
    limit: int = RUNS_PER_PAGE,
    known_only: bool = False,
) -> AsyncIterator[RunRow]:
    """List the runs of a job, newest first, tombstones included, with a run_sequence below `below`.
    Reads `limit` runs a query. An unreadable row raises UnreadableRow, or is left out if
    `known_only`."""
    first, last = run_key(job_id, 0), run_key(job_id, 10**10 - 1)
    if below is not None:
        last = run_key(job_id, max(below - 1, 0))
    async for page in table.pages(
        Query(
            first.pk, between=(first.sk, last.sk), forward=False, limit=limit, known_only=known_only
        )
    ):
        table.records_read += len(page.items)
        rows = (
            decode_intact(read_run_row, page.items) if known_only else map(read_run_row, page.items)
        )
        for row in rows:
            yield row


TRIES = 20
"""Lost races after which an optimistic write gives up."""
SUMS_AT_ONCE = 16
"""Runs whose counters are added up at a time."""
SUM_TRIES = 4
"""Sums that pass the total of their run after which the last one is taken as it is."""


_CUT_SHORT_STATES = (RunStatus.STOPPED, RunStatus.FAILED)
_ENDED_STATES = (RunStatus.COMPLETED, *_CUT_SHORT_STATES)


class RunVersionConflict(Exception):
    """Another writer changed the row since it was read: read it and decide again."""


class Change(NamedTuple):
    """One change of a run's row under its version: attributes to set, add and remove.

    `status`, `paused`, `ingesting` and `unsettled` bring the index keys, times and `ended_at`
    along; a run that is cut short becomes unsettled. A change that ends or settles a run carries
    the sum of its items. Only a change that raises `counter_epoch` or `folds` may set counters. An
    entry of `removes` that begins with "#" is a path of placeholders; `values` defines these, and
    those of the condition.
    """

    status: RunStatus | None = None
    paused: bool | None = None
    ingesting: bool | None = None
    unsettled: bool | None = None
    sets: Mapping[str, Plain] = {}
    adds: Mapping[str, int] = {}
    removes: Sequence[str] = ()
    condition: str = ""
    values: Mapping[str, PlaceholderValue] = {}

    @property
    def carries_sum(self) -> bool:
        """True if the run has ended, or is settled, with this change: readers of its row then read
        nothing else."""
        return self.status in _ENDED_STATES or self.unsettled is False


class Expression(NamedTuple):
    """A change as DynamoDB takes it."""

    update: str
    condition: str
    values: dict[str, PlaceholderValue]


class DynamoRunRows:
    """Reads and changes run rows. A caller has `daily_tasks` accepted a day; 0 means no limit."""

    def __init__(self, table: Table, places: RunPlaces, *, daily_tasks: int = 0) -> None:
        self.table = table
        self.places = places
        self.daily_tasks = daily_tasks

    async def read(self, run_id: str) -> RunRow | None:
        """Read a run strongly by its id, with its sum; None if it is gone."""
        place = await self.places.find(run_id)
        return None if place is None else await self.read_at(place)

    async def read_at(self, place: RunPlace) -> RunRow | None:
        """Read a run strongly by its place, with its sum; None if it is gone."""
        row = await self.read_bare(place)
        return None if row is None else await self.summed(row)

    async def read_bare(self, place: RunPlace) -> RunRow | None:
        """Read a run strongly by its place, as its row has it; None if it is gone."""
        item = await self.table.get(place.key)
        return None if item is None else read_run_row(item)

    async def summed(self, row: RunRow) -> RunRow:
        """Add up the items of a run that was just read, unless its row carries their sum."""
        return row if row.is_summed else await self.summed_anew(row)

    async def summed_all(self, rows: Iterable[RunRow]) -> dict[Key, RunRow]:
        """Add up the items of runs that were just read, several at a time; leave out those of
        which an item is unreadable. Returns the rows by key, in the same order."""
        found = {row.place.key: row for row in rows}

        async def add_up(key: Key) -> None:
            try:
                found[key] = await self.summed(found[key])
            except UnreadableRow:
                del found[key]

        await for_each(add_up, list(found), limit=SUMS_AT_ONCE)
        return found

    async def summed_anew(self, row: RunRow) -> RunRow:
        """Add up the items of a run that was just read, whatever its row carries.

        Tasks that were added after the row was read may have ended since: the row is then read
        again, so that no sum passes its total.
        """
        for _ in range(SUM_TRIES):
            found = await process_items(self.table, row.run.run_id, row.parts, row.counter_epoch)
            items = [one for one in found if not one.folded or one.folded > row.folds]
            values = sum_values(NOTHING, [one.values for one in items])
            size = sum(one.size for one in found)
            result = row.with_counted(values, processes=len(items), item_bytes=size)
            stats = result.run.stats
            again = None if stats.completed <= stats.total else await self.read_bare(row.place)
            if again is None:
                return result
            row = again
        return result

    async def change(self, row: RunRow, change: Change, *, now: int) -> RunRow:
        """Write a change and return the row afterwards, with the sum that `row` has. Raises
        RunVersionConflict."""
        if change.carries_sum:
            row = await self.summed(row)
        token = self.table.clock.new_id()
        update, condition, values = self.expression(row, change, now=now, token=token)
        try:
            item = await self.table.update(row.place.key, update, condition=condition, **values)
        except AwsRefused as refused:
            if not refused.is_condition:
                raise
            found = conflicting_item(refused)
            if found is None or found.get("moved_by") != token:
                raise RunVersionConflict from None
            # The token is this call's own: an earlier try wrote it, and its answer was lost.
            item = found
        after = read_run_row(item)
        if row.is_summed and after.counter_epoch == row.counter_epoch:
            after = after.with_counted(
                row.counted, processes=row.processes, item_bytes=row.item_bytes
            )
        if row.live:
            await self.make_end_due(after)
        return after

    async def keep_sum(self, place: RunPlace) -> RunRow | None:
        """Write the sum of an ended run on its row if that lacks any of it; return the row
        afterwards, None if the run is gone."""
        for _ in range(TRIES):
            row = await self.read_bare(place)
            if row is None or row.live or row.run.status is RunStatus.DELETED:
                return row
            summed = await self.summed_anew(row)
            if summed.counted == row.counted:
                return summed
            try:
                # The version stays: no decision about an ended run depends on this.
                await self.table.update(
                    place.key,
                    f"SET {COUNTED} = :counted, {SUMS} = :sums",
                    condition=f"counter_epoch = :epoch AND {SUMS} = :seen",
                    counted=encode_values(summed.counted),
                    sums=row.sums + 1,
                    epoch=row.counter_epoch,
                    seen=row.sums,
                )
            except AwsRefused as refused:
                if not refused.is_condition:
                    raise
                continue
            return summed
        raise contention_error()

    async def make_end_due(self, row: RunRow) -> None:
        """Make the outbox entries due if the run has ended and has any. `change` does so itself;
        whoever ends a run by `change_part` calls this with the row after the transaction."""
        if row.live:
            return
        for subscriber in row.subscribers:
            key = EntryKey(row.run.run_id, subscriber)
            await make_due(self.table, key, ended_as=row.run.status, ended_at=row.ended_at)

    def change_part(self, row: RunRow, change: Change, *, now: int) -> dict[str, Any]:
        """Describe a change within a transaction."""
        token = self.table.clock.new_id()
        update, condition, values = self.expression(row, change, now=now, token=token)
        return self.table.update_part(row.place.key, update, condition=condition, **values)

    def expression(self, row: RunRow, change: Change, *, now: int, token: str) -> Expression:
        """Build the update expression of a change, its condition and values."""
        at = max(row.run.updated_at, now)
        sum_of_items: dict[str, Plain] = {
            COUNTED: encode_values(row.counted),
            SUMS: row.sums + 1,
        }
        sets: dict[str, Plain] = {
            **(sum_of_items if change.carries_sum else {}),
            **change.sets,
            "updated_at": at,
            "version": row.run.version + 1,
            "moved_by": token,
        }
        removes = list(change.removes)
        if (change.status, change.paused, change.ingesting, change.unsettled) != (None,) * 4:
            _set_state(row, change, at, sets, removes)
        values: dict[str, PlaceholderValue] = {**change.values, "known_version": row.run.version}
        values |= {f"set_{name}": value for name, value in sets.items()}
        values |= {f"add_{name}": value for name, value in change.adds.items()}
        update = "SET " + ", ".join(f"#{name} = :set_{name}" for name in sets)
        if change.adds:
            update += " ADD " + ", ".join(f"#{name} :add_{name}" for name in change.adds)
        if removes:
            update += " REMOVE " + ", ".join(f"#{name.lstrip('#')}" for name in removes)
        condition = "#version = :known_version"
        if change.carries_sum:
            condition += f" AND {SUMS} = :seen_sums"
            values["seen_sums"] = row.sums
        if change.condition:
            condition += f" AND ({change.condition})"
        return Expression(update, condition, values)

    async def change_with_retry(
        self, row: RunRow, decision: Callable[[RunRow], Change | None], *, now: int
    ) -> RunRow | None:
        """Write the change that `decision` returns for the row; after a lost race decide again on
        the latest row. Return the row afterwards; None, and write nothing, if the decision is None
        or the run is gone."""
        known: RunRow | None = row
        for _ in range(TRIES):
            change = None if known is None else decision(known)
            if known is None or change is None:
                return None
            try:
                return await self.change(known, change, now=now)
            except RunVersionConflict:
                known = await self.read_at(row.place)
        raise contention_error()

    async def write_late_status(self, row: RunRow, *, now: int) -> RunRow:
        """Move a live run's status on if its sum requires so; return the row afterwards, summed.
        Each writer that may have been the last one calls this after its write."""
        for _ in range(TRIES):
            row = await self.summed(row)
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
            except RunVersionConflict:
                again = await self.read_bare(row.place)
                if again is None:
                    return row
                row = again
        raise contention_error()

    async def with_late_status(self, row: RunRow) -> RunRow:
        """Return a row as readers may see it. The status follows the counters by a write of its
        own; a reader who comes before that write, or after a crash, makes it."""
        row = await self.summed(row)
        return await self.write_late_status(row, now=row.run.updated_at)


def _set_state(
    row: RunRow, change: Change, at: int, sets: dict[str, Plain], removes: list[str]
) -> None:
    """Add the attributes that follow from a change of state."""
    run = row.run
    status = change.status or run.status
    paused = run.paused if change.paused is None else change.paused
    ingesting = run.ingesting if change.ingesting is None else change.ingesting
    unsettled = _unsettled_after(row, change)
    sets |= {"status": str(status), "paused": paused, "ingesting": ingesting}
    sets["shape"] = _shape(run, live=status in LIVE_RUN_STATES, ingesting=ingesting)
    if unsettled is not row.unsettled:
        sets["unsettled"] = unsettled
    sets["dispatch_changed_at"] = at
    if status not in LIVE_RUN_STATES and not row.ended_at:
        sets["ended_at"] = at
    keys = index_keys(
        run.run_id,
        State(status, paused, ingesting, unsettled),
        changed_at=at,
        caller=row.caller,
        looked_at=(row.ended_at or at) + ENDED_FOR,
        has_more=row.has_more or HOSTS in change.sets,
    )
    for name, value in keys.items():
        if value is None:
            removes.append(name)
        else:
            sets[name] = value


def _unsettled_after(row: RunRow, change: Change) -> bool:
    """Return whether a run is unsettled after a change. Calls in flight when a run is cut short
    still end their tasks, and a process may die between the end of a row and its addition to the
    counters."""
    if change.unsettled is not None:
        return change.unsettled
    cut_short = change.status in _CUT_SHORT_STATES and row.run.stats.completed < row.run.stats.total
    return row.unsettled or cut_short


async def dependent_runs(table: Table, job_id: str, run_id: str) -> list[str]:
    """Return the ids of the runs that draw bodies, or are still copied, from a run."""
    prefix = pin_key(job_id, run_id, "")
    found: list[str] = []
    async for page in table.pages(Query(prefix.pk, begins_with=prefix.sk, keys_only=True)):
        found += [item[SORT_KEY].rpartition("#")[2] for item in page.items]
    return found
