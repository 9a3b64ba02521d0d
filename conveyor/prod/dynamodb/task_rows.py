"""A task's own row: what is in it, and how it is read.

A row's history lies in the row itself, so that a move and the event it leaves are one conditional
write. `moved_by` is the token of the call that wrote the row last: a writer whose answer was lost
finds its own token there.

References of a run's rows that may be rare among all others, of all shards in one order.

Writing rows that may be there already, and taking back those that nobody has touched.

BatchWriteItem takes no condition and would set back a row that has moved on; an INSERT refuses one
that is there. It is therefore safe to repeat: after a lost answer, a redelivered message, a crash.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from conveyor.aio.concurrency import for_each
from conveyor.domain import ids
from conveyor.domain.ids import task_index
from conveyor.domain.model import (
    Event,
    Problem,
    StoredBody,
    Task,
    TaskFailure,
    TaskSpec,
    TaskStatus,
)
from conveyor.prod.aws.calls import AwsRefused, retry_unprocessed
from conveyor.prod.dynamodb.client import (
    ALL_ITEMS,
    UNDONE,
    Item,
    Page,
    Query,
    RowFilter,
    Table,
    keys_of,
    tag,
    untag_all,
    whole,
)
from conveyor.prod.dynamodb.run_rows import RunPlace
from conveyor.prod.dynamodb.schema import (
    END,
    PARTITION_KEY,
    ROW_SHAPE,
    SORT_KEY,
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
    """An event as it is kept: `by` is the token of the call that wrote it."""

    by: str


class ClaimState(msgspec.Struct, frozen=True, kw_only=True):
    """What a task's row says of who may work it; instants in milliseconds since 1970."""

    status: TaskStatus
    attempts: int
    interruptions: int
    claim_number: int
    claimed_until: int
    not_before: int
    claimed_at: int = 0
    moved_by: str | None = None


class _TaskRow(ClaimState, frozen=True, kw_only=True):
    task_id: str
    spec: str
    created_at: int
    updated_at: int
    result: str | None = None
    error: str | None = None
    failure: TaskFailure | None = None
    source_run_id: str | None = None


def new_task_item(task_id: str, spec: TaskSpec, *, now: int) -> Item:
    """The row of a task that nobody has claimed yet."""
    return _new_item(task_id, to_text(spec), now=now)


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


def inherited_item(source: Item, source_run_id: str, *, now: int) -> Item:
    """The row of a rerun that keeps the end of a terminal row of `source_run_id`, with the run that
    owns its body, and without its history."""
    item = {
        **_new_item(source["task_id"], source["spec"], now=now),
        "status": source["status"],
        "attempts": source["attempts"],
        "interruptions": source["interruptions"],
        "source_run_id": source.get("source_run_id", source_run_id),
    }
    kept = ("result", "error", "failure")
    return item | {name: source[name] for name in kept if name in source}


@whole
def read_task(run_id: str, item: Item) -> Task:
    """A task from its item. Raises DamagedRow."""
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
        result=None if row.result is None else _result.decode(row.result),
        error=None if row.error is None else _problem.decode(row.error),
        failure=row.failure,
        source_run_id=row.source_run_id,
    )


@whole
def read_claim(item: Item) -> ClaimState:
    """The state of a task's claim, from its item. Raises DamagedRow."""
    return msgspec.convert(item, ClaimState)


@whole
def read_events(item: Item) -> list[Event]:
    """The history of a task from its item, oldest first. Raises DamagedRow."""
    return [_event.decode(text) for text in item["events"]]


def event_text(event: Event, token: str) -> str:
    """An event as it is kept in its row, with the token of the call that writes it."""
    return to_text(_SignedEvent(**msgspec.structs.asdict(event), by=token))


def was_moved_by(item: Item, token: str) -> bool:
    """Whether a call wrote this row, however far the row has moved on since, if it left an event;
    else whether it was the last to write it."""
    return item.get("moved_by") == token or any(token in text for text in item["events"])


def to_text(record: TaskSpec | StoredBody | Problem | Event) -> str:
    """A record as one JSON text: what no condition looks at."""
    return _encode(record).decode()


MOST_TOUCHED = 1_000
"""Rows that one query for rare ones touches, at most."""


class Reference(msgspec.Struct, frozen=True):
    """A row by its index and its task's id."""

    index: int
    task_id: str


