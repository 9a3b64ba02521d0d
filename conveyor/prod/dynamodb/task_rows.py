"""Task rows: their attributes, and how they are read, inserted, searched and removed.

A row holds the task's history, so a change and its event are one conditional write. Every write
leaves its token in `moved_by`, and in the event: a writer whose answer was lost recognises its own
write.

Rows are inserted by INSERT statements, which refuse an existing row. BatchWriteItem takes no
condition and would reset a row that has moved on. Inserts are therefore safe to repeat after a lost
answer, a redelivered message or a crash.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from decimal import Decimal

import msgspec

from conveyor.aio.concurrency import for_each
from conveyor.domain import ids
from conveyor.domain.hosts import host_and_port
from conveyor.domain.ids import task_index
from conveyor.domain.model import (
    Event,
    Problem,
    StoredBody,
    Task,
    TaskFailure,
    TaskSpec,
    TaskStatus,
    WaitReason,
)
from conveyor.prod.aws.calls import AwsRefused, retry_unprocessed
from conveyor.prod.dynamodb.client import (
    ALL_ITEMS,
    UNPROCESSED,
    Item,
    Page,
    Query,
    RowFilter,
    Table,
    decodes_row,
    keys_of,
    tag,
    untag_all,
)
from conveyor.prod.dynamodb.failure_groups import remove_group_items
from conveyor.prod.dynamodb.run_rows import RunPlace
from conveyor.prod.dynamodb.schema import (
    END,
    PARTITION_KEY,
    ROW_SHAPE,
    SORT_KEY,
    TIME_TO_LIVE,
    Key,
    task_partition,
    task_sort_key,
)
from conveyor.records.sharded_reads import ShardRead, ShardRows, stream

_encode = msgspec.json.encode
_spec = msgspec.json.Decoder(TaskSpec)
_result = msgspec.json.Decoder(StoredBody)
_problem = msgspec.json.Decoder(Problem)
_event = msgspec.json.Decoder(Event)


class _SignedEvent(Event, frozen=True, kw_only=True):
    """An event as stored; `by` is the token of the write."""

    by: str


class ClaimState(msgspec.Struct, frozen=True, kw_only=True):
    """The claim of a task as its row states it; instants in milliseconds since 1970."""

    status: TaskStatus
    attempts: int
    interruptions: int
    claim_number: int
    claimed_until: int
    not_before: int
    updated_at: int
    claimed_at: int = 0
    moved_by: str | None = None


class _TaskRow(ClaimState, frozen=True, kw_only=True):
    task_id: str
    spec: str
    created_at: int
    waiting: WaitReason | None = None
    waiting_since: int = 0
    result: str | None = None
    error: str | None = None
    failure: TaskFailure | None = None
    failure_group: str | None = None
    source_run_id: str | None = None


TASK_NAMES = tuple(name for name in _TaskRow.__struct_fields__ if name != "moved_by")
"""The attributes of a row that `read_task` decodes. Its history, which may be long, is none."""


def new_task_item(task_id: str, spec: TaskSpec, *, now: int) -> Item:
    """Make the row of a new pending task."""
    return _new_item(task_id, encode_record(spec), now=now)


def _new_item(task_id: str, spec: str, *, now: int) -> Item:
    return {
        "shape": ROW_SHAPE,
        "task_id": task_id,
        "spec": spec,
        "status": str(TaskStatus.PENDING),
        "created_at": now,
        "updated_at": now,
        "attempts": 0,
        "interruptions": 0,
        "claim_number": 0,
        "claimed_at": 0,
        "claimed_until": 0,
        "not_before": 0,
        "events": [],
    }


def inherited_item(source: Item, source_run_id: str, *, now: int, time_to_live: int | None) -> Item:
    """Make the row of a rerun that keeps the result of a terminal row of `source_run_id`: without
    its history, and with the run that owns its body."""
    item = {
        **_new_item(source["task_id"], source["spec"], now=now),
        "status": source["status"],
        "attempts": source["attempts"],
        "interruptions": source["interruptions"],
        "source_run_id": source.get("source_run_id", source_run_id),
    }
    kept = ("result", "error", "failure", "failure_group")
    item |= {name: source[name] for name in kept if name in source}
    return item if time_to_live is None else item | {TIME_TO_LIVE: time_to_live}


@decodes_row
def read_task(run_id: str, item: Item) -> Task:
    """Decode a task. Raises DamagedRow."""
    row = msgspec.convert(item, _TaskRow)
    return Task(
        run_id=run_id,
        task_id=row.task_id,
        index=task_index(row.task_id),
        spec=_spec.decode(row.spec),
        status=row.status,
        created_at=row.created_at,
        updated_at=row.updated_at,
        attempts=row.attempts,
        interruptions=row.interruptions,
        claim_number=row.claim_number,
        claimed_until=row.claimed_until,
        not_before=row.not_before,
        waiting=row.waiting,
        waiting_since=row.waiting_since,
        result=None if row.result is None else _result.decode(row.result),
        error=None if row.error is None else _problem.decode(row.error),
        failure=row.failure,
        failure_group=row.failure_group,
        source_run_id=row.source_run_id,
    )


def host_of_task(item: Item) -> str:
    """Read the host of a task out of its item; empty if it cannot be read."""
    try:
        return host_and_port(_spec.decode(item["spec"]).url)
    except (KeyError, ValueError):
        return ""


class BodyKind(msgspec.Struct, frozen=True):
    """The part of a result that counters go by."""

    size: int
    content_type: str


_body_kind = msgspec.json.Decoder(BodyKind)


def read_body_kind(text: str) -> BodyKind:
    """Decode a part of the result of a task's item. Raises ValueError."""
    return _body_kind.decode(text)


