"""Messages in hand that wait for their hosts, beside the slots."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import zip_longest

import anyio

from conveyor.aio.resilience import log_failure
from conveyor.engine.hosts import MessageTurns, Turn
from conveyor.engine.lanes import Lane
from conveyor.engine.pipeline import InHand
from conveyor.engine.planner import Planner
from conveyor.engine.policy import Spawn
from conveyor.ports.clock import Clock

ASK_PAUSE = 1.0
"""Seconds until a ledger that did not answer is asked again."""

_log = logging.getLogger("conveyor.engine")


class HostWaits:
    """The messages that wait, each in a coroutine of its own.

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

    def let_wait(self, messages: Sequence[InHand], starts: Sequence[float]) -> list[InHand]:
        """Let those of the messages wait that came and whose host is not free; return the others.
        Those of one host have `starts`, unless they were found by a look."""
        left = []
        for message, start in zip_longest(messages, starts[: len(messages)]):
            message.turn = self._turns.turn_of(
                message.lane, message.delivery, start, looked=message.is_kept
            )
            if message.turn is None or self._turns.may_go_on(message.turn):
                left.append(message)
            else:
                self._begin(message, message.turn)
        return left

    def cancel(self, lane: Lane) -> None:
        """Let the messages of a lane wait no more; they are given up."""
        for message, scope in self._scopes.items():
            if message.lane is lane:
                scope.cancel()

    def leave_lines(self, run_id: str) -> None:
        """Let others have the places of a run in the lines of its hosts."""
        self._spawn(partial(self._turns.leave_lines, run_id))

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
                place = await self._turned(turn)
                ended = True
        except BaseException:
            self._end(message)
            await self._give_up([message])
            raise
        self._end(message)
        if ended:
            await self._go_on(message, place)
        else:
            await self._give_up([message])

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

    def _end(self, message: InHand) -> None:
        del self._scopes[message]
        if message.is_kept:
            message.lane.waiting -= 1
        else:
            self._planner.wait_no_more(message.lane)
