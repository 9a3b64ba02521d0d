"""The tasks port: claim, renew, settle, page through and scrub task rows.

Claims and settlements go to `claims` in batches. A page goes on after a key; a filtered one finds
its keys in the index by state.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import merge
from itertools import islice
from math import isqrt

import msgspec

from conveyor.dev.sqlite.claims import move_tasks
from conveyor.dev.sqlite.database import Database
from conveyor.dev.sqlite.failure_groups import compared, read_groups
from conveyor.dev.sqlite.rows import (
    INDEX_MASK,
    TASK_EXTRAS,
    TASK_JSON,
    KeyRange,
    RowsStatement,
    events_from,
    index_of,
    tasks_from,
)
from conveyor.dev.sqlite.states import find_place, find_run
from conveyor.domain.failure_groups import FailureGroups
from conveyor.domain.hosts import host_and_port
from conveyor.domain.model import Event, GroupFilter, RunStatus, Task, TaskStatus
from conveyor.domain.shards import ShardScheme, fnv32a
from conveyor.domain.task_rules import Settlement
from conveyor.ports.binding import Tasks
from conveyor.ports.tasks import (
    Claim,
    ClaimRequest,
    KeptTask,
    Settled,
    SettleRequest,
    TaskBatches,
    TaskPage,
)

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


def _of_keys(keys: str) -> str:
    return f"""
        SELECT group_concat({TASK_JSON})
        FROM ({keys}) page CROSS JOIN tasks t ON t.task_key = page.task_key
        {TASK_EXTRAS}
    """


OF_ONE_GROUP = _of_keys(f"{_BY_STATE.format(2)} AND failure_group = ?5 ORDER BY task_key LIMIT ?4")
"""A page of the failed tasks of the group ?5, whose keys are found in the index of states."""
_FIRST_FAILED = f"""
    SELECT task_key, failure_group FROM tasks INDEXED BY tasks_by_state
    WHERE state = 2 AND {_BETWEEN} ORDER BY task_key LIMIT ?6
"""
OF_GROUPS = {
    among: _of_keys(
        f"SELECT task_key FROM ({_FIRST_FAILED}) "
        f"WHERE ifnull(failure_group, '') {among} (SELECT value FROM json_each(?5)) "
        "ORDER BY task_key LIMIT ?4"
    )
    for among in ("IN", "NOT IN")
}
"""A page of the first ?6 failed tasks: those of the groups ?5, or those of none of them."""
_FAILED_READ = f"SELECT count(*), max(task_key) FROM ({_FIRST_FAILED})"

ONE_TASK = f"SELECT {TASK_JSON} FROM tasks t {TASK_EXTRAS} WHERE t.task_key = ?2 AND t.task_id = ?3"

KEPT_FOR = """
    SELECT j.result_ttl_days FROM jobs j JOIN runs r ON r.job_id = j.job_id
    WHERE j.job_id = ? AND r.run_id = ? AND j.status <> 'deleted' AND r.status <> 'deleted'
"""

UNFINISHED = f"""
    SELECT group_concat(reference) FROM (
        SELECT printf('[%d,"%s"]', task_key & 34359738367, task_id) AS reference
        FROM tasks INDEXED BY tasks_by_state
        WHERE state = 0 AND {_BETWEEN} ORDER BY task_key LIMIT ?1
    )
"""
"""References to rows that are not terminal, comma-joined: limit, low key, high key."""

_URLS = """
    SELECT tasks.spec ->> 'url' FROM json_each(?) wanted
    LEFT JOIN tasks ON tasks.task_key = wanted.value ORDER BY wanted.key
"""
"""The URLs of tasks, by an array of their keys; NULL for a row that is gone."""

_NEVER_IN_GROUPS = frozenset(TaskStatus) - {TaskStatus.FAILED}

_references = msgspec.json.Decoder(list[tuple[int, str]])


@lru_cache
def page_sql(statuses: frozenset[TaskStatus] | None) -> str:
    """Write the statement of one page, which takes run_id, low key, high key and limit, and returns
    comma-joined tasks.

    It picks the keys first, out of indexes alone: several states are merged in key order, and only
    the rows of the page are touched.
    """
    if statuses is None or len(statuses) == len(TaskStatus):
        return _EVERY_STATUS
    keys = " UNION ALL ".join(_sources(statuses))
    return _of_keys(f"{keys} ORDER BY task_key LIMIT ?4")


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
    """References, (index, task_id) each, in order, and the number of rows read for them."""

    rows: list[tuple[int, str]]
    rows_read: int = 0


def merged_references(
    reader: sqlite3.Connection, place: KeyRange, sql: str, *, after: int, limit: int
) -> References:
    """Merge the references of every shard of a run, at most `limit` in order of their index.

    `sql` takes limit, low key and high key, as UNFINISHED does. Each shard is asked for its share
    of `limit` and one row more, and asked again only where the merge needs further rows of it.
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


