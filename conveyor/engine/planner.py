"""The planner: choose what a free slot does next.

It picks a lane by a rule, sizes the receive, and decides how often an empty queue is asked. It
decides without awaiting, and books whatever a plan asks for as it makes the plan, so that no two
slots count on the same permit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from conveyor.aio.resilience import log_failure
from conveyor.domain.backoff import Backoff
from conveyor.engine.lanes import Lane, Lanes, Owner
from conveyor.engine.policy import Policy
from conveyor.ports.queues import MAX_BATCH, Delivery

Eligible = Callable[[Lane], bool]

_log = logging.getLogger("conveyor.engine")


class PickingRule(Protocol):
    """A rule that chooses among lanes. One object serves one dispatcher."""

    def pick(self, lanes: Iterable[Lane], eligible: Eligible) -> Lane | None:
        """Return an eligible lane, or None."""
        ...


class LeastInFlight:
    """Pick the caller with the fewest messages in hand for its weight, and of its runs again the
    one with the fewest: a caller has one share, however many runs it has, and a run has one,
    however many lanes.

    Among equals, pick the one that was picked longest ago, so that with more callers or runs than
    slots each still gets its turn.
    """

    def __init__(self) -> None:
        self._turns = 0

    def pick(self, lanes: Iterable[Lane], eligible: Eligible) -> Lane | None:
        """Look at every lane, and ask `eligible` only of those that would be chosen, and of those
        of a caller whose runs differ in priority."""
        best: Lane | None = None
        least = (0.0, 0, 0.0, 0, 0)
        mixed: dict[Owner, float] = {}
        for lane in lanes:
            owner, share = lane.owner, lane.share
            weight = owner.weight
            if owner.is_mixed:
                # An idle run of high priority must not lend its weight to another.
                if owner not in mixed:
                    mixed[owner] = owner.weight_of_work(eligible)
                weight = mixed[owner]
            load = (
                owner.busy / weight,
                owner.turn,
                share.busy / lane.weight,
                share.turn,
                lane.turn,
            )
            if best is not None and load > least:
                continue
            if eligible(lane):
                best, least = lane, load
        if best is not None:
            self._turns += 1
            best.turn = best.share.turn = best.owner.turn = self._turns
        return best


@dataclass(frozen=True, slots=True, kw_only=True)
class Polling:
    """Options of polling, the same for every permit policy. All times are in seconds.

    `batch` is the most messages of one receive. A slot with nothing better to do waits on an empty
    queue for `wait`. The first empty receive in a row is followed by `pause`, which doubles up to
    `pause_cap`.
    """

    batch: int = MAX_BATCH
    wait: float = 5.0
    pause: float = 0.02
    pause_cap: float = 5.0

    def pause_after(self, empties: int, jitter: float) -> float:
        """Return the seconds until a queue is asked again after `empties` empty receives. `jitter`,
        in [0, 1), spreads them from half to one and a half."""
        return Backoff(self.pause, self.pause_cap).spread(empties, jitter)


CONTROL_SLOTS = 4
"""Control messages in work at a time. Handlers bound long ones to fewer."""
PROBE_SHARE = 10
"""One slot in ten may wait on empty queues."""
RESERVED_SHARE = 5
"""One slot in five may be kept free for messages of slow hosts whose starts are near."""
MOST_KEPT = 8.0
"""Most seconds for which a slot is kept for a message, less than starts are booked ahead."""
ASK_AGAIN = 1.0
"""Seconds until a lane is looked at again of which nobody knows when it is due."""
HOST_WAIT = 1.0
"""Most seconds that a receive waits on the empty queue of a host."""


@dataclass(frozen=True, slots=True)
class Receive:
    """Ask a queue for `count` messages to start at once, and for `extra` ones for the buffer.

    `empties` is the lane's count at the time of planning; the receive may wait for `wait` seconds.
    `starts` are those of the messages, where the lane is of one host; None if they are to be booked
    first. A `look` is for messages that have neither a slot nor a permit yet.
    """

    lane: Lane
    count: int
    extra: int = 0
    wait: float = 0.0
    empties: int = 0
    starts: Sequence[float] | None = ()
    look: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """Work a message of the buffer, or one whose host has come free, and refill the buffer beside
    the slots."""

    lane: Lane
    delivery: Delivery
    received_at: float
    refill: Receive | None = None


@dataclass(frozen=True, slots=True)
class Acquire:
    """Ask the ledger for `count` more permits."""

    lane: Lane
    count: int


Plan = Receive | Start | Acquire


class Planner:
    """Count what is in hand, and choose the next step of a free slot.

    Messages beyond the permits are asked for as the policy allows, unless the tasks of several
    messages are claimed at once: then only a message with a permit is of use.
    """

    def __init__(
        self,
        lanes: Lanes,
        policy: Policy,
        polling: Polling,
        *,
        slots: int,
        picking: PickingRule,
        claims_at_once: int = 1,
    ) -> None:
        self._lanes = lanes
        self._policy = policy
        self._polling = polling
        self._slots = slots
        self._picking = picking
        self._claims_at_once = claims_at_once
        self._most = max(polling.batch, claims_at_once)
        self._busy = 0
        self._probes = self._looks = self._reserved = 0

    def room(self, ahead: int) -> int:
        """Return how many more messages may be in hand for the slots, if `ahead` may wait."""
        return self._slots + ahead - self._busy

    def plan(
        self, now: float, ahead: int = 0, most: int | None = None, *, starts: bool = True
    ) -> Plan | None:
        """Return what an idle slot should do, or None if there is nothing. A plan for a run is
        about at most `most` messages, and none for the buffer then. Without `starts` nothing is
        begun.

        As many as `ahead` messages may be in hand beyond the slots. Where some may, a receive asks
        for all that one operation claims, unless other lanes wait for their turn.
        """
        control = self._lanes.control
        if control.room > 0 and now >= control.not_before and not control.probing:
            count = min(control.room, self._polling.batch)
            return self._receive(control, count, now, may_wait=True, buffers=False)
        free = self.room(ahead)
        if most is not None:
            free = min(free, most)
        if free <= 0:
            return self._look_ahead(now) if most is None else None

        def eligible(lane: Lane) -> bool:
            return self._is_eligible(lane, free, now, starts=starts)

        lane = self._picking.pick(self._lanes, eligible)
        if lane is None:
            return None
        if starts and self._may_start(lane, now):
            return self._start(lane, now, refills=most is None)
        count = min(free, self._may_receive(lane, now))
        if count > 0:
            alone = not lane.empties or all(
                other.empties or not eligible(other) for other in self._lanes
            )
            if not ahead or any(other is not lane and eligible(other) for other in self._lanes):
                count = min(count, self._polling.batch)
            count = min(count, self._most)
            return self._receive(lane, count, now, may_wait=alone, buffers=most is None)
        return Acquire(lane, self._policy.may_acquire(lane, free, now))

    def plan_ahead(self, now: float, ahead: int) -> Receive | Acquire | None:
        """Return what to ask for so that `ahead` messages may wait for the slots. An error is
        logged: whoever looks ahead has messages of its own in hand."""
        try:
            plan = self.plan(now, ahead, starts=False)
        except Exception as error:
            log_failure(_log, "nothing was planned ahead", error)
            return None
        assert not isinstance(plan, Start)
        return plan

    def _is_eligible(self, lane: Lane, free: int, now: float, *, starts: bool) -> bool:
        if lane.closed or lane.dropped:
            return False
        rests = lane.probing or lane.looking or now < lane.not_before
        if rests and not (starts and (lane.turned or lane.buffer)):
            return False
        if lane.host and not lane.turned and self._policy.is_out(lane, now):
            return False
        if starts and self._may_start(lane, now):
            return True
        if self._may_receive(lane, now) > 0:
            return True
        if rests and not lane.turned:
            return False
        return self._policy.may_acquire(lane, free, now) > 0

    def _may_receive(self, lane: Lane, now: float) -> int:
        """Return how many messages may be asked of a lane, none while it rests."""
        if lane.probing or lane.looking or now < lane.not_before:
            return 0
        if lane.is_looked_at and self._looks >= self._slots:
            return 0
        return self._policy.may_receive(lane, now)

    def _may_start(self, lane: Lane, now: float) -> bool:
        """Tell whether a message that is here may take a slot."""
        return bool(lane.buffer or lane.turned) and self._policy.may_start(lane, now)

    def follow(self, plan: Acquire, now: float, most: int | None = None) -> Receive | None:
        """Return the receive for which permits of a host were asked, if they came."""
        lane = plan.lane
        if not lane.host or lane.closed or lane.dropped:
            return None
        free = self.room(0) if most is None else min(self.room(0), most)
        count = min(free, self._may_receive(lane, now), self._most)
        if count <= 0:
            return None
        return self._receive(lane, count, now, may_wait=False, buffers=False)

    def received(self, plan: Receive, started: int) -> None:
        """End a receive: `started` of the messages it asked for will be started."""
        lane = plan.lane
        if plan.look:
            lane.looking = False
            self._looks -= 1
            return
        self.free(lane, plan.count - started)
        lane.refilling -= plan.extra
        if plan.count:
            lane.probing = False
        if plan.wait and not (lane.is_control or lane.host):
            self._probes -= 1
        if lane.host and started < plan.count:
            try:
                self._policy.put_back(lane, (plan.starts or ())[started:])
            except Exception as error:
                # The messages that came are in hand, and are to stay there.
                log_failure(_log, "starts of a host were lost", error)

    def found(self, lane: Lane, count: int) -> None:
        """Note that a look found messages: they are in hand, with neither a slot nor a permit."""
        lane.kept += count

    def free(self, lane: Lane, count: int) -> None:
        """Note that `count` messages of a lane are no longer in hand."""
        lane.busy -= count
        if not lane.is_control:
            self._busy -= count

    def leave_slot(self, lane: Lane) -> None:
        """Note that the slot of a run's message is free, though the message is still in hand."""
        self._busy -= 1
        lane.unsettled += 1

    def end(self, lane: Lane, *, has_slot: bool) -> None:
        """Note that a message is no longer in hand; `has_slot` unless its slot is free already."""
        if has_slot:
            self.free(lane, 1)
        else:
            lane.busy -= 1
            lane.unsettled -= 1

    def take_slot(self, lane: Lane) -> None:
        """Note that a message in hand, whose slot is free, is to have one again."""
        self._busy += 1
        lane.unsettled -= 1

    def wait(self, lane: Lane) -> None:
        """Note that a message in hand, with all permits, waits for its start without a slot."""
        self._busy -= 1
        lane.waiting += 1

    def wait_no_more(self, lane: Lane) -> None:
        """Note that such a message is to have a slot again, or is given up."""
        self._busy += 1
        lane.waiting -= 1

    def set_aside(self, lane: Lane) -> None:
        """Note that a message in hand waits for its host, with neither a slot nor a permit."""
        self.free(lane, 1)
        lane.kept += 1
        lane.waiting += 1

    def keep(self, lane: Lane) -> None:
        """Note that a message whose slot is free needs no permit either, though it is in hand."""
        lane.busy -= 1
        lane.unsettled -= 1
        lane.kept += 1

    def next_due(self, now: float) -> float | None:
        """Return when the next resting lane may be asked again, if any rests."""
        due: float | None = None
        for lane in self._lanes:
            if lane.closed or lane.dropped:
                continue
            for moment in (lane.not_before, self._due_by_policy(lane, now)):
                if moment is not None and moment > now and (due is None or moment < due):
                    due = moment
        rest = self._lanes.control.not_before
        if rest > now and (due is None or rest < due):
            due = rest
        return due

    def _due_by_policy(self, lane: Lane, now: float) -> float | None:
        try:
            return self._policy.next_due(lane, now)
        except Exception as error:
            log_failure(_log, "a lane could not say when it is due", error)
            return now + ASK_AGAIN

    def _start(self, lane: Lane, now: float, *, refills: bool) -> Start:
        self._book(lane, 1)
        if lane.turned:
            lane.kept -= 1
            return Start(lane, lane.turned.popleft(), now)
        delivery, received_at = lane.buffer.popleft()
        refill = None
        batch = self._polling.batch
        try:
            worth = self._policy.may_buffer(lane, 0, now) if refills else 0
        except BaseException:
            lane.buffer.appendleft((delivery, received_at))
            self.free(lane, 1)
            raise
        if worth >= batch:
            refill = Receive(lane, 0, extra=batch, empties=lane.empties)
            lane.refilling += batch
        return Start(lane, delivery, received_at, refill)

    def _receive(
        self, lane: Lane, count: int, now: float, *, may_wait: bool, buffers: bool
    ) -> Receive:
        """Ask an empty lane for one message, waiting if the slot has nothing better to do; ask any
        other for as many as a receive may bring, with their starts: these would pass while it
        waits."""
        if lane.is_looked_at:
            return self._look(lane, count)
        if not lane.empties:
            extra = 0
            if buffers and self._claims_at_once == 1:
                extra = self._policy.may_buffer(lane, count, now)
            starts = self._policy.take(lane, count)
            lane.refilling += extra
            self._book(lane, count)
            return Receive(lane, count, extra=extra, starts=starts)
        wait = 0.0
        lane.probing = True
        probes = max(1, self._slots // PROBE_SHARE)
        if may_wait and (lane.is_control or self._probes < probes):
            wait = self._polling.wait
        if wait and not lane.is_control:
            self._probes += 1
        self._book(lane, 1)
        return Receive(lane, 1, wait=wait, empties=lane.empties)

    def _look_ahead(self, now: float) -> Receive | None:
        """Look for messages of slow hosts, though all slots are taken: by their starts some will be
        free."""
        for lane in self._policy.ahead:
            if not (lane.closed or lane.dropped or self._policy.is_out(lane, now)):
                count = min(self._may_receive(lane, now), self._most)
                if count > 0:
                    return self._look(lane, count)
        return None

    @property
    def call_seconds(self) -> float:
        """The seconds after which a slot will be free, most likely: a call lasts so long."""
        seconds = max((lane.task_seconds for lane in self._lanes if lane.busy), default=0.0)
        return min(seconds, MOST_KEPT)

    @property
    def reserved(self) -> int:
        """The slots that are kept."""
        return self._reserved

    def reserve(self, lane: Lane) -> bool:
        """Keep the next free slot for a message whose start is near; return whether that may be:
        most slots are for whatever comes."""
        if self._reserved >= self._slots // RESERVED_SHARE:
            return False
        self._reserved += 1
        self._busy += 1
        lane.share.expected += 1
        return True

    def take_reserved(self, lane: Lane, now: float) -> bool:
        """Let a message have the slot that was kept for it, if it has its other permits."""
        self.free_reserved(lane)
        if not self._policy.may_start(lane, now):
            return False
        self._book(lane, 1)
        lane.kept -= 1
        return True

    def free_reserved(self, lane: Lane) -> None:
        """Keep a slot no longer."""
        lane.share.expected -= 1
        self._reserved -= 1
        self._busy -= 1

    def _look(self, lane: Lane, count: int) -> Receive:
        """Look for messages of a host beside the slots; many such looks do not wait, so that each
        lane has its turn."""
        lane.looking = True
        self._looks += 1
        waits = 2 * self._looks <= self._slots
        wait = min(self._polling.wait, HOST_WAIT) if waits else 0.0
        return Receive(lane, count, wait=wait, empties=lane.empties, look=True)

    def _book(self, lane: Lane, count: int) -> None:
        lane.busy += count
        if not lane.is_control:
            self._busy += count
