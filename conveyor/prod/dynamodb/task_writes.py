"""Writing rows that may be there already, and taking back those that nobody has touched.

BatchWriteItem takes no condition and would set back a row that has moved on; an INSERT refuses one
that is there. It is therefore safe to repeat: after a lost answer, a redelivered message, a crash.
"""

from __future__ import annotations

from collections.abc import Sequence

from conveyor.aio.concurrency import side_by_side
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.aws.leftovers import to_the_last
from conveyor.prod.dynamodb.items import UNDONE, Item, Table
from conveyor.prod.dynamodb.keys import Key
from conveyor.prod.dynamodb.table import PARTITION_KEY, SORT_KEY
from conveyor.prod.dynamodb.values import tag

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
    await side_by_side(insert, pieces, at_a_time=MOST_CALLS)
    return [key for key, _ in items if key in inserted]


async def remove_untouched(table: Table, keys: Sequence[Key]) -> None:
    """Remove task rows of which no claim was ever handed out; others are left as they are."""

    async def remove(key: Key) -> None:
        try:
            await table.delete(key, condition="claim_number = :zero", zero=0)
        except AwsRefused as refused:
            if not refused.is_condition:
                raise

    await side_by_side(remove, keys, at_a_time=MOST_CALLS)


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

    await to_the_last(call, list(items), table.clock, complaint=UNDONE)


def _statement(table: Table, key: Key, item: Item) -> dict[str, object]:
    whole = {PARTITION_KEY: key.pk, SORT_KEY: key.sk, **item}
    names = ",".join(f"'{name}':?" for name in whole)
    return {
        "Statement": f'INSERT INTO "{table.name}" VALUE {{{names}}}',
        "Parameters": [tag(value) for value in whole.values()],
    }
