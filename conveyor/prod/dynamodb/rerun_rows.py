"""The rows of a small rerun, written before the run that leads to them.

An intent stands for them until the run is made, or they are taken back: as for a new job, whoever
takes rows back marks it first, and the run is made only under an unmarked one. A rerun may be asked
for again under the same run id, by a caller who does not know what became of the first: the intent
then passes to the second, and the first can no longer make the run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from conveyor.domain.errors import CallInFlight, ConveyorError, ErrorCode
from conveyor.domain.model import TaskStatus
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.copying import Copy, Rows, rows_of
from conveyor.prod.dynamodb.items import Item, Table, met
from conveyor.prod.dynamodb.keys import Key, intent_key, place_key
from conveyor.prod.dynamodb.places import Place
from conveyor.prod.dynamodb.run_items import RunRow
from conveyor.prod.dynamodb.submitting import INTENDED, intent_item
from conveyor.prod.dynamodb.sweeping_rows import remove_rows

_OWN = f"{INTENDED} AND #holder = :holder"


class Intent(NamedTuple):
    """That one call, `holder`, writes the rows of a run that lies at `place`."""

    place: Place
    holder: str
    is_first: bool

    @property
    def key(self) -> Key:
        """Where it lies."""
        return intent_key(self.place.job_id, self.place.run_id)


async def intend(table: Table, place: Place, source: RunRow, *, holder: str, now: int) -> Intent:
    """Take on the writing of a run's rows.

    What was written of another source is removed first. Raises ConveyorError(unavailable) where
    somebody else has taken it on meanwhile, or is taking rows back.
    """
    key = intent_key(place.job_id, place.run_id)
    found = await table.get(key)
    if found is not None and found["rerun_of"] != source.run.run_id:
        if not await take_back(table, Intent(place, found["holder"], is_first=False)):
            raise busy()
        found = None
    item: Item = {
        **intent_item(place, now=now),
        "rerun_of": source.run.run_id,
        "holder": holder,
    }
    try:
        if found is None:
            await table.put(key, item, condition="attribute_not_exists(pk)")
        else:
            await table.update(
                key,
                "SET " + ", ".join(f"#{name} = :{name}" for name in item),
                condition=f"{INTENDED} AND #holder = :seen",
                seen=found["holder"],
                **item,
            )
    except AwsRefused as refused:
        if not refused.is_condition:
            raise
        there = met(refused)
        if there is None or there.get("holder") != holder or "abandoned" in there:
            raise busy() from None
        # It was written, and its answer lost.
    return Intent(place, holder, is_first=found is None)


async def write(
    table: Table,
    intent: Intent,
    source: RunRow,
    statuses: frozenset[TaskStatus] | None,
    *,
    now: int,
) -> Rows:
    """Copy the source's rows; the rows that there are then. Raises CallInFlight."""
    copy = Copy(table, source, intent.place, statuses)
    end = source.run.next_index
    copied = await copy.run(first=0, end=end, now=now)
    if copied.held is not None:
        raise CallInFlight(source.run.run_id, copied.held)
    if intent.is_first and copied.all_inserted:
        return copied.rows
    return await rows_of(table, intent.place, first=0, end=end)


def fulfil(table: Table, intent: Intent) -> dict[str, Any]:
    """The part of the transaction that makes the run which ends an intent; refused where it is not
    this call's any more."""
    return table.delete_part(intent.key, condition=_OWN, holder=intent.holder)


async def take_back(table: Table, intent: Intent) -> bool:
    """Remove the rows again; False where the intent is not its holder's any more, or the run was
    made. Rows that are being taken back when this is cut off are left to the sweeper."""
    token = table.clock.new_id()
    try:
        await table.update(
            intent.key,
            "SET abandoned = :token",
            condition=_OWN,
            holder=intent.holder,
            token=token,
        )
    except AwsRefused as refused:
        if not refused.is_condition:
            raise
        there = met(refused)
        if there is None:
            return await _take_back_late(table, intent, token)
        if there.get("abandoned") != token:
            return False
    await remove_rows(table, intent.place)
    await table.delete(intent.key)
    return True


async def _take_back_late(table: Table, intent: Intent, token: str) -> bool:
    """The intent is gone. Where that was not for the run, another call took the rows back, and this
    one may have written some after that. A marked intent keeps all others away meanwhile."""
    place = intent.place
    item: Item = {
        **intent_item(place, now=table.clock.now()),
        "rerun_of": "",
        "holder": intent.holder,
        "abandoned": token,
    }
    try:
        await table.put(intent.key, item, condition="attribute_not_exists(pk)")
    except AwsRefused as refused:
        if not refused.is_condition:
            raise
        there = met(refused)
        if there is None or there.get("abandoned") != token:
            return False
    is_made = await table.get(place_key(place.run_id)) is not None
    if not is_made:
        await remove_rows(table, place)
    await table.delete(intent.key)
    return not is_made


def busy() -> ConveyorError:
    """What is raised where another call makes the same run."""
    return ConveyorError(
        ErrorCode.UNAVAILABLE, "another request is making this very run", retry_after=1
    )
