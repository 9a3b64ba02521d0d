"""The limits of hosts, kept before a message is received where its queue holds one host alone, and
before its task is claimed elsewhere.

A lane of one host is asked for as many messages as the worker has permits of the host, and
*starts*: instants that the pacing booked for it and nobody else. In a lane of many hosts each
message that came knocks at its host. One that finds no room is hidden until its place in the host's
line; when it comes again it waits here, with neither a slot nor a permit of its job.

All moments are monotonic seconds of this worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from typing import Protocol

import anyio
import anyio.lowlevel
from cachetools import LRUCache

from conveyor.aio.concurrency import wait_or_timeout
from conveyor.domain.hosts import HostPolicies, HostRule, HostRules, host_and_port, paces
from conveyor.domain.model import Problem, TaskFailure, WaitReason
from conveyor.engine.host_starts import AHEAD, LATE, HostStarts, RuleState
from conveyor.engine.lanes import Lane
from conveyor.engine.leases import JobLease
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import Postponed
from conveyor.ports.handler import HostTurns
from conveyor.ports.pacing import HORIZON, Pacing
from conveyor.ports.queues import Delivery, TaskMessage

FRESH = 0.05
"""Seconds after which a worker that begins a call looks again whether its host is still open."""
NEAR = 0.1
"""Seconds before its start at which a message gets a slot: its task is claimed meanwhile."""
PATIENCE = 1.0
"""Most seconds that a message waits for its host when it comes for the first time, or in a slot."""
WAITING_OF_HOST = 100
"""Most messages that wait here for one host, or more if a second is enough for them; any other is
hidden until a place in its line."""
HAND_SECONDS, FULL_HAND_SECONDS = 30.0, 5.0
"""Seconds within which those that wait for one host are to begin; fewer in the second half of
what a lane may have waiting, which is for hosts that are faster."""
LEAST_OF_HOST = 3
"""Messages that may wait for any host, but for those in that half."""
TOLERATED = 0.25
"""Seconds, or an interval if that is longer, by which a start may be late if its message was there
in time: the ledger, or this process, took so long."""
ASK_AGAIN = 0.25
"""Seconds, spread, between two questions of a message that waits to a ledger with nothing to
give."""
BOOK_AGAIN = 1.0
"""Seconds, spread, between two questions of a lane to a pacing with nothing to give."""
MOST_WAITING = 500
"""Messages of one lane that wait for their hosts; a lane with so many is not asked."""
MOST_HOSTS = 20_000
MOST_LEARNED = 20_000
"""Tasks whose hosts a worker remembers, because their messages do not name them."""


class HostPaces:
    """The paces of one worker, by the keys of the rules that hold, and by a run's own rule."""

    def __init__(self, pacing: Pacing, policies: HostPolicies, clock: Clock) -> None:
        self.pacing = pacing
        self.policies = policies
        self._clock = clock
        self._paces: LRUCache[tuple[tuple[str, ...], tuple[HostRule, ...]], HostStarts] = LRUCache(
            MOST_HOSTS
        )
        self._states: LRUCache[str, RuleState] = LRUCache(MOST_HOSTS)
        self._by_lane: dict[Lane, HostStarts | None] = {}
        # Lanes whose messages wait in hand for their starts, however busy the slots are.
        self.ahead: dict[Lane, None] = {}
        # Their rules may change before `fill`.
        self._booking: dict[Lane, HostStarts] = {}
        self._matched = policies.current

    def hold(self, lane: Lane) -> bool:
        """Tell whether limits of hosts may hold in a lane of a run."""
        return self.policies.hold(lane.politeness)

    def under(self, lane: Lane, host: str) -> HostStarts | None:
        """Return the pace of a host for the calls of a run; None if nothing limits them."""
        rules = self.policies.rules_of(host, lane.owner.caller, lane.politeness)
        if not rules:
            return None
        steps = paces(rules, host, lane.owner.caller)
        # Jobs of one caller may differ in their own rule, under one key; the server's may change.
        keys = (tuple(steps), rules[1:])
        pace = self._paces.get(keys)
        if pace is None:
            pace = self._paces[keys] = HostStarts(rules)
            pace.steps = steps
        is_changed = pace.rules != rules
        if is_changed:
            pace.change(rules, steps)
        state = self._states.get(rules[0].key)
        if state is None:
            state = self._states[rules[0].key] = pace.state
        pace.state = state
        if is_changed:
            state.full_until = -math.inf
        return pace

    def of(self, lane: Lane) -> HostStarts | None:
        """Return the pace of a lane of one host, as of the last look at the rules."""
        if lane not in self._by_lane:
            self._match(lane)
        return self._by_lane[lane]

    def _match(self, lane: Lane) -> None:
        before = self._by_lane.get(lane)
        pace = self._by_lane[lane] = self.under(lane, lane.host)
        if pace is not None and before is not None and pace is not before:
            # Starts that are on their way for the lane are not of its new keys.
            pace.drop_until(before.last)
        rules = () if pace is None else pace.rules
        shares = any(rule.rate and rule.name != lane.host for rule in rules)
        lane.waits_in_hand = shares or (pace is not None and pace.is_slow)
        if lane.waits_in_hand:
            self.ahead[lane] = None
        else:
            self.ahead.pop(lane, None)

    def forget(self, lane: Lane) -> None:
        """Look after a lane no more."""
        self._by_lane.pop(lane, None)
        self.ahead.pop(lane, None)

    def rematch(self) -> list[Lane]:
        """Look at the rules once again, if they have changed; return the lanes of one host then."""
        current = self.policies.current
        if current is self._matched:
            return []
        lanes = list(self._by_lane)
        for lane in lanes:
            self._match(lane)
        self._matched = current
        return lanes

    def askable(self, lane: Lane, most: int, now: float) -> int:
        """Return how many messages, of `most`, may be asked of a lane now: those for which there
        are starts, or else for which some may be booked."""
        pace = self.of(lane)
        if pace is None:
            return most
        if pace.ceiling:
            most = min(most, pace.ceiling - lane.busy + lane.unsettled)
        return min(most, pace.usable(now) or pace.wanted(most, now))

    def unseen(self, lane: Lane, now: float) -> int:
        """Return how many messages to look for in a lane now: one, or where they wait in hand as
        many as the next starts are enough for, less those that wait."""
        pace = self.of(lane)
        if pace is None:
            return 1
        if now < pace.closed_until or pace.knocking >= WAITING_OF_HOST:
            return 0
        most = 1 + math.ceil(AHEAD / pace.interval) if lane.waits_in_hand else 1
        lacks = most - lane.waiting - len(lane.turned)
        return lacks if 2 * lacks >= most else 0

    async def is_open(self, lane: Lane) -> bool:
        """Tell whether the host of a lane is open; see what it has said if that was never seen."""
        pace = self.of(lane)
        if pace is None:
            return True
        if pace.seen_at == -math.inf:
            known = await self.pacing.state(pace.steps)
            pace.see(known.values(), self._clock.monotonic())
        return self._clock.monotonic() >= pace.closed_until

    def has_starts(self, lane: Lane, now: float) -> bool:
        """Tell whether starts of a lane are in hand that are not over."""
        pace = self.of(lane)
        if pace is None:
            return False
        pace.lapse(now)
        return bool(pace.starts)

    def rules_of(self, lane: Lane) -> tuple[HostRule, ...]:
        """Return the rules that hold for a lane of one host."""
        pace = self.of(lane)
        return () if pace is None else pace.rules

    def is_closed(self, lane: Lane, now: float) -> bool:
        """Tell whether the host of a lane is closed."""
        pace = self.of(lane)
        return pace is not None and now < pace.closed_until

    def take(self, lane: Lane, count: int) -> tuple[float, ...] | None:
        """Take the next starts of a lane out of the hand, for messages that are asked for. None if
        there are none: then `fill` is to follow."""
        pace = self.of(lane)
        if pace is None:
            return ()
        if not pace.starts:
            pace.is_booking = True
            self._booking[lane] = pace
            return None
        return tuple(pace.starts.popleft() for _ in range(min(count, len(pace.starts))))

    def closed_until(self, lane: Lane) -> float:
        """Return when the host of a lane opens."""
        pace = self.of(lane)
        return -math.inf if pace is None else pace.closed_until

    async def fill(self, lane: Lane, count: int) -> list[float]:
        """Book starts for a lane that has none; return those that are near, and keep the others.
        Raises ConveyorError(unavailable)."""
        pace = self._booking.pop(lane, None)
        if pace is None:
            return []
        try:
            starts = await self.book(pace, count)
        finally:
            pace.is_booking = False
        if self.of(lane) is not pace:
            return []
        early = self._clock.monotonic() + AHEAD
        pace.starts.extend(start for start in starts if start > early)
        return [start for start in starts if start <= early]

    async def book(self, pace: HostStarts, count: int) -> list[float]:
        """Book starts of a host under all rules that hold; return their instants, none if the rules
        have changed meanwhile."""
        rules = pace.rules
        first, *others = pace.steps.items()
        booking = await self.pacing.book(*first, count, also=dict(others))
        now = self._clock.monotonic()
        starts = pace.learn(booking, now)
        if not starts:
            pace.ask_at = now + BOOK_AGAIN * (0.5 + self._clock.random())
        step = 1 / pace.rules[0].rate if pace.rules[0].rate else 0.0
        if starts:
            pace.state.full_until = starts[-1] + step - HORIZON
        elif now >= pace.closed_until and pace.interval <= step:
            pace.state.full_until = pace.ask_at
        return starts if pace.rules is rules else []

    def may_ask(self, pace: HostStarts, now: float) -> bool:
        """Tell whether there may be a start for a message of a host, though others may share its
        starts."""
        return bool(pace.starts) or (now >= pace.state.full_until and pace.may_ask(now))

    def put_back(self, lane: Lane, starts: Sequence[float]) -> None:
        """Have starts in hand again for which no message came."""
        pace = self.of(lane)
        if pace is not None:
            pace.starts.extendleft(start for start in reversed(starts) if start > pace.void_until)

    def next_due(self, lane: Lane, now: float) -> float | None:
        """Return when a lane may have starts, if that is later than `now`."""
        pace = self.of(lane)
        return None if pace is None else pace.next_due(now)


