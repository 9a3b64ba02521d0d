"""Sums of a run's counters: the base on the run's row, and an item for each process that counts.

An item holds absolute values under a number that only grows, so a repeated or late write of it
changes nothing. Items lie in partitions of their own, apart from the run's row, and belong to one
epoch of the counters. A sum is read from the row first and from the items afterwards; a value that
moves from an item to the row in between counts once, because the item then carries the number of
that move, which is greater than the one on the row as read.

Failure groups are bounded in each item, and in the sum. A process that has no room for a group
counts its failures in none, so the sum shows a group only if no process may have left one of its
failures out. All other failures lie in no group: groups and the rest add up to `failed`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import NamedTuple

import msgspec

from conveyor.aio.concurrency import for_each
from conveyor.domain.failure_groups import MOST_GROUPS
from conveyor.domain.model import RunStats, Spend
from conveyor.domain.result_shape import (
    MOST_TYPES,
    OTHER_TYPE,
    SIZE_CLASSES,
    ResultShape,
    counted_type,
    size_class,
)
from conveyor.domain.task_rules import RunDelta
from conveyor.prod.dynamodb.client import Item, Query, Table, decodes_row
from conveyor.prod.dynamodb.schema import PARTITION_KEY, ROW_SHAPE, SORT_KEY, Key

WIDE_RUN = 500
"""Calls in flight beyond which the items of a run are spread over several partitions."""
WIDE_PARTS = 8
OTHER_BYTES = 150
"""Bytes of an item beside its values, about."""


class GroupCount(NamedTuple):
    """The failed tasks of a group, and the instants of the latest failure counted and of the
    first."""

    failed: int
    last_at: int
    first_at: int = 0


class CountedValues(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counters of one process, of the base, or of several of them together; `at` is the latest
    instant counted."""

    successful: int = 0
    failed: int = 0
    credits: int = 0
    cost: Decimal = Decimal(0)
    reasons: dict[str, int] = {}
    sizes: tuple[int, ...] = (0,) * SIZE_CLASSES
    types: dict[str, int] = {}
    groups: dict[str, GroupCount] = {}
    at: int = 0

    @property
    def completed(self) -> int:
        """Return the number of ended tasks."""
        return self.successful + self.failed

    @property
    def is_crowded(self) -> bool:
        """True if failed tasks lie in no group."""
        return sum(group.failed for group in self.groups.values()) < self.failed

    def stats(self, *, total: int, inherited: int) -> RunStats:
        """Return the counters of a run."""
        return RunStats(
            total=total,
            successful=self.successful,
            failed=self.failed,
            failure_reasons={name: count for name, count in self.reasons.items() if count},
            spend=Spend(self.credits, float(self.cost)),
            inherited=inherited,
            shape=ResultShape(self.sizes, self.types),
        )


NOTHING = CountedValues()
_encode = msgspec.json.encode
_values = msgspec.json.Decoder(CountedValues)


class CountedDelta(NamedTuple):
    """One settlement to be counted, and the group of the failure, if it is one."""

    delta: RunDelta
    group_id: str | None


def encode_values(values: CountedValues) -> str:
    """Encode values as an item holds them."""
    return _encode(values).decode()


def decode_values(text: str) -> CountedValues:
    """Decode the values of an item. Raises ValueError."""
    return _values.decode(text)


def count_deltas(
    values: CountedValues, deltas: Iterable[CountedDelta], known_types: Iterable[str]
) -> CountedValues:
    """Add settlements to values. Adds up money in decimal digits. A media type that the run counts
    by name already keeps its name."""
    successful, failed, credits, cost = (
        values.successful,
        values.failed,
        values.credits,
        values.cost,
    )
    reasons, sizes, at = dict(values.reasons), list(values.sizes), values.at
    types, groups = dict(values.types), dict(values.groups)
    names = dict.fromkeys([*known_types, *types], 0)
    for delta, group_id in deltas:
        successful += delta.successful
        failed += delta.failed
        credits += delta.spend.credits
        cost += Decimal(repr(delta.spend.cost))
        at = max(at, delta.now)
        if delta.failure is not None:
            reasons[delta.failure] = reasons.get(delta.failure, 0) + 1
        if delta.result is not None:
            sizes[size_class(delta.result.size)] += 1
            name = counted_type(delta.result.content_type, names)
            names.setdefault(name, 0)
            types[name] = types.get(name, 0) + 1
        if group_id is not None and (group_id in groups or len(groups) < MOST_GROUPS):
            group = groups.get(group_id, GroupCount(0, delta.now, delta.now))
            groups[group_id] = GroupCount(group.failed + 1, delta.now, group.first_at)
    return CountedValues(
        successful, failed, credits, cost, reasons, tuple(sizes), types, groups, at
    )


