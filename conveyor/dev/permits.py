"""The ports of permits and of workers in memory, for the workers of one process: a ledger of counts
under leases, and the reports that each keeps fresh."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from conveyor.ports.clock import Clock
from conveyor.ports.permits import LeaseRequest, LedgerState, Permits
from conveyor.ports.workers import WorkerReport

_SLACK = 64


class MemoryLease:
    """The permits of one holder for one job, until `lapses_at` in monotonic seconds.

    `noted_at` belongs to `LeaseTable`, which looks at this entry again at that moment.
    """

    __slots__ = ("count", "lapses_at", "noted_at", "sequence", "wants")

    def __init__(self) -> None:
        self.count = 0
        self.wants = False
        self.sequence = -math.inf
        self.lapses_at = math.inf
        self.noted_at = math.inf


class LeaseTable:
    """The entries of one job by holder, and their sums, so that no call has to add them up.

    `total`, `holders` and `wanting` are right as of the last `forget_lapsed`. Each entry stands in
    the heap once, at the moment it lapses or earlier. An entry that was renewed meanwhile is put
    back when that moment comes, so a renewal itself costs nothing.
    """

    __slots__ = ("_due", "by_holder", "holders", "total", "wanting")

    def __init__(self) -> None:
        self.by_holder: dict[str, MemoryLease] = {}
        self.total = 0
        self.holders = 0
        self.wanting = 0
        self._due: list[tuple[float, str]] = []

    def put(
        self, holder: str, count: int, lapses_at: float, *, sequence: float = 0, wants: bool = False
    ) -> None:
        """Give a holder `count` permits until `lapses_at`, instead of those it had."""
        entry = self.by_holder.get(holder)
        if entry is None:
            entry = self.by_holder[holder] = MemoryLease()
        self.total += count - entry.count
        self.holders += (count > 0) - (entry.count > 0)
        self.wanting += wants - entry.wants
        entry.count = count
        entry.wants = wants
        entry.sequence = sequence
        entry.lapses_at = lapses_at
        if lapses_at < entry.noted_at:
            entry.noted_at = lapses_at
            heapq.heappush(self._due, (lapses_at, holder))

    def drop(self, holder: str) -> None:
        """Forget a holder."""
        entry = self.by_holder.pop(holder, None)
        if entry is not None:
            self.total -= entry.count
            self.holders -= entry.count > 0
            self.wanting -= entry.wants

    def forget_lapsed(self, now: float) -> None:
        """Drop every entry that lapsed at `now` or before."""
        due = self._due
        while due and due[0][0] <= now:
            noted_at, holder = heapq.heappop(due)
            entry = self.by_holder.get(holder)
            if entry is None or entry.noted_at != noted_at:
                continue
            if entry.lapses_at <= now:
                self.drop(holder)
            else:
                entry.noted_at = entry.lapses_at
                heapq.heappush(due, (entry.lapses_at, holder))


class JobLeases:
    """The entries of each job. Now and then it forgets the jobs without entries."""

    def __init__(self) -> None:
        self._jobs: dict[str, LeaseTable] = {}
        self._sweep_at = _SLACK

    def __len__(self) -> int:
        return len(self._jobs)

    def of(self, job_id: str, now: float) -> LeaseTable:
        """Find a job's live entries."""
        entries = self._jobs.get(job_id)
        if entries is None:
            if len(self._jobs) >= self._sweep_at:
                self._sweep(now)
            entries = self._jobs[job_id] = LeaseTable()
        else:
            entries.forget_lapsed(now)
        return entries

    def total(self, job_id: str, now: float) -> int:
        """Add up a job's live counts."""
        return self.of(job_id, now).total if job_id in self._jobs else 0

    def _sweep(self, now: float) -> None:
        """Forget the jobs without entries. Runs each time the number of jobs has doubled, so that a
        call costs the same on average."""
        for job_id, entries in list(self._jobs.items()):
            entries.forget_lapsed(now)
            if not entries.by_holder:
                del self._jobs[job_id]
        self._sweep_at = 2 * len(self._jobs) + _SLACK


class MemoryPermits(Permits):
    """Permits by job and holder, for one event loop.

    An entry of no permits stays until its lease lapses, as it carries the want, and the sequence
    that refuses late calls. A ledger that may have lost entries is `closed_for` some seconds from
    now on, at least the longest lease that was ever asked for. For that long it believes each
    holder's `before`, whatever the limit, and nothing is `free`.
    """

    def __init__(self, clock: Clock, *, closed_for: float = 0.0) -> None:
        self._clock = clock
        self._jobs = JobLeases()
        self._opens_at = clock.monotonic() + closed_for

    async def acquire_or_renew(
        self, request: LeaseRequest, *, limit: int, lease: float
    ) -> LedgerState:
        count = request.count
        if count < 0:
            raise ValueError("a count of permits is not negative")
        now = self._clock.monotonic()
        closed = now < self._opens_at
        entries = self._jobs.of(request.job_id, now)
        entry = entries.by_holder.get(request.holder)
        known = 0 if entry is None else entry.count
        if entry is not None and request.sequence <= entry.sequence:
            granted = False
        elif closed:
            granted = count <= request.before
        else:
            granted = count <= known or entries.total - known + count <= limit
        if granted:
            entries.put(
                request.holder,
                count,
                now + lease,
                sequence=request.sequence,
                wants=request.wants,
            )
        return LedgerState(
            granted=granted,
            free=0 if closed else max(0, limit - entries.total),
            holders=entries.holders,
            wanting=entries.wanting,
            closed_for=max(0.0, self._opens_at - now),
        )

    def clear(self) -> None:
        """Forget all holders."""
        self._jobs = JobLeases()

    def total(self, job_id: str) -> int:
        """Add up a job's counts under unexpired leases."""
        return self._jobs.total(job_id, self._clock.monotonic())


class MemoryWorkers:
    """The workers port in memory."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._reports: dict[str, tuple[WorkerReport, float]] = {}

    async def say(self, report: WorkerReport) -> None:
        self._reports[report.worker_id] = report, self._clock.monotonic() + report.kept_for

    async def leave(self, worker_id: str) -> None:
        self._reports.pop(worker_id, None)

    def clear(self) -> None:
        """Forget all reports."""
        self._reports.clear()

    async def all(self) -> Sequence[WorkerReport]:
        now = self._clock.monotonic()
        self._reports = {name: kept for name, kept in self._reports.items() if kept[1] > now}
        return [self._reports[worker_id][0] for worker_id in sorted(self._reports)]
