"""A gateway that keeps the limits of hosts, over whichever gateway makes the calls.

Before a call it takes a permit of its host, and books a start. Where the host is not free, the call
is put off until its place in the host's line comes; one that was put off before waits here instead,
so that no message comes more than twice for its host. A worker books one start of a host at a time,
right before it is used: what is booked and lost is one start.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import anyio
from anyio.abc import TaskGroup
from cachetools import LRUCache

from conveyor.aio.concurrency import unwrap
from conveyor.aio.resilience import log_failure
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.hosts import HostRule, HostRules
from conveyor.gateway.problems import host_limit
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import Gateway, ScrapeRequest, Success
from conveyor.ports.pacing import Pacing
from conveyor.ports.permits import LeaseRequest, Permits, usable_part

HOST_KEY = "host:"
"""Begins the name of a host's permits in the ledger, where those of jobs have their ids."""
PATIENCE = 1.0
"""Most seconds that a call waits here, if it may be put off."""
ASK_AGAIN = 0.25
"""Seconds, spread, between two questions to a ledger that has nothing to give."""
USUAL_SECONDS = 1.0
"""Seconds that a call to a host is taken to last before one has ended."""
MOST_TIMED = 10_000
"""Hosts whose calls are timed."""
_NEWEST = 0.2
"""Weight of the latest call in the mean time of those of its host."""

_log = logging.getLogger("conveyor.hosts")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoliteOptions:
    """The worker's name in the ledger, the length of its leases and the seconds between
    renewals."""

    holder: str
    lease: float
    heartbeat: float


@dataclass(slots=True)
class _Lane:
    """The calls of one worker to a host: `permits` in hand since a grant at `renewed_at`, and calls
    that wait for their turn. `life` counts how often the permits were lost."""

    permits: int = 0
    renewed_at: float = -math.inf
    life: int = 0
    waiting: int = 0
    users: int = 0
    turn: anyio.Lock = field(default_factory=anyio.Lock)
    asking: anyio.Lock = field(default_factory=anyio.Lock)


