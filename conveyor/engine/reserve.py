"""The `reserve` permit policy: take the permit first, then ask for its message.

A worker takes permits in blocks, keeps them, and reuses them from message to message; only growth,
shrinkage and renewal touch the ledger. So each message is received once, and the calls of the whole
fleet never exceed the job's limit. A worker that cannot renew ends its calls before the ledger may
give its permits to others: that moment is the *fence*. Unless strict, it also keeps a few messages
beyond its permits at hand, so that receives stay full and a free permit is used at once.

`JobLease` holds one worker's permits of one job. It is pure: it has no clock and no ledger. All
moments are monotonic seconds of this worker.
"""

from __future__ import annotations

import logging
import math
from functools import partial

import anyio

from conveyor.aio.resilience import log_failure
from conveyor.domain.backoff import Backoff
from conveyor.engine.lanes import Lane
from conveyor.engine.policy import LeaseOptions, Spawn
from conveyor.ports.clock import Clock
from conveyor.ports.permits import LeaseRequest, LedgerState, Permits
from conveyor.ports.queues import Delivery

FULL_BATCH = 10
"""Least permits a worker in a job's fair share: one receive brings as many messages."""
SETTLING_IN = 1.0
"""Seconds in which workers that start together stay within their fair share."""
IDLE_AFTER = 0.5
REFUSAL_BASE = 0.2
REFUSAL_CAP = 2.5
REFUSAL_CAP_PER_WORKER = 0.8
"""Seconds by which each worker lengthens the pause of all after a refusal: the more of them ask a
full ledger, the more rarely each does."""
WANT_FROM = 2 * FULL_BATCH
"""Lowest limit of which permits are handed over: below it that costs more calls than it gains."""
SMALL_LIMIT_PATIENCE = 2.5
"""How many times longer workers wait at limits below that, where nearly all of them are refused."""

_log = logging.getLogger("conveyor.engine")


class JobLease:
    """One worker's permits of one job, usable until the fence.

    `renewed_at` is the moment *before* the latest call that the ledger granted. `calling` is True
    during a call: there is never more than one. `dirty` means that the ledger counts more permits
    than the worker holds. `surplus` permits are handed over as messages end.
    """

    __slots__ = (
        "calling",
        "chunk",
        "cool_until",
        "dirty",
        "first_seen",
        "holders",
        "idle_since",
        "job_id",
        "lanes",
        "limit",
        "lost",
        "misses",
        "others_want",
        "permits",
        "renewed_at",
        "retry_at",
        "surplus",
        "wants",
    )

    def __init__(self, job_id: str, limit: int) -> None:
        self.job_id = job_id
        self.limit = limit
        self.lanes: list[Lane] = []
        self.permits = 0
        self.renewed_at = -math.inf
        self.calling = False
        self.dirty = False
        self.lost = False
        self.wants = False
        self.retry_at = 0.0
        self.cool_until = 0.0
        self.misses = 0
        self.chunk = FULL_BATCH
        self.holders = 0
        self.others_want = 0
        self.first_seen = math.inf
        self.surplus = 0
        self.idle_since: float | None = None

    @property
    def busy(self) -> int:
        """Messages that use a permit, or were asked for under one."""
        if len(self.lanes) == 1:
            return self.lanes[0].busy
        return sum(lane.busy for lane in self.lanes)

    @property
    def fair(self) -> int:
        """Each worker's share if all have the same: a full batch at least."""
        parties = self.holders + self.others_want + (0 if self.permits else 1)
        return max(FULL_BATCH, math.ceil(self.limit / max(parties, 1)))

    def growth(self, now: float) -> int:
        """Return the most permits to ask for now: a growing block, and no more than is fair while
        others want some or may be starting."""
        if self.others_want or now < self.first_seen + SETTLING_IN < math.inf:
            return max(0, min(self.chunk, self.fair - self.permits))
        return self.chunk

    def next_growth(self, now: float) -> float | None:
        """Return when to ask again, if that is later than `now`."""
        due = self.cool_until
        if not self.others_want and self.first_seen < math.inf and not self.growth(now):
            due = max(due, self.first_seen + SETTLING_IN)
        return due if due > now else None

    def observe(self, standing: LedgerState, now: float) -> None:
        """Learn from the ledger's answer how many workers share the job. Hand over half of what
        exceeds the fair share if some of them want more."""
        if self.first_seen == math.inf:
            self.first_seen = now
        self.holders = standing.holders
        self.others_want = standing.wanting - (1 if self.wants else 0)
        excess = self.permits - self.fair if self.others_want > 0 else 0
        self.surplus = math.ceil(excess / 2) if excess > 0 else 0
        if standing.free > 0:
            self.cool_until = min(self.cool_until, now)

    def refused(self, now: float, jitter: float) -> None:
        """Leave the full ledger alone for a while, longer with each refusal."""
        workers = self.holders + self.others_want + (0 if self.permits else 1)
        cap = max(REFUSAL_CAP, REFUSAL_CAP_PER_WORKER * workers)
        if self.limit < WANT_FROM:
            cap *= SMALL_LIMIT_PATIENCE
        self.misses += 1
        self.cool_until = now + Backoff(REFUSAL_BASE, cap).spread(self.misses, jitter)

    def served(self, slots: int) -> None:
        """Ask for twice as many the next time, because the ledger granted all of them."""
        self.misses = 0
        self.chunk = min(slots, 2 * self.chunk)

    def forfeit(self) -> None:
        """Stop using all permits; the ledger takes them back by itself."""
        self.permits = 0
        self.surplus = 0
        self.dirty = False
        self.lost = False
        self.idle_since = None

    def shed_idle(self, now: float, *, keep: int, after: float) -> None:
        """Drop permits that were idle for `after` seconds; keep `keep` of them, used or not."""
        idle = self.permits - max(self.busy, keep)
        if idle <= 0 or any(lane.buffer or lane.refilling for lane in self.lanes):
            self.idle_since = None
            return
        if self.idle_since is None:
            self.idle_since = now
        if now - self.idle_since >= after:
            self.permits -= idle
            self.idle_since = None
            self.dirty = True

    def hand_over(self) -> None:
        """Pass the permit of a message that has ended to other workers, if it is due to them."""
        if self.surplus > 0 and self.permits > 0:
            self.surplus -= 1
            self.permits -= 1
            self.dirty = True


