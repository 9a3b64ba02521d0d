"""Decide which runs have lanes: those with work, or of a large fleet the subset of them that this
worker serves.

Discovery reads all runs with work at the start and now and then, changed runs in between, and
single runs when it gets a hint. Reads may overlap: one that begins later sees the same or more, and
its answer may still come first. So it ignores a result if a newer read has already been applied.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import anyio

from conveyor.aio.resilience import log_and_continue
from conveyor.domain.model import DispatchableRun
from conveyor.engine.dispatcher import Dispatcher
from conveyor.engine.subset import RunSubset
from conveyor.ports.clock import Clock
from conveyor.ports.queues import Queues, Signals
from conveyor.ports.records import Dispatchable
from conveyor.ports.workers import Workers


class ReadOrder:
    """Remember which read of each run was applied last, while an older one may still answer."""

    def __init__(self) -> None:
        self._begun = 0
        self._under_way = 0
        self._believed: dict[str, int] = {}

    @contextmanager
    def begin(self) -> Iterator[int]:
        """Begin a read, and yield its number. The read is under way until the context ends."""
        self._begun += 1
        self._under_way += 1
        try:
            yield self._begun
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._believed.clear()

    def is_newest(self, run_id: str, read: int) -> bool:
        """Return whether no newer read of a run has been applied; if so, ignore older reads from
        now on."""
        if read < self._believed.get(run_id, 0):
            return False
        self._believed[run_id] = read
        return True


CHANGES_MARGIN = 60_000
"""Milliseconds by which looks for changes overlap, because the writers' clocks may differ as
much."""
YOUNG_QUEUE = 60_000
"""Milliseconds in which a new queue may not be visible yet, or its name still be blocked."""

_log = logging.getLogger("conveyor.engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryOptions:
    """The intervals of discovery, in seconds.

    It reads changed runs every `interval`, all runs with work every `resync`, and closes a lane
    whose queue has been empty for `evict_after`.
    """

    interval: float
    resync: float
    evict_after: float


class Sharing(NamedTuple):
    """The reports of a fleet, and the policy that shares its runs out among the workers."""

    workers: Workers
    subset: RunSubset


class Discovery:
    """Open and close a dispatcher's lanes. Without `sharing` it has one for every run with work."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        runs: Dispatchable,
        queues: Queues,
        signals: Signals,
        clock: Clock,
        options: DiscoveryOptions,
        sharing: Sharing | None = None,
    ) -> None:
        self._dispatcher = dispatcher
        self._sharing = sharing
        self._runs = runs
        self._queues = queues
        self._signals = signals
        self._clock = clock
        self._interval = options.interval
        self._resync = options.resync
        self._evict_after = options.evict_after
        self._reads = ReadOrder()
        self._grown: dict[str, float] = {}
        self._missing: set[str] = set()
        self._some_missing = anyio.Event()
        self._stopped = False
        dispatcher.queue_missing = self._report_missing
        if sharing is not None:
            dispatcher.lanes.elsewhere = sharing.subset.elsewhere

    async def run(self) -> None:
        """Discover runs until cancelled."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._look_around)
            group.start_soon(self._listen)
            group.start_soon(self._look_after_missing)

    def stop(self) -> None:
        """Open no more lanes."""
        self._stopped = True

    async def _look_around(self) -> None:
        await self._hear()
        seen = await self._try(self._scan)
        scanned_at = self._clock.monotonic() if seen is not None else None
        since = seen or 0
        while True:
            await self._clock.sleep(self._interval)
            await self._hear()
            now = self._clock.monotonic()
            if scanned_at is None or now - scanned_at >= self._resync:
                seen = await self._try(self._scan)
                scanned_at = now if seen is not None else None
            else:
                seen = await self._try(self._changes, since)
            since = since if seen is None else seen
            await log_and_continue(_log, "runs were not shared out", self._share_out)
            await log_and_continue(_log, "empty queues were not let go", self._evict)

    async def _evict(self) -> None:
        await self._dispatcher.evict_lanes(empty_for=self._evict_after)

    async def _hear(self) -> None:
        """Read what the workers of the fleet say, if they share the runs out and it is time."""
        if self._sharing is None:
            return
        workers, subset = self._sharing
        if not subset.is_due(self._clock.monotonic()):
            return
        reports = await log_and_continue(_log, "the fleet could not be seen", workers.all)
        if reports is None:
            subset.excuse()
        else:
            subset.hear(reports, self._clock.monotonic())

    async def _share_out(self) -> None:
        """Begin to serve runs that this worker is needed for now, and leave others to others."""
        if self._sharing is None:
            return
        begins, leaves = self._sharing.subset.moves(self._clock.monotonic())
        for run_id in leaves:
            await self._dispatcher.close_lane(run_id, goes_on=True)
        for run_id in begins:
            await log_and_continue(_log, "a run could not be read", partial(self._look_at, run_id))

    async def _try(self, look: Callable[..., Awaitable[int]], *args: int) -> int | None:
        """Look; a look that fails waits for the next turn."""
        return await log_and_continue(
            _log, "a look for runs with work failed", partial(look, *args)
        )

    async def _scan(self) -> int:
        """Read all runs with work: open their lanes and close all others. Return when the read
        began."""
        began = self._clock.now()
        with self._reads.begin() as read:
            found = await self._runs.dispatchable_runs()
            for run_id in self._dispatcher.lanes.missing_from([run.run_id for run in found]):
                # The answer lacks a lane that was opened while it was on its way.
                await self._look_at(run_id)
            for run in found:
                await self._apply(run.run_id, run, read)
            self._forget_all_but({run.run_id for run in found}, read)
        return began

    def _forget_all_but(self, run_ids: Set[str], read: int) -> None:
        if self._sharing is not None:
            for run_id in self._sharing.subset.known():
                if run_id not in run_ids and self._reads.is_newest(run_id, read):
                    self._sharing.subset.forget(run_id)

    async def _changes(self, since: int) -> int:
        began = self._clock.now()
        with self._reads.begin() as read:
            for change in await self._runs.dispatch_changes(since=since - CHANGES_MARGIN):
                await self._apply(change.run_id, change.run, read, is_news=True)
        return began

    async def _look_at(self, run_id: str, *, poll: bool = False) -> DispatchableRun | None:
        """Read one run, and open or close its lane; with `poll`, ask its queue at once."""
        with self._reads.begin() as read:
            run = await self._runs.dispatchable_run(run_id)
            await self._apply(run_id, run, read, poll=poll, is_news=poll)
        return run

    async def _apply(
        self,
        run_id: str,
        run: DispatchableRun | None,
        read: int,
        *,
        poll: bool = False,
        is_news: bool = False,
    ) -> None:
        if not self._reads.is_newest(run_id, read):
            return
        if run is None or not self._serves(run, is_news=is_news):
            if run is None and self._sharing is not None:
                self._sharing.subset.forget(run_id)
            self._grown.pop(run_id, None)
            await self._dispatcher.close_lane(run_id)
            return
        if 0 < len(self._dispatcher.lanes.of(run_id)) <= len(run.hosts):
            self._grown[run_id] = self._clock.monotonic()
        if poll or not self._dispatcher.lanes.has_all(run):
            await self._queues.open_run(run.job_id, run_id, run.hosts)
            # A newer read may have closed the lane while its queue was being opened.
            if self._reads.is_newest(run_id, read) and not self._stopped:
                self._dispatcher.open_lane(run)

    def _serves(self, run: DispatchableRun, *, is_news: bool) -> bool:
        if self._sharing is None:
            return True
        return self._sharing.subset.note(run, self._clock.monotonic(), is_news=is_news)

    async def _listen(self) -> None:
        """Look at runs as hints name them: this makes discovery immediate within one process."""
        while True:
            hints = await log_and_continue(_log, "no hints could be had", self._signals.wait)
            if hints is None:
                await self._clock.sleep(self._interval)
                continue
            for run_id in hints:
                await log_and_continue(
                    _log,
                    "a changed run could not be read",
                    partial(self._look_at, run_id, poll=True),
                )

    def _report_missing(self, run_id: str) -> None:
        self._missing.add(run_id)
        self._some_missing.set()

    async def _look_after_missing(self) -> None:
        while True:
            await self._some_missing.wait()
            self._some_missing = anyio.Event()
            missing, self._missing = self._missing, set()
            for run_id in missing:
                await log_and_continue(
                    _log,
                    "a missing queue could not be looked after",
                    partial(self._look_after, run_id),
                )

    async def _look_after(self, run_id: str) -> None:
        """Look at a run of which a queue is missing. Its lanes end only if the run has ended.
        Another receive tries a young queue again, as those of hosts may be that have just got
        theirs; an older one is made again and refilled from the rows."""
        run = await self._look_at(run_id)
        grown_at = self._grown.get(run_id, -math.inf)
        if run is None or self._clock.monotonic() - grown_at < YOUNG_QUEUE / 1_000:
            return
        if self._clock.now() - run.created_at >= YOUNG_QUEUE:
            _log.warning("the queue of run %s was gone and is made again", run_id)
            await self._queues.remake_run(run.job_id, run_id, run.hosts)