class PoliteGateway(Gateway):
    """A gateway over another one, by the rules that `rules` returns. It closes the other with
    itself."""

    def __init__(
        self,
        gateway: Gateway,
        permits: Permits,
        pacing: Pacing,
        clock: Clock,
        *,
        rules: Callable[[], HostRules],
        options: PoliteOptions,
    ) -> None:
        self._gateway = gateway
        self._permits = permits
        self._pacing = pacing
        self._clock = clock
        self._rules = rules
        self._options = options
        self._lanes: dict[str, _Lane] = {}
        self._seconds: LRUCache[str, float] = LRUCache(MOST_TIMED)
        # One number for all hosts: the ledger remembers it for longer than a lane may live here.
        self._sequence = 0

    def scrape(self, request: ScrapeRequest) -> AbstractAsyncContextManager[Success]:
        rule = self._rules().rule_of(request.url)
        if rule is None:
            return self._gateway.scrape(request)
        return self._limited(request, rule)

    async def aclose(self) -> None:
        await self._gateway.aclose()

    @asynccontextmanager
    async def _limited(self, request: ScrapeRequest, rule: HostRule) -> AsyncIterator[Success]:
        lane = self._lanes.setdefault(rule.name, _Lane())
        lane.users += 1
        life: int | None = None
        try:
            life = await self._await_turn(lane, rule, has_waited=request.has_waited)
            with self._timed(rule):
                async with self._kept(lane, rule, life), self._gateway.scrape(request) as success:
                    yield success
        finally:
            with anyio.CancelScope(shield=True):
                if life is not None:
                    await self._give_back(lane, rule, life)
            lane.users -= 1
            if not lane.users:
                self._lanes.pop(rule.name, None)

    # -- the turn of a call --

    async def _await_turn(self, lane: _Lane, rule: HostRule, *, has_waited: bool) -> int:
        """Wait until a call may start with a permit of its host in hand; return the life of that.
        Raises Postponed instead of a long wait, if the call may be put off."""
        if lane.waiting and not has_waited:
            raise await self._put_off(rule)
        lane.waiting += 1
        until = math.inf if has_waited else self._clock.monotonic() + PATIENCE
        try:
            async with lane.turn:
                await self._await_permit(lane, rule, until)
                life = lane.life
                try:
                    await self._await_start(lane, rule, until)
                except BaseException:
                    with anyio.CancelScope(shield=True):
                        await self._give_back(lane, rule, life)
                    raise
                return life
        finally:
            lane.waiting -= 1

    async def _await_permit(self, lane: _Lane, rule: HostRule, until: float) -> None:
        while rule.limit and not await self._take(lane, rule):
            await self._ask_again(rule, until)

    async def _await_start(self, lane: _Lane, rule: HostRule, until: float) -> None:
        """Wait for a start that nobody else has, with the permit kept meanwhile."""
        life = lane.life
        while rule.rate:
            async with self._kept(lane, rule, life):
                booking = await self._pacing.book(rule.key, 1 / rule.rate)
                for wait in booking.starts:
                    await self._clock.sleep(wait)
                    return
                await self._ask_again(rule, until)

    async def _ask_again(self, rule: HostRule, until: float) -> None:
        if self._clock.monotonic() >= until:
            raise await self._put_off(rule)
        await self._clock.sleep(ASK_AGAIN * (0.5 + self._clock.random()))

    async def _put_off(self, rule: HostRule) -> Exception:
        """Return the verdict on a call for which there is no room before its place in the line."""
        return host_limit(await self._pacing.line_up(rule.key, self._interval(rule)))

    def _interval(self, rule: HostRule) -> float:
        """Return the seconds between two calls as fast as the limits allow."""
        by_rate = 1 / rule.rate if rule.rate else 0.0
        seconds = self._seconds.get(rule.name, USUAL_SECONDS)
        return max(by_rate, seconds / rule.limit if rule.limit else 0.0)

    @contextmanager
    def _timed(self, rule: HostRule) -> Iterator[None]:
        began = self._clock.monotonic()
        try:
            yield
        finally:
            took, mean = self._clock.monotonic() - began, self._seconds.get(rule.name)
            newest = took if mean is None else mean + _NEWEST * (took - mean)
            self._seconds[rule.name] = newest

    # -- permits --

    async def _take(self, lane: _Lane, rule: HostRule) -> bool:
        """Ask for one more permit of a host."""
        async with lane.asking:
            return await self._hold(lane, rule, lane.permits + 1)

    async def _give_back(self, lane: _Lane, rule: HostRule, life: int) -> None:
        """Give a permit back. If the ledger does not hear of it, it counts one too many until the
        next call or the end of the lease."""
        async with lane.asking:
            if not rule.limit or lane.life != life:
                return
            lane.permits -= 1
            try:
                await self._hold(lane, rule, lane.permits)
            except ConveyorError as error:
                log_failure(_log, "a permit of a host was not given back", error)

    async def _hold(self, lane: _Lane, rule: HostRule, count: int) -> bool:
        """Let this worker have so many permits of a host, if the ledger grants them."""
        began = self._clock.monotonic()
        self._sequence += 1
        request = LeaseRequest(
            job_id=HOST_KEY + rule.name,
            holder=self._options.holder,
            count=count,
            before=lane.permits,
            sequence=self._sequence,
        )
        state = await self._permits.acquire_or_renew(
            request, limit=rule.limit, lease=self._options.lease
        )
        if state.granted:
            lane.permits, lane.renewed_at = count, began
        return state.granted

    @asynccontextmanager
    async def _kept(self, lane: _Lane, rule: HostRule, life: int) -> AsyncIterator[None]:
        """Keep the permits of a host while something is done under one. It is cut off before the
        ledger may give them to others. Raises ConveyorError(unavailable) then."""
        if not rule.limit:
            yield
            return
        with unwrap():
            async with anyio.create_task_group() as group:
                group.start_soon(self._renew, lane, rule)
                group.start_soon(self._fence, lane, life, group)
                yield
                group.cancel_scope.cancel()
        if lane.life != life:
            raise ConveyorError(ErrorCode.UNAVAILABLE, "the permits of a host could not be renewed")

    async def _renew(self, lane: _Lane, rule: HostRule) -> None:
        while True:
            await self._clock.sleep(self._options.heartbeat / 2)
            if self._clock.monotonic() - lane.renewed_at < self._options.heartbeat:
                continue
            async with lane.asking:
                try:
                    await self._hold(lane, rule, lane.permits)
                except ConveyorError as error:
                    log_failure(_log, "the permits of a host were not renewed", error)

    async def _fence(self, lane: _Lane, life: int, group: TaskGroup) -> None:
        """Cut off what is done under permits that the ledger may soon give to others."""
        while lane.life == life:
            left = lane.renewed_at + usable_part(self._options.lease) - self._clock.monotonic()
            if left <= 0:
                lane.life += 1
                lane.permits = 0
            else:
                await self._clock.sleep(left)
        group.cancel_scope.cancel()
