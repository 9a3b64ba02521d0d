"""The pipeline around the slots: claims that wait for a slot, and answers that wait to be settled.

A slot is needed for the gateway call alone. Work before and after it is shared by many tasks where
the handler can do that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from conveyor.engine.hosts import Turn
from conveyor.engine.lanes import Lane
from conveyor.ports.handler import Held
from conveyor.ports.queues import Delivery


@dataclass(slots=True, eq=False)
class InHand:
    """A message of a lane that this worker has in hand, from its receipt to its end.

    It was received, or tried again, at `since`; its work began at `began`. Its queue hides it for a
    visibility timeout from `hidden_at` on. `held` is its claim, and `permit` the name of its
    permit, once it has one. `tries` counts those that failed. `has_slot` is False while its slot is
    free, though it is still in hand, and `is_kept` is True while its permit is, too; `slot_kept` is
    True while the next free slot is kept for it. `turn` is that at its host, where limits of hosts
    hold.
    """

    lane: Lane
    delivery: Delivery
    since: float
    hidden_at: float
    held: Held | None = None
    permit: str = ""
    began: float = 0.0
    tries: int = 0
    has_slot: bool = True
    is_kept: bool = False
    slot_kept: bool = False
    turn: Turn | None = None


AHEAD_SPAN = 0.1
"""Seconds: as many claims may wait for a slot as calls began and ended within the last so many."""
GATHERING = 6
"""Turns of the event loop for which answers gather before the next batch. An idle loop passes them
at once."""
AHEAD_AGE = 0.5
"""Most seconds that a claim waits for a slot, in case calls have become slow meanwhile."""


class Pace:
    """The calls of the slots that were short, which say how many claims may wait for a slot.

    A call counts if it took at most half of AHEAD_SPAN and ended within its last half, so that it
    also began within it. Where calls take longer, no claim waits: a run that comes now is not held
    up by what was claimed before. None waits either where one operation claims one task.

    `worth_claiming` messages are enough for an operation, once no more than `low` are left.
    """

    def __init__(self, slots: int, *, claims_at_once: int) -> None:
        self.claims_ahead = claims_at_once > 1
        self.worth_claiming = min(claims_at_once, slots) // 2
        self.low = self.worth_claiming // 4
        self._ends: deque[float] = deque(maxlen=slots)

    def ended(self, began: float, now: float) -> None:
        """Note that a call ended."""
        if self.claims_ahead and now - began <= AHEAD_SPAN / 2:
            self._ends.append(now)

    def allowance(self, now: float) -> int:
        """Return how many claims may wait, at most as many as there are slots."""
        ends, oldest = self._ends, now - AHEAD_SPAN / 2
        while ends and ends[0] < oldest:
            ends.popleft()
        return len(ends)


class Parking:
    """Slots with nothing to do, woken one at a time, the one that waits longest first. `woken` of
    them are on their way."""

    def __init__(self) -> None:
        self.woken = 0
        self._parked: deque[anyio.Event] = deque()

    async def park(self) -> None:
        """Wait to be woken."""
        event = anyio.Event()
        self._parked.append(event)
        try:
            await event.wait()
        except BaseException:
            if event in self._parked:
                self._parked.remove(event)
            raise
        finally:
            self.woken -= event.is_set()

    def wake_one(self) -> None:
        """Wake a slot, if one is parked."""
        if self._parked:
            self.woken += 1
            self._parked.popleft().set()

    def wake_all(self) -> None:
        """Wake every slot that is parked."""
        while self._parked:
            self.wake_one()


class Finisher:
    """Settle what the slots hand over, beside them.

    With `at_once` above 1, `finish` takes whatever waits, one batch after the other; otherwise each
    message goes its own way, because one settlement may take long. At most `most` messages are with
    it: a further answer keeps its slot until there is room, or nothing begins any more, and
    `leave_slot` is called then. What was handed over is finished, whatever is cancelled.
    """

    def __init__(
        self,
        finish: Callable[[list[InHand]], Awaitable[None]],
        leave_slot: Callable[[InHand], None],
        *,
        most: int,
        at_once: int,
    ) -> None:
        self._finish = finish
        self._leave_slot = leave_slot
        self._most: float = most
        self._taken = 0
        self._at_once = at_once
        self._full = min(at_once, most)
        self._without_room: deque[InHand] = deque()
        self._waiting: list[InHand] = []
        self._some = anyio.Event()
        self._group: TaskGroup | None = None
        self._stopped = False

    @property
    def in_hand(self) -> int:
        """The answers that are not finished, with those that keep their slots."""
        return self._taken + len(self._without_room)

    def hand_over(self, message: InHand) -> None:
        """Take an answer over from its slot."""
        if self._taken < self._most:
            self._take_in(message)
        else:
            self._without_room.append(message)

    def hurry(self) -> None:
        """Take all answers in, and each further one as it comes. No call follows them, so their
        slots bound them."""
        self._most = math.inf
        self._take_in_more()

    def stop(self) -> None:
        """Let `run` return once nothing waits."""
        self._stopped = True
        self._some.set()

    async def run(self) -> None:
        """Finish what is handed over, until `stop`."""
        async with anyio.create_task_group() as self._group:
            try:
                while self._waiting or not self._stopped:
                    await self._some.wait()
                    self._some = anyio.Event()
                    await self._take_waiting()
            finally:
                self._group = None
                self.hurry()
                with anyio.CancelScope(shield=True):
                    await self._take_waiting()

    def _take_in(self, message: InHand) -> None:
        self._taken += 1
        self._leave_slot(message)
        if self._at_once == 1 and self._group is not None:
            self._group.start_soon(self._take, [message])
        else:
            self._waiting.append(message)
            if len(self._waiting) == 1:
                self._some.set()

    async def _take_waiting(self) -> None:
        while self._waiting:
            # Let further calls end first: a larger batch costs less a message.
            for _ in range(GATHERING):
                if len(self._waiting) >= self._full:
                    break
                await anyio.lowlevel.checkpoint()
            batch, self._waiting = self._waiting, []
            await self._take(batch)

    async def _take(self, batch: list[InHand]) -> None:
        try:
            with anyio.CancelScope(shield=True):
                await self._finish(batch)
        finally:
            self._taken -= len(batch)
            self._take_in_more()

    def _take_in_more(self) -> None:
        while self._taken < self._most and self._without_room:
            self._take_in(self._without_room.popleft())
