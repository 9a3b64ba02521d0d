"""The dispatcher: each free slot decides what to ask of which queue.

A slot makes one gateway call at a time. A free slot picks the caller with the fewest messages in
hand for its weight, and of its lanes the one with the fewest (control first). It then starts a
waiting message, receives some, or asks the ledger for permits, as the permit policy allows. A slot
is free again when its call has ended: beside it the answer is settled, and, where the handler
claims many tasks at once, messages are claimed that the slots will soon need. A worker stops in two
stages: it receives nothing more; after a grace it cancels running work and gives each message back.
What was answered is settled in any case.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import anyio.lowlevel
from anyio.abc import TaskGroup

from conveyor.aio.concurrency import wait_or_timeout
from conveyor.aio.outages import Outages
from conveyor.aio.resilience import HIDING, log_and_continue, log_failure, logging_failure
from conveyor.domain.model import DispatchableRun
from conveyor.engine.delivery import (
    AckBatcher,
    Heartbeat,
    MessageReturner,
    MessagesInHand,
    pause_in_place,
    retry_in_place,
)
from conveyor.engine.host_waits import HostWaits
from conveyor.engine.hosts import MessageTurns
from conveyor.engine.lanes import Lane, Lanes
from conveyor.engine.pipeline import AHEAD_AGE, Finisher, InHand, Pace, Parking
from conveyor.engine.planner import (
    CONTROL_SLOTS,
    Acquire,
    LeastInFlight,
    PickingRule,
    Planner,
    Polling,
    Receive,
    Start,
)
from conveyor.engine.policy import Policy
from conveyor.engine.receiving import MessageReceiver
from conveyor.engine.telemetry import Telemetry
from conveyor.ports.clock import Clock
from conveyor.ports.handler import Handler, Held, Outcome, StagedHandler
from conveyor.ports.queues import Delivery, Queues
from conveyor.ports.workers import FleetPause

ERROR_PAUSE = 1.0
IDLE_WAIT = 60.0
BUFFER_AGE = 10.0
"""Most seconds that a message waits here for a slot, while another worker might work it."""
PERMITS_TOGETHER = 0.1
"""Seconds: the permits of calls that end within so many are given back at one moment, where answers
are gathered anyway."""
CALM = 2.0
"""Seconds without buffering after a queue gave fewer messages than it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchOptions:
    """Options of a dispatcher.

    It makes up to `slots` gateway calls at a time, and a receive hides messages for `visibility`
    seconds. A queue gives a message up after `max_receives`. One `picking` serves one dispatcher.
    Tasks are begun as `outages` lets them pass, and nothing is while there is a `pause`. It looks
    at its lanes by `looks`, by default the clock of its work. Limits of hosts are kept by `turns`.
    """

    slots: int
    visibility: float
    max_receives: int
    polling: Polling
    picking: PickingRule = field(default_factory=LeastInFlight)
    outages: Outages | None = None
    pause: FleetPause = field(default_factory=FleetPause)
    looks: Clock | None = None
    turns: MessageTurns | None = None


Act = Callable[[], Awaitable[None]]

_log = logging.getLogger("conveyor.engine")


