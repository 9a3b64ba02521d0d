"""The `reserve` permit policy: take the permit first, then ask for its message.

A worker takes permits in blocks, keeps them, and reuses them from message to message; only growth,
shrinkage and renewal touch the ledger. So each message is received once, and the calls of the whole
fleet never exceed the job's limit. A worker that cannot renew ends its calls before the ledger may
give its permits to others: that moment is the *fence*. Unless strict, it also keeps a few messages
beyond its permits at hand, so that receives stay full and a free permit is used at once.

A limit on the calls of a caller works alike: a message then needs a permit of its caller, too,
which the same ledger keeps under a key of its own.

`JobLease` holds one worker's permits of one job, or of one caller. It is pure: it has no clock and
no ledger. All moments are monotonic seconds of this worker.
"""

from __future__ import annotations

import logging
import math
from functools import partial

import anyio

from conveyor.aio.resilience import log_failure
from conveyor.domain.backoff import Backoff
from conveyor.domain.run_waits import RunWaitReason
from conveyor.engine.lanes import Lane
from conveyor.engine.policy import LeaseOptions, PermitState, Spawn
from conveyor.ports.clock import Clock
from conveyor.ports.permits import LeaseRequest, LedgerState, Permits, usable_part
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
"""The factor by which workers wait longer at limits below that, which refuse nearly all of them."""

_log = logging.getLogger("conveyor.engine")


class JobLease:
    """One worker's permits of one job, or `of_caller` of all jobs of one, usable until the fence.

    `renewed_at` is the moment *before* the latest call that the ledger granted. `calling` is True
    during a call: there is never more than one. The ledger is closed until `closed_until`, and
    `is_full` after it last refused for its limit. `dirty` means that the ledger counts more permits
    than the worker holds. `surplus` permits are handed over as messages end.
    """

    __slots__ = (
        "calling",
        "chunk",
        "closed_until",
        "cool_until",
        "dirty",
        "first_seen",
        "holders",
        "idle_since",
        "is_full",
        "job_id",
        "lanes",
        "limit",
        "lost",
        "misses",
        "of_caller",
        "others_want",
        "permits",
        "renewed_at",
        "retry_at",
        "surplus",
        "wants",
    )

    def __init__(self, job_id: str, limit: int, *, of_caller: bool = False) -> None:
        self.job_id = job_id
        self.limit = limit
        self.of_caller = of_caller
        self.lanes: list[Lane] = []
        self.permits = 0
        self.renewed_at = -math.inf
        self.calling = False
        self.dirty = False
        self.lost = False
        self.wants = False
        self.retry_at = 0.0
        self.cool_until = 0.0
        self.closed_until = 0.0
        self.misses = 0
        self.is_full = False
        self.chunk = FULL_BATCH
        self.holders = 0
        self.others_want = 0
        self.first_seen = math.inf
        self.surplus = 0
        self.idle_since: float | None = None

    @property
    def busy(self) -> int:
        """Messages that use a permit, or were asked for under one."""
        if self.of_caller:
            return self.lanes[0].owner.busy if self.lanes else 0
        if len(self.lanes) == 1:
            return self.lanes[0].busy
        return sum(lane.busy for lane in self.lanes)

    @property
    def fair(self) -> int:
        """The permits of each worker if all have the same number: a full batch at least."""
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

    def observe(self, state: LedgerState, now: float) -> None:
        """Learn from the ledger's answer how many workers share the job. Hand over half of what
        exceeds the fair share if some of them want more."""
        if self.first_seen == math.inf:
            self.first_seen = now
        self.closed_until = now + state.closed_for
        self.holders = state.holders
        self.others_want = state.wanting - (1 if self.wants else 0)
        excess = self.permits - self.fair if self.others_want > 0 else 0
        self.surplus = math.ceil(excess / 2) if excess > 0 else 0
        if state.free > 0:
            self.cool_until = min(self.cool_until, now)

    def refused(self, now: float, jitter: float) -> None:
        """Leave the full ledger alone for a while, longer with each refusal."""
        workers = self.holders + self.others_want + (0 if self.permits else 1)
        cap = max(REFUSAL_CAP, REFUSAL_CAP_PER_WORKER * workers)
        if self.limit < WANT_FROM:
            cap *= SMALL_LIMIT_PATIENCE
        self.misses += 1
        self.is_full = now >= self.closed_until
        self.cool_until = now + Backoff(REFUSAL_BASE, cap).spread(self.misses, jitter)

    def served(self, slots: int) -> None:
        """Ask for twice as many the next time, because the ledger granted all of them."""
        self.misses = 0
        self.is_full = False
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
CALLER_KEY = "caller:"
"""Begins the name of a caller's permits in the ledger, where those of jobs have their ids."""
RETRY_PAUSE = 0.25
"""Seconds after which a failed renewal is tried again: often enough to reach a ledger before the
fence after it was away for half a lease."""


