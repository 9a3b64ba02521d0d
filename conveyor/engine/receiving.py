"""Receives: the messages of a plan, asked of a queue once the starts of their host are booked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import anyio

from conveyor.engine.lanes import Lane
from conveyor.engine.planner import Planner, Polling, Receive
from conveyor.engine.policy import Policy
from conveyor.engine.telemetry import Telemetry
from conveyor.ports.clock import Clock
from conveyor.ports.queues import Delivery, QueueMissing, Queues

MISSING_PAUSE = 1.0
"""Seconds until a queue that is missing is asked again."""


class Received(NamedTuple):
    """The messages of a plan, whose starts are known by now; the queue may be missing instead."""

    plan: Receive
    deliveries: list[Delivery]
    is_missing: bool = False


async def _keep(_lane: Lane, _deliveries: list[Delivery]) -> None:
    """Leave messages to come back by themselves."""


class MessageReceiver:
    """Ask queues for the messages of plans. `give_back` returns those that cannot be used."""

    def __init__(
        self,
        queues: Queues,
        policy: Policy,
        planner: Planner,
        clock: Clock,
        telemetry: Telemetry,
        polling: Polling,
        visibility: float,
    ) -> None:
        self._queues = queues
        self._policy = policy
        self._planner = planner
        self._clock = clock
        self._telemetry = telemetry
        self._polling = polling
        self._visibility = visibility
        self._waiting: set[anyio.CancelScope] = set()
        self.give_back: Callable[[Lane, list[Delivery]], Awaitable[None]] = _keep

    def cancel(self) -> None:
        """End the receives that wait on an empty queue."""
        for scope in self._waiting:
            scope.cancel()

    async def receive(self, plan: Receive) -> Received | None:
        """Receive what a plan asks for; None if it was cancelled, or if there is no start for it.
        The lane rests after a receive that brought nothing.

        Raises ConveyorError if the queue or the ledger does not answer.
        """
        if plan.look and not await self._may_look(plan):
            return None
        if plan.starts is None:
            booked = await self._booked(plan)
            if booked is None:
                return None
            plan = booked
        lane, began = plan.lane, self._clock.monotonic()
        found: list[Delivery] = []
        with anyio.CancelScope() as scope:
            if plan.wait:
                self._waiting.add(scope)
            try:
                found = await self._all(plan)
            except QueueMissing:
                lane.lost(began)
                lane.rest_until(began + MISSING_PAUSE)
                return Received(plan, [], is_missing=True)
            finally:
                self._waiting.discard(scope)
                self._planner.received(plan, min(len(found), plan.count))
        if scope.cancelled_caught:
            return None
        if not found:
            self._rest(plan, began)
        return Received(plan, found)

    def _rest(self, plan: Receive, began: float) -> None:
        """Let the lane of an empty queue rest, unless its receive waited: a queue that answered
        without waiting is not to be asked again at once. Nor is that of a host, of which a run may
        have many."""
        lane, now = plan.lane, self._clock.monotonic()
        lane.found_nothing(now, empties_before=plan.empties)
        if now - began < plan.wait or not plan.wait or lane.host:
            pause = self._polling.pause_after(lane.empties, self._clock.random())
            # The rows of a host that fall due wait no longer than that.
            most = self._polling.pause_cap if lane.host else pause
            lane.rest_until(now + min(pause, most))

    async def _may_look(self, plan: Receive) -> bool:
        """Tell whether a look may be made; else nothing was asked for."""
        may_look = False
        try:
            may_look = await self._policy.may_look(plan.lane)
        finally:
            if not may_look:
                self._planner.received(plan, 0)
        return may_look

    async def _booked(self, plan: Receive) -> Receive | None:
        """Book the starts of the messages that a plan asks for; ask for no more messages than there
        are, for none where there are none."""
        starts: Sequence[float] = ()
        try:
            starts = await self._policy.book(plan.lane, plan.count)
        finally:
            if not starts:
                self._planner.received(plan, 0)
        if not starts:
            return None
        self._planner.free(plan.lane, plan.count - len(starts))
        return replace(plan, count=len(starts), starts=starts)

    async def _all(self, plan: Receive) -> list[Delivery]:
        """Ask a queue for the messages of a plan, a batch at a time."""
        left, wait, batch = plan.count + plan.extra, plan.wait, self._polling.batch
        received: list[Delivery] = []
        while True:
            limit = min(left, batch)
            try:
                found = await self._queues.receive(
                    plan.lane.queue, limit=limit, visibility=self._visibility, wait=wait
                )
            except BaseException:
                if received:
                    with anyio.CancelScope(shield=True):
                        await self.give_back(plan.lane, received)
                raise
            received += found
            self._telemetry.received(len(found))
            left, wait = left - limit, 0.0
            if len(found) < limit or not left:
                return received
