"""The permits of one worker for one job, one caller or one host.

A lease is pure: it has no clock and no ledger. All moments are monotonic seconds of this worker.
"""

from __future__ import annotations

import math
from collections import Counter

from conveyor.domain.backoff import Backoff
from conveyor.engine.lanes import Lane, RunShare
from conveyor.ports.permits import LedgerState

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
MOST_MISSES = 3
"""Refusals in a row that count while a message in hand waits for a permit of its host."""
WANT_FROM = 2 * FULL_BATCH
"""Lowest limit of which permits are handed over: below it that costs more calls than it gains."""
HANDED_OVER = 1.0
"""Seconds after it handed over a permit of a host in which a worker asks for no other."""
STARVED_AFTER = 2.0
"""Seconds without a permit of a host after which its caller's jobs of a higher limit make way."""
WAY_KEPT = 2.0
"""Seconds for which they make way, from when the last of their calls has ended."""
WAY_AGAIN = 15.0
"""Seconds from then until they make way again: another worker may have what the limit allows."""
SMALL_LIMIT_PATIENCE = 2.5
"""The factor by which workers wait longer at limits below that, which refuse nearly all of them."""


class JobLease:
    """One worker's permits of one job, or `of_caller` of all jobs of one, or `of_host` of one host,
    usable until the fence.

    A `suffix` of the holder's name tells it from another of the same worker for the same key.
    `renewed_at` is the moment *before* the latest call that the ledger granted. `calling` is True
    during a call: there is never more than one. The ledger is closed until `closed_until`, and
    `is_full` after it last refused for its limit. `dirty` means that the ledger counts more permits
    than the worker holds. `surplus` permits are handed over as messages end.

    Of a host, `guests` are messages of queues of many hosts that use permits, or that a look found,
    and `knocking` ones wait for such a permit: for those of many hosts, which are `pressing`, other
    workers hand one over. While the host has a `ceiling`, no more permits are used. `stale` ones
    were granted under a looser bound: they are given back as their calls end. `life` counts how
    often all were lost. What the host has said was seen last at `seen_at`. Of a job's own limit
    none was to be had since `starved_since`; one with a higher limit makes `way`, so many permits
    at most, and has no more in use since `drained_at`; not again before `no_way_until`.
    """

    __slots__ = (
        "_shares",
        "calling",
        "ceiling",
        "chunk",
        "closed_until",
        "cool_until",
        "dirty",
        "drained_at",
        "first_seen",
        "guests",
        "holders",
        "idle_since",
        "is_full",
        "job_id",
        "knocking",
        "lanes",
        "life",
        "limit",
        "lost",
        "misses",
        "no_way_until",
        "of_caller",
        "of_host",
        "others_want",
        "permits",
        "pressing",
        "renewed_at",
        "retry_at",
        "seen_at",
        "stale",
        "starved_since",
        "suffix",
        "surplus",
        "wants",
        "way",
    )

    def __init__(
        self,
        job_id: str,
        limit: int,
        *,
        of_caller: bool = False,
        of_host: bool = False,
        suffix: str = "",
    ) -> None:
        self.job_id = job_id
        self.suffix = suffix
        self.limit = limit
        self.of_caller = of_caller
        self.of_host = of_host
        self.guests = self.knocking = self.pressing = 0
        self.ceiling = self.stale = self.life = 0
        self.way: int | None = None
        self.starved_since = self.drained_at = math.inf
        self.no_way_until = -math.inf
        self.lanes: list[Lane] = []
        self._shares: Counter[RunShare] = Counter()
        self.permits = 0
        self.renewed_at = self.seen_at = -math.inf
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
        if self.of_host:
            # A permit of a host ends with the call.
            if len(self.lanes) == 1:
                return self.guests + self.lanes[0].busy - self.lanes[0].unsettled
            return self.guests + sum(lane.busy - lane.unsettled for lane in self.lanes)
        if len(self._shares) == 1:
            return next(iter(self._shares)).busy
        return sum(share.busy for share in self._shares)

    @property
    def expected(self) -> int:
        """Messages of slow hosts that will soon use a permit, as a slot is kept for them."""
        return sum(share.expected for share in self._shares)

    def add(self, lane: Lane) -> None:
        """Have one more lane, whose messages use these permits."""
        self.lanes.append(lane)
        self._shares[lane.share] += 1

    def remove(self, lane: Lane) -> None:
        """Have one lane less."""
        self.lanes.remove(lane)
        self._shares[lane.share] -= 1
        if not self._shares[lane.share]:
            del self._shares[lane.share]

    @property
    def spare(self) -> int:
        """The permits that no message uses, below 0 if some were lost."""
        if not self.of_host:
            return self.permits - self.busy
        # Those of calls that have just ended are about to be given back.
        ended = min(self.stale, sum(lane.unsettled for lane in self.lanes)) if self.stale else 0
        return min(self.permits - ended, self.most) - self.busy

    @property
    def most(self) -> int:
        """The most permits of all workers together."""
        most = min(self.limit, self.ceiling or self.limit)
        return most if self.way is None else min(most, self.way)

    def see(self, ceiling: int, now: float) -> None:
        """Note the ceiling of a host as it was seen."""
        self.seen_at = now
        self.bound(self.limit, ceiling)

    def bound(self, limit: int, ceiling: int) -> None:
        """Heed the limit and the ceiling of a host. Where they are lower than before, give all
        permits back, those in use as their calls end: the ledger knows how many there are in all,
        and grants new ones within the bound."""
        before = self.most
        self.limit, self.ceiling = limit, ceiling
        self._give_back_from(before)

    def _give_back_from(self, before: int) -> None:
        if self.most < before:
            self.stale = self.permits
            self.shed_stale()

    def is_starved(self, now: float) -> bool:
        """Tell whether messages wait that have had no permit of a host for long."""
        if self.permits or not (
            self.knocking or any(not (lane.closed or lane.empties) for lane in self.lanes)
        ):
            self.starved_since = math.inf
        return now - self.starved_since >= STARVED_AFTER

    def make_way(self, now: float, most: int) -> None:
        """Use no more permits than that until a stricter job has one."""
        if self.way is None and now >= self.no_way_until:
            before, self.way = self.most, most
            self._give_back_from(before)

    def go_on(self, now: float, *, is_wanted: bool) -> None:
        """Make way no more, if that `is_wanted` no longer, or was for nothing."""
        if self.way is None:
            return
        if self.permits > self.way:
            self.drained_at = math.inf
        else:
            self.drained_at = min(self.drained_at, now)
        is_over = now - self.drained_at >= WAY_KEPT
        if is_over:
            self.no_way_until = now + WAY_AGAIN
        if is_over or not is_wanted:
            self.way, self.drained_at, self.cool_until = None, math.inf, now
            # The answer has its lanes asked again.
            self.dirty = True

    def shed_stale(self) -> None:
        """Drop the stale permits that no message uses."""
        idle = min(self.stale, self.permits) - self.busy
        if idle > 0:
            self.permits -= idle
            self.stale -= idle
            self.dirty = True

    @property
    def may_want(self) -> bool:
        """True if others may be asked to hand permits over: of a host, for a message in hand."""
        return self.pressing > 0 if self.of_host else self.limit >= WANT_FROM

    @property
    def fair(self) -> int:
        """The permits of each worker if all have the same number: a full batch of a job at
        least."""
        parties = self.holders + self.others_want + (0 if self.permits else 1)
        return max(1 if self.of_host else FULL_BATCH, math.ceil(self.limit / max(parties, 1)))

    def is_out(self, now: float) -> bool:
        """Return True if no further permit is to be asked for now."""
        return self.permits >= self.most or self.calling or now < self.cool_until

    def growth(self, now: float) -> int:
        """Return the most permits to ask for now: a growing block, and no more than is fair while
        others want some or may be starting; of a host at most those that it has."""
        if self.of_host:
            return min(self.chunk, self.most - self.permits)
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
        if self.of_host and self.others_want > 0:
            # A message waits somewhere, and there may be fewer permits than workers.
            self.surplus = max(self.surplus, 1)
        if state.free > 0 and not (self.of_host and self.others_want > 0):
            self.cool_until = min(self.cool_until, now)

    def refused(self, now: float, jitter: float) -> None:
        """Leave the full ledger alone for a while, longer with each refusal, unless a message
        waits for a permit."""
        workers = self.holders + self.others_want + (0 if self.permits else 1)
        cap = max(REFUSAL_CAP, REFUSAL_CAP_PER_WORKER * workers)
        if self.limit < WANT_FROM:
            cap *= SMALL_LIMIT_PATIENCE
        if self.of_host and self.suffix and not self.permits:
            self.starved_since = min(self.starved_since, now)
        self.misses = 1 if self.pressing else self.misses + 1
        if self.knocking:
            self.misses = min(self.misses, MOST_MISSES)
        self.is_full = now >= self.closed_until
        self.cool_until = now + Backoff(REFUSAL_BASE, cap).spread(self.misses, jitter)

    def served(self, slots: int) -> None:
        """Ask for twice as many the next time, because the ledger granted all of them."""
        self.misses = 0
        self.is_full = False
        self.chunk = min(slots, 2 * self.chunk)

    def want_no_more(self) -> None:
        """Have the ledger know once no message here waits for a permit of a host: others would hand
        theirs over as long as it counts this worker among those that want some."""
        if self.of_host and self.wants and not (self.knocking or self.lanes):
            self.wants = False
            self.dirty = True

    def forfeit(self) -> None:
        """Stop using all permits; the ledger takes them back by itself."""
        self.permits = self.guests = self.stale = 0
        self.life += 1
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
            self.stale = min(self.stale, self.permits)
            self.idle_since = None
            self.dirty = True

    def hand_over(self, now: float) -> None:
        """Pass the permit of a message that has ended to other workers, if it is due to them; let
        them have that of a host first."""
        if self.stale > 0 and self.permits > 0:
            self.stale -= 1
            self.permits -= 1
            self.dirty = True
        elif self.surplus > 0 and self.permits > 0:
            self.surplus -= 1
            self.permits -= 1
            self.dirty = True
            if self.of_host:
                self.cool_until = max(self.cool_until, now + HANDED_OVER)