class ReservePolicy:
    """Hold this worker's permits, one `JobLease` a job, and one a caller if callers have a limit;
    `strict` keeps no buffer."""

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
        self._lease_seconds = options.lease
        self._usable = usable_part(options.lease)
        self._heartbeat = options.heartbeat
        self._slots = options.slots
        self._batch = options.batch
        self._buffer = 0 if strict else BUFFER
        self._caller_limit = options.caller_limit
        self._leases: dict[str, JobLease] = {}
        self._by_lane: dict[Lane, tuple[JobLease, ...]] = {}
        # One number for all leases: the ledger remembers it for longer than a lease may live here.
        self._sequence = 0
        self.draining = False

    @property
    def held(self) -> int:
        """Permits in hand, over all jobs."""
        return sum(lease.permits for lease in self._leases.values() if not lease.of_caller)

    def may_start(self, lane: Lane, now: float) -> bool:
        """Return True if a permit is idle and still usable."""
        for lease in self._leases_of(lane):
            if lease.permits <= lease.busy or not self._usable_at(lease, now):
                return False
        return lane.room > 0

    def may_receive(self, lane: Lane, now: float) -> int:
        """Return the idle permits, within the room that the job's limit leaves."""
        most = lane.room
        for lease in self._leases_of(lane):
            if not self._usable_at(lease, now):
                return 0
            most = min(most, lease.permits - lease.busy)
        return max(0, most)

    def may_buffer(self, lane: Lane, asked: int, now: float) -> int:
        """Return what fills the buffer up, while the queue gives all that it is asked for."""
        if not self._buffer or lane.empties or now < lane.calm_until or not lane.task_seconds:
            return 0
        worth = min(self._buffer, int(BUFFER_SECONDS * lane.busy / lane.task_seconds))
        return max(0, min(worth - len(lane.buffer) - lane.refilling, self._batch - asked))

    def may_acquire(self, lane: Lane, free: int, now: float) -> int:
        """Return how many more permits free slots could use, in growing blocks."""
        # The permits of what is being settled will soon be idle: ask for none in their place.
        most = min(free - lane.unsettled, lane.room)
        lacking = self._lacking(lane, now)
        for lease in lacking:
            if lease.calling or now < lease.cool_until:
                return 0
            most = min(most, lease.growth(now))
        return max(0, most) if lacking else 0

    def _lacking(self, lane: Lane, now: float) -> list[JobLease]:
        """Return the leases that have no permit to spare for a lane, the job's first."""
        return [
            lease
            for lease in self._leases_of(lane)
            if lease.permits <= lease.busy or not self._usable_at(lease, now)
        ]

    async def acquire(self, lane: Lane, count: int) -> None:
        """Ask for `count` permits of each kind that lacks; stop at the first that is refused."""
        for lease in self._lacking(lane, self._clock.monotonic()):
            if lease.calling or not await self._acquired(lease, count):
                return
            count = max(1, min(count, lease.permits - lease.busy))

    async def _acquired(self, lease: JobLease, count: int) -> bool:
        """Ask for `count` more permits; if the ledger refuses, for as many as it said were free.
        Return whether some were granted."""
        lease.calling = True
        try:
            state = await self._hold(lease, lease.permits + count)
            if state.granted:
                lease.served(self._slots)
                return True
            if 0 < state.free < count:
                state = await self._hold(lease, lease.permits + state.free)
                if state.granted:
                    # Permits are being freed at this moment: ask again soon.
                    lease.misses = 0
            elif lease.permits == 0 and lease.limit >= WANT_FROM and not lease.wants:
                lease.wants = True
                await self._hold(lease, 0)
            lease.refused(self._clock.monotonic(), self._clock.random())
            return state.granted
        finally:
            lease.calling = False

    async def admit(self, lane: Lane, delivery: Delivery) -> str | None:
        """Return the permit, which is in hand unless it was lost since the message was asked
        for."""
        now = self._clock.monotonic()
        for lease in self._leases_of(lane):
            if lease.busy > lease.permits or not self._usable_at(lease, now):
                return None
        return delivery.receipt

    async def discharge(self, lane: Lane, permit: str) -> None:
        """Keep the permit for the next message, or hand it to a worker that has fewer."""
        for lease in self._leases_of(lane):
            lease.hand_over()

    def bounce_for(self, lane: Lane, delivery: Delivery, now: float) -> float:
        """Give a message whose permit was lost back at once."""
        return 0.0

    def next_due(self, lane: Lane, now: float) -> float | None:
        """Return when the ledger may be asked again."""
        leases = self._lacking(lane, now) or self._leases_of(lane)
        return max(filter(None, (lease.next_growth(now) for lease in leases)), default=None)

    def tend(self, now: float, spawn: Spawn) -> list[Lane]:
        """Renew what is due and give idle permits back; return the lanes whose permits are lost."""
        fenced: list[Lane] = []
        for lease in list(self._leases.values()):
            if lease.lost or (lease.permits and not self._usable_at(lease, now)):
                lease.forfeit()
                fenced += lease.lanes
            keep = 1 if any(not lane.closed for lane in lease.lanes) else 0
            if self.draining:
                lease.shed_idle(now, keep=0, after=0.0)
            else:
                lease.shed_idle(now, keep=keep, after=IDLE_AFTER)
            if not lease.calling and self._is_due(lease, now):
                lease.calling = True
                spawn(partial(self._renew, lease))
            elif self._is_over(lease, now):
                del self._leases[lease.job_id]
        return list(dict.fromkeys(fenced))

    def state(self, lane: Lane, now: float) -> PermitState:
        """Tell of a ledger that is closed, or refused the last time that it was asked for more."""
        leases = self._by_lane.get(lane, ())
        permits = leases[0].permits if leases else 0
        for lease in leases:
            if lease.permits > lease.busy:
                continue
            if now < lease.closed_until:
                return PermitState(permits, RunWaitReason.PERMITS_CLOSED, lease.closed_until)
            in_use = lease.busy if lease.of_caller else lane.busy
            if in_use >= lease.limit or lease.is_full:
                of_caller = lease.limit if lease.of_caller else 0
                return PermitState(permits, RunWaitReason.MAX_INFLIGHT, caller_limit=of_caller)
        return PermitState(permits)

    async def leave(self, lane: Lane) -> None:
        """Give back what no message of the job uses; forget the lane once it is idle."""
        leases = self._leases_of(lane)
        if lane.idle:
            del self._by_lane[lane]
        for lease in leases:
            if not any(not other.closed for other in lease.lanes):
                lease.shed_idle(self._clock.monotonic(), keep=0, after=0.0)
            if lane.idle and lane in lease.lanes:
                lease.lanes.remove(lane)
                if not lease.lanes and lease.wants:
                    lease.wants = False
                    lease.dirty = True
        for lease in leases:
            if lease.dirty and not lease.calling:
                lease.calling = True
                await self._renew(lease)

    async def release(self) -> None:
        """Give everything back. Permits that the ledger does not take back lapse."""
        async with anyio.create_task_group() as group:
            for lease in self._leases.values():
                if lease.permits or lease.wants or lease.dirty:
                    lease.wants = False
                    group.start_soon(self._give_all, lease)

    async def _give_all(self, lease: JobLease) -> None:
        lease.permits = 0
        await self._renew(lease)

    def _leases_of(self, lane: Lane) -> tuple[JobLease, ...]:
        """Return the lease of a lane's job, and of its caller, if that has a limit."""
        leases = self._by_lane.get(lane)
        if leases is None:
            leases = (self._lease(lane.job_id, lane.limit),)
            caller = lane.owner.caller
            if self._caller_limit and caller:
                leases += (self._lease(CALLER_KEY + caller, self._caller_limit, of_caller=True),)
            for lease in leases:
                lease.lanes.append(lane)
            self._by_lane[lane] = leases
        return leases

    def _lease(self, key: str, limit: int, *, of_caller: bool = False) -> JobLease:
        lease = self._leases.get(key)
        if lease is None:
            lease = self._leases[key] = JobLease(key, limit, of_caller=of_caller)
        return lease

    def _usable_at(self, lease: JobLease, now: float) -> bool:
        return now < lease.renewed_at + self._usable

    def _is_over(self, lease: JobLease, now: float) -> bool:
        """Return True if nothing of a lease is left, here or (as far as this worker knows) in the
        ledger."""
        in_step = not lease.dirty or now > lease.renewed_at + self._lease_seconds
        return in_step and not (lease.lanes or lease.permits or lease.calling)

    def _is_due(self, lease: JobLease, now: float) -> bool:
        if now < lease.retry_at:
            return False
        if lease.dirty:
            return True
        if not (lease.permits or lease.wants):
            return False
        alone = lease.holders <= 1 and not lease.others_want
        return now - lease.renewed_at >= (self._heartbeat if alone else self._heartbeat / 2)

    async def _renew(self, lease: JobLease) -> None:
        """Tell the ledger how many permits are held. The caller has marked the lease as calling."""
        lease.dirty = False
        try:
            await self._hold(lease, lease.permits)
        except Exception as error:
            # If the ledger stays away, the fence ends the calls in time.
            lease.dirty = True
            lease.retry_at = self._clock.monotonic() + RETRY_PAUSE
            log_failure(_log, f"permits of job {lease.job_id} were not renewed", error)
        finally:
            lease.calling = False

    async def _hold(self, lease: JobLease, count: int) -> LedgerState:
        before = lease.permits
        self._sequence += 1
        asked_at = self._clock.monotonic()
        state = await self._ledger.acquire_or_renew(
            LeaseRequest(
                job_id=lease.job_id,
                holder=self._holder,
                count=count,
                before=before,
                sequence=self._sequence,
                wants=lease.wants,
            ),
            limit=lease.limit,
            lease=self._lease_seconds,
        )
        if state.granted:
            lease.renewed_at = asked_at
            # Add the difference: permits may have been handed over or lost during the call.
            lease.permits += max(0, count - before)
            if count > 0:
                lease.wants = False
        elif count <= before and before:
            lease.lost = True
        lease.observe(state, self._clock.monotonic())
        return state
