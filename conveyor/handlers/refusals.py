"""Hosts that refuse calls, where a policy holds: they are closed for the whole fleet, or their
ceiling on calls in flight is lowered, and grows again with each success."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from cachetools import LRUCache

from conveyor.aio.resilience import log_failure
from conveyor.domain.backoff import Backoff
from conveyor.domain.errors import ConveyorError
from conveyor.domain.hosts import HostPolicies, HostRule, host_and_port, host_key, paces
from conveyor.domain.model import Job, Problem, TaskFailure, WaitReason
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import (
    HostDelay,
    HostRefusal,
    Postponed,
    Robots,
    ScrapeFailed,
    ScrapeRequest,
)
from conveyor.ports.pacing import HostState, Pacing

SPREAD = 1.0
"""Seconds over which the first calls after the end of a pause are spread."""
TELL_EVERY = 600.0
"""Seconds after which a delay is told again, in case the ledger has lost it."""
MOST_TOLD = 10_000

_log = logging.getLogger("conveyor.hosts")


class HostAnswers:
    """Heeds what hosts say to the calls of runs that have a policy. Without `robots` nobody reads
    robots.txt, and tasks that want it heeded fail."""

    def __init__(
        self,
        policies: HostPolicies,
        pacing: Pacing,
        clock: Clock,
        *,
        backoff: Backoff,
        robots: Robots | None = None,
    ) -> None:
        self._policies = policies
        self._pacing = pacing
        self._clock = clock
        self._backoff = backoff
        self._robots = robots
        self._told: LRUCache[str, tuple[float, float]] = LRUCache(MOST_TOLD)

    async def admit(self, job: Job, request: ScrapeRequest) -> float:
        """Return the seconds between calls that robots.txt asks for. Raises ScrapeFailed for a
        request that it does not allow, or not now."""
        if self._robots is None:
            raise _robots_unread()
        delay = await self._robots.admit(request)
        return 0.0 if delay is None else await self._paced(job, delay)

    def guard(self, job: Job, url: str) -> Callable[[str], Awaitable[None]] | None:
        """Return the guard of the redirects from a URL: it raises Postponed for one that leads to a
        closed host. None where no policy can hold."""
        if not self._policies.hold(job.politeness):
            return None
        return partial(self._stay_away, job, url)

    async def _stay_away(self, job: Job, url: str, location: str) -> None:
        host = host_and_port(location)
        rules = self._policies.rules_of(host, job.caller, job.politeness)
        if not rules or host == host_and_port(url):
            return
        states = await self._pacing.state(paces(rules, host, job.caller))
        closed_for = max((state.closed_for for state in states.values()), default=0.0)
        if closed_for > 0:
            failure = TaskFailure.RATE_LIMITED
            raise Postponed(
                Problem(failure.value, "a redirect leads to a host that is closed", 429),
                failure,
                retry_after=closed_for + SPREAD * self._clock.random(),
                waiting=WaitReason.HOST_RETRY_AFTER,
            )

    async def heed(self, job: Job, failure: ScrapeFailed, *, began: float) -> None:
        """Take in what the host of a failed call has said; where a policy holds, its refusal uses
        up no attempt. `began`: the monotonic second of the call."""
        if isinstance(failure, Postponed) and failure.delay is not None:
            await self._paced(job, failure.delay)
        if failure.refusal is None:
            return
        pause = await self.refused(job, failure.refusal, began)
        if pause is not None:
            failure.burns_attempt = False
            failure.retry_after = max(failure.retry_after, pause + SPREAD * self._clock.random())

    async def refused(self, job: Job, refusal: HostRefusal, began: float) -> float | None:
        """Close a host that refused a call, or lower its ceiling under the strictest rule if it did
        not say for how long; one without a limit, or with the lowest ceiling, is closed for a
        backoff. Return the seconds for which it is closed, None where no policy holds."""
        rules = self._policies.rules_of(refusal.host, job.caller, job.politeness)
        if not rules:
            return None
        key = host_key(refusal.host, job.caller) if refusal.is_private else rules[0].key
        limits = [rule for rule in rules if rule.limit and (not refusal.is_private or rule.caller)]
        seconds = max(refusal.seconds or 0.0, self._backoff.spread(1, self._clock.random()))
        try:
            if refusal.seconds is None and limits:
                strictest = await self._strictest(limits)
                key, age = strictest.key, self._clock.monotonic() - began
                if strictest.limit > 1 and await self._pacing.lower(key, strictest.limit, age) > 1:
                    return 0.0
            # Its own key holds whatever the host is counted together with later.
            own = host_key(refusal.host) if key == rules[0].key else key
            for name in dict.fromkeys((key, own)):
                await self._pacing.close(name, seconds)
        except ConveyorError as error:
            log_failure(_log, "the fleet was not told that a host refuses calls", error)
        return seconds

    async def _strictest(self, limits: Sequence[HostRule]) -> HostRule:
        """Return the rule that allows the fewest calls in flight now."""
        if len(limits) == 1:
            return limits[0]
        states = await self._pacing.state([rule.key for rule in limits])
        nothing = HostState()
        return min(limits, key=lambda rule: states.get(rule.key, nothing).ceiling or rule.limit)

    async def served(self, job: Job, url: str) -> None:
        """Let the lowered ceiling of a host that answered grow by one."""
        host = host_and_port(url)
        try:
            for rule in self._policies.rules_of(host, job.caller, job.politeness):
                if rule.limit:
                    await self._pacing.lift(rule.key, rule.limit)
        except ConveyorError as error:
            log_failure(_log, "the ceiling of a host was not raised", error)

    async def _paced(self, job: Job, delay: HostDelay) -> float:
        """Let the calls of a caller to a host be as far apart as the host wants; return the longest
        delay that was told lately."""
        key, now = host_key(delay.host, job.caller), self._clock.monotonic()
        interval, told_at = self._told.get(key, (0.0, now))
        if now - told_at < TELL_EVERY and delay.interval <= interval:
            return interval
        try:
            await self._pacing.slow(key, delay.interval, delay.seconds)
            self._told[key] = delay.interval, now
        except ConveyorError as error:
            log_failure(_log, "the fleet was not told of the pace of a host", error)
        return delay.interval


def _robots_unread() -> ScrapeFailed:
    """Return the failure of a task that asks for robots.txt where the gateway cannot heed it."""
    title = "robots.txt is heeded by the gateway direct alone, with the extra [robots]"
    failed = ScrapeFailed(Problem("robots_unsupported", title, 422), TaskFailure.BAD_TARGET)
    failed.sent = 0
    return failed
