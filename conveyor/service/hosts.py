"""The hosts of a run: what it does to each, for whoever has to answer for it.

A run keeps no counters by host. They are counted from its rows on request: from all of them, or
from MOST_ROWS that are spread evenly over a larger run. What of that is in flight now, its workers
have said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET

from conveyor.domain.hosts import HostRule, host_and_port, paces
from conveyor.domain.model import Job, Run, Task, TaskStatus
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


@dataclass(slots=True)
class _Tally:
    """The tasks of one host, by their status."""

    counts: dict[TaskStatus, int] = field(default_factory=lambda: dict.fromkeys(TaskStatus, 0))

    @property
    def rank(self) -> tuple[int, int]:
        """The higher, the busier."""
        return self.counts[TaskStatus.PROCESSING], sum(self.counts.values())


class HostQueries:
    """Reads the hosts of runs."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def of_run(self, caller_id: str, job_id: str, run_id: str) -> HostsBody:
        """Return the busiest hosts of a run, with the limits that hold there and what they said.

        Raises ConveyorError: not_found; unavailable if the ledger does not answer.
        """
        view, run = await self._context.live_run(caller_id, job_id, run_id)
        found: dict[str, _Tally] = {}
        counted = 0
        async for task in self._rows(view.job, run):
            counted += 1
            # A row that was taken over from an earlier run makes no call in this one.
            if task.source_run_id is None:
                tally = found.setdefault(host_and_port(task.spec.url), _Tally())
                tally.counts[task.status] += 1
        if counted < run.stats.total:
            await self._add_reported(run.run_id, found)
        found.pop("", None)
        busiest = sorted(found.items(), key=lambda one: one[1].rank, reverse=True)[:MOST_HOSTS]
        rules = {host: self._rules(view.job, host) for host, _ in busiest}
        # A host may be closed to the caller alone, whichever rule holds.
        keys = {host: paces(some, host, view.job.caller) for host, some in rules.items() if some}
        states = await self._states(keys)
        return HostsBody(
            run_id=run.run_id,
            tasks=run.stats.total,
            counted_tasks=counted,
            hosts=[
                self._body(
                    host,
                    tally,
                    rules[host],
                    [states[key] for key in keys.get(host, ()) if key in states],
                )
                for host, tally in busiest
            ],
            more_hosts=len(found) - len(busiest),
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

    async def _rows(self, job: Job, run: Run) -> AsyncIterator[Task]:
        """Yield the rows of a run, or of a larger one as many from everywhere."""
        read = task_reader(self._context.tasks, run.run_id, statuses=None)
        shards = shards_of(job)
        end = run.ingest.next_index if run.ingest and run.ingesting else run.next_index
        pieces = -(-min(end, MOST_ROWS) // PIECE)
        for number in range(pieces):
            start, stop = end * number // pieces, end * (number + 1) // pieces
            page: ShardCursor[Task] = await merge_page(
                read, shards, (start - 1,) * shards.count, PIECE, end=stop
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

    def _body(
        self,
        host: str,
        tally: _Tally,
        rules: tuple[HostRule, ...],
        said: Sequence[HostState],
    ) -> HostBody:
        closed_for = max((one.closed_for for one in said), default=0.0)
        until = self._context.clock.now() + round(closed_for * 1_000)
        return HostBody(
            host=host,
            pending=tally.counts[TaskStatus.PENDING],
            claimed=tally.counts[TaskStatus.PROCESSING],
            done=tally.counts[TaskStatus.SUCCESSFUL],
            failed=tally.counts[TaskStatus.FAILED],
            limit=min((rule.limit for rule in rules if rule.limit), default=UNSET),
            rate=min((rule.rate for rule in rules if rule.rate), default=UNSET),
            ceiling=min((one.ceiling for one in said if one.ceiling), default=UNSET),
            closed_until=rfc3339(until) if closed_for > 0 else UNSET,
        )
