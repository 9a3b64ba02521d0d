"""Pages of task rows: keyset over the shared key, through the index by state where filtered."""

from __future__ import annotations

from functools import lru_cache

from conveyor.dev.sqlite.rows import TASK_EXTRAS, TASK_JSON
from conveyor.domain.model import TaskStatus

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