BUFFER = 12
BUFFER_SECONDS = 3.0
"""Seconds of this worker's own work that a buffer may hold at most."""
FENCE_SHARE = 0.1
"""Last part of a lease in which its permits are not used, because the clocks of worker and ledger
may run at different rates."""
FENCE_LEAST = 1.0
"""Least seconds of that part, however short the lease: the worker looks at the fence a few times a
second, and is late at times."""
RETRY_PAUSE = 0.25
"""Seconds after which a failed renewal is tried again: often enough to reach a ledger before the
fence after it was away for half a lease."""


class ReservePolicy:
    """Hold this worker's permits, one `JobLease` a job; `strict` keeps no buffer."""

    def __init__(
        self,
        permits: Permits,
        clock: Clock,
        options: LeaseOptions,
        *,
        strict: bool = False,
    ) -> None:
        self._ledger = permits
        self._clock = clock
        self._holder = options.holder
        self._lease = options.lease
        self._usable = options.lease - max(FENCE_SHARE * options.lease, FENCE_LEAST)
        self._heartbeat = options.heartbeat
        self._slots = options.slots
        self._batch = options.batch
        self._buffer = 0 if strict else BUFFER
        self._shares: dict[str, JobLease] = {}
        self._by_lane: dict[Lane, JobLease] = {}
        # One number for all leases: the ledger remembers it for longer than a lease may live here.
        self._sequence = 0
        self.draining = False

    @property
    def held(self) -> int:
        """Permits in hand, over all jobs."""
        return sum(share.permits for share in self._shares.values())

    def may_start(self, lane: Lane, now: float) -> bool:
        """Return whether a permit is idle and still usable."""
        share = self._share(lane)
        return share.permits > share.busy and lane.room > 0 and self._usable_at(share, now)

    def may_receive(self, lane: Lane, now: float) -> int:
        """Return the idle permits, within the room that the job's limit leaves."""
        share = self._share(lane)
        if not self._usable_at(share, now):
            return 0
        return max(0, min(lane.room, share.permits - share.busy))

    def may_buffer(self, lane: Lane, asked: int, now: float) -> int:
        """Return what fills the buffer up, while the queue gives all that it is asked for."""
        if not self._buffer or lane.empties or now < lane.calm_until or not lane.task_seconds:
            return 0
        worth = min(self._buffer, int(BUFFER_SECONDS * lane.busy / lane.task_seconds))
        return max(0, min(worth - len(lane.buffer) - lane.refilling, self._batch - asked))

    def may_acquire(self, lane: Lane, free: int, now: float) -> int:
        """Return how many more permits free slots could use, in growing blocks."""
        share = self._share(lane)
        if share.calling or now < share.cool_until:
            return 0
        return max(0, min(free, lane.room, share.growth(now)))

    async def acquire(self, lane: Lane, count: int) -> None:
        """Ask for `count` more permits; if the ledger refuses, for as many as it said were free."""
        share = self._share(lane)
        share.calling = True
        try:
            standing = await self._hold(share, share.permits + count)
            if standing.granted:
                share.served(self._slots)
                return
            if 0 < standing.free < count:
                standing = await self._hold(share, share.permits + standing.free)
                if standing.granted:
                    # Permits are being freed at this moment: ask again soon.
                    share.misses = 0
            elif share.permits == 0 and share.limit >= WANT_FROM and not share.wants:
                share.wants = True
                await self._hold(share, 0)
            share.refused(self._clock.monotonic(), self._clock.random())
        finally:
            share.calling = False

    async def admit(self, lane: Lane, delivery: Delivery) -> str | None:
        """Return the permit, which is in hand unless it was lost since the message was asked
        for."""
        share = self._share(lane)
        held = share.busy <= share.permits and self._usable_at(share, self._clock.monotonic())
        return delivery.receipt if held else None

    async def discharge(self, lane: Lane, permit: str) -> None:
        """Keep the permit for the next message, or hand it to a worker that has fewer."""
        self._share(lane).hand_over()

    def bounce_for(self, lane: Lane, delivery: Delivery, now: float) -> float:
        """Give a message whose permit was lost back at once."""
        return 0.0

    def next_due(self, lane: Lane, now: float) -> float | None:
        """Return when the ledger may be asked again."""
        return self._share(lane).next_growth(now)

    def tend(self, now: float, spawn: Spawn) -> list[Lane]:
        """Renew what is due and give idle permits back; return the lanes whose permits are lost."""
        fenced: list[Lane] = []
        for share in list(self._shares.values()):
            if share.lost or (share.permits and not self._usable_at(share, now)):
                share.forfeit()
                fenced += share.lanes
            keep = 1 if any(not lane.closed for lane in share.lanes) else 0
            if self.draining:
                share.shed_idle(now, keep=0, after=0.0)
            else:
                share.shed_idle(now, keep=keep, after=IDLE_AFTER)
            if not share.calling and self._is_due(share, now):
                share.calling = True
                spawn(partial(self._renew, share))
            elif self._is_over(share, now):
                del self._shares[share.job_id]
        return fenced

    async def leave(self, lane: Lane) -> None:
        """Give back what no message of the job uses; forget the lane once it is idle."""
        share = self._share(lane)
        if not any(not other.closed for other in share.lanes):
            share.shed_idle(self._clock.monotonic(), keep=0, after=0.0)
        if lane.idle:
            share.lanes.remove(lane)
            del self._by_lane[lane]
            if not share.lanes and share.wants:
                share.wants = False
                share.dirty = True
        if share.dirty and not share.calling:
            share.calling = True
            await self._renew(share)

    async def release(self) -> None:
        """Give everything back. Permits that the ledger does not take back lapse."""
        async with anyio.create_task_group() as group:
            for share in self._shares.values():
                if share.permits or share.wants or share.dirty:
                    share.wants = False
                    group.start_soon(self._give_all, share)

    async def _give_all(self, share: JobLease) -> None:
        share.permits = 0
        await self._renew(share)

    def _share(self, lane: Lane) -> JobLease:
        share = self._by_lane.get(lane)
        if share is None:
            share = self._shares.get(lane.job_id)
            if share is None:
                share = self._shares[lane.job_id] = JobLease(lane.job_id, lane.limit)
            share.lanes.append(lane)
            self._by_lane[lane] = share
        return share

    def _usable_at(self, share: JobLease, now: float) -> bool:
        return now < share.renewed_at + self._usable

    def _is_over(self, share: JobLease, now: float) -> bool:
        """Return whether nothing of a lease is left, here or (as far as this worker knows) in the
        ledger."""
        told = not share.dirty or now > share.renewed_at + self._lease
        return told and not (share.lanes or share.permits or share.calling)

    def _is_due(self, share: JobLease, now: float) -> bool:
        if now < share.retry_at:
            return False
        if share.dirty:
            return True
        if not (share.permits or share.wants):
            return False
        alone = share.holders <= 1 and not share.others_want
        return now - share.renewed_at >= (self._heartbeat if alone else self._heartbeat / 2)

    async def _renew(self, share: JobLease) -> None:
        """Tell the ledger how many permits are held. The caller has marked the lease as calling."""
        share.dirty = False
        try:
            await self._hold(share, share.permits)
        except Exception as error:
            # If the ledger stays away, the fence ends the calls in time.
            share.dirty = True
            share.retry_at = self._clock.monotonic() + RETRY_PAUSE
            log_failure(_log, f"permits of job {share.job_id} were not renewed", error)
        finally:
            share.calling = False

    async def _hold(self, share: JobLease, count: int) -> LedgerState:
        before = share.permits
        self._sequence += 1
        asked_at = self._clock.monotonic()
        standing = await self._ledger.acquire_or_renew(
            LeaseRequest(
                job_id=share.job_id,
                holder=self._holder,
                count=count,
                before=before,
                sequence=self._sequence,
                wants=share.wants,
            ),
            limit=share.limit,
            lease=self._lease,
        )
        if standing.granted:
            share.renewed_at = asked_at
            # Add the difference: permits may have been handed over or lost during the call.
            share.permits += max(0, count - before)
            if count > 0:
                share.wants = False
        elif count <= before and before:
            share.lost = True
        share.observe(standing, self._clock.monotonic())
        return standing
