"""The contract between the dispatcher and the handlers: neither imports the other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import WaitReason
from conveyor.ports.queues import Delivery


class Outcome(msgspec.Struct, frozen=True):
    """The dispatcher's next step with a message: acknowledge it, or hide it for `hide_for` seconds.

    `drop_queue` is called once the message is acknowledged, and removes its queue: the run has
    ended, and its messages mean nothing any more. A worker that is lost before that call leaves the
    queue to the sweeper. Of a hidden message, `waiting` says why its row waits, `is_claimed` that
    the row is under another claim; with neither, something broke.
    """

    hide_for: float | None = None
    drop_queue: Callable[[], Awaitable[None]] | None = None
    waiting: WaitReason | None = None
    is_claimed: bool = False


ACKNOWLEDGE = Outcome()

UNEXPECTED_LOGGER = "conveyor.unforeseen"
"""The logger of errors that no port may raise. They are faults of the program, so tests check that
it stays silent."""


class ResultLost(ConveyorError):
    """The loss of a gateway call's result, because a store to keep it in is away.

    The task is tried again, but not at once, since each try costs a call.
    """


Throttled = Callable[[], None]
"""A function that a handler calls each time the gateway refuses for load: the job must slow
down."""


class HostTurns(Protocol):
    """The limits of hosts, asked right before each call."""

    async def come(self, run_id: str, task_id: str, url: str, asked: float | None = None) -> None:
        """Return when the call of a task to a URL may begin; `asked` is the interval that its host
        asks for in robots.txt, None if that is not heeded.

        Raises Postponed if its host has no room, and ConveyorError(unavailable) if the ledger does
        not answer.
        """
        ...

    def is_lowered(self, run_id: str, task_id: str) -> bool:
        """Tell whether the ceiling of the host of a task in work was lowered, as far as is
        known."""
        ...


class NoHostTurns(HostTurns):
    """No limits of hosts: each call may begin at once."""

    async def come(self, run_id: str, task_id: str, url: str, asked: float | None = None) -> None:
        """Return at once."""

    def is_lowered(self, run_id: str, task_id: str) -> bool:
        """Nothing is limited."""
        return False


NO_HOST_TURNS = NoHostTurns()


class Handler(Protocol):
    """The work of one kind of message, called by the dispatcher."""

    async def handle(self, delivery: Delivery, throttled: Throttled) -> Outcome:
        """Do the work of a message and return its outcome. If cancelled at shutdown, leave
        everything as if the work had never begun."""
        ...

    async def renew(self) -> None:
        """Extend the claims that the work in progress holds, if any; called once a heartbeat."""
        ...


class Held(Protocol):
    """A task that its worker has claimed and not settled. Only its handler looks inside."""


@runtime_checkable
class StagedHandler(Handler, Protocol):
    """A handler whose work has three stages, so that many messages share the first and the last,
    and a slot is only needed for the second.

    `handle` does all three for one message. Errors are those of `handle`; whatever `claim` and
    `settle` return in the place of a result is one of them.
    """

    @property
    def claims_at_once(self) -> int:
        """The most tasks that one `claim` takes; 1 if each is to be claimed by `begin`."""
        ...

    @property
    def gathers(self) -> bool:
        """True if `settle` waits for further answers: a message then gives its permit back, too,
        once its call has ended."""
        ...

    def hurry(self) -> None:
        """Settle at once from now on: the worker stops."""
        ...

    async def claim(self, deliveries: Sequence[Delivery]) -> list[Held | Outcome | None]:
        """Claim the tasks that messages name. Return None for those that `begin` is to claim."""
        ...

    async def begin(
        self, delivery: Delivery, throttled: Throttled, held: Held | None
    ) -> Held | Outcome:
        """Do the work of a message up to its settlement, and return what is to be settled; or the
        outcome, if the work is done. `held` is its claim, if it was claimed before.

        After an error or a cancellation nothing is held.
        """
        ...

    async def settle(self, answered: Sequence[Held]) -> list[Outcome | Exception]:
        """Write down what `begin` returned, and return the outcomes. Nothing is held afterwards."""
        ...

    async def undo(self, held: Sequence[Held]) -> None:
        """Undo claims whose work has not begun, as if they had never been made. Failures are
        logged: such a claim lapses."""
        ...


class Observer(Protocol):
    """Counts of the handlers' work, for metrics."""

    def gateway_called(self, outcome: str) -> None:
        """Count a gateway call that ended as `outcome`: successful, retry, failed or refused."""
        ...

    def gateway_took(self, seconds: float, outcome: str, *, traceparent: str) -> None:
        """Count the seconds of a gateway call that ended as `outcome`: successful or failed.
        `traceparent` names its trace, if it is sampled."""
        ...

    def task_began(self, waited: float) -> None:
        """Count the seconds that a task waited for its call, since it could begin."""
        ...

    def task_settled(self, seconds: float) -> None:
        """Count the seconds from the answer of a task's call to its settlement."""
        ...

    def task_ended(self, state: str) -> None:
        """Count a task that reached the terminal state `state`."""
        ...

    def claim_undone(self) -> None:
        """Count a claim that was given back before its work was done."""
        ...

    def bodies_written(self, bodies: int, size: int) -> None:
        """Count an object of so many bodies, and of `size` bytes, that was written."""
        ...

    def callback_made(self, outcome: str) -> None:
        """Count a callback that was tried with `outcome`: heartbeat, success, failure, unwanted or
        failed."""
        ...


class AttemptObserver(Protocol):
    """Counts of requests to the receivers of events, for metrics."""

    def webhook_attempted(self, outcome: str) -> None:
        """Count an attempt that ended as `outcome`: delivered, http_3xx, http_4xx, http_5xx,
        timeout or transport_error."""
        ...
