"""Hosts that refuse calls, where a policy holds: they are closed for the whole fleet, or their
ceiling on calls in flight is lowered, and grows again with each success."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from cachetools import LRUCache

from conveyor.aio.resilience import log_failure
from conveyor.domain.backoff import Backoff
from conveyor.domain.errors import ConveyorError
from conveyor.domain.hosts import HostPolicies, host_and_port, host_key, paces
from conveyor.domain.model import Job, Problem, TaskFailure, WaitReason
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import HostPace, HostRefusal, Postponed
from conveyor.ports.pacing import Pacing

MOST_LOWERED = 5_000
"""Hosts with a lowered ceiling that a worker remembers."""
SPREAD = 1.0
"""Seconds over which the first calls after the end of a pause are spread."""

_log = logging.getLogger("conveyor.hosts")


@dataclass(slots=True)
class _Lowered:
    """A ceiling below `limit`, which this worker lowered last at that monotonic second."""

    limit: int
    lowered_at: float = -math.inf


class HostAnswers:
    """Heeds what hosts answer to the calls of runs that have a policy."""

    def __init__(
        self, policies: HostPolicies, pacing: Pacing, clock: Clock, *, backoff: Backoff
    ) -> None:
        self._policies = policies
        self._pacing = pacing
        self._clock = clock
        self._backoff = backoff
        self._lowered: LRUCache[str, _Lowered] = LRUCache(MOST_LOWERED)

    async def admit(self, job: Job, url: str) -> None:
        """Raise Postponed for a call to a host that is closed. Raises ConveyorError(unavailable) if
        the ledger does not answer."""
        if not self._policies.hold(job.politeness):
            return
        host = host_and_port(url)
        rules = self._policies.rules_of(host, job.caller, job.politeness)
        if not rules:
            return
        keys = paces(rules, host, job.caller)
        states = await self._pacing.state(keys)
        for rule in rules:
            state = states.get(rule.key)
            if state is None or not state.ceiling:
                self._lowered.pop(rule.key, None)
            elif rule.key not in self._lowered:
                self._lowered[rule.key] = _Lowered(rule.limit)
        if closed_for := max((state.closed_for for state in states.values()), default=0.0):
            raise _closed(closed_for + SPREAD * self._clock.random())

    async def refused(self, job: Job, refusal: HostRefusal, *, began: float) -> float | None:
        """Close a host that refused a call, or lower its ceiling if it did not say for how long;
        one that has none, or the lowest, is closed for a backoff. Return the seconds for which it
        is closed, None where no policy holds. `began`: the monotonic second of the call."""
        rules = self._policies.rules_of(refusal.host, job.caller, job.politeness)
        if not rules:
            return None
        key = host_key(refusal.host, job.caller) if refusal.is_private else rules[0].key
        limit = next((rule.limit for rule in rules if rule.key == key), 0)
        seconds = max(refusal.seconds or 0.0, self._backoff.spread(1, self._clock.random()))
        try:
            if refusal.seconds is None and await self._lower(key, limit, began):
                return 0.0
            await self._pacing.close(key, seconds)
        except ConveyorError as error:
            log_failure(_log, "the fleet was not told that a host refuses calls", error)
        return seconds

    async def served(self, job: Job, url: str) -> None:
        """Let the ceiling of a host that answered grow by one, if it was lowered."""
        if not self._lowered:
            return
        host = host_and_port(url)
        try:
            for rule in self._policies.rules_of(host, job.caller, job.politeness):
                if rule.key in self._lowered:
                    await self._pacing.lift(rule.key, self._lowered[rule.key].limit)
        except ConveyorError as error:
            log_failure(_log, "the ceiling of a host was not raised", error)

    async def paced(self, job: Job, pace: HostPace) -> None:
        """Let the calls of a caller to a host be as far apart as the host wants."""
        try:
            key = host_key(pace.host, job.caller)
            await self._pacing.slow(key, pace.interval, pace.seconds)
        except ConveyorError as error:
            log_failure(_log, "the fleet was not told of the pace of a host", error)

    async def _lower(self, key: str, limit: int, began: float) -> bool:
        """Lower a ceiling, once for calls that were in flight together; return whether that leaves
        room for less."""
        if limit <= 1:
            return False
        known = self._lowered.setdefault(key, _Lowered(limit))
        if known.lowered_at > began:
            return True
        known.lowered_at = self._clock.monotonic()
        return await self._pacing.lower(key, limit) > 1


def _closed(seconds: float) -> Postponed:
    """Return the verdict on a call to a host that is closed."""
    failure = TaskFailure.RATE_LIMITED
    problem = Problem(failure.value, "the host asked for a pause", 429)
    reason = WaitReason.HOST_RETRY_AFTER
    return Postponed(problem, failure, retry_after=seconds, waiting=reason)
