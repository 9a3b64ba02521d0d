"""Follows runs for streams of progress.

However many watch a run, its row is read once: after a write where the binding tells of writes,
else once a second; and never for a run that nobody watches. A snapshot is the JSON of GET run,
encoded once for all who watch. A watcher has room for the newest snapshot of each of its runs, so a
slow one skips snapshots and holds up nobody.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Self

import anyio
import msgspec

from conveyor.aio.concurrency import for_each, wait_or_timeout
from conveyor.aio.keyed_locks import KeyedLocks
from conveyor.aio.resilience import log_failure
from conveyor.domain.errors import ConveyorError, ErrorCode, not_found
from conveyor.domain.model import Run
from conveyor.domain.states import LIVE_RUN_STATES
from conveyor.ports.records import ChangedRun, RunPosition, RunWrites
from conveyor.service.context import Context
from conveyor.service.responses import encode
from conveyor.service.schemas import RunBody

PACE = 0.25
"""Least seconds between two snapshots of a run."""
POLL = 1.0
"""Seconds between two reads of a run where nobody tells of writes, and between two looks at what
its row does not say."""
BEAT = 15.0
LISTED = 100
"""Runs in a stream of a caller's runs: those that changed last."""
MOST_NAMED = 16
"""Runs that a stream may name, to be told of them wherever they are in that list."""
REMEMBERED = 3_600_000
"""Milliseconds back to which a stream of runs goes on from where it was cut."""
MARGIN = 10_000
"""Milliseconds by which clocks may differ, and by which a write may become visible late."""
FULL_RETRY = 5
STOPPING_RETRY = 2
FAREWELL = 0.5
"""Seconds that streams have to take their last word, before their connections are cut."""
SIDE_BY_SIDE = 16

_log = logging.getLogger("conveyor.service")


class RunSnapshot(msgspec.Struct, frozen=True):
    """A run as GET shows it. `number` is made of an instant in milliseconds, and grows with each
    snapshot. A run that is gone has no `body`."""

    job_id: str
    run_id: str
    number: int
    body: bytes
    status: str
    ended: bool
    updated_at: int


class StreamWord(Enum):
    """All that a stream tells beside runs."""

    RESET = "reset"
    BEAT = "beat"
    BYE = "bye"


Words = AsyncIterator[RunSnapshot | StreamWord]


class Watcher:
    """One stream, to be entered for as long as it is read. `cut` breaks its connection off.

    It says good-bye before its next word once its reader is not `accepted` any more.
    """

    def __init__(
        self, caller: str | None, release: Callable[[Watcher], None], *, ends: bool, last: int
    ) -> None:
        self.caller = caller
        self.cut: Callable[[], None] = lambda: None
        self.accepted: Callable[[], bool] = lambda: True
        self._release = release
        self._ends = ends
        self._last = last
        self._pending: dict[str, RunSnapshot] = {}
        self._first: Words | None = None
        self._beats = self._closes = False
        self._woken = anyio.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None:
        self._release(self)

    def offer(self, snapshot: RunSnapshot) -> None:
        """Put a snapshot in the place of the run's earlier one, if that is still there."""
        self._pending.pop(snapshot.run_id, None)
        self._pending[snapshot.run_id] = snapshot
        self._woken.set()

    def begin_with(self, first: Words) -> None:
        """Say these words before all others."""
        self._first = first

    def beat(self) -> None:
        """Say something, so that the connection is seen to live."""
        self._beats = True
        self._woken.set()

    def close(self) -> None:
        """Say good-bye and end."""
        self._closes = True
        self._woken.set()

    async def words(self) -> Words:
        """Yield what there is to tell, as it comes, to the end. Numbers only grow."""
        if self._first is not None:
            async for word in self._first:
                if self._closes or not self.accepted():
                    break
                yield self._numbered(word)
        while not self._closes:
            self._woken = anyio.Event()
            if (self._pending or self._beats) and not self.accepted():
                break
            if self._pending:
                snapshot = self._pending.pop(next(iter(self._pending)))
                yield self._numbered(snapshot)
                if snapshot.ended and self._ends:
                    return
            elif self._beats:
                self._beats = False
                yield StreamWord.BEAT
            else:
                await self._woken.wait()
        yield StreamWord.BYE

    def _numbered(self, word: RunSnapshot | StreamWord) -> RunSnapshot | StreamWord:
        if isinstance(word, StreamWord):
            return word
        if word.number <= self._last:
            word = msgspec.structs.replace(word, number=self._last + 1)
        self._last = word.number
        return word