async def references(
    table: Table,
    place: RunPlace,
    wanted: RowFilter,
    *,
    after: int,
    piece: int,
    count: Callable[[int, int], None] = lambda read, returned: None,
) -> AsyncIterator[Reference]:
    """Yield the rows with an index above `after` that the filter `wanted` lets pass.

    About `piece` are held at a time. Where few pass, each query of a shard touches twice as many
    rows as the one before. `count` is told of each how many it touched, and how many passed.
    """
    sizes = [0] * place.shards.count

    async def read(asked: ShardRead) -> ShardRows[Reference]:
        at = max(asked.after, after)
        size = max(asked.limit, sizes[asked.shard])
        page = await rows_after(
            table, place, asked.shard, at, limit=size, keys_only=True, where=wanted
        )
        rows = [_reference(item) for item in page.items]
        if 2 * len(rows) < page.read:
            sizes[asked.shard] = min(2 * size, MOST_TOUCHED)
        count(page.read, len(rows))
        goes_on = page.last is not None
        return ShardRows(rows, last_touched(page, at) if goes_on else None, page.read)

    async for row in stream(read, place.shards, piece=piece):
        yield row


async def rows_after(
    table: Table,
    place: RunPlace,
    shard: int,
    index: int,
    *,
    where: RowFilter = ALL_ITEMS,
    limit: int,
    keys_only: bool = False,
) -> Page:
    """Make one query of a shard's rows behind an index; see `Query`."""
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


def last_touched(page: Page, before: int) -> int:
    """The index of the last row that a query touched, returned or not; `before` where there was
    none."""
    if page.last is not None:
        return _reference(untag_all(page.last)).index
    return _reference(page.items[-1]).index if page.items else before


def _reference(item: Item) -> Reference:
    task_id: str = item[SORT_KEY].rpartition("#")[2]
    return Reference(ids.task_index(task_id), task_id)


MOST_INSERT = 25
"""Statements that one call takes."""
MOST_CALLS = 16
"""Calls at a time of one `insert_items` or `remove_untouched`."""
THERE_ALREADY = "DuplicateItem"
PASSING = frozenset(
    {
        "InternalServerError",
        "ProvisionedThroughputExceeded",
        "RequestLimitExceeded",
        "ThrottlingError",
        "TransactionConflict",
    }
)
"""Refusals of a single statement that go away by themselves."""


async def insert_items(table: Table, items: Sequence[tuple[Key, Item]]) -> list[Key]:
    """Write those items that are not there; any number, 25 a call, calls side by side.

    Returns, in order, the keys that a call inserted whose answer came. One that was inserted by a
    call whose answer was lost looks like one that was there before: whoever takes rows back uses
    `remove_untouched`, and leaves what is missing here to a later look over the rows.
    Raises ConveyorError(unavailable) where the table leaves a part of it undone, AwsRefused where
    an item is not fit to be written; items may have been written all the same.
    """
    inserted: set[Key] = set()

    async def insert(some: Sequence[tuple[Key, Item]]) -> None:
        await _insert(table, some, inserted)

    pieces = [items[start : start + MOST_INSERT] for start in range(0, len(items), MOST_INSERT)]
    await for_each(insert, pieces, limit=MOST_CALLS)
    return [key for key, _ in items if key in inserted]


async def remove_untouched(table: Table, keys: Sequence[Key]) -> None:
    """Remove task rows of which no claim was ever handed out; others are left as they are."""

    async def remove(key: Key) -> None:
        try:
            await table.delete(key, condition="claim_number = :zero", zero=0)
        except AwsRefused as refused:
            if not refused.is_condition:
                raise

    await for_each(remove, keys, limit=MOST_CALLS)


async def _insert(table: Table, items: Sequence[tuple[Key, Item]], inserted: set[Key]) -> None:
    async def call(left: list[tuple[Key, Item]]) -> list[tuple[Key, Item]]:
        answers = await table.execute_batch([_statement(table, *item) for item in left])
        undone: list[tuple[Key, Item]] = []
        for item, answer in zip(left, answers, strict=True):
            error = answer.get("Error")
            if error is None:
                inserted.add(item[0])
            elif error["Code"] in PASSING:
                undone.append(item)
            elif error["Code"] != THERE_ALREADY:
                asked = ("dynamodb", "batch_execute_statement")
                raise AwsRefused(error["Code"], error.get("Message", ""), asked=asked)
        return undone

    await retry_unprocessed(call, list(items), table.clock, complaint=UNDONE)


def _statement(table: Table, key: Key, item: Item) -> dict[str, object]:
    whole = {PARTITION_KEY: key.pk, SORT_KEY: key.sk, **item}
    names = ",".join(f"'{name}':?" for name in whole)
    return {
        "Statement": f'INSERT INTO "{table.name}" VALUE {{{names}}}',
        "Parameters": [tag(value) for value in whole.values()],
    }


async def remove_rows(table: Table, place: RunPlace) -> None:
    """Remove every row of a run, whatever it is."""

    async def remove(shard: int) -> None:
        partition = task_partition(place.job_id, place.shards, shard)
        prefix = task_sort_key(place.run_id, "")
        async for page in table.pages(Query(partition, begins_with=prefix, keys_only=True)):
            await table.delete_many(keys_of(page.items))

    await for_each(remove, range(place.shards.count))
