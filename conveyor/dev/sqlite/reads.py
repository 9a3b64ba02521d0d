"""Pages of task rows: keyset over the shared key, through the index by state where filtered."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from heapq import merge
from itertools import islice
from math import isqrt

import msgspec

from conveyor.dev.sqlite.rows import TASK_EXTRAS, TASK_JSON, Place
from conveyor.domain.model import TaskStatus
from conveyor.domain.shards import ShardScheme

_BETWEEN = "task_key > ?2 AND task_key <= ?3"
_BY_STATE = "SELECT task_key FROM tasks INDEXED BY tasks_by_state WHERE state = {} AND " + _BETWEEN
_PENDING = _BY_STATE.format(0) + " AND task_key NOT IN (SELECT task_key FROM claims)"
_PROCESSING = "SELECT task_key FROM claims WHERE " + _BETWEEN

_EVERY_STATUS = f"""
    SELECT group_concat(task) FROM (
        SELECT {TASK_JSON} AS task FROM tasks t {TASK_EXTRAS}
        WHERE t.task_key > ?2 AND t.task_key <= ?3 ORDER BY t.task_key LIMIT ?4
    )
"""

ONE_TASK = f"SELECT {TASK_JSON} FROM tasks t {TASK_EXTRAS} WHERE t.task_key = ?2 AND t.task_id = ?3"

UNFINISHED = f"""
    SELECT group_concat(reference) FROM (
        SELECT printf('[%d,"%s"]', task_key & 34359738367, task_id) AS reference
        FROM tasks INDEXED BY tasks_by_state
        WHERE state = 0 AND {_BETWEEN} ORDER BY task_key LIMIT ?1
    )
"""
"""References to rows that are not terminal, comma-joined: limit, low key, high key."""

_references = msgspec.json.Decoder(list[tuple[int, str]])


@lru_cache
def page_sql(statuses: frozenset[TaskStatus] | None) -> str:
    """The statement of one page: run_id, low key, high key, limit; gives comma-joined tasks.

    The keys are picked first, out of indexes alone: several states are merged in key order, and no
    row is touched that is not on the page.
    """
    if statuses is None or len(statuses) == len(TaskStatus):
        return _EVERY_STATUS
    keys = " UNION ALL ".join(_sources(statuses))
    return f"""
        SELECT group_concat({TASK_JSON})
        FROM ({keys} ORDER BY task_key LIMIT ?4) page
        CROSS JOIN tasks t ON t.task_key = page.task_key
        {TASK_EXTRAS}
    """


def _sources(statuses: frozenset[TaskStatus]) -> list[str]:
    sources = []
    if {TaskStatus.PENDING, TaskStatus.PROCESSING} <= statuses:
        sources.append(_BY_STATE.format(0))
    elif TaskStatus.PENDING in statuses:
        sources.append(_PENDING)
    elif TaskStatus.PROCESSING in statuses:
        sources.append(_PROCESSING)
    if TaskStatus.SUCCESSFUL in statuses:
        sources.append(_BY_STATE.format(1))
    if TaskStatus.FAILED in statuses:
        sources.append(_BY_STATE.format(2))
    return sources


@dataclass(slots=True)
class References:
    """(index, task_id) of rows in order, and how many rows were read for them."""

    rows: list[tuple[int, str]]
    rows_read: int = 0


def merged_references(
    reader: sqlite3.Connection, place: Place, sql: str, *, after: int, limit: int
) -> References:
    """At most `limit` references out of every shard of a run, in order of their index.

    `sql` takes limit, low key and high key, as UNFINISHED does. A shard is asked for its part of
    what is wanted and one row more, and again only where it alone keeps the others waiting.
    """
    count = place.shards.count
    share = limit if count == 1 else -(-limit // count) + 1
    if place.shards.scheme is not ShardScheme.STRIPE:
        share += isqrt(share)
    found = References([])

    def of_shard(shard: int) -> Iterator[tuple[int, str]]:
        last = after
        while True:
            low, high = place.of_shard(shard, last)
            (text,) = reader.execute(sql, (share, low, high)).fetchone()
            part = [] if text is None else _references.decode(f"[{text}]")
            found.rows_read += len(part)
            yield from part
            if len(part) < share:
                return
            last = part[-1][0]

    found.rows.extend(islice(merge(*map(of_shard, range(count))), limit))
    return found