def read_problem(text: str) -> Problem:
    """Decode the error of a task's item. Raises ValueError."""
    return _problem.decode(text)


@decodes_row
def read_claim(item: Item) -> ClaimState:
    """Decode the claim of a task's row. Raises DamagedRow."""
    return msgspec.convert(item, ClaimState)


@decodes_row
def read_events(item: Item) -> list[Event]:
    """Decode the history of a task, oldest event first. Raises DamagedRow."""
    return [_event.decode(text) for text in item["events"]]


class EventSpend(msgspec.Struct, frozen=True):
    """The spend of an event."""

    credits: int = 0
    cost: Decimal = Decimal(0)


class _SpendOfEvent(msgspec.Struct, frozen=True):
    spend: EventSpend = EventSpend()


_spend_of_event = msgspec.json.Decoder(_SpendOfEvent)
_spend = msgspec.json.Decoder(EventSpend)


def read_spends(events: Sequence[str], shed: str | None) -> list[EventSpend]:
    """Decode what the events of a row spent, and those that it shed. Raises ValueError."""
    spends = [_spend_of_event.decode(text).spend for text in events]
    spends += [] if shed is None else [_spend.decode(shed)]
    if not all(one.cost.is_finite() for one in spends):
        raise ValueError("not an amount of money")
    return spends


async def shed_history(table: Table, key: Key) -> bool:
    """Drop the history of a row that has no room for more, and keep what it spent; return False if
    there is none to drop. Does nothing to a row that moves meanwhile."""
    item = await table.get(key)
    if item is None or not item["events"]:
        return False
    spends = read_spends(item["events"], item.get("shed_spend"))
    cost = sum((one.cost for one in spends), Decimal())
    total = EventSpend(sum(one.credits for one in spends), cost)
    try:
        await table.update(
            key,
            "SET #events = :none, shed_spend = :spent",
            condition="moved_by = :mover AND size(#events) = :length",
            none=[],
            spent=msgspec.json.encode(total).decode(),
            mover=item["moved_by"],
            length=len(item["events"]),
        )
    except AwsRefused as refused:
        if not refused.is_condition:
            raise
    return True


def is_too_large(refused: AwsRefused) -> bool:
    """Return whether a write was refused because the item would outgrow the table's limit."""
    return refused.word == "ValidationException" and "size" in refused.message


def encode_event(event: Event, token: str) -> str:
    """Encode an event with the token of the call that writes it."""
    return encode_record(_SignedEvent(**msgspec.structs.asdict(event), by=token))


def was_written_by(item: Item, token: str) -> bool:
    """Return whether a call wrote this row: as its last writer or, if the call left an event, at
    any time before."""
    return item.get("moved_by") == token or any(token in text for text in item["events"])


def encode_record(record: TaskSpec | StoredBody | Problem | Event) -> str:
    """Encode a record as the JSON text of one attribute."""
    return _encode(record).decode()


MAX_SCANNED = 1_000
"""Rows that one query of a rare status may read."""


class Reference(msgspec.Struct, frozen=True):
    """A row's index and task id."""

    index: int
    task_id: str


async def find_references(
    table: Table,
    place: RunPlace,
    wanted: RowFilter,
    *,
    after: int,
    piece: int,
    count: Callable[[int, int], None] = lambda read, returned: None,
) -> AsyncIterator[Reference]:
    """Find the rows with an index above `after` that pass the filter `wanted`, in index order over
    all shards.

    Holds about `piece` references at a time. While few rows pass, each query of a shard reads twice
    as many rows as the one before. Calls `count` after each query with the rows read and returned.
    """
    sizes = [0] * place.shards.count

    async def read(asked: ShardRead) -> ShardRows[Reference]:
        at = max(asked.after, after)
        size = max(asked.limit, sizes[asked.shard])
        page = await query_after(
            table, place, asked.shard, at, limit=size, keys_only=True, where=wanted
        )
        rows = [_reference(item) for item in page.items]
        if 2 * len(rows) < page.read:
            sizes[asked.shard] = min(2 * size, MAX_SCANNED)
        count(page.read, len(rows))
        goes_on = page.last is not None
        return ShardRows(rows, last_scanned_index(page, at) if goes_on else None, page.read)

    async for row in stream(read, place.shards, piece=piece):
        yield row


