"""Calls that are lost, late, repeated or overtaken never let holders use more than the limit.

Holders here do what the port asks of them, and no more: they use what they were granted, stop using
what they give back before they say so, and stop using anything a tenth of a lease before it lapses,
on a clock of their own that was read before the call.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from conveyor.ports.permits import LeaseRequest, LedgerState
from tests.conformance.permit_ledgers import JOB, LEASE, LEDGERS, LIMIT, Ledger

pytestmark = pytest.mark.extended

USABLE = LEASE - LEASE / 10
NAMES = st.sampled_from("abc")
CHANGES = st.sampled_from((-LIMIT, -3, -1, 0, 0, 1, 4, LIMIT - 3, LIMIT))
SECONDS = st.sampled_from((0.1, 0.1, 0.5, 3.0, 9.0, 26.5, 29.5))


@dataclass(eq=False, slots=True)
class Call:
    """A call on its way; `asked_at` by the clock of its holder."""

    request: LeaseRequest
    asked_at: float
    answer: LedgerState | None = None


@dataclass(slots=True)
class Holder:
    """A worker's knowledge of its permits. Its clock is `offset` seconds off the ledger's."""

    name: str
    offset: float
    permits: int = 0
    sequence: int = 0
    renewed_at: float = -math.inf
    waiting: Call | None = None

    def usable(self, now: float) -> int:
        """Return the number of permits it uses; forget those that it may not use any more."""
        if now + self.offset >= self.renewed_at + USABLE:
            self.permits = 0
        return self.permits

    def ask(self, change: int, now: float) -> Call:
        """A call for more, as many or fewer, of which the last are not used from here on."""
        before = self.usable(now)
        count = max(0, before + change)
        self.permits = min(before, count)
        self.sequence += 1
        request = LeaseRequest(
            job_id=JOB, holder=self.name, count=count, before=before, sequence=self.sequence
        )
        self.waiting = Call(request, now + self.offset)
        return self.waiting

    def learn(self, call: Call, state: LedgerState, now: float) -> None:
        """Use what was granted, on top of what was not forgotten meanwhile."""
        self.waiting = None
        self.usable(now)
        if state.granted:
            self.renewed_at = call.asked_at
            self.permits += max(0, call.request.count - call.request.before)


class Fleet(RuleBasedStateMachine):
    """Three holders, a ledger, and a network that does what it likes with calls and answers."""

    ledger: ClassVar[Ledger]

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        self.bench = self.ledger.open()
        self.opens_at = -math.inf
        self.emptied = False
        self.network: list[Call] = []
        self.fleet = {
            name: Holder(name, offset) for name, offset in zip("abc", (0.0, 1e6, -1e6), strict=True)
        }

    def teardown(self) -> None:
        self.loop.run(self.bench.aclose())
        self.loop.close()

    @property
    def now(self) -> float:
        """The ledger's clock."""
        return self.bench.clock.monotonic()

    def answered(self) -> list[tuple[Holder, Call, LedgerState]]:
        """Whose answers are on their way."""
        waiting = [(holder, holder.waiting) for holder in self.fleet.values() if holder.waiting]
        return [(holder, call, call.answer) for holder, call in waiting if call.answer]

    def deliver(self, call: Call) -> None:
        """Let the ledger act; its first answer is on its way back."""
        hold = self.bench.permits.acquire_or_renew(call.request, limit=LIMIT, lease=LEASE)

        async def act() -> LedgerState:
            return await hold

        state = self.loop.run(act())
        call.answer = call.answer or state

    @rule(name=NAMES, change=CHANGES)
    def call(self, name: str, change: int) -> None:
        """A call and its answer, without a hitch."""
        holder = self.fleet[name]
        if holder.waiting is None:
            call = holder.ask(change, self.now)
            self.deliver(call)
            assert call.answer is not None
            holder.learn(call, call.answer, self.now)

    @rule(name=NAMES, change=CHANGES, there=SECONDS, back=SECONDS)
    def call_slowly(self, name: str, change: int, there: float, back: float) -> None:
        """A call, and an answer, that take a while each."""
        holder = self.fleet[name]
        if holder.waiting is None:
            call = holder.ask(change, self.now)
            self.pass_time(there)
            self.deliver(call)
            self.the_limit_holds()
            self.pass_time(back)
            assert call.answer is not None
            holder.learn(call, call.answer, self.now)

    @rule(name=NAMES, change=CHANGES)
    def call_out(self, name: str, change: int) -> None:
        """A call while whose way other things happen."""
        holder = self.fleet[name]
        if holder.waiting is None:
            self.network.append(holder.ask(change, self.now))

    @rule(name=NAMES, change=CHANGES, arrives=st.booleans())
    def call_and_give_up(self, name: str, change: int, arrives: bool) -> None:
        """Wait for no answer. The call arrives now or never, or later where late calls are
        known."""
        holder = self.fleet[name]
        if holder.waiting is None:
            call = holder.ask(change, self.now)
            holder.waiting = None
            if arrives:
                self.deliver(call)
            elif self.ledger.sequenced:
                self.network.append(call)

    @precondition(lambda self: self.ledger.sequenced)
    @rule(name=NAMES, first=CHANGES, second=CHANGES)
    def overtake(self, name: str, first: int, second: int) -> None:
        """A call that was given up on arrives after the next one."""
        self.call_and_give_up(name, first, arrives=False)
        self.call(name, second)
        if self.network:
            self.arrive(len(self.network) - 1, again=False)

    @precondition(lambda self: self.network)
    @rule(which=st.integers(0, 20), again=st.booleans())
    def arrive(self, which: int, again: bool) -> None:
        """Some call arrives, in any order; where late calls are known it may come again."""
        call = self.network[which % len(self.network)]
        if not (again and self.ledger.sequenced):
            self.network.remove(call)
        self.deliver(call)

    @precondition(lambda self: self.answered())
    @rule()
    def be_answered(self) -> None:
        """The answers arrive."""
        for holder, call, answer in self.answered():
            holder.learn(call, answer, self.now)

    @rule(name=NAMES)
    def use_one_less(self, name: str) -> None:
        """A holder drops a permit, and says so in its next call."""
        holder = self.fleet[name]
        holder.permits = max(0, holder.usable(self.now) - 1)

    @rule(seconds=SECONDS)
    def pass_time(self, seconds: float) -> None:
        self.loop.run(self.bench.clock.advance(seconds))

    @rule(seconds=st.sampled_from((-30.0, 30.0)))
    def set_the_wall_clock(self, seconds: float) -> None:
        self.bench.clock.shift(seconds)

    @precondition(lambda self: self.ledger.can_reopen_empty)
    @rule()
    def come_back_empty(self) -> None:
        """The ledger loses everything and knows it; calls on their way reach the new one."""
        self.loop.run(self.bench.come_back_empty())
        self.opens_at = self.now + LEASE
        self.emptied = True

    @invariant()
    def the_limit_holds(self) -> None:
        """Check that the workers together use no more than the limit, and that an open ledger
        counts all used permits.

        A ledger that came back empty believes announcements, late ones included, so its own sum may
        be above the limit for a lease: it then grants less, not more.
        """
        used = sum(holder.usable(self.now) for holder in self.fleet.values())
        assert used <= LIMIT
        if self.now >= self.opens_at:
            total = self.loop.run(self.bench.total())
            assert used <= total
            assert total <= LIMIT or self.emptied


@pytest.mark.guarantee("G5")
@pytest.mark.timeout(400)  # a failure is made small before it is shown
@pytest.mark.parametrize("name", LEDGERS)
def test_holders_never_use_more_than_the_limit(name: str) -> None:
    class FleetOverLedger(Fleet):
        ledger = LEDGERS[name]

    run_state_machine_as_test(
        FleetOverLedger,
        settings=settings(
            max_examples=LEDGERS[name].examples,
            stateful_step_count=60,
            suppress_health_check=list(HealthCheck),
        ),
    )
