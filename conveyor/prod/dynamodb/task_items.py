"""A task's own row: what is in it, and how it is read.

A row's history lies in the row itself, so that a move and the event it leaves are one conditional
write. `moved_by` is the token of the call that wrote the row last: a writer whose answer was lost
finds its own token there.
"""

from __future__ import annotations

import msgspec

from conveyor.domain.ids import task_index
from conveyor.domain.model import (
    Event,
    Problem,
    ResultBody,
    Task,
    TaskFailure,
    TaskSpec,
    TaskStatus,
)
from conveyor.prod.dynamodb.items import Item
from conveyor.prod.dynamodb.shapes import whole
from conveyor.prod.dynamodb.table import ROW_SHAPE

_encode = msgspec.json.encode
_spec = msgspec.json.Decoder(TaskSpec)
_result = msgspec.json.Decoder(ResultBody)
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
    """A task from its item. Raises Damaged."""
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
    """The state of a task's claim, from its item. Raises Damaged."""
    return msgspec.convert(item, ClaimState)


@whole
def read_events(item: Item) -> list[Event]:
    """The history of a task from its item, oldest first. Raises Damaged."""
    return [_event.decode(text) for text in item["events"]]


def event_text(event: Event, token: str) -> str:
    """An event as it is kept in its row, with the token of the call that writes it."""
    return to_text(_SignedEvent(**msgspec.structs.asdict(event), by=token))


def was_moved_by(item: Item, token: str) -> bool:
    """Whether a call wrote this row, however far the row has moved on since, if it left an event;
    else whether it was the last to write it."""
    return item.get("moved_by") == token or any(token in text for text in item["events"])


def to_text(record: TaskSpec | ResultBody | Problem | Event) -> str:
    """A record as one JSON text: what no condition looks at."""
    return _encode(record).decode()
