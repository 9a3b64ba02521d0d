"""The permit policy: how permits and receives are brought together. One dispatcher, many policies.

Methods that are not awaited decide on the spot: between two awaits nobody else can count on the
same permit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from conveyor.engine.lanes import Lane
from conveyor.ports.clock import Clock
from conveyor.ports.permits import Permits
from conveyor.ports.queues import Delivery

Spawn = Callable[[Callable[[], Awaitable[None]]], None]
"""Starts a coroutine beside the slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOptions:
    """How one worker holds permits. All times in seconds.

    `holder` is its name in the ledger. The ledger takes its permits back `lease` after it last
    renewed them, which it does every `heartbeat`. It makes `slots` calls at a time, and one receive
    brings up to `batch` messages.
    """

    holder: str
    lease: float
    heartbeat: float
    slots: int
    batch: int


class Policy(Protocol):
    """What the dispatcher asks before it receives, starts and ends a message of a run's lane.

    `draining` is set when the worker stops: nothing is kept for messages to come.
    """

    draining: bool

    @property
    def held(self) -> int:
        """Permits in hand, over all lanes."""
        ...

    def may_start(self, lane: Lane, now: float) -> bool:
        """Whether a message that waits in the lane's buffer can be started now."""
        ...

    def may_receive(self, lane: Lane, now: float) -> int:
        """How many messages the lane's queue may be asked for now, to be started at once."""
        ...

    def may_buffer(self, lane: Lane, asked: int, now: float) -> int:
        """How many more than those `asked` for are worth having in the lane's buffer."""
        ...

    def may_acquire(self, lane: Lane, free: int, now: float) -> int:
        """How many permits to ask the ledger for, for `free` slots; 0 where it makes no sense."""
        ...

    async def acquire(self, lane: Lane, count: int) -> None:
        """Ask the ledger for `count` permits. Raises ConveyorError where it does not answer."""
        ...

    async def admit(self, lane: Lane, delivery: Delivery) -> str | None:
        """A permit for a message about to be started, by name; None where there is none.

        Raises ConveyorError where the ledger does not answer.
        """
        ...

    async def discharge(self, lane: Lane, permit: str) -> None:
        """The message that was admitted under a permit is done with."""
        ...

    def bounce_for(self, lane: Lane, delivery: Delivery, now: float) -> float:
        """Seconds to hide a message that got no permit; may let the lane rest."""
        ...

    def next_due(self, lane: Lane, now: float) -> float | None:
        """When the lane's next permit may be asked for, where that is later than `now`."""
        ...

    def tend(self, now: float, spawn: Spawn) -> list[Lane]:
        """Renew and give back, a few times a second; the lanes whose calls have to end at once
        because the ledger may give their permits away."""
        ...

    async def leave(self, lane: Lane) -> None:
        """A closed lane gives back the permits that it does not use."""
        ...

    async def release(self) -> None:
        """Give everything back, at the end."""
        ...


PolicyFactory = Callable[[Permits, Clock, LeaseOptions], Policy]
"""Makes the policy of one worker."""