class Turn:
    """The turn of one message at its host: its pace and its next start, under the `rules` of the
    pace, as of those of the server that were `seen`; these are others than it began with if it
    `is_refitted`.

    A `guest`, of a queue of many hosts or found by a look, holds permits of `leases` since their
    `lives`; `scope` is what is cancelled when they are lost. Its call began at `began`; its start
    was booked at `booked_at`.
    """

    __slots__ = (
        "began",
        "booked_at",
        "guest",
        "has_come_before",
        "host",
        "is_refitted",
        "lane",
        "leases",
        "line",
        "lives",
        "pace",
        "rules",
        "scope",
        "seen",
        "start",
    )

    def __init__(self, lane: Lane, delivery: Delivery, seen: HostRules, *, guest: bool) -> None:
        message = delivery.message
        assert isinstance(message, TaskMessage)
        self.lane = lane
        self.guest = guest
        self.host = lane.host or message.host
        self.has_come_before = delivery.receive_count > 1
        self.pace: HostStarts | None = None
        self.rules: tuple[HostRule, ...] = ()
        self.seen = seen
        self.is_refitted = False
        self.line = ""
        self.start: float | None = None
        self.booked_at = -math.inf
        self.leases: tuple[JobLease, ...] = ()
        self.lives: tuple[int, ...] = ()
        self.scope: anyio.CancelScope | None = None
        self.began: float | None = None

    def go_by(self, pace: HostStarts | None) -> None:
        """Have a pace, and its rules."""
        self.pace = pace
        self.rules = () if pace is None else pace.rules

    def why(self, now: float) -> WaitReason:
        """Return why its message is put off."""
        is_closed = self.pace is not None and now < self.pace.closed_until
        return WaitReason.HOST_RETRY_AFTER if is_closed else WaitReason.HOST_LIMIT

    @property
    def has_permits(self) -> bool:
        """True if what it holds was not lost."""
        return all(lease.life == life for lease, life in zip(self.leases, self.lives, strict=True))


