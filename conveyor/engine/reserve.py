"""The `reserve` permit policy: take the permit first, then ask for its message.

A worker takes permits in blocks, keeps them, and reuses them from message to message; only growth,
shrinkage and renewal touch the ledger. So each message is received once, and the calls of the whole
fleet never exceed the job's limit. A worker that cannot renew ends its calls before the ledger may
give its permits to others: that moment is the *fence*. Unless strict, it also keeps a few messages
beyond its permits at hand, so that receives stay full and a free permit is used at once.

A limit on the calls of a caller works alike: a message then needs a permit of its caller, too,
which the same ledger keeps under a key of its own. So does one on the calls to a host, where its
messages have a queue of their own; others take such a permit message by message.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from functools import partial

import anyio

from conveyor.aio.resilience import log_failure
from conveyor.domain.hosts import HostRule
from conveyor.domain.run_waits import RunWaitReason
from conveyor.engine.hosts import MOST_WAITING, HostPaces
from conveyor.engine.lanes import Lane
from conveyor.engine.leases import IDLE_AFTER, JobLease
from conveyor.engine.policy import LeaseOptions, PermitState, Spawn
from conveyor.ports.clock import Clock
from conveyor.ports.permits import LeaseRequest, LedgerState, Permits, usable_part
from conveyor.ports.queues import Delivery

_log = logging.getLogger("conveyor.engine")


BUFFER = 12
BUFFER_SECONDS = 3.0
"""Seconds of this worker's own work that a buffer may hold at most."""
CALLER_KEY = "caller:"
"""Begins the name of a caller's permits in the ledger, where those of jobs have their ids."""
RETRY_PAUSE = 0.25
"""Seconds after which a failed renewal is tried again: often enough to reach a ledger before the
fence after it was away for half a lease."""
SEEN = 1.0
"""Seconds for which the ceiling of a host is taken to hold before more of its permits are asked
for."""
UNANSWERED_PAUSE = 1.0
"""Seconds after which a ledger that did not answer is asked for more permits again."""


