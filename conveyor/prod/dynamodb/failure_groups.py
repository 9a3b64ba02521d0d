"""The items of failure groups: the first failure of each group of a run, beside the run's place.

The count of a group, and the instant of the failure that was counted last, lie where `failed` is
counted, and move with it. The item is written before its group is counted for the first time, so a
reader who finds a count finds the item too. An item whose group was not counted in the end is not
shown. A count whose item cannot be read is not shown either: its tasks count among those of no
group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from conveyor.domain.failure_groups import (
    MOST_SAMPLES,
    FailureGroup,
    FailureGroups,
    FailureKind,
    failure_kind,
)
from conveyor.domain.model import Problem, TaskFailure
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import (
    DamagedRow,
    Item,
    Query,
    Table,
    UnreadableRow,
    decodes_row,
    keys_of,
)
from conveyor.prod.dynamodb.counter_sums import GroupCount
from conveyor.prod.dynamodb.run_rows import RunRow
from conveyor.prod.dynamodb.schema import ROW_SHAPE, SORT_KEY, failure_group_key


class FailureSample(NamedTuple):
    """The failure of one task."""

    group_id: str
    kind: FailureKind
    task_id: str
    detail: str | None
    at: int

    @classmethod
    def of(cls, task_id: str, failure: TaskFailure, problem: Problem, at: int) -> FailureSample:
        """Find the group of a failure."""
        kind = failure_kind(failure, problem)
        return cls(kind.group_id, kind, task_id, problem.detail, at)


async def note_failures(
    table: Table, run_id: str, failures: Sequence[FailureSample], *, begins: bool
) -> None:
    """Keep failures of one group, in order, as its samples: as many as it has room for.

    Writes the item of a group that `begins`, unless another call has. Safe to repeat.
    """
    key = failure_group_key(run_id, failures[0].group_id)
    task_ids = [failure.task_id for failure in failures[:MOST_SAMPLES]]
    try:
        if begins and await _put(table, run_id, failures[0], task_ids):
            return
        for task_id in task_ids:
            try:
                await table.update(
                    key,
                    "SET task_ids = list_append(task_ids, :added)",
                    condition="attribute_exists(pk) AND size(task_ids) < :most "
                    "AND NOT contains(task_ids, :task_id)",
                    added=[task_id],
                    most=MOST_SAMPLES,
                    task_id=task_id,
                )
            except AwsRefused as refused:
                if not refused.is_condition:
                    raise
    except UnreadableRow:
        return  # a later version wrote the item, and keeps it


async def _put(table: Table, run_id: str, failure: FailureSample, task_ids: list[str]) -> bool:
    """Write an item; return False if it is there already."""
    key = failure_group_key(run_id, failure.group_id)
    item = new_group_item(failure, task_ids)
    try:
        await table.put(key, item, condition="attribute_not_exists(pk)")
    except AwsRefused as refused:
        if not refused.is_condition:
            raise
        return False
    return True


def new_group_item(failure: FailureSample, task_ids: list[str]) -> Item:
    """Make the item of a group from its first failure."""
    kind = failure.kind
    item: Item = {
        "shape": ROW_SHAPE,
        "reason": str(kind.reason),
        "code": kind.code,
        "status": kind.status,
        "first_at": failure.at,
        "task_ids": task_ids,
    }
    return item if failure.detail is None else {**item, "detail": failure.detail}


async def group_items(table: Table, run_id: str) -> dict[str, Item]:
    """Read the items of a run's groups strongly, by the ids of the groups."""
    prefix = failure_group_key(run_id, "")
    found: dict[str, Item] = {}
    async for page in table.pages(Query(prefix.pk, begins_with=prefix.sk, known_only=True)):
        table.records_read += len(page.items)
        found |= {item[SORT_KEY].removeprefix(prefix.sk): item for item in page.items}
    return found


async def read_failure_groups(table: Table, row: RunRow) -> FailureGroups:
    """Read the groups of a run, counted as in its row; the largest first."""
    kept = {group_id: group for group_id, group in row.groups.items() if group.failed > 0}
    items = await group_items(table, row.run.run_id) if kept else {}
    found = list(_readable(kept.items(), items))
    found.sort(key=lambda group: (-group.count, group.first_at, group.group_id))
    return FailureGroups(row.run.stats.failed, found)


def _readable(
    kept: Iterable[tuple[str, GroupCount]], items: dict[str, Item]
) -> Iterable[FailureGroup]:
    for group_id, counted in kept:
        item = items.get(group_id)
        if item is None:
            continue
        try:
            yield _read_group(item, group_id, counted)
        except DamagedRow:
            continue


@decodes_row
def _read_group(item: Item, group_id: str, counted: GroupCount) -> FailureGroup:
    return FailureGroup(
        group_id=group_id,
        reason=TaskFailure(item["reason"]),
        code=item["code"],
        status=item["status"],
        count=counted.failed,
        first_at=item["first_at"],
        last_at=max(counted.last_at, item["first_at"]),
        detail=item.get("detail"),
        task_ids=tuple(item["task_ids"]),
    )


async def remove_group_items(table: Table, run_id: str) -> None:
    """Remove the items of a run's groups, whatever their state."""
    prefix = failure_group_key(run_id, "")
    query = Query(prefix.pk, begins_with=prefix.sk, keys_only=True)
    async for page in table.pages(query):
        await table.delete_many(keys_of(page.items))
