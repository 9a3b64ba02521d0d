"""The dispatcher: free slots decide, one after another, what to ask which queue for.

A slot is one gateway call at a time. A free slot picks the lane with the fewest messages in hand
for its weight (control first), makes sure that permits for what it asks are in hand, receives, and
works; what it received beyond one message it leaves to the other free slots. Nothing is received
that cannot be worked at once. Stopping has two stages: no more receives, then, after a grace,
running work is cancelled, and each message is given back.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import DispatchableRun
from conveyor.engine.lanes import Lane, Lanes
from conveyor.engine.reserve import ReservePolicy
from conveyor.engine.telemetry import Telemetry
from conveyor.engine.waiting import wait_at_most
from conveyor.ports.clock import Clock
from conveyor.ports.queues import MAX_BATCH, Delivery, Queues
from conveyor.ports.work import Handler, Outcome

CONTROL_SLOTS = 2
PROBE_WAIT = 1.0
"""Seconds that one slot waits on a queue that was empty: short, since stopping waits for it."""
EMPTY_PAUSE_CAP = 5.0
ERROR_PAUSE = 1.0
IDLE_WAIT = 60.0

_log = logging.getLogger("conveyor.engine")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a free slot does next: receive `count` messages of a lane, or grow its permits by it.

    `empties` is the lane's count when this was planned.
    """

    lane: Lane
    count: int
    grow: bool = False
    wait: float = 0.0
    empties: int = 0