async def query_after(
    table: Table,
    place: RunPlace,
    shard: int,
    index: int,
    *,
    where: RowFilter = ALL_ITEMS,
    limit: int,
    keys_only: bool = False,
) -> Page:
    """Query a shard's rows after an index; see `Query`."""
    low = ids.encode_index(min(index + 1, ids.MAX_INDEX))
    return await table.page(
        Query(
            task_partition(place.job_id, place.shards, shard),
            between=(task_sort_key(place.run_id, low), task_sort_key(place.run_id, END)),
            where=where,
            limit=limit,
            keys_only=keys_only,
        )
    )


def last_scanned_index(page: Page, before: int) -> int:
    """Return the index of the last row that a query read, returned or not; `before` if it read
    none."""
    if page.last is not None:
        return _reference(untag_all(page.last)).index
    return _reference(page.items[-1]).index if page.items else before


def _reference(item: Item) -> Reference:
    task_id: str = item[SORT_KEY].rpartition("#")[2]
    return Reference(ids.task_index(task_id), task_id)


STATEMENTS_PER_CALL = 25
"""Statements per BatchExecuteStatement."""
CONCURRENT_CALLS = 16
"""Concurrent calls of one `insert_items` or `remove_untouched`."""
DUPLICATE_ITEM = "DuplicateItem"
TRANSIENT_ERRORS = frozenset(
    {
        "InternalServerError",
        "ProvisionedThroughputExceeded",
        "RequestLimitExceeded",
        "ThrottlingError",
        "TransactionConflict",
    }
)
"""Errors of single statements that are worth a retry."""


async def insert_items(table: Table, items: Sequence[tuple[Key, Item]]) -> list[Key]:
    """Insert the items that do not exist yet: any number, 25 a call, calls concurrently.

    Returns, in order, the keys whose insertion was confirmed. After a lost answer an inserted key
    counts as one that existed before, so a caller that removes rows again uses `remove_untouched`,
    and leaves those it cannot know of to a later scan. Raises ConveyorError(unavailable) if
    DynamoDB leaves items unprocessed, AwsRefused if an item is invalid; other items may have been
    written even so.
    """
    inserted: set[Key] = set()

    async def insert(some: Sequence[tuple[Key, Item]]) -> None:
        await _insert(table, some, inserted)

    pieces = [
        items[start : start + STATEMENTS_PER_CALL]
        for start in range(0, len(items), STATEMENTS_PER_CALL)
    ]
    await for_each(insert, pieces, limit=CONCURRENT_CALLS)
    return [key for key, _ in items if key in inserted]


async def remove_untouched(table: Table, keys: Sequence[Key]) -> None:
    """Remove task rows that were never claimed; leave the others."""

    async def remove(key: Key) -> None:
        try:
            await table.delete(key, condition="claim_number = :zero", zero=0)
        except AwsRefused as refused:
            if not refused.is_condition:
                raise

    await for_each(remove, keys, limit=CONCURRENT_CALLS)


async def _insert(table: Table, items: Sequence[tuple[Key, Item]], inserted: set[Key]) -> None:
    async def call(left: list[tuple[Key, Item]]) -> list[tuple[Key, Item]]:
        answers = await table.execute_batch([_statement(table, *item) for item in left])
        undone: list[tuple[Key, Item]] = []
        for item, answer in zip(left, answers, strict=True):
            error = answer.get("Error")
            if error is None:
                inserted.add(item[0])
            elif error["Code"] in TRANSIENT_ERRORS:
                undone.append(item)
            elif error["Code"] != DUPLICATE_ITEM:
                asked = ("dynamodb", "batch_execute_statement")
                raise AwsRefused(error["Code"], error.get("Message", ""), asked=asked)
        return undone

    await retry_unprocessed(call, list(items), table.clock, complaint=UNPROCESSED)


def _statement(table: Table, key: Key, item: Item) -> dict[str, object]:
    decodes_row = {PARTITION_KEY: key.pk, SORT_KEY: key.sk, **item}
    names = ",".join(f"'{name}':?" for name in decodes_row)
    return {
        "Statement": f'INSERT INTO "{table.name}" VALUE {{{names}}}',
        "Parameters": [tag(value) for value in decodes_row.values()],
    }


async def remove_rows(table: Table, place: RunPlace) -> None:
    """Remove all rows of a run, whatever their state, and the items of its failure groups."""

    async def remove(shard: int) -> None:
        partition = task_partition(place.job_id, place.shards, shard)
        prefix = task_sort_key(place.run_id, "")
        async for page in table.pages(Query(partition, begins_with=prefix, keys_only=True)):
            await table.delete_many(keys_of(page.items))

    await for_each(remove, range(place.shards.count))
    await remove_group_items(table, place.run_id)
