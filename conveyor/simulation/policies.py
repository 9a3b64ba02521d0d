"""The rules that a simulation compares: permit policies, and rules to pick the next lane.

The permit policies are `reserve` and those that receive first.

A policy that receives first asks for a permit once the message is here, and bounces the message
(hides it again) when the ledger refuses. `off` receives all it can. `local` receives only while
this worker holds fewer permits than the job allows: the gate of the published design with its race,
because pollers pass it before any of them has its permit. `local-exact` counts messages asked for
instead. No worker of production runs these three: they ignore what other workers do.

The picking rules are fewest calls in flight, which workers use, round robin and random.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import anyio

from conveyor.aio.resilience import log_and_continue
from conveyor.domain.backoff import Backoff
from conveyor.engine.lanes import Lane
from conveyor.engine.planner import Eligible, LeastInFlight, PickingRule
from conveyor.engine.policy import LeaseOptions, PermitState, PolicyFactory, Spawn
from conveyor.engine.reserve import ReservePolicy
from conveyor.ports.clock import Clock
from conveyor.ports.permits import LeaseRequest, Permits
from conveyor.ports.queues import Delivery

LEAST_IN_FLIGHT = "least in flight"
ROUND_ROBIN = "round robin"
RANDOM = "random"
PICKINGS = (RANDOM, ROUND_ROBIN, LEAST_IN_FLIGHT)


class RoundRobin:
    """Picks the lane that was picked longest ago, whatever its calls and its weight."""

    def __init__(self) -> None:
        self._turns = 0

    def pick(self, lanes: Iterable[Lane], eligible: Eligible) -> Lane | None:
        """Pick lanes one after the other."""
        best: Lane | None = None
        for lane in lanes:
            if (best is None or lane.turn < best.turn) and eligible(lane):
                best = lane
        if best is not None:
            self._turns += 1
            best.turn = self._turns
        return best


class Random:
    """Picks any of the lanes, all equally likely. `random` returns numbers in [0, 1)."""

    def __init__(self, random: Callable[[], float]) -> None:
        self._random = random

    def pick(self, lanes: Iterable[Lane], eligible: Eligible) -> Lane | None:
        """Draw until an eligible lane comes."""
        left = list(lanes)
        while left:
            place = int(self._random() * len(left))
            lane, left[place] = left[place], left[-1]
            left.pop()
            if eligible(lane):
                return lane
        return None


def picking(name: str, clock: Clock) -> PickingRule:
    """Make a rule for one dispatcher; randomness comes from its process's own clock."""
    if name == RANDOM:
        return Random(clock.random)
    return RoundRobin() if name == ROUND_ROBIN else LeastInFlight()


Gate = Callable[[Lane], int]
"""A function that returns the most messages to ask a lane's queue for, besides the limits of slots
and batches."""

ANY_NUMBER = 1_000_000

_log = logging.getLogger("conveyor.engine")


def no_gate(_lane: Lane) -> int:
    """`off`: receive all there is."""
    return ANY_NUMBER


def local_gate(lane: Lane) -> int:
    """`local`: receive all there is while fewer messages than the limit hold a permit."""
    return ANY_NUMBER if lane.admitted < lane.limit else 0


def exact_local_gate(lane: Lane) -> int:
    """`local-exact`: receive what the limit leaves room for, counting messages asked for."""
    return max(0, lane.limit - lane.busy)