def sum_values(base: CountedValues, others: Sequence[CountedValues]) -> CountedValues:
    """Add up the base and the values of processes. Does not depend on the order of the others."""
    every = [base, *others]
    return CountedValues(
        successful=sum(one.successful for one in every),
        failed=sum(one.failed for one in every),
        credits=sum(one.credits for one in every),
        cost=sum((one.cost for one in every), Decimal(0)),
        reasons=_sum_names(one.reasons for one in every),
        sizes=tuple(map(sum, zip(*(one.sizes for one in every), strict=True))),
        types=_sum_types(base, others),
        groups=_sum_groups(base, others),
        at=max(one.at for one in every),
    )


def _sum_names(maps: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in maps:
        for name, count in one.items():
            total[name] = total.get(name, 0) + count
    return total


def _sum_types(base: CountedValues, others: Sequence[CountedValues]) -> dict[str, int]:
    """Add up media types: the base's, and others while there is room."""
    total = dict(base.types)
    more = _sum_names(one.types for one in others)
    for name in sorted(more):
        fits = name in total or len(total.keys() - {OTHER_TYPE}) < MOST_TYPES
        kept = name if fits else OTHER_TYPE
        total[kept] = total.get(kept, 0) + more[name]
    return total


def _sum_groups(base: CountedValues, others: Sequence[CountedValues]) -> dict[str, GroupCount]:
    """Add up the groups of which each failure is known to be counted: the base's, and others while
    there is room, the earliest first."""
    crowded = [one.groups.keys() for one in (base, *others) if one.is_crowded]
    total: dict[str, GroupCount] = dict(base.groups)
    for one in others:
        for group_id, group in one.groups.items():
            seen = total.get(group_id)
            total[group_id] = (
                group
                if seen is None
                else GroupCount(
                    seen.failed + group.failed,
                    max(seen.last_at, group.last_at),
                    min(seen.first_at, group.first_at),
                )
            )
    exact = [one for one in total if all(one in names for names in crowded)]
    if len(exact) > MOST_GROUPS:
        exact.sort(key=lambda one: (one not in base.groups, total[one].first_at, one))
    return {group_id: total[group_id] for group_id in exact[:MOST_GROUPS]}


class ProcessItem(NamedTuple):
    """The item of a process as read. `folded`: the number of the move that took its values into the
    base; 0 before. `closed`: it takes no more values. `size`: its bytes, about."""

    key: Key
    number: int
    values: CountedValues
    closed: bool
    folded: int
    size: int


def parts_of(max_inflight: int) -> int:
    """Return the number of partitions over which the items of a run are spread."""
    return WIDE_PARTS if max_inflight > WIDE_RUN else 1


def process_item_key(run_id: str, parts: int, epoch: int, process: str, generation: int = 0) -> Key:
    """Key of the item of a process in an epoch of a run's counters."""
    part = zlib.crc32(process.encode()) % parts
    return Key(_partition(run_id, part), f"{_prefix(epoch)}{process}#{generation}")


def new_process_item(number: int, values: CountedValues) -> Item:
    """Make the item of a process."""
    return {"shape": ROW_SHAPE, "seq": number, "counts": encode_values(values)}


@decodes_row
def read_process_item(item: Item) -> ProcessItem:
    """Decode the item of a process. Raises DamagedRow."""
    number = item["seq"]
    if type(number) is not int:
        raise TypeError("seq")
    return ProcessItem(
        Key(item[PARTITION_KEY], item[SORT_KEY]),
        number,
        decode_values(item["counts"]),
        "closed" in item,
        item.get("folded", 0),
        OTHER_BYTES + len(item["counts"]),
    )


async def process_items(table: Table, run_id: str, parts: int, epoch: int) -> list[ProcessItem]:
    """Read the items of an epoch strongly."""
    return await _items(table, run_id, parts, _prefix(epoch))


async def remove_process_items(table: Table, run_id: str, parts: int) -> None:
    """Remove the items of all epochs of a run."""
    keys: list[Key] = []

    async def find(part: int) -> None:
        query = Query(_partition(run_id, part), keys_only=True)
        async for page in table.pages(query):
            keys.extend(Key(item[PARTITION_KEY], item[SORT_KEY]) for item in page.items)

    await for_each(find, range(parts))
    await table.delete_many(keys)


async def _items(table: Table, run_id: str, parts: int, prefix: str) -> list[ProcessItem]:
    found: list[ProcessItem] = []

    async def read(part: int) -> None:
        query = Query(_partition(run_id, part), begins_with=prefix)
        async for page in table.pages(query):
            found.extend(map(read_process_item, page.items))

    await for_each(read, range(parts))
    return found


def _partition(run_id: str, part: int) -> str:
    return f"Count#{run_id}#{part}"


def _prefix(epoch: int) -> str:
    return f"{epoch:010}#"