@dataclass(slots=True, eq=False)
class _WatchedRun:
    """A run that somebody watches: its last row and snapshot, and who gets the next ones."""

    caller: str
    job_id: str
    run_id: str
    offers: dict[object, Callable[[RunSnapshot], None]] = field(default_factory=dict)
    run: Run | None = None
    snapshot: RunSnapshot | None = None
    is_stale: bool = True
    read_at: float = 0.0
    shown_at: float = 0.0


@dataclass(slots=True, eq=False)
class _Feed:
    """The runs of a caller, or of all, that changed last, and who watches them."""

    caller: str | None
    watchers: set[Watcher] = field(default_factory=set)
    snapshots: dict[str, RunSnapshot] = field(default_factory=dict)
    oldest: RunPosition | None = None
    is_stale: bool = True

    def offer(self, snapshot: RunSnapshot) -> None:
        """Pass a snapshot on to all who watch."""
        self.snapshots.pop(snapshot.run_id, None)
        self.snapshots[snapshot.run_id] = snapshot
        for watcher in self.watchers:
            watcher.offer(snapshot)


class Progress:
    """The runs that are watched, and the streams of this process. `reads` counts reads of runs."""

    def __init__(
        self,
        context: Context,
        show: Callable[[Run], Awaitable[RunBody]],
        writes: RunWrites | None,
    ) -> None:
        self.reads = 0
        self._context = context
        self._clock = context.clock
        self._show = show
        self._is_told = writes is not None
        self._runs: dict[str, _WatchedRun] = {}
        self._feeds: dict[str | None, _Feed] = {}
        self._locks = KeyedLocks()
        self._watchers: set[Watcher] = set()
        self._of_caller: Counter[str | None] = Counter()
        self._number = 0
        self._is_ending = self._fails = False
        self._watched, self._news, self._gone = anyio.Event(), anyio.Event(), anyio.Event()
        self._following = anyio.CancelScope()
        if writes is not None:
            writes.on_write(self._written)

    @property
    def streams(self) -> int:
        """The number of streams that are open."""
        return len(self._watchers)

    # -- watching --

    async def watch_run(
        self, caller: str | None, job_id: str, run_id: str, *, last: int | None = None
    ) -> Watcher:
        """Watch a run until it has ended; `caller` of None may see the runs of all. `last` is the
        number that the reader saw last.

        Raises ConveyorError: not_found; rate_limited; unavailable while the server stops.
        """
        watcher = self._admit(caller, ends=True, last=self._plausible(last) or 0)
        try:
            await self._watch(watcher, job_id, run_id)
        except BaseException:
            self._release(watcher)
            raise
        return watcher

    async def _watch(self, watcher: Watcher, job_id: str, run_id: str) -> None:
        caller = watcher.caller
        async with self._locks.lock(run_id):
            watched = self._runs.get(run_id) or await self._begin(caller, job_id, run_id)
            if caller not in (None, watched.caller) or watched.job_id != job_id:
                raise not_found("job")
            self._join(watched, watcher, watcher.offer)

    async def _add(self, watcher: Watcher, job_id: str, run_id: str) -> None:
        """Watch one more run, if it exists."""
        try:
            await self._watch(watcher, job_id, run_id)
        except ConveyorError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise

    async def watch_all(
        self,
        caller: str | None,
        *,
        last: int | None = None,
        named: Collection[tuple[str, str]] = (),
    ) -> Watcher:
        """Watch the runs of a caller, or of all, that changed last, and first tell of every run
        that changed since `last`. Watch also the runs `named` by their job and run ids, however
        long ago they changed; those that do not exist are passed over.

        Raises ConveyorError: rate_limited; unavailable while the server stops.
        """
        since = self._plausible(last)
        watcher = self._admit(caller, ends=False, last=since or 0)
        try:
            async with self._locks.lock(f"runs of {caller}"):
                feed = self._feeds.get(caller)
                if feed is None:
                    feed = await self._begin_feed(caller)
                feed.watchers.add(watcher)
            for job_id, run_id in named:
                await self._add(watcher, job_id, run_id)
        except BaseException:
            self._release(watcher)
            raise
        earliest = 0 if since is None else since - MARGIN
        for snapshot in feed.snapshots.values():
            if snapshot.updated_at >= earliest:
                watcher.offer(snapshot)
        if last is not None and since is None:
            watcher.begin_with(_reset())
        elif since is not None and feed.oldest is not None:
            watcher.begin_with(self._older(caller, feed.oldest, earliest))
        return watcher

    def _plausible(self, last: int | None) -> int | None:
        """Return a number that the past hour may have given."""
        now = self._clock.now()
        return last if last is not None and now - REMEMBERED <= last <= now + MARGIN else None

    def _admit(self, caller: str | None, *, ends: bool, last: int) -> Watcher:
        options = self._context.options
        if self._is_ending:
            raise ConveyorError(
                ErrorCode.UNAVAILABLE, "the server is stopping", retry_after=STOPPING_RETRY
            )
        for open_now, limit, name in (
            (self._of_caller[caller], options.max_caller_streams, "CONVEYOR_MAX_CALLER_STREAMS"),
            (len(self._watchers), options.max_streams, "CONVEYOR_MAX_STREAMS"),
        ):
            if open_now >= limit:
                raise ConveyorError(
                    ErrorCode.RATE_LIMITED,
                    f"too many streams are open: close one, or read runs by GET ({name})",
                    retry_after=FULL_RETRY,
                )
        watcher = Watcher(caller, self._release, ends=ends, last=last)
        self._watchers.add(watcher)
        self._of_caller[caller] += 1
        self._watched.set()
        return watcher

    def _release(self, watcher: Watcher) -> None:
        if watcher not in self._watchers:
            return
        self._watchers.remove(watcher)
        self._of_caller[watcher.caller] -= 1
        self._of_caller += Counter()  # drops callers without a stream
        for watched in [watched for watched in self._runs.values() if watcher in watched.offers]:
            self._leave(watched, watcher)
        feed = self._feeds.get(watcher.caller)
        if feed is not None and watcher in feed.watchers:
            feed.watchers.remove(watcher)
            if not feed.watchers:
                self._drop(feed)
        if not self._watchers:
            self._watched = anyio.Event()
            self._gone.set()

    def _join(
        self, watched: _WatchedRun, who: object, offer: Callable[[RunSnapshot], None]
    ) -> None:
        """Let somebody have the present snapshot of a run, and the next ones."""
        assert watched.snapshot is not None
        offer(watched.snapshot)
        if not watched.snapshot.ended:
            self._runs[watched.run_id] = watched
            watched.offers[who] = offer

    def _leave(self, watched: _WatchedRun, who: object) -> None:
        watched.offers.pop(who, None)
        if not watched.offers:
            self._runs.pop(watched.run_id, None)

    async def _begin_feed(self, caller: str | None) -> _Feed:
        feed = self._feeds[caller] = _Feed(caller)
        try:
            await self._list(feed)
        except BaseException:
            self._drop(feed)
            raise
        return feed

    def _drop(self, feed: _Feed) -> None:
        del self._feeds[feed.caller]
        for watched in [one for one in self._runs.values() if feed in one.offers]:
            self._leave(watched, feed)

    async def _begin(self, caller: str | None, job_id: str, run_id: str) -> _WatchedRun:
        """Read a run that nobody watches yet. Raises ConveyorError(not_found)."""
        if caller is None:
            job = await self._context.jobs.find_job(job_id)
            if job is None:
                raise not_found("job")
            caller = job.caller
        await self._context.live_job(caller, job_id)
        watched = await self._read_first(caller, job_id, run_id)
        if watched.run is None:
            raise not_found("run")
        return watched

    async def _read_first(self, caller: str, job_id: str, run_id: str) -> _WatchedRun:
        watched = _WatchedRun(caller, job_id, run_id)
        # Known from here on, so that a write after the read is noticed.
        self._runs[run_id] = watched
        try:
            await self._read(watched)
        except BaseException:
            self._runs.pop(run_id, None)
            raise
        if watched.snapshot is None or watched.snapshot.ended:
            self._runs.pop(run_id, None)
        return watched

    # -- following --

    async def run(self) -> None:
        """Follow what is watched, until `end`."""
        with self._following:
            async with anyio.create_task_group() as group:
                group.start_soon(self._beat)
                group.start_soon(self._follow)

    async def end(self) -> None:
        """Refuse further streams, tell those that are open, and return once all are gone.

        The connections of those that do not take their last word in time are cut. Idempotent.
        """
        self._is_ending = True
        for watcher in self._watchers:
            watcher.close()
        for seconds in (FAREWELL, FAREWELL):
            if not self._watchers:
                break
            self._gone = anyio.Event()
            await wait_or_timeout(self._gone, self._clock, seconds)
            for watcher in list(self._watchers):
                watcher.cut()
        self._following.cancel()

    async def _beat(self) -> None:
        while True:
            await self._watched.wait()
            await self._clock.sleep(BEAT)
            for watcher in self._watchers:
                watcher.beat()

    async def _follow(self) -> None:
        every = PACE if self._is_told else POLL
        while True:
            await self._watched.wait()
            self._news = anyio.Event()
            began = self._clock.monotonic()
            await self._look()
            await self._clock.sleep(began + every - self._clock.monotonic())
            if self._is_told and not any(one.is_stale for one in self._runs.values()):
                await wait_or_timeout(self._news, self._clock, POLL)

    def _written(self, run_ids: Collection[str], moved: bool) -> None:
        """Note writes of this process."""
        if not self._watchers:
            return
        for run_id in run_ids:
            watched = self._runs.get(run_id)
            if watched is not None:
                watched.is_stale = True
                self._news.set()
        if moved and self._feeds:
            for feed in self._feeds.values():
                feed.is_stale = True
            self._news.set()

    async def _look(self) -> None:
        failures: list[Exception] = []

        async def guarded(act: Awaitable[None]) -> None:
            try:
                await act
            except Exception as error:
                failures.append(error)

        runs = [watched for watched in self._runs.values() if watched.snapshot is not None]
        await for_each(lambda one: guarded(self._look_at(one)), runs, limit=SIDE_BY_SIDE)
        for feed in list(self._feeds.values()):
            if (feed.is_stale or not self._is_told) and feed.watchers:
                await guarded(self._list(feed))
        if failures and not self._fails:
            log_failure(_log, "cannot read a run that is watched", failures[0])
        self._fails = bool(failures)

    async def _look_at(self, watched: _WatchedRun) -> None:
        now = self._clock.monotonic()
        if watched.is_stale or not self._is_told:
            if now - watched.read_at >= PACE:
                await self._read(watched)
        elif now - watched.shown_at >= POLL:
            await self._publish(watched)

    async def _read(self, watched: _WatchedRun) -> None:
        """Read the row of a run, and tell what changed."""
        watched.is_stale, watched.read_at = False, self._clock.monotonic()
        try:
            self.reads += 1
            watched.run = await self._context.runs.get_run(
                watched.caller, watched.job_id, watched.run_id
            )
        except BaseException:
            watched.is_stale = True
            raise
        await self._publish(watched)

    async def _publish(self, watched: _WatchedRun) -> None:
        watched.shown_at = self._clock.monotonic()
        run = watched.run
        if run is None:
            if watched.snapshot is None:
                return
            self._offer(watched, self._gone_snapshot(watched.snapshot))
            return
        snapshot = await self._snapshot(run)
        if watched.snapshot is None or snapshot.body != watched.snapshot.body:
            self._offer(watched, snapshot)

    def _offer(self, watched: _WatchedRun, snapshot: RunSnapshot) -> None:
        watched.snapshot = snapshot
        for offer in list(watched.offers.values()):
            offer(snapshot)
        if snapshot.ended and watched.offers:
            watched.offers.clear()
            self._runs.pop(watched.run_id, None)

    async def _snapshot(self, run: Run) -> RunSnapshot:
        body = encode(await self._show(run)).rstrip(b"\n")
        return RunSnapshot(
            run.job_id,
            run.run_id,
            self._next_number(),
            body,
            run.status.value,
            run.status not in LIVE_RUN_STATES,
            run.updated_at,
        )

    def _gone_snapshot(self, last: RunSnapshot) -> RunSnapshot:
        return msgspec.structs.replace(
            last, number=self._next_number(), body=b"", status="deleted", ended=True
        )

    def _next_number(self) -> int:
        self._number = max(self._number + 1, self._clock.now())
        return self._number

    # -- the runs that changed last --

    async def _list(self, feed: _Feed) -> None:
        """Read which runs changed last, and tell of those that are new or have ended."""
        feed.is_stale = False
        try:
            listed = await self._context.runs.changed_runs(feed.caller, before=None, limit=LISTED)
            await for_each(
                lambda changed: self._take(feed, changed), reversed(listed), limit=SIDE_BY_SIDE
            )
        except BaseException:
            feed.is_stale = True
            raise
        feed.oldest = listed[-1].position if len(listed) == LISTED else None
        for run_id in feed.snapshots.keys() - {changed.run.run_id for changed in listed}:
            watched = self._runs.get(run_id)
            if watched is not None and feed in watched.offers:
                await self._read(watched)  # one that was deleted has ended
                self._leave(watched, feed)
            del feed.snapshots[run_id]

    async def _take(self, feed: _Feed, changed: ChangedRun) -> None:
        run = changed.run
        known = feed.snapshots.get(run.run_id)
        if known is not None and known.ended:
            return
        watched = self._runs.get(run.run_id)
        if watched is not None and feed in watched.offers:
            return
        settled = self._clock.now() - changed.position.changed_at > MARGIN
        if run.status not in LIVE_RUN_STATES and settled:
            feed.offer(await self._snapshot(run))
            return
        # The list may lag behind the row.
        async with self._locks.lock(run.run_id):
            watched = self._runs.get(run.run_id) or await self._read_first(
                changed.job.caller, run.job_id, run.run_id
            )
            if watched.snapshot is not None:
                self._join(watched, feed, feed.offer)

    async def _older(self, caller: str | None, below: RunPosition, earliest: int) -> Words:
        """Yield the runs below a place in the list that changed at or after `earliest`, the oldest
        change first, so that a cut leaves no gap."""
        bounds = [below]
        while page := await self._since(caller, bounds[-1], earliest):
            bounds.append(page[-1].position)
            if len(page) < LISTED:
                break
        for bound in reversed(bounds[:-1]):
            for changed in reversed(await self._since(caller, bound, earliest)):
                snapshot = await self._snapshot(changed.run)
                yield msgspec.structs.replace(snapshot, number=changed.position.changed_at)

    async def _since(
        self, caller: str | None, before: RunPosition, earliest: int
    ) -> Sequence[ChangedRun]:
        page = await self._context.runs.changed_runs(caller, before=before, limit=LISTED)
        return [changed for changed in page if changed.position.changed_at >= earliest]


async def _reset() -> Words:
    yield StreamWord.RESET
