"""One worker's permits of one job: how many, until when they may be used, and how many are fair.

Pure: no clock, no ledger. All moments are monotonic seconds of this worker.
"""

from __future__ import annotations

import math

from conveyor.engine.lanes import Lane
from conveyor.ports.permits import Standing

FULL_BATCH = 10
"""No job is split among workers below so many permits each: a receive brings as many messages."""
SETTLING_IN = 1.0
"""Seconds within which workers that start together keep to their fair share."""
IDLE_AFTER = 0.5
REFUSAL_BASE = 0.2
REFUSAL_CAP = 2.5
REFUSAL_CAP_PER_WORKER = 0.8
"""The more workers ask at a full ledger, the less often each of them does."""
WANT_FROM = 2 * FULL_BATCH
"""Limits below this are never handed over: it would cost more calls than it gains."""
SMALL_LIMIT_PATIENCE = 2.5
"""At such limits refusals are the rule for all workers but one: they ask so many times less."""


class Share:
    """`permits` may be used until the fence: a while before the ledger may give them away.

    `renewed_at` is the moment *before* the latest call that the ledger granted. `calling` is True
    while a call is under way: there is never more than one. `dirty`: the ledger believes in more
    permits than there are. `surplus`: how many are to be handed over as messages end.
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
        """How many permits each worker has when all have the same, and a full batch at least."""
        parties = self.holders + self.others_want + (0 if self.permits else 1)
        return max(FULL_BATCH, math.ceil(self.limit / max(parties, 1)))

    def growth(self, now: float) -> int:
        """Most permits to ask for now: in growing blocks, and no more than is fair where others
        want some or may be starting at this moment."""
        if self.others_want or now < self.first_seen + SETTLING_IN < math.inf:
            return max(0, min(self.chunk, self.fair - self.permits))
        return self.chunk

    def next_growth(self, now: float) -> float | None:
        """When it makes sense to ask again, where that is later than `now`."""
        due = self.cool_until
        if not self.others_want and self.first_seen < math.inf and not self.growth(now):
            due = max(due, self.first_seen + SETTLING_IN)
        return due if due > now else None

    def observe(self, standing: Standing, now: float) -> None:
        """Learn from what the ledger answered how many share the job, and hand over half of what
        exceeds the fair share where some of them want more."""
        if self.first_seen == math.inf:
            self.first_seen = now
        self.holders = standing.holders
        self.others_want = standing.wanting - (1 if self.wants else 0)
        excess = self.permits - self.fair if self.others_want > 0 else 0
        self.surplus = math.ceil(excess / 2) if excess > 0 else 0
        if standing.free > 0:
            self.cool_until = min(self.cool_until, now)

    def refused(self, now: float, jitter: float) -> None:
        """The ledger is full: leave it alone for a while, growing with each refusal."""
        workers = self.holders + self.others_want + (0 if self.permits else 1)
        cap = max(REFUSAL_CAP, REFUSAL_CAP_PER_WORKER * workers)
        if self.limit < WANT_FROM:
            cap *= SMALL_LIMIT_PATIENCE
        pause = min(cap, REFUSAL_BASE * 2.0 ** min(self.misses, 20))
        self.misses += 1
        self.cool_until = now + pause * (0.5 + jitter)

    def served(self, slots: int) -> None:
        """The ledger granted all that was asked for: ask for twice as many the next time."""
        self.misses = 0
        self.chunk = min(slots, 2 * self.chunk)

    def forfeit(self) -> None:
        """Use none of the permits any more; the ledger gives them away by itself."""
        self.permits = 0
        self.surplus = 0
        self.dirty = False
        self.lost = False
        self.idle_since = None

    def shed_idle(self, now: float, *, keep: int, after: float) -> None:
        """Drop permits that were idle for `after` seconds; `keep` stay, used or not."""
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
        """A message has ended: its permit goes to others, where some are due to them."""
        if self.surplus > 0 and self.permits > 0:
            self.surplus -= 1
            self.permits -= 1
            self.dirty = True