class Dispatcher:
    """One worker's loop over its lanes. `slots` bounds the gateway calls at a time."""

    def __init__(
        self,
        queues: Queues,
        policy: ReservePolicy,
        clock: Clock,
        *,
        task_handler: Handler,
        control_handler: Handler,
        telemetry: Telemetry,
        slots: int,
        visibility: float,
    ) -> None:
        self._queues = queues
        self._policy = policy
        self._clock = clock
        self._task_handler = task_handler
        self._control_handler = control_handler
        self._telemetry = telemetry
        self._slots = slots
        self._visibility = visibility
        self.lanes = Lanes(control_limit=CONTROL_SLOTS)
        self._busy = 0
        self._probes = 0
        self._ready: deque[tuple[Lane, Delivery]] = deque()
        self._parked: deque[anyio.Event] = deque()
        self._working: dict[str, Delivery] = {}
        self._timer_wake = anyio.Event()
        self._stopping = False
        self._drained = anyio.Event()

    # -- what discovery says --

    async def open_lane(self, run: DispatchableRun) -> None:
        """A run may have work: poll its queue at once."""
        await self._queues.open_run(run.job_id, run.run_id)
        self.lanes.open(run)
        self._wake_one()

    async def close_lane(self, run_id: str) -> None:
        """Receive no more for a run; its permits go back as its messages end."""
        lane = self.lanes.close(run_id)
        if lane is not None:
            await self._tidy(lane)

    def depth(self) -> int:
        """About how many messages wait in the queues of this worker's lanes."""
        lanes = [self.lanes.control, *self.lanes]
        return sum(self._queues.depth(lane.queue) for lane in lanes)

    # -- running and stopping --

    async def run(self, *, grace: float) -> None:
        """Work until `stop`, then up to `grace` seconds more; returns with everything given
        back."""
        async with anyio.create_task_group() as outer:
            outer.start_soon(self._ring_timers)
            async with anyio.create_task_group() as workers:
                outer.start_soon(self._cut_off, workers, grace)
                for _ in range(self._slots + CONTROL_SLOTS):
                    workers.start_soon(self._slot)
            outer.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            while self._ready:
                lane, delivery = self._ready.popleft()
                self._free(lane, 1)
                await self._hand_back(delivery)
            await self._policy.release()

    def stop(self) -> None:
        """Begin to stop: nothing is received any more."""
        self._stopping = True
        self._drained.set()
        self._timer_wake.set()
        while self._parked:
            self._parked.popleft().set()

    async def _cut_off(self, workers: TaskGroup, grace: float) -> None:
        await self._drained.wait()
        await self._clock.sleep(grace)
        workers.cancel_scope.cancel()

    async def renew(self) -> None:
        """Extend the visibility of every message in work; what handlers hold; and the permits."""
        receipts: dict[str, list[str]] = {}
        for receipt, delivery in list(self._working.items()):
            receipts.setdefault(delivery.queue, []).append(receipt)
        for queue, batch in receipts.items():
            await self._queues.change_visibility(queue, batch, visibility=self._visibility)
        await self._task_handler.renew()
        await self._control_handler.renew()
        await self._policy.renew(list(self.lanes))

    # -- slots --

    async def _slot(self) -> None:
        while True:
            if self._stopping:
                return
            if self._ready:
                lane, delivery = self._ready.popleft()
                await self._work(lane, delivery)
                # Slots that end in the same turn are counted before one of them asks for more:
                # one receive of ten instead of ten of one.
                await anyio.lowlevel.checkpoint()
                continue
            plan = self._plan()
            if plan is None:
                await self._park()
            else:
                self._wake_one()
                await self._carry_out(plan)

    def _plan(self) -> Plan | None:
        """Choose synchronously, so that no two slots ever count on the same permit."""
        now = self._clock.monotonic()
        control = self.lanes.control
        if control.room > 0 and now >= control.not_before and not control.probing:
            return self._receive_plan(control, control.room, may_probe=True)
        free = self._slots - self._busy
        if free <= 0:
            return None
        best: Lane | None = None
        least = 0.0
        may_probe = True
        for lane in self.lanes:
            if lane.closed or lane.probing or now < lane.not_before or lane.room <= 0:
                continue
            if lane.permits <= lane.busy and not self._policy.may_grow(lane, now):
                continue
            may_probe = may_probe and lane.empties > 0
            load = lane.busy / lane.weight
            if best is None or load < least:
                best, least = lane, load
        if best is None:
            return None
        count = min(free, self._policy.may_receive(best))
        if count > 0:
            return self._receive_plan(best, count, may_probe=may_probe)
        best.growing = True
        return Plan(best, min(free, best.room), grow=True)

    def _receive_plan(self, lane: Lane, count: int, *, may_probe: bool) -> Plan:
        """A lane that was empty is asked for one message; a slot with nothing better to do
        waits."""
        count = 1 if lane.empties else min(count, MAX_BATCH)
        wait = 0.0
        if lane.empties:
            lane.probing = True
            if lane.is_control or (may_probe and self._probes < max(1, self._slots // 10)):
                wait = PROBE_WAIT
                self._probes += 0 if lane.is_control else 1
        lane.busy += count
        if not lane.is_control:
            self._busy += count
        return Plan(lane, count, wait=wait, empties=lane.empties)

    async def _carry_out(self, plan: Plan) -> None:
        try:
            if plan.grow:
                await self._policy.grow(plan.lane, plan.count)
                self._timer_wake.set()
            else:
                await self._receive(plan)
        except ConveyorError:
            _log.exception("queue or ledger did not answer")
            plan.lane.not_before = self._clock.monotonic() + ERROR_PAUSE
            self._timer_wake.set()

    async def _receive(self, plan: Plan) -> None:
        lane = plan.lane
        began = self._clock.monotonic()
        received: list[Delivery] = []
        try:
            received = await self._queues.receive(
                lane.queue, limit=plan.count, visibility=self._visibility, wait=plan.wait
            )
        finally:
            self._free(lane, plan.count - len(received))
            lane.probing = False
            if plan.wait and not lane.is_control:
                self._probes -= 1
        self._telemetry.received(len(received))
        if lane.closed and received:
            # The run was paused, or ended, while its queue was being asked.
            self._free(lane, len(received))
            for delivery in received:
                await self._hand_back(delivery)
            received = []
        for delivery in received:
            self._ready.append((lane, delivery))
        for _ in range(len(received) - 1):
            self._wake_one()
        if received:
            lane.empties = 0
            return
        # Slots that asked at the same time and found nothing have learnt it once.
        lane.empties = min(lane.empties, plan.empties) + 1
        if self._clock.monotonic() - began < plan.wait or not plan.wait:
            # An answer that did not wait, as of a queue that is gone, must not be asked for again
            # at once.
            pause = min(EMPTY_PAUSE_CAP, 0.01 * 2.0 ** min(lane.empties, 10))
            lane.not_before = self._clock.monotonic() + pause * (0.5 + self._clock.random())
        self._timer_wake.set()
        if not lane.is_control:
            await self._policy.shrink(lane, keep=0 if lane.closed else 1)
            await self._tidy(lane)

    async def _work(self, lane: Lane, delivery: Delivery) -> None:
        self._working[delivery.receipt] = delivery
        handler = self._control_handler if lane.is_control else self._task_handler
        try:
            outcome = await self._handled(handler, delivery)
            await self._conclude(lane, delivery, outcome)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._hand_back(delivery)
            raise
        finally:
            self._working.pop(delivery.receipt, None)
            self._free(lane, 1)
            if lane.closed:
                await self._tidy(lane)

    async def _handled(self, handler: Handler, delivery: Delivery) -> Outcome:
        """A handler that breaks costs its own message a pause, never the worker."""
        try:
            return await handler.handle(delivery)
        except Exception:
            _log.exception("handler failed", extra={"queue": delivery.queue})
            return Outcome(hide_for=ERROR_PAUSE * 2.0 ** min(delivery.receive_count, 8))

    async def _conclude(self, lane: Lane, delivery: Delivery, outcome: Outcome) -> None:
        if outcome.throttled:
            lane.throttle(self._clock.monotonic())
        elif outcome.hide_for is None:
            lane.succeed()
        try:
            if outcome.hide_for is None:
                await self._queues.delete(delivery.queue, (delivery.receipt,))
            else:
                self._telemetry.hidden()
                await self._queues.change_visibility(
                    delivery.queue, (delivery.receipt,), visibility=outcome.hide_for
                )
        except ConveyorError:
            # The message comes back by itself, and its claim tells that it is done.
            _log.warning("acknowledgement was lost", exc_info=True)

    async def _hand_back(self, delivery: Delivery) -> None:
        await self._queues.change_visibility(delivery.queue, (delivery.receipt,), visibility=0.0)

    def _free(self, lane: Lane, count: int) -> None:
        lane.busy -= count
        if not lane.is_control:
            self._busy -= count

    async def _tidy(self, lane: Lane) -> None:
        """A closed lane gives its idle permits back, and goes with its last message."""
        if not lane.closed:
            return
        await self._policy.shrink(lane, keep=0)
        if lane.busy == 0 and not lane.growing:
            self.lanes.forget(lane)

    # -- parking --

    async def _park(self) -> None:
        event = anyio.Event()
        self._parked.append(event)
        try:
            await event.wait()
        except BaseException:
            if event in self._parked:
                self._parked.remove(event)
            raise

    def _wake_one(self) -> None:
        if self._parked:
            self._parked.popleft().set()

    async def _ring_timers(self) -> None:
        """Wake a slot when a lane's pause is over; the poll that backs up every wake-up."""
        while True:
            self._timer_wake = anyio.Event()
            now = self._clock.monotonic()
            due = [
                moment
                for lane in [self.lanes.control, *self.lanes]
                for moment in (lane.not_before, lane.cool_until)
                if moment > now
            ]
            await wait_at_most(
                self._timer_wake, self._clock, min(due, default=now + IDLE_WAIT) - now
            )
            self._wake_one()