class ReservePolicy:
    """Hold this worker's permits, one `JobLease` a job, one a caller if callers have a limit, and
    one a host under a limit; `strict` keeps no buffer. Without `hosts`, no limits of hosts are
    kept."""

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
        self.hosts: HostPaces | None = None

    @property
    def held(self) -> int:
        """Permits in hand, over all jobs."""
        leases = self._leases.values()
        return sum(lease.permits for lease in leases if not (lease.of_caller or lease.of_host))

    @property
    def ahead(self) -> Collection[Lane]:
        """The lanes of slow hosts, and of those that share their starts."""
        return self.hosts.ahead if self.hosts is not None else ()

    def is_out(self, lane: Lane, now: float) -> bool:
        """Return True if a lane of one host has no permit of it to spare, and can get none now."""
        for lease in self._by_lane.get(lane, ()):
            if lease.of_host and lease.is_out(now) and lease.spare <= 0:
                return True
        return False

    def may_start(self, lane: Lane, now: float) -> bool:
        """Return True if a permit is idle and still usable. Those of its host a message that waits
        for its start has already."""
        return not self._lacking(lane, now) and lane.room > 0

    def may_receive(self, lane: Lane, now: float) -> int:
        """Return the idle permits, within the room that the job's limit leaves; of a lane of one
        host no more than there are starts, or than can be booked. An empty one is looked at while
        there are permits of the job at all: none is used."""
        if lane.is_looked_at:
            if self._lacking(lane, now):
                return 0
            return 1 if self.hosts is None else self.hosts.unseen(lane, now)
        most = lane.room
        for lease in self._leases_of(lane):
            if not self._usable_at(lease, now):
                return 0
            # Messages in hand that knock at a host go before those that are asked for.
            most = min(most, lease.spare - lease.knocking)
        if self.hosts is not None and most > 0:
            if lane.host:
                most = self.hosts.askable(lane, most, now)
            elif lane.waiting >= MOST_WAITING:
                return 0
        return max(0, most)

    def may_buffer(self, lane: Lane, asked: int, now: float) -> int:
        """Return what fills the buffer up, while the queue gives all that it is asked for."""
        if not self._buffer or lane.empties or now < lane.calm_until or not lane.task_seconds:
            return 0
        if self.hosts is not None and (lane.host or self.hosts.hold(lane)):
            # A message beyond the permits might wait for its host, not for the next permit.
            return 0
        worth = min(self._buffer, int(BUFFER_SECONDS * lane.busy / lane.task_seconds))
        return max(0, min(worth - len(lane.buffer) - lane.refilling, self._batch - asked))

    def may_acquire(self, lane: Lane, free: int, now: float) -> int:
        """Return how many more permits free slots could use, in growing blocks."""
        # The permits of what is being settled will soon be idle: ask for none in their place.
        most = min(free - lane.unsettled, lane.room)
        if lane.host and self.hosts is not None and self.hosts.is_closed(lane, now):
            return 0
        if lane.is_looked_at:
            most = min(most, 1)
        lacking = self._lacking(lane, now)
        for lease in lacking:
            if lease.calling or now < lease.cool_until:
                return 0
            most = min(most, lease.growth(now))
        return max(0, most) if lacking else 0

    def _lacking(self, lane: Lane, now: float) -> list[JobLease]:
        """Return the leases that have no permit to spare for a lane, the job's first. A message
        that waited has the permits of its host; an empty lane of a host needs none of it, and of
        others none to spare."""
        leases = self._leases_of(lane)
        if lane.turned:
            leases = tuple(lease for lease in leases if not lease.of_host)
        elif lane.is_looked_at:
            return [
                lease
                for lease in leases
                if not (lease.of_host or (lease.permits > 0 and self._usable_at(lease, now)))
            ]
        return [lease for lease in leases if not self.has_spare(lease, now)]

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
            if lease.of_host:
                count = min(count, await self._room(lease))
            if count <= 0:
                return False
            state = await self._hold(lease, lease.permits + count)
            if state.granted:
                lease.served(self._slots)
                return True
            if 0 < state.free < count:
                state = await self._hold(lease, lease.permits + state.free)
                if state.granted:
                    # Permits are being freed at this moment: ask again soon.
                    lease.misses = 0
            elif lease.permits == 0 and lease.may_want and not lease.wants:
                lease.wants = True
                await self._hold(lease, 0)
            lease.refused(self._clock.monotonic(), self._clock.random())
            return state.granted
        except Exception:
            # Messages in hand would have it asked again at once.
            lease.cool_until = self._clock.monotonic() + UNANSWERED_PAUSE
            raise
        finally:
            lease.calling = False

    async def _room(self, lease: JobLease) -> int:
        """Return how many more permits of a host may be asked for, by a ceiling that was seen not
        long ago."""
        if self.hosts is not None and self._clock.monotonic() - lease.seen_at > SEEN:
            states = await self.hosts.pacing.state([lease.job_id])
            state = states.get(lease.job_id)
            lease.see(state.ceiling if state else 0, self._clock.monotonic())
        if lease.dirty:
            # What was given back must not count as held: it may be beyond a lowered limit.
            await self._tell(lease)
        return lease.most - lease.permits

    def take(self, lane: Lane, count: int) -> Sequence[float] | None:
        """Take starts out of the hand, where the lane is of one host."""
        return self.hosts.take(lane, count) if lane.host and self.hosts is not None else ()

    async def book(self, lane: Lane, count: int) -> Sequence[float]:
        """Book starts."""
        assert self.hosts is not None
        return await self.hosts.fill(lane, count)

    async def may_look(self, lane: Lane) -> bool:
        """See what the host has said, once; its bookings tell of it later on."""
        return self.hosts is None or await self.hosts.is_open(lane)

    def put_back(self, lane: Lane, starts: Sequence[float]) -> None:
        """Have starts in hand again, and hand an idle permit of the host to a worker that wants
        it."""
        if starts and self.hosts is not None:
            self.hosts.put_back(lane, starts)
        for lease in self._by_lane.get(lane, ()):
            if lease.of_host and lease.spare > 0:
                lease.hand_over(self._clock.monotonic())

    async def admit(self, lane: Lane, delivery: Delivery) -> str | None:
        """Return the permit, which is in hand unless it was lost since the message was asked
        for."""
        now, usable = self._clock.monotonic(), self._usable
        for lease in self._by_lane.get(lane) or self._leases_of(lane):
            if lease.busy > lease.permits or now >= lease.renewed_at + usable:
                return None
        return delivery.receipt

    async def discharge(self, lane: Lane, permit: str) -> None:
        """Keep the permit for the next message, or hand it to a worker that has fewer."""
        for lease in self._by_lane.get(lane) or self._leases_of(lane):
            if lease.stale or lease.surplus:
                lease.hand_over(self._clock.monotonic())

    def bounce_for(self, lane: Lane, delivery: Delivery, now: float) -> float:
        """Give a message whose permit was lost back at once."""
        return 0.0

    def next_due(self, lane: Lane, now: float) -> float | None:
        """Return when the ledger may be asked again."""
        if lane.host and self.is_out(lane, now):
            of_host = self.lane_leases(lane)
            full = any(lease.permits >= lease.most for lease in of_host)
            cool = max(lease.cool_until for lease in of_host)
            return None if full or cool <= now else cool
        lacking = self._lacking(lane, now)
        if not lacking and lane.host and self.hosts is not None:
            return self.hosts.next_due(lane, now)
        leases = lacking or self._leases_of(lane)
        return max(filter(None, (lease.next_growth(now) for lease in leases)), default=None)

    def tend(self, now: float, spawn: Spawn) -> list[Lane]:
        """Renew what is due and give idle permits back; return the lanes whose permits are lost."""
        fenced: list[Lane] = []
        try:
            self.rematch()
        except Exception as error:
            # Permits are to be renewed all the same.
            log_failure(_log, "the rules of hosts could not be looked up", error)
        self._make_way(now)
        for lease in list(self._leases.values()):
            if lease.lost or (lease.permits and not self._usable_at(lease, now)):
                lease.forfeit()
                fenced += lease.lanes
            lease.shed_stale()
            lease.want_no_more()
            if self.draining:
                lease.shed_idle(now, keep=0, after=0.0)
            else:
                lease.shed_idle(now, keep=self._kept(lease, now), after=IDLE_AFTER)
            if not lease.calling and self._is_due(lease, now):
                lease.calling = True
                spawn(partial(self._renew, lease))
            elif self._is_over(lease, now):
                del self._leases[lease.job_id + lease.suffix]
        return list(dict.fromkeys(fenced))

    def _make_way(self, now: float) -> None:
        """Let a job whose own limit of a host is lower come beside those of its caller with a
        higher one: these would never leave so few calls in flight."""
        strictest: dict[str, int] = {}
        own = [lease for lease in self._leases.values() if lease.suffix]
        for lease in own:
            if lease.is_starved(now):
                key = lease.job_id
                strictest[key] = min(lease.limit, strictest.get(key, lease.limit))
        for lease in own:
            limit = strictest.get(lease.job_id, lease.limit)
            if limit < lease.limit:
                lease.make_way(now, limit - 1)
            lease.go_on(now, is_wanted=limit < lease.limit)

    def _kept(self, lease: JobLease, now: float) -> int:
        """Return how many permits to keep though they are idle: one of a job with open lanes, and
        those for messages that have their slots kept; of a host only those for starts in hand, and
        none that others want."""
        if not any(not lane.closed for lane in lease.lanes):
            return 0
        if not lease.of_host:
            return max(1, lease.busy + lease.expected)
        hosts = self.hosts
        if hosts is None or lease.others_want > 0:
            return 0
        has_starts = any(hosts.has_starts(lane, now) for lane in lease.lanes)
        return lease.permits if has_starts else 0

    def state(self, lane: Lane, now: float) -> PermitState:
        """Tell of a ledger that is closed, or refused the last time that it was asked for more."""
        leases = self._by_lane.get(lane, ())
        permits = leases[0].permits if leases else 0
        for lease in leases:
            if lease.of_host or lease.permits > lease.busy:
                continue
            if now < lease.closed_until:
                return PermitState(permits, RunWaitReason.PERMITS_CLOSED, lease.closed_until)
            in_use = lease.busy if lease.of_caller else lane.busy
            if in_use >= lease.limit or lease.is_full:
                of_caller = lease.limit if lease.of_caller else 0
                return PermitState(permits, RunWaitReason.MAX_INFLIGHT, caller_limit=of_caller)
        return PermitState(permits)

    def closed_until(self, lanes: Sequence[Lane], now: float) -> float | None:
        """Return when the first host opens, if all hosts with messages are closed."""
        hosts = self.hosts
        full = [lane for lane in lanes if not lane.empties]
        if hosts is None or not full:
            return None
        if not all(lane.host and hosts.is_closed(lane, now) for lane in full):
            return None
        return min(hosts.closed_until(lane) for lane in full)

    async def leave(self, lane: Lane) -> None:
        """Give back what no message of the job uses; forget the lane once it is idle."""
        leases = self._leases_of(lane)
        if lane.idle:
            del self._by_lane[lane]
            if self.hosts is not None:
                self.hosts.forget(lane)
        for lease in leases:
            if not any(not other.closed for other in lease.lanes):
                lease.shed_idle(self._clock.monotonic(), keep=0, after=0.0)
            if lane.idle and lane in lease.lanes:
                lease.remove(lane)
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

    # -- hosts --

    def guest_leases(self, rules: Sequence[HostRule]) -> tuple[JobLease, ...]:
        """Return the leases of the rules that limit the calls in flight to a host.

        Jobs of one caller may have different limits under one key: each limit has a lease, and a
        holder, of its own, so that calls under a low one wait until fewer are in flight in all.
        """
        leases = []
        for rule in rules:
            if rule.limit:
                suffix = f"/{rule.limit}" if rule.caller else ""
                lease = self._lease(rule.key, rule.limit, of_host=True, suffix=suffix)
                if lease.limit != rule.limit:
                    lease.bound(rule.limit, lease.ceiling)
                leases.append(lease)
        return tuple(leases)

    def lane_leases(self, lane: Lane) -> tuple[JobLease, ...]:
        """Return the leases of the host of a lane."""
        return tuple(lease for lease in self._leases_of(lane) if lease.of_host)

    def has_spare(self, lease: JobLease, now: float) -> bool:
        """Tell whether a permit is idle and usable."""
        return lease.spare > 0 and self._usable_at(lease, now)

    def is_kept(self, lease: JobLease, now: float) -> bool:
        """Tell whether there is a usable permit for each message that uses one."""
        return lease.busy <= lease.permits and self._usable_at(lease, now)

    async def knock(self, lease: JobLease) -> None:
        """Ask the ledger for one more permit, unless that is asked for or was just refused."""
        if not lease.is_out(self._clock.monotonic()):
            await self._acquired(lease, 1)

    async def give_back(self, lease: JobLease) -> None:
        """Give an idle permit of a host back, unless somebody here may use it."""
        lease.hand_over(self._clock.monotonic())
        if not (lease.knocking or lease.lanes):
            lease.wants = False
            lease.shed_idle(self._clock.monotonic(), keep=0, after=0.0)
        if lease.dirty and not lease.calling:
            lease.calling = True
            await self._renew(lease)

    def rematch(self) -> None:
        """Bring the leases of lanes of one host in line with the rules, if these have changed."""
        for lane in () if self.hosts is None else self.hosts.rematch():
            self._match(lane)

    def _match(self, lane: Lane) -> None:
        """Bring the leases of a lane of one host in line with the rules, which may have changed."""
        before = self._by_lane.get(lane)
        if before is None:
            return
        leases = self._leases_for(lane)
        for lease in before:
            if lease not in leases:
                lease.remove(lane)
        for lease in leases:
            if lease not in before:
                lease.add(lane)
        self._by_lane[lane] = leases

    # -- leases --

    def _leases_of(self, lane: Lane) -> tuple[JobLease, ...]:
        """Return the lease of a lane's job, that of its caller, if that has a limit, and those of
        its host."""
        leases = self._by_lane.get(lane)
        if leases is None:
            leases = self._by_lane[lane] = self._leases_for(lane)
            for lease in leases:
                lease.add(lane)
        return leases

    def _leases_for(self, lane: Lane) -> tuple[JobLease, ...]:
        leases: tuple[JobLease, ...] = (self._lease(lane.job_id, lane.limit),)
        caller = lane.owner.caller
        if self._caller_limit and caller:
            leases += (self._lease(CALLER_KEY + caller, self._caller_limit, of_caller=True),)
        if lane.host and self.hosts is not None:
            leases += self.guest_leases(self.hosts.rules_of(lane))
        return leases

    def _lease(
        self,
        key: str,
        limit: int,
        *,
        of_caller: bool = False,
        of_host: bool = False,
        suffix: str = "",
    ) -> JobLease:
        lease = self._leases.get(key + suffix)
        if lease is None:
            lease = JobLease(key, limit, of_caller=of_caller, of_host=of_host, suffix=suffix)
            self._leases[key + suffix] = lease
        return lease

    def _usable_at(self, lease: JobLease, now: float) -> bool:
        return now < lease.renewed_at + self._usable

    def _is_over(self, lease: JobLease, now: float) -> bool:
        """Return True if nothing of a lease is left, here or (as far as this worker knows) in the
        ledger."""
        in_step = not lease.dirty or now > lease.renewed_at + self._lease_seconds
        in_use = lease.lanes or lease.permits or lease.calling or lease.guests or lease.knocking
        return in_step and not in_use

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
        try:
            await self._tell(lease)
        except Exception as error:
            # If the ledger stays away, the fence ends the calls in time.
            lease.retry_at = self._clock.monotonic() + RETRY_PAUSE
            log_failure(_log, f"permits of job {lease.job_id} were not renewed", error)
        finally:
            lease.calling = False

    async def _tell(self, lease: JobLease) -> None:
        lease.dirty = False
        try:
            await self._hold(lease, lease.permits)
        except BaseException:
            lease.dirty = True
            raise

    async def _hold(self, lease: JobLease, count: int) -> LedgerState:
        before, most = lease.permits, lease.most
        self._sequence += 1
        asked_at = self._clock.monotonic()
        state = await self._ledger.acquire_or_renew(
            LeaseRequest(
                job_id=lease.job_id,
                holder=self._holder + lease.suffix,
                count=count,
                before=before,
                sequence=self._sequence,
                wants=lease.wants,
            ),
            limit=most,
            lease=self._lease_seconds,
        )
        if state.granted:
            lease.renewed_at = asked_at
            # Add the difference: permits may have been handed over or lost during the call.
            lease.permits += max(0, count - before)
            if lease.most < most and lease.of_host:
                lease.stale = lease.permits
            if count > 0:
                lease.wants = False
        elif count <= before and before:
            lease.lost = True
        lease.observe(state, self._clock.monotonic())
        return state