_RENEW = RowsStatement(
    """
    WITH renewal (run_id, task_index, hash, claim_number, claimed_until) AS ({rows})
    UPDATE claims SET claimed_until = max(claims.claimed_until, renewal.claimed_until)
    FROM renewal JOIN runs ON runs.run_id = renewal.run_id
    WHERE claims.task_key = runs.run_no + iif(runs.shard_scheme = 'stripe', renewal.task_index,
        renewal.hash) % runs.shard_count << 35 | renewal.task_index
    AND claims.claim_number = renewal.claim_number
    """,
    width=5,
)


class SqliteTasks(Tasks, TaskBatches):
    """The tasks port, and its operations on many tasks."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def claim_task(
        self,
        run_id: str,
        task_id: str,
        *,
        worker: str,
        now: int,
        claimed_until: int,
        max_interruptions: int,
    ) -> Claim:
        move = ClaimRequest(run_id, task_id, worker, now, claimed_until, max_interruptions)
        claim: Claim = await self._database.write_batched(move_tasks, move)
        return claim

    async def release_claim(self, run_id: str, task_id: str, *, worker: str) -> None:
        index = index_of(task_id)
        if index is None:
            return

        def release(connection: sqlite3.Connection) -> None:
            place = find_place(connection, run_id)
            if place is not None:
                connection.execute(
                    "DELETE FROM claims WHERE task_key = ? AND worker = ?",
                    (place.key(task_id, index), worker),
                )

        await self._database.write(release)

    async def renew_claims(
        self, claims: Sequence[tuple[str, str, int]], *, claimed_until: int
    ) -> None:
        rows = [
            (run_id, index, fnv32a(task_id), claim_number, claimed_until)
            for run_id, task_id, claim_number in claims
            if (index := index_of(task_id)) is not None
        ]
        if rows:
            await self._database.write(lambda connection: _RENEW.execute(connection, rows))

    async def settle_task(
        self, run_id: str, task_id: str, claim_number: int, settlement: Settlement, *, now: int
    ) -> Settled:
        move = SettleRequest(run_id, task_id, claim_number, settlement, now)
        settled: Settled = await self._database.write_batched(move_tasks, move)
        return settled

    async def claim_tasks(self, requests: Sequence[ClaimRequest]) -> list[Claim | Exception]:
        return await self._database.write_many(move_tasks, requests)

    async def settle_tasks(self, requests: Sequence[SettleRequest]) -> list[Settled | Exception]:
        return await self._database.write_many(move_tasks, requests)

    async def page_tasks(
        self,
        run_id: str,
        *,
        shard: int = 0,
        statuses: frozenset[TaskStatus] | None,
        after: int | None,
        limit: int,
        most_read: int | None = None,
        groups: GroupFilter | None = None,
    ) -> TaskPage:
        if statuses is not None and not statuses.difference(_NEVER_IN_GROUPS if groups else ()):
            return TaskPage([], None, 0)
        most = limit if most_read is None else min(limit, most_read)

        def read(reader: sqlite3.Connection) -> TaskPage:
            place = find_place(reader, run_id)
            if place is None:
                return TaskPage([], None, 0)
            low, high = place.of_shard(shard, -1 if after is None else after)
            if groups is not None and (groups.outside is not None or len(groups.named) != 1):
                return _scan_groups(reader, run_id, (low, high), limit, most_read, groups)
            # Reads no row that is not on the page, so `limit` bounds it too.
            if groups is None:
                found = reader.execute(page_sql(statuses), (run_id, low, high, most))
            else:
                found = reader.execute(OF_ONE_GROUP, (run_id, low, high, most, *groups.named))
            tasks = tasks_from(found.fetchone()[0])
            at_end = len(tasks) < most or _is_last(reader, run_id, tasks[-1].index, place)
            return TaskPage(tasks, None if at_end else tasks[-1].index, len(tasks))

        page = await self._database.read(read)
        self._count(page.rows_read, len(page.tasks))
        return page

    async def get_task(self, run_id: str, task_id: str) -> Task | None:
        index = index_of(task_id)
        if index is None:
            return None

        def read(reader: sqlite3.Connection) -> Task | None:
            place = find_place(reader, run_id)
            if place is None:
                return None
            key = place.key(task_id, index)
            row = reader.execute(ONE_TASK, (run_id, key, task_id)).fetchone()
            return None if row is None else tasks_from(row[0])[0]

        task = await self._database.read(read)
        if task is not None:
            self._count(1, 1)
        return task

    async def get_kept_task(self, job_id: str, run_id: str, task_id: str) -> KeptTask | None:
        index = index_of(task_id)
        if index is None:
            return None

        def read(reader: sqlite3.Connection) -> KeptTask | None:
            job = reader.execute(KEPT_FOR, (job_id, run_id)).fetchone()
            place = find_place(reader, run_id)
            if job is None or place is None:
                return None
            key = place.key(task_id, index)
            row = reader.execute(ONE_TASK, (run_id, key, task_id)).fetchone()
            return None if row is None else KeptTask(tasks_from(row[0])[0], job[0])

        kept = await self._database.read(read)
        if kept is not None:
            self._count(1, 1)
        return kept

    async def failure_groups(self, run_id: str) -> FailureGroups | None:
        found = await self._database.read(lambda reader: read_groups(reader, run_id))
        if found is not None:
            self._database.rows_read += 1 + len(found.groups)
        return found

    async def task_history(self, run_id: str, task_id: str) -> list[Event] | None:
        index = index_of(task_id)
        if index is None:
            return None

        def read(reader: sqlite3.Connection) -> list[Event] | None:
            place = find_place(reader, run_id)
            if place is None:
                return None
            row = reader.execute(
                "SELECT coalesce(histories.events, '') FROM tasks LEFT JOIN histories "
                "USING (task_key) WHERE task_key = ? AND task_id = ?",
                (place.key(task_id, index), task_id),
            ).fetchone()
            return None if row is None else events_from(row[0])

        return await self._database.read(read)

    async def unfinished_after(self, run_id: str, after: int, limit: int) -> list[tuple[int, str]]:
        def read(reader: sqlite3.Connection) -> References:
            place = find_place(reader, run_id)
            if place is None:
                return References([])
            return merged_references(reader, place, UNFINISHED, after=after, limit=limit)

        references = await self._database.read(read)
        self._count(references.rows_read, len(references.rows))
        return references.rows

    async def task_hosts(self, run_id: str, tasks: Sequence[tuple[int, str]]) -> list[str]:
        def read(reader: sqlite3.Connection) -> list[str]:
            place = find_place(reader, run_id)
            if place is None:
                return [""] * len(tasks)
            keys = [place.key(task_id, index) for index, task_id in tasks]
            urls = reader.execute(_URLS, (msgspec.json.encode(keys).decode(),))
            return ["" if url is None else host_and_port(url) for (url,) in urls]

        hosts = await self._database.read(read)
        self._count(len(hosts), len(hosts))
        return hosts

    async def scrub_tasks(self, run_id: str, limit: int) -> int:
        def scrub(connection: sqlite3.Connection) -> int:
            run = find_run(connection, run_id)
            if run is None or run.status is not RunStatus.DELETED:
                return 0
            place = find_place(connection, run_id)
            return 0 if place is None else _scrub(connection, place, limit)

        return await self._database.write(scrub)

    def _count(self, read: int, returned: int) -> None:
        self._database.rows_read += read
        self._database.rows_returned += returned


def _scan_groups(
    reader: sqlite3.Connection,
    run_id: str,
    keys: tuple[int, int],
    limit: int,
    most_read: int | None,
    groups: GroupFilter,
) -> TaskPage:
    """Look through the failed rows of a key range for those of some groups."""
    among, listed = compared(groups)
    bounds = (run_id, *keys, limit, listed, -1 if most_read is None else most_read)
    (text,) = reader.execute(OF_GROUPS[among], bounds).fetchone()
    tasks = tasks_from(text)
    if len(tasks) == limit:
        bounds = (run_id, keys[0], keys[1] & ~INDEX_MASK | tasks[-1].index, *bounds[3:])
    rows_read, last = reader.execute(_FAILED_READ, bounds).fetchone()
    goes_on = len(tasks) == limit or rows_read == most_read
    return TaskPage(tasks, last & INDEX_MASK if goes_on else None, rows_read)


def _is_last(reader: sqlite3.Connection, run_id: str, index: int, place: KeyRange) -> bool:
    """Tell from the run alone, without reading on, whether no row can follow in a row's shard."""
    (next_index,) = reader.execute(
        "SELECT next_index FROM runs WHERE run_id = ?", (run_id,)
    ).fetchone()
    striped = place.shards.scheme is ShardScheme.STRIPE
    return bool(index + (place.shards.count if striped else 1) >= next_index)


def _scrub(connection: sqlite3.Connection, place: KeyRange, limit: int) -> int:
    low, high = place.all
    (last,) = connection.execute(
        "SELECT max(task_key) FROM (SELECT task_key FROM tasks "
        "WHERE task_key > ? AND task_key <= ? ORDER BY task_key LIMIT ?)",
        (low, high, limit),
    ).fetchone()
    if last is None:
        return 0
    for table in ("claims", "histories"):
        connection.execute(f"DELETE FROM {table} WHERE task_key > ? AND task_key <= ?", (low, last))
    return connection.execute(
        "DELETE FROM tasks WHERE task_key > ? AND task_key <= ?", (low, last)
    ).rowcount
