"""The hosts of a run: what it does to each, for whoever has to answer for it.

A run keeps no counters by host. They are counted from its rows on request: from all of them, or
from MOST_ROWS that are spread evenly over a larger run. What of that is in flight now, its workers
have said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET

from conveyor.domain.hosts import HostRule, host_and_port, paces
from conveyor.domain.model import Job, Run, RunStatus, Task, TaskStatus
from conveyor.domain.shards import shards_of
from conveyor.domain.text_rules import rfc3339
from conveyor.ports.pacing import HostState
from conveyor.records.sharded_reads import ShardCursor, merge_page, task_reader
from conveyor.service.context import Context
from conveyor.service.schemas import HostBody, HostsBody

MOST_HOSTS = 100
"""Hosts of one answer."""
MOST_ROWS = 10_000
"""Rows that are read for one answer."""
PIECE = 500
"""Rows that are read, and held, at a time."""
MOST_ROWS_HELD = 1_000
"""Rows that are read to tell which hosts hold a run back."""
PLACES = 10
"""Places of a larger run from which these come."""


@dataclass(slots=True)
class _Tally:
    """The tasks of one host, by their status."""

    counts: dict[TaskStatus, int] = field(default_factory=lambda: dict.fromkeys(TaskStatus, 0))


@dataclass(frozen=True, slots=True)
class _Others:
    """The jobs that a run shares a host with: it has so many `unfinished` tasks itself, and others
    have `calls` under way."""

    unfinished: int
    calls: int

    def sentence(self, said: Sequence[HostState]) -> str:
        """Say what is known of other jobs at a host; empty if nothing is. Of those in its line as
        many as the run may have are its own."""
        waiting = max((one.in_line for one in said), default=0) - self.unfinished
        parts = []
        if self.calls:
            parts.append(f"{self.calls:,} {'call' if self.calls == 1 else 'calls'} under way")
        if waiting > 0:
            parts.append(f"at least {waiting:,} {'task' if waiting == 1 else 'tasks'} in its line")
        return f"other jobs have {' and '.join(parts)}" if parts else ""


@dataclass(slots=True)
class _Counted:
    """The tasks of a run by host, counted among so many rows."""

    hosts: dict[str, _Tally] = field(default_factory=dict)
    rows: int = 0


def _busy(tally: _Tally) -> tuple[int, int]:
    """Rank the busier host higher."""
    return tally.counts[TaskStatus.PROCESSING], sum(tally.counts.values())


def _waited_for(tally: _Tally) -> tuple[int, int]:
    """Rank the host higher for which more tasks wait."""
    return tally.counts[TaskStatus.PENDING], sum(tally.counts.values())


Rank = Callable[[_Tally], tuple[int, int]]
"""Tells how high a host stands in a list."""


class HostQueries:
    """Reads the hosts of runs."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def of_run(self, caller_id: str, job_id: str, run_id: str) -> HostsBody:
        """Return the busiest hosts of a run, with the limits that hold there and what they said.

        Raises ConveyorError: not_found; unavailable if the ledger does not answer.
        """
        view, run = await self._context.live_run(caller_id, job_id, run_id)
        return await self._body(view.job, run, await self._count(view.job, run, MOST_ROWS, PIECE))

    async def held_of_run(self, caller_id: str, job_id: str, run_id: str) -> HostsBody:
        """Return the hosts whose limits keep tasks of a run waiting; see `held`.

        Raises as `of_run` does.
        """
        view, run = await self._context.live_run(caller_id, job_id, run_id)
        return await self.held(view.job, run)

    async def held(self, job: Job, run: Run, *, most: int | None = None) -> HostsBody:
        """Return the hosts with limits for which tasks of a run wait, those with the most tasks
        first, counted among `most` rows, by default MOST_ROWS_HELD; none of a run that is not
        running, and none, without a read, where no limit holds.

        Raises ConveyorError(unavailable) if the ledger does not answer.
        """
        counted = _Counted()
        is_running = run.status is RunStatus.RUNNING and not run.paused
        if is_running and self._context.policies.hold(job.politeness):
            most = most or MOST_ROWS_HELD
            counted = await self._count(job, run, most, most // PLACES)
            counted.hosts = {
                host: tally
                for host, tally in counted.hosts.items()
                if tally.counts[TaskStatus.PENDING] and self._rules(job, host)
            }
        return await self._body(job, run, counted, rank=_waited_for)

    async def _count(self, job: Job, run: Run, most: int, piece: int) -> _Counted:
        """Count the tasks of a run by host: all, or of a larger run `most` in pieces."""
        found = _Counted()
        async for task in self._rows(job, run, most, piece):
            found.rows += 1
            # A row that was taken over from an earlier run makes no call in this one.
            if task.source_run_id is None:
                tally = found.hosts.setdefault(host_and_port(task.spec.url), _Tally())
                tally.counts[task.status] += 1
        if found.rows < run.stats.total:
            await self._add_reported(run.run_id, found.hosts)
        found.hosts.pop("", None)
        return found

    async def _body(self, job: Job, run: Run, found: _Counted, *, rank: Rank = _busy) -> HostsBody:
        first = sorted(found.hosts.items(), key=lambda one: rank(one[1]), reverse=True)[:MOST_HOSTS]
        rules = {host: self._rules(job, host) for host, _ in first}
        # A host may be closed to the caller alone, whichever rule holds.
        keys = {host: paces(some, host, job.caller) for host, some in rules.items() if some}
        states = await self._states(keys)
        crew, now = await self._context.waits.crew() if keys else None, self._context.clock.now()
        calls = {host: crew.calls_of_others(run.run_id, host, now) for host in keys if crew}
        unfinished = run.stats.total - run.stats.completed
        return HostsBody(
            run_id=run.run_id,
            tasks=run.stats.total,
            counted_tasks=found.rows,
            hosts=[
                self._host_body(
                    job,
                    host,
                    tally,
                    [states[key] for key in keys.get(host, ()) if key in states],
                    _Others(unfinished, calls.get(host, 0)),
                )
                for host, tally in first
            ],
            more_hosts=len(found.hosts) - len(first),
        )

    async def _add_reported(self, run_id: str, found: dict[str, _Tally]) -> None:
        """Add the calls that workers told of: few rows in flight are among those of a sample."""
        crew, now = await self._context.waits.crew(), self._context.clock.now()
        calls: Counter[str] = Counter()
        for worker, lane in [] if crew is None else crew.sights(run_id):
            if not worker.is_silent(now):
                calls.update(lane.hosts)
        for host, count in calls.items():
            counts = found.setdefault(host, _Tally()).counts
            counts[TaskStatus.PROCESSING] = max(counts[TaskStatus.PROCESSING], count)

    async def _rows(self, job: Job, run: Run, most: int, piece: int) -> AsyncIterator[Task]:
        """Yield the rows of a run, or of a larger one `most` from everywhere."""
        read = task_reader(self._context.tasks, run.run_id, statuses=None)
        shards = shards_of(job)
        end = run.ingest.next_index if run.ingest and run.ingesting else run.next_index
        # A run that is read whole is read in few pieces.
        piece = piece if end > most else PIECE
        pieces = -(-min(end, most) // piece)
        for number in range(pieces):
            start, stop = end * number // pieces, end * (number + 1) // pieces
            page: ShardCursor[Task] = await merge_page(
                read, shards, (start - 1,) * shards.count, piece, end=stop
            )
            for row in page.rows:
                if row.index < stop:
                    yield row

    def _rules(self, job: Job, host: str) -> tuple[HostRule, ...]:
        return self._context.policies.rules_of(host, job.caller, job.politeness)

    async def _states(self, keys: Mapping[str, Iterable[str]]) -> Mapping[str, HostState]:
        """Ask what the hosts have said for which rules hold; nothing is asked without any."""
        asked = dict.fromkeys(key for some in keys.values() for key in some)
        return await self._context.pacing.state(asked) if asked else {}

    def _host_body(
        self,
        job: Job,
        host: str,
        tally: _Tally,
        said: Sequence[HostState],
        others: _Others,
    ) -> HostBody:
        closed_for = max((one.closed_for for one in said), default=0.0)
        until = self._context.clock.now() + round(closed_for * 1_000)
        limits = self._context.policies.limits_of(host, job.caller, job.politeness)
        ceiling = min((one.ceiling for one in said if one.ceiling), default=0)
        interval = max((one.interval for one in said), default=0.0)
        bounds = [limits.sentence(interval), others.sentence(said)]
        return HostBody(
            host=host,
            pending=tally.counts[TaskStatus.PENDING],
            claimed=tally.counts[TaskStatus.PROCESSING],
            done=tally.counts[TaskStatus.SUCCESSFUL],
            failed=tally.counts[TaskStatus.FAILED],
            limit=limits.limit or UNSET,
            rate=limits.rate or UNSET,
            ceiling=ceiling or UNSET,
            closed_until=rfc3339(until) if closed_for > 0 else UNSET,
            interval=interval or UNSET,
            limit_set_by=limits.limit_set_by or UNSET,
            rate_set_by=limits.rate_set_by or UNSET,
            pattern=limits.pattern or UNSET,
            together=limits.together or UNSET,
            detail=_detail(bounds, ceiling, until if closed_for > 0 else None) or UNSET,
        )


def _detail(bounds: Sequence[str], ceiling: int, closed_until: int | None) -> str:
    """Say what bounds the calls at a host; empty if nothing does."""
    parts = list(bounds)
    if ceiling:
        parts.insert(0, f"at most {ceiling:,} at a time for now, since it refused calls")
    if closed_until is not None:
        until = rfc3339(closed_until)[:19].replace("T", " ")
        parts.insert(0, f"it asked for a pause: no call before {until} UTC")
    return "; ".join(filter(None, parts))