class Dispatcher:
    """One worker's loop over its lanes."""

    def __init__(
        self,
        queues: Queues,
        policy: Policy,
        clock: Clock,
        *,
        task_handler: Handler,
        control_handler: Handler,
        telemetry: Telemetry,
        options: DispatchOptions,
    ) -> None:
        self._queues = queues
        self._policy = policy
        self._clock = clock
        self._task_handler = task_handler
        self._control_handler = control_handler
        self._telemetry = telemetry
        self._slots = options.slots
        self._visibility = options.visibility
        self._outages, self._looks = options.outages or Outages(clock), options.looks or clock
        self._turns = options.turns
        self._pause = options.pause
        self._pause.on_change(self._note_pause)
        self._renewals = Heartbeat(tasks=task_handler, control=control_handler)
        self._stages = task_handler if isinstance(task_handler, StagedHandler) else None
        at_once = 1 if self._stages is None else self._stages.claims_at_once
        self._pace = Pace(options.slots, claims_at_once=at_once)
        self._finisher = Finisher(
            self._finish, self._leave_slot, most=options.slots, at_once=at_once
        )
        self.lanes = Lanes(control_limit=CONTROL_SLOTS)
        self.queue_missing: Callable[[str], None] = lambda _run_id: None
        self._planner = self._plan_by(options, at_once)
        returns = MessageReturner(queues, telemetry, max_receives=options.max_receives)
        self._in_hand = self._hold_by(returns)
        self._working, self._free = self._in_hand.working, self._in_hand.free
        self._receiver = MessageReceiver(
            queues, policy, self._planner, clock, telemetry, options.polling, options.visibility
        )
        self._receiver.give_back = self._in_hand.give_back
        self.waits = self._waits_by(options.turns, returns)
        self._acknowledger = AckBatcher(queues, clock)
        self._ready, self._ready_control = deque[InHand](), deque[InHand]()
        self._calling = 0
        self._parking = Parking()
        self._wake_one = self._parking.wake_one
        self._workers: TaskGroup | None = None
        self._finishing: TaskGroup | None = None
        self._timer_wake, self._drained = anyio.Event(), anyio.Event()
        self._stopping = False

    def _plan_by(self, options: DispatchOptions, claims_at_once: int) -> Planner:
        return Planner(
            self.lanes,
            self._policy,
            options.polling,
            slots=options.slots,
            picking=options.picking,
            claims_at_once=claims_at_once,
        )

    def _hold_by(self, returns: MessageReturner) -> MessagesInHand:
        return MessagesInHand(
            returns, self._planner, self._policy, self.lanes, self._stages, self._turns
        )

    def _waits_by(self, turns: MessageTurns | None, returns: MessageReturner) -> HostWaits | None:
        if turns is None:
            return None
        planner, clock, give_up = self._planner, self._clock, self._in_hand.give_up
        waits = HostWaits(turns, planner, clock, self._spawn, give_up, self._go_on)
        waits.show, waits.hastened = returns.show, self.lanes.hasten_row
        waits.working = self._working
        self._in_hand.forgotten = waits.leave_lines
        return waits

    # -- lanes, opened and closed by discovery --

    def open_lane(self, run: DispatchableRun) -> None:
        """Poll the open queue of a run that may have work, at once."""
        self.lanes.open(run)
        if self.waits is not None:
            self.waits.reopen(run.run_id)
        self._wake_one()

    async def close_lane(self, run_id: str, *, goes_on: bool = False) -> None:
        """Receive no more for a run, and give its permits back as its messages end; one that
        `goes_on` elsewhere keeps its places in the lines of hosts."""
        if self.waits is not None:
            self.waits.mark(run_id, goes_on=goes_on)
        lanes = list(self.lanes.close(run_id))
        for lane in lanes:
            self._withdraw(lane)
        for lane in lanes:
            await self._in_hand.empty_buffer(lane)
            await self._in_hand.tidy(lane)
        if self.waits is not None:
            await self.waits.leave_lines(run_id)

    def halt(self, run_id: str) -> None:
        """Receive no more for a run until its lane is opened again, and make no call from the
        claims that wait for a slot. This never waits; `close_lane` is to follow."""
        for lane in self.lanes.close(run_id):
            self._withdraw(lane)

    async def evict_lanes(self, *, empty_for: float) -> None:
        """Close the lanes of runs whose queues have been empty for `empty_for` seconds and hide no
        message."""
        for run_id in self.lanes.empty_since(self._clock.monotonic() - empty_for):
            if not any(self._queues.depth(lane.queue) for lane in self.lanes.of(run_id)):
                await self.close_lane(run_id)

    @property
    def calling(self) -> int:
        """The slots that are in use."""
        return self._calling

    @property
    def unsettled(self) -> int:
        """The answers in hand that are not settled yet. Their calls are paid for."""
        return self._finisher.in_hand

    @property
    def paused_since(self) -> int | None:
        """The instant of an operator's order that nothing new starts; None without one."""
        return self._pause.since

    @property
    def is_stopping(self) -> bool:
        """True from `stop` on."""
        return self._stopping

    @property
    def is_full(self) -> bool:
        """True while no slot can take another message."""
        return self._planner.room(0) <= 0

    @property
    def has_work(self) -> bool:
        """True while a message is in hand."""
        in_hand = self._working or self._ready or self._ready_control
        return bool(in_hand) or any(lane.buffer for lane in self.lanes)

    def next_message(self, visible_at: Callable[[str], float | None]) -> float | None:
        """Return the monotonic instant at which a slot will next find a message, if time alone
        keeps it. `visible_at` tells when a queue has one to give, None for never."""
        now = self._clock.monotonic()
        asked_at = self._next_ask(now)
        moments: list[float] = []
        for lane in (self.lanes.control, *self.lanes):
            at = None if lane.closed or lane.dropped else visible_at(lane.queue)
            if at is not None:
                at = asked_at if at <= now else max(at, lane.not_before)
            if at is not None:
                moments.append(at)
        return min(moments, default=None)

    def depth(self) -> int:
        """Return about how many messages wait in the queues of this worker's lanes."""
        lanes = [self.lanes.control, *self.lanes]
        return sum(self._queues.depth(lane.queue) for lane in lanes)

    # -- running and stopping --

    async def run(self, *, grace: float) -> None:
        """Work until `stop`, then up to `grace` seconds more. Return once everything is given
        back."""
        async with anyio.create_task_group() as acknowledging:
            acknowledging.start_soon(self._acknowledger.run)
            acknowledging.start_soon(self._renewals.run)
            async with anyio.create_task_group() as finishing:
                self._finishing = finishing
                finishing.start_soon(self._finisher.run)
                await self._run_slots(grace)
                self._finisher.stop()
            self._finishing = None
            self._renewals.stop()
            with anyio.CancelScope(shield=True):
                for ready in (self._ready_control, self._ready):
                    while ready:
                        await self._in_hand.give_up([ready.popleft()])
                for lane in self.lanes:
                    await self._in_hand.empty_buffer(lane)
                    await self._in_hand.give_up(self._take_turned(lane))
                await self._policy.release()
            self._acknowledger.stop()

    async def _run_slots(self, grace: float) -> None:
        if self._pause.since is not None:
            self._note_pause()
        async with anyio.create_task_group() as outer:
            outer.start_soon(self._ring_timers)
            try:
                async with anyio.create_task_group() as workers:
                    self._workers = workers
                    outer.start_soon(self._cut_off, workers, grace)
                    for _ in range(self._slots + CONTROL_SLOTS):
                        workers.start_soon(self._slot)
            finally:
                # Answers are settled after this, also where the whole dispatcher is cancelled.
                self._workers = None
            outer.cancel_scope.cancel()

    def stop(self) -> None:
        """Begin to stop: receive nothing more, and give up the claims that wait for a slot."""
        self._stopping = True
        self._policy.draining = True
        if self._stages is not None:
            self._stages.hurry()
            self._finisher.hurry()
        self._drained.set()
        self._timer_wake.set()
        self._let_go()
        self._parking.wake_all()

    def _let_go(self) -> None:
        """Give back what has not begun, and wait for no message."""
        for lane in self.lanes:
            self._withdraw(lane)
            self._spawn(partial(self._in_hand.empty_buffer, lane))
        self._receiver.cancel()

    def _note_pause(self) -> None:
        """Begin nothing more, or go on, as an operator has ordered for the whole fleet."""
        if self._pause.since is None:
            _log.warning("the fleet is resumed: work goes on")
            self._wake_one()
            return
        _log.warning("the fleet is paused by an operator: nothing new starts")
        self._let_go()
        for ready in (self._ready_control, self._ready):
            while ready:
                self._spawn(partial(self._in_hand.give_up, [ready.popleft()]))

    @property
    def _begins_nothing(self) -> bool:
        return self._stopping or self._pause.since is not None

    async def _cut_off(self, workers: TaskGroup, grace: float) -> None:
        await self._drained.wait()
        await self._clock.sleep(grace)
        workers.cancel_scope.cancel()

    # -- upkeep --

    def renew(self) -> None:
        """Begin to extend the visibility of messages in work, once less than half of it is left,
        and what the handlers hold."""
        self._renewals.begin(self._keep_hidden)

    async def _keep_hidden(self) -> None:
        await self._in_hand.keep_hidden(self._clock.monotonic(), self._visibility)

    def tend(self) -> None:
        """Tend permits, buffers and claims that wait. The worker calls this a few times a second;
        it never waits, and an error ends no worker."""
        if self._workers is None:
            return
        now = self._clock.monotonic()
        with logging_failure(_log, "permits, buffers and claims were not tended"):
            for lane in self._policy.tend(now, self._spawn):
                self._fence(lane)
            if self._turns is not None:
                self._turns.tend(self._telemetry.fenced)
            if self.waits is not None:
                self.waits.tend()
            oldest = now - min(BUFFER_AGE, self._visibility / 3)
            for lane in self.lanes:
                if lane.buffer and lane.buffer[0][1] <= oldest:
                    self._spawn(partial(self._in_hand.empty_buffer, lane))
            stale = [one for one in self._ready if one.since <= now - AHEAD_AGE]
            for lane in {one.lane for one in stale if one.held is not None}:
                self._withdraw(lane)

    def _fence(self, lane: Lane) -> None:
        """Cancel the calls of a lane whose permits the ledger may soon give to others."""
        self._telemetry.fenced(len(lane.scopes))
        for scope in list(lane.scopes):
            scope.cancel()
        self._withdraw(lane)
        self._spawn(partial(self._in_hand.empty_buffer, lane))

    def _withdraw(self, lane: Lane) -> None:
        """Give up the claims of a lane that wait for a slot, those that are being made, and the
        messages that wait for their hosts: in slots and for slots, too, where no call may begin any
        more."""
        lane.withdrawals += 1
        is_over = lane.closed or lane.dropped or self._begins_nothing
        if self.waits is not None:
            self.waits.cancel(lane)
        if self._turns is not None and is_over:
            self._turns.halt(lane)
        if lane.turned:
            self._spawn(partial(self._in_hand.give_up, self._take_turned(lane)))
        given_up = [
            one for one in self._ready if one.lane is lane and (is_over or one.held is not None)
        ]
        if given_up:
            self._ready = deque(one for one in self._ready if one not in given_up)
            self._spawn(partial(self._in_hand.give_up, given_up))

    def _take_turned(self, lane: Lane) -> list[InHand]:
        turned, lane.turned = lane.turned, deque()
        return [self._working[delivery.receipt] for delivery in turned]

    def _spawn(self, act: Act) -> None:
        if self._workers is not None:
            self._workers.start_soon(self._beside, act)

    async def _beside(self, act: Act) -> None:
        await log_and_continue(_log, "work beside the slots broke", act)
        self._wake_one()

    # -- slots --

    async def _slot(self) -> None:
        """Work until the worker stops. The slot goes on after the fence cancels its call, and after
        an error."""
        while not self._stopping:
            with anyio.CancelScope() as scope:
                try:
                    await self._serve(scope)
                except Exception as error:
                    log_failure(_log, "a slot broke", error)
                    await self._clock.sleep(ERROR_PAUSE)

    async def _serve(self, scope: anyio.CancelScope) -> None:
        woken = False
        while not self._stopping:
            if self._may_take():
                message = (self._ready_control or self._ready).popleft()
                if not self._parking.woken and self._may_take():
                    self._wake_one()
                await self._work(message, scope)
                if self._ready:
                    continue
            else:
                now = self._clock.monotonic()
                most = self._outages.most_to_ask(now) if self._outages.is_shut else None
                plan = None
                if self._pause.since is None:
                    plan = self._planner.plan(now, self._pace.allowance(now), most)
                if plan is None:
                    await self._parking.park()
                    woken = True
                    continue
                asks = not isinstance(plan, Acquire) and not plan.lane.is_control
                if asks and self._outages.is_shut:
                    self._outages.asked(now)
                    self._timer_wake.set()
                if woken or not isinstance(plan, Start):
                    self._wake_one()
                if not isinstance(plan, Start):
                    if isinstance(plan, Receive) and plan.look:
                        self._spawn(partial(self._ask, plan))
                    else:
                        await self._ask(plan)
                    woken = False
                    continue
                if plan.refill is not None:
                    self._spawn(partial(self._ask, plan.refill))
                await self._work(self._started(plan, now), scope)
            woken = False
            # Let all slots that end in the same turn free themselves before one asks for more: this
            # makes one receive of ten instead of ten receives of one.
            await anyio.lowlevel.checkpoint()

    def _started(self, plan: Start, now: float) -> InHand:
        """Return the message that a plan starts: one of the buffer, or one that waited for its
        host."""
        found = self._working.get(plan.delivery.receipt)
        found = found or InHand(plan.lane, plan.delivery, now, plan.received_at)
        found.is_kept = False
        if found.turn is not None and self._turns is not None:
            self._turns.join(found.turn)
        return found

    def _may_take(self) -> bool:
        """Return whether there is a message that is ready, and a slot for it."""
        if self._pause.since is not None:
            return False
        if self._ready_control:
            return True
        if not self._ready or self._calling >= self._slots:
            return False
        return not self._outages.is_shut or self._outages.may_begin(self._clock.monotonic())

    def _look_ahead(self) -> None:
        """Receive and claim beside the slots what they will soon need, many at a time."""
        if not self._pace.claims_ahead or len(self._ready) > self._pace.low:
            return
        if self._outages.is_shut or self._begins_nothing or self._workers is None:
            return
        ahead = self._pace.allowance(now := self._clock.monotonic())
        if ahead and self._planner.room(ahead) >= self._pace.worth_claiming:
            plan = self._planner.plan_ahead(now, ahead)
            if plan is not None:
                self._spawn(partial(self._ask, plan))

    async def _ask(self, plan: Receive | Acquire) -> None:
        try:
            if isinstance(plan, Acquire):
                await self._policy.acquire(plan.lane, plan.count)
                self._timer_wake.set()
                if plan.lane.host and not self._begins_nothing:
                    await self._follow(plan)
            else:
                await self._receive(plan)
        except Exception as error:
            log_failure(_log, "queue or ledger did not answer", error)
            plan.lane.not_before = self._clock.monotonic() + ERROR_PAUSE
            self._timer_wake.set()

    async def _follow(self, plan: Acquire) -> None:
        """Receive at once that for which permits of a host were asked."""
        now = self._clock.monotonic()
        most = self._outages.most_to_ask(now) if self._outages.is_shut else None
        receive = self._planner.follow(plan, now, most)
        if receive is not None:
            if self._outages.is_shut:
                self._outages.asked(now)
            await self._receive(receive)

    async def _receive(self, plan: Receive) -> None:
        lane = plan.lane
        received = await self._receiver.receive(plan)
        if received is not None and received.deliveries:
            await self._take_in(received.plan, received.deliveries, self._clock.monotonic())
            return
        self._timer_wake.set()
        if received is not None:
            if received.is_missing:
                self.queue_missing(lane.run_id)
            await self._in_hand.tidy(lane)

    async def _take_in(self, plan: Receive, received: list[Delivery], now: float) -> None:
        """Hand the messages that have permits to the slots, and put the rest into the buffer."""
        lane = plan.lane
        lane.found()
        if lane.closed or lane.dropped or self._begins_nothing:
            # The run was paused or ended, or this worker stops or is paused, while the receive was
            # under way.
            if not plan.look:
                self._planner.free(lane, min(len(received), plan.count))
            await self._in_hand.give_back(lane, received)
            await self._in_hand.tidy(lane)
            return
        if plan.look:
            await self._take_aside(lane, received, now)
            return
        if plan.extra and len(received) < plan.count + plan.extra:
            lane.calm_until = now + CALM
        messages = [InHand(lane, delivery, now, now) for delivery in received[: plan.count]]
        beyond = received[plan.count :]
        lane.buffer.extend((delivery, now) for delivery in beyond)
        if self.waits is not None and not lane.is_control:
            for message in messages:
                self._working[message.delivery.receipt] = message
            messages = await self.waits.let_wait(messages, plan.starts or ())
        if self._pace.claims_ahead and not lane.is_control:
            messages = await self._claim(lane, messages)
        (self._ready_control if lane.is_control else self._ready).extend(messages)
        for _ in beyond:
            self._wake_one()
        if lane.is_control:
            # The queue may hold more, and this message may take long: let another slot ask.
            self._wake_one()

    async def _take_aside(self, lane: Lane, found: Sequence[Delivery], now: float) -> None:
        """Let messages that a look has found wait for their host, with neither a slot nor a
        permit."""
        self._planner.found(lane, len(found))
        messages = [InHand(lane, one, now, now, is_kept=True) for one in found]
        for message in messages:
            self._working[message.delivery.receipt] = message
        if self.waits is not None:
            messages = await self.waits.let_wait(messages, ())
        lane.turned.extend(message.delivery for message in messages)

    async def _go_on(self, message: InHand, place: float | None) -> None:
        """Hand a message whose host is free to the slots; hide one that has a place in its line."""
        lane = message.lane
        if lane.closed or lane.dropped or self._begins_nothing:
            await self._in_hand.give_up([message])
        elif place is not None:
            why = message.turn.why(self._clock.monotonic()) if message.turn else None
            self._put_off(lane, Outcome(waiting=why), place)
            await self._in_hand.hide(lane, message.delivery, place)
            await self._free(message)
        elif not message.is_kept:
            self._ready.append(message)
        else:
            lane.turned.append(message.delivery)
            if message.slot_kept:
                self._take_kept(message)

    def _take_kept(self, message: InHand) -> None:
        """Hand a message the slot that is kept for it; without a permit of its job it waits on."""
        lane, message.slot_kept = message.lane, False
        if self._planner.take_reserved(lane, self._clock.monotonic()):
            lane.turned.pop()
            message.is_kept = False
            if message.turn is not None and self._turns is not None:
                self._turns.join(message.turn)
            self._ready.appendleft(message)
            # Another slot looks for the next message of the host.
            self._wake_one()

    async def _claim(self, lane: Lane, messages: list[InHand]) -> list[InHand]:
        """Claim the tasks of messages in one operation; return those that are left to be worked."""
        assert self._stages is not None
        withdrawals = lane.withdrawals
        for message in messages:
            self._working[message.delivery.receipt] = message
        try:
            claims = await self._stages.claim([message.delivery for message in messages])
        except BaseException:
            await self._in_hand.give_up(messages)
            raise
        left = []
        for message, claim in zip(messages, claims, strict=True):
            if isinstance(claim, Outcome):
                message.began = message.since
                await self._end(message, claim)
            else:
                message.held = claim
                left.append(message)
        if lane.closed or lane.dropped or self._begins_nothing or lane.withdrawals > withdrawals:
            await self._in_hand.give_up(left)
            return []
        return left

    async def _work(self, message: InHand, scope: anyio.CancelScope) -> None:
        """Work a message in a slot: all of it, or up to an answer that is left to the finisher."""
        lane, delivery = message.lane, message.delivery
        if not lane.is_control:
            self._calling += 1
            self._look_ahead()
            if self._outages.is_shut:
                self._outages.begun(self._clock.monotonic())
                self._timer_wake.set()
        try:
            if not lane.is_control and not message.permit:
                admitted = await self._policy.admit(lane, delivery)
                if admitted is None:
                    await self._in_hand.undo([message])
                    now = self._clock.monotonic()
                    await self._in_hand.hide(
                        lane, delivery, self._policy.bounce_for(lane, delivery, now)
                    )
                    self._timer_wake.set()
                    return
                message.permit = admitted
            message.began = self._clock.monotonic()
            result = await self._handled(message, scope)
            if isinstance(result, Outcome):
                await self._conclude(message, result)
            else:
                message.held = result
        except Exception as error:
            log_failure(_log, "the ledger did not answer", error)
            lane.not_before = self._clock.monotonic() + ERROR_PAUSE
            self._timer_wake.set()
            await self._in_hand.undo([message])
            await self._in_hand.give_back(lane, [delivery])
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._in_hand.undo([message])
                await self._in_hand.give_back(lane, [delivery])
            raise
        finally:
            if message.held is None:
                if not lane.is_control:
                    self._calling -= 1
                await self._free(message)
        if message.held is not None:
            self._pace.ended(message.began, self._clock.monotonic())
            self._finisher.hand_over(message)

    def _leave_slot(self, message: InHand) -> None:
        """Leave the slot of an answer to others."""
        message.has_slot = False
        self._calling -= 1
        self._planner.leave_slot(message.lane)
        if message.turn is not None and self._turns is not None:
            self._turns.wake(message.turn)

    async def _handled(self, message: InHand, scope: anyio.CancelScope) -> Outcome | Held:
        """Run a handler. One that breaks costs its own message a pause, and never the worker."""
        lane = message.lane
        self._working[message.delivery.receipt] = message
        lane.scopes.add(scope)
        try:
            if self._turns is not None and message.turn is None and not lane.is_control:
                message.turn = self._turns.turn_now(lane, message.delivery, message.since)
            if message.turn is not None and self._turns is not None:
                self._turns.begin(message.turn, message.delivery, scope)
            # Nearly always the first try is the last one: nothing is prepared for another.
            if not message.tries:
                try:
                    return await self._try(message)
                except Exception as error:
                    failure = error
                return await self._retried(message, failure)
            return await self._retried(message, None)
        finally:
            lane.scopes.discard(scope)
            if message.turn is not None and self._turns is not None:
                with anyio.CancelScope(shield=True):
                    await self._turns.end(message.turn)

    async def _retried(self, message: InHand, failure: Exception | None) -> Outcome | Held:
        """Run a handler again, after its failure or after that of a settlement."""
        lane = message.lane
        return await retry_in_place(
            partial(self._try, message),
            self._clock,
            receives=message.delivery.receive_count,
            keeps=lambda: not (lane.is_control or self._begins_nothing),
            away=partial(self._rest, lane),
            tries=message.tries,
            failure=failure,
        )

    def _try(self, message: InHand) -> Awaitable[Outcome | Held]:
        lane, delivery = message.lane, message.delivery
        throttled = partial(self._throttle, lane)
        if lane.is_control:
            return self._control_handler.handle(delivery, throttled)
        if self._stages is None:
            return self._task_handler.handle(delivery, throttled)
        held, message.held = message.held, None
        return self._stages.begin(delivery, throttled, held)

    def _throttle(self, lane: Lane) -> None:
        lane.throttle(self._clock.monotonic())

    def _rest(self, lane: Lane) -> None:
        lane.rest_until(self._clock.monotonic() + ERROR_PAUSE)

    # -- beside the slots --

    async def _finish(self, messages: list[InHand]) -> None:
        """Settle what was answered, and conclude each message."""
        assert self._stages is not None
        if self._stages.gathers:
            await self._keep(messages)
        results: Sequence[Outcome | Exception]
        try:
            held = [one.held for one in messages if one.held is not None]
            results = await self._stages.settle(held)
        except Exception as error:
            results = [error] * len(messages)
        for message, result in zip(messages, results, strict=True):
            message.held = None
            if isinstance(result, Exception):
                if self._tries_again(message, result):
                    continue
                result = Outcome(hide_for=HIDING.delay(message.delivery.receive_count))
            await self._end(message, result)
        # Their permits are back: claim under them before the slots run dry.
        self._look_ahead()
        self._wake_one()

    async def _end(self, message: InHand, outcome: Outcome) -> None:
        """Conclude a message, and have it in hand no longer."""
        try:
            with logging_failure(_log, "an answer could not be dealt with"):
                await self._conclude(message, outcome)
        finally:
            await self._free(message)

    async def _keep(self, messages: Sequence[InHand]) -> None:
        """Give the permits of messages back whose calls have just ended, and keep the messages.
        Permits come back together, so that one receive asks for many messages."""
        if not self._stopping:
            now = self._clock.monotonic()
            await self._clock.sleep(PERMITS_TOGETHER - now % PERMITS_TOGETHER)
        for message in messages:
            permit, message.permit = message.permit, ""
            message.is_kept = True
            self._planner.keep(message.lane)
            discharge = partial(self._policy.discharge, message.lane, permit)
            await log_and_continue(_log, "a permit was not given back", discharge)
            self._wake_one()

    def _tries_again(self, message: InHand, error: Exception) -> bool:
        """Begin to wait until a message is worked once more, with its permit in hand; return False
        if it is to be hidden, as one is that has no permit any more."""
        message.tries += 1
        pause = pause_in_place(
            error,
            message.tries,
            keeps=lambda: not (message.is_kept or self._begins_nothing),
            away=partial(self._rest, message.lane),
        )
        if pause is None or self._workers is None:
            return False
        self._workers.start_soon(self._try_later, message, pause)
        return True

    async def _try_later(self, message: InHand, pause: float) -> None:
        try:
            await self._clock.sleep(pause)
        except BaseException:
            await self._in_hand.give_up([message])
            raise
        if self._pause.since is not None:
            await self._in_hand.give_up([message])
            return
        message.since = self._clock.monotonic()
        message.has_slot = True
        self._planner.take_slot(message.lane)
        self._ready.append(message)
        self._wake_one()

    async def _conclude(self, message: InHand, outcome: Outcome) -> None:
        lane, delivery = message.lane, message.delivery
        if outcome.hide_for is not None:
            self._put_off(lane, outcome, outcome.hide_for)
            await self._in_hand.hide(lane, delivery, outcome.hide_for)
            return
        self._working.pop(delivery.receipt, None)
        lane.succeed()
        lane.took(self._clock.monotonic() - message.began)
        if lane.dropped:
            # The message goes with its queue.
            return
        if outcome.drop_queue is None:
            await self._acknowledger.add(delivery.queue, delivery.receipt)
            return
        others = [one for one in self.lanes.of(lane.run_id) if one is not lane]
        for one in (lane, *others):
            one.dropped = True
            self._withdraw(one)
        if self._finishing is not None:
            queues = [one.queue for one in others]
            drop = partial(self._drop, delivery, queues, outcome.drop_queue)
            self._finishing.start_soon(self._beside, drop)

    def _put_off(self, lane: Lane, outcome: Outcome, seconds: float) -> None:
        """Remember a row that is left until later, and why, for the report of this worker."""
        if lane.is_control or not (outcome.waiting or outcome.is_claimed):
            return
        now = self._clock.monotonic()
        self.lanes.put_off_row(lane.run_id, now, now + seconds, outcome.waiting)

    async def _drop(self, last: Delivery, others: Sequence[str], drop: Act) -> None:
        """Acknowledge the last message of a run and those in its other queues, then drop them all:
        not the other way round, which would ask for a queue that is gone."""
        await self._acknowledger.finish(last.queue, last.receipt, others)
        await log_and_continue(_log, "the queue of an ended run was not dropped", drop)

    # -- timers --

    async def _ring_timers(self) -> None:
        """Wake a slot when a lane's pause ends, and at least every IDLE_WAIT, in case a wake-up was
        lost."""
        while True:
            self._timer_wake = anyio.Event()
            now = self._clock.monotonic()
            due = self._next_ask(now)
            until = now + IDLE_WAIT if due is None else due
            await wait_or_timeout(self._timer_wake, self._looks, until - now)
            self._wake_one()

    def _next_ask(self, now: float) -> float | None:
        """Return when the next pause of a lane or an outage ends, if any is under way."""
        due, trial = self._planner.next_due(now), self._outages.next_trial(now)
        return trial if due is None or (trial is not None and trial < due) else due
