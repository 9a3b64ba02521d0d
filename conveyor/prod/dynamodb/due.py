"""What ends at a time of its own: found by that time, and removed by DynamoDB itself a day later,
so that the sweeper sees it first."""

from __future__ import annotations

from conveyor.prod.dynamodb.items import Item, Table, keys_of
from conveyor.prod.dynamodb.keys import END, by_time
from conveyor.prod.dynamodb.table import BY_DISPATCH, TIME_TO_LIVE

GRACE = 86_400
"""Seconds that an item stays behind its end."""


def ends_at(partition: str, name: str, expires_at: int) -> Item:
    """The attributes of an item that ends then, by which it is found in an index partition."""
    return {
        "gsi2pk": partition,
        "gsi2sk": by_time(expires_at, name),
        TIME_TO_LIVE: expires_at // 1_000 + GRACE,
    }


async def ended(table: Table, partition: str, *, now: int, limit: int) -> list[Item]:
    """Items whose time has come, as far as the index knows, the first ended first; those that this
    version does not know left out."""
    found: list[Item] = []
    async for page in table.pages(
        partition,
        index=BY_DISPATCH,
        between=(by_time(0, ""), by_time(now, END)),
        limit=limit,
        keys_only=True,
    ):
        keys = keys_of(page.items)
        items = await table.get_many(keys)
        found += [items[key] for key in keys if key in items]
        if len(found) >= limit:
            break
    return found[:limit]
