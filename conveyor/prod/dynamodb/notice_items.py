"""A notice's item: what is in it, how it is read, and how the end of its run makes it due.

That is a write of its own, right after the one that ended the run. Where it is lost, the notice is
due when it was before, for the next sign of life, and whoever takes it then sees the end.
"""

from __future__ import annotations

import logging

import msgspec

from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import Callback, Run, RunStatus
from conveyor.domain.run_events import Ending
from conveyor.ports.outbox import Notice
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.items import Item, Table
from conveyor.prod.dynamodb.keys import OUTBOX, by_time, notice_key
from conveyor.prod.dynamodb.shapes import whole
from conveyor.prod.dynamodb.table import ROW_SHAPE

_encode = msgspec.json.encode
_callback = msgspec.json.Decoder(Callback)
_ending = msgspec.json.Decoder(Ending)
_log = logging.getLogger("conveyor.records")


def new_notice_item(run: Run, callback: Callback) -> Item:
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


def ending_text(ending: Ending) -> str:
    """An ending as an attribute."""
    return _encode(ending).decode()


@whole
def read_notice(item: Item, run: Run | None) -> Notice:
    """A leased notice from its item, with its run. Raises Damaged."""
    ending = item.get("ending")
    return Notice(
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


async def hasten(table: Table, run_id: str, *, ended_as: RunStatus, ended_at: int) -> None:
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
