"""Folds: what processes have counted that have not written for long moves into the base of the run.

One transaction adds the values of items to the base, raises the number of folds on the run's row,
and marks the items with that number. A reader whose row has that number leaves them out; one that
read the row before counts them. A process that comes back finds its item closed, and goes on in the
next with what the item lacks.
"""

from __future__ import annotations

from collections.abc import Sequence

from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import Plain
from conveyor.prod.dynamodb.counter_sums import ProcessItem, process_items, sum_values
from conveyor.prod.dynamodb.recount import KEPT_FOR
from conveyor.prod.dynamodb.run_rows import (
    RECOUNTING,
    Change,
    DynamoRunRows,
    RunRow,
    counters,
)
from conveyor.prod.dynamodb.schema import TIME_TO_LIVE

MOST_ITEMS = 100
"""Items of processes that have not written for long which a run may have."""
GONE_AFTER = 15 * 60_000
"""Milliseconds without a write after which a process counts as gone."""
MOST_FOLDED = 90
"""Items that one transaction folds beside the run's row."""

_UNFOLDED = ("total", "inherited")
"""Counters that the base alone has."""


async def fold_items(records: DynamoRunRows, row: RunRow, *, now: int) -> int:
    """Fold the items of a live run that were not written for long, if there are many, and return
    their number. Stops where the run changes meanwhile: a later look goes on."""
    if not row.live or row.recounting:
        return 0
    found = await process_items(records.table, row.run.run_id, row.parts, row.counter_epoch)
    old = [one for one in found if not one.closed and one.values.at <= now - GONE_AFTER]
    if len(old) <= MOST_ITEMS:
        return 0
    done = 0
    for start in range(0, len(old), MOST_FOLDED):
        some = old[start : start + MOST_FOLDED]
        if start:
            again = await records.read_bare(row.place)
            if again is None:
                break
            row = again
        if not await _fold(records, row, some):
            break
        done += len(some)
    return done


async def _fold(records: DynamoRunRows, row: RunRow, items: Sequence[ProcessItem]) -> bool:
    """Fold items into the base of a run, as read; return False if either has changed since."""
    table = records.table
    number = row.folds + 1
    expires_at = table.clock.now() // 1_000 + KEPT_FOR
    marks = [
        table.update_part(
            item.key,
            f"SET closed = :yes, folded = :number, #{TIME_TO_LIVE} = :expires_at",
            condition="seq = :seen AND attribute_not_exists(closed)",
            yes=True,
            number=number,
            expires_at=expires_at,
            seen=item.number,
        )
        for item in items
    ]
    # The run itself has not changed, so it keeps its time.
    moved = records.change_part(row, _into_base(row, items, number), now=row.run.updated_at)
    try:
        await table.transact([moved, *marks], token=table.clock.new_id())
    except AwsRefused as refused:
        if not refused.is_condition:
            raise
        return False
    return True


def _into_base(row: RunRow, items: Sequence[ProcessItem], number: int) -> Change:
    """Make the change that adds items to the base."""
    values = sum_values(row.base, [item.values for item in items])
    before = counters(row.base.stats(total=0, inherited=0), row.base.groups)
    after = counters(values.stats(total=0, inherited=0), values.groups)
    sets: dict[str, Plain] = {name: value for name, value in after.items() if name not in _UNFOLDED}
    return Change(
        sets={**sets, "folds": number},
        removes=sorted(before.keys() - after.keys()),
        condition=f"counter_epoch = :seen_epoch AND attribute_not_exists({RECOUNTING})",
        values={"seen_epoch": row.counter_epoch},
    )
