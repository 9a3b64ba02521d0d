"""Messages in hand that wait for their hosts, beside the slots."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

import anyio
from cachetools import LRUCache

from conveyor.aio.resilience import log_and_continue, log_failure
from conveyor.engine.hosts import NEAR, MessageTurns, Turn
from conveyor.engine.lanes import Lane
from conveyor.engine.pipeline import InHand
from conveyor.engine.planner import Planner
from conveyor.engine.policy import Spawn
from conveyor.ports.clock import Clock
from conveyor.ports.queues import Delivery

KEEP_AGAIN = 0.25
"""Most seconds after which a worker looks again whether a slot is to be kept."""
SPREADS = 2.0
"""Mean differences from the mean time of a call by which most calls end later at most."""
MOST_HIDDEN = 5_000
"""Hidden messages whose receipts a worker keeps, to let them come sooner."""
ASK_PAUSE = 1.0
"""Seconds until a ledger that did not answer is asked again."""

_log = logging.getLogger("conveyor.engine")


@dataclass(frozen=True, slots=True)
class _Hidden:
    """A message that is hidden until its place in the line of its host comes at `due`, where calls
    were `spacing` seconds apart then. One of a run that was paused since `has_left` the line."""

    delivery: Delivery
    turn: Turn
    due: float
    spacing: float
    has_left: bool = False


async def _show_none(_deliveries: Sequence[Delivery], _seconds: float) -> None:
    """Leave messages hidden."""


class HostWaits:
    """The messages that wait, each in a coroutine of its own; and those that were hidden until a
    place in a line, which come sooner once the rules let their host be called more often: `show`
    has messages come after so many seconds, and `hastened` is told of each. `working` are those in
    work.

    `go_on` takes one whose host is free, or that has a place in its line, in seconds; `give_up`
    those whose wait was cancelled.
    """

    def __init__(
        self,
        turns: MessageTurns,
        planner: Planner,
        clock: Clock,
        spawn: Spawn,
        give_up: Callable[[Sequence[InHand]], Awaitable[None]],
        go_on: Callable[[InHand, float | None], Awaitable[None]],
    ) -> None:
        self._turns = turns
        self._planner = planner
        self._clock = clock
        self._spawn = spawn
        self._give_up = give_up
        self._go_on = go_on
        self._scopes: dict[InHand, anyio.CancelScope] = {}
        self._hidden: LRUCache[str, _Hidden] = LRUCache(MOST_HIDDEN)
        self._elsewhere = set[str]()
        self._rules = turns.policies.current
        self._is_hastening = False
        self.working: Mapping[str, InHand] = {}
        self.show: Callable[[Sequence[Delivery], float], Awaitable[None]] = _show_none
        self.hastened: Callable[[str, float, float, float], None] = lambda *_moments: None

    async def let_wait(self, messages: list[InHand], starts: Sequence[float]) -> list[InHand]:
        """Let those of the messages wait that came in one lane and whose host is not free; return
        the others. Those of one host have `starts`, unless they were found by a look. After an
        error those that do not wait are given up."""
        if not messages:
            return messages
        left: list[InHand] = []
        try:
            lane = messages[0].lane
            if not lane.host and not self._turns.policies.hold(lane.politeness):
                return messages
            for message, start in zip_longest(messages, starts[: len(messages)]):
                message.turn = self._turns.turn_of(
                    message.lane, message.delivery, start, looked=message.is_kept
                )
                if message.turn is None or self._turns.may_go_on(message.turn):
                    left.append(message)
                else:
                    self._begin(message, message.turn)
        except Exception:
            await self._give_up([one for one in messages if one not in self._scopes])
            raise
        return left

    def cancel(self, lane: Lane) -> None:
        """Let the messages of a lane wait no more; they are given up."""
        for message, scope in self._scopes.items():
            if message.lane is lane:
                scope.cancel()

    def mark(self, run_id: str, *, goes_on: bool) -> None:
        """Note whether a run that is worked here no more goes on elsewhere."""
        (self._elsewhere.add if goes_on else self._elsewhere.discard)(run_id)

    async def leave_lines(self, run_id: str) -> None:
        """Let others have the places of a run in the lines of its hosts, unless it goes on
        elsewhere."""
        if run_id in self._elsewhere:
            self._turns.forget_lines(run_id)
            return
        leave = partial(self._turns.leave_lines, run_id)
        await log_and_continue(_log, "places in lines of hosts were not given up", leave)
        await self._close_up(run_id)

    async def _close_up(self, run_id: str) -> None:
        """Bring those forward that stand behind messages of a run in a line: by as much of their
        time as is of these, as far as this worker has hidden them."""
        now = self._clock.monotonic()
        ahead, left = Counter[str](), Counter[str]()
        sooner: dict[str, _Hidden] = {}
        for receipt, one in sorted(self._hidden.items(), key=lambda item: item[1].due):
            if one.due <= now or one.has_left:
                continue
            line, run = one.turn.line, one.turn.lane.run_id
            ahead[line] += 1
            if run == run_id:
                self._hidden[receipt] = replace(one, has_left=True)
                continue
            left[line] += 1
            if left[line] < ahead[line]:
                seconds = int((one.due - now) * left[line] / ahead[line])
                sooner[receipt] = replace(one, due=now + seconds)
        await self._bring_forward(sooner, now)

    def reopen(self, run_id: str) -> None:
        """Let the hidden messages of a run that was paused come again, as if nobody else were in
        the lines that they have left. This never waits."""
        self._elsewhere.discard(run_id)
        if any(one.has_left and one.turn.lane.run_id == run_id for one in self._hidden.values()):
            self._spawn(partial(self._line_up_again, run_id))

    async def _line_up_again(self, run_id: str) -> None:
        now = self._clock.monotonic()
        before = Counter[str]()
        sooner: dict[str, _Hidden] = {}
        for receipt, one in sorted(self._hidden.items(), key=lambda item: item[1].due):
            if one.due <= now or not one.has_left or one.turn.lane.run_id != run_id:
                continue
            spacing, line = self._turns.spacing(one.turn), one.turn.line
            due = min(one.due, now + int(before[line] * spacing))
            before[line] += 1
            again = replace(one, due=due, spacing=spacing, has_left=False)
            if due < one.due:
                sooner[receipt] = again
            else:
                self._hidden[receipt] = again
        await self._bring_forward(sooner, now)

    def tend(self) -> None:
        """Let hidden messages come sooner, if the rules have changed. This never waits."""
        current = self._turns.policies.current
        if current is not self._rules and not self._is_hastening:
            self._rules, self._is_hastening = current, True
            self._spawn(self._hasten)

    async def _hasten(self) -> None:
        """Bring the places of messages forward as much as their hosts have become faster; those in
        a line that is not theirs any more as if nobody else stood in the new one."""
        try:
            now = self._clock.monotonic()
            before = Counter[str]()
            sooner: dict[str, _Hidden] = {}
            left: dict[str, set[str]] = {}
            for receipt, one in sorted(self._hidden.items(), key=lambda item: item[1].due):
                left_for, due = one.due - now, one.due
                spacing, line = self._turns.spacing(one.turn), self._turns.line(one.turn)
                if left_for <= 0:
                    del self._hidden[receipt]
                    continue
                if line != one.turn.line:
                    due = min(due, now + int(before[line] * spacing))
                    before[line] += 1
                elif spacing < one.spacing and not one.has_left:
                    due = now + int(left_for * spacing / one.spacing)
                if due < one.due and not one.has_left:
                    left.setdefault(one.turn.lane.run_id, set()).add(one.turn.line)
                    sooner[receipt] = replace(one, due=due, spacing=spacing)
                    one.turn.line = line
            await self._bring_forward(sooner, now)
            for run_id, lines in left.items():
                await self._turns.leave(run_id, lines)
        finally:
            self._is_hastening = False

    async def _bring_forward(self, sooner: Mapping[str, _Hidden], now: float) -> None:
        """Have hidden messages come when their places, by receipt, are now."""
        by_due: dict[float, list[Delivery]] = {}
        for receipt, one in sooner.items():
            self.hastened(one.turn.lane.run_id, now, self._hidden[receipt].due, one.due)
            self._hidden[receipt] = one
            by_due.setdefault(one.due, []).append(one.delivery)
        for due in sorted(by_due):
            await self.show(by_due[due], max(0.0, due - self._clock.monotonic()))

    def closed_until(self, lane: Lane, now: float) -> list[float] | None:
        """Return when the hosts open of the messages in hand of a lane; None if some of these do
        not wait for a closed host."""
        is_waiting = lane.busy == (1 if lane.probing else 0) and lane.kept == lane.waiting
        if not is_waiting or lane.buffer or lane.refilling:
            return None
        turns = [message.turn for message in self._scopes if message.lane is lane]
        paces = [turn.pace for turn in turns if turn is not None and turn.pace is not None]
        opens = [pace.closed_until for pace in paces if now < pace.closed_until]
        return opens if len(opens) == lane.waiting else None

    def _begin(self, message: InHand, turn: Turn) -> None:
        if message.is_kept:
            message.lane.waiting += 1
        elif message.lane.host:
            self._planner.wait(message.lane)
        else:
            message.is_kept = True
            self._planner.set_aside(message.lane)
        turn.scope = self._scopes[message] = anyio.CancelScope()
        self._spawn(partial(self._wait, message, turn))

    async def _wait(self, message: InHand, turn: Turn) -> None:
        place, ended = None, False
        try:
            with self._scopes[message]:
                while place is None:
                    place = await self._turned(turn)
                    if place is None:
                        await self._near(message, turn)
                        if self._turns.is_fit(turn):
                            break
                        if message.slot_kept:
                            # Under other rules its start may be far away.
                            message.slot_kept = False
                            self._planner.free_reserved(message.lane)
                ended = True
        except BaseException:
            self._end(message)
            await self._give_up([message])
            raise
        self._end(message)
        if not ended:
            await self._give_up([message])
            return
        try:
            if place is not None:
                due, spacing = self._clock.monotonic() + place, self._turns.spacing(turn)
                self._hidden[message.delivery.receipt] = _Hidden(
                    message.delivery, turn, due, spacing
                )
            await self._go_on(message, place)
        except BaseException:
            await self._give_up([message])
            raise

    async def _turned(self, turn: Turn) -> float | None:
        """Wait for the turn of a message. While the ledger is away it stays in hand: given back, it
        would come again at once."""
        failed = False
        while True:
            try:
                return await self._turns.enter(turn)
            except Exception as error:
                if not failed:
                    log_failure(_log, "the ledger did not answer", error)
                failed = True
                turn.lane.rest_until(self._clock.monotonic() + ASK_PAUSE)
                await self._clock.sleep(ASK_PAUSE)

    async def _near(self, message: InHand, turn: Turn) -> None:
        """Wait until the start of a message is near. That of a slow host has the next free slot
        kept for it: with all of them taken its start would pass."""
        is_slow = message.is_kept and turn.pace is not None and turn.pace.is_slow
        seconds = self._planner.call_seconds if is_slow else NEAR
        step = min(KEEP_AGAIN, seconds / 10)
        while seconds > NEAR and not message.slot_kept:
            await self._turns.be_near(turn, seconds)
            if not self._frees_another(turn, step):
                message.slot_kept = self._planner.reserve(message.lane)
            seconds -= step
        await self._turns.be_near(turn)

    def _frees_another(self, turn: Turn, step: float) -> bool:
        """Tell whether a call that will end later than in a moment will most likely have ended when
        a message needs its slot: the next free slot need not be kept for it yet."""
        now = self._clock.monotonic()
        if turn.start is None:
            return False
        free = 0
        for message in self.working.values():
            lane = message.lane
            ends = message.began + lane.task_seconds
            if message.has_slot and ends - now > step:
                free += ends + SPREADS * lane.task_spread < turn.start - NEAR
        return free > self._planner.reserved

    def _end(self, message: InHand) -> None:
        del self._scopes[message]
        if message.is_kept:
            message.lane.waiting -= 1
        else:
            self._planner.wait_no_more(message.lane)
