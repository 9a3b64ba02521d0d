"""Outbox rows: the entries that are written with a run, and the write that makes them due.

The sort key names the subscriber. The run's row notes by an attribute for each subscriber that an
entry waits, so that whoever ends the run writes no more than is there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import Callback, Job, Run, RunStatus
from conveyor.domain.run_events import RunFinished
from conveyor.ports.outbox import EntryKey, OutboxEntry, Subscriber
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import Item, Plain, Table, decodes_row
from conveyor.prod.dynamodb.schema import OUTBOX, ROW_SHAPE, SORT_KEY, by_time, notice_key

WAITING: Mapping[Subscriber, str] = {
    Subscriber.CALLBACK: "calls_back",
    Subscriber.WEBHOOK: "notifies",
}
"""The attribute of a run's row that says that an entry waits for its end."""

_callback = msgspec.json.Decoder(Callback)
_ending = msgspec.json.Decoder(RunFinished)
_encode = msgspec.json.encode
_log = logging.getLogger("conveyor.records")


def subscribers_of(job: Job, run: Run) -> list[Subscriber]:
    """Return those who wait for the end of a new run: the callback of the job for the first one,
    its webhook for each."""
    found: list[Subscriber] = []
    if job.callback is not None and run.run_sequence == 1:
        found.append(Subscriber.CALLBACK)
    if job.webhook is not None:
        found.append(Subscriber.WEBHOOK)
    return found


def new_entry_parts(table: Table, job: Job, run: Run) -> list[dict[str, Any]]:
    """Describe the entries of a new run within the transaction that makes it, due at once."""
    return [
        table.put_part(
            notice_key(run.run_id, subscriber),
            new_entry_item(job, run.run_id, subscriber, run.created_at),
        )
        for subscriber in subscribers_of(job, run)
    ]


def late_webhook_part(table: Table, job: Job, run_id: str, *, now: int) -> dict[str, Any]:
    """Describe the entry of a live run whose job gets a webhook, due at once; one that is there
    waits for the present webhook from now on."""
    item = new_entry_item(job, run_id, Subscriber.WEBHOOK, now)
    kept = [name for name in item if name != "webhook_number"]
    return table.update_part(
        notice_key(run_id, Subscriber.WEBHOOK),
        "SET webhook_number = :webhook_number, "
        + ", ".join(f"#{name} = if_not_exists(#{name}, :{name})" for name in kept),
        condition="",
        **item,
    )


def new_entry_item(job: Job, run_id: str, subscriber: Subscriber, due_at: int) -> dict[str, Plain]:
    """Make the entry of a run of the job."""
    item: dict[str, Plain] = {
        "shape": ROW_SHAPE,
        "run_id": run_id,
        "job_id": job.job_id,
        "due_at": due_at,
        "attempts": 0,
        "gsi2pk": OUTBOX,
        "gsi2sk": by_time(due_at, run_id),
    }
    if subscriber is Subscriber.CALLBACK:
        item["callback"] = _encode(job.callback).decode()
    else:
        item["webhook_number"] = job.webhook_number
    return item


@decodes_row
def read_entry_key(item: Item) -> EntryKey:
    """Return the key of an entry. Raises DamagedRow."""
    run_id = item["run_id"]
    if not isinstance(run_id, str):
        raise TypeError("run_id")
    for subscriber in Subscriber:
        if item[SORT_KEY] == notice_key(run_id, subscriber).sk:
            return EntryKey(run_id, subscriber)
    raise ValueError(SORT_KEY)


@decodes_row
def read_outbox_item(item: Item, run: Run | None, run_ended_at: int) -> OutboxEntry:
    """Decode a leased outbox entry, and add its run. `run_ended_at` is the end that the run's row
    notes, which a crash may have kept from the entry; 0 if there is none. Raises DamagedRow."""
    key, ending = read_entry_key(item), item.get("ending")
    callback = _callback.decode(item["callback"]) if key.subscriber is Subscriber.CALLBACK else None
    return OutboxEntry(
        job_id=item["job_id"],
        run_id=key.run_id,
        subscriber=key.subscriber,
        callback=callback,
        lease=item["leased_until"],
        run=run,
        ended_as=RunStatus(item["ended_as"]) if "ended_as" in item else None,
        ended_at=item.get("ended_at", run_ended_at),
        ending=None if ending is None else _ending.decode(ending),
        decided_at=item.get("decided_at", 0),
        attempts=item["attempts"],
        webhook_number=item.get("webhook_number", 0),
    )


def encode_run_event(ending: RunFinished) -> str:
    """Encode a run-finished event as an attribute."""
    return _encode(ending).decode()


async def make_due(table: Table, key: EntryKey, *, ended_as: RunStatus, ended_at: int) -> None:
    """Make the entry of an ended run due at the end, and note the final status, unless that was
    done before or the event is fixed already. Only logs a failure: the end itself is written."""
    try:
        await table.update(
            notice_key(*key),
            "SET ended_as = :ended_as, ended_at = :ended_at, due_at = :ended_at, gsi2sk = :place",
            condition="attribute_exists(pk) AND attribute_not_exists(ended_at) "
            "AND attribute_not_exists(ending)",
            ended_as=str(ended_as),
            ended_at=ended_at,
            place=by_time(ended_at, key.run_id),
        )
    except ConveyorError as error:
        if isinstance(error, AwsRefused) and error.is_condition:
            return
        _log.warning(
            "run-finished notification delayed until the entry is due again",
            extra={"run_id": key.run_id, "error": type(error).__name__},
        )
