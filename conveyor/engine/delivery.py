"""Acknowledge, hide, give back and renew messages that were received.

Acknowledgements go out in batches, beside the slots. A renewal that hangs keeps no other from being
made. What has not begun is given up: its claim is undone, and others may receive it at once. A
handler is retried in place while a dependency is down, instead of returning its message to the
queue: that would be to receive it once more.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import anyio
from anyio.abc import TaskGroup

from conveyor.aio.concurrency import wait_or_timeout
from conveyor.aio.resilience import HIDING, log_and_continue, logging_failure
from conveyor.domain.backoff import Backoff
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.engine.hosts import MessageTurns
from conveyor.engine.lanes import Lane, Lanes
from conveyor.engine.pipeline import InHand
from conveyor.engine.planner import Planner
from conveyor.engine.policy import Policy
from conveyor.engine.telemetry import Telemetry
from conveyor.ports.clock import Clock
from conveyor.ports.handler import Handler, Outcome, ResultLost, StagedHandler
from conveyor.ports.queues import CONTROL_QUEUE, MAX_BATCH, Delivery, Queues

_log = logging.getLogger("conveyor.engine")


class MessageReturner:
    """Hide messages, or give them back. A message whose call failed comes back when its visibility
    lapses."""

    def __init__(self, queues: Queues, telemetry: Telemetry, *, max_receives: int) -> None:
        self._queues = queues
        self._telemetry = telemetry
        self._worn_from = max_receives // 2

    async def hide(self, delivery: Delivery, seconds: float) -> None:
        """Hide a message for some seconds from now.

        A worn message is replaced by a fresh copy, before the queue's receive limit could end it:
        the store counts attempts, and bounces count for nothing.
        """
        self._telemetry.hidden()
        if self._is_worn(delivery):
            await self._replace(delivery, seconds)
            return
        hide = partial(self._queues.change_visibility, delivery.queue, (delivery.receipt,))
        await log_and_continue(_log, "a message was not hidden", partial(hide, visibility=seconds))

    async def keep(self, deliveries: Iterable[Delivery], *, seconds: float) -> list[str]:
        """Keep messages hidden from all other workers for some seconds from now; return the
        receipts of those for which that succeeded."""
        receipts: dict[str, list[str]] = {}
        for delivery in deliveries:
            receipts.setdefault(delivery.queue, []).append(delivery.receipt)
        return await self._show(receipts, seconds, "messages were not renewed")

    async def show(self, deliveries: Iterable[Delivery], seconds: float) -> None:
        """Let hidden messages come after some seconds."""
        await self.keep(deliveries, seconds=seconds)

    async def give_back(self, deliveries: Iterable[Delivery]) -> None:
        """Let other workers receive messages at once; replace worn ones by fresh copies."""
        receipts: dict[str, list[str]] = {}
        for delivery in deliveries:
            if self._is_worn(delivery):
                await self._replace(delivery, 0.0)
            else:
                receipts.setdefault(delivery.queue, []).append(delivery.receipt)
        await self._show(receipts, 0.0, "messages were not given back")

    async def _show(self, receipts: dict[str, list[str]], after: float, failed: str) -> list[str]:
        """Make messages visible after some seconds; go on with the next queue if one fails. Return
        the receipts of those queues that did not fail."""

        async def show(queue: str, batch: list[str]) -> list[str]:
            await self._queues.change_visibility(queue, batch, visibility=after)
            return batch

        changed: list[str] = []
        for queue, batch in receipts.items():
            changed += await log_and_continue(_log, failed, partial(show, queue, batch)) or ()
        return changed

    def _is_worn(self, delivery: Delivery) -> bool:
        return delivery.receive_count >= self._worn_from and delivery.queue != CONTROL_QUEUE

    async def _replace(self, delivery: Delivery, delay: float) -> None:
        async def replace() -> None:
            await self._queues.send(delivery.queue, delivery.message, delay=delay)
            await self._queues.delete(delivery.queue, (delivery.receipt,))

        await log_and_continue(_log, "a worn message was not replaced", replace)


async def _tell_nobody(_run_id: str) -> None:
    """Forget a run silently."""


class MessagesInHand:
    """The messages that a worker has in hand, by receipt while it works them, and the ways in which
    it has one no longer: hidden, given back, or ended.

    Those of a lane that is dropped go with its queue. With the last message of a closed lane its
    run is forgotten; `forgotten` is told.
    """

    def __init__(
        self,
        returns: MessageReturner,
        planner: Planner,
        policy: Policy,
        lanes: Lanes,
        stages: StagedHandler | None,
        turns: MessageTurns | None,
    ) -> None:
        self._returns = returns
        self._planner = planner
        self._policy = policy
        self._lanes = lanes
        self._stages = stages
        self._turns = turns
        self.working: dict[str, InHand] = {}
        self.forgotten: Callable[[str], Awaitable[None]] = _tell_nobody

    async def keep_hidden(self, now: float, visibility: float) -> None:
        """Extend the visibility of messages in work of which less than half is left."""
        due = {
            receipt: one
            for receipt, one in self.working.items()
            if not one.lane.dropped and now - one.hidden_at > visibility / 2
        }
        kept = await self._returns.keep([one.delivery for one in due.values()], seconds=visibility)
        for receipt in kept:
            due[receipt].hidden_at = now

    async def hide(self, lane: Lane, delivery: Delivery, seconds: float) -> None:
        """Hide a message for some seconds from now."""
        self.working.pop(delivery.receipt, None)
        if not lane.dropped:
            await self._returns.hide(delivery, seconds)

    async def give_back(self, lane: Lane, deliveries: list[Delivery]) -> None:
        """Let other workers receive messages at once."""
        for delivery in deliveries:
            self.working.pop(delivery.receipt, None)
        if not lane.dropped:
            await self._returns.give_back(deliveries)

    async def empty_buffer(self, lane: Lane) -> None:
        """Give back what a lane has received beyond its permits."""
        if lane.buffer:
            deliveries = [delivery for delivery, _ in lane.buffer]
            lane.buffer.clear()
            await self.give_back(lane, deliveries)

    async def give_up(self, messages: Sequence[InHand]) -> None:
        """Undo the claims of messages of one lane whose work has not begun, and give the messages
        back."""
        with anyio.CancelScope(shield=True):
            await self.undo(messages)
            if messages:
                await self.give_back(messages[0].lane, [one.delivery for one in messages])
            for message in messages:
                await self.free(message)

    async def undo(self, messages: Sequence[InHand]) -> None:
        """Undo the claims of messages, where they have some."""
        held = [one.held for one in messages if one.held is not None]
        if held and self._stages is not None:
            with logging_failure(_log, "claims were not undone"):
                await self._stages.undo(held)
        for message in messages:
            message.held = None

    async def free(self, message: InHand) -> None:
        """Have a message in hand no longer, whatever goes wrong with its permits."""
        lane = message.lane
        if message.slot_kept:
            message.slot_kept = False
            self._planner.free_reserved(lane)
        try:
            with logging_failure(_log, "a permit was not given back"):
                if message.turn is not None and self._turns is not None:
                    await self._turns.free(message.turn)
                if message.permit:
                    await self._policy.discharge(lane, message.permit)
        finally:
            if message.is_kept:
                lane.kept -= 1
            else:
                self._planner.end(lane, has_slot=message.has_slot)
                if message.turn is not None and self._turns is not None:
                    self._turns.wake(message.turn)
            if lane.closed:
                with anyio.CancelScope(shield=True), logging_failure(_log, "a lane was not tidied"):
                    await self.tidy(lane)

    async def tidy(self, lane: Lane) -> None:
        """Give the idle permits of a closed lane back, and forget it after its last message."""
        if not lane.closed or lane.is_control:
            return
        await self._policy.leave(lane)
        lanes = self._lanes.of(lane.run_id)
        if lane in lanes and all(one.idle and one.closed for one in lanes):
            self._lanes.forget(lane.run_id)
            # The last of its messages may have been put off since it was closed.
            await self.forgotten(lane.run_id)


LINGER = 3.0
"""Seconds that an acknowledgement waits for others, because a batch costs one call: ten runs that
share 50 slots end two tasks a second each. A message that comes again meanwhile costs one look at
its row."""


class AckBatcher:
    """Collect receipts by queue, and delete them in batches.

    A message whose acknowledgement is lost or late comes again, and its claim shows that it is
    done. `run` ends after `stop`, once nothing waits.
    """

    def __init__(self, queues: Queues, clock: Clock) -> None:
        self._queues = queues
        self._clock = clock
        self._waiting: dict[str, list[str]] = {}
        self._calls: Counter[str] = Counter()
        self._call_ended = anyio.Event()
        self._finishing = 0
        self._some = anyio.Event()
        self._stop = anyio.Event()

    async def add(self, queue: str, receipt: str) -> None:
        """Acknowledge a message soon; send the batch that it fills."""
        receipts = self._waiting.setdefault(queue, [])
        receipts.append(receipt)
        if len(receipts) >= MAX_BATCH:
            await self._delete(queue, self._waiting.pop(queue))
        elif len(receipts) == 1:
            self._some.set()

    async def finish(self, queue: str, receipt: str, others: Sequence[str] = ()) -> None:
        """Acknowledge the last message of a run, and all others that wait, in its `others` queues,
        too.

        Return when no call that acknowledges messages of these queues is under way.
        """
        await self._delete(queue, [*self._waiting.pop(queue, ()), receipt])
        for other in others:
            if receipts := self._waiting.pop(other, None):
                await self._delete(other, receipts)
        self._finishing += 1
        try:
            while any(self._calls[name] for name in (queue, *others)):
                await self._call_ended.wait()
        finally:
            self._finishing -= 1

    def stop(self) -> None:
        """Let `run` return once nothing waits."""
        self._stop.set()
        self._some.set()

    async def run(self) -> None:
        """Send acknowledgements until `stop`, which cuts the wait for others short."""
        while True:
            await self._some.wait()
            if not self._waiting and self._stop.is_set():
                return
            await wait_or_timeout(self._stop, self._clock, LINGER)
            self._some = anyio.Event()
            if self._stop.is_set():
                self._some.set()
            for queue in list(self._waiting):
                # A queue that was finished meanwhile has nothing left.
                if receipts := self._waiting.pop(queue, None):
                    await self._delete(queue, receipts)

    async def _delete(self, queue: str, receipts: list[str]) -> None:
        self._calls[queue] += 1
        delete = partial(self._queues.delete, queue, receipts)
        try:
            await log_and_continue(_log, "acknowledgements were lost", delete)
        finally:
            self._calls[queue] -= 1
            if not self._calls[queue]:
                del self._calls[queue]
            if self._finishing:
                ended, self._call_ended = self._call_ended, anyio.Event()
                ended.set()


class Heartbeat:
    """Renew messages, and what the handlers hold.

    Nobody waits for a renewal, because a call may last longer than a claim. One that has not ended
    is not begun again; the others are.
    """

    def __init__(self, *, tasks: Handler, control: Handler) -> None:
        self._tasks = tasks
        self._control = control
        self._group: TaskGroup | None = None
        self._going: set[str] = set()

    async def run(self) -> None:
        """Make the renewals that are begun, until `stop`."""
        async with anyio.create_task_group() as self._group:
            try:
                await anyio.sleep_forever()
            finally:
                self._group = None

    def stop(self) -> None:
        """Cancel the renewals that are under way, and begin no more."""
        if self._group is not None:
            self._group.cancel_scope.cancel()

    def begin(self, keep: Callable[[], Awaitable[None]]) -> None:
        """Begin to renew messages, which `keep` does, and what the handlers hold. Failures are
        logged. Without effect unless `run` runs."""
        self._start("messages were not renewed", keep)
        self._start("claims were not renewed", self._tasks.renew)
        self._start("control work was not renewed", self._control.renew)

    def _start(self, failed: str, act: Callable[[], Awaitable[None]]) -> None:
        if self._group is not None and failed not in self._going:
            self._going.add(failed)
            self._group.start_soon(self._renew, failed, act)

    async def _renew(self, failed: str, act: Callable[[], Awaitable[None]]) -> None:
        try:
            await log_and_continue(_log, failed, act)
        finally:
            self._going.discard(failed)


T = TypeVar("T")

TRIES = 5
PAUSES = Backoff(2.0, 8.0)
"""Tries of a handler, with pauses of 2, 4, 8 and 8 s between them."""


async def retry_in_place(
    work: Callable[[], Awaitable[T]],
    clock: Clock,
    *,
    receives: int,
    keeps: Callable[[], bool],
    away: Callable[[], None],
    tries: int = 0,
    failure: Exception | None = None,
) -> T | Outcome:
    """Retry a handler in place while a dependency is down and `keeps` returns True; return its
    result. It was tried `tries` times before, and once more if that ended in a `failure`.

    Hide the message, for longer the more `receives` it has, if the handler broke, or if each try
    costs a call of the gateway. `away` is called each time that a dependency is down.
    """
    for number in itertools.count(tries + 1):
        if failure is None:
            try:
                return await work()
            except Exception as error:
                failure = error
        pause = pause_in_place(failure, number, keeps=keeps, away=away)
        if pause is None:
            return Outcome(hide_for=HIDING.delay(receives))
        failure = None
        await clock.sleep(pause)
    raise AssertionError("unreachable")


def pause_in_place(
    error: Exception, tries: int, *, keeps: Callable[[], bool], away: Callable[[], None]
) -> float | None:
    """Return the seconds until a handler that failed is to be tried again in place, or None if its
    message is to be hidden; see `retry_in_place`."""
    is_away = isinstance(error, ConveyorError) and error.code is ErrorCode.UNAVAILABLE
    trace = None if isinstance(error, ConveyorError) else error
    _log.error("handler failed: %r", error, exc_info=trace)
    if is_away:
        away()
    if not is_away or isinstance(error, ResultLost) or tries >= TRIES or not keeps():
        return None
    return PAUSES.delay(tries)