GATES: dict[str, Gate] = {"local-exact": exact_local_gate, "local": local_gate, "off": no_gate}
POLICIES = ("reserve", "reserve-strict", *GATES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounces:
    """The treatment of a message without a permit, by a policy that receives first.

    The policy hides the message for `first` seconds, doubled with each receive up to `longest`, and
    lets the queue rest for `cooldown` seconds.
    """

    first: float = 5.0
    longest: float = 300.0
    cooldown: float = 1.0


BOUNCES = Bounces()


def policy_factory(name: str, bounces: Bounces = BOUNCES) -> PolicyFactory:
    """Return what makes the policy of a name in POLICIES."""
    if name in GATES:
        return partial(ReceiveFirstPolicy, gate=GATES[name], bounces=bounces)
    return partial(ReservePolicy, strict=name == "reserve-strict")


class ReceiveFirstPolicy:
    """Take one permit a message, each under a name of its own."""

    def __init__(
        self,
        permits: Permits,
        clock: Clock,
        options: LeaseOptions,
        *,
        gate: Gate,
        bounces: Bounces,
    ) -> None:
        self._ledger = permits
        self._clock = clock
        self._gate = gate
        self._holder = options.holder
        self._lease = options.lease
        self._heartbeat = options.heartbeat
        self._cooldown = bounces.cooldown
        self._bounce = Backoff(bounces.first, bounces.longest)
        self._held: dict[str, tuple[LeaseRequest, int]] = {}
        self._leaving: set[str] = set()
        self._asked = 0
        self._renewed_at = clock.monotonic()
        self.draining = False

    @property
    def held(self) -> int:
        """Permits in hand, over all jobs."""
        return len(self._held)

    def is_out(self, lane: Lane, now: float) -> bool:
        """Return False: permits of hosts are not taken."""
        return False

    @property
    def ahead(self) -> Collection[Lane]:
        """None: hosts have no limits."""
        return ()

    def may_start(self, lane: Lane, now: float) -> bool:
        """Return False: nothing is buffered, so nothing waits to be started."""
        return False

    def may_receive(self, lane: Lane, now: float) -> int:
        """Return the number of messages that the gate allows."""
        return self._gate(lane)

    def may_buffer(self, lane: Lane, asked: int, now: float) -> int:
        """Nothing: there is no permit that could be waited for."""
        return 0

    def may_acquire(self, lane: Lane, free: int, now: float) -> int:
        """Nothing: permits are asked for message by message."""
        return 0

    async def acquire(self, lane: Lane, count: int) -> None:
        """Nothing is acquired ahead of messages."""

    def take(self, lane: Lane, count: int) -> Sequence[float] | None:
        """Nothing: starts are not booked."""
        return ()

    async def book(self, lane: Lane, count: int) -> Sequence[float]:
        """Nothing: starts are not booked."""
        return ()

    async def may_look(self, lane: Lane) -> bool:
        """No host is closed."""
        return True

    def put_back(self, lane: Lane, starts: Sequence[float]) -> None:
        """Nothing was taken."""

    async def admit(self, lane: Lane, delivery: Delivery) -> str | None:
        """Ask the ledger for this message's permit."""
        self._asked += 1
        request = LeaseRequest(
            job_id=lane.job_id,
            holder=f"{self._holder}/{self._asked}",
            count=1,
            before=0,
            sequence=1,
        )
        state = await self._ledger.acquire_or_renew(request, limit=lane.limit, lease=self._lease)
        if not state.granted:
            return None
        self._held[request.holder] = (request, lane.limit)
        lane.admitted += 1
        return request.holder

    async def discharge(self, lane: Lane, permit: str) -> None:
        """Give the message's permit back."""
        lane.admitted -= 1
        await self._give_back(permit)

    def bounce_for(self, lane: Lane, delivery: Delivery, now: float) -> float:
        """Hide it for longer each time it comes, and let its queue rest."""
        if self._cooldown > 0:
            lane.not_before = max(lane.not_before, now + self._cooldown)
        return self._bounce.delay(delivery.receive_count)

    def next_due(self, lane: Lane, now: float) -> float | None:
        """Nothing is waited for."""
        return None

    def tend(self, now: float, spawn: Spawn) -> list[Lane]:
        """Renew every permit once a heartbeat; nothing is fenced, as in the published design."""
        if now - self._renewed_at >= self._heartbeat:
            self._renewed_at = now
            for permit in list(self._held):
                spawn(partial(self._renew, permit))
        return []

    def state(self, lane: Lane, now: float) -> PermitState:
        """Tell only of the permits: the ledger is asked message by message."""
        return PermitState(lane.admitted)

    def closed_until(self, lanes: Sequence[Lane], now: float) -> float | None:
        """Return None: nothing is known of hosts."""
        return None

    async def leave(self, lane: Lane) -> None:
        """Nothing is held beyond the messages at work."""

    async def release(self) -> None:
        """Give back what was left behind."""
        async with anyio.create_task_group() as group:
            for permit in list(self._held):
                group.start_soon(self._give_back, permit)

    async def _renew(self, permit: str) -> None:
        if permit in self._held and permit not in self._leaving:
            request, limit = self._held[permit]
            renewal = self._next(request, count=1)
            self._held[permit] = (renewal, limit)
            await self._say(renewal, limit)

    async def _give_back(self, permit: str) -> None:
        if permit in self._held:
            request, limit = self._held[permit]
            self._leaving.add(permit)
            try:
                await self._say(self._next(request, count=0), limit)
            finally:
                self._leaving.discard(permit)
            del self._held[permit]

    @staticmethod
    def _next(request: LeaseRequest, *, count: int) -> LeaseRequest:
        return LeaseRequest(
            job_id=request.job_id,
            holder=request.holder,
            count=count,
            before=1,
            sequence=request.sequence + 1,
        )

    async def _say(self, request: LeaseRequest, limit: int) -> None:
        """Report to the ledger. If the report does not reach it, the permit lapses with its
        lease."""
        say = partial(self._ledger.acquire_or_renew, request, limit=limit, lease=self._lease)
        await log_and_continue(_log, f"a permit of job {request.job_id} was not updated", say)
