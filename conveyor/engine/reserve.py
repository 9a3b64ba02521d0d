"""The `reserve` permit policy: a permit is in hand before its message is asked for.

Permits are taken in blocks, kept, and reused from message to message; only growth, shrinkage and
the heartbeat touch the ledger. A message is therefore received once, and calls in flight never
exceed the job's limit over the whole fleet.
"""

from __future__ import annotations

from conveyor.engine.lanes import Lane
from conveyor.ports.clock import Clock
from conveyor.ports.permits import Permits

REFUSAL_BASE = 0.2
REFUSAL_CAP = 5.0


class ReservePolicy:
    """Holds this worker's permits. `held` is the number in hand over all lanes."""

    def __init__(self, permits: Permits, clock: Clock, *, holder: str, lease: float) -> None:
        self._permits = permits
        self._clock = clock
        self._holder = holder
        self._lease = lease
        self.held = 0

    def may_receive(self, lane: Lane) -> int:
        """How many messages the permits in hand allow to ask for now."""
        return min(lane.room, lane.permits - lane.busy)

    def may_grow(self, lane: Lane, now: float) -> bool:
        """Whether asking the ledger for more makes sense now."""
        return lane.room > 0 and not lane.growing and now >= lane.cool_until

    async def grow(self, lane: Lane, want: int) -> None:
        """Take up to `want` more permits; after a refusal, leave the ledger alone for a while."""
        lane.growing = True
        try:
            granted = await self._permits.grow(
                lane.job_id, self._holder, want, limit=lane.limit, lease=self._lease
            )
        finally:
            lane.growing = False
        lane.permits += granted
        self.held += granted
        if granted > 0:
            lane.misses = 0
            return
        pause = min(REFUSAL_CAP, REFUSAL_BASE * 2.0 ** min(lane.misses, 8))
        lane.misses += 1
        lane.cool_until = self._clock.monotonic() + pause * (0.5 + self._clock.random())

    async def shrink(self, lane: Lane, *, keep: int) -> None:
        """Give back what exceeds the messages in hand and `keep` more."""
        surplus = lane.permits - lane.busy - keep
        if surplus > 0:
            lane.permits -= surplus
            self.held -= surplus
            await self._permits.give_back(lane.job_id, self._holder, surplus)

    async def renew(self, lanes: list[Lane]) -> None:
        """Renew every lease in hand. Permits whose lease had lapsed are not counted on any more."""
        held = [lane for lane in lanes if lane.permits > 0]
        if not held:
            return
        lost = await self._permits.renew(
            self._holder, [lane.job_id for lane in held], lease=self._lease
        )
        for lane in held:
            if lane.job_id in lost:
                self.held -= lane.permits
                lane.permits = 0

    async def release(self) -> None:
        """Give everything back, at the end."""
        self.held = 0
        await self._permits.release(self._holder)
