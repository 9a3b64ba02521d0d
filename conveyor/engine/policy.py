"""The permit policy: how a worker brings permits and receives together.

Methods that are not awaited decide at once: between two awaits nobody else can count on the same
permit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from conveyor.domain.run_waits import RunWaitReason
from conveyor.engine.lanes import Lane
from conveyor.ports.clock import Clock
from conveyor.ports.permits import Permits
from conveyor.ports.queues import Delivery

Spawn = Callable[[Callable[[], Awaitable[None]]], None]
"""Start a coroutine beside the slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOptions:
    """Options of one worker's permits. All times are in seconds.

    `holder` is its name in the ledger. The ledger takes its permits back `lease` after it last
    renewed them, which it does every `heartbeat`. It makes `slots` calls at a time, and one receive
    brings up to `batch` messages. All jobs of a caller have `caller_limit` calls in flight at most,
    over the fleet; 0 is no limit.
    """

    holder: str
    lease: float
    heartbeat: float
    slots: int
    batch: int
    caller_limit: int = 0


class PermitState(NamedTuple):
    """The permits in hand for a lane's job, and what keeps them from being more: PERMITS_CLOSED or
    MAX_INFLIGHT, until a moment in monotonic seconds, where it is known. The limit that is reached
    is the job's, unless `caller_limit` is that of its caller."""

    permits: int = 0
    reason: RunWaitReason | None = None
    until: float | None = None
    caller_limit: int = 0


class Policy(Protocol):
    """The dispatcher asks it before it receives, starts and ends a message of a run's lane.

    The worker sets `draining` when it stops: the policy then keeps nothing for messages to come.
    """

    draining: bool

    @property
    def held(self) -> int:
        """Permits in hand, over all lanes."""
        ...

    def is_out(self, lane: Lane, now: float) -> bool:
        """Return whether nothing can be done for the lane of one host, at a glance."""
        ...

    @property
    def ahead(self) -> Collection[Lane]:
        """The lanes of hosts whose messages wait in hand for their starts, however busy the slots
        are."""
        ...

    def may_start(self, lane: Lane, now: float) -> bool:
        """Return whether a message in the lane's buffer may start now."""
        ...

    def may_receive(self, lane: Lane, now: float) -> int:
        """Return how many messages may be asked of the lane's queue now, to start at once."""
        ...

    def may_buffer(self, lane: Lane, asked: int, now: float) -> int:
        """Return how many more than the `asked` ones to ask for, for the lane's buffer."""
        ...

    def may_acquire(self, lane: Lane, free: int, now: float) -> int:
        """Return how many permits to ask of the ledger for `free` slots; 0 to ask for nothing."""
        ...

    async def acquire(self, lane: Lane, count: int) -> None:
        """Ask the ledger for `count` permits. Raises ConveyorError if it does not answer."""
        ...

    def take(self, lane: Lane, count: int) -> Sequence[float] | None:
        """Take the starts of `count` messages that are asked of the lane of one host; None if they
        are to be booked first."""
        ...

    async def book(self, lane: Lane, count: int) -> Sequence[float]:
        """Book up to `count` starts that were to be booked; return those for which messages may be
        asked for now. Raises ConveyorError if the ledger does not answer."""
        ...

    async def may_look(self, lane: Lane) -> bool:
        """Tell whether the host of a lane is open, which is to be asked for messages without a
        start. Raises ConveyorError if the ledger does not answer."""
        ...

    def put_back(self, lane: Lane, starts: Sequence[float]) -> None:
        """Note that fewer messages came than were asked of the lane of one host; have `starts`
        again that none of them uses."""
        ...

    async def admit(self, lane: Lane, delivery: Delivery) -> str | None:
        """Return the permit, by name, of a message about to start, or None if it has no permit.

        Raises ConveyorError if the ledger does not answer.
        """
        ...

    async def discharge(self, lane: Lane, permit: str) -> None:
        """Note that the message admitted under a permit is done."""
        ...

    def bounce_for(self, lane: Lane, delivery: Delivery, now: float) -> float:
        """Return for how many seconds to hide a message without a permit; the lane may rest,
        too."""
        ...

    def next_due(self, lane: Lane, now: float) -> float | None:
        """Return when the lane's next permit may be asked for, if that is later than `now`."""
        ...

    def tend(self, now: float, spawn: Spawn) -> list[Lane]:
        """Renew permits and give idle ones back, a few times a second. Return the lanes whose calls
        must end at once, because the ledger may give their permits to others."""
        ...

    def state(self, lane: Lane, now: float) -> PermitState:
        """Tell how the permits of a lane stand, for people; this changes nothing."""
        ...

    def closed_until(self, lanes: Sequence[Lane], now: float) -> float | None:
        """Return when the first host opens of those that keep the lanes of a run: None unless each
        lane that is not empty is of a host that is closed."""
        ...

    async def leave(self, lane: Lane) -> None:
        """Give back the permits that a closed lane does not use."""
        ...

    async def release(self) -> None:
        """Give every permit back, at the end."""
        ...


PolicyFactory = Callable[[Permits, Clock, LeaseOptions], Policy]
"""Make the policy of one worker."""