_IN_SLOT: ContextVar[tuple[str, str, Turn] | None] = ContextVar("conveyor_turn", default=None)
"""The message that is worked here, by run and task: another receipt of the same task has a turn of
its own."""


class HostPermits(Protocol):
    """The permits of hosts of one worker."""

    def guest_leases(self, rules: Sequence[HostRule]) -> tuple[JobLease, ...]:
        """Return the leases of the rules that limit the calls in flight."""
        ...

    def lane_leases(self, lane: Lane) -> tuple[JobLease, ...]:
        """Return the leases of the host of a lane."""
        ...

    def rematch(self) -> None:
        """Bring lanes of one host in line with the rules, if these have changed."""
        ...

    def has_spare(self, lease: JobLease, now: float) -> bool:
        """Tell whether a permit is idle and usable."""
        ...

    def is_kept(self, lease: JobLease, now: float) -> bool:
        """Tell whether there is a usable permit for each message that uses one."""
        ...

    async def knock(self, lease: JobLease) -> None:
        """Ask the ledger for one more permit, unless that is asked for or was just refused."""
        ...

    async def give_back(self, lease: JobLease) -> None:
        """Give an idle permit back, unless somebody here may use it."""
        ...


class MessageTurns(HostTurns):
    """The turns of the messages in hand of one worker."""

    def __init__(self, paces: HostPaces, permits: HostPermits, clock: Clock) -> None:
        self.policies = paces.policies
        self._paces = paces
        self._permits = permits
        self._clock = clock
        self._holding: set[Turn] = set()
        self._coming: set[Turn] = set()
        self._learned: LRUCache[tuple[str, str], str] = LRUCache(MOST_LEARNED)
        # The lines in which runs with a policy are known to have places.
        self._lined: dict[str, set[str]] = {}
        # The seconds that the pacing took for its latest answer.
        self._answer_time = 0.0
        # The rules that were seen last to have changed, and when that was.
        self._newest, self._changed_at = self.policies.current, -math.inf

    # -- messages that have come --

    def turn_of(
        self, lane: Lane, delivery: Delivery, start: float | None, *, looked: bool = False
    ) -> Turn | None:
        """Return the turn of a message that came, with its start if it has one, or that was found
        by a look; None if no limits can hold for it."""
        if not lane.host and not self._paces.hold(lane):
            return None
        self._permits.rematch()
        lines = self._lined.setdefault(lane.run_id, set())
        turn = Turn(lane, delivery, self.policies.current, guest=looked or not lane.host)
        if not turn.host and isinstance(message := delivery.message, TaskMessage):
            # A message of an older version, which may have been here before.
            turn.host = self._learned.get((message.run_id, message.task_id), "")
        if lane.host:
            turn.go_by(self._paces.of(lane))
        elif turn.host:
            turn.go_by(self._paces.under(lane, turn.host))
        if turn.host and turn.pace is None:
            return None
        turn.booked_at = self._clock.monotonic()
        if start is not None and turn.pace is not None and start > turn.pace.void_until:
            turn.start = start
        if turn.has_come_before and turn.pace is not None:
            # It may have had its place from another worker, and so may those behind it.
            lines.add(turn.pace.line)
        return turn

    def turn_now(self, lane: Lane, delivery: Delivery, since: float) -> Turn | None:
        """Return the turn of a message that came at that moment, when nothing bounded it; None if
        nothing does now, either."""
        if self.policies.current is not self._newest:
            self._newest, self._changed_at = self.policies.current, self._clock.monotonic()
        return self.turn_of(lane, delivery, None) if since <= self._changed_at else None

    def may_go_on(self, turn: Turn) -> bool:
        """Tell whether a message need not wait beside the slots: its start is near, or its host is
        not known before its claim."""
        if turn.pace is None:
            return True
        if turn.guest:
            return False
        return turn.start is not None and turn.start - NEAR <= self._clock.monotonic()

    async def enter(self, turn: Turn) -> float | None:
        """Take permits of its host for a message, and a start; return the seconds for which to hide
        it instead, if there is no room for it.

        Raises ConveyorError(unavailable) if the ledger does not answer.
        """
        await self._refit(turn)
        if turn.start is None and not turn.guest:
            return await self._wait_for_start(turn)
        if turn.start is None:
            # Of a queue of one host no other message is asked for meanwhile.
            patient = turn.has_come_before or turn.lane.host
            until = math.inf if patient else self._clock.monotonic() + PATIENCE
            return await self._knock(turn, until)
        return None

    def is_fit(self, turn: Turn) -> bool:
        """Tell whether a turn goes by the rules that hold now."""
        return turn.seen is self.policies.current

    async def _refit(self, turn: Turn) -> HostStarts | None:
        """Bring a turn in line with the rules that hold now, and drop what it has under others.
        Return its pace, None if nothing bounds it any more."""
        if self.is_fit(turn) or not turn.host:
            return turn.pace
        self._permits.rematch()
        turn.seen = self.policies.current
        pace = self._paces.under(turn.lane, turn.host)
        if pace is turn.pace and (pace is None or pace.rules is turn.rules):
            return pace
        start, turn.start = turn.start, None
        await self.release(turn)
        if start is not None and pace is turn.pace and pace is not None:
            if start > pace.void_until and not turn.guest:
                turn.start = start
            elif start > pace.void_until:
                pace.keep(start)
        turn.is_refitted = True
        turn.go_by(pace)
        return pace

    async def be_near(self, turn: Turn, seconds: float = NEAR) -> None:
        """Wait until the start of a message is as near as that."""
        if turn.start is not None:
            await self._sleep_until(turn.start - seconds)

    async def _wait_for_start(self, turn: Turn) -> float | None:
        """Take the next start of a host for a message that has its permits alone."""
        pace = turn.pace
        while pace is not None and self._clock.monotonic() >= pace.closed_until:
            pace.lapse(self._clock.monotonic())
            if pace.starts:
                turn.start = pace.starts.popleft()
                return None
            if await self._take_start(turn, pace):
                return None
            await self._sleep_until(pace.ask_at)
            pace = await self._refit(turn)
        return None if pace is None else await self._place(turn, pace)

    async def _knock(self, turn: Turn, until: float) -> float | None:
        """Take permits and a start of a host, behind those that knocked before."""
        while True:
            pace = await self._refit(turn)
            if pace is None or turn.start is not None:
                return None
            place = await self._stand(turn, pace, until)
            if place is not None or self.is_fit(turn):
                return place

    async def _stand(self, turn: Turn, pace: HostStarts, until: float) -> float | None:
        """Wait at a host for permits and a start, or until the rules change."""
        most = _room_in_hand(turn.lane, pace.spacing) if until == math.inf else 0
        # Those that others gave up are in hand.
        most = max(most, len(pace.starts) if pace.interval else 0)
        if pace.knocking >= most and pace.knocking * pace.spacing > PATIENCE:
            return await self._place(turn, pace)
        leases = self._permits.guest_leases(pace.rules)
        pace.knocking += 1
        for lease in leases:
            lease.knocking += 1
            lease.pressing += not turn.lane.host
        try:
            async with pace.turn:
                return await self._take_turn(turn, pace, leases, until)
        finally:
            pace.knocking -= 1
            for lease in leases:
                lease.knocking -= 1
                lease.pressing -= not turn.lane.host

    async def _take_turn(
        self, turn: Turn, pace: HostStarts, leases: tuple[JobLease, ...], until: float
    ) -> float | None:
        while self.is_fit(turn):
            closed_for = pace.closed_until - self._clock.monotonic()
            if closed_for > 0 and (until < math.inf or closed_for > HORIZON):
                return await self._place(turn, pace)
            is_due = closed_for <= 0 and self._paces.may_ask(pace, self._clock.monotonic())
            if is_due and await self._take_permits(turn, leases):
                if await self._take_start(turn, pace):
                    return None
                await self.release(turn)
            if self._clock.monotonic() >= until:
                return await self._place(turn, pace)
            again = ASK_AGAIN * (0.5 + self._clock.random())
            await wait_or_timeout(pace.state.freed, self._clock, again)
        return None

    async def _take_permits(self, turn: Turn, leases: tuple[JobLease, ...]) -> bool:
        for lease in leases:
            if not self._permits.has_spare(lease, self._clock.monotonic()):
                await self._permits.knock(lease)
        now = self._clock.monotonic()
        if not all(self._permits.has_spare(lease, now) for lease in leases):
            return False
        for lease in leases:
            lease.guests += 1
        turn.leases, turn.lives = leases, tuple(lease.life for lease in leases)
        self._holding.add(turn)
        return True

    async def _take_start(self, turn: Turn, pace: HostStarts) -> bool:
        """Take a start in hand, or book one; return whether there is one. Permits are given back
        after an error."""
        turn.booked_at = self._clock.monotonic()
        turn.start = pace.pop(turn.booked_at)
        if turn.start is not None:
            return True
        try:
            starts = await self._paces.book(pace, self._worth(turn, pace))
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.release(turn)
            raise
        for later in starts[1:]:
            pace.keep(later)
        turn.start = starts[0] if starts else None
        return turn.start is not None

    def _worth(self, turn: Turn, pace: HostStarts) -> int:
        """Return how many starts to book for the messages that wait with this one: they take the
        others out of the hand, those for which there are permits."""
        if not pace.interval:
            return 1
        spare = min((lease.spare for lease in turn.leases), default=pace.knocking)
        return max(1, min(pace.knocking, spare + 1, math.ceil(AHEAD / pace.interval)))

    async def _place(self, turn: Turn, pace: HostStarts) -> float:
        """Take a place in the line of a host; return the seconds until it comes."""
        run, key = turn.lane.run_id, pace.line
        turn.line = key
        self._lined.setdefault(run, set()).add(key)
        place = await self._paces.pacing.line_up(key, pace.spacing, run)
        return max(place, pace.closed_until - self._clock.monotonic())

    async def leave_lines(self, run_id: str) -> None:
        """Let others have the places of a run that is worked no more, or not now: its messages will
        not come. The ledger knows also those of workers that have died. Raises
        ConveyorError(unavailable)."""
        lines = self._lined.pop(run_id, None)
        if lines is not None:
            await self.leave(run_id, lines)
            await self._paces.pacing.leave(run_id)

    def forget_lines(self, run_id: str) -> None:
        """Let the places of a run be: other workers get its messages."""
        self._lined.pop(run_id, None)

    async def leave(self, run_id: str, lines: Collection[str]) -> None:
        """Let others have the places of a run in some lines. Raises ConveyorError(unavailable)."""
        if lines:
            await self._paces.pacing.leave(run_id, sorted(lines))

    def line(self, turn: Turn) -> str:
        """Return the name of the line in which a message would have its place now; "" if nothing
        limits its host any more."""
        pace = self._paces.under(turn.lane, turn.host)
        return "" if pace is None else pace.line

    def spacing(self, turn: Turn) -> float:
        """Return the seconds between two calls of a host as fast as the rules allow now."""
        pace = self._paces.under(turn.lane, turn.host)
        return 0.0 if pace is None else pace.spacing

    async def free(self, turn: Turn) -> None:
        """Let others have the start and the permits of a message that is in hand no more."""
        start, turn.start, pace = turn.start, None, turn.pace
        if start is not None and pace is not None:
            is_good = start > pace.void_until and not pace.is_stale(start, turn.booked_at)
            if is_good:
                pace.keep(start)
                self.wake(turn)
        await self.release(turn)

    async def release(self, turn: Turn) -> None:
        """Give the permits of a message back, if it holds some of its own."""
        if turn not in self._holding:
            return
        self._holding.discard(turn)
        held = [
            lease for lease, life in zip(turn.leases, turn.lives, strict=True) if lease.life == life
        ]
        turn.leases = turn.lives = ()
        for lease in held:
            lease.guests -= 1
        self.wake(turn)
        for lease in held:
            await self._permits.give_back(lease)

    def wake(self, turn: Turn) -> None:
        """Let messages that wait for a permit look again: that of another is free."""
        if turn.pace is not None:
            turn.pace.state.wake()

    # -- messages in slots --

    def join(self, turn: Turn) -> None:
        """Let a message that was found by a look use the permits of its lane, as it takes a slot:
        they are the ones that it has."""
        if not turn.lane.host or not turn.guest:
            return
        turn.guest = False
        if turn in self._holding:
            self._holding.discard(turn)
            for lease, life in zip(turn.leases, turn.lives, strict=True):
                lease.guests -= lease.life == life
            turn.leases = turn.lives = ()

    def begin(self, turn: Turn, delivery: Delivery, scope: anyio.CancelScope) -> None:
        """Note that a message is worked in a slot."""
        message = delivery.message
        assert isinstance(message, TaskMessage)
        turn.scope = scope
        _IN_SLOT.set((message.run_id, message.task_id, turn))

    async def end(self, turn: Turn) -> None:
        """Note that a slot has done with a message: its call, if one was made, has ended."""
        _IN_SLOT.set(None)
        if turn.began is not None and turn.pace is not None:
            turn.pace.served(self._clock.monotonic() - turn.began)
            turn.began = None
        await self.release(turn)
        turn.scope = None

    async def come(self, run_id: str, task_id: str, url: str, asked: float | None = None) -> None:
        turn = _turn_here(run_id, task_id)
        if turn is None:
            return
        if not turn.host:
            turn.host = self._learned[run_id, task_id] = host_and_port(url)
            turn.go_by(self._paces.under(turn.lane, turn.host))
        if turn.pace is not None:
            if asked is not None:
                turn.pace.heed(asked, self._clock.monotonic())
            self._coming.add(turn)
            try:
                if turn.lane.closed:
                    self.halt(turn.lane)
                    await anyio.lowlevel.checkpoint()
                await self._come(turn)
            finally:
                self._coming.discard(turn)
            turn.began = self._clock.monotonic()

    def halt(self, lane: Lane) -> None:
        """Cancel what waits in slots for the host of its call, in a lane of which no call may begin
        any more."""
        for turn in self._coming:
            if turn.lane is lane and turn.scope is not None:
                turn.scope.cancel()

    def is_lowered(self, run_id: str, task_id: str) -> bool:
        turn = _turn_here(run_id, task_id)
        return turn is not None and turn.pace is not None and turn.pace.ceiling > 0

    async def _come(self, turn: Turn) -> None:
        """Wait for the very instant of a start that is neither late nor of a host that was closed
        meanwhile. Raises Postponed if that would take a slot for longer than PATIENCE."""
        until = self._clock.monotonic() + PATIENCE
        while (pace := await self._refit(turn)) is not None:
            await self._hold_permits(turn, pace, until)
            if turn.start is None:
                await self._take_start_here(turn, pace)
            start = turn.start
            if start is None or not self.is_fit(turn):
                continue
            turn.start = None
            if pace.is_stale(start, turn.booked_at):
                raise _postponed(await self._place(turn, pace), WaitReason.HOST_LIMIT)
            now = self._clock.monotonic()
            if start > until:
                pace.keep(start)
                # It comes back to take this start, or another one does.
                raise _postponed(max(start - now - PATIENCE, PATIENCE / 2), WaitReason.HOST_LIMIT)
            if pace.interval and now > start + pace.late:
                continue
            await self._sleep_until(start - LATE - self._answer_time)
            await self._see(turn, pace)
            await self._sleep_until(start)
            now = self._clock.monotonic()
            if now < pace.closed_until:
                raise _postponed(await self._place(turn, pace), WaitReason.HOST_RETRY_AFTER)
            if pace.is_stale(now, turn.booked_at):
                raise _postponed(await self._place(turn, pace), WaitReason.HOST_LIMIT)
            if pace.interval and now > start + max(TOLERATED, pace.interval):
                continue
            if self.is_fit(turn):
                pace.begun = now
                return
            turn.start = start

    async def _hold_permits(self, turn: Turn, pace: HostStarts, until: float) -> None:
        """Return once there are permits for a message, which may have lost its own."""
        if turn.lane.host:
            await self._regain(turn, pace)
            return
        if turn in self._holding and turn.has_permits:
            return
        await self.release(turn)
        if turn.rules is not pace.rules or not self._permits.guest_leases(pace.rules):
            return
        if turn.start is not None:
            pace.keep(turn.start)
            turn.start = None
        # Those that wait beside the slots go first: they may wait for longer than a slot may.
        place = await (self._place(turn, pace) if pace.knocking else self._knock(turn, until))
        if place is not None:
            raise _postponed(max(PATIENCE, place), turn.why(self._clock.monotonic()))

    async def _regain(self, turn: Turn, pace: HostStarts) -> None:
        """Return once a lane of one host has permits for all its messages. Raises Postponed after a
        while: those that wait may be more than the limit allows."""
        leases = self._permits.lane_leases(turn.lane)
        until = self._clock.monotonic() + PATIENCE
        while not all(self._may_begin(turn, lease) for lease in leases):
            if self._clock.monotonic() >= until:
                raise _postponed(await self._place(turn, pace), WaitReason.HOST_LIMIT)
            for lease in leases:
                await self._permits.knock(lease)
            await self._clock.sleep(ASK_AGAIN * (0.5 + self._clock.random()))

    def _may_begin(self, turn: Turn, lease: JobLease) -> bool:
        """Tell whether there are permits for what a lane has in hand; if that was asked for under
        other rules, no more of it than these allow."""
        if turn.is_refitted and lease.busy > lease.most:
            return False
        return self._permits.is_kept(lease, self._clock.monotonic())

    async def _take_start_here(self, turn: Turn, pace: HostStarts) -> None:
        """Book a start for a message in a slot. Raises Postponed if there is none."""
        if not await self._take_start(turn, pace):
            place = await self._place(turn, pace)
            raise _postponed(max(PATIENCE, place), turn.why(self._clock.monotonic()))

    async def _see(self, turn: Turn, pace: HostStarts) -> None:
        """Look whether a host was closed meanwhile, unless that was just seen, and by which keys
        its ceiling is lowered: of a booking only the lowest is known."""
        lane = turn.lane
        leases = self._permits.lane_leases(lane) if lane.host else turn.leases
        heeded = min((lease.ceiling for lease in leases if lease.ceiling), default=0)
        is_heeded = not leases or heeded == pace.ceiling
        if is_heeded and self._clock.monotonic() - pace.seen_at <= FRESH:
            return
        asked_at = self._clock.monotonic()
        known = await self._paces.pacing.state(pace.steps)
        for lease in leases:
            state = known.get(lease.job_id)
            lease.see(state.ceiling if state else 0, self._clock.monotonic())
        pace.see(known.values(), self._clock.monotonic())
        self._answer_time = min(PATIENCE, pace.seen_at - asked_at)

    # -- upkeep --

    def tend(self, count: Callable[[int], None]) -> None:
        """Cancel what uses permits that were lost, and tell how many calls those were."""
        lost = [turn for turn in self._holding if not turn.has_permits]
        count(len(lost))
        for turn in lost:
            if turn.scope is not None:
                turn.scope.cancel()

    async def _sleep_until(self, moment: float) -> None:
        left = moment - self._clock.monotonic()
        if left > 0:
            await self._clock.sleep(left)


def _room_in_hand(lane: Lane, spacing: float) -> int:
    """Return how many messages may wait here for a host: those that may soon begin. A slow host
    never fills the hand."""
    is_half_full = 2 * lane.waiting > MOST_WAITING
    seconds, least = (FULL_HAND_SECONDS, 1) if is_half_full else (HAND_SECONDS, LEAST_OF_HOST)
    most = WAITING_OF_HOST if spacing <= 0 else int(min(seconds / spacing, WAITING_OF_HOST))
    return max(least, most)


def _turn_here(run_id: str, task_id: str) -> Turn | None:
    here = _IN_SLOT.get()
    return here[2] if here is not None and here[:2] == (run_id, task_id) else None


def _postponed(seconds: float, waiting: WaitReason) -> Postponed:
    """Return the verdict on a call whose host has no room for it."""
    failure = TaskFailure.RATE_LIMITED
    problem = Problem(failure.value, "the host has no room within its limits", 429)
    return Postponed(problem, failure, retry_after=seconds, waiting=waiting)
