"""What the dispatcher and the handlers say to each other: neither imports the other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from conveyor.domain.errors import ConveyorError
from conveyor.ports.queues import Delivery


class Outcome(msgspec.Struct, frozen=True):
    """What becomes of a message: acknowledged, or hidden for `hide_for` seconds.

    `drop_queue` removes the message's queue, once the message is acknowledged: its run has ended,
    and no message of it means anything any more. A worker that is lost before it has called this
    leaves the queue to the sweeper.
    """

    hide_for: float | None = None
    drop_queue: Callable[[], Awaitable[None]] | None = None


ACKNOWLEDGE = Outcome()

UNEXPECTED_LOGGER = "conveyor.unforeseen"
"""The logger of what no port may raise, which is a fault of the program: the tests look at it."""


class ResultLost(ConveyorError):
    """The gateway was called, and what it gave could not be kept: something is away. To be tried
    again, but not at once, as each try costs a call."""


Throttled = Callable[[], None]
"""Called by a handler each time the gateway refused for load: the job has to slow down."""


class Handler(Protocol):
    """The work that one kind of message means."""

    async def handle(self, delivery: Delivery, throttled: Throttled) -> Outcome:
        """Do the work. Cancelled at shutdown, it leaves everything as if never begun."""
        ...

    async def renew(self) -> None:
        """Extend whatever the work in progress holds; called once a heartbeat."""
        ...


class Observer(Protocol):
    """Where handlers report what they did, for metrics."""

    def gateway_called(self, outcome: str) -> None:
        """One gateway call has ended: successful, retry, failed or refused."""
        ...

    def task_ended(self, state: str) -> None:
        """One task has reached a terminal state."""
        ...

    def claim_undone(self) -> None:
        """One claim was given back before its work was done."""
        ...

    def callback_made(self, outcome: str) -> None:
        """One callback was tried: heartbeat, success, failure, unwanted or failed."""
        ...
